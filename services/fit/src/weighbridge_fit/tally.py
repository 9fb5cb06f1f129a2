"""Adds files up to weight facts, and names them by their digest."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weighbridge_fit.components import Component
from weighbridge_fit.facts import (
    ComponentTotal,
    FileFacts,
    FileSummary,
    Labelled,
    PrecisionTotal,
    Role,
    TensorFact,
    WeightFacts,
    WeightFormat,
    precision_totals,
)
from weighbridge_fit.geometry import ModelGeometry


def model_digest(labelled: Iterable[Labelled]) -> str:
    """Lower-case hex SHA-256 over the canonical facts.

    One line per tensor (component, name, dtype, shape, bytes), sorted, so that sharding, file names and the order in a
    file do not matter, and no weight is read. Names and the order of a shape are the container's: a GGUF conversion is
    another model than the safetensors it was made from, even where not a bit of the weights differs. Another engine
    loads it, and what was measured of one says nothing of the other.
    """
    lines = sorted(
        f"{component}\0{tensor.name}\0{tensor.dtype}\0{','.join(map(str, tensor.shape))}\0{tensor.bytes}\n"
        for component, tensor in labelled
    )
    return hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def weight_facts(
    name: str,
    format: WeightFormat,
    files: Sequence[FileFacts],
    labelled: Sequence[Labelled],
    *,
    architecture: str,
    quantization: str,
    geometry: ModelGeometry | None,
    notes: tuple[str, ...] = (),
    role: Role = Role.MODEL,
    made_for: str = "",
) -> WeightFacts:
    """The facts of a whole model, or of what `role` says it is."""
    by_component: dict[str, list[TensorFact]] = {}
    for component, tensor in labelled:
        by_component.setdefault(component, []).append(tensor)
    components = tuple(
        ComponentTotal(component, len(tensors), sum(tensor.bytes for tensor in tensors), _totals(tensors))
        for component, tensors in sorted(by_component.items())
    )
    tensors = [tensor for _, tensor in labelled]
    return WeightFacts(
        name=name,
        format=format,
        file_bytes=sum(file.file_bytes for file in files),
        tensor_bytes=sum(component.bytes for component in components),
        tensor_count=len(tensors),
        element_count=sum(tensor.elements for tensor in tensors),
        largest_tensor_bytes=max((tensor.bytes for tensor in tensors), default=0),
        precisions=_totals(tensors),
        components=components,
        files=tuple(
            FileSummary(file.name, file.file_bytes, file.header_bytes, file.format, file.tensor_count) for file in files
        ),
        architecture=architecture,
        quantization=quantization,
        model_digest=model_digest(labelled),
        geometry=geometry,
        notes=notes,
        tensors=tuple(sorted(labelled)),
        role=role,
        made_for=made_for,
    )


class FactsDisagreeError(Exception):
    """Facts that contradict themselves; `field` is the one that differs from what the tensors say."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def verified(facts: WeightFacts) -> WeightFacts:
    """Facts that came from elsewhere, held against their own tensors: what is empty or zero is filled in.

    Without tensors they come back as they are. Raises FactsDisagreeError naming the first field that differs.
    """
    if facts.files and sum(file.file_bytes for file in facts.files) != facts.file_bytes:
        if facts.file_bytes:
            raise FactsDisagreeError("file_bytes", "is not the sum of the files")
        facts = replace(facts, file_bytes=sum(file.file_bytes for file in facts.files))
    if not facts.tensors:
        return facts
    told = weight_facts(facts.name, facts.format, (), facts.tensors, architecture="", quantization="", geometry=None)
    filled: dict[str, Any] = {}
    for field in ("tensor_bytes", "tensor_count", "element_count", "largest_tensor_bytes", "model_digest"):
        given, counted = getattr(facts, field), getattr(told, field)
        if given and given != counted:
            raise FactsDisagreeError(field, f"does not agree with the tensors, which make it {counted}")
        filled[field] = counted
    for field, key in (("precisions", "dtype"), ("components", "component")):
        given = {getattr(total, key): _numbers(total) for total in getattr(facts, field)}
        counted = {getattr(total, key): _numbers(total) for total in getattr(told, field)}
        if given and given != counted:
            raise FactsDisagreeError(field, "does not agree with the tensors")
        filled[field] = getattr(told, field)
    return replace(facts, **filled)


def _numbers(total: PrecisionTotal | ComponentTotal) -> tuple[Any, ...]:
    if isinstance(total, PrecisionTotal):
        return total.tensors, total.elements, total.bytes
    return total.tensors, total.bytes


def _totals(tensors: Iterable[TensorFact]) -> tuple[PrecisionTotal, ...]:
    return precision_totals((tensor.dtype, 1, tensor.elements, tensor.bytes) for tensor in tensors)


def joined(name: str, main: WeightFacts, companions: Mapping[str, WeightFacts]) -> WeightFacts:
    """One set of facts for a model in several files that were read one by one: `main` says what the model is.

    Companions are by role. A language model's file calls itself a model; beside `main` it is what its role says.
    """
    parts = (main, *companions.values())
    labelled = list(main.tensors)
    for role, facts in companions.items():
        labelled += [
            (role if component == Component.MODEL else component, tensor) for component, tensor in facts.tensors
        ]
    by_component: dict[str, list[TensorFact]] = {}
    for component, tensor in labelled:
        by_component.setdefault(component, []).append(tensor)
    formats = {facts.format for facts in parts}
    return replace(
        main,
        name=name,
        format=formats.pop() if len(formats) == 1 else WeightFormat.MIXED,
        file_bytes=sum(facts.file_bytes for facts in parts),
        tensor_bytes=sum(facts.tensor_bytes for facts in parts),
        tensor_count=sum(facts.tensor_count for facts in parts),
        element_count=sum(facts.element_count for facts in parts),
        largest_tensor_bytes=max(facts.largest_tensor_bytes for facts in parts),
        precisions=_totals(tensor for _, tensor in labelled),
        components=tuple(
            ComponentTotal(component, len(tensors), sum(tensor.bytes for tensor in tensors), _totals(tensors))
            for component, tensors in sorted(by_component.items())
        ),
        files=tuple(file for facts in parts for file in facts.files),
        model_digest=model_digest(labelled),
        notes=tuple(note for facts in parts for note in facts.notes),
        tensors=tuple(sorted(labelled)),
    )
