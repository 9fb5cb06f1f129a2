"""Looks into weights as far as sd-server's load can fail at them: is it there, is it a model, are its parts together.

Nothing is read but headers, and no tensor is kept.
"""

import io
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_GGUF_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 30: (1, 2)}
"""Bytes of a block of elements, for F32, F16, Q4_0, Q8_0 and BF16 (GGUF specification)."""

_GGUF_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_GGUF_STRING, _GGUF_ARRAY = 8, 9
_MOST_TENSORS = 45212608023797920
_SAFETENSORS_DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4}


class FileFaultError(Exception):
    """A file cannot be read as a model.

    Attributes:
        warning: what is said of it, on standard output.
        errors: what is said of it, on standard error.
    """

    def __init__(self, *, warning: str = "", errors: tuple[str, ...] = ()) -> None:
        super().__init__(warning or "".join(errors))
        self.warning = warning
        self.errors = errors


class AbortError(Exception):
    """The engine aborts over a file. The text is its last word on standard error."""

    def __init__(self, what: str, errors: tuple[str, ...] = ()) -> None:
        super().__init__(what)
        self.errors = errors


@dataclass(frozen=True)
class Tensors:
    """What a file holds.

    Attributes:
        format: gguf or safetensors.
        shapes: by name, the outermost dimension first.
        size_bytes: of the tensors.
        is_cut_off: whether the file ends before its tensors do.
        errors: what is said of it though it loads.
    """

    format: str
    shapes: dict[str, tuple[int, ...]]
    size_bytes: int
    is_cut_off: bool
    errors: tuple[str, ...] = ()


def look_into(path: Path) -> Tensors:
    """Raises FileFaultError and AbortError as the engine's load of this file fails."""
    if not path.is_file():
        raise FileFaultError(warning=f"file {path} not found")
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            return _gguf(file, path)
        file.seek(0)
        header = _safetensors_header(file)
        if header is None:
            raise FileFaultError(warning=f"unknown format {path}")
        return _safetensors(header, file.tell(), path)


def _safetensors_header(file: BinaryIO) -> dict[str, dict[str, object]] | None:
    size = file.read(8)
    length = struct.unpack("<Q", size)[0] if len(size) == 8 else 0
    if not 2 <= length <= 100 * 2**20:
        return None
    try:
        header = json.loads(file.read(length))
    except ValueError:
        return None
    return header if isinstance(header, dict) else None


def _safetensors(header: dict[str, dict[str, object]], data_at: int, path: Path) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {}
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = entry.get("dtype")
        if not isinstance(dtype, str):
            raise AbortError(
                "terminate called after throwing an instance of 'nlohmann::json_abi_v3_11_2::detail::type_error'\n"
                "  what():  [json.exception.type_error.302] type must be string, but is null"
            )
        if dtype not in _SAFETENSORS_DTYPES:
            raise FileFaultError(errors=(f"unsupported dtype '{dtype}' (tensor '{name}')",))
        shape = entry["shape"]
        assert isinstance(shape, list)
        shapes[name] = tuple(shape)
        end += math.prod(shape) * _SAFETENSORS_DTYPES[dtype]
    return Tensors("safetensors", shapes, end, path.stat().st_size < data_at + end)


def _gguf(file: BinaryIO, path: Path) -> Tensors:
    version, tensors, keys = struct.unpack("<IQQ", file.read(20))
    errors: tuple[str, ...] = ()
    if version > 3:
        errors = (
            f"gguf_init_from_file_ptr: this GGUF file is version {version} but this software only supports up to "
            "version 3",
            "gguf_init_from_file_ptr: failed to read header",
        )
    if tensors > _MOST_TENSORS:
        said = f"gguf_init_from_file_ptr: number of tensors is {tensors} but must be in [0, {_MOST_TENSORS}]"
        raise AbortError(
            "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc",
            (said, "gguf_init_from_file_ptr: failed to read header"),
        )
    for _ in range(keys):
        _string(file)
        _skip(file, *struct.unpack("<I", file.read(4)))
    shapes: dict[str, tuple[int, ...]] = {}
    end = size = 0
    for name, shape, kind, offset in _gguf_tensors(file, tensors):
        elements, block_bytes = _GGUF_BLOCKS[kind]
        shapes[name] = shape
        size += math.prod(shape) // elements * block_bytes
        end = max(end, offset + math.prod(shape) // elements * block_bytes)
    return Tensors("gguf", shapes, size, path.stat().st_size < file.tell() + end, errors)


def _gguf_tensors(file: BinaryIO, count: int) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    for _ in range(count):
        name = _string(file)
        (dimensions,) = struct.unpack("<I", file.read(4))
        *shape, kind, offset = struct.unpack(f"<{dimensions}QIQ", file.read(8 * dimensions + 12))
        yield name, tuple(reversed(shape)), kind, offset


def _string(file: BinaryIO) -> str:
    return file.read(struct.unpack("<Q", file.read(8))[0]).decode("utf-8", "replace")


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _GGUF_STRING:
        _string(file)
    elif kind == _GGUF_ARRAY:
        of, length = struct.unpack("<IQ", file.read(12))
        for _ in range(length):
            _skip(file, of)
    else:
        file.seek(_GGUF_SCALARS[kind], io.SEEK_CUR)
