"""What must hold for every input: the property that all fuzzing of weight files checks.

A reader answers with facts or with a `WeightError` and nothing else, reads nothing outside the file, does nothing but
read (guard.py), and stays within the time and memory of a header of at most 8 MiB: 2 s and 96 MiB.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from weighbridge_fit.budget import MAX_HEADER_BYTES, ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import TensorFact
from weighbridge_fit.gguf import header as gguf_header
from weighbridge_fit.gguf.window import Window
from weighbridge_fit.safetensors.large import parse_large
from weighbridge_fit.safetensors.reader import read_header as read_safetensors_header
from weighbridge_fit.torch_checkpoint.reader import read_checkpoint

from services.fit.fuzz import corpus
from services.fit.fuzz.guard import nothing_executed

SECONDS = 2.0
MEMORY_BYTES = 96 << 20
# A message travels in a call's trailers.
MAX_MESSAGE = 400
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class BrokenPromiseError(AssertionError):
    """An input made a reader break what it promises."""


class MemoryFile:
    """An open file that lies in memory and notices reads beside it."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read_exactly(self, offset: int, length: int) -> bytes:
        """As RegularFile."""
        if offset < 0 or not 0 <= length <= MAX_HEADER_BYTES + 8:
            raise BrokenPromiseError(f"{length} bytes at {offset} were asked for")
        if offset + length > self.size:
            # The reader of real files refuses this; asking for it after a check of sizes is a mistake all the same.
            raise WeightError(WeightReason.TRUNCATED, "the file ends", offset=self.size)
        return self._data[offset : offset + length]

    def fileno(self) -> int:
        """A legacy checkpoint would be handed to another process."""
        raise WeightError(WeightReason.LEGACY_CHECKPOINT, "not read while fuzzing")


Facts = tuple[tuple[TensorFact, ...], int]
"""The tensors of a file, and the bytes of data that they may take."""


@dataclass(frozen=True)
class Target:
    """A format: how to read a file, how it begins life, and how bytes that are only its inside become a whole file."""

    read: Callable[[MemoryFile], Facts]
    seeds: Callable[[], list[bytes]]
    wrap: Callable[[bytes], bytes]


def check(target: Target, data: bytes) -> bool:
    """Whether the reader has facts for this file. Raises BrokenPromiseError, ForbiddenError, or whatever it raised."""
    file = MemoryFile(data)
    peak, start = _peak_bytes(), time.process_time()
    try:
        with nothing_executed():
            tensors, room = target.read(file)
    except WeightError as error:
        tensors, room = None, 0
        if not isinstance(error.reason, WeightReason) or not 0 < len(error.message) <= MAX_MESSAGE:
            raise BrokenPromiseError(f"the error {error!r:.500} says nothing, or too much") from error
        error.sentence().encode("utf-8")
    seconds, grown = time.process_time() - start, _peak_bytes() - peak
    if seconds > SECONDS:
        raise BrokenPromiseError(f"{len(data)} bytes took {seconds:.1f} s")
    if grown > MEMORY_BYTES:
        raise BrokenPromiseError(f"{len(data)} bytes took {grown >> 20} MiB")
    if tensors is None:
        return False
    names = [tensor.name for tensor in tensors]
    if len(set(names)) != len(names):
        raise BrokenPromiseError("two tensors have one name")
    if any(min((tensor.elements, tensor.bytes, *tensor.shape)) < 0 for tensor in tensors):
        raise BrokenPromiseError("a size is negative")
    if sum(tensor.bytes for tensor in tensors) > room:
        raise BrokenPromiseError("the tensors take more bytes than the file has")
    "".join(names).encode("utf-8", "surrogatepass")
    return True


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT


def _safetensors(file: MemoryFile) -> Facts:
    header = read_safetensors_header(file)  # type: ignore[arg-type]
    tensors = header.tensors()
    room = file.size - 8 - header.header_bytes
    if sum(tensor.bytes for tensor in tensors) != room:
        raise BrokenPromiseError("the tensors do not cover the file")
    # The reader of large headers must say the same of a small one.
    try:
        large = parse_large(file, header.header_bytes, ParseBudget())  # type: ignore[arg-type]
    except WeightError as error:
        if error.reason is not WeightReason.HEADER_TOO_LARGE:
            raise BrokenPromiseError("the two readers disagree") from error
    else:
        if large.tensors() != tensors or large.precisions() != header.precisions():
            raise BrokenPromiseError("the two readers disagree")
    return tensors, room


def _gguf(file: MemoryFile) -> Facts:
    header = gguf_header.parse(Window(file, ParseBudget()))  # type: ignore[arg-type]
    return header.tensors, max(0, file.size - header.header_bytes)


def _checkpoint(file: MemoryFile) -> Facts:
    facts = read_checkpoint(file, "x", "", ParseBudget())  # type: ignore[arg-type]
    return facts.tensors, file.size


def _safetensors_around(inside: bytes) -> bytes:
    """A file with this header, and data of the size that its last offset says."""
    tail = inside.rpartition(b",")[2].partition(b"]")[0].strip()
    size = int(tail) if tail.isdigit() and len(tail) < 5 else 0
    return corpus.safetensors_file(inside, bytes(size)) if inside else b""


def _gguf_around(inside: bytes) -> bytes:
    """A file with this behind its magic and version, and some room for tensors."""
    return b"GGUF\x03\0\0\0" + inside + bytes(64)


def _checkpoint_around(inside: bytes) -> bytes:
    """An archive with this pickle and a few storages."""
    storages = {"data/0": bytes(48), "data/1": bytes(10)}
    return corpus.archive({"data.pkl": inside, **storages, "constants.pkl": b"\x80\x02)."})


TARGETS = {
    "safetensors": Target(_safetensors, corpus.safetensors_seeds, _safetensors_around),
    "gguf": Target(_gguf, corpus.gguf_seeds, _gguf_around),
    "checkpoint": Target(_checkpoint, corpus.checkpoint_seeds, _checkpoint_around),
}
