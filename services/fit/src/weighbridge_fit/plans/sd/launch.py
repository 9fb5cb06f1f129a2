"""How sd-server is started: flags of an allow-list, in a fixed order, that realise a plan."""

from collections.abc import Iterable, Mapping

from weighbridge_fit.laws.sd_shapes import ARCHITECTURES
from weighbridge_fit.model import MAIN
from weighbridge_fit.plans.sd.options import UNKNOWN_CELL_PX, SdShape
from weighbridge_fit.plans.sd.parts import HIGH_NOISE
from weighbridge_fit.recognise.stable_diffusion import Part as Component

MODEL_FLAG, DIFFUSION_FLAG = "--model", "--diffusion-model"
PART_FLAGS: Mapping[str, str] = {
    HIGH_NOISE: "--high-noise-diffusion-model",
    Component.CLIP_L: "--clip_l",
    Component.CLIP_G: "--clip_g",
    Component.CLIP_VISION: "--clip_vision",
    Component.T5XXL: "--t5xxl",
    Component.LLM: "--llm",
    Component.LLM_VISION: "--llm_vision",
    Component.VAE: "--vae",
    Component.TAESD: "--taesd",
    Component.CONTROL_NET: "--control-net",
}
"""The flag of each further file, in the order in which they are given. Adapters have none: they are found in a folder
that the engine names."""
FLAGS = frozenset(
    {
        MODEL_FLAG,
        DIFFUSION_FLAG,
        *PART_FLAGS.values(),
        "--type",
        "--tensor-type-rules",
        "--diffusion-fa",
        "--vae-tiling",
        "--vae-tile-size",
        "--vae-conv-direct",
        "--diffusion-conv-direct",
        "--offload-to-cpu",
        "--clip-on-cpu",
        "--vae-on-cpu",
        "--mmap",
        "--threads",
        "--steps",
    }
)
"""Every flag that a plan may ask for; spelled as `sd-server --help` of 2026-11 does."""


def arguments(shape: SdShape, paths: Mapping[str, str], checkpoint: bool, steps: int = 0) -> tuple[str, ...]:
    """The flags that realise a plan, without the program and without what only the engine knows (addresses, folders).

    `checkpoint`: the model's own file holds every part. Files that are not on disk are left out. `steps` of a model
    that was distilled to them, else 0: builds that take a model's steps from the launch alone would make 20 (Krea 2 on
    master-789 of August 2026).
    """
    made: list[str] = []
    if paths.get(MAIN):
        made += [MODEL_FLAG if checkpoint else DIFFUSION_FLAG, paths[MAIN]]
    for role, flag in PART_FLAGS.items():
        if paths.get(role):
            made += [flag, paths[role]]
    if shape.weight_type:
        made += ["--type", type_word(shape.weight_type)]
    if shape.tensor_type_rules:
        made += ["--tensor-type-rules", shape.tensor_type_rules]
    made += _switches(
        (shape.flash_attention, "--diffusion-fa"),
        (shape.vae_tiling, "--vae-tiling"),
    )
    if shape.vae_tiling and shape.tile_px:
        known = ARCHITECTURES.get(shape.architecture)
        cells = shape.tile_px // (known.cell_px if known else UNKNOWN_CELL_PX)
        made += ["--vae-tile-size", f"{cells}x{cells}"]
    made += _switches(
        (shape.vae_conv_direct, "--vae-conv-direct"),
        (shape.diffusion_conv_direct, "--diffusion-conv-direct"),
        (shape.offload, "--offload-to-cpu"),
        (shape.text_encoder_on_cpu, "--clip-on-cpu"),
        (shape.vae_on_cpu, "--vae-on-cpu"),
        (shape.mmap, "--mmap"),
    )
    if shape.threads:
        made += ["--threads", str(shape.threads)]
    if steps:
        made += ["--steps", str(steps)]
    return tuple(made)


def type_word(name: str) -> str:
    """A stored type as the engine spells it: q8_0, f16, q4_K."""
    word = name.lower()
    return f"{word[:-1]}K" if word.endswith("_k") else word


def _switches(*given: tuple[bool, str]) -> Iterable[str]:
    return [flag for on, flag in given if on]
