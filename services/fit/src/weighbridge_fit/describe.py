"""From a resolved path to weight facts: picks the reader, the files that load, and the model's own description."""

from collections.abc import Callable
from pathlib import Path

from weighbridge_fit import model_config
from weighbridge_fit.budget import MIB
from weighbridge_fit.components import Component, activation_bytes, language_component
from weighbridge_fit.errors import WeightError, WeightReason, as_text
from weighbridge_fit.facts import FileFacts, TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.files import open_regular
from weighbridge_fit.folder import MAX_CONFIG_BYTES, LoadedFile, Opener, loaded_files, read_json, split_parts
from weighbridge_fit.gguf import architecture as gguf_architecture
from weighbridge_fit.gguf.reader import read_gguf
from weighbridge_fit.safetensors.reader import read_safetensors
from weighbridge_fit.tally import label, weight_facts

# All files of one model together: four times the tensors of the largest published one (671 B parameters, 91,991), with
# room for a scale and a zero point beside each.
MAX_MODEL_TENSORS = 1 << 19
MAX_MODEL_HEADER_BYTES = 256 * MIB

_PLAIN_DTYPES = frozenset({"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"})


class ReadingStopped(Exception):  # noqa: N818 - not an error: the caller went away
    """The caller no longer wants the facts."""


def describe(path: Path, admit: Opener, stopped: Callable[[], bool] = lambda: False) -> WeightFacts:
    """The facts of a file or folder at an already resolved path.

    `admit` resolves each file found on the way and refuses those outside the models root; `stopped` is asked before
    each file. Raises `WeightError`, or ReadingStopped.
    """
    if path.is_dir():
        return _describe_folder(path, admit, stopped)
    return _describe_file(path, admit, stopped)


def describe_unread(path: Path, admit: Opener) -> WeightFacts:
    """Name and size of a model whose headers are too large to be read: enough for a guess, and no more.

    Raises `WeightError`.
    """
    files = loaded_files(path, admit)[0] if path.is_dir() else _files_of(path, _format_of(path), admit)
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


def _files_of(path: Path, format: WeightFormat, admit: Opener) -> list[LoadedFile]:
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
    if format is WeightFormat.GGUF:
        return _gguf_facts(as_text(path.name), read)
    labelled = label(read, lambda file, tensor: Component.MODEL)
    return weight_facts(
        as_text(path.name), format, read, labelled, architecture="", quantization=_dominant_type(read), geometry=None
    )


def _describe_folder(folder: Path, admit: Opener, stopped: Callable[[], bool]) -> WeightFacts:
    files, notes = loaded_files(folder, admit)
    config_path = admit(folder / model_config.CONFIG_NAME)
    config = read_json(config_path, MAX_CONFIG_BYTES) if config_path else {}
    read = _read_all(files, stopped)
    formats = {file.format for file in read}
    if formats == {WeightFormat.GGUF}:
        return _gguf_facts(as_text(folder.name), read, tuple(notes))
    tied = config.get("tie_word_embeddings", model_config.architecture(config) == "qwen2") is True

    def component_of(file: FileFacts, tensor: TensorFact) -> str:
        return file.component or language_component(tensor.name, tied)

    labelled = label(read, component_of)
    width = activation_bytes(tensor for component, tensor in labelled if component == Component.MODEL)
    tree = any(file.component for file in read)
    return weight_facts(
        as_text(folder.name),
        WeightFormat.MIXED if len(formats) > 1 else WeightFormat.DIFFUSERS if tree else WeightFormat.SAFETENSORS,
        read,
        labelled,
        architecture=model_config.architecture(config),
        quantization=model_config.quantization_words(config) or _dominant_type(read),
        geometry=model_config.geometry_from_config(config, width),
        notes=tuple(notes),
    )


def _gguf_facts(name: str, files: list[FileFacts], notes: tuple[str, ...] = ()) -> WeightFacts:
    metadata = files[0].metadata
    names = {tensor.name for file in files for tensor in file.tensors}
    geometry = gguf_architecture.geometry_from_metadata(metadata, files[0].arrays, "output.weight" not in names)
    return weight_facts(
        name,
        WeightFormat.GGUF,
        files,
        label(files, lambda file, tensor: Component.MODEL),
        architecture=gguf_architecture.architecture(metadata),
        quantization=_dominant_type(files),
        geometry=geometry,
        notes=notes,
    )


def _read_all(files: list[LoadedFile], stopped: Callable[[], bool]) -> list[FileFacts]:
    """The facts of each file. Raises PARSE_BUDGET when they are more than one model has."""
    read: list[FileFacts] = []
    tensors = header_bytes = 0
    for file in files:
        if stopped():
            raise ReadingStopped
        reader = read_gguf if _format_of(file.path) is WeightFormat.GGUF else read_safetensors
        facts = reader(file.path, file.name, file.component)
        tensors, header_bytes = tensors + facts.tensor_count, header_bytes + facts.header_bytes
        if tensors > MAX_MODEL_TENSORS or header_bytes > MAX_MODEL_HEADER_BYTES:
            message = "the files describe more tensors than any model has"
            raise WeightError(WeightReason.PARSE_BUDGET, message, file=file.name)
        read.append(facts)
    return read


def _format_of(path: Path) -> WeightFormat:
    """By name where the name says it, else by content. Raises UNKNOWN_FORMAT."""
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        return WeightFormat.GGUF
    if suffix == ".safetensors":
        return WeightFormat.SAFETENSORS
    with open_regular(path) as file:
        start = file.read_exactly(0, min(9, file.size))
    if start.startswith(b"GGUF"):
        return WeightFormat.GGUF
    if start[8:] == b"{":
        return WeightFormat.SAFETENSORS
    message = "this is neither a safetensors nor a GGUF file, and no other format is read"
    raise WeightError(WeightReason.UNKNOWN_FORMAT, message, file=path.name)


def _dominant_type(files: list[FileFacts]) -> str:
    """The quantised type that most bytes are stored in; "" when most are plain numbers."""
    totals: dict[str, int] = {}
    for file in files:
        for total in file.precisions:
            totals[total.dtype] = totals.get(total.dtype, 0) + total.bytes
    dtype = max(totals, key=lambda name: (totals[name], name), default="")
    return "" if dtype in _PLAIN_DTYPES or dtype.startswith("U") else dtype
