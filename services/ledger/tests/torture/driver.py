"""Torments a ledger and its clients, all of them processes: kills and stops them while they work, and looks at what
must hold at every moment and at the end."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.json_format import MessageToJson
from weighbridge import Suite
from weighbridge.following import Interruption, follow
from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Ceilings
from weighbridge_ledger.tools.audit import Finding
from weighbridge_ledger.tools.check import check
from weighbridge_proto.channel import open_channel
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.ledger.v1 import ledger_service_pb2_grpc

from services.ledger.tests.torture.quick_ledger import GRACE_S, TERM_S, QuickSettings
from services.ledger.tests.torture.table import CARDS, CEILINGS, MACHINE, Table

ROOT = Path(__file__).parents[4]
"""The repository: its processes are started as modules of it."""

CLIENTS = 16
FOREIGN = 3
"""So many of them say that they live in another pid namespace: the ledger cannot see whether they do."""

OPERATIONS_PER_BLOW = 15
"""By operations, not by time: a fast machine is tortured as much as a slow one."""

POLL_S = 0.02
PATIENCE_S = 60.0
"""A bound for what would hang, not an expectation."""


@dataclass
class Figures:
    """What was done, and what was seen."""

    operations: int = 0
    """Verbs that were answered."""
    blows: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(verb, what came of it)."""
    told: Counter[str] = field(default_factory=Counter)
    """What holders were told over KeepAlive."""
    faults: list[str] = field(default_factory=list)
    unsound: list[Finding] = field(default_factory=list)
    """What `check` found in the store after a kill."""
    changes: list[str] = field(default_factory=list)
    """What a watch was told, over every kill, as `weighbridge watch --json` prints it."""
    left_bytes: int = 0
    """What was still committed when everybody had ended and a term and the grace had passed."""
    took_s: float = 0.0

    def summary(self) -> str:
        """In words, for whoever has waited for it."""
        outcomes = ", ".join(f"{verb} {what} {count}" for (verb, what), count in sorted(self.outcomes.items()))
        blows = ", ".join(f"{blow} {count}" for blow, count in sorted(self.blows.items()))
        told = ", ".join(f"{what} {count}" for what, count in sorted(self.told.items()))
        return (
            f"{self.operations} verbs in {self.took_s:.0f} s; {blows}; {len(self.changes)} changes were told.\n"
            f"{outcomes}.\nOver KeepAlive: {told}."
        )


@dataclass
class Member:
    """One client that was started and not killed."""

    number: int
    identity: ProcessIdentity
    foreign: bool
    stopped: bool = False


class Ledger:
    """The ledger's process, killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.database = folder / "data" / "ledger.db"
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")},
            "WEIGHBRIDGE_RUN_DIR": str(folder / "run"),
            "WEIGHBRIDGE_LEDGER_DATA_DIR": str(folder / "data"),
            "WEIGHBRIDGE_LEDGER_MACHINE": MACHINE,
            "WEIGHBRIDGE_LEDGER_GRACE_S": "1",
        }
        self.process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "services.ledger.tests.torture.quick_ledger"]
        return subprocess.Popen(command, env=self.environ, cwd=ROOT)

    async def kill(self) -> tuple[Finding, ...]:
        """SIGKILL, look into what it left, start it again."""
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        ceilings = Ceilings(CEILINGS["host"], {card: CEILINGS[card] for card in CARDS})
        report = check(self.database, ceilings, QuickSettings().policy())
        self.process = self._start()
        return report.findings

    async def end(self) -> int:
        """SIGTERM, and its exit code."""
        self.process.terminate()
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)


class Herd:
    """The clients: forked by a process that has imported everything."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.table = Table(folder / "table")
        self.dice = dice
        self.members: list[Member] = []
        command = [sys.executable, "-m", "services.ledger.tests.torture.client", str(folder)]
        self.forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)

    def add(self, *, foreign: bool) -> None:
        """One more client."""
        assert self.forker.stdin is not None
        assert self.forker.stdout is not None
        number = self.table.admit_client()
        self.forker.stdin.write(f"{number} {self.dice.randrange(2**32)} {int(foreign)}\n")
        self.forker.stdin.flush()
        identity = processes.identify(int(self.forker.stdout.readline()))
        assert identity is not None, "a client ended as soon as it began"
        self.members.append(Member(number, identity, foreign))

    def kill(self, member: Member) -> None:
        """SIGKILL one, and let another one come."""
        self.members.remove(member)
        self._signal(member, signal.SIGKILL)
        self.add(foreign=member.foreign)

    async def stop(self, member: Member) -> None:
        """SIGSTOP one for a moment, or for longer than its term; some are killed before they go on."""
        member.stopped = True
        self._signal(member, signal.SIGSTOP)
        await asyncio.sleep(self.dice.choice([0.2, TERM_S + 1.5]))
        if member in self.members:
            if self.dice.random() < 0.3:
                self.kill(member)
            else:
                self._signal(member, signal.SIGCONT)
                member.stopped = False

    def _signal(self, member: Member, number: signal.Signals) -> None:
        if processes.is_alive(member.identity):
            os.kill(member.identity.pid, number)

    async def finish(self) -> None:
        """Let everybody go on, give back what they hold, and end."""
        self.table.finish()
        for member in self.members:
            self._signal(member, signal.SIGCONT)
        for _ in range(round(PATIENCE_S / POLL_S)):
            if not any(processes.is_alive(member.identity) for member in self.members):
                return
            await asyncio.sleep(POLL_S)
        raise AssertionError("a client does not end")

    def close(self) -> None:
        """Leave nobody behind."""
        for member in self.members:
            self._signal(member, signal.SIGKILL)
        self.forker.kill()
        self.forker.wait()
        for pipe in (self.forker.stdin, self.forker.stdout):
            assert pipe is not None
            pipe.close()


async def torture(folder: Path, operations: int, seed: int) -> Figures:
    """Let the clients send so many verbs, with a blow after every few, and give everything back."""
    figures = Figures()
    began = time.monotonic()
    dice = random.Random(seed)
    async with _ledger(folder) as ledger, _herd(folder, dice) as herd:
        await _committed(folder)
        recording = asyncio.create_task(_record(ledger.environ, figures.changes))
        for number in range(CLIENTS):
            herd.add(foreign=number < FOREIGN)
        stops: set[asyncio.Task[None]] = set()
        blows, before, moved = 0, 0, time.monotonic()
        while (done := herd.table.operations) < operations:
            if done != before:
                before, moved = done, time.monotonic()
            assert time.monotonic() - moved < PATIENCE_S, "nobody does anything any more"
            assert not recording.done(), f"a watch goes on over every kill: {recording}"
            if (found := herd.table.double_use()) is not None:
                figures.faults.append(f"double use: {found}")
            if done >= (blows + 1) * OPERATIONS_PER_BLOW:
                blows += 1
                await _strike(herd, ledger, figures, stops)
            await asyncio.sleep(POLL_S)
        await asyncio.gather(*stops)
        await herd.finish()
        figures.operations = herd.table.operations
        figures.left_bytes = await _left(folder)
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)
        assert await ledger.end() == 0
    _read_logs(folder, figures)
    figures.took_s = time.monotonic() - began
    return figures


async def _strike(herd: Herd, ledger: Ledger, figures: Figures, stops: set[asyncio.Task[None]]) -> None:
    blow = herd.dice.choices(["client killed", "client stopped", "ledger killed"], [5, 4, 2])[0]
    going = [member for member in herd.members if not member.stopped]
    figures.blows[blow] += 1
    if blow == "ledger killed":
        figures.unsound += await ledger.kill()
    elif blow == "client killed":
        herd.kill(herd.dice.choice(herd.members))
    else:
        # A foreign holder that stands still cannot fence itself, and its engine would not stand still with it.
        task = asyncio.create_task(herd.stop(herd.dice.choice([member for member in going if not member.foreign])))
        stops.add(task)
        task.add_done_callback(stops.discard)


async def _left(folder: Path) -> int:
    """What is committed once a term and the grace have passed for whoever was killed last."""
    waited_s = 0.0
    # A restart makes a term up to twice as long (rule 14).
    while (committed := await _committed(folder)) and waited_s <= 2 * TERM_S + GRACE_S:
        await asyncio.sleep(0.5)
        waited_s += 0.5
    return committed


async def _committed(folder: Path) -> int:
    """What is committed, said by a ledger that may still be starting."""
    channel = open_channel(f"unix:{folder}/run/ledger.sock")
    try:
        stub = ledger_service_pb2_grpc.LedgerServiceStub(channel)
        answer = await stub.GetCapacity(pb.GetCapacityRequest(), wait_for_ready=True, timeout=PATIENCE_S)
        return int(answer.capacity.total.committed_bytes)
    finally:
        await channel.close()


async def _record(environ: dict[str, str], told: list[str]) -> None:
    """What an operator's watch prints, over every kill."""
    async with Suite(environ, patience_s=PATIENCE_S) as suite:
        async for change in follow(suite):
            if isinstance(change, Interruption):
                told.append(json.dumps({"note": {"reason": change.reason}}))
            else:
                told.append(MessageToJson(change, preserving_proto_field_name=True, indent=None))


def _read_logs(folder: Path, figures: Figures) -> None:
    for path in sorted(folder.glob("client-*.log")):
        for line in path.read_text().splitlines():
            noted = json.loads(line)
            if "fault" in noted:
                figures.faults.append(f"{path.stem}: {noted['fault']}")
            elif "told" in noted:
                figures.told[noted["told"]] += 1
            else:
                figures.outcomes[noted["verb"], noted["outcome"]] += 1


@asynccontextmanager
async def _ledger(folder: Path) -> AsyncIterator[Ledger]:
    ledger = Ledger(folder)
    try:
        yield ledger
    finally:
        if ledger.process.poll() is None:
            ledger.process.kill()
            ledger.process.wait()


@asynccontextmanager
async def _herd(folder: Path, dice: random.Random) -> AsyncIterator[Herd]:
    herd = Herd(folder, dice)
    try:
        yield herd
    finally:
        herd.close()
