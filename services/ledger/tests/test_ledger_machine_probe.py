"""The probes: files of a made-up Linux, a made-up NVML, and a probe that is slow, broken or asked often."""

import asyncio
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from weighbridge_ledger.machine.cgroups import CgroupDirectory, memory_directories
from weighbridge_ledger.machine.interpret import interpret
from weighbridge_ledger.machine.model import GIB, Pool, Source
from weighbridge_ledger.machine.probe import MachineProbe, ThisMachine, open_probe, this_node
from weighbridge_ledger.machine.probe_darwin import read_panics, read_sysctl, read_vm_stat, run_command
from weighbridge_ledger.machine.probe_linux import find_directories, read_board, read_cgroups, read_meminfo
from weighbridge_ledger.machine.probe_nvml import NvmlSession
from weighbridge_ledger.machine.readings import DeviceReading, Readings, TemperatureReading
from weighbridge_ledger.machine.recorded import from_json, to_json

V2_MOUNT = "34 25 0:29 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("own", "mounts", "directories"),
    [
        (
            "0::/user.slice/session.scope\n",
            V2_MOUNT,
            [(2, "/sys/fs/cgroup/user.slice/session.scope"), (2, "/sys/fs/cgroup/user.slice"), (2, "/sys/fs/cgroup")],
        ),
        ("0::/\n", V2_MOUNT, [(2, "/sys/fs/cgroup")]),
        # A container without a cgroup namespace: its own group is the mount's root.
        (
            "4:memory:/docker/abc\n0::/\n",
            "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
            [(1, "/sys/fs/cgroup/memory")],
        ),
        (
            "4:cpu,memory:/docker/abc/child\n",
            "35 31 0:32 /docker/abc /elsewhere/mem\\040ory ro master:1 - cgroup cgroup rw,cpu,memory\n",
            [(1, "/elsewhere/mem ory/child"), (1, "/elsewhere/mem ory")],
        ),
        # A process outside its namespace's root sees a path that the mount does not show.
        ("0::/../other\n", V2_MOUNT, [(2, "/sys/fs/cgroup")]),
        ("4:memory:/a\n0::/b\n", V1_MOUNT + V2_MOUNT.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), [
            (1, "/sys/fs/cgroup/memory/a"), (1, "/sys/fs/cgroup/memory"),
            (2, "/sys/fs/cgroup/unified/b"), (2, "/sys/fs/cgroup/unified"),
        ]),
        ("1:cpu:/a\n", "30 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n", []),
        ("nonsense", "nonsense", []),
    ],
)  # fmt: skip
def test_where_the_memory_files_are(own: str, mounts: str, directories: list[tuple[int, str]]) -> None:
    assert memory_directories(own, mounts) == tuple(CgroupDirectory(*pair) for pair in directories)


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_a_linux_read_from_its_files(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n",
            "proc/self/cgroup": "0::/pod/app\n",
            "proc/self/mountinfo": V2_MOUNT.replace("/sys/fs/cgroup", "/mnt/groups"),
            "mnt/groups/pod/memory.max": f"{8 * GIB}\n",
            "mnt/groups/pod/memory.current": f"{3 * GIB}\n",
            "mnt/groups/pod/memory.stat": f"inactive_file {GIB}\n",
            "mnt/groups/pod/app/memory.max": "max\n",
        },
    )
    levels = read_cgroups(find_directories(tmp_path), tmp_path)
    assert [level.path for level in levels] == ["/mnt/groups/pod/app", "/mnt/groups/pod"]
    readings = Readings("linux", meminfo=read_meminfo(tmp_path), cgroups=levels)
    result = interpret(readings)
    assert result.machine.ram_bytes == 8 * GIB
    assert result.live.host_free_bytes == 6 * GIB
    assert from_json(to_json(readings)) == readings


def test_a_system_without_proc_reads_nothing(tmp_path: Path) -> None:
    assert read_meminfo(tmp_path) is None
    assert find_directories(tmp_path) == ()
    assert read_cgroups((CgroupDirectory(2, "/gone"),), tmp_path) == ()


class FakeNvmlError(Exception):
    """What a driver says when it does not support a question."""


class FakeNvml:
    """Answers like the NVML bindings, from a list of devices; a missing answer raises."""

    nvmlMemory_v2 = 2  # noqa: N815  (the bindings' own name)

    def __init__(self, devices: list[dict[str, Any]], fail_init: bool = False) -> None:
        self.devices = devices
        self.fail_init = fail_init
        self.closed = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.fail_init:
            raise FakeNvmlError("driver not loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.closed = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        if self.devices[index].get("lost"):
            raise FakeNvmlError("GPU is lost")
        return self.devices[index]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: dict[str, Any]) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: dict[str, Any], index: int) -> dict[str, Any]:  # noqa: N802
        return dict(handle["partitions"][index])

    def nvmlDeviceGetMemoryInfo(self, handle: dict[str, Any], version: int | None = None) -> Any:  # noqa: N802
        return self._answer(handle, "memory" if version is None else "memory2")

    def nvmlDeviceGetTemperature(self, handle: dict[str, Any], sensor: int) -> Any:  # noqa: N802
        assert sensor == 0
        return self._answer(handle, "celsius")

    def nvmlDeviceGetTemperatureThreshold(self, handle: dict[str, Any], which: int) -> Any:  # noqa: N802
        return self._answer(handle, {1: "slowdown", 2: "memory_max"}[which])

    def nvmlDeviceGetFieldValues(self, handle: dict[str, Any], fields: list[int]) -> Any:  # noqa: N802
        assert fields == [82]
        return [self._answer(handle, "memory_celsius")]

    def __getattr__(self, name: str) -> Any:
        keys = {
            "nvmlDeviceGetMarginTemperature": "margin",
            "nvmlDeviceGetCurrentClocksEventReasons": "reasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons": "old_reasons",
            "nvmlDeviceGetUUID": "uuid",
            "nvmlDeviceGetName": "name",
            "nvmlDeviceGetMigMode": "mig",
            "nvmlDeviceGetComputeRunningProcesses": "compute",
            "nvmlDeviceGetGraphicsRunningProcesses": "graphics",
        }
        if name not in keys:
            raise AttributeError(name)
        return lambda handle: self._answer(handle, keys[name])

    @staticmethod
    def _answer(handle: dict[str, Any], key: str) -> Any:
        if key not in handle:
            raise FakeNvmlError("Not Supported")
        return handle[key]


def _memory(total: int, free: int, used: int) -> SimpleNamespace:
    return SimpleNamespace(total=total, free=free, used=used)


def _process(pid: int, used: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used)


def _session(devices: list[dict[str, Any]]) -> NvmlSession:
    session = NvmlSession.open(lambda: True, FakeNvml(devices))
    assert session is not None
    return session


def test_nvml_devices() -> None:
    card = {
        "uuid": b"GPU-1",
        "name": b"NVIDIA L4",
        "memory": _memory(24, 20, 4),
        "memory2": _memory(24, 20, 3),
        "compute": [_process(10, 2), _process(11, None)],
        "graphics": [_process(10, 1)],
    }
    spark = {"uuid": "GPU-2", "name": "NVIDIA GB10", "compute": [_process(12, 60)]}
    nameless = {"memory": _memory(8, 8, 0)}
    assert _session([card, {"lost": True}, spark, nameless]).read() == (
        # Version 2 of the memory figures: what the driver reserves is not in use.
        DeviceReading("GPU-1", "NVIDIA L4", 24, 20, 3, processes=((10, 2), (11, None))),
        DeviceReading("GPU-2", "NVIDIA GB10", processes=((12, 60),)),
        DeviceReading("3", "NVIDIA device", 8, 8, 0),
    )


def _field(value: int, code: int = 0) -> SimpleNamespace:
    return SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=value))


@pytest.mark.parametrize(
    ("answers", "temperatures", "reasons"),
    [
        # Until Ada the driver says where the slow-down is, since then how far away.
        ({"celsius": 61, "slowdown": 98, "old_reasons": 4}, (TemperatureReading("gpu", 61, 98),), 4),
        ({"celsius": 61, "margin": 30, "slowdown": 1, "reasons": 0}, (TemperatureReading("gpu", 61, 91),), 0),
        ({"celsius": 61, "memory_celsius": _field(0)}, (TemperatureReading("gpu", 61),), None),
        ({"memory_celsius": _field(70), "memory_max": 95}, (TemperatureReading("memory", 70, 95),), None),
        ({"memory_celsius": _field(70, code=3)}, (), None),  # NVML_ERROR_NOT_SUPPORTED
        ({}, (), None),
    ],
)
def test_nvml_sensors(
    answers: dict[str, Any], temperatures: tuple[TemperatureReading, ...], reasons: int | None
) -> None:
    session = _session([{"name": "NVIDIA L4", **answers}])
    (reading,) = session.read()
    assert (reading.temperatures, reading.slowdown_reasons) == (temperatures, reasons)
    (quiet,) = session.read(sensors=False)
    assert (quiet.temperatures, quiet.slowdown_reasons) == ((), None)


def test_a_partitioned_card_counts_as_its_partitions() -> None:
    partitions = [
        {"uuid": f"MIG-{index}", "name": "NVIDIA A100 MIG 3g.20gb", "memory": _memory(20, 19, 1)} for index in range(2)
    ]
    card = {
        "uuid": "GPU-1",
        "name": "NVIDIA A100",
        "mig": (1, 1),
        "memory": _memory(40, 0, 40),
        "partitions": partitions,
    }
    off = {"uuid": "GPU-2", "name": "NVIDIA A100", "mig": (0, 0), "memory": _memory(40, 40, 0)}
    readings = _session([card, off]).read()
    assert [reading.device_id for reading in readings] == ["MIG-0", "MIG-1", "GPU-2"]


def test_without_a_driver_there_is_no_session_and_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import would raise
    assert NvmlSession.open(lambda: False) is None
    assert NvmlSession.open(lambda: True) is None
    assert NvmlSession.open(lambda: True, FakeNvml([], fail_init=True)) is None


def test_a_session_can_be_given_back() -> None:
    nvml = FakeNvml([])
    session = NvmlSession.open(lambda: True, nvml)
    assert session is not None
    session.close()
    assert nvml.closed


def test_a_mac_is_asked_value_by_value() -> None:
    asked: list[Sequence[str]] = []

    def run(arguments: Sequence[str]) -> str | None:
        asked.append(arguments)
        return {"hw.memsize": "68719476736\n", "hw.optional.arm64": "1\n"}.get(arguments[-1])

    assert read_sysctl(run) == {"hw.memsize": "68719476736", "hw.optional.arm64": "1"}
    assert read_vm_stat(run) is None
    assert asked[-1] == ["/usr/bin/vm_stat"]


def test_a_mac_keeps_the_beginnings_of_its_latest_panics(tmp_path: Path) -> None:
    now = 1_800_000_000.0
    dated = {
        "panic-full-2027-01-15-075000.0002.panic": 600,
        "panic-full-2027-01-15-070000.0001.ips": 3600,
        "Kernel_2027-01-13-000000_mac.panic": 200_000,  # too old
        "python3-2027-01-15-075500.ips": 300,  # a program that crashed
        "notes.txt": 10,
    }
    for name, age in dated.items():
        (tmp_path / name).write_text("panic(cpu 1)" + "x" * 100_000)
        os.utime(tmp_path / name, (now - age, now - age))
    reports = read_panics(now, (tmp_path / "gone", tmp_path))
    assert [(report.name, report.modified_at) for report in reports] == [
        ("panic-full-2027-01-15-075000.0002.panic", now - 600),
        ("panic-full-2027-01-15-070000.0001.ips", now - 3600),
    ]
    assert len(reports[0].head) == 16 * 1024


def test_a_panic_report_that_goes_away_meanwhile_hides_no_other(tmp_path: Path) -> None:
    """macOS moves reports to another folder once they were sent."""
    now = 1_800_000_000.0
    (tmp_path / "panic-full-2027-01-15-075000.0002.panic").write_text("panic(cpu 1)")
    os.utime(tmp_path / "panic-full-2027-01-15-075000.0002.panic", (now - 600, now - 600))
    (tmp_path / "panic-full-2027-01-15-070000.0001.ips").symlink_to(tmp_path / "moved away")
    assert [report.modified_at for report in read_panics(now, (tmp_path,))] == [now - 600]


def test_the_device_tree_names_a_jetson(tmp_path: Path) -> None:
    _write(tmp_path, {"proc/device-tree/compatible": "nvidia,p3701-0000\0nvidia,tegra234\0"})
    assert interpret(Readings("linux", ram_bytes=32 * GIB, board=read_board(tmp_path))).machine.pool is Pool.UNIFIED
    assert read_board(tmp_path / "gone") == ""


def test_a_command_that_fails_is_no_reading() -> None:
    assert run_command([sys.executable, "-c", "print(7)"]) == "7\n"
    assert run_command([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert run_command(["/no/such/command"]) is None


def test_this_machine_reads_and_interprets() -> None:
    result = interpret(ThisMachine(open_nvml=lambda: None).read())
    assert 0 < result.machine.ram_bytes <= psutil.virtual_memory().total
    assert result.machine.pool in (Pool.CPU, Pool.UNIFIED)


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


CARD = DeviceReading("GPU-1", "NVIDIA L4", 24 * GIB, 20 * GIB, 4 * GIB)
READINGS = Readings("linux", ram_bytes=64 * GIB, ram_available_bytes=40 * GIB, devices=(CARD,))


async def test_readings_are_used_again_for_a_second_and_shared_by_callers() -> None:
    clock, reads = Clock(), 0

    def read() -> Readings:
        nonlocal reads
        reads += 1
        return READINGS

    probe = MachineProbe(interpret(READINGS), read, clock=clock, wall_clock=lambda: 5.0)
    first, second = await asyncio.gather(probe.live(), probe.live())
    assert first == second
    assert (first.host_free_bytes, first.measured_at, reads) == (40 * GIB, 5.0, 1)
    clock.now += 0.9
    await probe.live()
    assert reads == 1
    clock.now += 0.2
    await probe.live()
    assert reads == 2


async def test_a_probe_that_hangs_is_given_up_and_not_started_twice() -> None:
    release, reads = threading.Event(), 0

    def read() -> Readings:
        nonlocal reads
        reads += 1
        release.wait(60)
        return READINGS

    clock = Clock()
    probe = MachineProbe(interpret(READINGS), read, clock=clock, timeout_s=0.01)
    for _ in range(3):
        live = await probe.live()
        assert live.host_free_bytes is None
        assert [finding.reason for finding in live.findings] == ["PROBE_TIMED_OUT"]
        clock.now += 5
    assert reads == 1
    release.set()


async def test_a_probe_that_breaks_is_unknown_and_said() -> None:
    reads = 0

    def read() -> Readings:
        nonlocal reads
        reads += 1
        raise OSError("driver gone")

    clock = Clock()
    probe = MachineProbe(interpret(READINGS), read, clock=clock)
    for _ in range(3):
        live = await probe.live()
        assert (live.host_free_bytes, [finding.reason for finding in live.findings]) == (None, ["PROBE_FAILED"])
    assert reads == 1, "no oftener than one that answers"
    clock.now += 1
    await probe.live()
    assert reads == 2


async def test_a_card_that_stops_answering_stays_and_is_unknown() -> None:
    probe = MachineProbe(interpret(READINGS), lambda: Readings("linux", ram_bytes=64 * GIB, ram_available_bytes=GIB))
    live = await probe.live()
    assert [device.device_id for device in probe.machine.devices] == ["GPU-1"]
    assert live.device("GPU-1").free_bytes is None
    assert [finding.reason for finding in live.findings] == ["DEVICE_NOT_ANSWERING"]


async def test_a_declared_machine_is_never_measured() -> None:
    probe = await open_probe("discrete:64+24", node_id="box")
    assert (probe.machine.source, probe.machine.node_id) == (Source.DECLARED, "box")
    live = await probe.live()
    assert (live.host_free_bytes, live.measured_at) == (None, None)


async def test_without_a_setting_this_machine_is_detected() -> None:
    probe = await open_probe()
    assert probe.machine.source is Source.DETECTED
    assert probe.machine.node_id
    assert (await probe.live()).measured_at is not None


def test_a_nodes_name_stays_and_does_not_show_the_machine_id(tmp_path: Path) -> None:
    file = tmp_path / "machine-id"
    file.write_text("0123456789abcdef0123456789abcdef\n")
    name = this_node(file)
    assert name == this_node(file)
    assert name.startswith("node-")
    assert "0123456789abcdef" not in name
    file.write_text("ffffffffffffffffffffffffffffffff\n")
    assert this_node(file) != name
    assert this_node(tmp_path / "gone")
