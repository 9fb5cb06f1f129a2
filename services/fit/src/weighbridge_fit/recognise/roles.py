"""What a file or folder is for, where it is no whole model: an adapter, a drafter, a projector."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge_fit.errors import as_text
from weighbridge_fit.facts import Role
from weighbridge_fit.model_config import MAX_WORD

# DeepSpec's released DSpark drafters say nothing else of themselves: the first architecture alone decides (another MLX
# server's rule, November 2026).
DEEPSPEC_ARCHITECTURE = "Gemma4DSparkModel"
# Families of drafters by the class names that their authors publish (EAGLE 1 to 3, Medusa, DFlash, DSpark, MLP
# speculators).
_DRAFTER_CLASS = re.compile(r"eagle|medusa|dflash|dspark|speculator", re.IGNORECASE)
# NVIDIA's Eagle 2 and 2.5 are whole models of vision and language, and no drafter generates from anything but tokens.
_WHOLE_CLASS = "ForConditionalGeneration"
# Support files of DeepSeek V4: their metadata has the drafter's block size, with or without the architecture's prefix.
_DSPARK_KEYS = ("dspark.block_size", "deepseek4.dspark.block_size", "deepseek41.dspark.block_size")
_DRAFTER_GGUF = re.compile(r"eagle\d*|dflash|dspark|medusa")
_LEGACY_DRAFT_PREFIX = "mtp.0."
_VISION_TYPES = re.compile(r"(?:clip|siglip2?|dinov2|chinese_clip|aimv2)(?:_vision)?(?:_model)?")
# Where a configuration says which model an adapter or drafter belongs to.
_MADE_FOR = ("base_model_name_or_path", "target_model_name_or_path", "target_model", "base_model", "model")
_METADATA_MADE_FOR = ("ss_sd_model_name", "ss_base_model_version", "modelspec.architecture")
_GGUF_MADE_FOR = ("general.base_model.0.repo_url", "general.base_model.0.name")
MAX_NAME = 1024


@dataclass(frozen=True, slots=True)
class Recognised:
    """A role, and the model that it was made for ("" when nothing says)."""

    role: Role
    made_for: str = ""


MODEL = Recognised(Role.MODEL)


def first_architecture(config: Mapping[str, Any]) -> str:
    """The class that a transformers config names first, "" when it names none."""
    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else ""
    return first if isinstance(first, str) and len(first) <= MAX_WORD else ""


def role_of_config(config: Mapping[str, Any]) -> Recognised:
    """What a folder's config.json says it is."""
    name = first_architecture(config)
    model_type = config.get("model_type")
    if name.endswith(_WHOLE_CLASS):
        return MODEL
    if name == DEEPSPEC_ARCHITECTURE or _DRAFTER_CLASS.search(name):
        return Recognised(Role.DRAFTER, _text(config, _MADE_FOR))
    if isinstance(model_type, str):
        if _DRAFTER_CLASS.fullmatch(model_type.split("_")[0]) or model_type == "mlp_speculator":
            return Recognised(Role.DRAFTER, _text(config, _MADE_FOR))
        if _VISION_TYPES.fullmatch(model_type) and "Vision" in name:
            return Recognised(Role.PROJECTOR)
    return MODEL


def adapter_of_config(config: Mapping[str, Any]) -> Recognised:
    """The adapter that an adapter_config.json of PEFT's or mlx-lm's describes."""
    return Recognised(Role.ADAPTER, _text(config, _MADE_FOR))


def adapter_of_metadata(metadata: Mapping[str, Any]) -> Recognised:
    """An adapter on its own: trainers write into a safetensors header what they started from."""
    return Recognised(Role.ADAPTER, _text(metadata, _METADATA_MADE_FOR))


def role_of_gguf(metadata: Mapping[str, Any], names: Collection[str]) -> Recognised:
    """What a GGUF file's metadata and tensors say it is."""
    kind, architecture = metadata.get("general.type"), metadata.get("general.architecture")
    made_for = _text(metadata, _GGUF_MADE_FOR)
    if kind == "adapter":
        return Recognised(Role.ADAPTER, made_for)
    if kind == "mmproj" or architecture == "clip":
        return Recognised(Role.PROJECTOR, made_for)
    if any(key in metadata for key in _DSPARK_KEYS):
        return Recognised(Role.DRAFTER, made_for)
    if isinstance(architecture, str) and _DRAFTER_GGUF.fullmatch(architecture):
        return Recognised(Role.DRAFTER, made_for)
    # The model that drafts with layers of its own has them beside its blocks; a support file has nothing else.
    draft = any(name.startswith(_LEGACY_DRAFT_PREFIX) for name in names)
    if draft and not any(name.startswith("blk.") for name in names):
        return Recognised(Role.DRAFTER, made_for)
    return MODEL


def _text(values: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    """The first of some texts that is there."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, str) and value and len(value) <= MAX_NAME:
            return as_text(value)
    return ""
