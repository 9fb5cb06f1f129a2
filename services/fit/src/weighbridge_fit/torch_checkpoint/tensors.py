"""The few calls in a checkpoint's pickle that make tensors, worked out on plain values.

They are torch's own (`torch._utils`, torch 2.13). What they return here is a description; every size in it is held
against the archive.
"""

from math import prod
from typing import Any

from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import MAX_ELEMENTS
from weighbridge_fit.torch_checkpoint.archive import STORED, Archive
from weighbridge_fit.torch_checkpoint.dtypes import DTYPES, STORAGE_MODULES, STORAGES, ElementType
from weighbridge_fit.torch_checkpoint.values import Global, Opaque, Pairs, Storage, Tensor

# torch allows 64 dimensions, as numpy does.
MAX_DIMENSIONS = 64
MAX_ARGUMENTS = 16

_MAPPINGS = frozenset({"collections.OrderedDict", "collections.Counter", "builtins.dict", "__builtin__.dict"})
_PARAMETERS = frozenset(
    {
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch.nn.parameter.Parameter",
        "torch.nn.parameter.Buffer",
    }
)
_SPARSE_PARTS = {
    "torch.sparse_coo": ("indices", "values"),
    "torch.sparse_csr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_csc": ("ccol_indices", "row_indices", "values"),
    "torch.sparse_bsr": ("crow_indices", "col_indices", "values"),
    "torch.sparse_bsc": ("ccol_indices", "row_indices", "values"),
}


class TensorRules:
    """Turns calls and persistent ids of one pickle into storages and tensors. `folder` holds the storages' records."""

    def __init__(self, archive: Archive, folder: bytes) -> None:
        self._archive = archive
        self._folder = folder
        self.storages: dict[str, Storage] = {}

    def persistent(self, identity: Any) -> Storage:
        """The storage of a persistent id ("storage", type, key, location, elements)."""
        if type(identity) is not tuple or len(identity) != 5 or identity[0] != "storage":
            raise _malformed("the pickle refers outside itself to what is no storage")
        _, kind, key, _, elements = identity
        if type(kind) is not Global or kind.module not in STORAGE_MODULES or kind.name not in STORAGES:
            name = shown(kind.path) if type(kind) is Global else "no type"
            raise WeightError(WeightReason.UNSUPPORTED_TENSOR, f"a storage is of the type {name}, which is not known")
        if type(key) is not str or type(elements) is not int or not 0 <= elements <= MAX_ELEMENTS:
            raise _malformed("a storage has no key or no size")
        record = self._archive.records.get(self._folder + key.encode("utf-8", "surrogatepass"))
        if record is None:
            raise WeightError(WeightReason.ARCHIVE_INVALID, f"the archive has no record for the storage {shown(key)}")
        if record.method != STORED:
            message = f"the record of the storage {shown(key)} is packed; torch stores them as they are"
            raise WeightError(WeightReason.ARCHIVE_INVALID, message, offset=record.offset)
        element = STORAGES[kind.name]
        if elements * element.width > record.size:
            message = f"the storage {shown(key)} claims {elements * element.width} bytes, its record has {record.size}"
            raise WeightError(WeightReason.SIZE_MISMATCH, message, offset=record.offset)
        storage = Storage(key, element, elements, record.size)
        self.storages[key] = storage
        return storage

    def rebuild(self, function: Global, arguments: tuple[Any, ...]) -> Any:
        """What `function(*arguments)` would give: a known value, or an opaque one."""
        path = function.path
        if path in _MAPPINGS and not arguments:
            return Pairs()
        if path == "torch.Size":
            return arguments[0] if arguments and type(arguments[0]) is tuple else ()
        if path == "torch.serialization._get_layout":
            return arguments[0] if arguments else ""
        if path in _PARAMETERS and arguments and isinstance(arguments[0], Tensor | Opaque):
            return arguments[0]
        if len(arguments) <= MAX_ARGUMENTS and (made := self._tensor(path, arguments)) is not None:
            return made
        # Only the first few: one long tuple of arguments can be handed to any number of calls.
        if any(type(argument) is Storage for argument in arguments[:MAX_ARGUMENTS]):
            message = f"a tensor is made by {shown(path)}, which is not known here"
            raise WeightError(WeightReason.UNSUPPORTED_TENSOR, message)
        return Opaque(path, arguments)

    def _tensor(self, path: str, arguments: tuple[Any, ...]) -> Tensor | Pairs | None:
        match path, arguments:
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", (storage, at, shape, strides, *_):
                return _view(storage, None, at, shape, strides)
            case "torch._utils._rebuild_qtensor", (storage, at, shape, strides, *_):
                return _view(storage, None, at, shape, strides)
            case "torch._utils._rebuild_tensor_v3", (storage, at, shape, strides, _, _, dtype, *_):
                return _view(storage, _dtype(dtype), at, shape, strides)
            case "torch._utils._rebuild_meta_tensor_no_storage", (dtype, shape, *_):
                sizes = _sizes(shape)
                return Tensor(_dtype(dtype).name, sizes, _elements(sizes), None, 0, 0)
            case "torch._utils._rebuild_sparse_tensor", (str() as layout, tuple() as parts) if layout in _SPARSE_PARTS:
                tensors = Pairs()
                tensors.items.extend(zip(_SPARSE_PARTS[layout], parts, strict=False))
                return tensors
            case "torch._tensor._rebuild_from_type_v2", (Global() as inner, _, tuple() as inner_arguments, *_):
                # A subclass of Tensor: what it wraps is made by one of the others.
                made = self.rebuild(inner, inner_arguments) if inner.module == "torch._utils" else None
                return made if isinstance(made, Tensor | Pairs) else None
        return None


def _view(storage: Any, dtype: ElementType | None, at: Any, shape: Any, strides: Any) -> Tensor:
    """A view of a storage, inside it."""
    sizes = _sizes(shape)
    steps = _sizes(strides)
    if type(storage) is not Storage:
        raise WeightError(WeightReason.UNSUPPORTED_TENSOR, "a tensor has no storage")
    if len(steps) != len(sizes) or type(at) is not int or at < 0:
        raise WeightError(WeightReason.BAD_SHAPE, "a tensor's strides or offset do not belong to its shape")
    element = dtype or storage.type
    elements = _elements(sizes)
    if not elements:
        # torch looks at the offset of a tensor with elements alone: one without may claim to lie anywhere.
        return Tensor(element.name, sizes, 0, storage, 0, 0)
    begin = at * element.width
    reach = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    end = begin + -(-reach // element.packs) * element.width
    held = storage.elements * storage.type.width
    if end > held:
        message = f"a tensor reaches to byte {end} of the storage {shown(storage.key)}, which has {held}"
        raise WeightError(WeightReason.BAD_OFFSETS, message)
    return Tensor(element.name, sizes, elements, storage, begin, end)


def _sizes(shape: Any) -> tuple[int, ...]:
    if type(shape) is not tuple or len(shape) > MAX_DIMENSIONS:
        raise WeightError(WeightReason.BAD_SHAPE, "the shape of a tensor is not a tuple of sizes")
    if not all(type(size) is int and 0 <= size <= MAX_ELEMENTS for size in shape):
        raise WeightError(WeightReason.BAD_SHAPE, "the shape of a tensor is not a tuple of sizes")
    return shape


def _elements(shape: tuple[int, ...]) -> int:
    elements = prod(shape)
    if elements > MAX_ELEMENTS:
        raise WeightError(WeightReason.BAD_SHAPE, "a tensor's shape multiplies to more elements than any file can hold")
    return elements


def _dtype(value: Any) -> ElementType:
    if type(value) is Global and value.module == "torch" and value.name in DTYPES:
        return DTYPES[value.name]
    name = shown(value.path) if type(value) is Global else "no dtype"
    raise WeightError(WeightReason.UNSUPPORTED_TENSOR, f"a tensor is of the type {name}, which is not known here")


def _malformed(message: str) -> WeightError:
    return WeightError(WeightReason.PICKLE_INVALID, message)
