"""Image and video models by their tensors: which architecture, and which component a tensor belongs to.

Names are those of single checkpoints (the original training code's), of stable-diffusion.cpp's own conversions, of
stand-alone part files, and of diffusers' transformers and UNets. A shape's order is the file's: safetensors and
checkpoints give the slowest dimension first, GGUF the fastest, so rules ask which sizes a shape has, never where.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum

from weighbridge_fit.facts import TensorFact


class Part(StrEnum):
    """Components of an image or video model, named as stable-diffusion.cpp's flags are."""

    DIFFUSION_MODEL = "diffusion_model"
    VAE = "vae"
    CLIP_L = "clip_l"
    CLIP_G = "clip_g"
    T5XXL = "t5xxl"
    LLM = "llm"
    LLM_VISION = "llm_vision"
    CLIP_VISION = "clip_vision"
    TAESD = "taesd"
    CONTROL_NET = "control_net"
    LORA = "lora"
    UNUSED = "unused"


HIGH_NOISE = "high_noise_diffusion_model"
"""The half of Wan 2.2 A14B that takes the first steps: built like the other half, loaded beside it."""


# Prefixes of checkpoints that hold several components; the first that fits decides.
_PREFIXES = (
    ("model.diffusion_model.", Part.DIFFUSION_MODEL),
    ("model.high_noise_diffusion_model.", Part.DIFFUSION_MODEL),
    ("diffusion_model.", Part.DIFFUSION_MODEL),
    ("first_stage_model.bn.", Part.UNUSED),
    ("first_stage_model.", Part.VAE),
    ("vae.", Part.VAE),
    ("cond_stage_model.1.", Part.CLIP_G),
    ("cond_stage_model.", Part.CLIP_L),
    # The refiner of SDXL has OpenCLIP-G alone, as its first embedder.
    ("conditioner.embedders.0.model.", Part.CLIP_G),
    ("conditioner.embedders.0.", Part.CLIP_L),
    ("conditioner.embedders.1.", Part.CLIP_G),
    ("text_encoders.clip_l.", Part.CLIP_L),
    ("text_encoders.clip_g.", Part.CLIP_G),
    ("text_encoders.t5xxl.", Part.T5XXL),
    ("text_encoders.umt5xxl.", Part.T5XXL),
    ("text_encoders.llm.visual.", Part.LLM_VISION),
    ("text_encoders.clip_vision.", Part.CLIP_VISION),
    ("clip_vision.", Part.CLIP_VISION),
    ("control_model.", Part.CONTROL_NET),
    ("tae.", Part.TAESD),
    ("taesd.", Part.TAESD),
    ("model_ema.", Part.UNUSED),
    ("lora_unet_", Part.LORA),
    ("lora_te", Part.LORA),
    # Stand-alone files, whose names have no prefix of a component.
    ("encoder.block.", Part.T5XXL),
    ("encoder.final_layer_norm.", Part.T5XXL),
    ("enc.", Part.T5XXL),
    ("shared.", Part.T5XXL),
    ("encoder.layers.", Part.TAESD),
    ("decoder.layers.", Part.TAESD),
    ("encoder.", Part.VAE),
    ("decoder.", Part.VAE),
    ("quant_conv.", Part.VAE),
    ("post_quant_conv.", Part.VAE),
    # Wan's and Qwen-Image's autoencoder.
    ("conv1.", Part.VAE),
    ("conv2.", Part.VAE),
    ("text_model.", Part.CLIP_L),
    ("transformer.resblocks.", Part.CLIP_G),
    ("vision_model.", Part.CLIP_VISION),
    ("visual_projection.", Part.CLIP_VISION),
    ("visual.", Part.LLM_VISION),
    ("model.visual.", Part.LLM_VISION),
    ("v.", Part.LLM_VISION),
    ("mm.", Part.LLM_VISION),
    ("model.layers.", Part.LLM),
    ("model.language_model.", Part.LLM),
    ("model.embed_tokens.", Part.LLM),
    ("model.norm.", Part.LLM),
    ("lm_head.", Part.LLM),
    ("blk.", Part.LLM),
    ("token_embd.", Part.LLM),
    ("output_norm.", Part.LLM),
    ("output.weight", Part.LLM),
)
# All of them in one pass: the group that matched is the prefix's place. Models have up to 100,000 tensors.
_PREFIX = re.compile("|".join(f"({re.escape(prefix)})" for prefix, _ in _PREFIXES))
# text_encoders.NAME. of any other encoder is a language model's (qwen25_7b, qwen3_4b, mistral3_24b ...).
_OTHER_ENCODER = re.compile(r"text_encoders\.[^.]+\.(?P<vision>(?:transformer\.)?(?:model\.)?visual\.)?")
_LORA = re.compile(
    r"\.lora_?(?:up|down|A|B|a|b|mid)\b|\.lora\.(?:up|down)\.|\.hada_w[12]_|\.lokr_w[12]\b|\.dora_scale$"
)
# Schedules and averages that training code leaves in checkpoints; no engine opens them.
_SCHEDULE = re.compile(
    r"(?:model_ema\.|alphas_|betas$|sqrt_|log_one_minus_|posterior_|logvar$|denoiser\.|position_ids$)"
)
# First words of the names in a diffusion model's own file.
_DIFFUSION_WORD = re.compile(
    r"""(?x)(?:
      # UNet
      input_blocks | middle_block | output_blocks | time_embed | label_emb | out | down_blocks | mid_block | up_blocks
      | conv_in | conv_out | conv_norm_out | add_embedding | class_embedding
      # MMDiT, FLUX
      | double_blocks | single_blocks | joint_blocks | transformer_blocks | single_transformer_blocks | img_in | txt_in
      | txt_norm | time_in | vector_in | guidance_in | final_layer | double_stream_modulation_(?:img | txt)
      | single_stream_modulation | distilled_guidance_layer | [xty]_embedder | context_embedder | pos_embed
      | time_text_embed | time_guidance_embed | norm_out | proj_out | proj_in
      # Z-Image, Lumina
      | cap_embedder | noise_refiner | context_refiner | [xc]\w*_pad_token | layers | all_x_embedder | all_final_layer
      # Wan, LTX
      | patch_embedding | text_embedding | time_embedding | time_projection | img_emb | head | blocks | vace_blocks
      | vace_patch_embedding | condition_embedder | patchify_proj | adaln_single | caption_projection
      | scale_shift_table
    )(?:\.|$)"""
)
_CLIP_G_WIDTH = 1280
_VAE_PREFIXES = ("", "first_stage_model.", "vae.", "tae.", "taesd.")
# One of these names tells an image model's autoencoder from any other encoder and decoder.
_MARKS: dict[str, frozenset[str]] = {
    Part.VAE: frozenset(
        f"{side}.{first}.weight" for side in ("encoder", "decoder") for first in ("conv_in", "conv_in.conv", "conv1")
    ),
    Part.TAESD: frozenset({"decoder.layers.0.weight", "encoder.layers.0.weight"}),
}
_MODEL_PREFIXES = ("model.diffusion_model.", "diffusion_model.")

# Model width to name, where the structure leaves open which size of a line it is.
_FLUX2 = {6144: "flux2", 4096: "klein9b", 3072: "klein4b"}
_WAN = {1536: "1.3b", 5120: "14b"}

Shapes = Mapping[str, tuple[int, ...]]


def component_of(name: str) -> str:
    """The component that a tensor of a checkpoint or part file belongs to, by its name; "" when the name is nobody's.

    A text encoder's own file is told from its twins only by its shapes; see `standalone_component`.
    """
    if _LORA.search(name):
        return Part.LORA
    if _SCHEDULE.match(name):
        return Part.UNUSED
    prefix = _PREFIX.match(name)
    if prefix and prefix.lastindex:
        return _PREFIXES[prefix.lastindex - 1][1]
    encoder = _OTHER_ENCODER.match(name)
    if encoder:
        return Part.LLM_VISION if encoder["vision"] else Part.LLM
    return Part.DIFFUSION_MODEL if _DIFFUSION_WORD.match(name) else ""


def standalone_component(tensors: Sequence[TensorFact]) -> str:
    """The component that a part file as a whole is, "" when it holds several or none that is known.

    CLIP-G has the names of CLIP-L and is wider; a T5 encoder in GGUF has a language model's `token_embd`. Words that
    others use too (`encoder`, `layers`) count only beside what makes them an image model's.
    """
    found: dict[str, int] = {}
    widths: set[int] = set()
    names = {tensor.name for tensor in tensors}
    for tensor in tensors:
        part = component_of(tensor.name)
        found[part] = found.get(part, 0) + 1
        if part == Part.CLIP_L and tensor.name.endswith("token_embedding.weight"):
            widths.update(tensor.shape)
    found.pop(Part.UNUSED, None)
    if not found:
        return ""
    if Part.LLM in found and found.keys() <= {Part.LLM, Part.T5XXL}:
        return Part.T5XXL if found.get(Part.T5XXL) else Part.LLM
    part = max(found, key=lambda name: found[name])
    if found[part] * 10 < 9 * sum(found.values()):
        return ""
    if part != Part.DIFFUSION_MODEL and Part.DIFFUSION_MODEL in found and architecture_of(tensors):
        return ""  # a checkpoint, however few of its tensors are the diffusion model's
    if part == Part.CLIP_L and (Part.CLIP_G in found or _CLIP_G_WIDTH in widths):
        return Part.CLIP_G
    if part == Part.DIFFUSION_MODEL and not architecture_of(tensors):
        return ""
    if part in _MARKS and not any(
        name.removeprefix(prefix) in _MARKS[part] for name in names for prefix in _VAE_PREFIXES
    ):
        return ""
    return part


def architecture_of(tensors: Iterable[TensorFact]) -> str:
    """The architecture of the diffusion model among some tensors, "" when there is none that is known.

    One of sd15, sd21, sdxl, sdxl_refiner, sdxs512, sd1_tiny, svd, sd3m, sd35m, sd35l, flux1, chroma, flux2, klein4b,
    klein9b, klein (another size of it), zimage, lumina2, qwen_image, wan21_1.3b, wan21_14b, wan21_i2v_14b,
    wan21_vace_1.3b, wan21_vace_14b, wan22_5b, hunyuan_video, ltx_video, ltx2.
    """
    shapes = {_bare(tensor.name): tensor.shape for tensor in tensors}
    for rule in (_unet, _flux, _sd3, _wan, _rest):
        found = rule(shapes)
        if found:
            return found
    return ""


def _bare(name: str) -> str:
    for prefix in _MODEL_PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def _unet(shapes: Shapes) -> str:
    """UNets, named by the original code or by diffusers."""
    first = shapes.get("input_blocks.0.0.weight") or (
        shapes.get("conv_in.weight") if "down_blocks.0.resnets.0.conv1.weight" in shapes else None
    )
    if first is None:
        return ""
    if any(".time_stack." in name or ".temporal_transformer_blocks." in name for name in shapes):
        return "svd"
    if 384 in first:
        return "sdxl_refiner"
    context: set[int] = set()
    for name, shape in shapes.items():
        if name.endswith("attn2.to_k.weight"):
            context.update(shape)
    if 2048 in context:
        return "sdxl"
    if 1024 in context:
        return "sd21"
    if 768 not in context:
        return ""
    if "middle_block.1.norm.weight" in shapes or "mid_block.attentions.0.norm.weight" in shapes:
        return "sd15"
    early = ("input_blocks.1.1.norm.weight", "down_blocks.0.attentions.0.norm.weight")
    return "sd1_tiny" if any(name in shapes for name in early) else "sdxs512"


def _flux(shapes: Shapes) -> str:
    """FLUX.1, FLUX.2 and what is built like them."""
    if not any(
        name in shapes for name in ("double_blocks.0.img_mod.lin.weight", "double_blocks.0.img_attn.qkv.weight")
    ):
        return _flux_by_diffusers(shapes)
    if any(name.startswith("double_stream_modulation_img.") for name in shapes):
        guided = any(name.startswith("guidance_in.") for name in shapes)
        return _sized(_FLUX2, shapes.get("img_in.weight", ()), "flux2" if guided else "klein")
    if any(name.startswith("distilled_guidance_layer.") for name in shapes):
        return "chroma"
    return "flux1"


def _flux_by_diffusers(shapes: Shapes) -> str:
    if (
        "double_blocks.0.img_attn_qkv.weight" in shapes
        or "context_embedder.token_refiner.refiner_blocks.0.norm1.weight" in shapes
    ):
        return "hunyuan_video"
    if not any(name.startswith("single_transformer_blocks.0.") for name in shapes):
        return ""
    if any(name.startswith("double_stream_modulation_img.") for name in shapes):
        guided = any(".guidance_embedder." in name for name in shapes)
        return _sized(_FLUX2, shapes.get("x_embedder.weight", ()), "flux2" if guided else "klein")
    if any(name.startswith("distilled_guidance_layer.") for name in shapes):
        return "chroma"
    return "flux1"


def _sd3(shapes: Shapes) -> str:
    """Stable Diffusion 3 and 3.5."""
    if "joint_blocks.0.x_block.attn.qkv.weight" in shapes:
        depth, second = _depth(shapes, "joint_blocks"), "joint_blocks.0.x_block.attn2.qkv.weight"
    elif "pos_embed.pos_embed" in shapes and "transformer_blocks.0.attn.add_q_proj.weight" in shapes:
        depth, second = _depth(shapes, "transformer_blocks"), "transformer_blocks.0.attn2.to_q.weight"
    else:
        return ""
    # 38 blocks is the large one; the medium ones differ in the second attention that 3.5 has in its first blocks.
    return "sd35l" if depth > 30 else "sd35m" if second in shapes else "sd3m"


def _wan(shapes: Shapes) -> str:
    """Wan 2.1 and 2.2; the two halves of Wan 2.2 A14B are built like Wan 2.1's 14 B."""
    head = shapes.get("head.head.weight")
    if head is None and "condition_embedder.time_proj.weight" in shapes:
        head = shapes.get("proj_out.weight")
    if head is None or "patch_embedding.weight" not in shapes:
        return ""
    if 192 in head:
        return "wan22_5b"
    width = max(head)
    size = _WAN.get(width)
    if size is None:
        return ""
    if any(name.startswith("vace_blocks.") for name in shapes):
        return f"wan21_vace_{size}"
    elements = 1
    for side in shapes["patch_embedding.weight"]:
        elements *= side
    # A patch is 1 x 2 x 2 latent cells; image-to-video adds 20 channels (a mask and the first frame) to the 16.
    channels = elements // (4 * width)
    with_image = channels > 16 or any(
        name.startswith(("img_emb.", "condition_embedder.image_embedder.")) for name in shapes
    )
    return f"wan21_i2v_{size}" if with_image else f"wan21_{size}"


def _rest(shapes: Shapes) -> str:
    """Z-Image, Qwen-Image and LTX."""
    if any(name.startswith(("cap_embedder.", "all_x_embedder.")) for name in shapes) and any(
        name.startswith("noise_refiner.0.") for name in shapes
    ):
        caption = shapes.get("cap_embedder.1.weight", ())
        return "zimage" if 3840 in caption else "lumina2"
    if "txt_norm.weight" in shapes and "transformer_blocks.0.attn.add_q_proj.weight" in shapes:
        return "qwen_image"
    if "transformer_blocks.0.attn1.to_q.weight" in shapes and any(
        name in shapes for name in ("patchify_proj.weight", "proj_in.weight")
    ):
        return (
            "ltx2"
            if any(name.startswith(("audio_patchify_proj.", "audio_proj_in.")) for name in shapes)
            else "ltx_video"
        )
    return ""


def _sized(names: Mapping[int, str], shape: tuple[int, ...], otherwise: str) -> str:
    return next((names[side] for side in shape if side in names), otherwise)


def _depth(shapes: Shapes, blocks: str) -> int:
    """Number of blocks of one kind."""
    start = f"{blocks}."
    return len({name[len(start) :].split(".", 1)[0] for name in shapes if name.startswith(start)})
