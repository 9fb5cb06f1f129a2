"""A folder of an image model's parts is that model in parts: each is priced and launched as its own file."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from sd_data import stored, tables
from weighbridge_fit.facts import ComponentTotal, FileSummary, Role, WeightFacts, WeightFormat
from weighbridge_fit.recognise.image_parts import is_in_parts, roles_of
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
    ("folder", "in_parts"),
    [
        (facts(("diffusion_model", "vae"), 2), True),
        (facts(("diffusion_model", "high_noise_diffusion_model", "t5xxl", "vae"), 4), True),
        (facts(("diffusion_model",), 1), False),
        (facts(("diffusion_model", "vae"), 1), False),
        (facts(("diffusion_model", "vae"), 3), False),
        (facts(("vae", "t5xxl"), 2), False),
        (facts(("diffusion_model", "transformer"), 2), False),
        (facts(("diffusion_model", "vae"), 2, format=WeightFormat.DIFFUSERS), False),
        (facts(("diffusion_model", "vae"), 2, role=Role.ADAPTER), False),
    ],
)
def test_what_is_a_folder_of_parts(folder: WeightFacts, in_parts: bool) -> None:
    assert is_in_parts(folder) is in_parts


def test_files_that_are_no_part_each_are_no_model_in_parts() -> None:
    assert roles_of({"a": facts(("diffusion_model", "vae"), 1), "b": facts(("t5xxl",), 1)}) is None
    assert roles_of({"a": facts(("vae",), 1), "b": facts(("vae",), 1)}) is None
    assert roles_of({"a": facts(("vae",), 1), "b": facts(("t5xxl",), 1)}) is None
    assert roles_of({"a": facts(("vae",), 1), "b": facts(("diffusion_model",), 1)}) == {
        "vae": "a",
        "diffusion_model": "b",
    }
