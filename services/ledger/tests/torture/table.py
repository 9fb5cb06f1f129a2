"""What every client holds at this moment, in memory that they share: the sums that must never exceed the machine.

A holder writes a row after it was allowed to use the bytes, and clears it before it gives them back. So at any moment
the rows of the living add up to at most what the ledger has granted, however the processes are scheduled or killed.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from weighbridge_common import processes
from weighbridge_common.processes import ProcessIdentity

CLIENTS = 4096
"""Clients that may come one after the other: a killed one's rows stay, for its engine may outlive it."""

ROWS = 3
"""Leases that one client holds at most."""

MACHINE = "discrete:64+24+24"
CARDS = ("0", "1")
CEILINGS = {"host": 64 * 2**30 * 6 // 10, "0": 24 * 2**30 * 95 // 100, "1": 24 * 2**30 * 95 // 100}
"""What that machine has for leases: 0.6 of its RAM, 0.95 of each card."""

_ROW = struct.Struct("=8q")
_HEADER = struct.Struct("=2q")


@dataclass(frozen=True, slots=True)
class Row:
    """What one lease's engine uses. All zeros: nothing."""

    host: int = 0
    card_0: int = 0
    card_1: int = 0
    exclusive: int = 0
    """Whether it has its cards for itself."""
    client_pid: int = 0
    client_start: int = 0
    engine_pid: int = 0
    engine_start: int = 0

    def lives(self, like: ProcessIdentity) -> bool:
        """Whether anybody is left who may still use these bytes; `like` lends boot and namespace."""
        both = ((self.client_pid, self.client_start), (self.engine_pid, self.engine_start))
        return any(
            processes.is_alive(ProcessIdentity(pid, start, like.boot_id, like.pid_namespace)) is True
            for pid, start in both
            if pid
        )


class Table:
    """The rows of all clients, and how much each has done. One file, mapped by everybody."""

    def __init__(self, path: Path) -> None:
        size = CLIENTS * (_HEADER.size + ROWS * _ROW.size) + _HEADER.size
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._here = processes.current()

    # -- for everybody ---------------------------------------------------------------------------------------------

    @property
    def finishing(self) -> bool:
        """Whether everybody is to give back what they hold and end."""
        return bool(_HEADER.unpack_from(self._map, 0)[0])

    def finish(self) -> None:
        """Ask everybody to end."""
        _HEADER.pack_into(self._map, 0, 1, self._clients)

    def admit_client(self) -> int:
        """The number of a new client. Called by one process alone."""
        number = self._clients
        _HEADER.pack_into(self._map, 0, 0, number + 1)
        return number

    # -- for one client --------------------------------------------------------------------------------------------

    def write(self, client: int, row: int, content: Row) -> None:
        """Say what one lease's engine uses from now on."""
        fields = (getattr(content, name) for name in Row.__slots__)
        _ROW.pack_into(self._map, self._at(client) + _HEADER.size + row * _ROW.size, *fields)

    def count_operation(self, client: int) -> None:
        """One more verb was answered."""
        _HEADER.pack_into(self._map, self._at(client), _HEADER.unpack_from(self._map, self._at(client))[0] + 1, 0)

    # -- for whoever looks -----------------------------------------------------------------------------------------

    @property
    def operations(self) -> int:
        """Verbs that were answered."""
        return sum(_HEADER.unpack_from(self._map, self._at(client))[0] for client in range(self._clients))

    def double_use(self) -> str | None:
        """What is used by more than there is of it, in words; None: nothing, or the rows never stood still.

        A row is read while others change: one that was cleared just after it was read, and another that was granted
        those bytes, look like double use. Only what two looks in a row see alike has been so at one moment.
        """
        before = self._rows()
        for _ in range(1000):
            if not _excess(before):
                return None
            rows = self._rows()
            if rows == before:
                return _excess([row for row in rows if row.lives(self._here)])
            before = rows
        return None

    @property
    def _clients(self) -> int:
        return int(_HEADER.unpack_from(self._map, 0)[1])

    def _rows(self) -> list[Row]:
        rows = []
        for client in range(self._clients):
            start = self._at(client) + _HEADER.size
            content = self._map[start : start + ROWS * _ROW.size]
            if any(content):
                rows += [Row(*fields) for fields in _ROW.iter_unpack(content) if any(fields)]
        return rows

    @staticmethod
    def _at(client: int) -> int:
        return _HEADER.size + client * (_HEADER.size + ROWS * _ROW.size)


def _excess(rows: list[Row]) -> str | None:
    for pool, used in (
        ("host", [row.host for row in rows]),
        ("0", [row.card_0 for row in rows]),
        ("1", [row.card_1 for row in rows]),
    ):
        if sum(used) > CEILINGS[pool]:
            return f"{sum(used)} of {CEILINGS[pool]} bytes are in use on {pool}: {rows}"
        there = [row for row, size in zip(rows, used, strict=True) if size]
        if pool in CARDS and len(there) > 1 and any(row.exclusive for row in there):
            return f"somebody who is alone on {pool} is not: {there}"
    return None
