"""From an entry to what a plan is made for. Pure: what was read comes in as values."""

from collections.abc import Mapping

from weighbridge_fit.catalog.entry import CatalogEntry
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.model import MAIN, Model
from weighbridge_fit.plans.plan import Note

_FORMATS = {".safetensors": WeightFormat.SAFETENSORS, ".gguf": WeightFormat.GGUF}


def roles(entry: CatalogEntry) -> Mapping[str, str]:
    """What is opened, by role, as paths in the entry's folder: MAIN is "" where the whole folder is one model."""
    if entry.loads_from_folder:
        return {MAIN: ""}
    opened = {MAIN: entry.main_files()[0].path}
    return opened | {role: file.path for role, file in entry.companions().items()}


def pinned_facts(entry: CatalogEntry) -> Mapping[str, WeightFacts] | None:
    """The facts that the entry pins, by role; None where it pins none, or not those of every role."""
    by_path = {file.path: file.facts for file in entry.files}
    found: dict[str, WeightFacts] = {}
    for role, path in roles(entry).items():
        facts = entry.facts if role == MAIN and entry.facts is not None else by_path.get(path)
        if facts is None:
            return None
        found[role] = facts
    return found


def known_by_sizes(entry: CatalogEntry) -> Model:
    """The model as far as its files' sizes go: no tensors, no geometry. Families give it a range or refuse it."""
    suffixes = {file.name[file.name.rfind(".") :] for file in entry.main_files()}
    formats = {_FORMATS.get(suffix, WeightFormat.UNKNOWN) for suffix in suffixes}
    facts = WeightFacts(
        name=entry.catalog_id,
        format=formats.pop() if len(formats) == 1 else WeightFormat.MIXED,
        file_bytes=entry.weight_bytes,
        tensor_bytes=0,
        tensor_count=0,
        element_count=0,
        largest_tensor_bytes=0,
        precisions=(),
        components=(),
        architecture=entry.architecture,
        quantization=entry.quantization,
    )
    return Model(facts, entry=entry)


def model_of(entry: CatalogEntry, facts: Mapping[str, WeightFacts], paths: Mapping[str, str]) -> Model:
    """The model with the facts of every role."""
    companions = {role: found for role, found in facts.items() if role != MAIN}
    return Model(facts[MAIN], companions, paths, entry)


def has_facts(model: Model) -> bool:
    """Whether it is priced by facts about its tensors, and not by its files' sizes."""
    return bool(model.facts.tensor_count)


def disagreement(model: Model) -> Note | None:
    """What to say where the files on disk are not those whose facts the entry pins; the files are what loads."""
    if model.entry is None or not model.path:
        return None
    pinned = pinned_facts(model.entry) or {}
    read = {MAIN: model.facts, **model.companions}
    differing = sorted(
        role for role, facts in pinned.items() if role in read and facts.model_digest != read[role].model_digest
    )
    if not differing:
        return None
    named = ", ".join(role or "the model" for role in differing)
    return Note(
        "FACTS_DISAGREE",
        f"The files on disk are not those that the catalogue describes ({named}): they are priced as they are.",
        {"roles": ",".join(role or "model" for role in differing)},
    )
