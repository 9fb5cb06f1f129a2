"""Folders of an image or video model as sd-server opens it: a checkpoint or a diffusion model, and parts beside it."""

from collections.abc import Iterable, Mapping

from weighbridge_fit.components import Component
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.folder import several_models
from weighbridge_fit.model import MAIN
from weighbridge_fit.recognise.stable_diffusion import HIGH_NOISE, Part, component_of
from weighbridge_fit.weight_names import group_of

_PARTS = frozenset({*Part, HIGH_NOISE})
_NO_PART = "no part"
_FORMATS = frozenset({WeightFormat.SAFETENSORS, WeightFormat.GGUF, WeightFormat.TORCH_CHECKPOINT})


def may_be_in_parts(folder: WeightFacts) -> bool:
    """Whether a folder's facts are such that its files must be looked at one by one.

    A folder of several containers is no diffusers tree: its subfolders, if any, only sort the files.
    """
    if folder.role is not Role.MODEL or not 0 < len(folder.files) <= len(_PARTS):
        return False
    return folder.format is WeightFormat.MIXED or (folder.format in _FORMATS and Part.DIFFUSION_MODEL in _names(folder))


def roles_of(files: Mapping[str, WeightFacts]) -> Mapping[str, str] | None:
    """The file of each role, from the facts of each file by its name. None where there is no diffusion model among
    them, or it is in shards, which sd-server does not open.

    MAIN is the diffusion model, or the checkpoint that has it. Every other file is one part.

    Raises:
        WeightError: SEVERAL_MODELS: two files are the same part, or one is none.
    """
    main = [name for name, facts in files.items() if Part.DIFFUSION_MODEL in _names(facts)]
    if not main:
        return None
    roles: dict[str, list[str]] = {MAIN: main}
    for name in files.keys() - set(main):
        roles.setdefault(_part(files[name]), []).append(name)
    if any(_in_shards(names) for names in roles.values()):
        return None
    if _NO_PART in roles or any(len(names) > 1 for names in roles.values()):
        raise several_models(sorted(files))
    return {role: names[0] for role, names in roles.items()}


def _in_shards(names: Iterable[str]) -> bool:
    groups = [group_of(name) for name in names]
    return len(set(groups)) < len(groups)


def _part(facts: WeightFacts) -> str:
    """The part that a file beside a diffusion model is."""
    held = _names(facts)
    if held == {Component.MODEL} and any(component_of(tensor.name) == Part.LLM for _, tensor in facts.tensors):
        return Part.LLM  # a language model's own file says nothing of being an encoder
    if Part.LLM in held:
        held.discard(Part.LLM_VISION)  # a language model may bring its vision tower
    part = held.pop() if len(held) == 1 else ""
    return part if part in _PARTS else _NO_PART


def _names(facts: WeightFacts) -> set[str]:
    # A language model's output head that is tied, and the like, is no part of its own.
    return {total.component for total in facts.components} - {Component.UNUSED}
