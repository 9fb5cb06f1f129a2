"""Whose death frees which lease (rules 12, 13): kept beside the leases, because it is asked for four times a second."""

from collections.abc import Iterable

from weighbridge_common.processes import ProcessIdentity

from weighbridge_ledger.book.states import Home, Lease, LeaseState


class Witnesses:
    """The processes all of whose deaths prove that the bytes of a lease are free.

    Args:
        home: the kernel whose processes can be seen from here.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._of_lease: dict[str, tuple[ProcessIdentity, ...]] = {}
        self._leases_of: dict[ProcessIdentity, dict[str, None]] = {}

    def put(self, lease: Lease) -> None:
        """Take a lease in, or what is new about it."""
        needed = self._needed(lease)
        if needed != self._of_lease.get(lease.lease_id, ()):
            self.drop(lease.lease_id)
            self._of_lease[lease.lease_id] = needed
            for process in needed:
                self._leases_of.setdefault(process, {})[lease.lease_id] = None

    def drop(self, lease_id: str) -> None:
        """Take a lease out. Unknown: nothing happens."""
        for process in frozenset(self._of_lease.pop(lease_id, ())):  # a holder may be its own engine
            leases = self._leases_of[process]
            del leases[lease_id]
            if not leases:
                del self._leases_of[process]

    def processes(self) -> frozenset[ProcessIdentity]:
        """Everyone whose death would free something and can be known from here."""
        return frozenset(self._leases_of)

    def freed_by(self, dead: Iterable[ProcessIdentity]) -> set[str]:
        """The leases all of whose witnesses are dead."""
        gone = frozenset(dead)
        touched = {lease_id for process in gone for lease_id in self._leases_of.get(process, ())}
        return {lease_id for lease_id in touched if gone.issuperset(self._of_lease[lease_id])}

    def _needed(self, lease: Lease) -> tuple[ProcessIdentity, ...]:
        """None where that cannot be known: a process that was seen from here when it was granted is dead after a
        reboot; one of another host or container only looks so, because its boot id or its pids are others."""
        # Asked to vacate without an engine on record, its holder alone can be the one who uses the bytes.
        needed = lease.engines if lease.state is LeaseState.VACATING and lease.engines else lease.processes
        return () if lease.foreign and not all(map(self._home.sees, needed)) else needed
