"""Clients that ask, hold, resize, cancel and release at random while the ledger is killed again and again.

WEIGHBRIDGE_TORTURE_OPERATIONS sets how many leases are asked for (default 150).
"""

import asyncio
import json
import os
import random
import signal

import grpc
from google.protobuf.json_format import MessageToJson
from weighbridge import Suite
from weighbridge.following import Interruption, follow
from weighbridge_common import processes
from weighbridge_ledger.book import Ceilings, Policy
from weighbridge_ledger.tools.check import check
from weighbridge_ledger.tools.recording import play
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb

GIB = 2**30
CEILING_GIB = 48  # unified:64
CLIENTS = 12
CLAIMS_PER_KILL = 30
"""By claims, not by time: a fast machine is tortured as much as a slow one."""


class Holders:
    """What the clients together believe to hold: the sum that must never exceed the machine."""

    def __init__(self) -> None:
        self.held_gib = 0
        self.most_gib = 0
        self.activated = 0
        self.refused: dict[str, int] = {}

    def take(self, gib: int) -> None:
        self.held_gib += gib
        self.most_gib = max(self.most_gib, self.held_gib)
        self.activated += 1
        assert self.held_gib <= CEILING_GIB, "double use"

    def count(self, failure: RpcFailure) -> None:
        self.refused[failure.reason] = self.refused.get(failure.reason, 0) + 1


async def record(environ: dict[str, str], told: list[str]) -> None:
    """What an operator's watch prints, over every kill."""
    async with Suite(environ, patience_s=60) as suite:
        async for change in follow(suite):
            if isinstance(change, Interruption):
                told.append(json.dumps({"note": {"reason": change.reason}}))
            else:
                told.append(MessageToJson(change, preserving_proto_field_name=True, indent=None))


async def release_until_answered(stub, lease_id: str, secret: str) -> None:
    """Who has sent ActivateLease owes this (rule 7)."""
    while True:
        try:
            await stub.ReleaseLease(pb.ReleaseLeaseRequest(lease_id=lease_id, secret=secret), timeout=5)
            return
        except grpc.aio.AioRpcError as error:
            failure = RpcFailure.from_rpc_error(error)
            if failure.code is grpc.StatusCode.NOT_FOUND:
                return
            assert failure.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), failure
            await asyncio.sleep(0.05)


async def one_lease(stub, holders: Holders, dice: random.Random, number: int) -> None:
    gib = dice.choice([1, 2, 5, 10, 20, 40])
    me = processes.current().to_message()
    request = pb.AdmitRequest(
        request_id=f"torture-{number}", holder={"name": "t", "process": me}, claim={"host_bytes": gib * GIB}
    )
    call = stub.Admit(request, timeout=60, wait_for_ready=True)
    try:
        async for response in call:
            if response.WhichOneof("event") == "queued" and dice.random() < 0.2:
                return  # cancelled while waiting
            if response.WhichOneof("event") == "granted":
                break
        if dice.random() < 0.1:
            return  # granted, and the client goes away
        lease_id, secret = response.granted.lease.lease_id, response.granted.secret
        try:
            await stub.ActivateLease(pb.ActivateLeaseRequest(lease_id=lease_id, secret=secret, process=me), timeout=5)
        except grpc.aio.AioRpcError:
            await release_until_answered(stub, lease_id, secret)
            raise
    finally:
        call.cancel()
    holders.take(gib)
    await asyncio.sleep(dice.random() * 0.05)
    if gib > 1 and dice.random() < 0.3:
        holders.held_gib -= 1  # freed first, then told (rule 23)
        gib -= 1
        try:
            await stub.ResizeLease(
                pb.ResizeLeaseRequest(lease_id=lease_id, secret=secret, claim={"host_bytes": gib * GIB}), timeout=5
            )
        except grpc.aio.AioRpcError as error:
            holders.count(RpcFailure.from_rpc_error(error))
    holders.held_gib -= gib
    await release_until_answered(stub, lease_id, secret)


async def test_no_byte_is_held_twice_and_none_stays_charged(ledger_process) -> None:
    operations = int(os.environ.get("WEIGHBRIDGE_TORTURE_OPERATIONS", "150"))
    dice = random.Random(7)
    holders = Holders()
    # Grants that a kill orphaned are given back soon, so that the machine is full of living claims instead.
    ledger_process.environ["WEIGHBRIDGE_LEDGER_ACTIVATE_BY_S"] = "1"
    stub = await ledger_process.start()
    numbers = iter(range(operations))
    due = asyncio.Event()

    async def client() -> None:
        for number in numbers:
            if number % CLAIMS_PER_KILL == CLAIMS_PER_KILL - 1:
                due.set()
            try:
                await one_lease(stub, holders, dice, number)
            except grpc.aio.AioRpcError as error:
                holders.count(RpcFailure.from_rpc_error(error))
                await asyncio.sleep(0.02)

    kills = 0

    async def killer() -> None:
        nonlocal kills
        while True:
            await due.wait()
            due.clear()
            await asyncio.sleep(dice.random() * 0.05)
            await ledger_process.restart_by(signal.SIGKILL)
            kills += 1
            stored = await asyncio.to_thread(
                check, ledger_process.folder / "data" / "ledger.db", Ceilings(CEILING_GIB * GIB), Policy()
            )
            assert stored.findings == ()

    told: list[str] = []
    recording = asyncio.create_task(record(ledger_process.environ, told))
    killing = asyncio.create_task(killer())
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    killing.cancel()
    (ended,) = await asyncio.gather(killing, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended
    await ledger_process.running()
    # Grants whose clients went away while the ledger was down have one more activate_by.
    for _ in range(300):
        capacity = (await stub.GetCapacity(pb.GetCapacityRequest(), wait_for_ready=True)).capacity
        if capacity.total.committed_bytes == 0:
            break
        await asyncio.sleep(0.1)
    assert capacity.total.committed_bytes == 0
    assert holders.held_gib == 0
    assert kills > 0
    assert holders.activated > operations / 10
    assert holders.most_gib > CEILING_GIB / 2
    assert await ledger_process.end(signal.SIGTERM) == 0
    assert not recording.done(), "a watch goes on over every kill"
    recording.cancel()
    await asyncio.gather(recording, return_exceptions=True)
    # Played again from what was told: no transition raised a sum above its ceiling, and no state was walked back.
    played = play(told)
    assert played.findings == []
    assert len(played.epochs) > 1
    assert CEILING_GIB / 2 < played.peaks["total"] / GIB <= CEILING_GIB
