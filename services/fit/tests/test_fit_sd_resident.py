"""Weights in sd-server's memory: equal to what the engine allocated, to the byte."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sd_data import facts, facts_of, rows, stored, tables
from weighbridge_fit.facts import TensorFact, WeightFormat
from weighbridge_fit.laws.sd_resident import BLOCKS, Family, Retyping, family_of, resident_bytes, resident_type
from weighbridge_fit.model import Model
from weighbridge_fit.plans.sd.architecture import architecture_of_model
from weighbridge_fit.plans.sd.options import retyping
from weighbridge_fit.plans.sd.parts import PICTURE, TEXT, parts_of, quantization_in
from weighbridge_fit.plans.sd.weights import held_bytes
from weighbridge_fit.recognise.stable_diffusion import architecture_of

MEASURED = [row for row in rows() if "params_bytes" in row]


def by_group(model: Model, conversion: Retyping) -> dict[str, int]:
    """Expected bytes per group of components, as the engine's log adds them up."""
    architecture = architecture_of_model(model)
    sums: Counter[str] = Counter()
    for part in parts_of(model, architecture):
        held = held_bytes(part, family_of(architecture), conversion, on_card=False)
        assert held.bytes.low == held.bytes.expected == held.bytes.high
        group = "text_encoder" if part.component in TEXT else "vae" if part.component in PICTURE else "diffusion"
        sums[group] += held.bytes.expected
    return dict(sums)


def conversion_of(row: dict[str, Any]) -> Retyping:
    flags = row["flags"]
    return retyping(
        flags[flags.index("--type") + 1] if "--type" in flags else "",
        flags[flags.index("--tensor-type-rules") + 1] if "--tensor-type-rules" in flags else "",
    )


def test_resident_bytes_equal_every_measured_row_to_the_byte() -> None:
    """Sized rows are exact; logs of real launches print MiB with two digits, so those are equal to 0.005 MiB."""
    made: dict[str, dict[str, int]] = {}
    exact = rounded = 0
    for row in MEASURED:
        key = f"{row['arch']} {row['file_type']} {conversion_of(row)}"
        if key not in made:
            made[key] = by_group(Model(facts_of(row["arch"], row["file_type"])), conversion_of(row))
        if row["kind"] == "real":
            difference = {group: abs(made[key][group] - size) for group, size in row["params_bytes"].items()}
            assert max(difference.values()) <= 0.005 * 2**20 + 1, (key, difference)
            rounded += 1
        else:
            assert made[key] == row["params_bytes"], key
            exact += 1
    print(f"{exact} sized rows to the byte in {len(made)} combinations, {rounded} real launches to what the log prints")
    assert (exact, rounded) == (1720, 18)


def test_every_tensor_of_an_f16_file_has_the_type_that_the_engine_gave_it() -> None:
    for architecture, tensors in tables().items():
        family = family_of(architecture)
        for name, shape, kept in tensors:
            fact = stored(name, shape, "F16")
            found = resident_type(name, fact.dtype, shape, shape[-1], family, Retyping())
            assert found.lower() == kept, (architecture, name)


@pytest.mark.parametrize("architecture", sorted(tables()))
def test_the_tensors_alone_say_which_architecture_it_is(architecture: str) -> None:
    same = {"flux1dev": "flux1", "flux1schnell": "flux1", "flux2dev": "flux2"}
    same |= {"qwenimage": "qwen_image", "qwenedit": "qwen_image"}
    found = architecture_of(fact for _, fact in facts_of(architecture, "F16").tensors)
    assert found == same.get(architecture, architecture)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "family", "kept"),
    [
        # Each row of the engine's table, by hand.
        ("model.diffusion_model.norm.weight", "BF16", (640,), Family.OTHER, "F32"),
        ("model.diffusion_model.proj.bias", "F16", (640,), Family.OTHER, "F32"),
        ("model.diffusion_model.conv.weight", "F32", (4, 4, 3, 3), Family.OTHER, "F16"),
        ("model.diffusion_model.conv.weight", "F8_E4M3", (4, 4, 3, 3), Family.OTHER, "F16"),
        ("first_stage_model.conv.weight", "BF16", (4, 4, 3, 3, 3), Family.OTHER, "F16"),
        ("model.diffusion_model.to_q.weight", "BF16", (64, 64), Family.OTHER, "BF16"),
        ("model.diffusion_model.to_q.weight", "F8_E5M2", (64, 64), Family.OTHER, "F16"),
        ("model.diffusion_model.to_q.weight", "F64", (64, 64), Family.OTHER, "F32"),
        ("model.diffusion_model.to_q.weight", "Q4_K", (64, 256), Family.OTHER, "Q4_K"),
        ("model.diffusion_model.to_q.weight", "Q4_K", (64, 320), Family.OTHER, "F32"),
        ("text_encoders.llm.model.embed_tokens.weight", "BF16", (8, 256), Family.OTHER, "F32"),
        ("text_encoders.llm.token_embd.weight", "Q4_K", (8, 256), Family.OTHER, "F32"),
        ("text_encoders.llm.token_embd.weight", "Q6_K", (8, 256), Family.OTHER, "F32"),
        ("text_encoders.llm.token_embd.weight", "Q8_0", (8, 256), Family.OTHER, "Q8_0"),
        ("text_encoders.t5xxl.transformer.shared.weight", "Q5_1", (8, 256), Family.OTHER, "Q5_1"),
        ("cond_stage_model.transformer.text_model.embeddings.position_embedding.weight", "F16", (77, 768),
         Family.OTHER, "F32"),
        ("model.diffusion_model.pos_embed", "F16", (1, 36864, 1536), Family.SD3, "F32"),
        ("model.diffusion_model.context_embedder.weight", "F16", (1536, 4096), Family.SD3, "F32"),
        ("model.diffusion_model.context_embedder.weight", "F16", (1536, 4096), Family.OTHER, "F16"),
        ("model.diffusion_model.final_layer.linear.weight", "F16", (64, 1536), Family.SD3, "F32"),
        ("model.diffusion_model.final_layer.linear.weight", "F16", (64, 3840), Family.ZIMAGE, "F32"),
        ("model.diffusion_model.final_layer.linear.weight", "F16", (64, 3072), Family.OTHER, "F16"),
        ("model.diffusion_model.blocks.0.modulation", "BF16", (1, 6, 1536), Family.WAN, "F32"),
    ],
)  # fmt: skip
def test_each_rule_of_the_engine(name: str, dtype: str, shape: tuple[int, ...], family: Family, kept: str) -> None:
    assert resident_type(name, dtype, shape, shape[-1], family, Retyping()) == kept


@pytest.mark.parametrize(
    "name",
    [
        "model_ema.diffusion_model.weight",
        "alphas_cumprod",
        "denoiser.sigmas",
        "text_encoders.llm.lm_head.weight",
        "text_encoders.llm.output.weight",
        "text_encoders.t5xxl.transformer.encoder.embed_tokens.weight",
        "cond_stage_model.transformer.text_model.embeddings.position_ids",
        "first_stage_model.bn.running_mean",
    ],
)
def test_what_the_engine_does_not_open_costs_nothing(name: str) -> None:
    fact = TensorFact(name, "F16", (64, 64), 4096, 8192)
    assert resident_bytes(fact, name, 64) == 0


@pytest.mark.parametrize(
    ("name", "to", "kept"),
    [
        ("model.diffusion_model.double_blocks.0.img_attn.qkv.weight", "q4_K", "Q4_K"),
        ("model.diffusion_model.img_in.weight", "q4_K", "F16"),
        ("model.diffusion_model.final_layer.linear.weight", "q8_0", "F16"),
        ("model.diffusion_model.time_embed.0.weight", "q8_0", "F16"),
        ("model.diffusion_model.x.scale", "q8_0", "F16"),
        # The keep-list has "embedding", which embed_tokens is not: it is retyped, and a K-quant of it becomes F32.
        ("text_encoders.llm.model.embed_tokens.weight", "q4_K", "F32"),
        ("cond_stage_model.transformer.text_model.embeddings.token_embedding.weight", "q4_0", "F16"),
    ],
)
def test_retyping_leaves_the_keep_list_alone(name: str, to: str, kept: str) -> None:
    assert resident_type(name, "F16", (256, 256), 256, Family.OTHER, retyping(to, "")) == kept


def test_a_row_that_does_not_fill_a_block_is_not_retyped() -> None:
    name = "model.diffusion_model.input_blocks.1.1.proj_in.weight"
    assert resident_type(name, "F16", (320, 320), 320, Family.OTHER, retyping("q4_K", "")) == "F16"
    assert resident_type(name, "F16", (320, 320), 320, Family.OTHER, retyping("q4_0", "")) == "Q4_0"


def test_rules_win_over_the_type_for_all_and_the_first_that_is_found_decides() -> None:
    made = retyping("q8_0", "attn=f16,^model\\.=q4_0")
    assert made.type_for("model.diffusion_model.attn.weight") == "F16"
    assert made.type_for("model.diffusion_model.mlp.weight") == "Q4_0"
    assert made.type_for("text_encoders.llm.x") == "Q8_0"


def test_a_language_model_in_gguf_is_read_along_its_fastest_dimension() -> None:
    """GGUF gives the fastest dimension first: 2560 x 32 has rows of 2560."""
    diffusion = facts_of("klein4b", "Q4_0")
    only = tuple(pair for pair in diffusion.tensors if pair[1].name.startswith("model.diffusion_model."))
    kept = (("", TensorFact("blk.0.attn_q.weight", "Q4_K", (2560, 33), 84_480, 47_520)),)
    llm = replace(facts(kept), format=WeightFormat.GGUF)
    parts = parts_of(Model(facts(only), {"llm": llm}), "klein4b")
    held = {part.component: held_bytes(part, Family.OTHER, Retyping(), on_card=False) for part in parts}
    assert held["llm"].bytes.expected == 2560 * 33 // 256 * 144


def test_a_tiny_autoencoder_takes_the_place_of_the_full_one() -> None:
    tiny = facts((("", TensorFact("decoder.layers.0.weight", "F16", (64, 4, 3, 3), 2304, 4608)),))
    components = {part.component for part in parts_of(Model(facts_of("sd15", "F16"), {"taesd": tiny}), "sd15")}
    assert components == {"diffusion_model", "clip_l", "taesd"}


def test_surplus_tensors_of_a_text_encoder_are_not_counted() -> None:
    names = {
        "text_model.encoder.layers.0.mlp.fc1.weight": (3072, 768),
        "text_projection.weight": (768, 768),
        "vision_model.embeddings.class_embedding": (768,),
        "logit_scale": (),
    }
    tensors = tuple(("", TensorFact(name, "F16", shape, prod(shape), 2 * prod(shape))) for name, shape in names.items())
    flux = facts_of("flux1dev", "Q4_0")
    main = facts(tuple(pair for pair in flux.tensors if pair[1].name.startswith("model.diffusion_model.")))
    parts = parts_of(Model(main, {"clip_l": facts(tensors)}), "flux1")
    clip = next(part for part in parts if part.component == "clip_l")
    assert held_bytes(clip, Family.OTHER, Retyping(), on_card=False).bytes.expected == 3072 * 768 * 2


def test_an_original_checkpoint_of_sdxl_is_read_by_its_own_names() -> None:
    """OpenCLIP's names and a fused projection: 3 x 1280 rows in one tensor, as many bytes as three."""
    names = {
        "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
        "conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight": (49408, 768),
        "conditioner.embedders.1.model.transformer.resblocks.0.attn.in_proj_weight": (3840, 1280),
        "conditioner.embedders.1.model.text_projection": (1280, 1280),
        "conditioner.embedders.1.model.logit_scale": (),
        "first_stage_model.decoder.mid.attn_1.q.weight": (512, 512, 1, 1),
        "model_ema.decay": (),
        "loss.logvar": (1,),
    }
    tensors = tuple(("", TensorFact(name, "F16", shape, prod(shape), 2 * prod(shape))) for name, shape in names.items())
    held = {
        part.component: held_bytes(part, Family.OTHER, Retyping(), on_card=False).bytes.expected
        for part in parts_of(Model(facts(tensors)), "sdxl")
    }
    assert held == {
        "diffusion_model": 320 * 4 * 9 * 2,
        "clip_l": 49408 * 768 * 2,
        "clip_g": 3840 * 1280 * 2 + 1280 * 1280 * 4,
        "vae": 512 * 512 * 2,
    }


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("flux1-dev-Q4_K_S.gguf", "Q4_K_S"),
        ("t5xxl_fp8_e4m3fn.safetensors", "F8_E4M3FN"),
        ("sd_xl_turbo_1.0_fp16.safetensors", "F16"),
        ("Qwen3-4B-Q4_K_M.gguf", "Q4_K_M"),
        ("x-IQ2_XXS.gguf", "IQ2_XXS"),
        ("model-bf16.safetensors", "BF16"),
        ("model-mxfp4.gguf", "MXFP4"),
        ("clip_l.safetensors", ""),
        ("v1-5-pruned-emaonly.safetensors", ""),
    ],
)
def test_a_file_name_tells_its_quantisation(name: str, found: str) -> None:
    assert quantization_in(name) == found


@given(st.sampled_from(sorted(BLOCKS)), st.integers(1, 64), st.integers(1, 64), st.sampled_from([32, 128, 256]))
def test_a_tensor_never_holds_less_than_its_elements_need(dtype: str, high: int, wide: int, alignment: int) -> None:
    """And never more than four bytes for each, beyond the padding."""
    row = wide * 256
    name = "model.diffusion_model.w.weight"
    size = resident_bytes(TensorFact(name, dtype, (high, row), high * row, 1), name, row, alignment=alignment)
    if dtype == "I32":
        assert size == 0
        return
    assert high * row * 1.5 / 8 <= size <= high * row * 4 + alignment
    assert size % alignment == 0


def test_a_tensor_more_never_costs_less() -> None:
    whole = facts_of("sd15", "F16")
    fewer = facts(whole.tensors[:-40])
    assert sum(by_group(Model(fewer), Retyping()).values()) < sum(by_group(Model(whole), Retyping()).values())
