"""What a search over all states of a book needs: copies of a world, pictures by which a state is known again, and the
sums that must hold in each. It looks into the book, and changes with it."""

import copy
import itertools
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MethodType

from weighbridge_ledger.book import Book, Lease, LeaseState
from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.entries import Entry
from weighbridge_ledger.book.queue import Waiter
from weighbridge_ledger.book.residents import Stage

OF_NO_CONSEQUENCE = {
    "lease",  # pictured by itself
    "claim",  # of a waiter: its target is the keys of `pools`, and that is pictured
    "required",  # follows from the target
    "secret",  # who knows the current one is the client's state
    "stream",
    "timer",  # follows from what is due
    "last_use_wall",  # for people
    "first_wall",  # `since` on the other clock
    "hopeful_at",  # only keeps what is known from being found out again
    "keep_alives",
    "observed",
}
"""Fields by which states are not told apart."""


def duplicate(value, memo=None):
    """A copy that shares nothing that changes. Frozen values and functions are shared."""
    copier = _COPIERS[type(value)]
    return value if copier is None else copier(value, {} if memo is None else memo)


class _Copiers(dict):
    """How values of a type are copied; None: they are shared. Worked out at the first value of each type."""

    def __missing__(self, kind: type):
        frozen = is_dataclass(kind) and (kind.__dataclass_params__.frozen or kind.__dataclass_params__.unsafe_hash)
        ours = kind.__module__.startswith("weighbridge_ledger.") and not issubclass(kind, (str, tuple))
        copier = self[kind] = _copy_object if ours and not frozen else None
        return copier


def _copy_object(value, memo):
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = object.__new__(type(value))
        slots = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
        for name in slots or vars(value):
            item = getattr(value, name)
            copier = _COPIERS[type(item)]
            setattr(made, name, item if copier is None else copier(item, memo))
    return made


def _copy_dict(value, memo):
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = type(value)(value)
        for key, item in value.items():
            copier = _COPIERS[type(item)]
            if copier is not None:
                made[key] = copier(item, memo)
    return made


def _copy_list(value, memo):
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = copy.copy(value)
        for index, item in enumerate(value):
            copier = _COPIERS[type(item)]
            if copier is not None:
                made[index] = copier(item, memo)
    return made


def _copy_tuple(value, memo):
    if all(_COPIERS[type(item)] is None for item in value):
        return value
    return tuple(duplicate(item, memo) for item in value)


def _copy_whole(value, memo):
    made = memo.get(id(value))
    if made is None:
        made = memo[id(value)] = copy.copy(value)
    return made


_COPIERS = _Copiers(
    {
        dict: _copy_dict,
        OrderedDict: _copy_dict,
        list: _copy_list,
        tuple: _copy_tuple,
        deque: _copy_list,
        set: _copy_whole,
        itertools.count: _copy_whole,
        MethodType: lambda value, memo: MethodType(value.__func__, duplicate(value.__self__, memo)),
    }
)


def branch(world):
    """A world that goes its own way from here. Ids are still drawn from one source, so they differ between branches."""
    other = copy.copy(world)
    other.book = duplicate(world.book)
    other.store = duplicate(world.store)
    other.dead = set(world.dead)
    other.events = []
    return other


def picture(world, names: Mapping[str, object], long_ago_s: float) -> tuple:
    """All that decides what a world will do, with times as distances from now and leases by name.

    Two worlds of the same picture are the same one to every client.

    Args:
        world: the world.
        names: by what name the clients know each lease.
        long_ago_s: more than any time of the policy: what lies further back is all the same.
    """
    book, now = world.book, world.now

    def ago(moment: float, present: float) -> float:
        return max(moment - present, -long_ago_s)

    def named(lease_id: str) -> object:
        return names.get(lease_id, lease_id)

    def seen(value: object) -> object:
        if isinstance(value, float):
            return ago(value, now.monotonic)
        if isinstance(value, str):
            return named(value)
        if isinstance(value, dict):
            return tuple(named(key) for key in value)
        if isinstance(value, frozenset):
            return frozenset(named(key) for key in value)
        return value

    def rest(value: Entry | Waiter) -> tuple:
        return tuple(seen(getattr(value, name)) for name in _TOLD[type(value)])

    def about(lease: Lease) -> tuple:
        loaded = (ago(lease.loaded_wall, now.wall), lease.load_s) if lease.loaded_wall else None
        engines = frozenset((engine.pid, engine in world.dead) for engine in lease.engines)
        return (lease.state, lease.suspect, lease.holder.pid, lease.holder in world.dead, engines, lease.charge, loaded)

    sequences = {entry.lease.lease_id: entry.lease.sequence for entry in book._entries.values()}
    sequences |= {waiter.lease.lease_id: waiter.sequence for waiter in book._queue}
    places = book._memories._places
    sequences |= {f"place {request_id}": place.ticket.sequence for request_id, place in places.items()}
    return (
        frozenset((named(one), about(entry.lease), rest(entry)) for one, entry in book._entries.items()),
        tuple((named(waiter.lease.lease_id), waiter.lease.holder.pid, rest(waiter)) for waiter in book._queue),
        tuple(named(one) for one in sorted(sequences, key=sequences.__getitem__)),
        frozenset(
            (request_id, place.ticket.passes, ago(place.since, now.monotonic), place.expires - now.monotonic)
            for request_id, place in places.items()
        ),
        frozenset(book._memories._ended_requests),
    )


_TOLD = {
    kind: tuple(field.name for field in fields(kind) if field.name not in OF_NO_CONSEQUENCE) for kind in (Entry, Waiter)
}


def check_sums(world) -> None:
    """What the book keeps beside its leases is what a look at each of them gives; what is committed is what it has."""
    book: Book = world.book
    entries = book._entries.values()
    pending = Usage()
    for entry in entries:
        lease = entry.lease
        assert lease.state.charged
        if entry.vacate_deadline is not None and not entry.overdue:
            pending.add(lease.charge)
        elif entry.shrink is not None:
            pending.add_optional(lease.charge)
        pinned = lease.pinned and not entry.replaced_by and lease.state is not LeaseState.VACATING
        assert entry.stuck == (pinned or lease.suspect or entry.overdue), entry
        listens = lease.state is LeaseState.ACTIVE and not lease.suspect and not pinned
        resident = book._residents.get(lease.lease_id)
        assert (resident is not None) == listens, entry
        if resident is not None:
            assert resident.charge == lease.charge
            assert resident.stage is _stage(entry, world), entry
    assert _sums(book._usage) == _sums(_usage_of(entry.lease.charge for entry in entries))
    assert _sums(book._pending) == _sums(pending)
    assert _sums(book._stuck) == _sums(_usage_of(entry.lease.charge for entry in entries if entry.stuck))
    stored = {lease.lease_id: lease for lease in world.store.load().leases}
    assert stored == {lease_id: entry.lease for lease_id, entry in book._entries.items()}


def _stage(entry: Entry, world) -> Stage:
    if entry.uses or entry.loading_since is not None or not entry.heard:
        return Stage.BUSY
    if entry.resident_until > world.time:
        return Stage.YOUNG
    return Stage.SETTLED if entry.idle_since + world.policy.idle_s > world.time else Stage.RIPE


def check_ceilings(world) -> None:
    """No sum is above its ceiling, and nobody is beside somebody who is alone. For worlds whose ceilings never fell."""
    charges = [view.lease.charge for view in world.book.charged()]
    alone = {device for charge in charges if charge.exclusive for device in charge.occupies}
    for device in alone if world.ceilings.exclusive_heeded else ():
        assert sum(device in charge.occupies for charge in charges) == 1, device
    committed, ceilings = world.book.committed(), world.book.ceilings
    assert committed.total_bytes <= ceilings.total_bytes
    for pool in ("host", *ceilings.devices):
        assert committed.on(pool) <= ceilings.pool_bytes(pool), pool


def _usage_of(charges) -> Usage:
    usage = Usage()
    for charge in charges:
        usage.add(charge)
    return usage


def _sums(usage: Usage) -> tuple:
    counts = (usage.devices, usage.holders, usage.alone, usage.spilled_from)
    return (usage.host_bytes, usage.total_bytes, *({key: n for key, n in one.items() if n} for one in counts))
