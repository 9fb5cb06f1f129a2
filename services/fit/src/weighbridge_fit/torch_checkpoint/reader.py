"""Reads what a torch checkpoint holds; the weights are never touched, and nothing in the file is executed."""

from pathlib import Path
from typing import Any

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import FileFacts, TensorFact, WeightFormat, precision_totals
from weighbridge_fit.files import RegularFile, open_regular
from weighbridge_fit.torch_checkpoint.archive import LOCAL_MAGIC, Archive, read_archive
from weighbridge_fit.torch_checkpoint.contents import bare, named_tensors, tensor_facts
from weighbridge_fit.torch_checkpoint.legacy import read_legacy
from weighbridge_fit.torch_checkpoint.machine import Machine
from weighbridge_fit.torch_checkpoint.stream import open_pickle
from weighbridge_fit.torch_checkpoint.tensors import TensorRules

# torch before 1.6 wrote pickles one after another; the first is this number, 0x1950a86a20f9469cfc6c.
LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
STRUCTURE = b"data.pkl"
CONSTANTS = b"constants.pkl"
INERT_NAMES = "torch.inert_names"
"""Metadata: classes and functions that the file calls and nobody looked up, by their whole names."""


def looks_like_checkpoint(start: bytes) -> bool:
    """Whether a file that begins so (15 bytes are enough) can be a torch checkpoint of today or before 1.6."""
    return start.startswith((LOCAL_MAGIC, LEGACY_START))


def read_torch_checkpoint(path: Path, name: str = "", component: str = "") -> FileFacts:
    """The facts of one file at an already resolved path. Raises `WeightError` for everything that is not
    well-formed, and LEGACY_CHECKPOINT for files of torch before 1.6 that cannot be read here."""
    with open_regular(path) as file:
        try:
            return read_checkpoint(file, name or path.name, component, ParseBudget())
        except WeightError as error:
            raise error.in_file(name or path.name) from error


def read_checkpoint(file: RegularFile, name: str, component: str, budget: ParseBudget) -> FileFacts:
    """The facts of an open file."""
    start = file.read_exactly(0, min(len(LEGACY_START), file.size))
    if start == LEGACY_START:
        tensors = read_legacy(file)
        # Pickles and weights alternate in these files: what is no weight is header.
        rest = max(0, file.size - sum(tensor.bytes for tensor in tensors))
        return _file_facts(file, name, component, tensors, rest, {"torch.archive": "legacy"})
    if not start.startswith(LOCAL_MAGIC):
        raise WeightError(WeightReason.BAD_MAGIC, "the file does not start as a torch checkpoint does", offset=0)
    archive = read_archive(file, budget)
    if STRUCTURE not in archive.records:
        raise WeightError(WeightReason.UNKNOWN_FORMAT, "the archive holds no data.pkl: it is no torch checkpoint")
    facts, opaque = _tensors_of(file, archive, STRUCTURE, b"data/", "", budget)
    script = CONSTANTS in archive.records
    if script:
        constants, _ = _tensors_of(file, archive, CONSTANTS, b"constants/", "constants", budget)
        facts += constants
    metadata = {
        "torch.archive": "torchscript" if script else "checkpoint",
        INERT_NAMES: opaque,
    }
    header_bytes = archive.directory_bytes + archive.records[STRUCTURE].size
    return _file_facts(file, name, component, facts, header_bytes, metadata)


def _file_facts(
    file: RegularFile,
    name: str,
    component: str,
    facts: tuple[TensorFact, ...],
    header_bytes: int,
    metadata: dict[str, Any],
) -> FileFacts:
    return FileFacts(
        name=name,
        component=component,
        format=WeightFormat.TORCH_CHECKPOINT,
        file_bytes=file.size,
        header_bytes=header_bytes,
        tensor_count=len(facts),
        precisions=precision_totals((fact.dtype, 1, fact.elements, fact.bytes) for fact in facts),
        metadata=metadata,
        make_tensors=lambda: facts,
    )


def _tensors_of(
    file: RegularFile, archive: Archive, pickle: bytes, folder: bytes, prefix: str, budget: ParseBudget
) -> tuple[tuple[TensorFact, ...], list[str]]:
    """The tensors of one pickle of the archive, and the names in it that nobody looked up."""
    rules = TensorRules(archive, folder)
    stream = open_pickle(file, archive, pickle, budget)
    machine = Machine(stream, budget, rules.rebuild, rules.persistent)
    root = machine.run()
    found = named_tensors(root, budget)
    # What no name leads to is loaded all the same, and its bytes are in the file.
    reached = {tensor.storage.key for _, tensor in found if tensor.storage is not None}
    found += [
        (f"{folder.decode()}{key}", bare(storage)) for key, storage in rules.storages.items() if key not in reached
    ]
    if prefix:
        found = [(f"{prefix}.{name}", tensor) for name, tensor in found]
    return tensor_facts(found), sorted(machine.opaque_paths)
