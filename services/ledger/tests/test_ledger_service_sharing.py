"""Whether engines share a device: by machine, or as the person set it; seen over the wire."""

from pathlib import Path

import pytest
from weighbridge_common.settings import SettingsError, parse
from weighbridge_ledger.machine.ceilings import Sharing, ceilings_for
from weighbridge_ledger.machine.model import GIB, Device, Machine, Pool, Source
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_proto.ledger.v1 import ledger_service_pb2 as pb
from weighbridge_proto.memory.v1 import machine_pb2

MAC_32 = Machine("n", Pool.UNIFIED, 32 * GIB, platform="darwin/arm64")
MAC_16 = Machine("n", Pool.UNIFIED, 16 * GIB, platform="darwin/arm64")
CARD = Machine("n", Pool.DISCRETE, 64 * GIB, (Device("a", "RTX", 24 * GIB),), platform="linux/x86_64")


@pytest.mark.parametrize("machine", [MAC_32, MAC_16, CARD])
def test_a_person_s_word_goes_before_the_machine_s(machine: Machine) -> None:
    assert not ceilings_for(machine, sharing=Sharing.COEXIST).exclusive_heeded
    assert ceilings_for(machine, sharing=Sharing.SWAP).exclusive_heeded


def test_a_limit_leaves_what_the_machine_is_as_it_was() -> None:
    limited = ceilings_for(MAC_16, 8 * GIB)
    assert (limited.limit_bytes, limited.has_shared_gpu, limited.one_start_at_a_time) == (8 * GIB, True, True)


def test_the_setting_is_one_of_three_words() -> None:
    variable = LedgerSettings.variable("device_sharing")
    assert parse(LedgerSettings, {}).sharing() is Sharing.AUTO
    assert parse(LedgerSettings, {variable: "swap"}).sharing() is Sharing.SWAP
    with pytest.raises(SettingsError, match=variable):
        parse(LedgerSettings, {variable: "share"})


@pytest.mark.parametrize(
    ("machine", "sharing", "heeded"),
    [(MAC_32, Sharing.AUTO, False), (MAC_32, Sharing.SWAP, True), (MAC_16, Sharing.COEXIST, False)],
)
async def test_the_capacity_says_what_counts_here(
    new_ledger, tmp_path: Path, machine: Machine, sharing: Sharing, heeded: bool
) -> None:
    ledger = new_ledger(tmp_path, sharing=sharing)
    ledger.probe.machine = Machine("node", Pool.UNIFIED, machine.ram_bytes, (), Source.DECLARED, None, machine.platform)
    async with ledger.serve():
        capacity = (await ledger.stub.GetCapacity(pb.GetCapacityRequest())).capacity
        assert capacity.exclusive_heeded is heeded
        # Of another machine it says what that one does by itself.
        what_if = machine_pb2.Machine(pool=machine_pb2.POOL_KIND_UNIFIED, ram_bytes=16 * GIB, platform="darwin/arm64")
        answer = await ledger.stub.GetCapacity(pb.GetCapacityRequest(machine=what_if))
        assert answer.capacity.exclusive_heeded
