"""From a resolved path to weight facts: picks the reader, the files that load, and the model's own description."""

from collections.abc import Callable, Sequence
from pathlib import Path

from weighbridge_fit import labelling, model_config
from weighbridge_fit.budget import MIB
from weighbridge_fit.components import Component, activation_bytes
from weighbridge_fit.errors import WeightError, WeightReason, as_text, shown
from weighbridge_fit.facts import FileFacts, Labelled, Role, WeightFacts, WeightFormat
from weighbridge_fit.files import open_regular
from weighbridge_fit.folder import LoadedFile, ModelFolder, Opener, model_folder, several_models, split_parts
from weighbridge_fit.gguf import architecture as gguf_architecture
from weighbridge_fit.gguf.reader import read_gguf
from weighbridge_fit.gguf.split import check_splits
from weighbridge_fit.recognise import roles
from weighbridge_fit.safetensors.reader import read_safetensors
from weighbridge_fit.tally import weight_facts
from weighbridge_fit.torch_checkpoint.reader import INERT_NAMES, looks_like_checkpoint, read_torch_checkpoint
from weighbridge_fit.weight_names import is_torch

# All files of one model together: four times the tensors of the largest published one (671 B parameters, 91,991), with
# room for a scale and a zero point beside each.
MAX_MODEL_TENSORS = 1 << 19
MAX_MODEL_HEADER_BYTES = 256 * MIB

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"})
# bitsandbytes packs four-bit weights into bytes and names their kind in a tensor beside each.
_BITSANDBYTES = ".quant_state.bitsandbytes__"
_START_BYTES = 16
# Of what a checkpoint calls, so many are named in a note.
MAX_NAMED = 3

_READERS = {
    WeightFormat.SAFETENSORS: read_safetensors,
    WeightFormat.GGUF: read_gguf,
    WeightFormat.TORCH_CHECKPOINT: read_torch_checkpoint,
}


class ReadingStopped(Exception):  # noqa: N818 - not an error: the caller went away
    """The caller no longer wants the facts."""


def describe(path: Path, admit: Opener, stopped: Callable[[], bool] = lambda: False) -> WeightFacts:
    """The facts of a file or folder at an already resolved path.

    `admit` resolves each file found on the way and refuses those outside the models root; `stopped` is asked
    before each file. Raises `WeightError`, or ReadingStopped.
    """
    if path.is_dir():
        return _describe_folder(path, admit, stopped)
    return _describe_file(path, admit, stopped)


def describe_unread(path: Path, admit: Opener) -> WeightFacts:
    """Name and size of a model whose headers are too large to be read: enough for a guess, and no more.

    Raises `WeightError`.
    """
    files = model_folder(path, admit).files if path.is_dir() else _files_of(path, _format_of(path), admit)
    size = 0
    for file in files:
        with open_regular(file.path) as opened:
            size += opened.size
    return WeightFacts(
        name=as_text(path.name),
        format=WeightFormat.UNKNOWN,
        file_bytes=size,
        tensor_bytes=0,
        tensor_count=0,
        element_count=0,
        largest_tensor_bytes=0,
        precisions=(),
        components=(),
    )


def _files_of(path: Path, format: WeightFormat, admit: Opener) -> Sequence[LoadedFile]:
    """A single file, or all parts of a split one."""
    files = []
    for part in split_parts(path) if format is WeightFormat.GGUF else [path]:
        real = admit(part)
        if real is None:
            raise WeightError(WeightReason.SPLIT_INCOMPLETE, "a part of the split file is missing", file=part.name)
        files.append(LoadedFile(real, as_text(part.name), ""))
    return files


def _describe_file(path: Path, admit: Opener, stopped: Callable[[], bool]) -> WeightFacts:
    format = _format_of(path)
    read = _read_all(_files_of(path, format, admit), stopped)
    return _undescribed(as_text(path.name), format, read, label=labelling.label_files)


def _describe_folder(folder: Path, admit: Opener, stopped: Callable[[], bool]) -> WeightFacts:
    found = model_folder(folder, admit)
    read = _read_all(found.files, stopped)
    name, formats = as_text(folder.name), {file.format for file in read}
    format = next(iter(formats)) if len(formats) == 1 else WeightFormat.MIXED
    if found.adapter is not None:
        return _adapter_facts(name, format, read, found)
    if found.pipeline or any(file.component for file in read):
        _refuse_editions(found.files, read)
        return _tree_facts(name, format, read, found)
    if not found.config or format is WeightFormat.GGUF:
        _refuse_editions(found.files, read)
        return _undescribed(name, format, read, notes=found.notes, label=labelling.label_files)
    class_name = labelling.diffusers_class(found.config)
    if class_name:

        def label(files: Sequence[FileFacts]) -> list[Labelled]:
            return labelling.label_diffusers_component(files, class_name)

        return _undescribed(name, format, read, notes=found.notes, label=label, architecture=class_name)
    return _language_facts(name, format, read, found)


def _language_facts(name: str, format: WeightFormat, read: list[FileFacts], found: ModelFolder) -> WeightFacts:
    """A transformers or MLX folder."""
    config = found.config
    tied = config.get("tie_word_embeddings", model_config.architecture(config) == "qwen2") is True
    recognised = roles.role_of_config(config)
    if recognised.role is Role.MODEL:
        labelled = labelling.label_language(read, tied)
    else:
        labelled = labelling.label_role(read, recognised.role)
    width = activation_bytes(tensor for component, tensor in labelled if component == Component.MODEL)
    # A drafter's geometry is its target's business: its config often has a drafter's fields and not a model's.
    geometry = model_config.geometry_from_config(config, width) if recognised.role is Role.MODEL else None
    return weight_facts(
        name,
        format,
        read,
        labelled,
        architecture=model_config.architecture(config) or roles.first_architecture(config),
        quantization=model_config.quantization_words(config) or _quantization(read),
        geometry=geometry,
        notes=_notes(found.notes, read),
        role=recognised.role,
        made_for=recognised.made_for,
    )


def _tree_facts(name: str, format: WeightFormat, read: list[FileFacts], found: ModelFolder) -> WeightFacts:
    """A tree whose components are its top-level folders."""
    if format is WeightFormat.SAFETENSORS or found.pipeline:
        format = WeightFormat.DIFFUSERS
    labelled = labelling.label_files(read)
    class_name = labelling.diffusers_class(found.pipeline)
    return weight_facts(
        name,
        format,
        read,
        labelled,
        architecture=class_name or labelling.image_architecture(read),
        quantization=_quantization(read),
        geometry=None,
        notes=_notes(found.notes, read),
    )


def _adapter_facts(name: str, format: WeightFormat, read: list[FileFacts], found: ModelFolder) -> WeightFacts:
    recognised = roles.adapter_of_config(found.adapter or {})
    return weight_facts(
        name,
        format,
        read,
        labelling.label_role(read, Role.ADAPTER),
        architecture="",
        quantization=_quantization(read),
        geometry=None,
        notes=_notes(found.notes, read),
        role=Role.ADAPTER,
        made_for=recognised.made_for,
    )


def _undescribed(
    name: str,
    format: WeightFormat,
    read: list[FileFacts],
    *,
    label: Callable[[Sequence[FileFacts]], list[Labelled]],
    notes: tuple[str, ...] = (),
    architecture: str = "",
) -> WeightFacts:
    """Files that describe themselves, by metadata or by the names of their tensors."""
    gguf = [file for file in read if file.format is WeightFormat.GGUF]
    geometry, recognised = None, roles.MODEL
    architecture = architecture or labelling.image_architecture(read)
    if len(gguf) == len(read) and not architecture:
        metadata = read[0].metadata
        names = {tensor.name for file in read for tensor in file.tensors}
        recognised = roles.role_of_gguf(metadata, names)
        architecture = gguf_architecture.architecture(metadata)
        geometry = gguf_architecture.geometry_from_metadata(metadata, read[0].arrays, "output.weight" not in names)
    elif not architecture and labelling.is_adapter(read):
        recognised = roles.adapter_of_metadata(read[0].metadata)
    whole = recognised.role is Role.MODEL
    return weight_facts(
        name,
        format,
        read,
        label(read) if whole else labelling.label_role(read, recognised.role),
        architecture=architecture,
        quantization=_quantization(read),
        geometry=geometry,
        notes=_notes(notes, read),
        role=recognised.role,
        made_for=recognised.made_for,
    )


def _notes(notes: tuple[str, ...], read: Sequence[FileFacts]) -> tuple[str, ...]:
    """What the folder has to say, and which checkpoints would run code of their own in a loader that is not careful."""
    found = list(notes)
    for file in read:
        names = file.metadata.get(INERT_NAMES)
        if names:
            few = ", ".join(shown(name) for name in names[:MAX_NAMED])
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            found.append(
                f"{file.name} calls {few}{more} when it is unpickled. Nothing of it was run here; torch runs it unless "
                "it loads weights only."
            )
    return tuple(found)


def _refuse_editions(files: Sequence[LoadedFile], read: list[FileFacts]) -> None:
    """Raises SEVERAL_MODELS where two files hold the same tensors: editions of one model; nobody loads both."""
    groups = sorted({file.group for file in files if file.group})
    if len(groups) < 2:
        return
    owner: dict[tuple[str, str], str] = {}
    for file, facts in zip(files, read, strict=True):
        if not file.group:
            continue
        for component, tensor in labelling.label_files([facts]):
            # In GGUF a folder is a quantisation and not a component.
            part = "" if facts.format is WeightFormat.GGUF and facts.component else component
            if owner.setdefault((part, tensor.name), file.group) != file.group:
                raise several_models(groups)


def _read_all(files: Sequence[LoadedFile], stopped: Callable[[], bool]) -> list[FileFacts]:
    """The facts of each file. Raises PARSE_BUDGET when they are more than one model has, SPLIT_INCOMPLETE when parts of
    a split GGUF model do not belong together."""
    read: list[FileFacts] = []
    tensors = header_bytes = 0
    for file in files:
        if stopped():
            raise ReadingStopped
        facts = _READERS[_format_of(file.path)](file.path, file.name, file.component)
        tensors, header_bytes = tensors + facts.tensor_count, header_bytes + facts.header_bytes
        if tensors > MAX_MODEL_TENSORS or header_bytes > MAX_MODEL_HEADER_BYTES:
            message = "the files describe more tensors than any model has"
            raise WeightError(WeightReason.PARSE_BUDGET, message, file=file.name)
        read.append(facts)
    check_splits([facts for facts in read if facts.format is WeightFormat.GGUF])
    return read


def _format_of(path: Path) -> WeightFormat:
    """By name where the name says it, else by content. Raises UNKNOWN_FORMAT."""
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return WeightFormat.GGUF
    if suffix == ".safetensors":
        return WeightFormat.SAFETENSORS
    with open_regular(path) as file:
        start = file.read_exactly(0, min(_START_BYTES, file.size))
    if start.startswith(b"GGUF"):
        return WeightFormat.GGUF
    if looks_like_checkpoint(start) or is_torch(path.name.lower()):
        return WeightFormat.TORCH_CHECKPOINT
    if start[8:9] == b"{":
        return WeightFormat.SAFETENSORS
    message = "this is no safetensors, GGUF or torch file, and no other format is read"
    raise WeightError(WeightReason.UNKNOWN_FORMAT, message, file=path.name)


def _quantization(files: Sequence[FileFacts]) -> str:
    """The quantised type that most bytes are stored in; "" when most are plain numbers."""
    totals: dict[str, int] = {}
    for file in files:
        for total in file.precisions:
            totals[total.dtype] = totals.get(total.dtype, 0) + total.bytes
    dtype = max(totals, key=lambda name: (totals[name], name), default="")
    if dtype == "U8":
        return next(
            (
                tensor.name.rpartition(_BITSANDBYTES)[2]
                for file in files
                for tensor in file.tensors
                if _BITSANDBYTES in tensor.name
            ),
            "",
        )
    return "" if dtype in _PLAIN_DTYPES or dtype.startswith("U") else dtype
