"""A machine as ds4 sees it: what it computes on, and the memory that its decisions are made from."""

from dataclasses import dataclass

from weighbridge_fit.calibration.ds4 import Compute
from weighbridge_fit.capacity import Capacity, Pool
from weighbridge_fit.plans.errors import PlanError

_ARM = frozenset({"arm64", "aarch64"})
UNSUPPORTED_PLATFORM = "UNSUPPORTED_PLATFORM"


@dataclass(frozen=True, slots=True)
class Ds4Machine:
    """`ram_bytes` is physical memory, or the ceiling over everything where that is all that is known.

    `host_ceiling_bytes` and `card_ceiling_bytes` (0: no card) are what admission allows. `discrete` says that the
    model lies on a card. `platform_assumed`: unified memory on a platform nobody named is taken for Apple silicon.
    """

    compute: Compute
    ram_bytes: int
    arm: bool
    discrete: bool
    host_ceiling_bytes: int
    card_ceiling_bytes: int
    platform_assumed: bool

    @property
    def pool_ceiling_bytes(self) -> int:
        """The ceiling over the memory that the model lies in."""
        return self.card_ceiling_bytes if self.discrete else self.host_ceiling_bytes


def machine_from(capacity: Capacity, asked: str | None) -> Ds4Machine:
    """What ds4 computes on here, as asked or by the machine. Raises PlanError: UNSUPPORTED_PLATFORM, INVALID_OPTION.

    Upstream builds for Apple silicon (Metal) and for Linux (CUDA, x86-64 and arm64); on the processor it is a
    diagnosis, and that build panics macOS kernels (ds4 issue 483), so it is never planned there.
    """
    system, _, processor = capacity.platform.lower().partition("/")
    arm = processor in _ARM
    if system not in ("", "darwin", "linux") or (system == "darwin" and processor and not arm):
        message = f"ds4 runs on Macs with Apple silicon and on Linux, not on {capacity.platform}."
        raise PlanError(UNSUPPORTED_PLATFORM, "machine.platform", message)
    compute = _compute(capacity, system) if asked is None else _asked(asked, capacity, system)
    if compute is not Compute.METAL and system == "darwin":
        message = (
            "On a Mac ds4 runs on Metal, with unified memory: its processor build can bring macOS down, and there is "
            "no CUDA."
        )
        raise PlanError(UNSUPPORTED_PLATFORM, "machine.pool", message)
    assumed = not system and capacity.pool is Pool.UNIFIED and compute is Compute.METAL
    cards = [device.ceiling.effective for device in capacity.devices]
    discrete = capacity.pool is Pool.DISCRETE and compute is Compute.CUDA and bool(cards)
    return Ds4Machine(
        compute=compute,
        ram_bytes=capacity.total_ram or capacity.total.automatic,
        arm=arm or assumed,
        discrete=discrete,
        host_ceiling_bytes=capacity.host_ceiling.effective,
        card_ceiling_bytes=max(cards) if discrete else 0,
        platform_assumed=assumed,
    )


def _compute(capacity: Capacity, system: str) -> Compute:
    if capacity.pool is Pool.CPU:
        return Compute.CPU
    if capacity.pool is Pool.UNIFIED and system != "linux":
        return Compute.METAL
    return Compute.CUDA


def _asked(name: str, capacity: Capacity, system: str) -> Compute:
    field = "options.ds4.compute"
    try:
        compute = Compute(name)
    except ValueError:
        raise PlanError("INVALID_OPTION", field, "ds4 computes on metal, cuda or cpu.") from None
    if compute is Compute.METAL and (capacity.pool is not Pool.UNIFIED or system == "linux"):
        raise PlanError("INVALID_OPTION", field, "Metal needs a Mac with unified memory.")
    if compute is Compute.CUDA and (capacity.pool is Pool.CPU or system == "darwin"):
        raise PlanError("INVALID_OPTION", field, "CUDA needs Linux and a card, or memory that a card shares.")
    if compute is Compute.CPU and system == "darwin":
        message = "ds4's processor build can bring macOS down and is never planned there."
        raise PlanError("INVALID_OPTION", field, message)
    return compute
