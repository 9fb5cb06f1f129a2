"""How mlx-lm's key/value cache grows: in slabs of 256 slots, appended to the tokens held so far.

Source: `KVCache.update_and_fetch` of mlx-lm 0.32.2 (QuantizedKVCache grows the same way). Capacity is not the token
count rounded up: chunks of 300 and 300 tokens end at 812 slots.
"""

from collections.abc import Iterable, Iterator

# `KVCache.step`, in tokens.
GROWTH_STEP = 256


def capacity_after(chunks: Iterable[int]) -> int:
    """Slots held after the cache has taken these chunks of tokens, one after another."""
    capacity = held = 0
    for chunk in chunks:
        if held + chunk > capacity:
            # Spare slots are cut off first, unless the tokens held end exactly on a slab.
            kept = held if held % GROWTH_STEP else capacity
            capacity = kept + -(-chunk // GROWTH_STEP) * GROWTH_STEP
        held += chunk
    return capacity


def prompt_chunks(tokens: int, prefill_step: int) -> Iterator[int]:
    """The chunks in which `generate_step` feeds a prompt: steps over all but the last token, then the last one."""
    left = tokens - 1
    while left > 0:
        yield min(left, prefill_step)
        left -= prefill_step
    yield 1


def slots_for(tokens: int, prefill_step: int) -> int:
    """Slots of a cache that a prompt of `tokens` has filled. P prompt and G generated tokens make P + G: one step is
    computed ahead."""
    return capacity_after(prompt_chunks(tokens, prefill_step))


def most_slots_for(tokens: int) -> int:
    """The most slots that any way of filling a cache with `tokens` can end with."""
    return tokens + GROWTH_STEP - 1
