"""The catalogue's models on this machine: which are here, and their facts, from disk before pins before sizes."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.installed import Fingerprint, Installed, look, recorded_id
from weighbridge_fit.catalog.resolve import known_by_sizes, model_of, pinned_facts, roles
from weighbridge_fit.catalog.store import Catalogue, Snapshot
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.model import MAIN, Model
from weighbridge_fit.models_root import ModelNotFoundError, ModelsRoot
from weighbridge_fit.reading import HeaderReader

# Facts with tensors take about 300 bytes for each: 64 MiB in all.
MAX_CACHED_TENSORS = 200_000


@dataclass(frozen=True, slots=True)
class _Read:
    fingerprint: Fingerprint
    opened: Mapping[str, str]
    facts: Mapping[str, WeightFacts]
    paths: Mapping[str, str]
    tensors: int


class Shelf:
    """Catalogue models under one folder, each in a folder named by its id.

    What was read is kept for as long as nothing in the model's folder changed, so that the whole catalogue is priced
    without reading every header again.
    """

    def __init__(self, catalogue: Catalogue, reader: HeaderReader, root: ModelsRoot, folder: Path) -> None:
        self._catalogue = catalogue
        self._reader = reader
        self._root = root
        self._folder = folder
        self._read: OrderedDict[Path, _Read] = OrderedDict()

    async def snapshot(self) -> Snapshot:
        """The catalogue as it is now."""
        return await asyncio.to_thread(self._catalogue.snapshot)

    def folder_of(self, entry: CatalogEntry) -> Path:
        """Where an entry's files are, or would be."""
        return self._folder / entry.catalog_id

    async def look(self, entries: Iterable[CatalogEntry]) -> dict[str, Installed]:
        """What of some entries is here, by id; those that are not here at all are left out."""
        return await asyncio.to_thread(self._look, list(entries))

    async def model(self, entry: CatalogEntry, installed: Installed | None) -> Model:
        """The model: its facts from disk where it is whole, else pinned, else its sizes alone.

        Raises WeightError for files that cannot be read.
        """
        if installed is not None and installed.whole:
            read = await self._from_disk(entry, installed)
            return model_of(entry, read.facts, read.paths)
        pinned = pinned_facts(entry)
        return known_by_sizes(entry) if pinned is None else model_of(entry, pinned, {})

    async def named_by(self, path: Path) -> tuple[CatalogEntry, Installed] | None:
        """The entry of a resolved path that a pull brought: its folder, or the file in it that is the model."""
        return await asyncio.to_thread(self._named_by, path)

    def _look(self, entries: list[CatalogEntry]) -> dict[str, Installed]:
        try:
            present = {path.name for path in self._folder.iterdir()}
        except OSError:
            return {}
        found: dict[str, Installed] = {}
        for entry in entries:
            if entry.catalog_id in present:
                # A link that leads out of the models root is as good as nothing there.
                folder = self._root.contains(self._folder / entry.catalog_id)
                if folder is not None and folder.is_dir():
                    found[entry.catalog_id] = look(folder, entry)
        return found

    def _named_by(self, path: Path) -> tuple[CatalogEntry, Installed] | None:
        folder = path if path.is_dir() else path.parent
        entry = self._catalogue.snapshot().entries.get(recorded_id(folder))
        if entry is None:
            return None
        if path != folder and path.name != roles(entry)[MAIN]:
            return None
        installed = look(folder, entry)
        return (entry, installed) if installed.whole else None

    async def _from_disk(self, entry: CatalogEntry, installed: Installed) -> _Read:
        opened = roles(entry)
        known = self._read.get(installed.folder)
        if known is not None and known.fingerprint == installed.fingerprint and known.opened == opened:
            self._read.move_to_end(installed.folder)
            return known
        facts: dict[str, WeightFacts] = {}
        paths: dict[str, str] = {}
        for role, name in opened.items():
            try:
                path = await self._reader.resolve(str(installed.folder / name if name else installed.folder))
            except ModelNotFoundError as error:
                message = "the file is missing, or leads out of the models root"
                raise WeightError(WeightReason.UNREADABLE, message, file=name) from error
            facts[role], paths[role] = await self._reader.read(path), str(path)
        read = _Read(installed.fingerprint, opened, facts, paths, sum(found.tensor_count for found in facts.values()))
        self._keep(installed.folder, read)
        return read

    def _keep(self, folder: Path, read: _Read) -> None:
        self._read.pop(folder, None)
        self._read[folder] = read
        while len(self._read) > 1 and sum(kept.tensors for kept in self._read.values()) > MAX_CACHED_TENSORS:
            self._read.popitem(last=False)
