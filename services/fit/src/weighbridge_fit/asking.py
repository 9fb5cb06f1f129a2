"""From a request to a model: references resolved, headers read, companions beside them."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import grpc
from weighbridge_proto.errors import RequestError, failed_precondition, invalid_argument, not_found
from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.catalog.manifest import is_id
from weighbridge_fit.catalog.resolve import known_by_sizes
from weighbridge_fit.catalog.shelf import Shelf
from weighbridge_fit.catalog.store import Snapshot
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.model import MAIN, Model
from weighbridge_fit.models_root import ModelNotFoundError
from weighbridge_fit.reading import HeaderReader
from weighbridge_fit.recognise.image_parts import may_be_in_parts, roles_of
from weighbridge_fit.tally import joined
from weighbridge_fit.wire.facts import UnpriceableFactsError, facts_from

HEADER_TOO_LARGE = WeightReason.HEADER_TOO_LARGE.value

_REASONS = {
    WeightReason.HEADER_TOO_LARGE: HEADER_TOO_LARGE,
    WeightReason.CONFIG_INVALID: "MALFORMED_CONFIG",
    WeightReason.UNKNOWN_FORMAT: "UNSUPPORTED_FORMAT",
    WeightReason.UNSUPPORTED_VERSION: "UNSUPPORTED_FORMAT",
    WeightReason.NO_WEIGHTS: "UNSUPPORTED_FORMAT",
    WeightReason.UNSUPPORTED_TENSOR: "UNSUPPORTED_FORMAT",
    WeightReason.LEGACY_CHECKPOINT: "UNSUPPORTED_FORMAT",
    WeightReason.SEVERAL_MODELS: "SEVERAL_MODELS",
}


class ModelDesk:
    """Turns model references into models."""

    def __init__(self, reader: HeaderReader, shelf: Shelf) -> None:
        self._reader = reader
        self._shelf = shelf

    async def model(self, reference: weights_pb2.ModelRef) -> Model:
        """The model that a request means; a catalogue model with the companions that its entry names.

        Raises RequestError.
        """
        kind = reference.WhichOneof("model")
        if kind is None:
            raise invalid_argument("model", "names no model: give a path, a catalogue id or facts", "MODEL_MISSING")
        if kind == "facts":
            try:
                # Facts with all tensors of a large model take a second to hold against themselves.
                return Model(await asyncio.to_thread(facts_from, reference.facts))
            except UnpriceableFactsError as error:
                raise invalid_argument(error.field, error.message, "INVALID_FACTS") from error
        if kind == "catalog_id":
            return await self._of_catalogue(reference.catalog_id)
        return await self._of_path(reference.path)

    async def with_companions(self, model: Model, references: Mapping[str, str]) -> Model:
        """The model with further files, by role. Raises RequestError."""
        companions, paths = dict(model.companions), dict(model.paths)
        for role, reference in sorted(references.items()):
            companions[role], paths[role] = await self.read(reference)
        return Model(model.facts, companions, paths, model.entry)

    async def read(self, reference: str) -> tuple[WeightFacts, str]:
        """The facts of a path under the models root, and the resolved path. Raises RequestError."""
        try:
            path = await self._reader.resolve(reference)
        except ModelNotFoundError as error:
            raise model_not_found(reference) from error
        try:
            return await self._reader.read(path), str(path)
        except WeightError as error:
            raise malformed(error) from error

    async def size_alone(self, reference: weights_pb2.ModelRef) -> Model:
        """A model whose headers are beyond what is read: name and size. Raises RequestError."""
        if reference.WhichOneof("model") == "catalog_id":
            return known_by_sizes(entry_of(await self._shelf.snapshot(), reference.catalog_id))
        path = await self._reader.resolve(reference.path)
        try:
            return Model(await self._reader.size(path), paths={MAIN: str(path)})
        except WeightError as error:
            raise malformed(error) from error

    async def _of_catalogue(self, catalog_id: str) -> Model:
        entry = entry_of(await self._shelf.snapshot(), catalog_id)
        installed = await self._shelf.look([entry])
        try:
            return await self._shelf.model(entry, installed.get(catalog_id))
        except WeightError as error:
            raise malformed(error) from error

    async def _of_path(self, reference: str) -> Model:
        try:
            path = await self._reader.resolve(reference)
        except ModelNotFoundError as error:
            # A person who names no path may have meant an id.
            raise model_not_found(reference, _hint(await self._shelf.snapshot(), reference)) from error
        try:
            pulled = await self._shelf.named_by(path)
            if pulled is not None:
                return await self._shelf.model(*pulled)
            facts = await self._reader.read(path)
            return await self._in_parts(path, facts) or Model(facts, paths={MAIN: str(path)})
        except WeightError as error:
            raise malformed(error) from error

    async def _in_parts(self, folder: Path, whole: WeightFacts) -> Model | None:
        """A folder of an image model's files, each as the engine would open it; None for any other folder or file.

        Raises WeightError.
        """
        if not may_be_in_parts(whole) or not await asyncio.to_thread(folder.is_dir):
            return None
        try:
            found = {file.name: await self._reader.resolve(str(folder / file.name)) for file in whole.files}
        except ModelNotFoundError:  # gone meanwhile
            return None
        by_name = {name: await self._reader.read(path) for name, path in found.items()}
        roles = roles_of(by_name)
        if roles is None:
            return None
        companions = {role: by_name[name] for role, name in roles.items() if role != MAIN}
        paths = {role: str(folder / name) for role, name in roles.items()}
        return Model(replace(by_name[roles[MAIN]], name=whole.name), companions, paths)


def all_facts(model: Model) -> WeightFacts:
    """The facts of a model with those of its parts."""
    if not model.companions:
        return model.facts
    return joined(model.facts.name, model.facts, dict(sorted(model.companions.items())))


def entry_of(snapshot: Snapshot, catalog_id: str) -> CatalogEntry:
    """The entry of an id. Raises RequestError MODEL_NOT_FOUND, which says what may have been meant."""
    entry = snapshot.entries.get(catalog_id)
    if entry is not None:
        return entry
    message = f"There is no model {catalog_id[:200]!r} in the catalogue.{_hint(snapshot, catalog_id)}"
    raise not_found("MODEL_NOT_FOUND", message)


def _hint(snapshot: Snapshot, catalog_id: str) -> str:
    """What may have been meant by an id that is none, by the catalogue alone; "" where nothing is near."""
    if not is_id(catalog_id):
        return ""
    file = f"{catalog_id}.json"
    broken = [sentence for sentence in snapshot.problems if sentence.startswith((f"{file}:", f"{file},"))]
    near = snapshot.near(catalog_id)
    return f" Its manifest was left out: {broken[0]}" if broken else f" Did you mean {near}?" if near else ""


def malformed(error: WeightError) -> RequestError:
    """A file that cannot be read, with file, offset and cause."""
    metadata = {"file": error.file, "cause": error.reason.value}
    if error.offset is not None:
        metadata["offset"] = str(error.offset)
    sentence = error.sentence()
    return RequestError(
        grpc.StatusCode.INVALID_ARGUMENT,
        reason_of(error),
        f"The model cannot be read: {sentence}.",
        metadata=metadata,
        field_violations=[("model", sentence)],
    )


def reason_of(error: WeightError) -> str:
    """The contract's reason for a file that cannot be read."""
    return _REASONS.get(error.reason, "MALFORMED_WEIGHTS")


def model_not_found(reference: str, hint: str = "") -> RequestError:
    """One sentence for absent and forbidden: the difference would tell what exists outside the models root."""
    return not_found("MODEL_NOT_FOUND", f"There is no model {reference[:200]!r} under the models root.{hint}")


def not_on_disk(entry: CatalogEntry) -> RequestError:
    """A catalogue model whose headers are needed and are not there."""
    named = entry.catalog_id
    message = f"The files of {named} are not on this machine. weighbridge pull {named} gets them."
    return failed_precondition("CATALOG_MODEL_NOT_ON_DISK", message)
