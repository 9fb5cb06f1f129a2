"""What a client does with the leases that it holds: load, use, resize, come back, renew, give back. What its engines
use stands in the shared table; whatever happens to it that must not happen is a fault in its log.

Its engines are real processes that end when it does, a moment later: bytes outlive their client by that much.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity
from weighbridge_proto.channel import open_channel
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2, ledger_service_pb2_grpc
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import requirement_pb2

from services.ledger.tests.torture.quick_ledger import GRACE_S, TERM_S
from services.ledger.tests.torture.table import CARDS, ROWS, Row, Table

GIB = 2**30
BEAT_S = TERM_S / 4
PATIENCE_S = 5.0
"""For one verb: a ledger that was killed answers nobody."""

PASSING = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"})
"""Codes of calls that a killed ledger, or this client itself, cut off: nobody knows what became of them."""

EXPECTED = frozenset(
    {
        "ADMISSION_TIMED_OUT",
        "CANNOT_GROW",
        "GRANT_NOT_ACTIVATED",
        "LEASE_NOT_FOUND",
        "LEASE_SUSPECT",
        "LEASE_VACATING",
        "QUEUE_FULL",
        "REQUEST_ENDED",
        "WAIT_WHILE_HOLDING",
    }
)
"""Answers that a holder which keeps the rules may get to a verb. That a lease is not found is judged where it is known
whether that can be."""

ALSO_EXPECTED = {
    "stale": ("LEASE_SECRET_MISMATCH",),
    # It names another lease of this client, whose secret is replaced at that moment, or which another claim replaces.
    "admit": ("LEASE_SECRET_MISMATCH", "LEASE_STATE"),
    "admit again": ("LEASE_SECRET_MISMATCH", "LEASE_STATE"),
}


class FaultError(Exception):
    """The ledger did what it must never do."""


@dataclass(eq=False)
class Held:
    """An activated lease."""

    row: int
    lease_id: str
    secret: str
    claim: requirement_pb2.Claim
    exclusive: bool
    charge: requirement_pb2.Charge
    using: requirement_pb2.Charge | None = None
    """What its engine uses: never more than the charge."""
    engine: subprocess.Popen[bytes] | None = None
    engine_identity: ProcessIdentity | None = None
    recorded: bool = False
    """Whether the ledger knows of an engine that lives."""
    secrets_before: list[str] = field(default_factory=list)
    uses: list[str] = field(default_factory=list)
    renewed: float = 0.0
    """When the last renewal that was answered had been sent."""
    sent: deque[float] = field(default_factory=deque)
    fencing: bool = False
    over: bool = False
    """Its end was sent: whatever is said of it now is right."""
    verbs: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One verb after the other: each needs the secret that the one before it left."""


class Holder:
    """A client as far as it holds leases."""

    def __init__(self, folder: Path, number: int, seed: int, *, foreign: bool) -> None:
        self.table = Table(folder / "table")
        self.number = number
        self.dice = random.Random(seed)
        self.foreign = foreign
        self.me = processes.current()
        self.log = os.open(folder / f"client-{number}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.channel = open_channel(f"unix:{folder}/run/ledger.sock")
        self.stub = ledger_service_pb2_grpc.LedgerServiceStub(self.channel)
        self.held: list[Held] = []
        self.rows = set(range(ROWS))
        self.beats: grpc.aio.StreamStreamCall | None = None
        self.reading: asyncio.Task[None] | None = None
        self.beating = asyncio.Lock()
        self.silent_until = 0.0
        self.tasks: set[asyncio.Task[None]] = set()

    # -- what is noted ---------------------------------------------------------------------------------------------

    def _note(self, **what: object) -> None:
        os.write(self.log, (json.dumps(what) + "\n").encode())

    async def _guarded(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self._note(fault=f"{type(error).__name__}: {error}")

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.create_task(self._guarded(work))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _attempt(self, verb: Callable[[Held], Awaitable[None]], held: Held) -> None:
        try:
            await verb(held)
        except grpc.aio.AioRpcError as error:
            await self._take(error, held)
        except FaultError as fault:
            self._note(fault=str(fault))

    async def _take(self, error: grpc.aio.AioRpcError, held: Held) -> None:
        """Act on the answer no."""
        failure = RpcFailure.from_rpc_error(error)
        if failure.reason == "LEASE_SUSPECT" and not held.over:
            await self._attach(held)
        elif failure.reason == "LEASE_NOT_FOUND" and not held.over:
            self._lost(held)

    async def _verb(self, name: str, call: Awaitable[object]) -> object:
        """Send a verb, note what came of it, and count it if it was answered."""
        outcome = "OK"
        try:
            answer = await call
            self.table.count_operation(self.number)
            return answer
        except grpc.aio.AioRpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            outcome = failure.reason or failure.code.name
            if failure.code.name in PASSING:
                await asyncio.sleep(0.2 + self.dice.random())  # until the ledger is there again
            else:
                self.table.count_operation(self.number)
                if outcome not in EXPECTED and outcome not in ALSO_EXPECTED.get(name, ()):
                    self._note(fault=f"{name}: {failure}")
            raise
        finally:
            self._note(verb=name, outcome=outcome)

    def _lost(self, held: Held) -> None:
        """The lease is gone although its holder lives and wants it: its engine must end at once."""
        silent_s = time.monotonic() - held.renewed
        self._end_engine(held)
        self._forget(held)
        if not (self.foreign and silent_s > TERM_S):
            self._note(fault=f"lease {held.lease_id} was given away under its holder, silent for {silent_s:.1f} s")

    def _identity(self, process: ProcessIdentity) -> ProcessIdentity:
        """Foreign clients live in another pid namespace, as far as the ledger is told."""
        return replace(process, pid_namespace="pid:[elsewhere]") if self.foreign else process

    # -- holding ---------------------------------------------------------------------------------------------------

    async def _load(self, held: Held) -> None:
        """Start the engine at its gate, record it, let it allocate, say that it has loaded."""
        async with held.verbs:
            held.engine, held.engine_identity = _start_engine()
            activation = pb.ActivateLeaseRequest(
                lease_id=held.lease_id,
                secret=held.secret,
                process=self._identity(self.me).to_message(),
                engine_processes=[self._identity(held.engine_identity).to_message()],
            )
            try:
                await self._verb("record engine", self.stub.ActivateLease(activation, timeout=PATIENCE_S))
            except grpc.aio.AioRpcError:
                self._end_engine(held)
                self._start(self._give_back(held))
                raise
            held.recorded = True
            self._allocate(held)
        if (found := self.table.double_use()) is not None:
            raise FaultError(f"double use: {found}")
        await self._beat(held, load_complete=True)

    async def _use(self, held: Held) -> None:
        async with held.verbs:
            await self._begin_or_end_use(held)

    async def _begin_or_end_use(self, held: Held) -> None:
        if held.uses and self.dice.random() < 0.6:
            use = held.uses.pop()
            request = pb.EndUseRequest(lease_id=held.lease_id, secret=held.secret, use_id=use)
            await self._verb("end use", self.stub.EndUse(request, timeout=PATIENCE_S))
            return
        use = f"use-{self.dice.random()}"
        begin = pb.BeginUseRequest(lease_id=held.lease_id, secret=held.secret, use_id=use)
        await self._verb("begin use", self.stub.BeginUse(begin, timeout=PATIENCE_S))
        held.uses.append(use)

    async def _shrink(self, held: Held) -> None:
        """Give the optional bytes back, as asked."""
        held.claim.optional_host_bytes = 0
        for want in held.claim.devices:
            want.optional_bytes = 0
        await self._resize(held)

    async def _resize(self, held: Held) -> None:
        """Free everything, ask for another size, and use what is answered: so growing and shrinking are one."""
        async with held.verbs:
            if held.over or held.engine is None or len(held.claim.devices) > 1:
                return
            wanted = requirement_pb2.Claim()
            wanted.CopyFrom(held.claim)
            for want, card in zip(wanted.devices, held.charge.devices, strict=False):
                want.device_id = card.device_id
                want.required_bytes = max(GIB, want.required_bytes + self.dice.choice([-2, 0, 1]) * GIB)
            wanted.host_bytes = max(
                0 if wanted.devices else GIB, wanted.host_bytes + self.dice.choice([-2, 0, 1]) * GIB
            )
            request = pb.ResizeLeaseRequest(lease_id=held.lease_id, secret=held.secret, claim=wanted)
            if wanted.devices and self.dice.random() < 0.2:
                request.exclusive = not held.exclusive
            self._uses(held, None)
            response = await self._verb("resize", self.stub.ResizeLease(request, timeout=PATIENCE_S))
            assert isinstance(response, pb.ResizeLeaseResponse)
            held.claim, held.exclusive, held.charge = wanted, response.lease.exclusive, response.lease.charge
            self._allocate(held)

    async def _attach(self, held: Held) -> None:
        """Come back after silence, or without any reason."""
        async with held.verbs:
            await self._attach_until_answered(held)

    async def _attach_until_answered(self, held: Held) -> None:
        request = pb.AttachLeaseRequest(
            lease_id=held.lease_id, process=self._identity(self.me).to_message(), secret=held.secret
        )
        while True:
            sent = time.monotonic()
            try:
                response = await self._verb("attach", self.stub.AttachLease(request, timeout=PATIENCE_S))
            except grpc.aio.AioRpcError as error:
                failure = RpcFailure.from_rpc_error(error)
                if failure.code.name not in PASSING:
                    if failure.reason == "LEASE_NOT_FOUND" and not held.over:
                        self._lost(held)
                    return
                await asyncio.sleep(BEAT_S)
                continue
            assert isinstance(response, pb.AttachLeaseResponse)
            held.secrets_before.append(held.secret)
            held.secret, held.renewed = response.secret, sent
            if response.lease.state == lease_pb2.LEASE_STATE_VACATING:
                self._start(self._give_back(held))
            return

    async def _stale(self, held: Held) -> None:
        """A secret that is void must change nothing."""
        if not held.secrets_before or held.over:
            return
        request = pb.ReleaseLeaseRequest(lease_id=held.lease_id, secret=self.dice.choice(held.secrets_before))
        try:
            await self._verb("stale", self.stub.ReleaseLease(request, timeout=PATIENCE_S))
        except grpc.aio.AioRpcError as error:
            if RpcFailure.from_rpc_error(error).reason == "LEASE_NOT_FOUND":
                raise
        else:
            raise FaultError("a void secret released a lease")

    # -- giving back -----------------------------------------------------------------------------------------------

    async def _give_back(self, held: Held) -> None:
        """End the engine and the lease, in one order or the other."""
        if held.over:
            return
        held.over = True
        async with held.verbs:
            # An engine of another pid namespace cannot be seen: its holder is believed, so it ends first (rule 13).
            if not self.foreign and self.dice.random() < 0.3:
                await self._release(held)
                await asyncio.sleep(self.dice.random() / 2)
                self._end_engine(held)
            else:
                self._end_engine(held)
                await self._release(held)
            self._forget(held)

    async def _release(self, held: Held) -> None:
        """Say that it is over, until that is answered (rule 7)."""
        while True:
            request = pb.ReleaseLeaseRequest(lease_id=held.lease_id, secret=held.secret)
            try:
                response = await self._verb("release", self.stub.ReleaseLease(request, timeout=PATIENCE_S))
                assert isinstance(response, pb.ReleaseLeaseResponse)
                if held.recorded and not self.foreign and response.lease.state != lease_pb2.LEASE_STATE_VACATING:
                    raise FaultError("bytes were freed under a living engine")
                return
            except grpc.aio.AioRpcError as error:
                if RpcFailure.from_rpc_error(error).code.name not in PASSING:
                    return
                await asyncio.sleep(0.1)

    def _end_engine(self, held: Held) -> None:
        """Its bytes are free when this returns."""
        self._uses(held, None)
        if held.engine is not None:
            assert held.engine.stdin is not None
            held.engine.stdin.close()
            held.engine.kill()
            held.engine.wait()
            held.engine = None
            held.recorded = False

    def _forget(self, held: Held) -> None:
        held.over = True
        if held in self.held:
            self.held.remove(held)
            self.rows.add(held.row)

    def _allocate(self, held: Held) -> None:
        """Use what is charged, unless the engine was ended meanwhile: its holder was silent, or has lost the lease."""
        if held.engine is not None:
            self._uses(held, held.charge)

    def _uses(self, held: Held, charge: requirement_pb2.Charge | None) -> None:
        """Write into the table what the lease's engine uses."""
        row = Row()
        if charge is not None:
            assert held.engine_identity is not None
            cards = {card.device_id: card.bytes for card in charge.devices}
            row = Row(
                charge.host_bytes,
                *(cards.get(card, 0) for card in CARDS),
                int(held.exclusive),
                self.me.pid,
                self.me.start_time,
                held.engine_identity.pid,
                held.engine_identity.start_time,
            )
        held.using = charge
        self.table.write(self.number, held.row, row)

    # -- renewing --------------------------------------------------------------------------------------------------

    async def _beat_for_ever(self) -> None:
        while True:
            await self._guarded(self._beat_once())
            await asyncio.sleep(BEAT_S)

    async def _beat_once(self) -> None:
        if self.foreign and self.dice.random() < 0.1:
            # Its machine is cut off for longer than its term.
            self.silent_until = time.monotonic() + TERM_S + 1
        for held in [held for held in self.held if not held.over]:
            if self.foreign and time.monotonic() - held.renewed > TERM_S:
                self._start(self._fence(held))
            elif time.monotonic() >= self.silent_until:
                await self._beat(held)

    async def _fence(self, held: Held) -> None:
        """Nobody can see whether it lives: it ends its engine by itself, which takes a while (rule 12)."""
        if not held.fencing:
            held.fencing = True
            await asyncio.sleep(self.dice.random() * GRACE_S / 2)
            self._end_engine(held)
            await self._give_back(held)

    async def _beat(self, held: Held, *, load_complete: bool = False) -> None:
        """Renew one lease, over a stream that is opened again when it is lost."""
        async with self.beating:
            if self.beats is None or self.beats.done():
                for other in self.held:
                    other.sent.clear()
                self.beats = self.stub.KeepAlive()
                self.reading = asyncio.create_task(self._guarded(self._read_answers(self.beats)))
            request = pb.KeepAliveRequest(lease_id=held.lease_id, secret=held.secret, load_complete=load_complete)
            used = 0 if held.using is None else held.using.host_bytes
            # Now and then more than was granted: it grows by that, or is told to come back beneath its grant.
            request.observed.host_bytes = used + (GIB if self.dice.random() < 0.02 else 0)
            held.sent.append(time.monotonic())
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self.beats.write(request)

    async def _read_answers(self, beats: grpc.aio.StreamStreamCall) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for answer in beats:
                held = next((held for held in self.held if held.lease_id == answer.lease_id), None)
                if held is not None and not held.over:
                    self._note(told=answer.WhichOneof("event"))
                    self._on_answer(held, answer)

    def _on_answer(self, held: Held, answer: pb.KeepAliveResponse) -> None:
        if answer.HasField("vacate"):
            self._start(self._vacate(held))
        elif answer.HasField("shrink"):
            self._start(self._attempt(self._shrink, held))
        elif answer.HasField("renewed"):
            if held.sent:
                held.renewed = held.sent.popleft()
        else:
            self._start(self._on_failure(held, answer.failure.reason))

    async def _on_failure(self, held: Held, reason: str) -> None:
        if reason == "LEASE_SUSPECT":
            await self._attach(held)
        elif reason == "LEASE_NOT_FOUND" and not held.over:
            self._lost(held)
        elif reason == "OUT_OF_GRANT":
            await self._give_back(held)

    async def _vacate(self, held: Held) -> None:
        """Make room, most of the time before the deadline."""
        await asyncio.sleep(self.dice.choice([0, 0, 0.5, 3]))
        await self._give_back(held)


def _start_engine() -> tuple[subprocess.Popen[bytes], ProcessIdentity]:
    """A process that outlives this one by a moment."""
    engine = subprocess.Popen(["sh", "-c", "read _; sleep 0.1"], stdin=subprocess.PIPE)
    identity = processes.identify(engine.pid)
    assert identity is not None
    return engine, identity
