"""NVIDIA devices through NVML. Never raises: without a driver there are no devices.

The bindings are imported only where the driver's library loads; the attempt costs well under a millisecond.
"""

import contextlib
import ctypes
import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weighbridge_ledger.machine.readings import DeviceReading, TemperatureReading

# Values of nvml.h, which never change: the bindings have had several names for some of them.
_TEMPERATURE_OF_GPU = 0
_THRESHOLD_SLOWDOWN = 1
_THRESHOLD_MEMORY_MAX = 2
_FIELD_MEMORY_TEMPERATURE = 82


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

    def read(self, sensors: bool = True) -> tuple[DeviceReading, ...]:
        """Every device; a partitioned card (MIG) counts as its partitions. A figure that cannot be read is None.

        Partitions have no sensors of their own: each says what its card says.
        """
        count = self._ask("nvmlDeviceGetCount") or 0
        readings: list[DeviceReading] = []
        for index in range(count):
            handle = self._ask("nvmlDeviceGetHandleByIndex", index)
            if handle is None:
                continue
            partitions = self._partitions(handle)
            if partitions:
                found = [self._device(partition, f"{index}.{number}") for number, partition in enumerate(partitions)]
            else:
                found = [self._device(handle, str(index))]
            if sensors:
                temperatures, reasons = self._temperatures(handle), self._slowdown_reasons(handle)
                found = [replace(one, temperatures=temperatures, slowdown_reasons=reasons) for one in found]
            readings += found
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

    def _temperatures(self, handle: object) -> tuple[TemperatureReading, ...]:
        found = []
        celsius = _number(self._ask("nvmlDeviceGetTemperature", handle, _TEMPERATURE_OF_GPU))
        if celsius is not None:
            # Since Ada the driver says how far it is to the slow-down; before, where that is.
            margin = _number(self._ask("nvmlDeviceGetMarginTemperature", handle))
            slowdown = self._threshold(handle, _THRESHOLD_SLOWDOWN) if margin is None else celsius + margin
            found.append(TemperatureReading("gpu", celsius, slowdown))
        values = self._ask("nvmlDeviceGetFieldValues", handle, [_FIELD_MEMORY_TEMPERATURE]) or ()
        for value in values:
            # A field that is not supported is answered with a return code of its own.
            memory = _number(value.value.uiVal) if value.nvmlReturn == 0 else None
            if memory:  # 0: cards without that sensor
                found.append(TemperatureReading("memory", memory, self._threshold(handle, _THRESHOLD_MEMORY_MAX)))
        return tuple(found)

    def _threshold(self, handle: object, which: int) -> float | None:
        return _number(self._ask("nvmlDeviceGetTemperatureThreshold", handle, which))

    def _slowdown_reasons(self, handle: object) -> int | None:
        # The same question under its new and its old name.
        for function in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            reasons = self._ask(function, handle)
            if isinstance(reasons, int):
                return reasons
        return None

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


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
