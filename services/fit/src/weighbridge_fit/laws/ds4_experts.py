"""The cache of routed experts that ds4 streams from disk: slots of one size, and the reserve a prompt needs beside
them.

Source: antirez/ds4 7e3dbef (2026-07-23), `--ssd-streaming-cache-experts NGB`: the budget holds a headroom of two
routed layers, through which prompts are read, and as many whole experts as fit in the rest.
"""

from dataclasses import dataclass

GIB = 1 << 30
# Layers whose experts are all in memory while a prompt is read: one in use, one being read.
PREFILL_LAYERS = 2
# Below two tokens' experts in every layer the cache thrashes, and ds4 warns.
WARNED_TOKENS = 2


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Routed experts as the cache sees them.

    `layers` have `experts` each of `expert_bytes` (gate, up and down together), of which a token uses `used`.
    `bypass_bytes` are the experts of layers with another size: those go past the cache, through mapped pages.
    """

    layers: int
    experts: int
    expert_bytes: int
    used: int
    bypass_bytes: int = 0

    @property
    def headroom_bytes(self) -> int:
        """What a byte budget holds for prompts, before a single slot."""
        return PREFILL_LAYERS * self.experts * self.expert_bytes

    @property
    def smallest_cache_gib(self) -> int:
        """The smallest whole GiB that ds4 starts with: it must exceed the headroom."""
        return self.headroom_bytes // GIB + 1

    @property
    def warned_below_slots(self) -> int:
        """Fewer slots than this thrash."""
        return WARNED_TOKENS * self.layers * self.used

    def slots(self, cache_gib: int) -> int:
        """Whole experts that a budget of that many GiB keeps, never more than there are."""
        return min((cache_gib * GIB - self.headroom_bytes) // self.expert_bytes, self.layers * self.experts)


def largest_cache_gib(working_set_bytes: int, context_bytes: int) -> int:
    """What ds4 lowers a budget to by itself: whole GiB of 7/8 of the backend's recommended working set, less the
    context buffers."""
    return max(0, (working_set_bytes * 7 // 8 - context_bytes) // GIB)
