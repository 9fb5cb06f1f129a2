"""Whether the parts of a split GGUF model belong together: a split model is priced whole or not at all.

llama.cpp's `gguf-split` writes three keys into every part: `split.no` (from 0), `split.count`, and
`split.tensors.count`, the tensors of all parts together. All other metadata is in the first part.
"""

import re
from collections.abc import Sequence
from pathlib import PurePath

from weighbridge_fit.errors import WeightError, WeightReason, shown
from weighbridge_fit.facts import FileFacts

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"
_PART = re.compile(r"(?P<stem>.+)-[0-9]{5}-of-[0-9]{5}\.gguf", re.DOTALL)


def check_splits(files: Sequence[FileFacts]) -> None:
    """Checks the GGUF files of one model, those of a split against each other.

    Raises SPLIT_INCOMPLETE, naming a file: for parts that are missing, there twice, or of different models.
    """
    groups: dict[tuple[str, str], list[FileFacts]] = {}
    for file in files:
        found = _PART.fullmatch(file.name)
        # A part under a name that says nothing of parts stands alone, and is found to be incomplete.
        groups.setdefault((file.component, found["stem"] if found else file.name), []).append(file)
    for parts in groups.values():
        if len(parts) > 1 or _value(parts[0], COUNT) > 1:
            _check(parts)


def _check(parts: list[FileFacts]) -> None:
    count = _value(parts[0], COUNT)
    by_number: dict[int, FileFacts] = {}
    for part in parts:
        if _value(part, COUNT) != count:
            message = (
                f"this part is of a split into {_value(part, COUNT)} files, {_short(parts[0])} of one into {count}"
            )
            raise _incomplete(message, part)
        if _value(part, TENSORS) != _value(parts[0], TENSORS):
            message = f"the part belongs to another model than {_short(parts[0])}: their numbers of tensors differ"
            raise _incomplete(message, part)
        number = _value(part, NUMBER, -1)
        if not 0 <= number < count:
            raise _incomplete(f"the part says that it is number {number} of {count}", part)
        if number in by_number:
            message = f"{_short(by_number[number])} and this file are both part {number + 1} of {count}"
            raise _incomplete(message, part)
        by_number[number] = part
    missing = [number + 1 for number in range(count) if number not in by_number]
    if missing:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise _incomplete(f"of {count} parts of the split model, these are missing: {listed}", parts[0])
    owners: dict[str, FileFacts] = {}
    for part in parts:
        for tensor in part.tensors:
            if tensor.name in owners:
                message = f"the tensor {shown(tensor.name)} is in {_short(owners[tensor.name])} and in this file"
                raise _incomplete(message, part)
            owners[tensor.name] = part
    expected = _value(parts[0], TENSORS, len(owners))
    if len(owners) != expected:
        raise _incomplete(
            f"the parts hold {len(owners)} tensors together, they say that they hold {expected}", parts[0]
        )


def _value(part: FileFacts, key: str, default: int = 0) -> int:
    value = part.metadata.get(key, default)
    return value if type(value) is int else default


def _short(part: FileFacts) -> str:
    return shown(PurePath(part.name).name)


def _incomplete(message: str, part: FileFacts) -> WeightError:
    return WeightError(WeightReason.SPLIT_INCOMPLETE, message, file=part.name)
