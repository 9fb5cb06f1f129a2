"""Reads a safetensors file's header from disk; the weights are never touched."""

from pathlib import Path

from weighbridge_fit.budget import BASE_HEADER_BYTES, MAX_HEADER_BYTES, MIB, ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import FileFacts, WeightFormat
from weighbridge_fit.files import RegularFile, open_regular
from weighbridge_fit.safetensors.header import PREFIX_BYTES, Header, parse
from weighbridge_fit.safetensors.large import LargeHeader, parse_large

FIRST_READ_BYTES = 128 << 10


def read_safetensors(path: Path, name: str = "", component: str = "") -> FileFacts:
    """The facts of one file at an already resolved path. Raises `WeightError` for everything that is not
    well-formed."""
    with open_regular(path) as file:
        try:
            header = read_header(file)
        except WeightError as error:
            raise error.in_file(name or path.name) from error
        return FileFacts(
            name=name or path.name,
            component=component,
            format=WeightFormat.SAFETENSORS,
            file_bytes=file.size,
            header_bytes=PREFIX_BYTES + header.header_bytes,
            tensor_count=header.tensor_count,
            precisions=header.precisions(),
            metadata=header.metadata,
            make_tensors=header.tensors,
        )


def read_header(file: RegularFile, budget: ParseBudget | None = None) -> Header | LargeHeader:
    """The checked header of an open file. Small headers are bounded in work by their size; large ones have a
    budget."""
    # Most headers are here with their prefix in one read.
    start = file.read_exactly(0, min(FIRST_READ_BYTES, max(file.size, PREFIX_BYTES)))
    length = int.from_bytes(start[:PREFIX_BYTES], "little")
    if length == 0:
        raise WeightError(WeightReason.HEADER_LENGTH_INVALID, "the header length is zero", offset=0)
    if length > MAX_HEADER_BYTES:
        message = f"the header claims to be larger than the format's limit of {MAX_HEADER_BYTES // MIB} MiB"
        raise WeightError(WeightReason.HEADER_LENGTH_INVALID, message, offset=0)
    if length > file.size - PREFIX_BYTES:
        message = f"the file ends after {file.size} bytes, its header alone needs {length + PREFIX_BYTES}"
        raise WeightError(WeightReason.TRUNCATED, message, offset=file.size)
    if length > BASE_HEADER_BYTES:
        # Decoding at once costs up to ten times a header's bytes.
        return parse_large(file, length, budget or ParseBudget())
    end = PREFIX_BYTES + length
    header = start[PREFIX_BYTES:end] if end <= len(start) else file.read_exactly(PREFIX_BYTES, length)
    return parse(header, file.size - end)
