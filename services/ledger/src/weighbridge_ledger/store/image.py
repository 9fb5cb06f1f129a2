"""The database in memory, to look into at leisure: what is done to it there happens to nobody."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from weighbridge_ledger.store.database_file import DamagedError, left_alone, read
from weighbridge_ledger.store.interface import StoreRefusedError
from weighbridge_ledger.store.migrations import migrate, schema_of

LARGEST_IMAGE_BYTES = 2**30
"""Everything that a ledger remembers is bounded: 10,000 measured peaks and some thousands of leases are a few MiB."""


@contextlib.contextmanager
def image(path: Path) -> Iterator[tuple[sqlite3.Connection, int]]:
    """A copy of the database as it stands at one moment, with this version's schema, and the schema that it has.

    Raises:
        StoreRefusedError: it cannot be read; DamagedError, NewerSchemaError, OtherProgramError if that is why.
    """
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as copy:

        def fill(db: sqlite3.Connection) -> int:
            pages, page_bytes = (
                int(db.execute(f"PRAGMA {name}").fetchone()[0]) for name in ("page_count", "page_size")
            )
            if pages * page_bytes > LARGEST_IMAGE_BYTES:
                raise StoreRefusedError(f"{path} is larger than any ledger's database (1 GiB). It was not read.")
            db.backup(copy)
            return schema_of(db)

        schema = read(path, fill)
        try:
            migrate(copy)
        except sqlite3.Error as error:
            raise DamagedError(
                f"{path} holds records of schema {schema} that cannot be brought up to date ({error}). "
                f"{left_alone(path)}"
            ) from error
        yield copy, schema
