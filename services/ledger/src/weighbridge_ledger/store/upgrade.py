"""What is done before a database of an earlier version is brought up to this version's schema."""

import time
from pathlib import Path

from weighbridge_ledger.store.backup import BackupError, back_up
from weighbridge_ledger.store.contents import read_observations, read_snapshot, refuse_unreadable
from weighbridge_ledger.store.image import image
from weighbridge_ledger.store.interface import StoreRefusedError


def prepare(path: Path, schema: int) -> Path:
    """Try the migration in memory, then keep a copy of the database as it is: `ledger.db.schema-1`.

    The copy is a backup like any other: the earlier version can be started on it, and then gives no epoch and no fence
    that this version may have given. One of an earlier attempt is replaced: what it was made for was never begun, or is
    done and was undone by hand.

    Raises:
        StoreRefusedError: records cannot be read, or there is no room for the copy. The database was not changed.
    """
    with image(path) as (db, _):
        _, unreadable = read_snapshot(db)
        _, unreadable_peaks = read_observations(db)
        refuse_unreadable(path, (*unreadable, *unreadable_peaks))
    copy = path.with_name(f"{path.name}.schema-{schema}")
    for left in path.parent.glob(f".{copy.name}.*.partial*"):  # of one that was killed
        left.unlink(missing_ok=True)
    try:
        back_up(path, copy, time.time(), force=True)
    except BackupError as error:
        raise StoreRefusedError(
            f"{path} has an earlier version's schema and is brought up to date once there is a copy of it. {error}"
        ) from error
    return copy
