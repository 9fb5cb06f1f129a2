"""NVIDIA devices through NVML. Never raises: without a driver there are no devices.

The bindings are imported only where the driver's library loads; the attempt costs well under a millisecond.
"""

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Callable
from typing import Any

from weighbridge_ledger.machine.readings import DeviceReading


def library_present() -> bool:
    """Whether the driver's library can be loaded. Nothing is searched: the loader's own path decides."""
    if sys.platform == "darwin":
        return False
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


class NvmlSession:
    """An initialised NVML. Kept open between readings: opening may have to wake the driver up."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml

    @classmethod
    def open(cls, present: Callable[[], bool] = library_present, nvml: Any = None) -> "NvmlSession | None":
        """A session, or None where there is no driver or it does not answer."""
        if not present():
            return None
        try:
            bindings = importlib.import_module("pynvml") if nvml is None else nvml
            bindings.nvmlInit()
        except Exception:  # The bindings raise their own errors, OSError and AttributeError alike.
            return None
        return cls(bindings)

    def close(self) -> None:
        """Give the driver back."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def read(self) -> tuple[DeviceReading, ...]:
        """Every device; a partitioned card (MIG) counts as its partitions. A figure that cannot be read is None."""
        count = self._ask("nvmlDeviceGetCount") or 0
        readings: list[DeviceReading] = []
        for index in range(count):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            partitions = self._partitions(handle)
            if partitions:
                readings += [
                    self._device(partition, f"{index}.{number}") for number, partition in enumerate(partitions)
                ]
            else:
                readings.append(self._device(handle, str(index)))
        return tuple(readings)

    def _ask(self, function: str, *arguments: object) -> Any:
        """The answer of one NVML function, None where it is not supported, not offered or fails."""
        try:
            return getattr(self._nvml, function)(*arguments)
        except Exception:  # As above: whatever the bindings raise.
            return None

    def _partitions(self, handle: object) -> list[object]:
        mode = self._ask("nvmlDeviceGetMigMode", handle)
        if not mode or mode[0] != 1:
            return []
        most = self._ask("nvmlDeviceGetMaxMigDeviceCount", handle) or 0
        found = (self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in range(most))
        return [partition for partition in found if partition is not None]

    def _device(self, handle: object, fallback_id: str) -> DeviceReading:
        memory = self._memory(handle)
        return DeviceReading(
            device_id=_text(self._ask("nvmlDeviceGetUUID", handle)) or fallback_id,
            name=_text(self._ask("nvmlDeviceGetName", handle)) or "NVIDIA device",
            total_bytes=None if memory is None else int(memory.total),
            free_bytes=None if memory is None else int(memory.free),
            used_bytes=None if memory is None else int(memory.used),
            processes=self._processes(handle),
        )

    def _memory(self, handle: object) -> Any:
        # Version 2 keeps what driver and firmware reserve out of `used`.
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None if version is None else self._ask("nvmlDeviceGetMemoryInfo", handle, version)
        return self._ask("nvmlDeviceGetMemoryInfo", handle) if memory is None else memory

    def _processes(self, handle: object) -> tuple[tuple[int, int | None], ...] | None:
        lists = [
            found
            for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses")
            if (found := self._ask(function, handle)) is not None
        ]
        if not lists:
            return None
        held: dict[int, int | None] = {}
        for process in (process for found in lists for process in found):
            used = process.usedGpuMemory
            before = held.get(int(process.pid))
            # A process that computes and draws is in both lists with the same figure.
            held[int(process.pid)] = before if used is None else max(int(used), before or 0)
        return tuple(held.items())


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
