"""What `leases` and `top` say of leases that are not like most: exclusive, replaced, raised, vacating for somebody."""

import io
from typing import Any

import pytest
from rich.console import Console
from weighbridge.cli.lease_table import lease_notes, print_leases
from weighbridge.cli.memory_bars import MemoryFrame
from weighbridge_proto.ledger.v1 import lease_pb2
from weighbridge_proto.memory.v1 import machine_pb2

GIB = 2**30
NOW = 1_000_000.0
LONG = "0123456789abcdef"


def lease(state: str, lease_id: str = "l1", **more: Any) -> lease_pb2.Lease:
    number = lease_pb2.LeaseState.Value(f"LEASE_STATE_{state}")
    made = lease_pb2.Lease(lease_id=lease_id, state=number, holder={"name": f"engine-{lease_id}"}, **more)
    made.create_time.FromSeconds(int(NOW) - 12)
    return made


def held(state: str, lease_id: str, gib: int, **more: Any) -> lease_pb2.Lease:
    return lease(state, lease_id, charge={"host_bytes": gib * GIB}, **more)


def printed(*leases: lease_pb2.Lease) -> list[str]:
    to = Console(file=io.StringIO(), width=160, color_system=None, markup=False)
    with to.capture() as captured:
        print_leases(to, leases, NOW)
    return [line.rstrip() for line in captured.get().splitlines()]


def drawn(*leases: lease_pb2.Lease) -> list[str]:
    to = Console(file=io.StringIO(), width=160, color_system=None, markup=False)
    with to.capture() as captured:
        to.print(MemoryFrame(machine_pb2.Capacity(), leases, NOW))
    return [line.rstrip() for line in captured.get().splitlines()]


NORMAL, INTERACTIVE = lease_pb2.PRIORITY_NORMAL, lease_pb2.PRIORITY_INTERACTIVE
BACKGROUND = lease_pb2.PRIORITY_BACKGROUND


@pytest.mark.parametrize(
    ("of", "notes"),
    [
        (held("ACTIVE", "a", 3, priority=NORMAL, level=NORMAL), []),
        (held("ACTIVE", "a", 3, priority=BACKGROUND, level=BACKGROUND, pinned=True), ["pinned", "background"]),
        (held("ACTIVE", "a", 3, exclusive=True), ["alone on its device"]),
        (
            lease("ACTIVE", charge={"host_bytes": 3 * GIB, "optional_bytes": GIB, "spilled_bytes": 2 * GIB}),
            ["1.00 GiB optional", "2.00 GiB spilled"],
        ),
        (lease("QUEUED", queue_position=1, replaces_lease_id=LONG), ["replaces 01234567"]),
        (
            lease("QUEUED", queue_position=1, priority=BACKGROUND, level=INTERACTIVE),
            ["raised to interactive"],
        ),
        (lease("QUEUED", queue_position=1, priority=INTERACTIVE, level=INTERACTIVE), ["interactive"]),
    ],
)
def test_what_is_noted_of_a_lease(of: lease_pb2.Lease, notes: list[str]) -> None:
    assert list(lease_notes(of)) == notes


def test_the_table_has_a_column_for_notes_when_there_are_any() -> None:
    assert printed(held("ACTIVE", "a", 3))[0].split()[-1] == "uses"
    lines = printed(held("ACTIVE", "a", 3, exclusive=True), held("ACTIVE", "b", 2))
    assert lines[0].split()[-1] == "notes"
    assert lines[1].endswith("alone on its device")
    assert lines[2].endswith("0")


FOR_WHOM = {"reason": "LEASE_VACATING", "message": "It was asked to make room: big waits for its memory."}


def test_who_vacates_says_for_whom() -> None:
    vacating = held("VACATING", LONG, 3, end_reason=FOR_WHOM)
    assert "01234567 is vacating. It was asked to make room: big waits for its memory." in printed(vacating)
    lines = drawn(held("ACTIVE", "a", 1), vacating)
    assert any(line.startswith("B ") and " vacating " in line for line in lines)
    assert "B is vacating. It was asked to make room: big waits for its memory." in lines


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("BYTES_HELD", "   Because. Held by A."),
        ("HOLDER_DID_NOT_VACATE", "   Because. Held by A."),
        ("EXCLUSIVE_USE", "   Because. There: A."),
        ("LOADS_ONE_AT_A_TIME", "   Because. Loading: A."),
        ("A_CODE_TO_COME", "   Because. Held by A."),
    ],
)
def test_a_waiter_s_reason_says_what_those_it_names_do(code: str, said: str) -> None:
    waiting = lease(
        "QUEUED",
        "w",
        queue_position=1,
        claim={"host_bytes": 5 * GIB},
        exclusive=True,
        wait_reasons=[{"code": code, "message": "Because.", "lease_ids": ["a"]}],
    )
    lines = drawn(held("ACTIVE", "a", 1), waiting)
    at = lines.index("1. engine-w: waits for 5.00 GiB, alone on its device, since 12 s")
    assert lines[at + 1] == said
