"""The capacity record and its messages."""

import pytest
from weighbridge_ledger.machine.capacity import Committed, assemble
from weighbridge_ledger.machine.declared import parse_spec
from weighbridge_ledger.machine.external import ExternalUse
from weighbridge_ledger.machine.findings import Finding
from weighbridge_ledger.machine.messages import (
    InvalidMachineError,
    capacity_to_proto,
    machine_from_proto,
    machine_to_proto,
)
from weighbridge_ledger.machine.model import GIB, Device, LiveDevice, LiveMemory, Machine, Pool, Source
from weighbridge_proto.memory.v1 import machine_pb2

CARDS = Machine(
    "box", Pool.DISCRETE, 64 * GIB, (Device("GPU-a", "RTX 3090", 24 * GIB), Device("GPU-b", "L4", 24 * GIB))
)
LIVE = LiveMemory(
    host_free_bytes=50 * GIB,
    host_used_bytes=14 * GIB,
    devices=(LiveDevice("GPU-a", 20 * GIB, 4 * GIB), LiveDevice("GPU-b", 23 * GIB, GIB)),
    findings=(Finding("X", "Something cannot be measured."),),
    measured_at=1_800_000_000.25,
)
RAM_SHARE = 64 * GIB * 60 // 100
CARD = 24 * GIB * 95 // 100


def test_ceilings_beside_committed_free_and_external() -> None:
    capacity = assemble(
        CARDS,
        committed=Committed(3 * GIB, {"GPU-a": 5 * GIB}),
        live=LIVE,
        external=ExternalUse(2 * GIB, {"GPU-a": GIB, "GPU-b": 0}),
        findings=(Finding("X", "Something cannot be measured."), Finding("Y", "A card was left out.")),
    )
    assert (capacity.host.automatic_bytes, capacity.host.committed_bytes) == (RAM_SHARE, 3 * GIB)
    assert (capacity.host.free_bytes, capacity.host.external_bytes) == (50 * GIB, 2 * GIB)
    (_, first), (_, second) = capacity.devices
    assert (first.effective_bytes, first.committed_bytes, first.free_bytes) == (CARD, 5 * GIB, 20 * GIB)
    assert (second.committed_bytes, second.external_bytes) == (0, 0)
    assert capacity.total.effective_bytes == RAM_SHARE + 2 * CARD
    assert (capacity.total.committed_bytes, capacity.total.free_bytes) == (8 * GIB, 93 * GIB)
    assert capacity.total.external_bytes == 3 * GIB
    assert capacity.notes == ("Something cannot be measured.", "A card was left out.")
    assert capacity.spill_allowed is False


def test_one_unknown_part_makes_the_total_unknown() -> None:
    live = LiveMemory(host_free_bytes=GIB, devices=(LiveDevice("GPU-a", GIB, GIB),))
    assert assemble(CARDS, live=live).total.free_bytes is None


def test_the_limit_stands_beside_every_ceiling_and_lowers_those_above_it() -> None:
    capacity = assemble(CARDS, limit_bytes=30 * GIB)
    assert (capacity.host.limit_bytes, capacity.host.effective_bytes) == (30 * GIB, 30 * GIB)
    assert capacity.devices[0][1].effective_bytes == CARD
    assert capacity.total.effective_bytes == 30 * GIB
    assert assemble(CARDS, limit_bytes=500 * GIB).total.limit_bytes is None


def test_bytes_on_a_card_that_is_gone_stay_in_the_total() -> None:
    assert assemble(CARDS, committed=Committed(0, {"GPU-gone": GIB})).total.committed_bytes == GIB


def test_nothing_is_measured_on_a_declared_machine() -> None:
    capacity = assemble(parse_spec("unified:64"), live=LIVE, external=ExternalUse(GIB))
    assert (capacity.host.free_bytes, capacity.host.external_bytes, capacity.measured_at) == (None, None, None)
    message = capacity_to_proto(capacity)
    assert message.source == machine_pb2.MACHINE_SOURCE_DECLARED
    assert not message.HasField("measure_time")
    assert not message.host.HasField("free_bytes")
    assert not message.host.HasField("limit_bytes")
    assert message.host.effective_bytes == message.total.effective_bytes == 48 * GIB


def test_the_message_says_the_same_as_the_record() -> None:
    capacity = assemble(
        CARDS, limit_bytes=30 * GIB, allow_spill=True, live=LIVE, external=ExternalUse(0, {"GPU-a": 0, "GPU-b": None})
    )
    message = capacity_to_proto(capacity, epoch="e7", revision=42)
    assert (message.node_id, message.pool) == ("box", machine_pb2.POOL_KIND_DISCRETE)
    assert (message.epoch, message.revision, message.spill_allowed) == ("e7", 42, True)
    assert message.total_ram_bytes == 64 * GIB
    assert [card.device.device_id for card in message.devices] == ["GPU-a", "GPU-b"]
    assert message.devices[0].ceiling.HasField("external_bytes"), "measured as none is not unknown"
    assert not message.devices[1].ceiling.HasField("external_bytes")
    assert (message.measure_time.seconds, message.measure_time.nanos) == (1_800_000_000, 250_000_000)
    assert list(message.notes) == ["Something cannot be measured."]


@pytest.mark.parametrize(("platform", "heeded"), [("darwin/arm64", False), ("linux/arm64", True)])
def test_the_message_says_whether_exclusive_use_counts(platform: str, heeded: bool) -> None:
    machine = Machine("box", Pool.UNIFIED, 64 * GIB, platform=platform)
    assert capacity_to_proto(assemble(machine)).exclusive_heeded is heeded


def test_a_machine_survives_its_message() -> None:
    machine, limit = machine_from_proto(machine_to_proto(CARDS, 30 * GIB))
    assert (machine.pool, machine.ram_bytes, machine.devices) == (CARDS.pool, CARDS.ram_bytes, CARDS.devices)
    assert (machine.source, limit) == (Source.INLINE, 30 * GIB)


def test_an_unsaid_pool_follows_from_the_cards() -> None:
    card = machine_pb2.Device(total_bytes=24 * GIB)
    with_card, limit = machine_from_proto(machine_pb2.Machine(ram_bytes=64 * GIB, devices=[card, card]))
    assert (with_card.pool, limit) == (Pool.DISCRETE, None)
    assert [device.device_id for device in with_card.devices] == ["0", "1"]
    assert machine_from_proto(machine_pb2.Machine(ram_bytes=64 * GIB))[0].pool is Pool.CPU


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (machine_pb2.Machine(), "ram_bytes"),
        (machine_pb2.Machine(ram_bytes=-1), "ram_bytes"),
        (machine_pb2.Machine(ram_bytes=2**62), "ram_bytes"),
        (machine_pb2.Machine(ram_bytes=GIB, limit_bytes=-1), "limit_bytes"),
        (machine_pb2.Machine(ram_bytes=GIB, pool=machine_pb2.POOL_KIND_DISCRETE), "devices"),
        (
            machine_pb2.Machine(
                ram_bytes=GIB, pool=machine_pb2.POOL_KIND_UNIFIED, devices=[machine_pb2.Device(total_bytes=1)]
            ),
            "devices",
        ),
        (machine_pb2.Machine(ram_bytes=GIB, devices=[machine_pb2.Device()]), "devices[0].total_bytes"),
        (
            machine_pb2.Machine(ram_bytes=GIB, devices=[machine_pb2.Device(total_bytes=1, allocation_limit_bytes=2)]),
            "devices[0].allocation_limit_bytes",
        ),
        (
            machine_pb2.Machine(
                ram_bytes=GIB,
                devices=[
                    machine_pb2.Device(device_id="a", total_bytes=1),
                    machine_pb2.Device(device_id="a", total_bytes=1),
                ],
            ),
            "devices[1].device_id",
        ),
    ],
)
def test_a_machine_that_cannot_be_names_the_field(message: machine_pb2.Machine, field: str) -> None:
    with pytest.raises(InvalidMachineError) as caught:
        machine_from_proto(message)
    assert caught.value.field == field
