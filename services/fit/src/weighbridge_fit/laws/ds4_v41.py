"""DeepSeek V4.1 in ds4: the graph and cache of one session, and what ds4 itself asks for before it starts.

Source: the accounting of ds4 bd66c40 (September 2026) as the launcher ds4-control transcribes and tests it. It is
known at five contexts and is a straight line above the step where the chunk becomes 8,192 tokens; between 4,096 and
16,384 tokens it is bounded, not known.
"""

from dataclasses import dataclass
from fractions import Fraction

from weighbridge_fit.lines import Range

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class SessionTable:
    """Bytes of one session by context: the row below the step, and two rows of the line above it."""

    small_context: int
    small_bytes: int
    step_context: int
    line_context: int
    line_bytes: int
    far_context: int
    far_bytes: int

    @property
    def per_token(self) -> Fraction:
        """Bytes of one more token."""
        return Fraction(self.far_bytes - self.line_bytes, self.far_context - self.line_context)

    def session_bytes(self, context_tokens: int) -> Range:
        """Graph and cache of one session: exact from the step on, and at the small context."""
        above = self.line_bytes + int((context_tokens - self.line_context) * self.per_token)
        if context_tokens >= self.step_context:
            return Range.exactly(above)
        if context_tokens <= self.small_context:
            low = self.small_bytes if context_tokens == self.small_context else int(context_tokens * self.per_token)
            return Range(low, self.small_bytes, self.small_bytes)
        between = self.small_bytes + int((context_tokens - self.small_context) * self.per_token)
        return Range(self.small_bytes, between, above)


def needed_bytes(weight_bytes: int, session_bytes: int, sessions: int, reserve_bytes: int, headroom_bytes: int) -> int:
    """What must fit before ds4 starts: weights (all, or those that stay when streaming), sessions, its own reserve,
    and the headroom of a streamed launch. A minimal expert cache comes on top."""
    return weight_bytes + session_bytes * sessions + reserve_bytes + headroom_bytes


def metal_budget_bytes(ram_bytes: int, working_set_bytes: int) -> int:
    """What ds4 lets itself use on Metal: 7/8 of memory or the recommended working set, whichever is less."""
    return min(ram_bytes * 7 // 8, working_set_bytes)
