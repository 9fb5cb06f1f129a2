"""The policy of a ds4 launch: what stays in memory, how large the expert cache is, and which context it starts with.

The rules and constants are those of gezel (1.0.5, October 2026), a system that has run ds4 on people's machines; it
decides on figures that a catalogue's author gives. This project keeps its decisions and prices them by the engine's own
accounting; both figures are shown side by side.
"""

from dataclasses import dataclass
from math import floor

GIB = 1 << 30

# Kept for the operating system and everything else beside a resident model or an expert cache.
SYSTEM_HEADROOM_BYTES = 32 * GIB
# What a resident launch reserves at least, so that no second engine is admitted beside it.
RESIDENT_RESERVATION_BYTES = 96 * GIB
# Expert cache in GiB where nobody says one, by physical memory.
FALLBACK_CACHE_GIB = ((120 * GIB, 64), (88 * GIB, 48), (0, 32))
# From this memory on a launch gets the larger window.
LARGE_MEMORY_BYTES = 192 * GIB
LARGE_CONTEXT_TOKENS = 262_144
USUAL_CONTEXT_TOKENS = 131_072
# Conversations kept on disk. ds4's own default of 4,096 holds a handful: 40,000 tokens take 548 MiB.
DISK_KV_SPACE_MIB = 16_384
# What a streamed model is taken to hold where no author says.
UNKNOWN_RESIDENT_BYTES = 48 * GIB


def full_residency_allowed(*, ram_bytes: int, arm: bool, weight_bytes: int, companion_bytes: int = 0) -> bool:
    """Whether all weights may stay in memory: known size, an arm64 machine, and the headroom left over.

    Decided on the weights alone; asked again with companions to see whether those fit beside them.
    """
    return arm and weight_bytes > 0 and weight_bytes + companion_bytes + SYSTEM_HEADROOM_BYTES <= ram_bytes


@dataclass(frozen=True, slots=True)
class CachePlan:
    """An expert cache in whole GiB. `safe` is False where not even 1 GiB leaves the system its memory."""

    cache_gib: int
    requested_gib: float
    safe_gib: int
    clamped: bool
    safe: bool


def plan_cache(
    *, ram_bytes: int, fixed_bytes: int, configured_gib: int | None = None, author_cache_bytes: int = 0
) -> CachePlan:
    """The cache that is asked for, cut down to what leaves the system its memory beside `fixed_bytes`."""
    if configured_gib is not None:
        requested: float = configured_gib
    elif author_cache_bytes > 0:
        requested = author_cache_bytes / GIB
    else:
        requested = next(gib for least, gib in FALLBACK_CACHE_GIB if ram_bytes >= least)
    safe_gib = (ram_bytes - fixed_bytes - SYSTEM_HEADROOM_BYTES) // GIB
    if safe_gib < 1:
        return CachePlan(1, requested, safe_gib, clamped=True, safe=False)
    cache = max(1, floor(min(requested, safe_gib)))
    return CachePlan(cache, requested, safe_gib, clamped=cache != requested, safe=True)


@dataclass(frozen=True, slots=True)
class AuthorFigures:
    """What a catalogue's author says about a model; 0 where they say nothing."""

    resident_bytes: int = 0
    expert_cache_bytes: int = 0
    kv_bytes_per_token: int = 0
    resident_context_tokens: int = 0
    max_launch_context_tokens: int = 0

    @property
    def fixed_bytes(self) -> int:
        """What stays beside the cache."""
        return max(0, self.resident_bytes - self.expert_cache_bytes)

    @property
    def context_free_bytes(self) -> int | None:
        """What is held whatever the context; None where a figure is missing: it is not guessed."""
        if not (self.resident_bytes and self.kv_bytes_per_token and self.resident_context_tokens):
            return None
        return max(0, self.resident_bytes - self.kv_bytes_per_token * self.resident_context_tokens)

    def resident_at(self, context_tokens: int) -> int | None:
        """The author's figure at another context; None where a figure is missing."""
        free = self.context_free_bytes
        return None if free is None else free + self.kv_bytes_per_token * max(0, context_tokens)


def reservation(figures: AuthorFigures, context_tokens: int, weight_bytes: int, *, streams: bool) -> int:
    """What the policy itself would reserve for a launch."""
    held = figures.resident_at(context_tokens) or figures.resident_bytes or min(weight_bytes, UNKNOWN_RESIDENT_BYTES)
    return held if streams else max(held, RESIDENT_RESERVATION_BYTES)


def launch_context(*, ram_bytes: int, author_cap: int, model_longest: int) -> int:
    """The window of a launch that nobody chose one for.

    The larger of two by physical memory, never above the author's cap or what the model was made for. A window that
    somebody chose is taken as it is: choosing one for a launch lowers every floor to itself.
    """
    tier = LARGE_CONTEXT_TOKENS if ram_bytes >= LARGE_MEMORY_BYTES else USUAL_CONTEXT_TOKENS
    return min(bound for bound in (tier, author_cap, model_longest) if bound)
