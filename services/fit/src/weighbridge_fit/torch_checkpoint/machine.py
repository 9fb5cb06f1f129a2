"""Interprets a pickle without Python's pickle: a stack of inert values, and no opcode that could do anything.

The opcodes are those that torch writes (protocol 2) and their younger spellings up to protocol 5. A name becomes a
`Global`, a value that is compared and never imported; a call becomes what `rebuild` makes of it, or an `Opaque` value.
The extension registry, out-of-band buffers and persistent names in text depend on the process that reads; they are
refused.
"""

import struct
from collections.abc import Callable
from typing import Any

from weighbridge_fit.budget import ParseBudget
from weighbridge_fit.torch_checkpoint.stack import (
    CHARACTER_BYTES,
    DICT_BYTES,
    LIST_BYTES,
    NUMBER_BYTES,
    OPAQUE_BYTES,
    PAIR_BYTES,
    SLOT_BYTES,
    STORAGE_BYTES,
    TENSOR_BYTES,
    TEXT_BYTES,
    TUPLE_BYTES,
    ValueStack,
)
from weighbridge_fit.torch_checkpoint.stream import PickleStream
from weighbridge_fit.torch_checkpoint.values import SKIPPED, Global, Opaque, Pairs, Tensor

# Keys and class names are short; texts of this length and more (prompts, vocabularies) say nothing about weights.
MAX_KEPT_TEXT = 4096
MAX_NAME_LINE = 512
OPCODES_PER_TICK = 1 << 13

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_I32 = struct.Struct("<i")
_U64 = struct.Struct("<Q")
_F64 = struct.Struct(">d")

Rebuild = Callable[[Global, Any], Any]
"""What a call of a name with arguments makes."""
Persistent = Callable[[Any], Any]
"""What a persistent id stands for."""


class Machine(ValueStack):
    """Runs one pickle. `rebuild` and `persistent` make the values that are known; they raise `WeightError`."""

    def __init__(self, stream: PickleStream, budget: ParseBudget, rebuild: Rebuild, persistent: Persistent) -> None:
        super().__init__(stream)
        self._budget = budget
        self._rebuild = rebuild
        self._persistent = persistent
        self.opaque_paths: dict[str, None] = {}

    def run(self) -> Any:
        """The value that the pickle leaves. Raises PICKLE_INVALID, TRUNCATED, HEADER_TOO_LARGE or PARSE_BUDGET."""
        stream, handlers = self._stream, _HANDLERS
        while True:
            for _ in range(OPCODES_PER_TICK):
                at = stream.at
                if at < len(stream.data):
                    opcode = stream.data[at]
                    stream.at = at + 1
                else:
                    opcode = stream.byte()
                if opcode == _STOP:
                    value = self._pop()
                    if self._stack:
                        raise self._refusal("the pickle leaves more than one value")
                    return value
                handler = handlers[opcode]
                if handler is None:
                    raise self._refusal(f"the pickle uses the opcode 0x{opcode:02x}, which no checkpoint needs")
                handler(self)
            self._budget.check(stream.offset)
            self._check_stack()

    # Plain values

    def _mark(self) -> None:
        self._marks.append(len(self._stack))

    def _protocol(self) -> None:
        if self._stream.byte() > 5:
            raise self._refusal("the pickle is of a protocol that does not exist")

    def _frame(self) -> None:
        self._stream.take(8)

    def _none(self) -> None:
        self._stack.append(None)

    def _true(self) -> None:
        self._stack.append(True)

    def _false(self) -> None:
        self._stack.append(False)

    def _int8(self) -> None:
        self._stack.append(self._stream.byte())

    def _int16(self) -> None:
        self._push(_U16.unpack(self._stream.take(2))[0], NUMBER_BYTES)

    def _int32(self) -> None:
        self._push(_I32.unpack(self._stream.take(4))[0], NUMBER_BYTES)

    def _long1(self) -> None:
        self._long(self._stream.byte())

    def _long4(self) -> None:
        length = _I32.unpack(self._stream.take(4))[0]
        if length < 0:
            raise self._refusal("the pickle holds a number of negative length")
        self._long(length)

    def _long(self, length: int) -> None:
        if length > 255:
            self._stream.skip(length)
            self._stack.append(SKIPPED)
        else:
            self._push(int.from_bytes(self._stream.take(length), "little", signed=True), NUMBER_BYTES + length)

    def _float(self) -> None:
        self._push(_F64.unpack(self._stream.take(8))[0], NUMBER_BYTES)

    def _text(self, length: int) -> None:
        if length > MAX_KEPT_TEXT:
            self._stream.skip(length)
            self._stack.append(SKIPPED)
            return
        raw = self._stream.take(length)
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError:
            # Text written by Python 2 is bytes; half surrogate pairs are what Python 3 lets through.
            text = raw.decode("latin-1")
        self._push(text, TEXT_BYTES + (length if text.isascii() else CHARACTER_BYTES * length))

    def _text8(self) -> None:
        self._text(self._stream.byte())

    def _text32(self) -> None:
        self._text(_U32.unpack(self._stream.take(4))[0])

    def _text64(self) -> None:
        self._text(_U64.unpack(self._stream.take(8))[0])

    def _signed_text32(self) -> None:
        length = _I32.unpack(self._stream.take(4))[0]
        if length < 0:
            raise self._refusal("the pickle holds a text of negative length")
        self._text(length)

    # Containers

    def _empty_tuple(self) -> None:
        self._stack.append(())

    def _tuple(self) -> None:
        values = self._pop_to_mark()
        self._push(tuple(values), TUPLE_BYTES + SLOT_BYTES * len(values))

    def _tuple1(self) -> None:
        self._push((self._pop(),), TUPLE_BYTES + SLOT_BYTES)

    def _tuple2(self) -> None:
        last, first = self._pop(), self._pop()
        self._push((first, last), TUPLE_BYTES + 2 * SLOT_BYTES)

    def _tuple3(self) -> None:
        last, middle, first = self._pop(), self._pop(), self._pop()
        self._push((first, middle, last), TUPLE_BYTES + 3 * SLOT_BYTES)

    def _empty_list(self) -> None:
        self._push([], LIST_BYTES)

    def _list(self) -> None:
        values = self._pop_to_mark()
        self._push(values, LIST_BYTES + SLOT_BYTES * len(values))

    def _append(self) -> None:
        value = self._pop()
        self._extend([value])

    def _appends(self) -> None:
        self._extend(self._pop_to_mark())

    def _extend(self, values: list[Any]) -> None:
        target = self._top()
        self._spend(SLOT_BYTES * len(values))
        if type(target) is list:
            target.extend(values)
        elif type(target) is Opaque:
            target.members.extend(values)
        else:
            raise self._refusal("the pickle appends to what is no list")

    def _empty_dict(self) -> None:
        self._push(Pairs(), DICT_BYTES)

    def _dict(self) -> None:
        values = self._pop_to_mark()
        self._push(Pairs(), DICT_BYTES)
        self._set(values)

    def _setitem(self) -> None:
        value, key = self._pop(), self._pop()
        self._set([key, value])

    def _setitems(self) -> None:
        self._set(self._pop_to_mark())

    def _set(self, values: list[Any]) -> None:
        target = self._top()
        if len(values) % 2:
            raise self._refusal("the pickle sets a key without a value")
        self._spend(PAIR_BYTES * (len(values) // 2))
        pairs = zip(values[::2], values[1::2], strict=True)
        if type(target) is Pairs:
            target.items.extend(pairs)
        elif type(target) is Opaque:
            target.pairs.extend(pairs)
        else:
            raise self._refusal("the pickle sets an item of what is no dict")

    def _empty_set(self) -> None:
        self._push(Opaque("builtins.set"), OPAQUE_BYTES)

    def _frozenset(self) -> None:
        values = self._pop_to_mark()
        self._push(Opaque("builtins.frozenset", members=values), OPAQUE_BYTES + SLOT_BYTES * len(values))

    # Stack and memo

    def _drop(self) -> None:
        # As in Python's own: a mark that is on top goes first.
        if self._marks and self._marks[-1] == len(self._stack):
            self._marks.pop()
        else:
            self._pop()

    def _drop_to_mark(self) -> None:
        self._pop_to_mark()

    def _duplicate(self) -> None:
        self._stack.append(self._top())

    def _put8(self) -> None:
        self._remember(self._stream.byte())

    def _put32(self) -> None:
        self._remember(_U32.unpack(self._stream.take(4))[0])

    def _memoize(self) -> None:
        self._remember(len(self._memo) + len(self._odd_memo))

    def _get8(self) -> None:
        self._recall(self._stream.byte())

    def _get32(self) -> None:
        self._recall(_U32.unpack(self._stream.take(4))[0])

    # Names and what would be calls

    def _global(self) -> None:
        module, name = self._stream.line(MAX_NAME_LINE), self._stream.line(MAX_NAME_LINE)
        try:
            value = Global(module.decode("utf-8"), name.decode("utf-8"))
        except UnicodeDecodeError:
            raise self._refusal("a name in the pickle is not UTF-8") from None
        self._push(value, TUPLE_BYTES + 2 * (TEXT_BYTES + SLOT_BYTES) + CHARACTER_BYTES * (len(module) + len(name)))

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str or max(len(name), len(module)) > MAX_NAME_LINE:
            raise self._refusal("the pickle names something by what is no name")
        self._push(Global(module, name), TUPLE_BYTES + 2 * SLOT_BYTES)

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        self._call(function, arguments)

    def _newobj_ex(self) -> None:
        keywords, arguments, cls = self._pop(), self._pop(), self._pop()
        self._call(cls, arguments)
        top = self._top()
        if type(top) is Opaque:
            top.state = keywords

    def _call(self, function: Any, arguments: Any) -> None:
        if type(arguments) is not tuple:
            raise self._refusal("the pickle calls something with what are no arguments")
        if type(function) is Global:
            value = self._rebuild(function, arguments)
            if type(value) is Opaque and len(self.opaque_paths) < MAX_NAME_LINE:
                self.opaque_paths[value.path] = None
        else:
            value = Opaque("", arguments)
        self._push(value, _COSTS.get(type(value), 0))

    def _build(self) -> None:
        state, target = self._pop(), self._top()
        # Attributes of dicts and tensors (a state dict's _metadata, hooks) are not weights.
        if type(target) is Opaque:
            target.state = (target.state, state) if target.state is not None else state

    def _persistent_id(self) -> None:
        self._push(self._persistent(self._pop()), STORAGE_BYTES)


# Of what a call makes; anything else was there before.
_COSTS = {Opaque: OPAQUE_BYTES, Pairs: DICT_BYTES, Tensor: TENSOR_BYTES}
_STOP = ord(".")
_OPCODES: dict[bytes, Callable[[Machine], None]] = {
    b"(": Machine._mark,
    b"0": Machine._drop,
    b"1": Machine._drop_to_mark,
    b"2": Machine._duplicate,
    b"N": Machine._none,
    b"\x88": Machine._true,
    b"\x89": Machine._false,
    b"K": Machine._int8,
    b"M": Machine._int16,
    b"J": Machine._int32,
    b"\x8a": Machine._long1,
    b"\x8b": Machine._long4,
    b"G": Machine._float,
    b"U": Machine._text8,  # bytes of Python 2
    b"T": Machine._signed_text32,
    b"\x8c": Machine._text8,
    b"X": Machine._text32,
    b"\x8d": Machine._text64,
    b"C": Machine._text8,  # bytes: they are nothing but keys here
    b"B": Machine._text32,
    b"\x8e": Machine._text64,
    b"\x96": Machine._text64,  # bytearray
    b")": Machine._empty_tuple,
    b"t": Machine._tuple,
    b"\x85": Machine._tuple1,
    b"\x86": Machine._tuple2,
    b"\x87": Machine._tuple3,
    b"]": Machine._empty_list,
    b"l": Machine._list,
    b"a": Machine._append,
    b"e": Machine._appends,
    b"}": Machine._empty_dict,
    b"d": Machine._dict,
    b"s": Machine._setitem,
    b"u": Machine._setitems,
    b"\x8f": Machine._empty_set,
    b"\x90": Machine._appends,  # into a set
    b"\x91": Machine._frozenset,
    b"q": Machine._put8,
    b"r": Machine._put32,
    b"\x94": Machine._memoize,
    b"h": Machine._get8,
    b"j": Machine._get32,
    b"c": Machine._global,
    b"\x93": Machine._stack_global,
    b"R": Machine._reduce,
    b"\x81": Machine._reduce,  # cls.__new__(cls, *args): the same to us
    b"\x92": Machine._newobj_ex,
    b"b": Machine._build,
    b"Q": Machine._persistent_id,
    b"\x80": Machine._protocol,
    b"\x95": Machine._frame,
}
_HANDLERS = [_OPCODES.get(bytes([value])) for value in range(256)]
