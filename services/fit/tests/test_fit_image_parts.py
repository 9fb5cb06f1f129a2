"""A folder of an image model's files is that model: each is priced and launched as its own file."""

import itertools
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from fit_model_files import CLIP_L, FLUX, LORA, SD15, T5, VAE, write_gguf, write_safetensors
from sd_data import stored, tables
from weighbridge_fit.errors import WeightError, WeightReason
from weighbridge_fit.facts import ComponentTotal, FileSummary, Role, WeightFacts, WeightFormat
from weighbridge_fit.model import MAIN
from weighbridge_fit.recognise.image_parts import may_be_in_parts, roles_of
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

# The engine's names for the parts of klein 4B's table, and the files that people have.
PREFIXES = {
    "model.diffusion_model.": "flux-2-klein-4b.safetensors",
    "text_encoders.llm.": "qwen3-4b.safetensors",
    "first_stage_model.": "vae.safetensors",
}


def write(path: Path, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> None:
    header, at = {}, 0
    for name, dtype, shape, size in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)  # sparse: no weights are needed


@pytest.fixture
def klein(model: Path) -> Path:
    """FLUX.2 klein 4B in three files, as they lie in a user's folder."""
    folder = model.parent / "klein"
    folder.mkdir()
    for prefix, name in PREFIXES.items():
        facts = [stored(tensor, shape, "BF16") for tensor, shape, _ in tables()["klein4b"] if tensor.startswith(prefix)]
        write(folder / name, [(fact.name.removeprefix(prefix), fact.dtype, fact.shape, fact.bytes) for fact in facts])
    return folder


def path(value: Path) -> weights_pb2.ModelRef:
    return weights_pb2.ModelRef(path=str(value))


async def test_a_folder_of_parts_is_priced_like_its_parts_named_one_by_one(fit: Any, ledger: Any, klein: Path) -> None:
    folder = await fit.PlanModel(pb.PlanModelRequest(model=path(klein)))
    options = plan_pb2.EngineOptions()
    options.sd.parts["llm"] = str(klein / "qwen3-4b.safetensors")
    options.sd.parts["vae"] = str(klein / "vae.safetensors")
    named = await fit.PlanModel(pb.PlanModelRequest(model=path(klein / "flux-2-klein-4b.safetensors"), options=options))
    assert folder.engine_kind == plan_pb2.ENGINE_KIND_SD
    assert folder.requirement == named.requirement
    assert folder.claim == named.claim


async def test_the_launch_names_every_file(fit: Any, ledger: Any, klein: Path) -> None:
    plan = await fit.PlanModel(pb.PlanModelRequest(model=path(klein)))
    arguments = list(plan.launch.sd.arguments)
    for flag, name in (("--diffusion-model", "flux-2-klein-4b"), ("--llm", "qwen3-4b"), ("--vae", "vae")):
        assert arguments[arguments.index(flag) + 1] == str(klein / f"{name}.safetensors")


async def test_the_facts_are_those_of_all_parts(fit: Any, klein: Path) -> None:
    facts = (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=path(klein)))).facts
    each = [
        (await fit.DescribeWeights(pb.DescribeWeightsRequest(model=path(klein / name)))).facts
        for name in PREFIXES.values()
    ]
    assert facts.name == "klein"
    assert facts.tensor_bytes == sum(part.tensor_bytes for part in each)
    assert facts.tensor_count == len([1 for name, _, _ in tables()["klein4b"] if name.startswith(tuple(PREFIXES))])
    assert {total.component for total in facts.components} == {"diffusion_model", "llm", "vae"}
    assert sorted(file.name for file in facts.files) == sorted(PREFIXES.values())
    assert len(facts.model_digest) == 64 and facts.model_digest not in {part.model_digest for part in each}


async def test_a_link_to_a_part_is_followed_under_the_root(fit: Any, ledger: Any, klein: Path, model: Path) -> None:
    """As the hub's own cache keeps files: by their digest, with links of their names."""
    before = await fit.PlanModel(pb.PlanModelRequest(model=path(klein)))
    blobs = model.parent / "blobs"
    blobs.mkdir()
    for number, name in enumerate(PREFIXES.values()):
        (klein / name).rename(blobs / f"{number:064x}")
        (klein / name).symlink_to(blobs / f"{number:064x}")
    after = await fit.PlanModel(pb.PlanModelRequest(model=path(klein)))
    assert after.requirement == before.requirement
    assert list(after.launch.sd.arguments) == list(before.launch.sd.arguments)


# Sides that blocks of 32 divide, so that it can be quantised.
WIDE = {name: (64, 32) if len(shape) == 2 else shape for name, shape in FLUX.items()}
TINY_VAE = {"encoder.layers.0.weight": (64, 3, 3, 3), "decoder.layers.0.weight": (64, 4, 3, 3)}
ENCODER = {"model.embed_tokens.weight": (64, 8), "model.layers.0.mlp.up_proj.weight": (8, 8)}
# What a text encoder of many layers is beside a diffusion model of one: nine tensors in ten and more.
MOSTLY_ENCODER = {
    "model.diffusion_model.double_blocks.0.img_attn.qkv.weight": (24, 8),
    **{f"text_encoders.llm.model.layers.{layer}.mlp.up_proj.weight": (8, 8) for layer in range(20)},
}

Files = Mapping[str, Mapping[str, tuple[int, ...]]]


@pytest.mark.parametrize(
    ("files", "flags"),
    [
        ({"flux-Q4_0.gguf": WIDE, "vae.safetensors": VAE},
         {"--diffusion-model": "flux-Q4_0.gguf", "--vae": "vae.safetensors"}),
        ({"flux-Q4_0.gguf": WIDE, "taesd.safetensors": TINY_VAE, "clip_l.safetensors": CLIP_L, "t5.safetensors": T5},
         {"--diffusion-model": "flux-Q4_0.gguf", "--clip_l": "clip_l.safetensors", "--t5xxl": "t5.safetensors",
          "--taesd": "taesd.safetensors"}),
        ({"unet/flux-Q4_0.gguf": WIDE, "vae/ae.safetensors": VAE},
         {"--diffusion-model": "unet/flux-Q4_0.gguf", "--vae": "vae/ae.safetensors"}),
        ({"flux-Q4_0.gguf": WIDE, "qwen-vl.safetensors": {**ENCODER, "visual.blocks.0.attn.proj.weight": (8, 8)}},
         {"--diffusion-model": "flux-Q4_0.gguf", "--llm": "qwen-vl.safetensors"}),
        ({"sd15.gguf": SD15, "vae.safetensors": VAE}, {"--model": "sd15.gguf", "--vae": "vae.safetensors"}),
        ({"sd15.gguf": SD15, "taesd.safetensors": TINY_VAE}, {"--model": "sd15.gguf", "--taesd": "taesd.safetensors"}),
        ({"sd15.safetensors": SD15, "vae.safetensors": VAE},
         {"--model": "sd15.safetensors", "--vae": "vae.safetensors"}),
        ({"mostly.gguf": MOSTLY_ENCODER, "taesd.safetensors": TINY_VAE},
         {"--model": "mostly.gguf", "--taesd": "taesd.safetensors"}),
        ({"sd15.safetensors": SD15}, {"--model": "sd15.safetensors"}),
        ({"sd15.gguf": SD15}, {"--model": "sd15.gguf"}),
        # An adapter has no flag: it is found in a folder of adapters.
        ({"flux-Q4_0.gguf": WIDE, "vae.safetensors": VAE, "style.safetensors": LORA},
         {"--diffusion-model": "flux-Q4_0.gguf", "--vae": "vae.safetensors"}),
    ],
    ids=lambda value: " + ".join(value) if "--" not in "".join(value) else "",
)  # fmt: skip
async def test_each_file_of_a_folder_is_launched_by_its_role(
    fit: Any, ledger: Any, model: Path, files: Files, flags: Mapping[str, str]
) -> None:
    folder = write_folder(model.parent / "image", files)
    plan = await fit.PlanModel(pb.PlanModelRequest(model=path(folder)))
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_SD
    words = list(plan.launch.sd.arguments)
    launched = {flag: file for flag, file in itertools.pairwise(words) if file.startswith(str(folder))}
    assert launched == {flag: str(folder / name) for flag, name in flags.items()}


async def test_a_checkpoint_with_a_part_beside_it_is_priced_like_that_part_named(
    fit: Any, ledger: Any, model: Path
) -> None:
    folder = write_folder(model.parent / "image", {"sd15.gguf": SD15, "taesd.safetensors": TINY_VAE})
    options = plan_pb2.EngineOptions()
    options.sd.parts["taesd"] = str(folder / "taesd.safetensors")
    named = await fit.PlanModel(pb.PlanModelRequest(model=path(folder / "sd15.gguf"), options=options))
    plan = await fit.PlanModel(pb.PlanModelRequest(model=path(folder)))
    assert plan.requirement == named.requirement
    priced = {line.component for line in plan.requirement.lines}
    assert "taesd" in priced and "vae" not in priced, "sd-server decodes with the tiny one"


@pytest.mark.parametrize(
    "files",
    [
        {"flux-Q4_0.gguf": WIDE, "flux-Q8_0.gguf": WIDE, "vae.safetensors": VAE},
        {"flux-Q4_0.gguf": WIDE, "sd15.gguf": SD15, "vae.safetensors": VAE},
        {"flux-Q4_0.gguf": WIDE, "vae.safetensors": VAE, "other-vae.safetensors": VAE},
        {"flux-Q4_0.gguf": WIDE, "vae.safetensors": VAE,
         "other.safetensors": {f"first_stage_model.{name}": shape for name, shape in VAE.items()}},
        {"flux-Q4_0.gguf": WIDE, "vae.safetensors": VAE, "what.safetensors": {"nobodys.weight": (8, 8)}},
    ],
    ids=" + ".join,
)  # fmt: skip
async def test_files_that_cannot_all_be_one_model_are_refused_by_their_names(
    fit: Any, ledger: Any, model: Path, files: Files
) -> None:
    folder = write_folder(model.parent / "image", files)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fit.PlanModel(pb.PlanModelRequest(model=path(folder)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ", ".join(sorted(files)) in refused.value.details()


async def test_a_size_of_klein_that_nobody_measured_is_an_image_model_all_the_same(
    fit: Any, ledger: Any, model: Path
) -> None:
    klein = {
        "double_blocks.0.img_attn.qkv.weight": (64, 32),
        "double_stream_modulation_img.lin.weight": (64, 32),
        "img_in.weight": (64, 32),  # 32 wide; the published ones are 3072 and 4096
    }
    folder = write_folder(model.parent / "image", {"klein-Q4_0.gguf": klein, "vae.safetensors": VAE})
    plan = await fit.PlanModel(pb.PlanModelRequest(model=path(folder)))
    assert plan.engine_kind == plan_pb2.ENGINE_KIND_SD
    assert any("were not measured" in note.message for note in plan.notes)


@pytest.mark.parametrize(
    ("folder", "file", "steps"),
    [("pictures", "sd_xl_turbo_1.0.gguf", ["4"]), ("sd-xl-turbo", "model.gguf", ["4"]), ("pictures", "sdxl.gguf", [])],
)
async def test_a_distilled_variant_is_known_by_the_name_of_its_file_or_of_its_folder(
    fit: Any, ledger: Any, model: Path, folder: str, file: str, steps: list[str]
) -> None:
    sdxl = {
        "model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3),
        "model.diffusion_model.input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight": (640, 2048),
        "first_stage_model.decoder.conv_in.weight": (8, 4, 3, 3),
    }
    made = write_folder(model.parent / folder, {file: sdxl, "vae.safetensors": VAE})
    words = list((await fit.PlanModel(pb.PlanModelRequest(model=path(made)))).launch.sd.arguments)
    assert [word for flag, word in itertools.pairwise(words) if flag == "--steps"] == steps


def write_folder(folder: Path, files: Files) -> Path:
    for name, shapes in files.items():
        if name.endswith(".gguf"):
            write_gguf(folder / name, shapes, "image", quantised="Q8_0" if "Q8_0" in name else "Q4_0")
        else:
            write_safetensors(folder / name, shapes)
    return folder


def facts(components: tuple[str, ...], files: int, **changes: Any) -> WeightFacts:
    return WeightFacts(
        **{
            "name": "m", "format": WeightFormat.MIXED, "file_bytes": 1, "tensor_bytes": 1, "tensor_count": 1,
            "element_count": 1, "largest_tensor_bytes": 1, "precisions": (),
            "components": tuple(ComponentTotal(name, 1, 1, ()) for name in components),
            "files": tuple(FileSummary(f"{number}", 1, 1, WeightFormat.GGUF, 1) for number in range(files)),
            **changes,
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "looked_at"),
    [
        (facts(("diffusion_model", "vae"), 2), True),
        (facts(("diffusion_model", "high_noise_diffusion_model", "t5xxl", "vae"), 4), True),
        (facts(("unet", "vae"), 2), True),
        (facts(("diffusion_model", "vae"), 1, format=WeightFormat.GGUF), True),
        (facts(("vae", "t5xxl"), 2, format=WeightFormat.SAFETENSORS), False),
        (facts(("unet", "vae"), 2, format=WeightFormat.SAFETENSORS), False),
        (facts(("diffusion_model", "vae"), 2, format=WeightFormat.DIFFUSERS), False),
        (facts(("diffusion_model", "vae"), 2, role=Role.ADAPTER), False),
        (facts(("diffusion_model", "vae"), 40), False),
    ],
)
def test_which_folders_are_looked_at_file_by_file(folder: WeightFacts, looked_at: bool) -> None:
    assert may_be_in_parts(folder) is looked_at


def test_every_file_has_a_role_of_its_own() -> None:
    assert roles_of({"a": facts(("vae",), 1), "b": facts(("t5xxl",), 1)}) is None, "no diffusion model"
    assert roles_of({"a": facts(("vae",), 1), "b": facts(("diffusion_model",), 1)}) == {"vae": "a", MAIN: "b"}
    checkpoint = facts(("clip_l", "diffusion_model", "vae"), 1)
    assert roles_of({"a": checkpoint, "b": facts(("vae",), 1)}) == {MAIN: "a", "vae": "b"}


def test_shards_are_no_files_of_their_own() -> None:
    shards = {f"model-0000{number}-of-00002.safetensors": facts(("diffusion_model",), 1) for number in (1, 2)}
    assert roles_of({**shards, "vae": facts(("vae",), 1)}) is None


@pytest.mark.parametrize("second", [("vae",), ("diffusion_model", "vae"), ("t5xxl", "clip_l"), ("nobodys",)])
def test_a_file_too_many_is_an_error(second: tuple[str, ...]) -> None:
    with pytest.raises(WeightError, match="a, b, c") as refused:
        roles_of({"a": facts(("diffusion_model",), 1), "b": facts(("vae",), 1), "c": facts(second, 1)})
    assert refused.value.reason is WeightReason.SEVERAL_MODELS
