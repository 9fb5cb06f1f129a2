"""What holds while nothing happens: everybody who waits has to, and whoever can be asked for them was asked."""

from collections.abc import Mapping

from weighbridge_ledger.book import Claim

from services.ledger.tests.explore.oracle import Scene, Waiting
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
