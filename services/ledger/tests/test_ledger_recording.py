"""Recorded changes, played again: a real ledger's keep the rules, and each broken rule is found."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToJson
from weighbridge_ledger.machine.ceilings import Sharing
from weighbridge_ledger.machine.model import Pool
from weighbridge_ledger.service.machine_desk import Wishes
from weighbridge_ledger.tools.recording import RecordingError, play
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

from services.ledger.tests.holders import next_of, resident

GIB = 2**30
QUEUED, GRANTED, ACTIVE = lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_GRANTED, lease_pb2.LEASE_STATE_ACTIVE
VACATING, RELEASED = lease_pb2.LEASE_STATE_VACATING, lease_pb2.LEASE_STATE_RELEASED
AWAY, RESTARTED = ({"note": {"reason": reason, "message": ""}} for reason in ("LEDGER_AWAY", "LEDGER_RESTARTED"))


def lines(*told: pb.WatchResponse | dict[str, Any]) -> list[str]:
    return [
        json.dumps(one) if isinstance(one, dict) else MessageToJson(one, preserving_proto_field_name=True, indent=None)
        for one in told
    ]


def capacity(host: int = 24, card: int = 10, total: int = 34) -> machine_pb2.Capacity:
    return machine_pb2.Capacity(
        host=machine_pb2.Ceiling(effective_bytes=host),
        total=machine_pb2.Ceiling(effective_bytes=total),
        devices=[
            machine_pb2.DeviceCapacity(
                device=machine_pb2.Device(device_id="0"), ceiling=machine_pb2.Ceiling(effective_bytes=card)
            )
        ],
    )


def snapshot(revision: int, *leases: lease_pb2.Lease, epoch: str = "e.1", **ceilings: int) -> pb.WatchResponse:
    stands = pb.WatchSnapshot(leases=leases, capacity=capacity(**ceilings))
    return pb.WatchResponse(epoch=epoch, revision=revision, snapshot=stands)


def limited(revision: int, **ceilings: int) -> pb.WatchResponse:
    return pb.WatchResponse(epoch="e.1", revision=revision, capacity=capacity(**ceilings))


def lease(
    lease_id: str, state: "lease_pb2.LeaseState.ValueType", host: int = 0, card: int = 0, fence: int = 1
) -> lease_pb2.Lease:
    made = lease_pb2.Lease(lease_id=lease_id, state=state, fence=fence)
    if host or card:
        made.charge.host_bytes = host
        if card:
            made.charge.devices.add(device_id="0", bytes=card)
    return made


def change(revision: int, *of: Any, epoch: str = "e.1", **more: Any) -> pb.WatchResponse:
    return pb.WatchResponse(epoch=epoch, revision=revision, lease=lease(*of, **more))


def faults(*told: pb.WatchResponse | dict[str, Any]) -> list[str]:
    return [finding.code for finding in play(lines(*told)).findings if finding.is_fault]


def test_the_life_of_leases_keeps_the_rules() -> None:
    played = play(
        lines(
            snapshot(0),
            change(1, "a", GRANTED, 20),
            change(2, "b", QUEUED),
            change(3, "a", ACTIVE, 20),
            limited(4, host=10),  # evicts nobody, and shrinking stays possible
            change(5, "a", ACTIVE, 15),
            change(6, "a", VACATING, 15),
            change(7, "a", VACATING, 15),
            change(8, "a", RELEASED),
            change(9, "b", GRANTED, 4, 10, fence=2),
            AWAY,
            change(10, "b", ACTIVE, 4, 10, fence=2),
            RESTARTED,
            snapshot(1, lease("b", ACTIVE, 4, 10, fence=2), epoch="e.2"),
            change(2, "c", GRANTED, 20, fence=3, epoch="e.2"),
        )
    )
    assert played.findings == []
    assert played.sound
    assert (played.changes, played.epochs, played.gaps) == (13, ["e.1", "e.2"], 1)
    assert played.peaks == {"host": 24, "0": 10, "total": 34}


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ([snapshot(0), change(1, "a", GRANTED, 25)], "ABOVE_CEILING"),
        ([snapshot(0), change(1, "a", GRANTED, 1, 11)], "ABOVE_CEILING"),
        ([snapshot(0, total=20), change(1, "a", GRANTED, 15, 6)], "ABOVE_CEILING"),
        ([snapshot(0, lease("a", ACTIVE, 20)), change(1, "b", GRANTED, 5, fence=2)], "ABOVE_CEILING"),
        ([snapshot(0, lease("a", ACTIVE, 20)), change(1, "a", ACTIVE, 25)], "ABOVE_CEILING"),
        ([snapshot(0, lease("a", ACTIVE, 20)), limited(1, host=10), change(2, "a", ACTIVE, 21)], "ABOVE_CEILING"),
        ([snapshot(0, lease("a", VACATING, 20)), change(1, "a", ACTIVE, 20)], "STATE_BACK"),
        ([snapshot(0), change(1, "a", RELEASED), change(2, "a", GRANTED, 5)], "STATE_BACK"),
        ([snapshot(0, lease("a", ACTIVE, 5)), change(1, "a", QUEUED)], "STATE_BACK"),
        ([snapshot(0), change(1, "a", GRANTED)], "CHARGE_STATE"),
        ([snapshot(0), change(1, "a", QUEUED, 5)], "CHARGE_STATE"),
        ([snapshot(0), change(1, "a", RELEASED, 5)], "CHARGE_STATE"),
        ([snapshot(0), change(1, "a", GRANTED, 1, fence=4), change(2, "b", GRANTED, 1, fence=4)], "FENCE"),
        ([snapshot(0, lease("a", ACTIVE, 1, fence=9)), change(1, "b", GRANTED, 1, fence=8)], "FENCE"),
        ([snapshot(0), change(2, "a", GRANTED, 1)], "ORDER"),
        ([snapshot(3), change(4, "a", GRANTED, 1), change(4, "a", ACTIVE, 1)], "ORDER"),
        ([snapshot(0), snapshot(1, epoch="e.2")], "ORDER"),
        ([snapshot(0), RESTARTED, change(7, "a", GRANTED, 1, epoch="e.2")], "ORDER"),
        # A state that was reached before a restart is not walked back after it.
        (
            [snapshot(0), change(1, "a", VACATING, 5), RESTARTED, snapshot(0, lease("a", ACTIVE, 5), epoch="e.2")],
            "STATE_BACK",
        ),
    ],
)
def test_a_broken_rule_is_found(told: list[pb.WatchResponse | dict[str, Any]], code: str) -> None:
    assert code in faults(*told)


def stands(*leases: lease_pb2.Lease, heeded: bool = True) -> pb.WatchResponse:
    """A unified machine on which these leases are."""
    made = capacity()
    made.pool, made.exclusive_heeded = machine_pb2.POOL_KIND_UNIFIED, heeded
    return pb.WatchResponse(epoch="e.1", revision=0, snapshot=pb.WatchSnapshot(leases=leases, capacity=made))


def placed(lease_id: str, where: str, *, alone: bool = False, fence: int = 1) -> lease_pb2.Lease:
    """A lease of one byte, on the GPU, the processor or the card 0."""
    made = lease(lease_id, ACTIVE, 1, 1 if where == "card" else 0, fence=fence)
    made.claim.cpu_only = where == "processor"
    made.exclusive = alone
    return made


def told(revision: int, one: lease_pb2.Lease) -> pb.WatchResponse:
    return pb.WatchResponse(epoch="e.1", revision=revision, lease=one)


@pytest.mark.parametrize("where", ["gpu", "card"])
def test_company_beside_a_lease_that_is_alone_is_found(where: str) -> None:
    first, alone = placed("a", where), placed("a", where, alone=True)
    joins, wants = placed("b", where, fence=2), placed("b", where, alone=True, fence=2)
    assert faults(stands(), told(1, alone), told(2, joins)) == ["NOT_ALONE"]
    assert faults(stands(), told(1, first), told(2, wants)) == ["NOT_ALONE"]
    assert faults(stands(), told(1, first), told(2, joins), told(3, alone)) == ["NOT_ALONE"]
    assert faults(stands(alone), told(1, joins)) == ["NOT_ALONE"]


def test_a_lease_that_is_alone_keeps_the_rules_until_it_leaves_or_no_longer_wants_to_be() -> None:
    alone = placed("a", "gpu", alone=True)
    ended = lease_pb2.Lease(lease_id="a", state=RELEASED, exclusive=True)
    joins = placed("b", "gpu", fence=2)
    assert faults(stands(), told(1, alone), told(2, placed("b", "processor", fence=2)), told(3, alone)) == []
    assert faults(stands(), told(1, alone), told(2, ended), told(3, joins)) == []
    assert faults(stands(), told(1, alone), told(2, placed("a", "gpu")), told(3, joins)) == []
    assert faults(stands(alone, heeded=False), told(1, joins)) == []
    # On one card, and on another.
    assert faults(stands(), told(1, placed("a", "card", alone=True)), told(2, placed("b", "gpu", fence=2))) == []
    # What stood when the watch began, and only goes on, was granted under whatever was wished then.
    assert faults(stands(alone, joins), told(1, alone), told(2, joins)) == []


def test_more_optional_bytes_than_are_charged_are_found() -> None:
    one = lease("a", GRANTED, 5)
    one.charge.optional_bytes = 5
    assert faults(snapshot(0), told(1, one)) == []
    one.charge.optional_bytes = 6
    assert faults(snapshot(0), told(1, one)) == ["OPTIONAL"]


def test_without_a_snapshot_there_are_no_ceilings_to_hold_it_to() -> None:
    assert faults(change(5, "a", GRANTED, 2**40), change(6, "a", ACTIVE, 2**40)) == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "no json",
        "[]",
        "7",
        '{"note": 5}',
        '{"revision": "many"}',
        '{"lease": 7}',
        '{"lease_id": "a", "event": "lease_granted", "level": "info"}',  # of the ledger's log
        "[" * 100_000,
    ],
)
def test_what_is_no_recording_is_said_by_its_line(line: str) -> None:
    if not line:
        assert play(["\n", ""]).changes == 0
        return
    with pytest.raises(RecordingError, match="Line 2 "):
        play([*lines(snapshot(0)), line])


async def recorded(ledger: Any, do: Callable[[], Any]) -> list[pb.WatchResponse]:
    """Everything that a ledger told while `do` was done."""
    watch = ledger.stub.Watch(pb.WatchRequest())
    told = [await watch.read()]
    await do()
    until = ledger.servicer._watch.revision
    while told[-1].revision < until:
        told.append(await watch.read())
    watch.cancel()
    return told


async def test_what_a_ledger_told_of_models_that_make_room_for_each_other_keeps_the_rules(new_ledger, tmp_path) -> None:
    async with new_ledger(tmp_path, sharing=Sharing.SWAP).serve() as ledger:
        ledger.probe.machine = replace(ledger.probe.machine, pool=Pool.UNIFIED)
        ledger.servicer._apply_wishes(Wishes())

        async def do() -> None:
            first = await resident(ledger, 4, 1, exclusive=True)
            waiting = ledger.admit(4, 2, exclusive=True)
            assert await next_of(waiting, "reclaiming")
            await first.release()
            second = await next_of(waiting, "granted")
            assert second.lease.exclusive
            waiting.cancel()
            await ledger.granted(4, 3)

        played = play(lines(*await recorded(ledger, do)))
    assert played.findings == []
    assert played.peaks["host"] == 4 * GIB


async def test_what_a_real_ledger_told_keeps_the_rules(ledger, tmp_path: Path) -> None:
    async def do() -> None:
        for round_ in range(3):
            lease_id, secret = await ledger.active(20, 1)
            waiting = ledger.admit(10, 2, f"waits-{round_}")
            assert (await waiting.read()).HasField("queued")
            await ledger.stub.ResizeLease(
                pb.ResizeLeaseRequest(lease_id=lease_id, secret=secret, claim={"host_bytes": 12 * GIB})
            )
            while not (await waiting.read()).HasField("granted"):
                pass
            await ledger.stub.SetLimit(pb.SetLimitRequest(limit_bytes=15 * GIB))
            waiting.cancel()
            await ledger.release(lease_id, secret)
            while ledger.committed:
                await ledger.pass_time(1)
            await ledger.stub.SetLimit(pb.SetLimitRequest())

    told = await recorded(ledger, do)
    played = play(lines(*told))
    assert played.findings == []
    assert played.peaks["host"] == 22 * GIB
    assert played.changes == len(told) > 20

    recording = tmp_path / "recording.jsonl"
    recording.write_text("\n".join(lines(*told)))
    for spoil, code, says in ((False, 0, "Every change kept the rules."), (True, 1, "ABOVE_CEILING")):
        if spoil:
            recording.write_text(recording.read_text().replace(str(20 * GIB), str(30 * GIB)))
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "weighbridge_ledger", "replay", "--events", str(recording)],
            env={name: value for name, value in os.environ.items() if not name.startswith("WEIGHBRIDGE_")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (code, "")
        assert says in done.stdout
