"""A data folder that cannot be used: the refusal says what is wrong, where, and what to do."""

import errno
import os
import shutil
import sqlite3
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from weighbridge_ledger.settings import LedgerSettings
from weighbridge_ledger.store import SqliteStore, StoreRefusedError
from weighbridge_ledger.store.unusable import ELSEWHERE, ROOM_TO_START_BYTES, unusable

NOBODY = 65534

Usage = namedtuple("Usage", "total used free")


def sqlite_error(code: int, text: str) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**30, 2**30 - free_bytes, free_bytes))


def test_the_variable_that_is_named_is_the_one_that_is_read() -> None:
    assert ELSEWHERE.endswith(LedgerSettings.variable("data_dir"))


@pytest.mark.parametrize("beneath", ["", "below/further"])
def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path, beneath: str) -> None:
    file = tmp_path / "data"
    file.write_text("mine")
    with pytest.raises(StoreRefusedError) as refused:
        SqliteStore(file / beneath / "ledger.db")
    said = str(refused.value)
    assert said.startswith(f"{file} is a file,")
    assert said.endswith(f"Move the file away, or {ELSEWHERE}.")
    assert file.read_text() == "mine"


def test_a_folder_that_may_not_be_written_is_told_with_what_to_do() -> None:
    # Not below pytest's own folder, which only its user may enter. Root may write everywhere: it becomes nobody.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        me = os.geteuid()
        if me == 0:
            os.seteuid(NOBODY)
        try:
            with pytest.raises(StoreRefusedError, match="may not write") as refused:
                SqliteStore(Path(folder) / "ledger.db")
        finally:
            os.seteuid(me)
            Path(folder).chmod(0o700)
    assert str(refused.value).endswith(f"{ELSEWHERE}.")


@pytest.mark.parametrize(
    ("error", "free_bytes"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 0),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 2**29),
        (sqlite_error(sqlite3.SQLITE_FULL, "database or disk is full"), 2**29),
        (sqlite_error(sqlite3.SQLITE_IOERR, "disk I/O error"), 0),
        # An extended code: the index of the log could not be made as long as it has to be.
        (sqlite_error(sqlite3.SQLITE_IOERR_SHMSIZE, "disk I/O error"), ROOM_TO_START_BYTES - 1),
    ],
)
def test_a_full_disk_is_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | sqlite3.Error, free_bytes: int
) -> None:
    free(monkeypatch, free_bytes)
    said = str(unusable(tmp_path / "ledger.db", error))
    assert said.startswith(f"The disk of {tmp_path} is full")
    # A quota that is used up on a disk with room: its free bytes would contradict.
    assert (" free)" in said) is (free_bytes < ROOM_TO_START_BYTES)
    assert said.endswith(f"Make room there, or {ELSEWHERE}.")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (sqlite_error(sqlite3.SQLITE_IOERR, "disk I/O error"), "cannot be used: disk I/O error."),
        (sqlite_error(sqlite3.SQLITE_CANTOPEN, "unable to open database file"), "may not write to its data folder"),
        (OSError(errno.EROFS, "Read-only file system"), "may not write to its data folder"),
        (OSError(errno.EIO, "Input/output error"), "cannot be used: Input/output error."),
    ],
)
def test_a_disk_with_room_is_not_called_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError | sqlite3.Error, says: str
) -> None:
    free(monkeypatch, ROOM_TO_START_BYTES)
    said = str(unusable(tmp_path / "ledger.db", error))
    assert says in said and "full" not in said
    assert said.endswith(f"{ELSEWHERE}.")
