"""What is known about families of diffusers pipelines: how far they compress, what they default to, how they decode."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from weighbridge_fit.facts import ComponentTotal, TensorFact, WeightFacts
from weighbridge_fit.model import Model

# The autoencoder of Wan 2.2 5B has 705 million parameters, that of Wan 2.1 127 million.
_LARGE_WAN_VAE = 400_000_000


class Decoder(Enum):
    """How an autoencoder goes over its pixels."""

    IMAGE = "image"
    QWEN = "qwen"
    WAN21 = "wan21"
    WAN22 = "wan22"
    WHOLE_VIDEO = "whole_video"
    UNKNOWN_VIDEO = "unknown_video"


class Stage(Enum):
    """When a component computes."""

    TEXT = "text"
    DENOISE = "denoise"
    DECODE = "decode"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One family of pipelines.

    `patch_px`: side of the square that one token covers. `temporal`: frames that one latent frame covers (1: pictures).
    `width`: the denoiser's, where its tensors do not say. `guided`: guidance computes two batches at once.
    `text_tokens`: the prompt's, where they go through the denoiser beside the picture's. `vae_float32`: its
    documentation loads the autoencoder in 32 bits.
    """

    name: str
    decoder: Decoder
    side_px: tuple[int, int]
    frames: int
    patch_px: int
    temporal: int
    side_step: int
    width: int
    guided: bool = False
    text_tokens: int = 0
    vae_float32: bool = False
    unet: bool = False
    known: bool = True

    @property
    def video(self) -> bool:
        """Whether it makes videos."""
        return self.temporal > 1


# Compressions, patches and default sizes are those of the published configurations; defaults of LTX and Wan 2.2 are the
# catalogue's (November 2026).
_WAN21 = Pipeline("wan21", Decoder.WAN21, (832, 480), 81, 16, 4, 16, 1536, vae_float32=True)
_WAN22 = Pipeline("wan22", Decoder.WAN22, (1280, 704), 121, 32, 4, 32, 3072, vae_float32=True)
_PIPELINES: tuple[tuple[re.Pattern[str], Pipeline], ...] = (
    (
        re.compile(r"ltx_?-?2|ltx2"),
        Pipeline("ltx2", Decoder.WHOLE_VIDEO, (768, 512), 121, 32, 8, 32, 4096, guided=True, vae_float32=True),
    ),
    (re.compile(r"ltx"), Pipeline("ltx", Decoder.WHOLE_VIDEO, (768, 512), 97, 32, 8, 32, 4096, guided=True)),
    (re.compile(r"wan"), _WAN21),
    (
        re.compile(r"hunyuan_?video"),
        Pipeline("hunyuan_video", Decoder.UNKNOWN_VIDEO, (1280, 720), 129, 16, 4, 16, 3072, text_tokens=256),
    ),
    (
        re.compile(r"cogvideo"),
        Pipeline("cogvideox", Decoder.UNKNOWN_VIDEO, (720, 480), 49, 16, 4, 16, 3072, guided=True, text_tokens=226),
    ),
    (
        re.compile(r"mochi"),
        Pipeline("mochi", Decoder.UNKNOWN_VIDEO, (848, 480), 19, 16, 6, 16, 3072, guided=True, text_tokens=256),
    ),
    (re.compile(r"flux_?2|klein"), Pipeline("flux2", Decoder.IMAGE, (1024, 1024), 1, 16, 1, 16, 6144, text_tokens=512)),
    (
        re.compile(r"flux|chroma"),
        Pipeline("flux1", Decoder.IMAGE, (1024, 1024), 1, 16, 1, 16, 3072, text_tokens=512),
    ),
    (
        re.compile(r"qwen_?image"),
        Pipeline("qwen_image", Decoder.QWEN, (1024, 1024), 1, 16, 1, 16, 3072, text_tokens=512),
    ),
    (
        re.compile(r"z_?-?image|lumina"),
        Pipeline("zimage", Decoder.IMAGE, (1024, 1024), 1, 16, 1, 16, 3840, text_tokens=512),
    ),
    (
        re.compile(r"stable_?diffusion_?3|sd3"),
        Pipeline("sd3", Decoder.IMAGE, (1024, 1024), 1, 16, 1, 16, 1536, guided=True, text_tokens=333),
    ),
    (
        re.compile(r"stable_?diffusion_?xl|sdxl"),
        Pipeline("sdxl", Decoder.IMAGE, (1024, 1024), 1, 8, 1, 8, 0, guided=True, unet=True),
    ),
    (
        re.compile(r"stable_?diffusion|sd15|sd21|sd1_|sdxs"),
        Pipeline("sd", Decoder.IMAGE, (512, 512), 1, 8, 1, 8, 0, guided=True, unet=True),
    ),
)
_OTHER_IMAGE = Pipeline(
    "image", Decoder.IMAGE, (1024, 1024), 1, 16, 1, 16, 3072, guided=True, text_tokens=512, known=False
)
_OTHER_VIDEO = Pipeline(
    "video", Decoder.UNKNOWN_VIDEO, (832, 480), 81, 16, 4, 16, 3072, guided=True, text_tokens=512, known=False
)

_STAGES = (
    (re.compile(r"text_encoder|image_encoder|connectors|prompt_enhancer|feature_extractor"), Stage.TEXT),
    (re.compile(r"transformer|unet|prior|controlnet|decoder|adapter|diffusion_model"), Stage.DENOISE),
    (re.compile(r"vae|vocoder|vqvae|movq|safety_checker|upsampler"), Stage.DECODE),
)


def stage_of(component: str) -> Stage:
    """When a component computes, by the name of its folder."""
    return next((stage for pattern, stage in _STAGES if pattern.search(component)), Stage.NONE)


def is_pipeline(facts: WeightFacts) -> bool:
    """Whether the components are those of a diffusers tree: something that denoises, in a folder of its own."""
    names = {total.component for total in facts.components}
    return any(name.startswith(("transformer", "unet", "prior")) for name in names)


def known_facts(model: Model) -> WeightFacts:
    """The model's facts; for a catalogue's tree that is not on this machine, its components by the sizes of their
    files."""
    facts, entry = model.facts, model.entry
    if entry is None:
        return facts
    if not facts.components:
        sizes: dict[str, list[int]] = {}
        for file in entry.files:
            if file.component:
                sizes.setdefault(file.component, []).append(file.size_bytes)
        components = tuple(ComponentTotal(name, 0, sum(found), ()) for name, found in sorted(sizes.items()))
        facts = replace(facts, components=components)
    return replace(facts, architecture=facts.architecture or entry.pipeline or entry.architecture)


def pipeline_of(facts: WeightFacts) -> Pipeline:
    """The family of a tree, by the name of its pipeline or architecture, else by its autoencoder's tensors."""
    word = facts.architecture.lower()
    for pattern, pipeline in _PIPELINES:
        if pattern.search(word):
            return _sized_wan(facts) if pipeline is _WAN21 else pipeline
    vae = facts.component_tensors("vae")
    return _OTHER_VIDEO if any(len(tensor.shape) == 5 for tensor in vae) else _OTHER_IMAGE


def _sized_wan(facts: WeightFacts) -> Pipeline:
    vae = [total for total in facts.components if total.component == "vae"]
    elements = sum(precision.elements for total in vae for precision in total.precisions)
    # Facts without precisions: Wan's autoencoders are published in 32 bits.
    elements = elements or sum(total.bytes for total in vae) // 4
    return _WAN22 if elements > _LARGE_WAN_VAE else _WAN21


def model_width(tensors: Iterable[TensorFact]) -> int:
    """Width of a transformer: the side of the square matrices that most of it is made of, 0 when there are none."""
    found: dict[int, int] = {}
    for tensor in tensors:
        if len(tensor.shape) == 2 and tensor.shape[0] == tensor.shape[1] and tensor.shape[0] > 256:
            found[tensor.shape[0]] = found.get(tensor.shape[0], 0) + 1
    return max(found, key=lambda side: (found[side], side), default=0)
