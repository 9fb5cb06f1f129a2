"""From files and folders of every kind to facts: what loads, what does not, what each part is, and what it is for."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fit_model_files import (
    CLIP_G,
    CLIP_L,
    FLUX,
    LANGUAGE,
    LLAMA_GGUF,
    LORA,
    SD15,
    T5,
    VAE,
    Shapes,
    write_gguf,
    write_json,
    write_pipeline,
    write_safetensors,
)
from weighbridge_fit.describe import describe
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import Role, WeightFacts, WeightFormat
from weighbridge_fit.models_root import ModelsRoot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def facts_of(path: Path, root: Path) -> WeightFacts:
    return describe(path, ModelsRoot(root).contains)


def size_of(shapes: Shapes, width: int = 2) -> int:
    total = 0
    for shape in shapes.values():
        elements = width
        for side in shape:
            elements *= side
        total += elements
    return total


def components(facts: WeightFacts) -> dict[str, int]:
    return {total.component: total.bytes for total in facts.components}


def names(facts: WeightFacts) -> list[str]:
    return [file.name for file in facts.files]


def refused(path: Path, root: Path) -> WeightError:
    with pytest.raises(WeightError) as caught:
        facts_of(path, root)
    return caught.value


# Single files.


def test_a_checkpoint_of_several_components(root: Path) -> None:
    facts = facts_of(write_safetensors(root / "sd15.safetensors", SD15), root)
    assert facts.architecture == "sd15"
    assert facts.role is Role.MODEL
    assert components(facts) == {
        "clip_l": 768 * 2,
        "diffusion_model": (320 * 4 * 9 + 320 * 768 + 1280) * 2,
        "unused": 2,
        "vae": 8 * 4 * 9 * 2,
    }


@pytest.mark.parametrize(
    ("shapes", "component", "architecture"),
    [
        (FLUX, "diffusion_model", "flux1"),
        (VAE, "vae", ""),
        (CLIP_L, "clip_l", ""),
        (CLIP_G, "clip_g", ""),
        (T5, "t5xxl", ""),
        (LANGUAGE, "model", ""),
        ({"a": (2,)}, "model", ""),
    ],
)
def test_part_files_name_their_component(root: Path, shapes: Shapes, component: str, architecture: str) -> None:
    facts = facts_of(write_safetensors(root / "part.safetensors", shapes), root)
    assert components(facts) == {component: size_of(shapes)}
    assert facts.architecture == architecture


def test_an_image_model_in_gguf_names_component_architecture_and_quantisation(root: Path) -> None:
    shapes = {name: (*shape[:-1], 32) if len(shape) == 2 else shape for name, shape in FLUX.items()}
    facts = facts_of(write_gguf(root / "flux-q4.gguf", shapes, "flux", quantised="Q4_0"), root)
    assert (facts.architecture, facts.quantization, facts.format) == ("flux1", "Q4_0", WeightFormat.GGUF)
    assert list(components(facts)) == ["diffusion_model"]


def test_a_torch_checkpoint(root: Path) -> None:
    torch = pytest.importorskip("torch")
    path = root / "v1.ckpt"
    torch.save({"state_dict": {name: torch.zeros(shape, dtype=torch.float16) for name, shape in SD15.items()}}, path)
    facts = facts_of(path, root)
    assert (facts.architecture, facts.format) == ("sd15", WeightFormat.TORCH_CHECKPOINT)
    assert components(facts) == components(facts_of(write_safetensors(root / "v1.safetensors", SD15), root))


def test_a_format_is_told_by_content_where_the_name_does_not(root: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.zeros(2)}, root / "blob1")
    write_safetensors(root / "x.safetensors", {"a": (2,)}).rename(root / "blob2")
    write_gguf(root / "x.gguf", LLAMA_GGUF).rename(root / "blob3")
    formats = [facts_of(root / f"blob{number}", root).format for number in (1, 2, 3)]
    assert formats == [WeightFormat.TORCH_CHECKPOINT, WeightFormat.SAFETENSORS, WeightFormat.GGUF]


# Folders.


def test_a_folder_of_quantisations_is_not_summed(root: Path) -> None:
    for quantisation in ("Q4_K_M", "Q8_0", "BF16"):
        write_gguf(root / f"m/llama-{quantisation}.gguf", LLAMA_GGUF)
    error = refused(root / "m", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert "llama-BF16.gguf, llama-Q4_K_M.gguf, llama-Q8_0.gguf" in error.message
    assert facts_of(root / "m/llama-Q8_0.gguf", root).tensor_bytes == size_of(LLAMA_GGUF)


def test_quantisations_in_folders_of_their_own_are_not_summed(root: Path) -> None:
    for quantisation in ("Q2_K", "Q4_K"):
        write_gguf(root / f"m/{quantisation}/llama-{quantisation}.gguf", LLAMA_GGUF)
    error = refused(root / "m", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert "Q2_K/llama-Q2_K.gguf" in error.message


def test_a_hundred_quantisations_are_refused_before_they_are_read_and_the_message_stays_short(root: Path) -> None:
    (root / "m").mkdir()
    for number in range(100):
        (root / f"m/llama-{number:03d}.gguf").write_bytes(b"GGUF, and nothing else")
    error = refused(root / "m", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert error.message.endswith("and 88 more")


def test_names_in_a_refusal_are_short_and_printable(root: Path) -> None:
    for name in ("a\nforged log line", "b" * 200):
        write_gguf(root / f"m/{name}.gguf", LLAMA_GGUF)
    message = refused(root / "m", root).message
    assert "\n" not in message
    assert len(message) < 300


def test_checkpoints_side_by_side_are_not_summed(root: Path) -> None:
    write_safetensors(root / "m/one.safetensors", SD15)
    write_safetensors(root / "m/two.safetensors", SD15)
    assert refused(root / "m", root).reason is WeightReason.SEVERAL_MODELS


def test_an_image_model_in_parts_is_summed_by_component(root: Path) -> None:
    write_gguf(root / "m/flux1-dev-Q4_K_S.gguf", FLUX, "flux")
    write_safetensors(root / "m/ae.safetensors", VAE)
    write_safetensors(root / "m/clip_l.safetensors", CLIP_L)
    write_safetensors(root / "m/t5xxl_fp16.safetensors", T5)
    facts = facts_of(root / "m", root)
    assert (facts.architecture, facts.format) == ("flux1", WeightFormat.MIXED)
    sizes = {"clip_l": CLIP_L, "diffusion_model": FLUX, "t5xxl": T5, "vae": VAE}
    assert components(facts) == {name: size_of(shapes) for name, shapes in sizes.items()}


def test_a_diffusion_model_and_its_language_model_in_gguf_are_parts(root: Path) -> None:
    write_gguf(root / "m/flux-2-klein.gguf", FLUX, "flux")
    write_gguf(root / "m/Qwen3-4B.gguf", LLAMA_GGUF, "qwen3")
    assert list(components(facts_of(root / "m", root))) == ["diffusion_model", "llm"]


def test_the_two_halves_of_a_video_model_are_parts(root: Path) -> None:
    wan = {
        "head.head.weight": (64, 5120),
        "patch_embedding.weight": (5120, 16, 1, 2, 2),
        "blocks.0.self_attn.q.weight": (8, 8),
    }
    write_safetensors(root / "m/wan2.2_t2v_high_noise_14B.safetensors", wan)
    write_safetensors(root / "m/wan2.2_t2v_low_noise_14B.safetensors", wan)
    facts = facts_of(root / "m", root)
    assert list(components(facts)) == ["diffusion_model", "high_noise_diffusion_model"]
    assert facts.architecture == "wan21_14b"


def test_a_projector_beside_a_model_is_not_part_of_it(root: Path) -> None:
    write_gguf(root / "m/llama.gguf", LLAMA_GGUF)
    write_gguf(root / "m/mmproj-F16.gguf", {"v.patch_embd.weight": (8, 8)}, "clip", kind="mmproj")
    facts = facts_of(root / "m", root)
    assert (names(facts), facts.role) == (["llama.gguf"], Role.MODEL)
    assert any("projector" in note for note in facts.notes)
    projector = facts_of(root / "m/mmproj-F16.gguf", root)
    assert (projector.role, components(projector)) == (Role.PROJECTOR, {"vision": 128})


def test_torch_copies_beside_safetensors_do_not_count(root: Path) -> None:
    torch = pytest.importorskip("torch")
    write_safetensors(root / "m/model.safetensors", LANGUAGE)
    write_json(root / "m/config.json", {"model_type": "other"})
    torch.save({"a": torch.zeros(99)}, root / "m/pytorch_model.bin")
    torch.save({"a": torch.zeros(99)}, root / "m/optimizer.pt")
    facts = facts_of(root / "m", root)
    assert (names(facts), facts.format) == (["model.safetensors"], WeightFormat.SAFETENSORS)
    (root / "m/model.safetensors").unlink()
    assert names(facts_of(root / "m", root)) == ["pytorch_model.bin"]


def test_torch_shards_with_an_index(root: Path) -> None:
    torch = pytest.importorskip("torch")
    (root / "m").mkdir()
    write_json(root / "m/config.json", {"model_type": "other"})
    for number in (1, 2):
        torch.save({f"t{number}": torch.zeros(4)}, root / f"m/pytorch_model-0000{number}-of-00002.bin")
    weight_map = {f"t{number}": f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)}
    write_json(root / "m/pytorch_model.bin.index.json", {"weight_map": weight_map})
    torch.save({"t1": torch.zeros(4), "t2": torch.zeros(4)}, root / "m/pytorch_model.bin")
    facts = facts_of(root / "m", root)
    assert facts.tensor_bytes == 32
    assert len(facts.files) == 2


def test_gguf_beside_a_transformers_folder_is_another_edition(root: Path) -> None:
    write_safetensors(root / "m/model.safetensors", LANGUAGE)
    write_gguf(root / "m/model-Q4.gguf", LLAMA_GGUF)
    write_json(root / "m/config.json", {"model_type": "other"})
    facts = facts_of(root / "m", root)
    assert names(facts) == ["model.safetensors"]
    assert any("other formats" in note for note in facts.notes)


def test_a_folder_of_models_asks_for_one(root: Path) -> None:
    write_pipeline(root / "shelf/one", "FluxPipeline", {"transformer": FLUX})
    write_pipeline(root / "shelf/two", "FluxPipeline", {"transformer": FLUX})
    error = refused(root / "shelf", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert "one, two" in error.message
    for name in ("a", "b"):
        write_safetensors(root / f"chats/{name}/model.safetensors", LANGUAGE)
        write_json(root / f"chats/{name}/config.json", {"model_type": "qwen3"})
        write_json(root / f"chats/{name}/tokenizer.json", {})
    assert refused(root / "chats", root).reason is WeightReason.SEVERAL_MODELS


def language_folder(folder: Path, *, tokenizer: bool = True) -> None:
    write_safetensors(folder / "model.safetensors", LANGUAGE)
    write_json(folder / "config.json", {"model_type": "other"})
    if tokenizer:
        write_json(folder / "tokenizer.json", {})


def test_a_folder_that_only_holds_models_of_unlike_kinds_names_them(root: Path) -> None:
    language_folder(root / "shelf/chat")
    write_safetensors(root / "shelf/pictures/sd15.safetensors", SD15)
    write_pipeline(root / "shelf/flux", "FluxPipeline", {"transformer": FLUX, "vae": VAE})
    error = refused(root / "shelf", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert error.message.endswith("name one of them: chat, flux, pictures")


@pytest.mark.parametrize("tokenizer", [True, False])
def test_models_below_their_makers_folders_are_named_from_the_folder_on(root: Path, tokenizer: bool) -> None:
    for name in ("maker/a", "maker/b"):
        language_folder(root / "shelf" / name, tokenizer=tokenizer)
    assert refused(root / "shelf", root).message.endswith("name one of them: maker/a, maker/b")


def test_checkpoints_in_folders_of_their_own_are_no_tree(root: Path) -> None:
    write_safetensors(root / "shelf/one/one.safetensors", SD15)
    write_safetensors(root / "shelf/two/two.safetensors", LANGUAGE)
    assert refused(root / "shelf", root).message.endswith("name one of them: one, two")


def test_a_model_beside_a_folder_of_parts_is_still_a_model(root: Path) -> None:
    language_folder(root / "shelf/chat")
    write_safetensors(root / "shelf/vae/ae.safetensors", VAE)
    assert refused(root / "shelf", root).message.endswith("name one of them: chat, vae")


def test_a_folder_around_one_model_says_where_it_is(root: Path) -> None:
    """As a cache of the hub keeps it."""
    language_folder(root / "around/snapshots/0123abc")
    error = refused(root / "around", root)
    assert error.reason is WeightReason.SEVERAL_MODELS
    assert "name snapshots/0123abc in it" in error.message
    assert facts_of(root / "around/snapshots/0123abc", root).format is WeightFormat.SAFETENSORS


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_tree_without_its_index_is_a_tree_and_one_in_a_folder_is_not(root: Path, tokenizer: bool) -> None:
    for name, shapes in {"transformer": FLUX, "vae": VAE}.items():
        write_safetensors(root / "around/tree" / name / "diffusion_pytorch_model.safetensors", shapes)
        write_json(root / "around/tree" / name / "config.json", {"_class_name": "Class"})
    language_folder(root / "around/tree/text_encoder", tokenizer=tokenizer)
    facts = facts_of(root / "around/tree", root)
    assert (facts.format, set(components(facts))) == (WeightFormat.DIFFUSERS, {"transformer", "vae", "text_encoder"})
    assert "name tree in it" in refused(root / "around", root).message


def test_parts_sorted_into_folders_are_one_model(root: Path) -> None:
    write_gguf(root / "m/big/flux1-dev-Q4_K_S.gguf", FLUX, "flux")
    write_safetensors(root / "m/small/ae.safetensors", VAE)
    assert facts_of(root / "m", root).format is WeightFormat.MIXED


# Diffusers trees.


def test_components_of_a_tree_are_those_of_its_pipeline(root: Path) -> None:
    parts = {"transformer": FLUX, "vae": VAE, "text_encoder": CLIP_L, "text_encoder_2": T5}
    tree = write_pipeline(root / "flux", "FluxPipeline", parts, image_encoder=[None, None], boundary_ratio=0.9)
    write_safetensors(tree / "flux1-dev.safetensors", FLUX)
    write_safetensors(tree / "image_encoder/model.safetensors", {"a": (9,)})
    write_safetensors(tree / "safety_checker/model.safetensors", {"a": (9,)})
    facts = facts_of(tree, root)
    assert (facts.architecture, facts.format) == ("FluxPipeline", WeightFormat.DIFFUSERS)
    assert components(facts) == {name: size_of(shapes) for name, shapes in parts.items()}
    notes = " ".join(facts.notes)
    assert "beside the components' folders do not load" in notes
    assert "image_encoder, safety_checker" in notes


def test_one_variant_of_a_component_loads(root: Path) -> None:
    tree = write_pipeline(root / "sd", "StableDiffusionPipeline", {"unet": {"a": (4,)}, "vae": {"v": (4,)}})
    write_safetensors(tree / "unet/diffusion_pytorch_model.fp16.safetensors", {"a": (4,)})
    write_safetensors(tree / "unet/diffusion_pytorch_model.non_ema.safetensors", {"a": (4,)})
    facts = facts_of(tree, root)
    assert components(facts) == {"unet": 8, "vae": 8}
    assert any("fp16, non_ema" in note for note in facts.notes)
    (tree / "unet/diffusion_pytorch_model.safetensors").unlink()
    assert names(facts_of(tree, root))[0] == "unet/diffusion_pytorch_model.fp16.safetensors"


def test_a_sharded_variant_has_an_index_of_its_own(root: Path) -> None:
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": FLUX})
    folder = tree / "transformer"
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    weight_map = {}
    for variant, dot in (("", ""), ("fp16", ".")):
        for number in (1, 2):
            name = f"diffusion_pytorch_model{dot}{variant}-0000{number}-of-00002.safetensors"
            write_safetensors(folder / name, {f"t{number}": (4,)}, "float16" if variant else "float32")
            weight_map[f"t{number}"] = name
        write_json(folder / f"diffusion_pytorch_model.safetensors.index{dot}{variant}.json", {"weight_map": weight_map})
    facts = facts_of(tree, root)
    assert components(facts) == {"transformer": 32}
    assert all("fp16" not in name for name in names(facts))


def test_torch_files_beside_a_components_safetensors_do_not_count(root: Path) -> None:
    torch = pytest.importorskip("torch")
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": FLUX, "vae": VAE})
    torch.save({"a": torch.zeros(99)}, tree / "vae/diffusion_pytorch_model.bin")
    assert components(facts_of(tree, root)) == {"transformer": size_of(FLUX), "vae": size_of(VAE)}
    (tree / "vae/diffusion_pytorch_model.safetensors").unlink()
    facts = facts_of(tree, root)
    assert components(facts)["vae"] == 99 * 4
    assert facts.format is WeightFormat.DIFFUSERS


def test_unsharded_duplicates_and_shards_without_an_index(root: Path) -> None:
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": {"a": (4,), "b": (4,)}})
    for number, name in ((1, "a"), (2, "b")):
        path = tree / f"transformer/diffusion_pytorch_model-0000{number}-of-00002.safetensors"
        write_safetensors(path, {name: (4,)})
    assert components(facts_of(tree, root)) == {"transformer": 16}


def test_weights_below_a_component_do_not_load(root: Path) -> None:
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": FLUX})
    write_safetensors(tree / "transformer/onnx/copy.safetensors", FLUX)
    assert components(facts_of(tree, root)) == {"transformer": size_of(FLUX)}


@pytest.mark.parametrize("content", ["{", "[]", '{"a": 1, "a": 2}', "{}", '{"_class_name": 7}'])
def test_a_broken_pipeline_leaves_a_tree_of_folders(root: Path, content: str) -> None:
    write_safetensors(root / "t/transformer/w.safetensors", FLUX)
    write_safetensors(root / "t/vae/w.safetensors", VAE)
    (root / "t/model_index.json").write_text(content)
    assert components(facts_of(root / "t", root)) == {"transformer": size_of(FLUX), "vae": size_of(VAE)}


def test_a_component_on_its_own_is_named_by_its_class(root: Path) -> None:
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": {"x": (8,)}, "vae": VAE})
    write_json(tree / "transformer/config.json", {"_class_name": "FluxTransformer2DModel"})
    write_json(tree / "vae/config.json", {"_class_name": "AutoencoderKL"})
    transformer, vae = facts_of(tree / "transformer", root), facts_of(tree / "vae", root)
    assert (transformer.architecture, list(components(transformer))) == ("FluxTransformer2DModel", ["diffusion_model"])
    assert (vae.architecture, list(components(vae))) == ("AutoencoderKL", ["vae"])


def test_wans_own_repository_keeps_checkpoints_beside_its_transformer(root: Path) -> None:
    torch = pytest.importorskip("torch")
    folder = root / "Wan2.1-T2V-1.3B"
    write_safetensors(folder / "diffusion_pytorch_model.safetensors", {"blocks.0.self_attn.q.weight": (8, 8)})
    write_json(folder / "config.json", {"_class_name": "WanModel", "model_type": "t2v"})
    for name, shapes in (("models_t5_umt5-xxl-enc-bf16.pth", T5), ("Wan2.1_VAE.pth", VAE)):
        torch.save({key: torch.zeros(shape, dtype=torch.float16) for key, shape in shapes.items()}, folder / name)
    facts = facts_of(folder, root)
    assert components(facts) == {"diffusion_model": 128, "t5xxl": size_of(T5), "vae": size_of(VAE)}


# Adapters, drafters, projectors.


def peft(folder: Path) -> None:
    names = ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight",)
    write_safetensors(folder / "adapter_model.safetensors", dict.fromkeys(names, (4, 8)))
    write_json(folder / "adapter_config.json", {"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-4B"})


def mlx(folder: Path) -> None:
    shapes = {"model.layers.0.self_attn.q_proj.lora_a": (8, 4)}
    write_safetensors(folder / "adapters.safetensors", shapes)
    write_safetensors(folder / "0000100_adapters.safetensors", shapes)
    write_json(folder / "adapter_config.json", {"fine_tune_type": "lora", "model": "Qwen/Qwen3-4B"})


@pytest.mark.parametrize("write", [peft, mlx])
def test_adapter_folders(root: Path, write: Callable[[Path], None]) -> None:
    write(root / "a")
    facts = facts_of(root / "a", root)
    assert (facts.role, facts.made_for) == (Role.ADAPTER, "Qwen/Qwen3-4B")
    assert components(facts) == {"lora": 64}


def test_an_adapter_in_one_file(root: Path) -> None:
    path = write_safetensors(root / "style.safetensors", LORA, metadata={"ss_sd_model_name": "flux1-dev.safetensors"})
    facts = facts_of(path, root)
    assert (facts.role, facts.made_for) == (Role.ADAPTER, "flux1-dev.safetensors")
    assert components(facts) == {"lora": size_of(LORA)}


def test_scales_beside_an_adapters_pairs_are_part_of_it(root: Path) -> None:
    names = ("lora_A.weight", "lora_B.weight", "alpha")
    shapes = {f"transformer.blocks.0.attn1.to_q.{name}": (4, 4) for name in names}
    assert facts_of(write_safetensors(root / "wan-style.safetensors", shapes), root).role is Role.ADAPTER
    merged = {**shapes, "transformer.blocks.0.attn1.to_q.weight": (4, 4)}
    assert facts_of(write_safetensors(root / "merged.safetensors", merged), root).role is Role.MODEL


def test_a_deepspec_drafter_is_recognised_by_its_architecture_alone(root: Path) -> None:
    shapes = {"embed_tokens.weight": (16, 8), "fc.weight": (8, 24), "layers.0.self_attn.q_proj.weight": (8, 8)}
    write_safetensors(root / "d/model.safetensors", shapes)
    write_json(root / "d/config.json", {"architectures": ["Gemma4DSparkModel"], "block_size": 5})
    facts = facts_of(root / "d", root)
    assert (facts.role, facts.architecture) == (Role.DRAFTER, "Gemma4DSparkModel")
    assert components(facts) == {"draft": size_of(shapes)}


def test_a_drafter_whose_config_no_model_could_have_is_no_error(root: Path) -> None:
    write_safetensors(root / "d/model.safetensors", {"fc.weight": (8, 24)})
    write_json(root / "d/config.json", {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen3"})
    facts = facts_of(root / "d", root)
    assert (facts.role, facts.geometry) == (Role.DRAFTER, None)


def test_support_files_of_ds4(root: Path) -> None:
    dspark = write_gguf(root / "dspark.gguf", {"markov.w1": (4, 4)}, "deepseek4", values={"dspark.block_size": 5})
    legacy = write_gguf(root / "mtp.gguf", {"mtp.0.attn_q.weight": (4, 4)}, "deepseek4")
    assert [facts_of(path, root).role for path in (dspark, legacy)] == [Role.DRAFTER, Role.DRAFTER]


def test_a_vision_tower(root: Path) -> None:
    write_safetensors(root / "v/model.safetensors", {"vision_model.post_layernorm.weight": (8,)})
    write_json(root / "v/config.json", {"architectures": ["SiglipVisionModel"], "model_type": "siglip_vision_model"})
    facts = facts_of(root / "v", root)
    assert (facts.role, components(facts)) == (Role.PROJECTOR, {"vision": 16})


# Cost.


def test_every_file_is_resolved_once_and_opened_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    tree = write_pipeline(root / "t", "FluxPipeline", {f"transformer_{number}": {"a": (4,)} for number in range(100)})
    resolved: list[Path] = []
    opened: list[str] = []
    real_open = os.open

    def counting(path: str | Path, *arguments: int) -> int:
        opened.append(str(path))
        return real_open(path, *arguments)

    def admit(path: Path) -> Path | None:
        resolved.append(path)
        return ModelsRoot(root).contains(path)

    monkeypatch.setattr(os, "open", counting)
    facts = describe(tree, admit)
    assert len(facts.files) == 100
    weights = [path for path in opened if path.endswith(".safetensors")]
    assert len(weights) == len(set(weights)) == 100
    # The hundred files, and the pipeline's own description.
    assert len(resolved) == len(set(resolved)) == 101


def test_a_sparse_shard_of_a_tebibyte_costs_its_header(root: Path) -> None:
    tree = write_pipeline(root / "t", "FluxPipeline", {"transformer": {"a": (4,)}})
    size = 1 << 40
    header = json.dumps({"w": {"dtype": "F16", "shape": [size // 2], "data_offsets": [0, size]}}).encode()
    with (tree / "transformer/diffusion_pytorch_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    assert components(facts_of(tree, root)) == {"transformer": size}
