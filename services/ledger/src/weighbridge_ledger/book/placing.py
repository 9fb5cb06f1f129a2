"""Which card a claim takes that names none: rules 4 and 17, as functions over plain values."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

from weighbridge_ledger.book.charging import Usage, room_on
from weighbridge_ledger.book.states import Ceilings, Claim, DeviceWant, External

MOST_WAYS = 120
"""So many ways of giving several unnamed cards are tried beside the best: all of three wishes on six cards."""


def placements(
    claim: Claim,
    ceilings: Ceilings,
    external: External,
    usage: Usage,
    *,
    exclusive: bool = False,
    unwell: Collection[str] = (),
    every: bool = False,
) -> Iterator[Claim]:
    """`claim` with every card named, in the order in which they are to be tried; nothing where there are too few cards.

    One unnamed card is tried on each card on which it fits when that is empty, least missing first, and of those where
    nothing is missing the one with the least room left. Only where it is larger than every card, and so would spill
    anyway, all of them count: a claim that waits must not spill from a small card because the large one is in use.
    Several unnamed cards are given to different cards, the largest wish first, which finds a way if there is one: first
    on all cards by their bytes, then on those alone that the claim may join at all. Whether it may be granted is tried
    in every other way too: with 3 and 2 bytes left on two cards, wishes for 2 and 1 fill the second; where that is in
    the way of somebody who is protected, the other way round need not be (a million random steps).

    Args:
        claim: as it was asked.
        ceilings: what the machine allows.
        external: what programs outside hold.
        usage: what leases are charged.
        exclusive: nobody else may be on its cards.
        unwell: the cards on which nothing may be loaded just now.
        every: every way of giving several unnamed cards, as far as they are few.
    """
    named = {want.device_id for want in claim.devices if want.device_id}
    floating = sorted((want for want in claim.devices if not want.device_id), key=lambda want: -want.required_bytes)
    if not floating:
        yield _merged(claim, {})
        return
    free = [device for device in ceilings.devices if device not in named]
    if len(floating) > len(free):
        return
    if len(floating) == 1:
        want = floating[0]
        for device in sorted(candidates(want, free, ceilings), key=lambda d: _rank(want, d, ceilings, external, usage)):
            yield _merged(claim, {0: device})
        return
    rank = partial(_rank, ceilings=ceilings, external=external, usage=usage)
    ways = _ways(floating, free, ceilings, rank)
    chosen = next(ways)
    yield _merged(claim, chosen)
    # Where somebody is alone, bytes may be left that nobody can have.
    shut = {
        device for device in free if device in unwell or not _may_join(device, ceilings, usage, exclusive=exclusive)
    }
    if not shut.isdisjoint(chosen.values()):
        elsewhere = next(_ways(floating, free, ceilings, rank, shut), None)
        if elsewhere is not None:
            yield _merged(claim, elsewhere)
    if every:
        yield from (_merged(claim, way) for way in islice(ways, MOST_WAYS))


def _ways(
    wishes: Sequence[DeviceWant],
    free: Sequence[str],
    ceilings: Ceilings,
    rank: Callable[[DeviceWant, str], tuple[int, int, str]],
    shut: Collection[str] = (),
) -> Iterator[dict[int, str]]:
    """The ways of giving each wish a card of its own, the first wish first, and the best card for it first."""

    def give(chosen: dict[int, str]) -> Iterator[dict[int, str]]:
        if len(chosen) == len(wishes):
            yield chosen
            return
        want = wishes[len(chosen)]
        taken = chosen.values()
        left = [device for device in free if device not in taken]
        may_hold = [device for device in candidates(want, left, ceilings) if device not in shut]
        for device in sorted(may_hold, key=partial(rank, want)):
            yield from give({**chosen, len(chosen): device})

    return give({})


def on_cards(claim: Claim, ceilings: Ceilings, external: External, usage: Usage) -> Claim | None:
    """`claim` on the cards that are tried first; None where there are too few."""
    if not claim.devices:
        return claim
    return next(placements(claim, ceilings, external, usage), None)


def candidates(want: DeviceWant, devices: list[str], ceilings: Ceilings) -> list[str]:
    """The cards that an unnamed wish may take."""
    large_enough = [device for device in devices if want.required_bytes <= ceilings.pool_bytes(device)]
    if large_enough:
        return large_enough
    largest = max((ceilings.pool_bytes(device) for device in devices), default=0)
    return [device for device in devices if ceilings.pool_bytes(device) == largest]


def aim(
    claim: Claim, ceilings: Ceilings, external: External, usage: Usage, current: Claim | None = None
) -> Claim | None:
    """The cards that a waiter waits for: fewest missing bytes, and of those that are equal the ones it has.

    With cards of 2 and 2, three claims of 1 that come and go and a waiter for any 2, targets that flip when they are
    equal keep it waiting for ever (exhaustive search).

    Args:
        claim: as it was asked.
        ceilings: what the machine allows.
        external: what programs outside hold.
        usage: what leases are charged, without what is being given back.
        current: what it aims at now.
    """
    best = on_cards(claim, ceilings, external, usage)
    if best is None or current is None:
        return best
    return current if missing(current, ceilings, external, usage) <= missing(best, ceilings, external, usage) else best


def aims_well(claim: Claim, current: Claim, rooms: Mapping[str, int]) -> bool:
    """Whether `aim` would answer `current`, as far as that can be seen at a glance: nothing is missing on its card, or
    no card has more room. False says nothing.

    Args:
        claim: as it was asked.
        current: what it aims at now.
        rooms: of each card, without what is being given back.
    """
    if len(claim.devices) != 1 or len(current.devices) != 1:
        return False
    want = current.devices[0]
    room = rooms.get(want.device_id, 0)
    return room >= want.required_bytes or room >= max(rooms.values())


def missing(target: Claim, ceilings: Ceilings, external: External, usage: Usage) -> int:
    """Bytes missing on the cards of a claim that names them."""
    return sum(
        max(0, want.required_bytes - max(0, room_on(want.device_id, ceilings, external, usage)))
        for want in target.devices
    )


def _may_join(device: str, ceilings: Ceilings, usage: Usage, *, exclusive: bool) -> bool:
    """Whether any claim of this kind may be on a card beside those who are there, whatever its bytes."""
    if not ceilings.spill_allowed and usage.spilled_from.get(device, 0) > 0:
        return False
    company = usage.holders if exclusive else usage.alone
    return not ceilings.exclusive_heeded or company.get(device, 0) <= 0


def _rank(want: DeviceWant, device: str, ceilings: Ceilings, external: External, usage: Usage) -> tuple[int, int, str]:
    room = room_on(device, ceilings, external, usage)
    return max(0, want.required_bytes - max(0, room)), room, device


def _merged(claim: Claim, chosen: dict[int, str]) -> Claim:
    """`claim` with its unnamed cards named (by rank of their size) and several wishes for one card added up."""
    if not claim.devices:
        return claim
    by_size = sorted((want for want in claim.devices if not want.device_id), key=lambda want: -want.required_bytes)
    wants: dict[str, DeviceWant] = {}
    placed = [want for want in claim.devices if want.device_id]
    placed += [replace(want, device_id=chosen[index]) for index, want in enumerate(by_size)]
    for want in placed:
        before = wants.get(want.device_id, DeviceWant(want.device_id, 0))
        wants[want.device_id] = DeviceWant(
            want.device_id, before.required_bytes + want.required_bytes, before.optional_bytes + want.optional_bytes
        )
    kept = tuple(wants[device] for device in sorted(wants) if wants[device].required_bytes > 0)
    return replace(claim, devices=kept)
