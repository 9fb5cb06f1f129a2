"""One client as a process: it asks for leases, takes them up, holds them and cancels at random, until it is killed or
told to end."""

import asyncio
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import grpc
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import requirement_pb2

from services.ledger.tests.torture.holder import GIB, PATIENCE_S, FaultError, Held, Holder
from services.ledger.tests.torture.table import CARDS


class Client(Holder):
    """One client. `run` returns when it was asked to end and has given everything back."""

    asked = 0

    async def run(self) -> None:
        """Do something, again and again."""
        beating = asyncio.create_task(self._beat_for_ever())
        while not self.table.finishing:
            if self.rows and self.dice.random() < 0.3:
                self._start(self._one_claim(self.rows.pop()))
            elif living := [held for held in self.held if not held.over]:
                verbs = [self._use] * 6 + [self._resize] * 4 + [self._attach, self._stale, self._give_back]
                verb = self.dice.choice(verbs)
                await self._attempt(verb, self.dice.choice(living))
            await asyncio.sleep(self.dice.random() * 0.1)
        while self.tasks:
            await asyncio.wait(self.tasks)
        for held in list(self.held):
            await self._give_back(held)
        while self.tasks:
            await asyncio.wait(self.tasks)
        for task in filter(None, (beating, self.reading)):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.channel.close()

    # -- asking ----------------------------------------------------------------------------------------------------

    def _claim(self) -> requirement_pb2.Claim:
        dice = self.dice
        host = dice.choice([0, 0, 1, 2, 4, 12])
        claim = requirement_pb2.Claim(host_bytes=host * GIB)
        if dice.random() < 0.3:
            claim.optional_host_bytes = dice.choice([1, 4]) * GIB
        kind = dice.choice(["host", "any card", "card", "both"])
        if kind == "host" and not host:
            claim.host_bytes = GIB
        for card in {"host": [], "any card": [""], "card": [dice.choice(CARDS)], "both": list(CARDS)}[kind]:
            wanted = claim.devices.add(device_id=card, required_bytes=dice.choice([1, 2, 3, 6, 12, 22]) * GIB)
            if dice.random() < 0.3:
                wanted.optional_bytes = 4 * GIB
        return claim

    def _request(self) -> pb.AdmitRequest:
        dice = self.dice
        self.asked += 1
        claim = self._claim()
        request = pb.AdmitRequest(
            request_id=f"{self.me.pid}-{self.me.start_time}-{self.asked}" if dice.random() < 0.8 else "",
            holder={"name": f"client-{self.number}", "process": self._identity(self.me).to_message()},
            claim=claim,
            priority=dice.choice(
                [lease_pb2.PRIORITY_BACKGROUND, lease_pb2.PRIORITY_NORMAL, lease_pb2.PRIORITY_INTERACTIVE]
            ),
            exclusive=len(claim.devices) > 0 and dice.random() < 0.2,
            pinned=dice.random() < 0.1,
        )
        request.max_wait.FromMilliseconds(dice.randint(50, 5000))
        mine = [held for held in self.held if not held.over]
        if mine and dice.random() < 0.3:
            old = dice.choice(mine)
            credential = pb.LeaseCredential(lease_id=old.lease_id, secret=old.secret)
            if dice.random() < 0.6:
                request.replaces_lease.CopyFrom(credential)
            else:
                request.while_holding.append(credential)
        return request

    async def _one_claim(self, row: int) -> None:
        """Ask for a lease and take it up, unless something comes in between."""
        request, held = self._request(), None
        try:
            held = await self._admit("admit", request, row)
            if held is None and request.request_id and self.dice.random() < 0.5:
                held = await self._admit("admit again", request, row)
        finally:
            if held is None:
                self.rows.add(row)
        if held is not None:
            self.held.append(held)
            await self._attempt(self._load, held)

    async def _admit(self, name: str, request: pb.AdmitRequest, row: int) -> Held | None:
        """A lease that is granted and activated; None: refused, cut off, or this client went away first."""
        call = self.stub.Admit(request, timeout=10, wait_for_ready=True)
        gone_after_s = self.dice.random() * 2 if self.dice.random() < 0.2 else None
        try:
            async with asyncio.timeout(gone_after_s):
                granted = await self._verb(name, _granted(call))
            if self.dice.random() < 0.05:
                return None
            return await self._activate(request, granted, row)
        except (TimeoutError, grpc.aio.AioRpcError):
            return None
        finally:
            call.cancel()

    async def _activate(self, request: pb.AdmitRequest, granted: pb.AdmitGranted, row: int) -> Held | None:
        lease = granted.lease
        held = Held(row, lease.lease_id, granted.secret, request.claim, request.exclusive, lease.charge)
        held.renewed = time.monotonic()
        me = self._identity(self.me).to_message()
        activation = pb.ActivateLeaseRequest(lease_id=lease.lease_id, secret=granted.secret, process=me)
        try:
            await self._verb("activate", self.stub.ActivateLease(activation, timeout=PATIENCE_S))
        except grpc.aio.AioRpcError as error:
            # It may have arrived: who sent it owes a release, unless it was told that there is no such lease (rule 7).
            if RpcFailure.from_rpc_error(error).code is not grpc.StatusCode.NOT_FOUND:
                held.over = True
                await self._release(held)
            return None
        return held


async def _granted(call: grpc.aio.UnaryStreamCall) -> pb.AdmitGranted:
    async for response in call:
        if response.WhichOneof("event") == "granted":
            return response.granted
    raise FaultError("an Admit stream ended without a grant or a reason")


async def _live(folder: Path, number: int, seed: int, *, foreign: bool) -> None:
    # A channel belongs to the loop in which it is made.
    await Client(folder, number, seed, foreign=foreign).run()


def main(folder: Path) -> None:
    """Fork a client for each line `number seed foreign` of stdin, and answer with its pid.

    A client that is forked from a process that has imported everything starts in milliseconds instead of seconds, so
    that many can be killed. Nothing of gRPC is running yet when it is forked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them: the dead leave no zombies
    for line in sys.stdin:
        number, seed, foreign = map(int, line.split())
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.close(0)
            try:
                asyncio.run(_live(folder, number, seed, foreign=bool(foreign)))
            except BaseException:
                with (folder / f"client-{number}.log").open("a") as log:
                    log.write(json.dumps({"fault": traceback.format_exc()}) + "\n")
            finally:
                os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
