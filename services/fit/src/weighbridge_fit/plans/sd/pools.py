"""Where sd-server keeps weights and buffers: by what it was built for, by platform and kind of memory."""

from enum import StrEnum

from weighbridge_fit.capacity import Capacity, Pool


class Backend(StrEnum):
    """What a build of sd-server computes on, by ggml's names. Where a build for a GPU finds none, it computes on the
    processor."""

    CPU = "cpu"
    CUDA = "cuda"
    HIP = "hip"
    METAL = "metal"
    MUSA = "musa"
    OPENCL = "opencl"
    SYCL = "sycl"
    VULKAN = "vulkan"


def media_pool(capacity: Capacity, backend: Backend | None = None) -> Pool:
    """The memory that sd-server computes in on a machine. `backend` None: the build is not known.

    Of an unknown build: Metal on Apple Silicon, the CPU on Intel Macs. Windows on Arm has no build with a GPU but
    CUDA's; everywhere else CUDA or Vulkan, where there is a card. Source: the public reference system's choice of
    builds (October 2026).
    """
    system, _, processor = capacity.platform.lower().partition("/")
    arm = processor in ("arm64", "aarch64")
    if backend is Backend.CPU:
        return Pool.CPU
    if system == "darwin":
        return Pool.UNIFIED if arm else Pool.CPU
    if system in ("windows", "win32") and arm and backend is None:
        return Pool.CPU
    return capacity.pool if capacity.pool is not Pool.DISCRETE or capacity.devices else Pool.CPU
