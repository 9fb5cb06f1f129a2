"""Recorded readings → machine and live memory."""

from dataclasses import replace
from pathlib import Path

import pytest
from weighbridge_ledger.machine.ceilings import host_share
from weighbridge_ledger.machine.device_kind import DeviceKind, kind_by_name
from weighbridge_ledger.machine.interpret import UnreadableMachineError, interpret
from weighbridge_ledger.machine.model import GIB, Interpretation, Pool, Source
from weighbridge_ledger.machine.readings import CgroupLevel, DeviceReading, Readings
from weighbridge_ledger.machine.recorded import from_json

RECORDED = Path(__file__).parent / "machine_readings"
MIB = 2**20


def recorded(name: str) -> Readings:
    return from_json((RECORDED / f"{name}.json").read_text())


def reasons(result: Interpretation) -> set[str]:
    return {finding.reason for finding in (*result.findings, *result.live.findings)}


def meminfo(total_kib: int, available_kib: int | None) -> str:
    available = "" if available_kib is None else f"MemAvailable:   {available_kib} kB\n"
    return f"MemTotal:       {total_kib} kB\nMemFree:         1000 kB\n{available}"


def test_a_version_2_container_has_the_lowest_limit_of_its_hierarchy() -> None:
    result = interpret(recorded("linux-container-cgroup2"))
    assert (result.machine.pool, result.machine.ram_bytes) == (Pool.CPU, 8 * GIB)
    # 5 GiB charged to the pod, 3 of them page cache that can be dropped: 2 used, 6 free.
    assert result.live.host_used_bytes == 2 * GIB
    assert result.live.host_free_bytes == 6 * GIB
    assert "CONTAINER_LIMIT" in reasons(result)


def test_a_version_1_container_of_200_mib() -> None:
    result = interpret(recorded("linux-container-cgroup1"))
    assert result.machine.ram_bytes == 209_715_200
    # 70 MiB charged, 30 of them cache.
    assert result.live.host_used_bytes == 40 * MIB
    assert result.live.host_free_bytes == 160 * MIB


@pytest.mark.parametrize("text", ["max", "max\n", "9223372036854771712\n", "9223372036854710272", str(2**62), "-1"])
@pytest.mark.parametrize("version", [1, 2])
def test_no_limit_is_no_number(version: int, text: str) -> None:
    name = "memory.max" if version == 2 else "memory.limit_in_bytes"
    level = CgroupLevel(version, "/sys/fs/cgroup", {name: text})
    result = interpret(Readings("linux", meminfo=meminfo(64 * 2**20, 32 * 2**20), cgroups=(level,)))
    assert result.machine.ram_bytes == 64 * GIB
    assert result.live.host_free_bytes == 32 * GIB
    assert reasons(result) == set()


def test_a_limit_above_the_memory_changes_nothing() -> None:
    level = CgroupLevel(2, "/", {"memory.max": str(100 * GIB), "memory.current": "0"})
    assert interpret(Readings("linux", ram_bytes=64 * GIB, cgroups=(level,))).machine.ram_bytes == 64 * GIB


def test_a_throttling_limit_counts_and_a_host_short_of_memory_too() -> None:
    level = CgroupLevel(2, "/", {"memory.max": "max", "memory.high": str(8 * GIB), "memory.current": str(GIB)})
    result = interpret(Readings("linux", meminfo=meminfo(64 * 2**20, 2 * 2**20), cgroups=(level,)))
    assert result.machine.ram_bytes == 8 * GIB
    assert result.live.host_free_bytes == 2 * GIB, "7 GiB beneath the limit, but the host has only 2"


def test_a_version_1_ancestor_that_a_container_cannot_see_counts() -> None:
    files = {
        "memory.limit_in_bytes": "9223372036854771712",
        "memory.stat": f"hierarchical_memory_limit {3 * GIB}",
        "memory.usage_in_bytes": str(GIB),
    }
    result = interpret(Readings("linux", ram_bytes=64 * GIB, cgroups=(CgroupLevel(1, "/", files),)))
    assert result.machine.ram_bytes == 3 * GIB


@pytest.mark.parametrize(("text", "reason"), [("lots", "CGROUP_LIMIT_UNREADABLE"), ("0", "CGROUP_LIMIT_NOT_POSITIVE")])
def test_a_limit_that_cannot_be_is_rejected_by_name(text: str, reason: str) -> None:
    level = CgroupLevel(2, "/", {"memory.max": text})
    result = interpret(Readings("linux", ram_bytes=64 * GIB, cgroups=(level,)))
    assert result.machine.ram_bytes == 64 * GIB
    assert reason in reasons(result)


def test_unreadable_use_beneath_a_limit_is_unknown_not_zero() -> None:
    level = CgroupLevel(2, "/", {"memory.max": str(8 * GIB)})
    result = interpret(Readings("linux", meminfo=meminfo(64 * 2**20, 32 * 2**20), cgroups=(level,)))
    assert (result.live.host_free_bytes, result.live.host_used_bytes) == (None, None)
    assert "CGROUP_USAGE_UNREADABLE" in reasons(result)


def test_two_cards_are_two_devices() -> None:
    result = interpret(recorded("two-cards-24"))
    assert result.machine.pool is Pool.DISCRETE
    assert [device.total_bytes for device in result.machine.devices] == [24 * GIB, 24 * GIB]
    assert len({device.device_id for device in result.machine.devices}) == 2
    first = result.live.device(result.machine.devices[0].device_id)
    assert (first.used_bytes, first.free_bytes) == (612 * MIB, (24576 - 612 - 350) * MIB)


def test_dgx_spark_is_unified_and_its_gpu_has_no_memory_of_its_own() -> None:
    result = interpret(recorded("dgx-spark"))
    assert (result.machine.pool, result.machine.devices) == (Pool.UNIFIED, ())
    # RAM − 16 GiB; the reference's 105 is for a round 121.
    assert host_share(result.machine) == result.machine.ram_bytes - 16 * GIB
    assert reasons(result) == set()


@pytest.mark.parametrize(
    ("cuda_free", "available"),
    # Published on a GB10 while a 60 GiB file was written and deleted (GiB): the driver's free memory falls with the
    # page cache, the kernel's available memory does not.
    [("103.25", "115.85"), ("41.52", "115.65"), ("103.30", "115.87")],
)
def test_page_cache_takes_no_memory_away_on_unified_machines(cuda_free: str, available: str) -> None:
    total_kib, available_kib = int(121.69 * 2**20), int(float(available) * 2**20)
    gpu = DeviceReading("GPU-1", "NVIDIA GB10", total_bytes=121 * GIB, free_bytes=int(float(cuda_free) * GIB))
    result = interpret(Readings("linux", meminfo=meminfo(total_kib, available_kib), devices=(gpu,)))
    assert result.live.host_free_bytes == available_kib * 1024
    assert result.live.host_used_bytes == (total_kib - available_kib) * 1024


def test_apple_silicon() -> None:
    result = interpret(recorded("mac-m3-max-64"))
    assert (result.machine.pool, result.machine.ram_bytes) == (Pool.UNIFIED, 64 * GIB)
    assert result.machine.gpu_wired_bytes is None, "0 is the system's own default, not a limit of no bytes"
    assert result.live.host_free_bytes == 1_321_000 * 16_384
    # 64 GiB − 200,000 free − 450,000 file-backed − 50,000 purgeable pages.
    assert result.live.host_used_bytes == 64 * GIB - 700_000 * 16_384


def test_intel_macs_are_not_unified() -> None:
    machine = interpret(recorded("mac-intel-32")).machine
    assert machine.pool is Pool.CPU
    assert host_share(machine) == 32 * GIB * 60 // 100


def test_vm_stat_categories_overlap_so_they_count_for_nine_tenths_at_most() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 4096 bytes)\nPages free: 256.\nPages inactive: 4096.\n"
        "Pages purgeable: 256.\nFile-backed pages: 512.\n"
    )
    result = interpret(Readings("darwin", vm_stat=text, ram_bytes=16 * MIB))
    assert result.live.host_free_bytes == 16 * MIB * 9 // 10
    assert result.live.host_used_bytes == 12 * MIB, "16 MiB less 1 free and 3 cached"


def test_vm_stat_without_cache_figures_leaves_use_unknown() -> None:
    text = "Mach Virtual Memory Statistics: (page size of 4096 bytes)\nPages free: 256.\n"
    live = interpret(Readings("darwin", vm_stat=text, ram_bytes=16 * MIB)).live
    assert (live.host_free_bytes, live.host_used_bytes) == (MIB, None)


def test_another_text_than_vm_stat_is_no_reading() -> None:
    result = interpret(Readings("darwin", vm_stat="vm_stat: command failed", ram_bytes=16 * GIB))
    assert result.live.host_free_bytes is None
    assert "FREE_MEMORY_UNSUPPORTED" in reasons(result)


@pytest.mark.parametrize(
    ("value", "wired", "reason"),
    [
        ("40960", 40 * GIB, "WIRED_LIMIT"),
        ("0", None, None),
        ("-1", None, "WIRED_LIMIT_IMPOSSIBLE"),
        ("99999999", None, "WIRED_LIMIT_IMPOSSIBLE"),
    ],
)
def test_the_limit_macos_was_told_for_the_gpu(value: str, wired: int | None, reason: str | None) -> None:
    readings = recorded("mac-m3-max-64")
    result = interpret(replace(readings, sysctl={**readings.sysctl, "iogpu.wired_limit_mb": value}))
    assert result.machine.gpu_wired_bytes == wired
    assert reasons(result) == (set() if reason is None else {reason})


def test_linux_available_memory_is_in_kib_and_missing_is_unknown() -> None:
    readings = Readings("linux", meminfo=meminfo(64 * 2**20, 42_000_000))
    assert interpret(readings).live.host_free_bytes == 42_000_000 * 1024
    old = interpret(replace(readings, meminfo=meminfo(64 * 2**20, None)))
    assert old.live.host_free_bytes is None
    assert "FREE_MEMORY_UNSUPPORTED" in reasons(old)


def test_impossible_readings_are_rejected_by_name() -> None:
    result = interpret(recorded("impossible"))
    assert [device.device_id for device in result.machine.devices] == ["GPU-5090"]
    assert result.machine.devices[0].allocation_limit_bytes is None
    live = result.live.device("GPU-5090")
    assert (live.free_bytes, live.used_bytes) == (None, None)
    assert result.live.host_free_bytes is None
    assert reasons(result) == {
        "FREE_EXCEEDS_TOTAL",
        "ALLOCATION_LIMIT_IMPOSSIBLE",
        "DEVICE_MEMORY_NOT_POSITIVE",
        "DEVICE_MEMORY_IMPOSSIBLE",
        "DEVICE_MEMORY_UNSUPPORTED",
        "DUPLICATE_DEVICE",
    }


def test_messages_have_gib_and_no_byte_counts() -> None:
    result = interpret(recorded("impossible"))
    sentences = [finding.message for finding in (*result.findings, *result.live.findings)]
    assert any("54.07 GiB free of 31.35 GiB" in sentence for sentence in sentences)
    assert not any(run.isdigit() and len(run) >= 10 for sentence in sentences for run in sentence.split())


def test_more_used_than_there_is_is_rejected() -> None:
    card = DeviceReading("GPU-1", "NVIDIA L4", total_bytes=24 * GIB, used_bytes=25 * GIB)
    result = interpret(Readings("linux", ram_bytes=64 * GIB, devices=(card,)))
    assert result.live.device("GPU-1").used_bytes is None
    assert "USED_EXCEEDS_TOTAL" in reasons(result)


def test_unsupported_use_of_a_card_is_unknown_and_said() -> None:
    card = DeviceReading("GPU-1", "NVIDIA L4", total_bytes=24 * GIB)
    result = interpret(Readings("linux", ram_bytes=64 * GIB, ram_available_bytes=GIB, devices=(card,)))
    live = result.live.device("GPU-1")
    assert (live.free_bytes, live.used_bytes, live.processes) == (None, None, None)
    assert reasons(result) == {"DEVICE_USE_UNSUPPORTED"}


def test_a_shared_pool_is_never_larger_than_the_machine() -> None:
    result = interpret(recorded("strix-halo-128"))
    assert (result.machine.pool, result.machine.ram_bytes) == (Pool.UNIFIED, 124 * GIB)
    assert "DEVICE_EXCEEDS_PHYSICAL" in reasons(result)


@pytest.mark.parametrize("ram", [0, -1, 2**60])
def test_an_impossible_ram_gives_way_to_the_next_reading(ram: int) -> None:
    readings = Readings("darwin", sysctl={"hw.memsize": str(ram)}, ram_bytes=16 * GIB)
    result = interpret(readings)
    assert result.machine.ram_bytes == 16 * GIB
    assert reasons(result) & {"RAM_NOT_POSITIVE", "RAM_IMPOSSIBLE"}


def test_without_any_ram_figure_the_error_says_what_to_do() -> None:
    with pytest.raises(UnreadableMachineError, match="unified:64"):
        interpret(Readings("linux", meminfo="nothing here"))


# (RAM, name, GPU memory, explicit statement) → pool, host share in tenths of a GiB. Rows pinned by the reference's
# tests, and the rule for unknown kinds.
@pytest.mark.parametrize(
    ("ram", "name", "gpu", "unified", "pool"),
    [
        (64, "NVIDIA GeForce RTX 5080", 16, None, Pool.DISCRETE),
        (121, "NVIDIA GB10", 120, None, Pool.UNIFIED),
        (121, "NVIDIA DGX Spark", 119, None, Pool.UNIFIED),
        (32, "Intel(R) UHD Graphics 770", 12, None, Pool.UNIFIED),
        (32, "Intel(R) Arc(TM) A770 Graphics", 12, None, Pool.DISCRETE),
        (16, "NVIDIA GeForce RTX 4080", 16, None, Pool.DISCRETE),  # equal sizes prove nothing
        (16, "Mystery accelerator", 16, None, Pool.UNIFIED),
        (16, "Mystery accelerator", 12, None, Pool.UNIFIED),  # 0.75 exactly
        (16, "Mystery accelerator", 11, None, Pool.DISCRETE),
        (16, "Mystery accelerator", 16, False, Pool.DISCRETE),  # an explicit statement wins over the ratio
        (121, "NVIDIA GB10", 119, False, Pool.DISCRETE),
        (64, "NVIDIA GeForce RTX 5080", 16, True, Pool.UNIFIED),
    ],
)
def test_shared_or_own_memory(ram: int, name: str, gpu: int, unified: bool | None, pool: Pool) -> None:
    device = DeviceReading("d", name, total_bytes=gpu * GIB)
    machine = interpret(Readings("linux", ram_bytes=ram * GIB, devices=(device,), unified=unified)).machine
    assert machine.pool is pool
    assert len(machine.devices) == (1 if pool is Pool.DISCRETE else 0)


def test_the_ratio_is_of_built_in_memory_not_of_a_containers_limit() -> None:
    device = DeviceReading("d", "Mystery accelerator", total_bytes=24 * GIB)
    level = CgroupLevel(2, "/", {"memory.max": str(8 * GIB), "memory.current": "0"})
    machine = interpret(Readings("linux", ram_bytes=64 * GIB, cgroups=(level,), devices=(device,))).machine
    assert (machine.pool, machine.ram_bytes) == (Pool.DISCRETE, 8 * GIB)


def test_integrated_graphics_beside_a_card_add_nothing() -> None:
    devices = (
        DeviceReading("igpu", "AMD Radeon Graphics", total_bytes=16 * GIB),
        DeviceReading("card", "NVIDIA GeForce RTX 3060", total_bytes=12 * GIB),
    )
    result = interpret(Readings("linux", ram_bytes=32 * GIB, devices=devices))
    assert [device.device_id for device in result.machine.devices] == ["card"]
    assert "SHARED_DEVICE_IGNORED" in reasons(result)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qualcomm(R) Adreno(TM) X1-85 GPU", DeviceKind.SHARED),
        ("Intel(R) Arc(TM) Graphics", DeviceKind.SHARED),
        ("Intel(R) Arc(TM) Pro B60 Graphics", DeviceKind.OWN),
        ("Intel(R) Iris(R) Xe Graphics", DeviceKind.SHARED),
        ("AMD Radeon RX 7900 XTX", DeviceKind.OWN),
        ("AMD Radeon VII", DeviceKind.OWN),
        ("AMD Radeon Pro W7900", DeviceKind.OWN),
        ("AMD Radeon AI Pro R9700", DeviceKind.OWN),
        ("AMD Instinct MI300X", DeviceKind.OWN),
        ("AMD FirePro W9100", DeviceKind.OWN),
        ("AMD Radeon(TM) 780M", DeviceKind.SHARED),
        ("AMD Radeon Vega 8 Graphics", DeviceKind.SHARED),
        ("Quadro RTX 6000", DeviceKind.OWN),
        ("Orin (nvgpu)", DeviceKind.SHARED),
        ("NVIDIA GB100", DeviceKind.OWN),  # not a GB10
        ("NVIDIA Thor", DeviceKind.SHARED),
        ("NVIDIA GH200 480GB", DeviceKind.OWN),
        ("AMD Instinct MI300A", DeviceKind.SHARED),
        ("llvmpipe", DeviceKind.UNKNOWN),
    ],
)
def test_kinds_by_name(name: str, kind: DeviceKind) -> None:
    assert kind_by_name(name) is kind


def test_recorded_live_memory_does_not_count_when_declared() -> None:
    result = interpret(recorded("two-cards-24"), source=Source.DECLARED)
    assert result.machine.source is Source.DECLARED
    assert result.live.host_free_bytes is None
    assert result.live.devices == ()


@pytest.mark.parametrize(
    ("total", "free", "used", "left"),
    # Published for one card under ROCm, in MiB: the compute library leaves out what the display holds.
    [(16_368, 16_332, 162, 16_206), (16_368, 5630, 10_914, 5454), (24_576, 23_614, 612, 23_614)],
)
def test_of_two_sources_the_lower_one_counts(total: int, free: int, used: int, left: int) -> None:
    card = DeviceReading("d", "AMD Radeon RX 7800 XT", total * MIB, free * MIB, used * MIB, integrated=False)
    live = interpret(Readings("linux", ram_bytes=64 * GIB, devices=(card,))).live.device("d")
    assert live.free_bytes == left * MIB


def test_a_process_that_holds_more_than_there_is_is_rejected_by_name() -> None:
    card = DeviceReading("d", "NVIDIA L4", 24 * GIB, 20 * GIB, 4 * GIB, processes=((1, 2**64 - 1), (2, GIB), (3, None)))
    result = interpret(Readings("linux", ram_bytes=64 * GIB, ram_available_bytes=GIB, devices=(card,)))
    processes = result.live.device("d").processes
    assert processes is not None
    assert [process.used_bytes for process in processes] == [None, GIB, None]
    assert reasons(result) == {"PROCESS_USE_IMPOSSIBLE"}


def test_swap_of_version_2_is_neither_memory_nor_a_limit() -> None:
    files = {"memory.max": str(8 * GIB), "memory.current": str(3 * GIB), "memory.stat": ""}
    swapped = {"memory.swap.max": str(GIB), "memory.swap.current": str(GIB), "memory.swap.high": "max"}
    one, other = (
        interpret(Readings("linux", meminfo=meminfo(64 * 2**20, 60 * 2**20), cgroups=(CgroupLevel(2, "/", level),)))
        for level in (files, {**files, **swapped})
    )
    assert one.live == other.live
    assert (other.machine.ram_bytes, other.live.host_free_bytes) == (8 * GIB, 5 * GIB)


def test_an_ancestors_limit_over_memory_and_swap_counts_in_a_version_1_container() -> None:
    files = {
        "memory.limit_in_bytes": str(2**63 - 4096),
        "memory.usage_in_bytes": str(GIB),
        "memory.memsw.limit_in_bytes": str(2**63 - 4096),
        "memory.memsw.usage_in_bytes": str(2 * GIB),
        "memory.stat": f"hierarchical_memsw_limit {6 * GIB}",
    }
    result = interpret(
        Readings("linux", meminfo=meminfo(64 * 2**20, 60 * 2**20), cgroups=(CgroupLevel(1, "/", files),))
    )
    assert (result.machine.ram_bytes, result.live.host_free_bytes) == (6 * GIB, 4 * GIB)
    without_accounting = {name: text for name, text in files.items() if "memsw" not in name}
    result = interpret(
        Readings("linux", meminfo=meminfo(64 * 2**20, 60 * 2**20), cgroups=(CgroupLevel(1, "/", without_accounting),))
    )
    assert (result.machine.ram_bytes, result.live.host_free_bytes) == (64 * GIB, 60 * GIB)


def test_kernel_objects_that_can_be_reclaimed_are_not_used() -> None:
    stat = f"anon {3 * GIB}\nkernel {GIB}\ninactive_file {GIB}\nslab_reclaimable {GIB}\nslab_unreclaimable 0\n"
    files = {"memory.max": str(8 * GIB), "memory.current": str(5 * GIB), "memory.stat": stat}
    readings = Readings("linux", meminfo=meminfo(64 * 2**20, 60 * 2**20), cgroups=(CgroupLevel(2, "/", files),))
    assert interpret(readings).live.host_free_bytes == 5 * GIB
