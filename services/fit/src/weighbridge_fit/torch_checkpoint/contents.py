"""Which tensors a checkpoint's objects hold, by which names, and how many bytes each accounts for.

**Names.** Keys on the way to a tensor, joined by dots. What a training framework wraps weights in (`state_dict`, else
`model`, in the outermost dict) is left out of the names, so that they are those of the same model in safetensors.
Everything beside it (optimizer, EMA) keeps its whole name. A container that is reached twice is listed where it is
reached first.

**Bytes.** A storage's bytes are in the file once, however many tensors share it, so they are shared out: each byte of a
storage counts for the first tensor that covers it, and bytes that none covers for the tensor before them. A tied tensor
thus has 0 bytes, a slice of a larger storage has all of it, and the tensors' bytes add up to the storages' exactly. A
storage that no named tensor uses (scales inside a quantised tensor) is listed under its record's name.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import TensorFact
from weighbridge_fit.torch_checkpoint.values import Opaque, Pairs, Storage, Tensor

WRAPPERS = ("state_dict", "model")
# Where a pickled module keeps its tensors and its parts; no state dict has these in its names.
_MODULE_PARTS = frozenset({"_parameters", "_buffers", "_modules"})
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 17
MAX_TENSORS = 1 << 17
MAX_NAME = 4096
# All names together, as text.
MAX_NAMES_BYTES = 16 << 20
_VALUES_PER_TICK = 1 << 12

# Values that are tensors or can hold some.
_HOLDERS = (Tensor, Storage, list, tuple, Pairs, Opaque)

Named = tuple[str, Tensor]


def named_tensors(root: Any, budget: ParseBudget) -> list[Named]:
    """All tensors below `root` in file order. Raises DUPLICATE_KEY, TOO_DEEP, HEADER_TOO_LARGE or PARSE_BUDGET."""
    wrapped = _wrapped(root)
    found = list(_walk(root, wrapped, budget))
    if wrapped is not None and _twice(found) is not None:
        # Something beside the weights has a name of theirs: then each keeps its whole one.
        found = list(_walk(root, None, budget))
    twice = _twice(found)
    if twice is not None:
        raise WeightError(WeightReason.DUPLICATE_KEY, f"the checkpoint names the tensor {shown(twice)} twice")
    return found


def tensor_facts(tensors: list[Named]) -> tuple[TensorFact, ...]:
    """The tensors with their share of the storages' bytes."""
    sizes = [0] * len(tensors)
    by_storage: dict[str, tuple[Storage, list[int]]] = {}
    for index, (_, tensor) in enumerate(tensors):
        if tensor.storage is not None:
            by_storage.setdefault(tensor.storage.key, (tensor.storage, []))[1].append(index)
    for storage, indices in by_storage.values():
        if len(indices) == 1:
            sizes[indices[0]] = storage.record_bytes
        else:
            _share_out(storage, indices, tensors, sizes)
    return tuple(
        TensorFact(name, tensor.dtype, tensor.shape, tensor.elements, size)
        for (name, tensor), size in zip(tensors, sizes, strict=True)
    )


def _share_out(storage: Storage, indices: list[int], tensors: list[Named], sizes: list[int]) -> None:
    """Adds to `sizes` what each of the tensors that share a storage accounts for."""
    in_place = sorted(indices, key=lambda index: (tensors[index][1].begin, index))
    owner = in_place[0]
    covered = 0
    for index in in_place:
        tensor = tensors[index][1]
        if tensor.end > covered:
            sizes[owner] += max(0, tensor.begin - covered)  # a gap belongs to the tensor before it
            sizes[index] += tensor.end - max(covered, tensor.begin)
            covered, owner = tensor.end, index
    sizes[owner] += storage.record_bytes - covered


def _wrapped(root: Any) -> Any:
    """The dict of the weights inside the outermost dict; None when that is the weights."""
    if type(root) is Pairs:
        for wrapper in WRAPPERS:
            for key, value in root.items:
                if key == wrapper and type(key) is str and type(value) in (Pairs, Opaque):
                    return value
    return None


def _walk(root: Any, wrapped: Any, budget: ParseBudget) -> Iterator[Named]:
    """Depth first, in file order, each container once: values may contain one another in any way."""
    seen: set[int] = set()
    # The children yet to come of each container on the way, and the keys of that way.
    open_containers: list[Iterator[tuple[str, Any]]] = [iter([("", root)] if isinstance(root, _HOLDERS) else [])]
    keys: list[str] = [""]
    start = 0
    count = steps = names_bytes = 0
    while open_containers:
        found = next(open_containers[-1], None)
        if found is None:
            open_containers.pop()
            keys.pop()
            start = min(start, len(keys))
            continue
        key, value = found
        steps += 1
        if steps % _VALUES_PER_TICK == 0:
            budget.check()
        if isinstance(value, Tensor | Storage):
            name = _joined([*keys[start:], key])
            count += 1
            names_bytes += len(name)
            if count > MAX_TENSORS or names_bytes > MAX_NAMES_BYTES:
                raise WeightError(WeightReason.HEADER_TOO_LARGE, "the checkpoint holds more tensors than are read")
            yield name or "tensor", value if isinstance(value, Tensor) else bare(value)
        elif id(value) not in seen:
            seen.add(id(value))
            if len(open_containers) > MAX_DEPTH:
                raise WeightError(WeightReason.TOO_DEEP, f"the checkpoint is nested more than {MAX_DEPTH} levels deep")
            if len(seen) > MAX_CONTAINERS:
                message = f"the checkpoint holds more than {MAX_CONTAINERS} dicts, lists and objects"
                raise WeightError(WeightReason.HEADER_TOO_LARGE, message)
            open_containers.append(iter(_children(value)))
            keys.append(key)
            if value is wrapped:
                start = len(keys)


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    """What a container holds, by its key there, without values that can hold no tensor."""
    if type(value) is Pairs:
        return ((_key(key, index), item) for index, (key, item) in enumerate(value.items) if isinstance(item, _HOLDERS))
    if type(value) is Opaque:
        return _parts(value)
    return ((str(index), item) for index, item in enumerate(value) if isinstance(item, _HOLDERS))


def _parts(value: Opaque) -> Iterator[tuple[str, Any]]:
    """What an unknown object was made from: its dict's entries under their own names, the rest under its index."""
    states = value.state if isinstance(value.state, tuple) else (value.state,)
    for state in states:
        if type(state) is Pairs:
            for index, (key, item) in enumerate(state.items):
                if isinstance(item, _HOLDERS):
                    yield ("" if type(key) is str and key in _MODULE_PARTS else _key(key, index)), item
        elif isinstance(state, _HOLDERS):
            yield "state", state
    for index, (key, item) in enumerate(value.pairs):
        if isinstance(item, _HOLDERS):
            yield _key(key, index), item
    yield "items", value.members
    if isinstance(value.arguments, _HOLDERS):
        yield "arguments", value.arguments


def _key(key: Any, index: int) -> str:
    """A key as a part of a name."""
    if type(key) is str:
        return key
    if type(key) is int:
        return str(key)
    return f"[{index}]"


def _joined(keys: list[str]) -> str:
    joined = ".".join(filter(None, keys))
    if len(joined) > MAX_NAME:
        raise WeightError(WeightReason.HEADER_TOO_LARGE, f"a tensor's name is longer than {MAX_NAME} characters")
    return joined


def bare(storage: Storage) -> Tensor:
    """A storage that stands for itself, as a tensor of one dimension."""
    size = storage.elements * storage.type.width
    return Tensor(storage.type.name, (storage.elements,), storage.elements, storage, 0, size)


def _twice(tensors: list[Named]) -> str | None:
    seen: set[str] = set()
    for name, _ in tensors:
        if name in seen:
            return name
        seen.add(name)
    return None
