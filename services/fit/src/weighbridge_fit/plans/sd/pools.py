"""Where sd-server keeps weights and buffers: by platform, kind of memory, and what it is told to keep off the card."""

from weighbridge_fit.capacity import Capacity, Pool


def media_pool(capacity: Capacity, cuda_build: bool = False) -> Pool:
    """The memory that sd-server computes in on a machine.

    Metal on Apple Silicon, the CPU on Intel Macs. Windows on Arm has no build with a GPU but CUDA's; everywhere else
    CUDA or Vulkan, where there is a card. Source: the public reference system's choice of builds (October 2026).
    """
    system, _, processor = capacity.platform.lower().partition("/")
    arm = processor in ("arm64", "aarch64")
    if system == "darwin":
        return Pool.UNIFIED if arm else Pool.CPU
    if system in ("windows", "win32") and arm and not cuda_build:
        return Pool.CPU
    return capacity.pool if capacity.pool is not Pool.DISCRETE or capacity.devices else Pool.CPU
