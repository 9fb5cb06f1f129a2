"""The parts of a model as sd-server loads them: which tensors, under which of the engine's names, from which file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

from weighbridge_fit.facts import TensorFact, WeightFacts, WeightFormat
from weighbridge_fit.gguf.types import TENSOR_TYPES
from weighbridge_fit.model import Model
from weighbridge_fit.plans.sd.remembered import Remembered
from weighbridge_fit.recognise.stable_diffusion import Part as Component
from weighbridge_fit.recognise.stable_diffusion import component_of

WHOLE = "model"
"""A checkpoint about which only its size is known: every part in one."""
HIGH_NOISE = "high_noise_diffusion_model"

TEXT = (Component.CLIP_L, Component.CLIP_G, Component.T5XXL, Component.LLM, Component.LLM_VISION)
DIFFUSION = (Component.DIFFUSION_MODEL, HIGH_NOISE, Component.CONTROL_NET, Component.CLIP_VISION, Component.LORA)
PICTURE = (Component.VAE, Component.TAESD)

_BLOCK_TYPES = frozenset(kind.name for kind in TENSOR_TYPES.values() if kind.block_elements > 1)
_UNET_FAMILY = frozenset({"sd15", "sd21", "sdxl", "sdxl_refiner", "sd1_tiny", "sdxs512", "svd"})
_PREFIX: Mapping[str, str] = {
    Component.DIFFUSION_MODEL: "model.diffusion_model.",
    HIGH_NOISE: "model.high_noise_diffusion_model.",
    Component.CLIP_L: "text_encoders.clip_l.transformer.",
    Component.CLIP_G: "text_encoders.clip_g.transformer.",
    Component.T5XXL: "text_encoders.t5xxl.transformer.",
    Component.LLM: "text_encoders.llm.",
    Component.LLM_VISION: "text_encoders.llm.visual.",
    Component.CLIP_VISION: "cond_stage_model.transformer.",
    Component.VAE: "first_stage_model.",
    Component.TAESD: "tae.",
    Component.CONTROL_NET: "control_model.",
    Component.LORA: "lora.",
}
"""What the engine puts before the names of a part's own file (its flags' code, as it reads files)."""
_UNET_PREFIX: Mapping[str, str] = {
    Component.CLIP_L: "cond_stage_model.transformer.",
    Component.CLIP_G: "cond_stage_model.1.transformer.",
}
_CHECKPOINT = re.compile(
    r"(?:model\.(?:high_noise_)?diffusion_model|first_stage_model|vae|cond_stage_model|conditioner|text_encoders|te|unet"
    r"|tae|control_model)\."
)
_SURPLUS: Mapping[str, re.Pattern[str]] = {
    # Only CLIP-G projects what it reads.
    Component.CLIP_L: re.compile(r"(?:vision_model\.|visual_projection|visual\.|text_projection)"),
    Component.CLIP_G: re.compile(r"(?:vision_model\.|visual_projection|visual\.)"),
    Component.T5XXL: re.compile(r"(?:decoder\.block\.|dec\.blk\.|lm_head\.)"),
}
"""Tensors that files of a part carry and the engine has no place for."""

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "sd15": (Component.CLIP_L, Component.VAE),
    "sd21": (Component.CLIP_L, Component.VAE),
    "sdxl": (Component.CLIP_L, Component.CLIP_G, Component.VAE),
    "sd3m": (Component.VAE,),
    "sd35m": (Component.VAE,),
    "sd35l": (Component.VAE,),
    "flux1": (Component.T5XXL, Component.CLIP_L, Component.VAE),
    "flux2": (Component.LLM, Component.VAE),
    "klein": (Component.LLM, Component.VAE),
    "zimage": (Component.LLM, Component.VAE),
    "qwen": (Component.LLM, Component.VAE),
    "wan": (Component.T5XXL, Component.VAE),
}
"""What an architecture cannot render without, by the start of its name."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor under the engine's name. `row` is its fastest dimension in elements."""

    name: str
    fact: TensorFact
    row: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class LoadedPart:
    """One component. Without `weights` nothing but its size and perhaps its quantisation is known. `separate`: from a
    file of its own, not from the model's; `borrowed`: from the file of another role."""

    component: str
    weights: tuple[Weight, ...]
    file_bytes: int
    quantization: str = ""
    separate: bool = False
    borrowed: bool = False

    @property
    def tensor_bytes(self) -> int:
        """Bytes that are read from the file."""
        return sum(weight.fact.bytes for weight in self.weights) or self.file_bytes


def parts_of(model: Model, architecture: str) -> tuple[LoadedPart, ...]:
    """Every part that the engine would load, in the order in which it loads them: the diffusion model first.

    A part's own file replaces what a checkpoint has of it; a tiny autoencoder takes the place of the full one. Parts of
    a catalogue model that are not on disk come from its entry, with sizes alone where no facts are pinned.
    """
    found: dict[str, LoadedPart] = {}
    for part in (*_companions(model, architecture), *_main(model, architecture), *_entry(model)):
        found.setdefault(part.component, part)
    if Component.TAESD in found:
        found.pop(Component.VAE, None)
    order = (WHOLE, *DIFFUSION, *TEXT, *PICTURE)
    return tuple(sorted(found.values(), key=lambda part: order.index(part.component)))


def missing_parts(parts: Iterable[LoadedPart], architecture: str) -> tuple[str, ...]:
    """Parts without which the engine cannot load or render this architecture."""
    have = {part.component for part in parts}
    if WHOLE in have:
        return ()
    needed = next((roles for start, roles in _REQUIRED.items() if architecture.startswith(start)), ())
    return tuple(
        role for role in needed if role not in have and not (role == Component.VAE and Component.TAESD in have)
    )


_OF_MODEL: Remembered[tuple[LoadedPart, ...]] = Remembered()
_OF_COMPANION: Remembered[tuple[LoadedPart, ...]] = Remembered()


def _main(model: Model, architecture: str) -> tuple[LoadedPart, ...]:
    facts = model.facts
    if facts.tensors:
        return _OF_MODEL.get(facts, architecture, lambda: _from_tensors(facts, architecture))
    if model.entry is not None:
        return ()
    known = [total for total in facts.components if total.component in _PREFIX]
    if not known:
        return (LoadedPart(WHOLE, (), facts.file_bytes or facts.tensor_bytes, facts.quantization),)
    return tuple(LoadedPart(total.component, (), total.bytes, facts.quantization) for total in known)


def _from_tensors(facts: WeightFacts, architecture: str) -> tuple[LoadedPart, ...]:
    checkpoint = any(_CHECKPOINT.match(fact.name) for _, fact in facts.tensors)
    folder, reverse = len(facts.files) > 1, _reversed(facts)
    groups: dict[str, list[Weight]] = {}
    for label, fact in facts.tensors:
        if checkpoint and (not folder or _CHECKPOINT.match(fact.name)):
            component = _component(fact.name)
        else:
            # Files of parts, in a folder or alone: what each one is was told by all of its tensors.
            component = label if folder and label in _PREFIX else Component.DIFFUSION_MODEL
        weight = _weight(component, fact, label in reverse, architecture)
        if weight is not None:
            groups.setdefault(_home(weight, component), []).append(weight)
    return tuple(
        LoadedPart(component, tuple(weights), sum(weight.fact.bytes for weight in weights))
        for component, weights in groups.items()
    )


def _reversed(facts: WeightFacts) -> frozenset[str]:
    """Components whose shapes give the fastest dimension first: those of GGUF files, which in a folder of several
    containers are told by the block types that no other container has."""
    if facts.format is WeightFormat.GGUF:
        return frozenset(label for label, _ in facts.tensors)
    if facts.format is not WeightFormat.MIXED:
        return frozenset()
    return frozenset(label for label, fact in facts.tensors if fact.dtype in _BLOCK_TYPES)


def _companions(model: Model, architecture: str) -> list[LoadedPart]:
    made: list[LoadedPart] = []
    for role, facts in sorted(model.companions.items()):
        if role in _PREFIX:
            made += _OF_COMPANION.get(facts, (role, architecture), partial(_from_file, role, facts, architecture))
    # What a role's own file holds comes before what another role's file has of it.
    return sorted(made, key=lambda part: part.borrowed)


def _from_file(role: str, facts: WeightFacts, architecture: str) -> tuple[LoadedPart, ...]:
    reverse = _reversed(facts)
    weights = [
        weight for label, fact in facts.tensors if (weight := _weight(role, fact, label in reverse, architecture))
    ]
    own = tuple(weight for weight in weights if _home(weight, role) == role)
    made = [LoadedPart(role, own, facts.file_bytes, facts.quantization, separate=True)]
    vision = tuple(weight for weight in weights if _home(weight, role) != role)
    if vision and architecture.startswith("qwen"):
        size = sum(weight.fact.bytes for weight in vision)
        made.append(LoadedPart(Component.LLM_VISION, vision, size, separate=True, borrowed=True))
    return tuple(made)


def _entry(model: Model) -> list[LoadedPart]:
    """What a catalogue entry names and nothing else has told about."""
    entry = model.entry
    if entry is None:
        return []
    have = set(model.companions) | ({WHOLE, Component.DIFFUSION_MODEL} if model.facts.tensors else set())
    sizes: dict[str, tuple[int, str]] = {}
    for file in entry.files:
        if file.component and file.component not in have:
            size, quantization = sizes.get(file.component, (0, ""))
            sizes[file.component] = (size + file.size_bytes, quantization or quantization_in(file.name))
    main = {WHOLE, Component.DIFFUSION_MODEL}
    return [
        LoadedPart(component, (), size, quantization or (entry.quantization if component in main else ""), True)
        for component, (size, quantization) in sizes.items()
        if component in _PREFIX or component == WHOLE
    ]


_QUANTIZATION = re.compile(
    r"(?ix)(?<![a-z0-9])(?P<name> IQ\d_(?:XXS|XS|NL|[SM]) | Q\d_(?:K(?:_[SMLX]{1,2})?|\d) | TQ\d_\d | MXFP4 | BF16"
    r" | FP?8_E\dM\d(?:FN)? | FP?(?:32|16|8))(?![a-z0-9])"
)


def quantization_in(file_name: str) -> str:
    """The stored type that a file's name speaks of, upper case, "" if none."""
    found = _QUANTIZATION.search(file_name)
    if found is None:
        return ""
    name = found["name"].upper()
    return name.replace("FP", "F") if name.startswith("FP") else name


_OWN_PREFIXES = (
    ("model.high_noise_diffusion_model.", HIGH_NOISE),
    ("unet.", Component.DIFFUSION_MODEL),
    ("te.1.", Component.CLIP_G),
    ("te.", Component.CLIP_L),
)


def _component(name: str) -> str:
    for prefix, component in _OWN_PREFIXES:
        if name.startswith(prefix):
            return component
    found = component_of(name)
    # In a checkpoint a name without a prefix of the engine's is nobody's, however much it looks like a part's.
    return found if _CHECKPOINT.match(name) else Component.UNUSED


def _home(weight: Weight, component: str) -> str:
    """A language model's file may carry its vision tower."""
    return Component.LLM_VISION if weight.name.startswith(_PREFIX[Component.LLM_VISION]) else component


def _weight(component: str, fact: TensorFact, reverse: bool, architecture: str) -> Weight | None:
    surplus = _SURPLUS.get(component)
    if component not in _PREFIX or (surplus is not None and surplus.search(fact.name)):
        return None
    name = _engine_name(component, fact.name, architecture)
    row = fact.shape[0 if reverse else -1] if fact.shape else 1
    return Weight(name, fact, row)


def _engine_name(component: str, name: str, architecture: str) -> str:
    if name.startswith("vae."):
        return _PREFIX[Component.VAE] + name[len("vae.") :]
    if _CHECKPOINT.match(name):
        return name
    if architecture in _UNET_FAMILY and component in _UNET_PREFIX:
        return _UNET_PREFIX[component] + name
    if component == Component.LLM and name.startswith(("visual.", "model.visual.")):
        return _PREFIX[Component.LLM_VISION] + name.partition("visual.")[2]
    return _PREFIX[component] + name
