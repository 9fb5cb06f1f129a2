"""How mlx-lm's key/value cache grows: in slabs of 256 slots, appended to the tokens held so far.

Source: `KVCache.update_and_fetch` of mlx-lm 0.32.2 (QuantizedKVCache grows the same way). Capacity is not the token
count rounded up: chunks of 300 and 300 tokens end at 812 slots.
"""

from collections.abc import Iterable

# `KVCache.step`, in tokens.
GROWTH_STEP = 256


def capacity_after(chunks: Iterable[int], held: int = 0, capacity: int = 0) -> int:
    """Slots held after a cache has taken these chunks of tokens, one after another. It starts with `held` tokens in
    `capacity` slots."""
    for chunk in chunks:
        capacity = _grown(held, capacity, chunk)
        held += chunk
    return capacity


def slots_for(tokens: int, prefill_step: int) -> int:
    """Slots of a cache that a prompt of `tokens` has filled. P prompt and G generated tokens make P + G: one step is
    computed ahead.

    `generate_step` feeds steps over all but the last token, then the last one. How a cache grows depends only on the
    place within a slab and the spare slots, so equal steps repeat and whole rounds are skipped: a context of millions
    of tokens in steps of one takes no time.
    """
    steps, rest = divmod(tokens - 1, prefill_step)
    held = capacity = done = 0
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    while done < steps:
        place = held % GROWTH_STEP, capacity - held
        if place in seen:
            first, first_held = seen[place]
            rounds = (steps - done) // (done - first)
            skipped = rounds * (held - first_held)
            done, held, capacity = done + rounds * (done - first), held + skipped, capacity + skipped
            seen.clear()
            if done == steps:
                break
        else:
            seen[place] = done, held
        capacity = _grown(held, capacity, prefill_step)
        held, done = held + prefill_step, done + 1
    return capacity_after([rest, 1] if rest else [1], held, capacity)


def _grown(held: int, capacity: int, chunk: int) -> int:
    """Slots once `chunk` more tokens are in."""
    if held + chunk <= capacity:
        return capacity
    # Spare slots are cut off first, unless the tokens held end exactly on a slab.
    kept = held if held % GROWTH_STEP else capacity
    return kept + -(-chunk // GROWTH_STEP) * GROWTH_STEP


def most_slots_for(tokens: int) -> int:
    """The most slots that any way of filling a cache with `tokens` can end with."""
    return tokens + GROWTH_STEP - 1
