"""Reports of kernel panics: which of them the GPU's driver caused. Pure."""

import re
from collections.abc import Iterable

from weighbridge_ledger.machine.readings import CrashReport

# Apple's GPU drivers as panics name them: the file that panicked ("@IOGPUMemory.cpp:550"), the kernel extension in the
# backtrace (com.apple.iokit.IOGPUFamily, com.apple.AGXG14X), the firmware (AGXFirmware, AGXArmFirmware).
_GPU_DRIVER = re.compile(r"IOGPU|\bAGX[A-Z0-9]|AGX\w*Firmware|IOAccelerator|GPUPanic", re.ASCII)

# From here on a report lists every kernel extension of the system, the GPU's among them, whatever panicked.
_LISTS = re.compile(r"last (started|loaded|stopped) kext|loaded kexts", re.IGNORECASE)


def is_gpu_panic(report: CrashReport) -> bool:
    """Whether the GPU's driver panicked."""
    lists = _LISTS.search(report.head)
    told = report.head if lists is None else report.head[: lists.start()]
    return "panic" in told.lower() and _GPU_DRIVER.search(told) is not None


def last_gpu_panic(reports: Iterable[CrashReport]) -> float | None:
    """When the GPU's driver last brought the system down, in seconds since the epoch; None: no report says so."""
    return max((report.modified_at for report in reports if is_gpu_panic(report)), default=None)
