"""What must have happened, and what must not: everybody who waits has to, whoever can be asked for them was asked, and
nobody's bytes were freed before their time."""

from collections.abc import Mapping, Set

from weighbridge_common.processes import ProcessIdentity
from weighbridge_ledger.book import Claim, LeaseState, ReleaseCause

from services.ledger.tests.explore.oracle import Holder, Scene, Waiting
from services.ledger.tests.explore.reclaim import Reclaim, asks_first


def nobody_waits_in_vain(scene: Scene, aims: Mapping[str, Claim]) -> None:
    """No lost waiter, by every rule.

    Args:
        scene: as it stands after a verb.
        aims: of those who were protected for good after the verb before, at which cards they aimed then.
    """
    for waiter in scene.in_order():
        assert not scene.never_fits(waiter.lease), f"waits for what can never be: {waiter}"
        assert not scene.grants(waiter, surely=True), f"could be granted, and waits: {waiter}"
        if waiter.lease.claim.floating:
            _aims_well(scene, waiter, aims.get(waiter.lease.lease_id))
        if waiter.while_holding:
            _waits_for_nobody_in_use(scene, waiter)
    for waiter in asks_first(scene):
        _has_asked(scene, waiter)


def freed_rightly(
    scene: Scene, holder: Holder, cause: ReleaseCause | None, dead: Set[ProcessIdentity], *, given_back: bool
) -> None:
    """Bytes are free when nobody can use them any more, and not because somebody is silent (rules 6, 10, 12, 13).

    Args:
        scene: without the lease.
        holder: as it was before.
        cause: why it ended, as was told.
        dead: every process that has ended.
        given_back: whether its holder gave it back in the same verb.
    """
    lease = holder.lease
    match cause:
        case ReleaseCause.FENCED:
            assert lease.foreign, "its processes can be seen, and nobody saw them end"
            assert scene.now >= holder.until + scene.policy.grace_s, "its holder has had no time to end its engine"
        case ReleaseCause.NOT_ACTIVATED:
            assert lease.state is LeaseState.GRANTED
            assert scene.now >= holder.until, "taken back before its time to activate was over"
        case ReleaseCause.CANCELLED:
            assert lease.state is LeaseState.GRANTED, "an active lease ended with its stream"
        case ReleaseCause.HOLDER:
            assert given_back, "nobody gave it back"
            assert dead >= set(lease.engines), "given back under a living engine"
        case ReleaseCause.PROCESSES_DEAD:
            leaving = lease.state is LeaseState.VACATING and lease.engines
            assert dead >= set(lease.engines if leaving else lease.processes), "a process of it lives"
        case ReleaseCause.OPERATOR:
            assert lease.foreign or dead >= set(lease.processes), "an operator ended it under a living process"
        case _:
            raise AssertionError(f"ended for no reason that there is: {cause}")


def _aims_well(scene: Scene, waiter: Waiting, kept: Claim | None) -> None:
    """Who waits for any card aims where least is missing, and keeps its aim while it is protected, unless that has
    become hopeless (rule 17)."""
    if kept is not None:
        hopeless = scene.place(waiter.lease, kept, scene.beside(scene.holders.keys() - scene.stuck())) is None
        assert waiter.target == kept or hopeless, f"aims elsewhere though it is protected: {waiter}"
    elif not scene.left_alone(waiter) and not scene.shrinking():
        least = min(scene.missing(aim) for aim in scene.bindings(waiter.lease.claim))
        assert scene.missing(waiter.target) == least, f"aims where more is missing: {waiter}"


def _waits_for_nobody_in_use(scene: Scene, waiter: Waiting) -> None:
    """Whose caller keeps a lease busy waits only for what comes back, or can be asked for (rule 25)."""
    reclaims = (Reclaim(scene, waiter, aim) for aim in scene.aims(waiter))
    assert any(one.fits(one.idle(), shrunk=True) for one in reclaims), f"waits for what is in use: {waiter}"


def _has_asked(scene: Scene, waiter: Waiting) -> None:
    """Everybody was asked who can be asked for a waiter, if that suffices (rules 18 to 20, 24)."""
    reclaim = Reclaim(scene, waiter, waiter.target)
    undone = reclaim.undone()
    assert undone is None, f"{undone} for {waiter}"
    replaced = scene.holders.get(waiter.replaces)
    if replaced is not None and replaced.vacate_by is None and reclaim.fits():
        charge = scene.place(waiter.lease, waiter.target, scene.beside([waiter.replaces]))
        assert charge is None, f"only the lease that it replaces is in the way, and was not asked: {waiter}"
