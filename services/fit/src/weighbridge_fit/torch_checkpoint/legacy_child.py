"""The process that reads one legacy checkpoint with torch: the file on standard input, an answer in JSON on standard
output. Started by `legacy`, and by nobody else."""

import importlib
import io
import json
import resource
import sys
from typing import Any

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.torch_checkpoint.contents import named_tensors, tensor_facts
from weighbridge_fit.torch_checkpoint.dtypes import DTYPES
from weighbridge_fit.torch_checkpoint.values import Pairs, Storage, Tensor

# Address space besides the weights, which torch reserves and never touches: torch's libraries map about 1 GiB
# (2.13, CPU), its allocator and the pickles' objects have the rest.
SPARE_ADDRESS_BYTES = 4 << 30
CPU_SECONDS = 30


def main() -> None:
    """Reads the file, says what it holds."""
    file_bytes = int(sys.argv[1])
    _limit(resource.RLIMIT_AS, file_bytes + SPARE_ADDRESS_BYTES)
    _limit(resource.RLIMIT_CPU, CPU_SECONDS)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    answer: dict[str, Any]
    try:
        answer = {"tensors": _tensors(file_bytes)}
    except WeightError as error:
        answer = {"reason": error.reason.value, "message": error.message}
    except MemoryError:
        answer = {"reason": WeightReason.PARSE_BUDGET.value, "message": "the checkpoint's pickles take too much memory"}
    sys.stdout.write(json.dumps(answer))


def _limit(kind: int, value: int) -> None:
    try:
        hard = resource.getrlimit(kind)[1]
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (allowed, allowed))
    except (ValueError, OSError):
        pass  # macOS knows the limit on address space and refuses to set it; the others hold.


class _Unhurried(io.RawIOBase):
    """The file without its descriptor: torch then tries no other legacy format (tar) on it."""

    def __init__(self) -> None:
        self._file = io.FileIO(0, "rb", closefd=False)
        self._file.seek(0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0


class _Buffered(io.BufferedReader):
    def fileno(self) -> int:
        raise io.UnsupportedOperation("fileno")


def _tensors(file_bytes: int) -> list[list[Any]]:
    # By name, so that the type checker reads the same Any whether torch is installed or not.
    torch: Any = importlib.import_module("torch")
    file = _Buffered(_Unhurried(), 1 << 16)
    try:
        with torch.serialization.skip_data():
            root = torch.load(file, map_location="cpu", weights_only=True)
        read = file.tell()
    except MemoryError:
        raise
    except Exception as error:
        # Whatever torch finds wrong: a class it will not make, a cut file, a number that is none.
        message = f"torch does not read this legacy checkpoint without running code from it ({type(error).__name__})"
        raise WeightError(WeightReason.LEGACY_CHECKPOINT, message + ": convert it to safetensors") from error
    tensors = named_tensors(_Values(torch).of(root, 0), ParseBudget())
    storages = {tensor.storage.key: tensor.storage for _, tensor in tensors if tensor.storage is not None}
    # Behind the pickles: 8 bytes and the data of each storage.
    if read + sum(8 + storage.record_bytes for storage in storages.values()) > file_bytes:
        raise WeightError(WeightReason.TRUNCATED, "the file ends inside its tensors' data")
    return [list(fact) for fact in tensor_facts(tensors)]


class _Values:
    """Turns what torch made into the values that the reader of archives makes, each object once."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []

    def of(self, value: Any, depth: int) -> Any:
        """The inert value of one object."""
        if isinstance(value, self._torch.Tensor):
            return self._tensor(value)
        if not isinstance(value, dict | list | tuple):
            return value if type(value) in (str, int) else None
        if depth > 64:
            raise WeightError(WeightReason.TOO_DEEP, "the checkpoint is nested more than 64 levels deep")
        if id(value) not in self._made:
            self._kept.append(value)
            if isinstance(value, dict):
                made: Any = Pairs()
                self._made[id(value)] = made
                made.items.extend((self.of(key, depth + 1), self.of(item, depth + 1)) for key, item in value.items())
            else:
                made = []
                self._made[id(value)] = made
                made.extend(self.of(item, depth + 1) for item in value)
        return self._made[id(value)]

    def _tensor(self, value: Any) -> Any:
        if value.layout != self._torch.strided:
            message = f"a tensor of a legacy checkpoint has the layout {value.layout}, which is not read there"
            raise WeightError(WeightReason.UNSUPPORTED_TENSOR, message)
        name = str(value.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise WeightError(WeightReason.UNSUPPORTED_TENSOR, f"a tensor is of the type {name}, which is not known")
        element = DTYPES[name]
        storage = value.untyped_storage()
        # What torch made is alive until the end, so addresses tell storages apart.
        key = str(storage._cdata)
        held = Storage(key, element, storage.nbytes() // element.width, storage.nbytes())
        elements = value.numel()
        begin = value.storage_offset() * element.width
        reach = 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
        end = begin + (-(-reach // element.packs) * element.width if elements else 0)
        return Tensor(element.name, tuple(value.shape), elements, held, begin, end)


if __name__ == "__main__":
    main()
