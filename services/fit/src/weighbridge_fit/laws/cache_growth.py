"""How mlx-lm's key/value caches grow.

A cache of the whole context grows in slabs of 256 slots, appended to the tokens held so far. Source:
`KVCache.update_and_fetch` of mlx-lm 0.32.2 (QuantizedKVCache and BatchKVCache grow the same way). Capacity is not the
token count rounded up: chunks of 300 and 300 tokens end at 812 slots.

A cache of a sliding window (`RotatingKVCache`, BatchRotatingKVCache alike) takes a chunk whole, after cutting what it
holds to one less than the window, so that it is larger than its window until a single token is decoded; single tokens
grow it by up to 256 slots to no more than the window.
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


def slots_up_to(tokens: int, prefill_step: int) -> int:
    """The most slots that a prompt of `tokens` or fewer ends with when it is read in steps: a context is for every
    length up to it. P prompt and G generated tokens make P + G: one step is computed ahead.

    `generate_step` feeds steps over all but the last token, then the last one. Steps that do not divide a slab can
    leave a shorter prompt with more slots: in steps of 100, 257 tokens end with 512 and 258 with 456. Prompts that are
    shorter by a slab or more cannot.
    """
    shortest = max(1, tokens - GROWTH_STEP + 1)
    steps = (shortest - 1) // prefill_step
    held, capacity = _after_steps(steps, prefill_step)
    most = 0
    for prompt in range(shortest, tokens + 1):
        if prompt - 1 - held >= prefill_step:
            held, capacity = held + prefill_step, _grown(held, capacity, prefill_step)
        rest = prompt - 1 - held
        most = max(most, capacity_after([rest, 1] if rest else [1], held, capacity))
    return most


def _after_steps(steps: int, prefill_step: int) -> tuple[int, int]:
    """Tokens held and slots after so many whole steps.

    How a cache grows depends only on the place within a slab and the spare slots, so equal steps repeat and whole
    rounds are skipped: a context of millions of tokens in steps of one takes no time.
    """
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
    return held, capacity


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


def window_slots_after(chunks: Iterable[int], window: int) -> list[int]:
    """Slots that a sliding window's cache holds after each of these chunks of tokens."""
    held: list[int] = []
    slots = place = offset = 0
    for chunk in chunks:
        if chunk > 1:
            # Brought into order first, which cuts off slots not yet written.
            kept = slots if place == slots or place < offset else place
            slots = place = min(kept, window - 1) + chunk if slots else chunk
        else:
            if not slots or (offset >= slots and slots < window):
                slots, place = slots + min(GROWTH_STEP, window - offset), offset
            if slots > window:
                slots = place = window
            place = (0 if place == window else place) + 1
        offset += chunk
        held.append(slots)
    return held


def window_slots_for(tokens: int, window: int) -> int:
    """Slots of a sliding window's cache once a prompt of `tokens` has been read in chunks of two tokens or more, and
    its last token alone: one slab beyond the tokens before it, and never more than the window. No other way of filling
    it ends with more."""
    return min(tokens - 1 + GROWTH_STEP, window)


def most_window_slots_in_prefill(tokens: int, prefill_step: int, window: int) -> int:
    """The most slots that a sliding window's cache holds while a prompt is read in steps."""
    read = max(tokens - 1, 1)
    chunk = min(prefill_step, read)
    return min(window - 1, read - chunk) + chunk if read > chunk else chunk
