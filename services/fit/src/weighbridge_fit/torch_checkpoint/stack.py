"""What a pickle machine holds while it runs, and what that may cost."""

from typing import Any

from weighbridge_fit.budget import MIB
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.torch_checkpoint.stream import PickleStream

# What the values of one pickle may take, by the sizes below (bytes of CPython 3.11 objects, rounded up). Nothing is
# paid back when a value is dropped, so this bounds what is alive. A tensor of a state dict costs about 1.3 KiB, and
# 8 MiB of pickle describe 40,000 of them.
MAX_VALUE_BYTES = 64 * MIB
# A place on the stack, and in the list or tuple that it is copied to.
SLOT_BYTES = 16
MARK_BYTES = 40
TUPLE_BYTES = 56
LIST_BYTES = 88
DICT_BYTES = 130
OPAQUE_BYTES = 240
TENSOR_BYTES = 180
STORAGE_BYTES = 200
PAIR_BYTES = TUPLE_BYTES + 24
ODD_MEMO_BYTES = 104
NUMBER_BYTES = 32
TEXT_BYTES = 60
# Characters outside of Latin take four bytes each.
CHARACTER_BYTES = 4


class ValueStack:
    """The stack, the marks in it and the memo. Every refusal names the byte of the pickle that led to it."""

    def __init__(self, stream: PickleStream) -> None:
        self._stream = stream
        self._stack: list[Any] = []
        self._marks: list[int] = []
        # Picklers number what they remember from 0 on; whoever does not pays for a dict.
        self._memo: list[Any] = []
        self._odd_memo: dict[int, Any] = {}
        self._left = MAX_VALUE_BYTES

    def _refusal(self, message: str) -> WeightError:
        return WeightError(WeightReason.PICKLE_INVALID, message, offset=self._stream.offset)

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise self._too_large()

    def _too_large(self) -> WeightError:
        message = f"the checkpoint's pickle makes more than {MAX_VALUE_BYTES // MIB} MiB of objects"
        return WeightError(WeightReason.HEADER_TOO_LARGE, message, offset=self._stream.offset)

    def _push(self, value: Any, size: int) -> None:
        self._spend(size)
        self._stack.append(value)

    def _pop(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._refusal("the pickle takes a value that is not there")
        return self._stack.pop()

    def _top(self) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise self._refusal("the pickle takes a value that is not there")
        return self._stack[-1]

    def _pop_to_mark(self) -> list[Any]:
        if not self._marks:
            raise self._refusal("the pickle closes what it never opened")
        begin = self._marks.pop()
        values = self._stack[begin:]
        del self._stack[begin:]
        return values

    def _check_stack(self) -> None:
        """Counts what lies on the stack, which comes and goes: not spent, but looked at now and then."""
        if len(self._stack) * SLOT_BYTES + len(self._marks) * MARK_BYTES > self._left:
            raise self._too_large()

    def _remember(self, key: int) -> None:
        value = self._top()
        if key == len(self._memo):
            self._spend(SLOT_BYTES)
            self._memo.append(value)
        elif key < len(self._memo):
            self._memo[key] = value
        else:
            self._spend(ODD_MEMO_BYTES)
            self._odd_memo[key] = value

    def _recall(self, key: int) -> None:
        if key < len(self._memo):
            self._stack.append(self._memo[key])
        elif key in self._odd_memo:
            self._stack.append(self._odd_memo[key])
        else:
            raise self._refusal("the pickle refers to a value that it has not made")
