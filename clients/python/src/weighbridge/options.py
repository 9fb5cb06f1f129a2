"""Engine options as people write them: ``name=value``, named as in the options messages."""

import difflib
import math
from collections.abc import Iterable

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from weighbridge_proto.fit.v1 import plan_pb2

ENGINES = ("mlx", "sd", "ds4", "generic")
"""The engines whose options there are, as the oneof of EngineOptions names them."""

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_INTEGER_BITS = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}


def parse_options(settings: Iterable[str], engine: str | None = None) -> plan_pb2.EngineOptions | None:
    """Options from ``name=value`` texts; None if there are none.

    Without ``engine`` the names decide whose options they are: no name belongs to two engines. A list takes one
    ``name=value`` for each of its members.

    Raises:
        ValueError: no ``=``, an unknown name (the message has the one meant, or lists them all), a value of the wrong
            type, or names of several engines.
    """
    options = plan_pb2.EngineOptions()
    chosen = engine
    given = False
    for setting in settings:
        name, equals, value = setting.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ValueError(f"{setting!r} sets nothing. Write name=value, such as kv_bits=4.")
        owner = _owner(name, engine)
        if chosen is not None and owner != chosen:
            raise ValueError(f"{name} belongs to {owner}, and another option to {chosen}. Set options of one engine.")
        chosen, given = owner, True
        _set(getattr(options, owner), name, value.strip())
    return options if given else None


def option_names(engine: str) -> list[str]:
    """The names that can be set for ``engine``."""
    return [field.name for field in _fields(engine)]


def _fields(engine: str) -> list[FieldDescriptor]:
    options = plan_pb2.EngineOptions.DESCRIPTOR.fields_by_name[engine].message_type
    assert options is not None, "every member of the oneof is a message"
    return list(options.fields)


def _owner(name: str, engine: str | None) -> str:
    candidates = ENGINES if engine is None else (engine,)
    for candidate in candidates:
        if name in option_names(candidate):
            return candidate
    known = [option for candidate in candidates for option in option_names(candidate)]
    if close := difflib.get_close_matches(name, known, n=1):
        raise ValueError(f"There is no option {name!r}. Did you mean {close[0]}?")
    valid = "; ".join(f"{candidate}: {', '.join(option_names(candidate))}" for candidate in candidates)
    raise ValueError(f"There is no option {name!r}. The options are {valid}.")


def _set(message: Message, name: str, text: str) -> None:
    field: FieldDescriptor = message.DESCRIPTOR.fields_by_name[name]  # type: ignore[assignment] # or upb's, alike
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, equals, entry = text.partition("=")
        if not equals or not key.strip() or not entry.strip():
            raise ValueError(
                f"{name} takes a name and a value. Write {name}=NAME=VALUE, such as parts=vae=ae.safetensors."
            )
        getattr(message, name)[key.strip()] = entry.strip()
        return
    value = _value(field, text)
    if field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)


def _value(field: FieldDescriptor, text: str) -> bool | int | float | str:
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if text.lower() in _TRUE:
            return True
        if text.lower() in _FALSE:
            return False
        raise ValueError(f"{field.name} is on or off, not {text!r}.")
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        try:
            amount = float(text)
        except ValueError:
            amount = math.nan
        if not math.isfinite(amount):
            raise ValueError(f"{field.name} is a number, not {text!r}.")
        return amount
    if field.cpp_type in _INTEGER_BITS:
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{field.name} is a whole number, not {text!r}.") from None
        bits = _INTEGER_BITS[field.cpp_type]
        if not -(1 << bits) <= number < 1 << bits:
            raise ValueError(f"{field.name} cannot be {text}: it is too large.")
        return number
    if not text:
        raise ValueError(f"{field.name} needs a value.")
    return text
