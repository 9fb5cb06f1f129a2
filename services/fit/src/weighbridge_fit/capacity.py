"""A machine's ceilings as fit needs them. They come from the ledger alone; nothing in here computes one."""

from dataclasses import dataclass, field
from enum import Enum


class Pool(Enum):
    """The kind of machine memory."""

    UNIFIED = "UNIFIED"
    DISCRETE = "DISCRETE"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One ceiling in bytes. `effective` is what admission uses: the person's limit where it is the lower one."""

    automatic: int
    effective: int
    limit: int | None = None

    @property
    def limited(self) -> bool:
        """Whether the person's limit decides."""
        return self.limit is not None and self.limit < self.automatic


@dataclass(frozen=True, slots=True)
class DeviceCeiling:
    """One card's ceiling, the largest single allocation it accepts, and its physical memory, all in bytes (0: unknown).

    Engines that take a share of a card reckon from its physical memory, which is more than the ceiling.
    """

    device_id: str
    ceiling: Ceiling
    allocation_limit: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """One machine: the host's share, each card, and everything together.

    `total_ram` is physical memory in bytes (0: not known), `platform` operating system and processor, such as
    darwin/arm64 ("": not known): some engines decide by them.
    """

    pool: Pool
    host: Ceiling
    total: Ceiling
    devices: tuple[DeviceCeiling, ...] = field(default=())
    total_ram: int = 0
    platform: str = ""

    @property
    def host_ceiling(self) -> Ceiling:
        """What host memory must stay beneath: the lower of the host's share and the total."""
        return min(self.host, self.total, key=lambda ceiling: ceiling.effective)

    @property
    def largest_card(self) -> DeviceCeiling:
        """The card that holds most: a model loads on one. Ask only of a machine that has cards."""
        return max(self.devices, key=lambda device: device.ceiling.effective)
