"""How sd-server is started, what travels, and the family's service over a real channel."""

import json
import re
import struct
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from fit_fakes import at, cpu
from google.protobuf import json_format
from sd_data import GIB, MIB, facts, facts_of, model_of, tables
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.families.sd import ROLES, SdFamily
from weighbridge_fit.model import MAIN, Model
from weighbridge_fit.plans.errors import PlanError
from weighbridge_fit.plans.sd.launch import FLAGS, type_word
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

SD = SdFamily()
CPU = Capacity(Pool.CPU, Ceiling(64 * GIB, 64 * GIB), Ceiling(64 * GIB, 64 * GIB))


def split_model(architecture: str = "flux1dev") -> Model:
    """A diffusion model with its parts in files of their own, under paths."""
    starts = {
        "model.diffusion_model.": MAIN,
        "text_encoders.clip_l.": "clip_l",
        "text_encoders.t5xxl.": "t5xxl",
        "first_stage_model.": "vae",
    }
    groups: dict[str, list[Any]] = {}
    for pair in facts_of(architecture, "Q4_0").tensors:
        role = next(role for start, role in starts.items() if pair[1].name.startswith(start))
        groups.setdefault(role, []).append(pair)
    made = {role: facts(tuple(pairs), digest=f"{role or 'main'}-digest") for role, pairs in groups.items()}
    paths = {role: f"/models/{role or 'diffusion'}.gguf" for role in groups}
    return Model(made.pop(MAIN), made, paths)


def test_a_checkpoint_is_started_with_the_model_flag() -> None:
    model = replace(model_of("sd15"), paths={MAIN: "/models/sd15.safetensors"})
    assert SD.plan(model, SdRequest(), CPU).arguments == ("--model", "/models/sd15.safetensors")


def test_parts_are_given_in_a_fixed_order_by_their_roles() -> None:
    assert SD.plan(split_model(), SdRequest(), CPU).arguments == (
        "--diffusion-model", "/models/diffusion.gguf",
        "--clip_l", "/models/clip_l.gguf",
        "--t5xxl", "/models/t5xxl.gguf",
        "--vae", "/models/vae.gguf",
    )  # fmt: skip


def test_every_choice_has_its_flag() -> None:
    asked = SdRequest(
        vae_tiling=True, vae_tile_px=512, flash_attention=True, diffusion_conv_direct=True, vae_conv_direct=True,
        offload_to_cpu=True, text_encoder_on_cpu=True, vae_on_cpu=True, weight_type="Q4_K",
        tensor_type_rules="^vae\\.=f16", mmap=True, threads=6,
    )  # fmt: skip
    assert SD.plan(model_of("sd15"), asked, CPU).arguments == (
        "--type", "q4_K", "--tensor-type-rules", "^vae\\.=f16", "--diffusion-fa", "--vae-tiling",
        "--vae-tile-size", "64x64", "--vae-conv-direct", "--diffusion-conv-direct", "--offload-to-cpu",
        "--clip-on-cpu", "--vae-on-cpu", "--mmap", "--threads", "6",
    )  # fmt: skip


def test_a_tile_is_given_in_latent_cells_which_differ_in_size() -> None:
    """32 x 32 cells are 256 pixels of Stable Diffusion and 512 of FLUX.2."""
    asked = SdRequest(vae_tiling=True, vae_tile_px=512)
    assert "64x64" in SD.plan(model_of("sd15"), asked, CPU).arguments
    assert "32x32" in SD.plan(model_of("klein4b"), asked, CPU).arguments


def test_all_flags_are_on_the_allow_list() -> None:
    asked = SdRequest(vae_tiling=True, flash_attention=True, weight_type="q8_0", mmap=True, threads=2)
    arguments = SD.plan(split_model(), asked, CPU).arguments
    assert {argument for argument in arguments if argument.startswith("-")} <= FLAGS


@pytest.mark.parametrize(
    ("name", "word"), [("Q4_K", "q4_K"), ("Q8_0", "q8_0"), ("F16", "f16"), ("IQ2_XXS", "iq2_xxs"), ("MXFP4", "mxfp4")]
)
def test_types_are_spelled_as_the_engine_spells_them(name: str, word: str) -> None:
    assert type_word(name) == word


def test_the_shape_names_all_that_changes_the_price() -> None:
    plain = SD.plan(split_model(), SdRequest(), CPU).shape.text()
    assert plain.startswith("sd;pool=cpu;size=1024x1024;batch=1;")
    assert "parts=clip_l:clip_l-digest,t5xxl:t5xxl-digest,vae:vae-digest" in plain
    changes: list[dict[str, Any]] = [
        {"width_px": 512}, {"batch": 2}, {"reference_images": 1}, {"source_images": 1}, {"prompt_tokens": 900},
        {"vae_tiling": True}, {"vae_tiling": True, "vae_tile_px": 512}, {"flash_attention": True},
        {"diffusion_conv_direct": True}, {"vae_conv_direct": True}, {"offload_to_cpu": True},
        {"text_encoder_on_cpu": True}, {"vae_on_cpu": True}, {"weight_type": "q8_0"}, {"tensor_type_rules": "a=f16"},
        {"mmap": True}, {"threads": 3},
    ]  # fmt: skip
    texts = {SD.plan(split_model(), SdRequest(**change), CPU).shape.text() for change in changes}
    assert len(texts | {plain}) == len(changes) + 1


def test_an_explicit_default_has_the_shape_of_none() -> None:
    explicit = SdRequest(width_px=1024, height_px=1024, batch=1, vae_tiling=False, flash_attention=False)
    assert SD.plan(split_model(), explicit, CPU).shape == SD.plan(split_model(), SdRequest(), CPU).shape


def test_workload_and_options_travel_there_and_back() -> None:
    options = plan_pb2.EngineOptions(
        sd=plan_pb2.SdOptions(
            vae_tiling=True, vae_tile_px=512, weight_type="q8_0", tensor_type_rules="a=f16", threads=2, mmap=False
        )
    )
    image = plan_pb2.ImageWorkload(
        width_px=512, height_px=768, batch=2, reference_images=1, source_images=1, prompt_tokens=100
    )
    made = SD.plan(model_of("klein4b"), SD.request(plan_pb2.Workload(image=image), options), CPU)
    again = SD.plan(model_of("klein4b"), SD.request(SD.workload(made), SD.options(made)), CPU)
    assert again.shape == made.shape
    assert again.requirement == made.requirement
    assert SD.options(made).sd.weight_type == "q8_0"


def test_a_tier_travels_as_the_size_that_it_is() -> None:
    image = plan_pb2.ImageWorkload(quality=plan_pb2.QUALITY_TIER_HIGH)
    made = SD.plan(model_of("sd15"), SD.request(plan_pb2.Workload(image=image), plan_pb2.EngineOptions()), CPU)
    planned = SD.workload(made).image
    assert (planned.width_px, planned.height_px, planned.quality) == (768, 768, plan_pb2.QUALITY_TIER_UNSPECIFIED)


def test_parts_are_companions_by_role_and_unknown_roles_are_refused() -> None:
    options = plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(parts={"vae": "a/vae.safetensors", "llm": "b.gguf"}))
    assert SD.companions(options) == {"vae": "a/vae.safetensors", "llm": "b.gguf"}
    assert "control_net" in ROLES
    for parts in ({"engine": "x"}, {"vae": ""}, {"vae": "x" * 5000}):
        with pytest.raises(PlanError) as caught:
            SD.companions(plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(parts=parts)))
        assert caught.value.reason == "INVALID_OPTION"


# Through the service, with a checkpoint on disk that has a header and a hole.


def write_checkpoint(path: Path, architecture: str) -> None:
    """A safetensors file whose weights are a hole: the size that it says, and no data."""
    header: dict[str, Any] = {}
    offset = 0
    for name, shape, _ in tables()[architecture]:
        size = 2 * prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


@pytest.fixture
def checkpoint(model: Path) -> str:
    write_checkpoint(model.parent / "sd15.safetensors", "sd15")
    return "sd15.safetensors"


async def test_a_checkpoint_on_disk_is_planned_as_measured(fit: Any, ledger: Any, checkpoint: str) -> None:
    """SD 1.5 F16 at 512 x 512: a process of 3,762 MiB was measured."""
    answered = await fit.PlanModel(pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB)))
    assert answered.engine_kind == plan_pb2.ENGINE_KIND_SD
    assert answered.requirement.total.expected_bytes == pytest.approx(3762 * MIB, rel=0.02)
    assert answered.assessment.verdict == requirement_pb2.VERDICT_RUNS
    image = answered.workload.image
    assert (image.width_px, image.height_px, image.batch) == (512, 512, 1)
    assert list(answered.launch.sd.arguments) == ["--model", answered.resolved_path]
    lines = {(line.component, line.phase) for line in answered.requirement.lines}
    assert {("vae", "resident"), ("working_buffer", "image_decode"), ("process", "resident")} <= lines
    for line in answered.requirement.lines:
        assert line.basis and not re.search(r"\bNone\b", line.basis)


async def test_a_plans_own_options_make_the_same_plan(fit: Any, ledger: Any, checkpoint: str) -> None:
    asked = pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB))
    asked.options.sd.vae_tiling = True
    asked.workload.image.width_px = 500
    first = await fit.PlanModel(asked)
    assert "SIZE_ROUNDED" in {note.code for note in first.notes}
    again = await fit.PlanModel(
        pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB), workload=first.workload, options=first.options)
    )
    assert json_format.MessageToDict(again.requirement) == json_format.MessageToDict(first.requirement)
    assert again.shape == first.shape


async def test_the_largest_picture_over_the_channel(fit: Any, ledger: Any, checkpoint: str) -> None:
    asked = pb.SolveSizeRequest(model=at(checkpoint), machine=cpu(8 * GIB), aspect_width=3, aspect_height=2)
    solved = await fit.SolveSize(asked)
    assert solved.plan.assessment.verdict == requirement_pb2.VERDICT_RUNS
    assert (solved.width_px % 64, solved.height_px % 64) == (0, 0)
    wider = solved.width_px + 64
    larger = pb.PlanModelRequest(model=at(checkpoint), machine=cpu(8 * GIB))
    larger.workload.image.width_px = wider
    larger.workload.image.height_px = -(-wider * 2 // (3 * 64)) * 64
    answered = await fit.PlanModel(larger)
    assert answered.assessment.verdict != requirement_pb2.VERDICT_RUNS
