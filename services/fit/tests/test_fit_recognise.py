"""Whose tensors are these: architectures and components by names and shapes, roles by what a file says of itself."""

import pytest
from sd_data import tables
from weighbridge_fit.facts import Role, TensorFact
from weighbridge_fit.recognise.roles import role_of_config, role_of_gguf
from weighbridge_fit.recognise.stable_diffusion import architecture_of, component_of, standalone_component

# The engine's own names for what it loads, and ours; two FLUX.1 and two Qwen-Image models are built alike.
ARCHITECTURES = {
    "flux1dev": "flux1",
    "flux1schnell": "flux1",
    "flux2dev": "flux2",
    "qwenedit": "qwen_image",
    "qwenimage": "qwen_image",
}
COMPONENTS = {
    "cond_stage_model.transformer": "clip_l",
    "cond_stage_model.1": "clip_g",
    "text_encoders.clip_l": "clip_l",
    "text_encoders.clip_g": "clip_g",
    "text_encoders.t5xxl": "t5xxl",
    "text_encoders.llm": "llm",
    "model.diffusion_model": "diffusion_model",
    "first_stage_model": "vae",
    "tae": "taesd",
}
PREFIXES = sorted(COMPONENTS, key=len, reverse=True)


def tensors_of(name: str, reverse: bool = False) -> list[TensorFact]:
    step = -1 if reverse else 1
    return [TensorFact(tensor, "F16", shape[::step], 0, 0) for tensor, shape, _ in tables()[name]]


@pytest.mark.parametrize("name", sorted(tables()))
@pytest.mark.parametrize("reverse", [False, True], ids=["safetensors", "gguf"])
def test_measured_architectures_are_told_whole_and_by_their_diffusion_model_alone(name: str, reverse: bool) -> None:
    tensors = tensors_of(name, reverse)
    expected = ARCHITECTURES.get(name, name)
    assert architecture_of(tensors) == expected
    prefix = "model.diffusion_model."
    alone = [tensor for tensor in tensors if tensor.name.startswith(prefix)]
    assert architecture_of(alone) == expected
    bare = [tensor._replace(name=tensor.name.removeprefix(prefix)) for tensor in alone]
    assert architecture_of(bare) == expected
    assert standalone_component(bare) == "diffusion_model"
    rest = [tensor for tensor in tensors if not tensor.name.startswith(prefix)]
    assert architecture_of(rest) == ""


@pytest.mark.parametrize("name", sorted(tables()))
def test_components_of_measured_checkpoints(name: str) -> None:
    for tensor in tensors_of(name):
        prefix = next(prefix for prefix in PREFIXES if tensor.name.startswith(prefix + "."))
        expected = COMPONENTS[prefix]
        if ".visual." in tensor.name:
            expected = "llm_vision"
        if not tensor.name.startswith("first_stage_model.bn."):
            assert component_of(tensor.name) == expected, tensor.name


@pytest.mark.parametrize(
    ("architecture", "prefix", "component"),
    [
        ("sd15", "cond_stage_model.transformer.", "clip_l"),
        ("sdxl", "cond_stage_model.1.transformer.", "clip_g"),
        ("flux1dev", "text_encoders.clip_l.transformer.", "clip_l"),
        ("sd3m", "text_encoders.clip_g.transformer.", "clip_g"),
        ("flux1dev", "text_encoders.t5xxl.transformer.", "t5xxl"),
        ("wan21_1.3b", "text_encoders.t5xxl.transformer.", "t5xxl"),
        ("klein4b", "text_encoders.llm.", "llm"),
        ("flux1dev", "first_stage_model.", "vae"),
        ("klein4b", "first_stage_model.", "vae"),
        ("wan21_14b", "first_stage_model.", "vae"),
        ("qwenimage", "first_stage_model.", "vae"),
        ("sdxs512", "tae.", "taesd"),
    ],
)
def test_part_files_are_told_without_a_prefix(architecture: str, prefix: str, component: str) -> None:
    part = [
        tensor._replace(name=tensor.name.removeprefix(prefix))
        for tensor in tensors_of(architecture)
        if tensor.name.startswith(prefix)
    ]
    assert part
    assert standalone_component(part) == component


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("conditioner.embedders.0.transformer.text_model.final_layer_norm.weight", "clip_l"),
        ("conditioner.embedders.1.model.ln_final.weight", "clip_g"),
        ("cond_stage_model.model.ln_final.weight", "clip_l"),
        ("text_encoders.qwen25_7b.transformer.model.layers.0.mlp.up_proj.weight", "llm"),
        ("text_encoders.qwen25_7b.transformer.visual.blocks.0.norm1.weight", "llm_vision"),
        ("vae.decoder.conv_in.weight", "vae"),
        ("control_model.input_blocks.0.0.weight", "control_net"),
        ("model_ema.decay", "unused"),
        ("alphas_cumprod", "unused"),
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight", "lora"),
        ("transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight", "lora"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight", "lora"),
        ("model.layers.0.self_attn.q_proj.lora_a", "lora"),
        ("unet.down_blocks.0.attn.processor.to_k_lora.lora.down.weight", "lora"),
        ("vision_model.encoder.layers.0.mlp.fc1.weight", "clip_vision"),
        ("some.other.weight", ""),
    ],
)
def test_names_of_other_tools(name: str, component: str) -> None:
    assert component_of(name) == component


@pytest.mark.parametrize(
    "names",
    [
        # BERT, BART, Whisper, Meta's LLaMA: encoders, decoders and layers that are no image model's.
        ["encoder.layer.0.attention.self.query.weight", "encoder.layer.1.attention.self.query.weight"],
        ["encoder.layers.0.self_attn.k_proj.weight", "decoder.layers.0.self_attn.k_proj.weight"],
        ["layers.0.attention.wq.weight", "layers.0.feed_forward.w1.weight", "norm.weight"],
        ["a", "b"],
        [],
    ],
)
def test_other_models_are_no_part_of_an_image_model(names: list[str]) -> None:
    tensors = [TensorFact(name, "F16", (8, 8), 64, 128) for name in names]
    assert standalone_component(tensors) == ""
    assert architecture_of(tensors) == ""


@pytest.mark.parametrize(
    ("shapes", "architecture"),
    [
        ({"down_blocks.0.resnets.0.conv1.weight": (320, 320, 3, 3), "conv_in.weight": (320, 4, 3, 3),
          "down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.weight": (640, 2048)}, "sdxl"),
        ({"down_blocks.0.resnets.0.conv1.weight": (320, 320, 3, 3), "conv_in.weight": (320, 4, 3, 3),
          "down_blocks.0.attentions.0.norm.weight": (320,), "mid_block.attentions.0.norm.weight": (1280,),
          "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight": (320, 768)}, "sd15"),
        ({"pos_embed.pos_embed": (1, 9, 1536), "transformer_blocks.0.attn.add_q_proj.weight": (1536, 1536)}, "sd3m"),
        ({"single_transformer_blocks.0.attn.to_q.weight": (3072, 3072), "x_embedder.weight": (3072, 64)}, "flux1"),
        ({"single_transformer_blocks.0.attn.to_q.weight": (4096, 4096), "x_embedder.weight": (4096, 128),
          "double_stream_modulation_img.linear.weight": (24576, 4096)}, "klein9b"),
        ({"condition_embedder.time_proj.weight": (18432, 3072), "proj_out.weight": (192, 3072),
          "patch_embedding.weight": (3072, 48, 1, 2, 2)}, "wan22_5b"),
        ({"head.head.weight": (64, 5120), "patch_embedding.weight": (5120, 36, 1, 2, 2),
          "img_emb.proj.0.weight": (1280,)}, "wan21_i2v_14b"),
        ({"head.head.weight": (64, 1536), "patch_embedding.weight": (1536, 16, 1, 2, 2),
          "vace_blocks.0.self_attn.q.weight": (1536, 1536)}, "wan21_vace_1.3b"),
        ({"transformer_blocks.0.attn1.to_q.weight": (4096, 4096), "proj_in.weight": (4096, 128),
          "audio_proj_in.weight": (2048, 128)}, "ltx2"),
        ({"cap_embedder.1.weight": (2304, 2304), "noise_refiner.0.attention.qkv.weight": (6912, 2304)}, "lumina2"),
    ],
)  # fmt: skip
def test_structures_by_other_names_and_sizes(shapes: dict[str, tuple[int, ...]], architecture: str) -> None:
    """diffusers' names, and relatives of the measured models: shapes as the published configurations give them."""
    assert architecture_of([TensorFact(name, "F16", shape, 0, 0) for name, shape in shapes.items()]) == architecture


@pytest.mark.parametrize(
    ("config", "role", "made_for"),
    [
        # A DeepSpec drafter is recognised by its config's architecture alone.
        ({"architectures": ["Gemma4DSparkModel"]}, Role.DRAFTER, ""),
        ({"architectures": ["Gemma4DSparkModel"], "model_type": "gemma4", "hidden_size": 1}, Role.DRAFTER, ""),
        ({"architectures": ["LlamaForCausalLMEagle3"], "target_model": "meta/L"}, Role.DRAFTER, "meta/L"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, Role.DRAFTER, ""),
        ({"architectures": ["Eagle2_5_VLForConditionalGeneration"], "model_type": "eagle_2_5_vl"}, Role.MODEL, ""),
        ({"model_type": "medusa"}, Role.DRAFTER, ""),
        ({"architectures": ["CLIPVisionModelWithProjection"], "model_type": "clip_vision_model"}, Role.PROJECTOR, ""),
        ({"architectures": ["Qwen3ForCausalLM", "Gemma4DSparkModel"], "model_type": "qwen3"}, Role.MODEL, ""),
        ({"architectures": "Gemma4DSparkModel"}, Role.MODEL, ""),
        ({"architectures": [7], "model_type": ["eagle"]}, Role.MODEL, ""),
        ({}, Role.MODEL, ""),
    ],
)
def test_roles_by_configuration(config: dict[str, object], role: Role, made_for: str) -> None:
    found = role_of_config(config)
    assert (found.role, found.made_for) == (role, made_for)


@pytest.mark.parametrize(
    ("metadata", "names", "role"),
    [
        ({"general.architecture": "clip"}, ["v.patch_embd.weight"], Role.PROJECTOR),
        ({"general.type": "mmproj"}, ["mm.0.weight"], Role.PROJECTOR),
        ({"general.type": "adapter", "adapter.type": "lora"}, ["blk.0.attn_q.weight.lora_a"], Role.ADAPTER),
        ({"general.architecture": "deepseek4", "dspark.block_size": 5}, ["markov.w1"], Role.DRAFTER),
        ({"general.architecture": "x", "deepseek4.dspark.block_size": 5}, ["markov.w1"], Role.DRAFTER),
        ({"general.architecture": "eagle3"}, ["fc.weight"], Role.DRAFTER),
        ({"general.architecture": "deepseek4"}, ["mtp.0.attn.weight", "mtp.0.ffn.weight"], Role.DRAFTER),
        # A model with its own draft head is a model.
        ({"general.architecture": "glm"}, ["blk.0.attn_q.weight", "mtp.0.attn.weight"], Role.MODEL),
        ({"general.architecture": "llama", "general.type": 7}, ["blk.0.attn_q.weight"], Role.MODEL),
    ],
)
def test_roles_by_metadata(metadata: dict[str, object], names: list[str], role: Role) -> None:
    assert role_of_gguf(metadata, names).role is role


def test_a_gguf_file_says_what_it_was_made_for() -> None:
    metadata = {"general.type": "adapter", "general.base_model.0.name": "Qwen3 4B"}
    assert role_of_gguf(metadata, []).made_for == "Qwen3 4B"
