"""Declared machines: specs, recorded files, and errors that say what to do."""

from collections.abc import Callable
from pathlib import Path

import pytest
from weighbridge_ledger.machine.declared import MachineSpecError, load_declared, parse_spec
from weighbridge_ledger.machine.model import GIB, Pool, Source
from weighbridge_ledger.machine.readings import (
    CgroupLevel,
    CrashReport,
    DeviceReading,
    DrmReading,
    Readings,
    TemperatureReading,
)
from weighbridge_ledger.machine.recorded import ReadingsError, from_json, to_json

RECORDED = Path(__file__).parent / "machine_readings"


@pytest.mark.parametrize(
    ("spec", "pool", "ram", "cards"),
    [
        ("unified:64", Pool.UNIFIED, 64 * GIB, []),
        ("cpu:32", Pool.CPU, 32 * GIB, []),
        ("discrete:64+24+24", Pool.DISCRETE, 64 * GIB, [24 * GIB, 24 * GIB]),
        ("discrete:64+23.5", Pool.DISCRETE, 64 * GIB, [47 * GIB // 2]),
        ("cpu:0.5", Pool.CPU, GIB // 2, []),
        (" Unified:64 ", Pool.UNIFIED, 64 * GIB, []),
    ],
)
def test_specs(spec: str, pool: Pool, ram: int, cards: list[int]) -> None:
    machine = parse_spec(spec, node_id="box")
    assert (machine.node_id, machine.pool, machine.ram_bytes) == ("box", pool, ram)
    assert [device.total_bytes for device in machine.devices] == cards
    assert [device.device_id for device in machine.devices] == [str(index) for index in range(len(cards))]
    assert machine.source is Source.DECLARED


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "unified:64"),
        ("unified", "unified:64"),
        ("quantum:64", "unified:64"),
        ("unified:", "the RAM"),
        ("unified:lots", '"lots"'),
        ("unified:-4", "no number of GiB"),
        ("unified:0", "more than 0"),
        ("unified:1e3", "no number of GiB"),
        ("unified:inf", "no number of GiB"),
        ("unified:99999999", "at most"),
        ("unified:64+24", "only discrete"),
        ("discrete:64", "names no card"),
        ("discrete:64+", "card 1"),
        ("discrete:64+24+x", "card 2"),
        ("discrete:64+9999", "card 1"),
    ],
)
def test_wrong_specs_say_what_to_do(spec: str, says: str) -> None:
    with pytest.raises(MachineSpecError) as caught:
        parse_spec(spec)
    assert says in str(caught.value)


@pytest.mark.parametrize("read", [parse_spec, load_declared])
@pytest.mark.parametrize(
    ("spec", "instead"),
    [
        ("unified:64@darwin/arm64", "unified:64"),
        ("Discrete:64+24@linux/x86_64", "discrete:64+24"),
        ("cpu:32@", "cpu:32"),
    ],
)
def test_a_platform_belongs_to_a_machine_to_plan_for(read: Callable[[str], object], spec: str, instead: str) -> None:
    """The client's --machine takes one. A person who writes it here is told so, and not that 64@… is no number."""
    with pytest.raises(MachineSpecError) as caught:
        read(spec)
    said = str(caught.value)
    assert "names a platform" in said and "--machine" in said
    assert said.endswith(f"write {instead}")
    load_declared(instead)


@pytest.mark.parametrize(
    ("name", "pool", "ram", "cards"),
    [
        ("linux-container-cgroup1", Pool.CPU, 209_715_200, 0),
        ("linux-container-cgroup2", Pool.CPU, 8 * GIB, 0),
        ("two-cards-24", Pool.DISCRETE, 64 * GIB, 2),
        ("mac-m3-max-64", Pool.UNIFIED, 64 * GIB, 0),
    ],
)
def test_a_file_of_recorded_readings_declares_a_machine(name: str, pool: Pool, ram: int, cards: int) -> None:
    result = load_declared(str(RECORDED / f"{name}.json"), node_id="box")
    assert (result.machine.pool, result.machine.ram_bytes, len(result.machine.devices)) == (pool, ram, cards)
    assert (result.machine.source, result.machine.node_id) == (Source.DECLARED, "box")
    assert result.live.host_free_bytes is None


def test_the_setting_takes_a_spec_too() -> None:
    assert load_declared("unified:64").machine.ram_bytes == 64 * GIB
    with pytest.raises(MachineSpecError, match="names no card"):
        load_declared("discrete:64")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("not json", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "format"),
        ('{"format": "weighbridge.machine-readings/1"}', "platform is missing"),
        ('{"format": "weighbridge.machine-readings/1", "platform": "linux"}', "how much memory"),
        ('{"format": "weighbridge.machine-readings/1", "platform": "linux", "ram_byte": 1}', "ram_byte is no field"),
        ('{"format": "weighbridge.machine-readings/1", "platform": "linux", "ram_bytes": true}', "must be an integer"),
        (
            '{"format": "weighbridge.machine-readings/1", "platform": "linux", "devices": [{"name": "x"}]}',
            "devices[0].device_id is missing",
        ),
        (
            '{"format": "weighbridge.machine-readings/1", "platform": "linux", "cgroups": [{"version": 3}]}',
            "cgroups[0].version must be 1 or 2",
        ),
        (
            '{"format": "weighbridge.machine-readings/1", "platform": "linux", "devices": [{"device_id": "a", '
            '"name": "A", "temperatures": [{"sensor": "gpu", "celsius": NaN}]}]}',
            "devices[0].temperatures[0].celsius must be a number",
        ),
        ("x" * (2**20 + 1), "too large"),
    ],
)
def test_wrong_files_say_where_and_what(tmp_path: Path, content: str, says: str) -> None:
    file = tmp_path / "machine.json"
    file.write_text(content)
    with pytest.raises(MachineSpecError) as caught:
        load_declared(str(file))
    assert says in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(MachineSpecError, match="neither a machine nor a file"):
        load_declared("/no/such/file.json")


def test_readings_survive_being_recorded() -> None:
    readings = Readings(
        platform="linux",
        meminfo="MemTotal: 1 kB\n",
        cgroups=(CgroupLevel(2, "/a", {"memory.max": "max"}),),
        vm_stat="x",
        sysctl={"hw.memsize": "1"},
        ram_bytes=5,
        ram_available_bytes=0,
        devices=(
            DeviceReading("a", "A", 1, 0, 1, False, 1, ((7, None), (8, 9))),
            DeviceReading(
                "b",
                "B",
                processes=(),
                temperatures=(TemperatureReading("gpu", 61, 93.5),),
                slowdown_reasons=0,
                pci="0000:01:00.0",
            ),
        ),
        unified=False,
        processor="arm64",
        failures=("one",),
        drm=(DrmReading("card0", "amdgpu", "0000:03:00.0", "P", False, {"vendor": "0x1002\n"}), DrmReading("card1")),
        board="nvidia,tegra234",
        crash_reports=(CrashReport("x.panic", 1.5, "panic(cpu 1)"),),
    )
    assert from_json(to_json(readings)) == readings


def test_process_entries_are_pairs() -> None:
    text = to_json(Readings("linux", devices=(DeviceReading("a", "A", processes=((1, 2),)),)))
    with pytest.raises(ReadingsError, match=r"devices\[0\].processes\[0\]"):
        from_json(text.replace("2\n", '"2"\n'))
