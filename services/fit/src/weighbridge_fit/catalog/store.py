"""The catalogue as it is now: the manifests that come with weighbridge, and the user's own beside them.

Manifests are read again when their folder changed, so that an edited one counts without a restart. A manifest that is
broken is left out and said so; it never keeps another from being read.
"""

import difflib
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import structlog

from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.manifest import MAX_MANIFEST_BYTES, ManifestError, read_manifest
from weighbridge_fit.errors import WeightError, as_text
from weighbridge_fit.files import open_regular

SUFFIX = ".json"
# A person's own folder; ours holds 58.
MAX_MANIFESTS = 2000
MAX_ENTRIES = 20_000
MAX_PROBLEMS_TOLD = 20

_log = structlog.get_logger(__name__)

_Listing = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The catalogue at one moment: entries by id, in order of their ids, and what was left out, a sentence each.

    Equal is only what is the same object: that is how it is seen that nothing changed.
    """

    entries: Mapping[str, CatalogEntry]
    problems: tuple[str, ...] = ()

    def near(self, catalog_id: str) -> str:
        """The id that somebody who wrote this one most likely meant, "" for none."""
        return next(iter(difflib.get_close_matches(catalog_id, self.entries, n=1, cutoff=0.75)), "")


class Catalogue:
    """Manifests of two folders. Safe to be asked from several threads."""

    def __init__(self, own: Path, users: Path | None) -> None:
        self._own = _Folder(own, users_own=False)
        self._users = None if users is None else _Folder(users, users_own=True)
        self._lock = threading.Lock()
        self._snapshot = Snapshot({})
        self._parts: list[Snapshot] = []

    def snapshot(self) -> Snapshot:
        """The catalogue now. Looks at the folders' listings; reads what changed."""
        with self._lock:
            parts = [folder.read() for folder in (self._own, self._users) if folder is not None]
            if parts != self._parts:
                self._snapshot, self._parts = _joined(parts), parts
            return self._snapshot


def _joined(parts: list[Snapshot]) -> Snapshot:
    """Entries of all folders, a later folder's before an earlier one's: a user's manifest replaces ours."""
    entries: dict[str, CatalogEntry] = {}
    problems: list[str] = []
    for part in parts:
        for catalog_id, entry in part.entries.items():
            if catalog_id in entries:
                entry = replace(entry, notes=(*entry.notes, "It replaces the entry that comes with weighbridge."))
            entries[catalog_id] = entry
        problems.extend(part.problems)
    if len(problems) > MAX_PROBLEMS_TOLD:
        left = len(problems) - MAX_PROBLEMS_TOLD
        problems = [*problems[:MAX_PROBLEMS_TOLD], f"{left} more manifests were left out: see the log of fit."]
    return Snapshot(dict(sorted(entries.items())), tuple(problems))


class _Folder:
    """One folder of manifests, read again when its listing changed."""

    def __init__(self, path: Path, *, users_own: bool) -> None:
        self._path = path
        self._users_own = users_own
        self._found: tuple[_Listing, str] | None = None
        self._read: dict[tuple[str, int, int, int], CatalogEntry | str] = {}
        self._snapshot = Snapshot({})

    def read(self) -> Snapshot:
        """What the folder holds now; the same object as long as nothing changed."""
        found = self._list()
        if found == self._found:
            return self._snapshot
        listing, problem = found
        # Only what changed is read: a manifest with pinned facts can be large.
        self._read = {item: self._read[item] if item in self._read else self._one(item[0]) for item in listing}
        entries = {read.catalog_id: read for read in self._read.values() if isinstance(read, CatalogEntry)}
        problems = [read for read in self._read.values() if isinstance(read, str)]
        self._snapshot = Snapshot(entries, tuple([self._told(problem)] if problem else []) + tuple(problems))
        self._found = found
        return self._snapshot

    def _list(self) -> tuple[_Listing, str]:
        """The manifests, and what stands against listing them."""
        try:
            with os.scandir(self._path) as found:
                items = [item for item in islice(found, MAX_ENTRIES) if _is_manifest(item.name)]
                listed = tuple((item.name, *_state(item)) for item in sorted(items, key=lambda item: item.name))
        except FileNotFoundError:
            return (), ""
        except OSError as error:
            return (), f"{self._path.name}: the folder cannot be listed ({error.strerror})."
        if len(listed) > MAX_MANIFESTS:
            return listed[:MAX_MANIFESTS], f"There are more than {MAX_MANIFESTS} manifests: the rest is not read."
        return listed, ""

    def _one(self, name: str) -> CatalogEntry | str:
        shown = as_text(name)
        try:
            with open_regular(Path(os.path.realpath(self._path / name))) as file:
                if file.size > MAX_MANIFEST_BYTES:
                    raise ManifestError(shown, "", f"is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
                data = file.read_exactly(0, file.size)
            return read_manifest(data, shown, user_entry=self._users_own)
        except ManifestError as error:
            return self._told(error.sentence())
        except WeightError as error:
            return self._told(f"{shown}: {error.message}.")

    def _told(self, sentence: str) -> str:
        _log.warning("manifest_left_out", sentence=sentence, users_own=self._users_own)
        return sentence


def _is_manifest(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".")


def _state(item: "os.DirEntry[str]") -> tuple[int, int, int]:
    """Size, time of the last change and inode; zeros for what cannot be looked at."""
    try:
        status = item.stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino
