"""Reads a GGUF file's header from disk; the weights are never touched."""

from pathlib import Path

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError
from weighbridge_fit.facts import FileFacts, WeightFormat, precision_totals
from weighbridge_fit.files import RegularFile, open_regular
from weighbridge_fit.gguf.header import Header, parse
from weighbridge_fit.gguf.window import Window


def read_gguf(path: Path, name: str = "", component: str = "") -> FileFacts:
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
            format=WeightFormat.GGUF,
            file_bytes=file.size,
            header_bytes=header.header_bytes,
            tensor_count=len(header.tensors),
            precisions=precision_totals((tensor.dtype, 1, tensor.elements, tensor.bytes) for tensor in header.tensors),
            metadata=header.metadata,
            make_tensors=lambda: header.tensors,
            arrays=header.arrays,
        )


def read_header(file: RegularFile) -> Header:
    """The checked header of an open file."""
    return parse(Window(file, ParseBudget()))
