"""Which of the weight files in one folder a loader opens, by their names alone. Pure: names in, names out."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

SAFETENSORS = ".safetensors"
GGUF = ".gguf"
TORCH = (".ckpt", ".pt", ".pth", ".bin")
WEIGHT_SUFFIXES = (SAFETENSORS, GGUF, *TORCH)

# What training leaves beside weights, in the same container.
_TRAINING = re.compile(r"(?:optimizer|scheduler|scaler|rng_state|random_states|training_args|trainer_state)[^/]*")
# .bin is anybody's suffix; these are the names of torch checkpoints.
_TORCH_BIN = re.compile(r"(?:pytorch_model|diffusion_pytorch_model|adapter_model|model)\b[^/]*\.bin")
_VARIANT = re.compile(
    r"(?P<stem>(?:diffusion_pytorch_|pytorch_)?model)(?:\.(?P<variant>\w+))?(?P<shard>-[0-9]{5}-of-[0-9]{5})?"
    r"(?:\.(?P<late>\w+))?(?P<suffix>\.safetensors|\.bin)"
)
_INDEX = re.compile(r"(?P<stem>.+)(?P<suffix>\.safetensors|\.bin)\.index(?:\.(?P<variant>\w+))?\.json", re.DOTALL)
_SPLIT = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)
# More files than any model is cut into: the largest published checkpoints have about 200.
MAX_PARTS = 4096
_SHARD = re.compile(r"-[0-9]{5}-of-[0-9]{5}(?=\.[^.]+$)")
# Numbered files of a model that has no name of its own.
_NUMBERED = re.compile(
    r"(?P<stem>(?:diffusion_pytorch_|pytorch_)?model|consolidated|weights)[-_.][0-9]+(?P<suffix>\.[^.]+)"
)
# Which variant is taken where there is no plain one.
_VARIANT_ORDER = ("", "fp16", "bf16", "fp32")
# llama.cpp's convention: a file with this in its name is a projector beside a model.
PROJECTOR_NAME = "mmproj"


def is_weight(name: str) -> bool:
    """Whether a file may hold weights, by its name."""
    if not name.endswith(WEIGHT_SUFFIXES) or _TRAINING.match(name):
        return False
    return not name.endswith(".bin") or _TORCH_BIN.fullmatch(name) is not None


def is_torch(name: str) -> bool:
    """Whether a file is a torch checkpoint, by its name."""
    return name.endswith(TORCH)


def is_index(name: str) -> bool:
    """Whether a file lists the shards of a model."""
    return _INDEX.fullmatch(name) is not None


def group_of(name: str) -> str:
    """The name without its part number: files of one group are one model."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered["stem"] + numbered["suffix"] if numbered else _SHARD.sub("", name)


def split_names(name: str) -> list[str]:
    """The names of all parts of a split GGUF file, in order; the name alone when it is not a split's."""
    found = _SPLIT.fullmatch(name)
    if found is None:
        return [name]
    count = int(found["count"])
    if not 1 <= int(found["number"]) <= count or count > MAX_PARTS:
        return [name]
    return [f"{found['stem']}-{number:05d}-of-{found['count']}.gguf" for number in range(1, count + 1)]


def missing_part(names: Iterable[str]) -> str | None:
    """The first part of a split that is not among some names; None where every split is whole."""
    listed = list(names)
    present, seen = set(listed), set[str]()
    for name in listed:
        # A split is looked through once, not once for each of its parts.
        if name not in seen:
            parts = split_names(name)
            missing = next((part for part in parts if part not in present), None)
            if missing is not None:
                return missing
            seen.update(parts)
    return None


def without_projectors(names: Sequence[str], notes: list[str]) -> list[str]:
    """GGUF names without the projectors among them, unless there is nothing else."""
    models = [name for name in names if PROJECTOR_NAME not in name.lower()]
    if models and len(models) < len(names):
        notes.append("A projector (mmproj) lies beside the model and is not counted: it loads where it is asked for.")
    return models or list(names)


def one_container(names: Sequence[str], notes: list[str]) -> list[str]:
    """Safetensors where there are any, else torch checkpoints, else GGUF: a loader takes one container of the three."""
    for container in (SAFETENSORS, TORCH, GGUF):
        chosen = [name for name in names if name.endswith(container)]
        if chosen:
            if len(chosen) < len(names):
                notes.append(f"{len(names) - len(chosen)} weight file(s) in other formats are copies and do not load.")
            return chosen
    return []


def one_variant(names: Sequence[str], notes: list[str]) -> tuple[list[str], str]:
    """The names of one variant, and which: diffusers and transformers load the plain files, or those of one variant
    (model.fp16.safetensors) that was asked for."""
    by_variant: dict[str, list[str]] = {}
    for name in names:
        found = _VARIANT.fullmatch(name)
        by_variant.setdefault((found["variant"] or found["late"] or "") if found else "", []).append(name)
    if len(by_variant) < 2:
        return list(names), next(iter(by_variant), "")
    chosen = min(by_variant, key=lambda variant: (_rank(variant), variant))
    left_out = sorted(variant for variant in by_variant if variant != chosen)
    notes.append(f"Files of the variant(s) {', '.join(left_out)} do not load.")
    return by_variant[chosen], chosen


def indexes_of(names: Iterable[str], suffix: str, variant: str) -> list[str]:
    """The indexes among some names that list shards of one container and variant."""
    found = []
    for name in sorted(names):
        index = _INDEX.fullmatch(name)
        if index and index["suffix"] == suffix and (index["variant"] or "") == variant:
            found.append(name)
    return found


def whole_before_shards(names: Sequence[str], notes: list[str]) -> list[str]:
    """Without an index, a file that is there as a whole loads, and its shards beside it do not."""
    present = set(names)
    kept = [name for name in names if _SHARD.sub("", name) == name or _SHARD.sub("", name) not in present]
    if len(kept) < len(names):
        notes.append(f"{len(names) - len(kept)} shard(s) beside the whole file do not load.")
    return kept


def plain_models(names: Sequence[str], notes: list[str]) -> list[str]:
    """model*.safetensors where there are any: what transformers and mlx-lm look for beside a config.json."""
    chosen = [name for name in names if fnmatch(name, "model*.safetensors")]
    if chosen and len(chosen) < len(names):
        notes.append(f"{len(names) - len(chosen)} file(s) beside model*.safetensors do not load.")
    return chosen or list(names)


def _rank(variant: str) -> int:
    return _VARIANT_ORDER.index(variant) if variant in _VARIANT_ORDER else len(_VARIANT_ORDER)
