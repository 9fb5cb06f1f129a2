"""What must be true of a book as it was stored, as one pure function over what was read back.

Only what every version of the book keeps: how much a lease is charged is fixed by the ceilings of the moment of its
grant, which are not stored, so a lease is held to itself, to the others and to the machine, not to its claim.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weighbridge_common.sizes import format_gib

from weighbridge_ledger.book import HOST, Ceilings, Charge, Lease, Policy, Snapshot
from weighbridge_ledger.book.charging import Usage
from weighbridge_ledger.book.states import Claim
from weighbridge_ledger.store.interface import Observation

DIGEST_BYTES = 32
"""SHA-256."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with what is stored, or that should be known about it."""

    code: str
    """Stable UPPER_SNAKE name."""
    message: str
    subject: str = ""
    """What it is about: a lease, a request, a pool."""
    is_fault: bool = True
    """A book that keeps its rules never stores this. False: it may, and whoever looks should know."""


def audit(snapshot: Snapshot, observations: Iterable[Observation], ceilings: Ceilings, policy: Policy) -> list[Finding]:
    """Everything about a stored book that breaks an invariant, in the order of the tables.

    Args:
        snapshot: what a restart would read back.
        observations: the measured peaks.
        ceilings: what the machine allows by itself, without the person's limit, which is in the snapshot.
        policy: the bounds.
    """
    return [
        *_leases(snapshot, policy),
        *_numbers(snapshot),
        *_requests(snapshot),
        *_sums(snapshot, ceilings),
        *_company(snapshot, ceilings),
        *_memories(snapshot, policy),
        *_observations(observations),
    ]


def _leases(snapshot: Snapshot, policy: Policy) -> Iterator[Finding]:
    secrets = Counter(lease.secret_digest for lease in snapshot.leases)
    for lease in snapshot.leases:
        of = lease.lease_id
        if not lease.state.charged:
            held = format_gib(lease.charge.total_bytes)
            text = f"is stored as {lease.state.value} and holds {held}: only what is charged is stored."
            yield Finding("LEASE_STATE", text, of)
        yield from _charge(lease.charge, of)
        yield from _claim(lease.claim, of)
        yield from _places(lease)
        if len(lease.secret_digest) != DIGEST_BYTES or len(lease.previous_digest) not in (0, DIGEST_BYTES):
            yield Finding("DIGEST", "has a digest that is none: nobody can prove to hold it.", of)
        elif secrets[lease.secret_digest] > 1:
            yield Finding("SECRET_SHARED", "shares its secret with another lease: one secret belongs to one grant.", of)
        yield from _processes(lease, policy)
        if not policy.min_term_s <= lease.term_s <= policy.max_term_s:
            yield Finding("TERM", f"has a term of {lease.term_s:g} s, which no lease can have.", of)
        if min(lease.loaded_wall, lease.load_s) < 0 or (lease.loaded_wall and not lease.activated_wall):
            yield Finding("LOADED", "has loaded in no time, or before it was let load.", of)


def _charge(charge: Charge, of: str) -> Iterator[Finding]:
    cards = [device for device, _ in charge.devices]
    amounts = [charge.host_bytes, *(size for _, size in (*charge.devices, *charge.spilled))]
    if min(amounts) < 0 or max(amounts) >= 2**62 or "" in cards or len(set(cards)) < len(cards):
        yield Finding("CHARGE", "is charged an impossible amount, or one card twice.", of)
    elif charge.total_bytes == 0:
        yield Finding("CHARGE", "is charged nothing, and a grant is of something.", of)
    elif charge.spilled_bytes > charge.host_bytes:
        text = f"spilled {format_gib(charge.spilled_bytes)} to the host and is charged less than that there."
        yield Finding("SPILL", text, of)
    optional = dict(charge.optional_devices)
    parts = [charge.optional_host_bytes, *optional.values()]
    if (
        min(parts) < 0
        or len(optional) < len(charge.optional_devices)
        or charge.optional_host_bytes > charge.host_bytes - charge.spilled_bytes
        or any(size > charge.on(device) for device, size in optional.items())
    ):
        yield Finding("OPTIONAL", "has optional bytes that are no part of what it is charged.", of)


def _places(lease: Lease) -> Iterator[Finding]:
    """Where it is: on what it is charged for, and alone only where it asked to be and is anywhere (rule 26)."""
    charge, of = lease.charge, lease.lease_id
    if charge.on_gpu and (lease.claim.cpu_only or charge.devices):
        yield Finding("PLACES", "is on the GPU of a unified machine, and on a card or on the processor alone.", of)
    if charge.exclusive and not (lease.exclusive and charge.occupies):
        yield Finding("PLACES", "has devices to itself that it did not ask for, or is on none.", of)


def _claim(claim: Claim, of: str) -> Iterator[Finding]:
    amounts = [claim.host_bytes, claim.optional_host_bytes]
    amounts += [size for want in claim.devices for size in (want.required_bytes, want.optional_bytes)]
    if min(amounts) < 0 or claim.total_bytes <= 0:
        yield Finding("CLAIM", "asks for nothing or for less than nothing.", of)


def _processes(lease: Lease, policy: Policy) -> Iterator[Finding]:
    if any(process.pid <= 0 for process in lease.processes):
        yield Finding("PROCESS", "names a process that is none: its death could never be seen.", lease.lease_id)
    if len(lease.engines) > policy.engines_per_lease or len(set(lease.engines)) < len(lease.engines):
        yield Finding("PROCESS", "records too many engine processes, or one twice.", lease.lease_id)


def _numbers(snapshot: Snapshot) -> Iterator[Finding]:
    """One counter gives fences and places in the order, none of them twice, and never goes back."""
    given = [(lease.fence, "fence", lease.lease_id) for lease in snapshot.leases]
    given += [(lease.sequence, "place", lease.lease_id) for lease in snapshot.leases]
    held = {lease.request_id for lease in snapshot.leases if lease.request_id}
    # A place that is kept for a request that is held is dropped by the next start.
    given += [(one.sequence, "place", one.request_id) for one in snapshot.tickets if one.request_id not in held]
    times = Counter(number for number, _, _ in given)
    for number, what, of in given:
        if number <= 0:
            yield Finding("NUMBER_MISSING", f"has no {what}.", of)
        elif times[number] > 1:
            yield Finding("NUMBER_REPEATED", f"has the {what} {number}, which was given out twice.", of)
        elif number > snapshot.counter:
            text = (
                f"has the {what} {number}, and the counter stands at {snapshot.counter}: it would be given out again."
            )
            yield Finding("NUMBER_AHEAD", text, of)
    for lease in snapshot.leases:
        if 0 < lease.fence <= lease.sequence:
            yield Finding("NUMBER_ORDER", "was granted before it was asked for.", lease.lease_id)


def _requests(snapshot: Snapshot) -> Iterator[Finding]:
    requests = Counter(lease.request_id for lease in snapshot.leases if lease.request_id)
    for request_id, times in requests.items():
        if times > 1:
            yield Finding("REQUEST_REPEATED", f"holds {times} leases: a request has one.", request_id)
    ended = {one.request_id for one in snapshot.ended if one.request_id}
    for request_id in requests:
        if request_id in ended:
            yield Finding("REQUEST_ENDED", "has ended and holds a lease.", request_id)
    held = {lease.lease_id for lease in snapshot.leases}
    for one in snapshot.ended:
        if one.lease_id in held:
            yield Finding("LEASE_ENDED", "is held and remembered as ended.", one.lease_id)


def _sums(snapshot: Snapshot, ceilings: Ceilings) -> Iterator[Finding]:
    """No sum above a ceiling (rule 4). The machine's own ceilings stay; the person's limit and a card may go."""
    usage = Usage()
    for lease in snapshot.leases:
        usage.add(lease.charge)
    for pool in (HOST, *sorted(usage.devices)):
        held, allowed = usage.on(pool), ceilings.host_bytes if pool == HOST else ceilings.devices.get(pool)
        where = "host memory" if pool == HOST else "this card"
        if allowed is None and held:
            text = f"is not on this machine, and {format_gib(held)} are charged on it: was it taken out?"
            yield Finding("DEVICE_UNKNOWN", text, pool, is_fault=False)
        elif allowed is not None and held > allowed:
            text = f"Leases hold {format_gib(held)} of {where}, and the machine allows {format_gib(allowed)}."
            yield Finding("OVER_CEILING", text, pool)
    limit = snapshot.limit_bytes
    if limit is not None and limit <= 0:
        yield Finding("LIMIT", "The person's limit is no amount of memory.")
    elif limit is not None and usage.total_bytes > limit:
        text = (
            f"Leases hold {format_gib(usage.total_bytes)}, and the limit is {format_gib(limit)}: it was lowered after "
            "they were granted. Nothing is granted until they are below it."
        )
        yield Finding("OVER_LIMIT", text, is_fault=False)


def _company(snapshot: Snapshot, ceilings: Ceilings) -> Iterator[Finding]:
    """Nobody beside a lease that is alone on its devices (rule 26), where that is heeded."""
    if not ceilings.exclusive_heeded:
        return
    holders: dict[str, list[Lease]] = {}
    for lease in snapshot.leases:
        for device in lease.charge.occupies:
            holders.setdefault(device, []).append(lease)
    for device, there in sorted(holders.items()):
        if len(there) > 1:
            for lease in there:
                if lease.charge.exclusive:
                    text = f"has {device} to itself, and {len(there) - 1} more are there."
                    yield Finding("NOT_ALONE", text, lease.lease_id)


def _memories(snapshot: Snapshot, policy: Policy) -> Iterator[Finding]:
    for ticket in snapshot.tickets:
        yield from _claim(ticket.claim, ticket.request_id)
        if ticket.passes < 0 or not ticket.request_id:
            yield Finding("PLACE", "is a kept place that nobody can take up.", ticket.request_id)
    for one in snapshot.ended:
        if len(one.secret_digest) != DIGEST_BYTES:
            yield Finding("DIGEST", "has a digest that is none: its release cannot be repeated.", one.lease_id)
    for name, count, bound in (
        ("places", len(snapshot.tickets), policy.tickets_kept),
        ("ended requests", len(snapshot.ended), policy.ended_kept),
    ):
        if count > bound:
            yield Finding("TOO_MANY", f"{count} {name} are stored, and at most {bound} are kept.")


def _observations(observations: Iterable[Observation]) -> Iterator[Finding]:
    for one in observations:
        if min(one.planned_bytes, one.claimed_bytes, one.granted_bytes, one.peak_bytes, one.load_s) < 0:
            yield Finding("OBSERVATION", "is a measured peak of less than nothing.", str(one.number))
