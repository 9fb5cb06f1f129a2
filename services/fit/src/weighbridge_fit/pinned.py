"""Facts written into a manifest, read back, and held against the files on disk.

A pinned manifest prices a model before a byte of it is on this machine, to the byte. Its form is the contract's: the
JSON form of a `weighbridge.fit.v1.WeightFacts` with all tensors, under a version of its own.
"""

import json
from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format
from weighbridge_proto.fit.v1 import weights_pb2

from weighbridge_fit.facts import WeightFacts
from weighbridge_fit.wire.facts import UnpriceableFactsError, facts_from, facts_message

VERSION = 1
_VERSION_KEY = "version"
_FACTS_KEY = "facts"
# Tensors named when two facts differ: the rest is a number.
MAX_NAMED = 5


class PinnedFactsError(Exception):
    """Pinned facts that cannot be used; `field` says where, the message why."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field
        self.message = message


def pin(facts: WeightFacts) -> dict[str, Any]:
    """The part of a manifest that holds facts: plain JSON values, the same for the same facts.

    Raises PinnedFactsError for facts without tensors: nobody could check them.
    """
    if not facts.tensors:
        raise PinnedFactsError("tensors", "are missing: facts are pinned from files whose headers were read")
    message = facts_message(facts, include_tensors=True)
    document = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return {_VERSION_KEY: VERSION, _FACTS_KEY: document}


def unpin(part: Mapping[str, Any]) -> WeightFacts:
    """The facts in a manifest's part, verified: totals and digest are counted again from the tensors.

    Raises PinnedFactsError.
    """
    version = part.get(_VERSION_KEY)
    if type(version) is not int or version != VERSION:
        raise PinnedFactsError(_VERSION_KEY, f"must be {VERSION}: a newer weighbridge may have pinned these facts")
    document = part.get(_FACTS_KEY)
    if not isinstance(document, Mapping):
        raise PinnedFactsError(_FACTS_KEY, "must be an object")
    try:
        message = json_format.ParseDict(dict(document), weights_pb2.WeightFacts())
    except (json_format.ParseError, ValueError, TypeError) as error:
        raise PinnedFactsError(_FACTS_KEY, f"is no weight facts: {str(error)[:200]}") from error
    if not message.tensors:
        raise PinnedFactsError("facts.tensors", "are missing")
    for name in ("model_digest", "tensor_bytes", "tensor_count"):
        if not getattr(message, name):
            raise PinnedFactsError(f"facts.{name}", "is missing")
    try:
        return facts_from(message)
    except UnpriceableFactsError as error:
        raise PinnedFactsError(error.field.removeprefix("model."), error.message) from error


def canonical_text(part: Mapping[str, Any]) -> str:
    """A manifest's part as text: one tensor a line, so that a change can be read as a difference of lines."""
    document = dict(part[_FACTS_KEY])
    tensors = document.pop("tensors", [])
    head = json.dumps({_VERSION_KEY: part[_VERSION_KEY], _FACTS_KEY: document}, indent=1, ensure_ascii=False)
    lines = ",\n".join("   " + json.dumps(tensor, ensure_ascii=False) for tensor in tensors)
    # The document's closing brace and the part's own, which the list of tensors goes before.
    return head.removesuffix("\n }\n}") + f',\n  "tensors": [\n{lines}\n  ]\n }}\n}}\n'


def differences(pinned: WeightFacts, found: WeightFacts) -> tuple[str, ...]:
    """What a file on disk has other than its pinned facts, a sentence each; empty when a plan would be the same.

    Names of files and folders are not compared: a model may lie anywhere.
    """
    sentences = []
    if pinned.model_digest != found.model_digest:
        sentences += _tensor_differences(pinned, found)
    if pinned.file_bytes != found.file_bytes:
        sentences.append(f"The files hold {found.file_bytes:,} bytes, pinned are {pinned.file_bytes:,}.")
    for field, what in (("format", "format"), ("architecture", "architecture"), ("quantization", "quantisation")):
        before, now = getattr(pinned, field), getattr(found, field)
        if before != now:
            before, now = (getattr(value, "value", value) or "none" for value in (before, now))
            sentences.append(f"The {what} is {now}, pinned is {before}.")
    if pinned.role is not found.role or pinned.made_for != found.made_for:
        sentences.append("What the files are for differs from what is pinned.")
    if pinned.geometry != found.geometry:
        sentences.append("The model's measures (layers, heads, widths) differ from those pinned.")
    return tuple(sentences)


def _tensor_differences(pinned: WeightFacts, found: WeightFacts) -> list[str]:
    before = {(component, tensor.name): tensor for component, tensor in pinned.tensors}
    now = {(component, tensor.name): tensor for component, tensor in found.tensors}
    kinds = (
        ("missing", sorted(before.keys() - now.keys())),
        ("not pinned", sorted(now.keys() - before.keys())),
        ("other than pinned", sorted(key for key in before.keys() & now.keys() if before[key] != now[key])),
    )
    sentences = []
    for what, keys in kinds:
        if keys:
            named = ", ".join(name for _, name in keys[:MAX_NAMED])
            more = f" and {len(keys) - MAX_NAMED} more" if len(keys) > MAX_NAMED else ""
            sentences.append(f"{len(keys)} tensor(s) are {what}: {named}{more}.")
    return sentences or ["The digest of the tensors differs from the pinned one."]
