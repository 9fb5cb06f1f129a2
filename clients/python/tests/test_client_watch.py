"""Following the ledger's changes: over restarts, gaps and a slow reader; and what is said of each."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from weighbridge import CallError, Interruption, Suite, SyncSuite, follow
from weighbridge.cli import main
from weighbridge.happenings import Happenings
from weighbridge_proto.errors import RequestError
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 2**30
State = lease_pb2.LeaseState


def lease(state: "lease_pb2.LeaseState.ValueType", gib: float = 0, **more: Any) -> lease_pb2.Lease:
    made = lease_pb2.Lease(
        lease_id="l1", state=state, holder={"name": "engine-mlx"}, purpose={"model_name": "tiny"}, **more
    )
    if gib:
        made.charge.host_bytes = int(gib * GIB)
    return made


def change(revision: int, of: lease_pb2.Lease | None = None, epoch: str = "s.1") -> pb.WatchResponse:
    made = pb.WatchResponse(epoch=epoch, revision=revision, lease=of or lease(lease_pb2.LEASE_STATE_QUEUED))
    made.event_time.FromSeconds(1_000_000)
    return made


def snapshot(revision: int, *leases: lease_pb2.Lease, epoch: str = "s.1") -> pb.WatchResponse:
    total = machine_pb2.Ceiling(automatic_bytes=24 * GIB, effective_bytes=24 * GIB)
    capacity = machine_pb2.Capacity(total=total)
    return pb.WatchResponse(epoch=epoch, revision=revision, snapshot=pb.WatchSnapshot(leases=leases, capacity=capacity))


def failing(code: grpc.StatusCode, reason: str, **metadata: object) -> RequestError:
    return RequestError(code, reason, f"Because of {reason}.", metadata=metadata)


COMPACTED = grpc.StatusCode.OUT_OF_RANGE
STOPPING = failing(grpc.StatusCode.UNAVAILABLE, "LEDGER_STOPPING")


async def followed(suite: Any, count: int, epoch: str = "", revision: int = 0) -> tuple[list[Any], list[float]]:
    """The first `count` of what is told, as (epoch, revision) or reasons, and the pauses made meanwhile."""
    told: list[Any] = []
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async with Suite(suite.environ) as client, asyncio.timeout(30):
        changes = follow(client, epoch, revision, sleep=sleep)
        async for one in changes:
            told.append(one.reason if isinstance(one, Interruption) else (one.epoch, one.revision))
            if len(told) == count:
                break
        await changes.aclose()
    return told, pauses


def asked(suite: Any) -> list[tuple[str, int]]:
    return [(request.epoch, request.revision) for request in suite.state.asked(pb.WatchRequest)]


async def test_a_ledger_that_comes_back_is_resumed_where_it_was_left(fake_suite: Any) -> None:
    fake_suite.state.watches = [
        [snapshot(4), change(5), STOPPING],
        [STOPPING],
        [STOPPING],
        [change(6), STOPPING],
        [change(7)],
    ]
    told, pauses = await followed(fake_suite, 6)
    # One word for each absence, and none of it for attempts that fail.
    assert told == [("s.1", 4), ("s.1", 5), "LEDGER_AWAY", ("s.1", 6), "LEDGER_AWAY", ("s.1", 7)]
    assert asked(fake_suite) == [("", 0), ("s.1", 5), ("s.1", 5), ("s.1", 5), ("s.1", 6)]
    # Each pause is twice the last, until the ledger is there again.
    assert pauses == [0.2, 0.4, 0.8, 0.2]


async def test_pauses_end_at_five_seconds(fake_suite: Any) -> None:
    fake_suite.state.watches = [[snapshot(0), STOPPING], *([STOPPING] for _ in range(8)), [change(1)]]
    _, pauses = await followed(fake_suite, 3)
    assert pauses == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (failing(COMPACTED, "REVISION_COMPACTED", epoch="s.1", oldest_revision=9), "REVISION_COMPACTED"),
        (failing(COMPACTED, "REVISION_COMPACTED", epoch="s.2", oldest_revision=0), "LEDGER_RESTARTED"),
        (failing(grpc.StatusCode.RESOURCE_EXHAUSTED, "WATCHER_TOO_SLOW", revision=3), "WATCHER_TOO_SLOW"),
    ],
)
async def test_what_cannot_be_resumed_is_said_and_listed_anew(
    fake_suite: Any, failure: RequestError, reason: str
) -> None:
    fake_suite.state.watches = [[failure], [snapshot(20, epoch="s.2")]]
    told, pauses = await followed(fake_suite, 2, "s.1", 3)
    assert told == [reason, ("s.2", 20)]
    assert asked(fake_suite) == [("s.1", 3), ("", 0)]
    assert pauses == []


async def test_a_killed_ledger_is_waited_for_over_its_socket(unstarted_suite: Any, run_dir: Any) -> None:
    """The listener itself is gone for a while, as after SIGKILL."""
    unstarted_suite.start()
    unstarted_suite.state.watches = [[snapshot(4)], [change(5)]]
    told: list[Any] = []
    async with Suite(unstarted_suite.environ) as client, asyncio.timeout(30):

        async def restart(seconds: float) -> None:
            await asyncio.to_thread(unstarted_suite.serve_again)

        async for one in follow(client, sleep=restart):
            told.append(one.reason if isinstance(one, Interruption) else one.revision)
            if told == [4]:
                await asyncio.to_thread(unstarted_suite.stop_serving)
            if told[-1] == 5:
                break
    unstarted_suite.stop()
    assert told == [4, "LEDGER_AWAY", 5]


async def test_a_ledger_that_was_never_reached_is_a_failure(unstarted_suite: Any) -> None:
    async with Suite(unstarted_suite.environ) as client:
        with pytest.raises(CallError) as error:
            await anext(follow(client))
    assert error.value.failure.reason == "UNREACHABLE"


async def test_a_refusal_is_a_failure(fake_suite: Any) -> None:
    fake_suite.state.watches = [[snapshot(1), failing(grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND")]]
    async with Suite(fake_suite.environ) as client:
        changes = follow(client)
        assert not isinstance(await anext(changes), Interruption)
        with pytest.raises(CallError, match="NODE_NOT_FOUND"):
            await anext(changes)


def test_a_program_without_asyncio_follows_too(fake_suite: Any) -> None:
    fake_suite.state.watches = [[snapshot(4), change(5), failing(COMPACTED, "REVISION_COMPACTED", epoch="s.1")]]
    with SyncSuite(fake_suite.environ) as suite:
        changes = suite.follow()
        told = [next(changes) for _ in range(3)]
        changes.close()
    assert [isinstance(one, Interruption) for one in told] == [False, False, True]


# -- in words ------------------------------------------------------------------------------------------------------

QUEUED, GRANTED, ACTIVE = lease_pb2.LEASE_STATE_QUEUED, lease_pb2.LEASE_STATE_GRANTED, lease_pb2.LEASE_STATE_ACTIVE
VACATING, RELEASED = lease_pb2.LEASE_STATE_VACATING, lease_pb2.LEASE_STATE_RELEASED
ENGINE = [{"pid": 77}]
ENDED = {"message": "Its holder released it."}


def words(*leases: lease_pb2.Lease) -> Sequence[tuple[str, str]]:
    happenings = Happenings()
    told = [one for number, of in enumerate(leases, 1) for one in happenings.read(change(number, of))]
    assert {one.who for one in told} == {"engine-mlx tiny"}
    return [(one.word, one.text) for one in told]


def test_the_life_of_a_lease_in_words_where_the_kind_is_not_told() -> None:
    assert words(
        lease(QUEUED, claim={"host_bytes": 2 * GIB, "devices": [{"required_bytes": GIB}]}),
        lease(GRANTED, 3),
        lease(ACTIVE, 3),
        lease(ACTIVE, 3, engine_processes=ENGINE),
        lease(ACTIVE, 2, engine_processes=ENGINE),
        lease(ACTIVE, 2, engine_processes=ENGINE, suspect=True),
        lease(ACTIVE, 2, engine_processes=ENGINE),
        lease(ACTIVE, 2, engine_processes=ENGINE),
        lease(VACATING, 2, engine_processes=ENGINE, end_reason=ENDED),
        lease(VACATING, 2, engine_processes=ENGINE, end_reason=ENDED),
        lease(RELEASED, end_reason=ENDED),
        lease(GRANTED, 1),
    ) == [
        ("QUEUED", "waits for 3.00 GiB"),
        ("GRANTED", "3.00 GiB"),
        ("ACTIVE", "3.00 GiB"),
        ("ENGINE", "process 77"),
        ("RESIZED", "3.00 GiB to 2.00 GiB"),
        ("SILENT", "2.00 GiB stay charged until its processes are known to be gone"),
        ("ATTACHED", "2.00 GiB"),
        ("ATTACHED", "2.00 GiB"),
        ("VACATING", "2.00 GiB. Its holder released it."),
        ("OVERDUE", "2.00 GiB still held. Its holder released it."),
        ("RELEASED", "2.00 GiB given back. Its holder released it."),
        ("GRANTED", "1.00 GiB"),
    ]


def in_words(
    kind: "pb.ChangeKind.ValueType", of: lease_pb2.Lease, before: lease_pb2.Lease | None = None
) -> tuple[str, str]:
    """A change of this kind, after one that left the lease as `before`."""
    happenings = Happenings()
    if before is not None:
        list(happenings.read(snapshot(0, before)))
    told = change(1, of)
    told.kind = kind
    (happening,) = happenings.read(told)
    return happening.word, happening.text


FOR_WHOM = {"message": "Asked for big of engine-sd."}


@pytest.mark.parametrize(
    ("kind", "of", "before", "said"),
    [
        (
            pb.CHANGE_KIND_QUEUED,
            lease(QUEUED, claim={"host_bytes": 2 * GIB, "optional_host_bytes": GIB}, exclusive=True),
            None,
            ("QUEUED", "waits for 2.00 GiB, 1.00 GiB more if there is room, alone on its device"),
        ),
        (
            pb.CHANGE_KIND_QUEUED,
            lease(QUEUED, claim={"host_bytes": 3 * GIB}, replaces_lease_id="l0"),
            None,
            ("QUEUED", "waits for 3.00 GiB, in place of a lease of its own"),
        ),
        (
            pb.CHANGE_KIND_RECLAIMING,
            lease(QUEUED, claim={"host_bytes": 2 * GIB}),
            lease(QUEUED, claim={"host_bytes": 2 * GIB}),
            ("RECLAIMING", "others were asked to make room for 2.00 GiB"),
        ),
        (
            pb.CHANGE_KIND_GRANTED,
            lease(GRANTED, charge={"host_bytes": 3 * GIB, "optional_bytes": GIB}, exclusive=True),
            None,
            ("GRANTED", "3.00 GiB, 1.00 GiB of it optional, alone on its device"),
        ),
        (pb.CHANGE_KIND_LOADED, lease(ACTIVE, 2), lease(ACTIVE, 2), ("LOADED", "2.00 GiB")),
        (
            pb.CHANGE_KIND_RESIZED,
            lease(ACTIVE, 2),
            lease(ACTIVE, 2, exclusive=True),
            ("RESIZED", "no longer alone on its device"),
        ),
        (pb.CHANGE_KIND_ATTACHED, lease(VACATING, 2), lease(VACATING, 2, suspect=True), ("ATTACHED", "2.00 GiB")),
        (
            pb.CHANGE_KIND_VACATING,
            lease(VACATING, 2, end_reason=FOR_WHOM),
            lease(ACTIVE, 2),
            ("VACATING", "2.00 GiB. Asked for big of engine-sd."),
        ),
        (
            pb.CHANGE_KIND_OVERDUE,
            lease(VACATING, 2, end_reason=FOR_WHOM),
            None,
            ("OVERDUE", "2.00 GiB still held. Asked for big of engine-sd."),
        ),
    ],
)
def test_a_change_is_said_by_its_kind(
    kind: "pb.ChangeKind.ValueType", of: lease_pb2.Lease, before: lease_pb2.Lease | None, said: tuple[str, str]
) -> None:
    assert in_words(kind, of, before) == said


def test_a_queued_claim_that_ends_gives_nothing_back() -> None:
    assert words(lease(QUEUED), lease(RELEASED, end_reason=ENDED))[1] == ("RELEASED", "Its holder released it.")


def test_a_snapshot_lists_what_stands_and_changes_are_told_against_it() -> None:
    happenings = Happenings()
    first = list(happenings.read(snapshot(3, lease(ACTIVE, 4))))
    assert [(one.word, one.text) for one in first] == [
        ("CEILINGS", "0 B of 24.00 GiB committed"),
        ("LISTED", "active, 4.00 GiB"),
    ]
    (resized,) = happenings.read(change(4, lease(ACTIVE, 5)))
    assert (resized.word, resized.text) == ("RESIZED", "4.00 GiB to 5.00 GiB")


# -- the command ---------------------------------------------------------------------------------------------------

END = failing(grpc.StatusCode.NOT_FOUND, "NODE_NOT_FOUND")
"""Ends a watch that would go on for ever."""


def test_watch_prints_a_line_for_each_change(fake_suite: Any) -> None:
    fake_suite.state.watches = [
        [snapshot(6), change(7, lease(GRANTED, 2)), failing(COMPACTED, "REVISION_COMPACTED", epoch="s.2")],
        [snapshot(1, lease(ACTIVE, 2), epoch="s.2"), END],
    ]
    result = CliRunner().invoke(main, ["watch"])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert [line[19:] for line in lines if "Note" not in line] == [
        "      6  CEILINGS    0 B of 24.00 GiB committed",
        "      7  GRANTED     engine-mlx tiny: 2.00 GiB",
        "      1  CEILINGS    0 B of 24.00 GiB committed",
        "      1  LISTED      engine-mlx tiny: active, 2.00 GiB",
    ]
    assert "started anew" in lines[2] and lines[2].endswith("[LEDGER_RESTARTED]")


def test_a_name_does_not_steer_the_terminal_or_break_the_line(fake_suite: Any) -> None:
    fake_suite.state.watches = [[change(7, lease_pb2.Lease(holder={"name": "a\x1b[2Jb\nc"}, state=GRANTED)), END]]
    assert "GRANTED     a\\x1b[2Jb\\nc: 0 B\n" in CliRunner().invoke(main, ["watch"]).stdout


def test_watch_as_json_is_one_object_a_line(fake_suite: Any) -> None:
    fake_suite.state.watches = [
        [change(7, lease(GRANTED, 2)), failing(COMPACTED, "REVISION_COMPACTED", epoch="s.1")],
        [snapshot(9), END],
    ]
    result = CliRunner().invoke(main, ["watch", "--json", "--from", "s.1:6"])
    assert asked(fake_suite)[0] == ("s.1", 6)
    told = [json.loads(line) for line in result.stdout.splitlines()]
    assert (told[0]["revision"], told[0]["lease"]["state"]) == ("7", "LEASE_STATE_GRANTED")
    assert told[1]["note"]["reason"] == "REVISION_COMPACTED"
    assert told[2]["snapshot"]["capacity"]["total"]["effective_bytes"] == str(24 * GIB)


@pytest.mark.parametrize("position", ["7", ":7", "s.1:", "s.1:-1", "s.1:x", "s.1:²"])
def test_a_point_that_is_none_is_wrong_usage(position: str) -> None:
    assert CliRunner().invoke(main, ["watch", "--from", position]).exit_code == 2


def test_watch_without_a_ledger_says_so(run_dir: Any) -> None:
    result = CliRunner().invoke(main, ["watch"])
    assert (result.exit_code, result.stdout) == (4, "")


def test_ctrl_c_ends_a_watch_with_where_to_go_on(fake_suite: Any) -> None:
    fake_suite.state.watches = [[snapshot(41)]]
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "watch"],
        env={**os.environ, **fake_suite.environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert "CEILINGS" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "To go on from here: weighbridge watch --from s.1:41\n")
