"""JSON from files that nobody vouches for: size, number of values and depth are known before a single object is
made."""

import json
import re
from typing import Any, NoReturn

from weighbridge_fit.errors import WeightError, WeightReason

# A JSON value costs at most about 72 bytes as a Python object (an empty dict and its list slot, CPython 3.11), so
# half a million of them stay below 40 MiB.
MAX_VALUES = 500_000
MAX_DEPTH = 32

# A string that never ends matches to the end of the text: a pattern that failed there would be tried again from every
# escaped quote within it, which takes days for 8 MiB of them.
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
# All that tells nothing about nesting.
_NO_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}'))
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class JsonObject(list[tuple[str, Any]]):
    """An object as its pairs in file order, so that duplicate keys can be seen."""


def loads_pairs(
    data: bytes, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH, constants: bool = False
) -> Any:
    """Parses `data`; objects come back as `JsonObject`. Raises HEADER_INVALID, TOO_DEEP or PARSE_BUDGET.

    `constants`: NaN, Infinity and -Infinity, which are no JSON, are floats and no error.
    """
    # Each value is followed by a comma or closes something that was opened, so this bounds the number of values.
    if data.count(b",") + data.count(b"[") + data.count(b"{") > max_values:
        raise WeightError(WeightReason.PARSE_BUDGET, f"the JSON holds more than {max_values} values")
    _check_depth(data, max_depth)
    try:
        parse_constant = float if constants else _refuse_constant
        return json.loads(data.decode("utf-8"), object_pairs_hook=JsonObject, parse_constant=parse_constant)
    except UnicodeDecodeError as error:
        raise WeightError(WeightReason.HEADER_INVALID, "the JSON is not UTF-8", offset=error.start) from error
    except json.JSONDecodeError as error:
        raise WeightError(WeightReason.HEADER_INVALID, f"not JSON: {error.msg}", offset=error.pos) from error
    except (ValueError, RecursionError) as error:
        # ValueError: an integer of more digits than Python will convert.
        raise WeightError(WeightReason.HEADER_INVALID, "the JSON holds a number nobody can mean") from error


def loads_object(
    data: bytes, *, max_values: int = MAX_VALUES, max_depth: int = MAX_DEPTH, constants: bool = False
) -> dict[str, Any]:
    """Parses an object into plain dicts. Raises what `loads_pairs` raises, DUPLICATE_KEY, or HEADER_INVALID for a
    non-object and for text that is not Unicode."""
    pairs = loads_pairs(data, max_values=max_values, max_depth=max_depth, constants=constants)
    if not isinstance(pairs, JsonObject):
        raise WeightError(WeightReason.HEADER_INVALID, "the JSON is not an object", offset=0)
    value: dict[str, Any] = _plain(pairs)
    if _SURROGATE_ESCAPE.search(data):
        # JSON can spell half of a surrogate pair; no message, name or digest can carry it.
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise WeightError(WeightReason.HEADER_INVALID, "the JSON holds text that is not Unicode") from error
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, JsonObject):
        plain = {key: _plain(item) for key, item in value}
        if len(plain) != len(value):
            raise WeightError(WeightReason.DUPLICATE_KEY, "an object names the same key twice")
        return plain
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _check_depth(data: bytes, max_depth: int) -> None:
    """Raises TOO_DEEP at the bracket that is one too many."""
    if _surely_shallow(data, max_depth):
        return
    depth = 0
    for token in _STRING_OR_BRACKET.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > max_depth:
                message = f"the JSON is nested more than {max_depth} levels deep"
                raise WeightError(WeightReason.TOO_DEEP, message, offset=token.start())
        elif first in b"]}":
            depth -= 1
            if depth < 0:
                # No JSON: the parser reads no further than this, whatever follows.
                return


def _surely_shallow(data: bytes, max_depth: int) -> bool:
    """Whether nesting is known to be shallow without a look at each token, by passes that run in C; False decides
    nothing.

    Of the text only quotes and brackets are kept. A string without brackets becomes two quotes side by side, and goes.
    Up to a bracket within a string the quotes are odd in number, so that one of them is left over. Where none is, every
    bracket is structure, and each round takes away the two innermost levels at most.
    """
    if b"\\" in data:
        # Escaped backslashes first: what then stands before a quote escapes it.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = data.translate(None, _NO_STRUCTURE).replace(b'""', b"")
    if b'"' in brackets:
        return False
    for _ in range(max_depth // 2):
        inner = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(inner) == len(brackets):
            break
        brackets = inner
    return not brackets


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
