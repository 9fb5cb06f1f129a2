"""How a model is asked for pictures: the profiles of the catalogue's models and of models that it does not know."""

from dataclasses import replace
from typing import Any

import pytest
import weighbridge_catalog
from fit_fakes import at, cpu, named, refusal
from sd_data import GIB, facts, facts_of, model_of
from test_fit_sd_launch import write_checkpoint
from weighbridge_fit.capacity import Capacity, Ceiling, Pool
from weighbridge_fit.catalog.entry import CatalogEntry, CatalogFile, PixelRange, Use
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.families.sd import SdFamily
from weighbridge_fit.model import MAIN, Model
from weighbridge_fit.plans.plan import Engine
from weighbridge_fit.plans.sd.launch import FLAGS
from weighbridge_fit.plans.sd.options import SdRequest
from weighbridge_fit.plans.sd.profiles import Profile, catalogue_ids
from weighbridge_fit.plans.sd.rendering import SdPlan, rendering_of
from weighbridge_fit.plans.sd.sizes import SideRange
from weighbridge_proto.fit.v1 import fit_service_pb2 as pb
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

SD = SdFamily()
CPU = Capacity(Pool.CPU, Ceiling(256 * GIB, 256 * GIB), Ceiling(256 * GIB, 256 * GIB), platform="linux/x86_64")
NOTHING = WeightFacts("m", WeightFormat.SAFETENSORS, 0, 0, 0, 0, 0, (), ())
CATALOGUE = {
    entry.catalog_id: entry
    for entry in Catalogue(weighbridge_catalog.MODELS, None).snapshot().entries.values()
    if entry.engine is Engine.SD
}


def planned(model: Model, **asked: Any) -> SdPlan:
    made = SD.plan(model, SdRequest(**asked), CPU)
    assert isinstance(made, SdPlan)
    return made


def rendering(model: Model) -> plan_pb2.SdRendering:
    launch = SD.launch(planned(model))
    assert launch is not None
    return launch.sd.rendering


def named_file(architecture: str, name: str, without: str = "") -> Model:
    """A model in a file of that name; its tensors less those that have `without` in their names."""
    whole = facts_of(architecture, "Q8_0")
    kept = tuple(pair for pair in whole.tensors if not without or without not in pair[1].name)
    return Model(replace(facts(kept, name), name=name), paths={MAIN: f"/models/{name}"})


def steps_at_launch(made: SdPlan) -> str:
    arguments = dict(zip(made.arguments, made.arguments[1:], strict=False))
    return arguments.get("--steps", "")


# What the reference system launches and sends, by id: steps at launch, steps and guidance of a request, tiles. Steps of
# models that are not distilled are those that the catalogue recommends.
REFERENCE = [
    ("flux-1-schnell-q4", "4", 4, 1.0, True),
    ("flux-1-dev-q4", "", 24, 1.0, True),
    ("flux-2-klein-4b-q4", "4", 4, 1.0, True),
    ("krea-2-turbo-q4", "8", 8, 1.0, False),
    ("krea-2-turbo-q6", "8", 8, 1.0, False),
    ("krea-2-turbo-q8", "8", 8, 1.0, False),
    ("sd-turbo", "4", 4, 1.0, True),
    ("sdxl-turbo", "4", 4, 1.0, True),
    ("sdxl-lightning-4step", "4", 4, 1.0, True),
    ("sd-1.5", "", 25, None, True),
    ("sdxl-base-1.0", "", 30, None, True),
    ("animagine-xl-4", "", 28, None, True),
]


@pytest.mark.parametrize(("catalog_id", "launched", "steps", "guidance", "tiles"), REFERENCE)
def test_catalogue_models_are_launched_and_asked_as_the_reference_system_does(
    catalog_id: str, launched: str, steps: int, guidance: float | None, tiles: bool
) -> None:
    model = Model(NOTHING, entry=CATALOGUE[catalog_id])
    made, said = planned(model), rendering(model)
    assert steps_at_launch(made) == launched
    assert said.steps == steps
    assert (said.guidance if said.HasField("guidance") else None) == guidance
    assert ("--vae-tiling" in made.arguments) is tiles


def test_every_image_model_of_the_catalogue_has_a_profile_and_no_profile_is_of_none() -> None:
    assert {entry.catalog_id for entry in CATALOGUE.values() if entry.use is Use.IMAGE} == set(catalogue_ids())
    assert {catalog_id for catalog_id, *_ in REFERENCE} == set(catalogue_ids())


@pytest.mark.parametrize("catalog_id", sorted(CATALOGUE))
def test_a_catalogue_models_sizes_are_those_of_its_entry(catalog_id: str) -> None:
    entry = CATALOGUE[catalog_id]
    assert entry.width is not None and entry.height is not None
    said = rendering(Model(NOTHING, entry=entry))
    assert said.min_side == min(entry.width.smallest, entry.height.smallest)
    assert (said.max_width, said.max_height) == (entry.width.largest, entry.height.largest)
    assert (said.default_width, said.default_height) == (entry.default_side_px, entry.default_side_px)
    for side in (said.default_width, said.max_width, said.max_height):
        assert side % said.size_multiple == 0


# Image to image: what the entry says, what was assessed, how the weights load.

ASSESSED = {
    "sd-1.5": True, "sd-turbo": True, "sdxl-base-1.0": True, "sdxl-turbo": True, "sdxl-lightning-4step": True,
    "animagine-xl-4": True, "flux-1-schnell-q4": True, "flux-1-dev-q4": True, "flux-2-klein-4b-q4": False,
    "krea-2-turbo-q4": False, "krea-2-turbo-q6": False, "krea-2-turbo-q8": False,
}  # fmt: skip


@pytest.mark.parametrize("catalog_id", sorted(CATALOGUE))
def test_what_was_assessed_of_starting_from_a_picture_is_told_beside_what_the_entry_says(catalog_id: str) -> None:
    entry = CATALOGUE[catalog_id]
    said = rendering(Model(NOTHING, entry=entry))
    assert said.starts_from_source == entry.image_to_image
    assert said.assessed_starts_from_source == ASSESSED[catalog_id]
    assert said.weights_kind == entry.weights_kind


def test_an_entry_that_says_nothing_of_starting_from_a_picture_leaves_it_open() -> None:
    said = rendering(Model(NOTHING, entry=replace(CATALOGUE["flux-1-dev-q4"], image_to_image=None)))
    assert not said.HasField("starts_from_source")
    assert said.assessed_starts_from_source


def test_of_a_file_alone_nothing_was_assessed_and_its_tensors_say_how_it_loads() -> None:
    whole = rendering(model_of("sd15"))
    assert not whole.HasField("starts_from_source") and not whole.HasField("assessed_starts_from_source")
    assert whole.weights_kind == "checkpoint"
    diffusion = tuple(
        pair for pair in facts_of("flux1dev", "Q4_0").tensors if pair[1].name.startswith("model.diffusion_model.")
    )
    assert rendering(Model(facts(diffusion))).weights_kind == "diffusion-model"


# Models that the catalogue does not know.


@pytest.mark.parametrize(
    ("architecture", "steps", "guidance", "side", "multiple"),
    [
        # The server's own 7.0 where nothing says otherwise; what was trained by flow matching is burnt by it.
        ("sd15", 20, None, 512, 64),
        ("sd21", 20, None, 768, 64),
        ("sdxl", 20, None, 1024, 64),
        ("sdxs512", 1, 1.0, 512, 64),
        ("sd35m", 20, 4.5, 1024, 8),
        ("flux1dev", 20, 1.0, 1024, 8),
        ("flux2dev", 20, 1.0, 1024, 16),
        ("klein4b", 4, 1.0, 1024, 16),
        ("klein9b", 4, 1.0, 1024, 16),
        ("zimage", 20, 1.0, 1024, 8),
        ("qwenimage", 20, 2.5, 1024, 8),
    ],
)
def test_an_unknown_model_is_asked_as_the_engines_documentation_asks_its_architecture(
    architecture: str, steps: int, guidance: float | None, side: int, multiple: int
) -> None:
    said = rendering(model_of(architecture))
    assert said.steps == steps
    assert (said.guidance if said.HasField("guidance") else None) == guidance
    assert (said.default_width, said.default_height, said.size_multiple) == (side, side, multiple)


@pytest.mark.parametrize(
    ("architecture", "name", "steps", "guidance", "launched"),
    [
        ("klein4b", "flux-2-klein-base-4b-Q4_0.gguf", 20, 4.0, ""),
        ("klein4b", "flux-2-klein-4b-Q4_0.gguf", 4, 1.0, "4"),
        ("zimage", "z_image_turbo-Q3_K.gguf", 8, 1.0, "8"),
        ("zimage", "z_image_bf16.safetensors", 20, 5.0, ""),
        ("zimage", "somebodys-merge.safetensors", 20, 1.0, ""),
        ("sdxl", "sdxl_lightning_8step.safetensors", 8, 1.0, "8"),
        ("sdxl", "RealVisXL_V4.0_Lightning-4-steps.safetensors", 4, 1.0, "4"),
        ("sdxl", "juggernautXL_lightning.safetensors", 20, None, ""),
        ("sdxl", "lightning_28_steps.safetensors", 20, None, ""),
        ("sdxl", "sd_xl_turbo_1.0_fp16.safetensors", 4, 1.0, "4"),
        ("sd21", "sd_turbo.safetensors", 4, 1.0, "4"),
        ("sd15", "sd_turbo.safetensors", 20, None, ""),
        ("sd35l", "sd3.5_large_turbo.safetensors", 4, 1.0, "4"),
    ],
)
def test_a_files_name_tells_models_of_one_architecture_apart(
    architecture: str, name: str, steps: int, guidance: float | None, launched: str
) -> None:
    model = named_file(architecture, name)
    said = rendering(model)
    assert (said.steps, said.guidance if said.HasField("guidance") else None) == (steps, guidance)
    assert steps_at_launch(planned(model)) == launched


def test_sdxl_turbo_was_made_for_a_smaller_picture() -> None:
    assert rendering(named_file("sdxl", "sd_xl_turbo_1.0_fp16.safetensors")).default_width == 512


def test_flux_without_a_guidance_input_is_the_distilled_one_whatever_its_name() -> None:
    schnell = named_file("flux1dev", "a-merge.gguf", without="guidance_in.")
    assert (rendering(schnell).steps, steps_at_launch(planned(schnell))) == (4, "4")
    dev = named_file("flux1dev", "a-merge.gguf")
    assert (rendering(dev).steps, steps_at_launch(planned(dev))) == (20, "")


def test_an_unknown_model_renders_what_the_server_offers() -> None:
    said = rendering(model_of("flux1dev"))
    assert (said.min_side, said.max_width, said.max_height) == (64, 4096, 4096)


@pytest.mark.parametrize(("architecture", "largest"), [("sd3m", 3072), ("sd35l", 3072), ("sd35m", 4096)])
def test_no_side_is_longer_than_the_architectures_table_of_positions(architecture: str, largest: int) -> None:
    """192 rows of 16 pixels, in SD3.5 medium 384: the engine's process ends with a failed assertion beyond."""
    said = rendering(model_of(architecture))
    assert (said.max_width, said.max_height) == (largest, largest)
    assert SD.side_range(model_of(architecture))[1] == largest


def entry(**changed: Any) -> CatalogEntry:
    base = CatalogEntry(
        catalog_id="my-own", version="1.0.0", display_name="Mine", use=Use.IMAGE, engine=Engine.SD,
        files=(CatalogFile("mine.safetensors", "model", 4 * GIB),), license="MIT", architecture="sdxl",
        weights_kind="checkpoint",
    )  # fmt: skip
    return replace(base, **changed)


def test_a_manifests_own_word_on_steps_and_guidance_is_the_last() -> None:
    files = (CatalogFile("sdxl_lightning_4step.safetensors", "model", 4 * GIB),)
    said = rendering(Model(NOTHING, entry=entry(files=files)))
    assert (said.steps, said.guidance) == (4, 1.0)
    said = rendering(Model(NOTHING, entry=entry(files=files, recommended_steps=6, guidance=1.5)))
    assert (said.steps, said.guidance) == (6, 1.5)


def test_steps_are_never_more_than_the_engine_takes() -> None:
    """It clamps them to 100 and says nothing."""
    assert rendering(Model(NOTHING, entry=entry(recommended_steps=500))).steps == 100


def test_sides_that_differ_are_told_apart_except_for_the_least() -> None:
    tall = entry(width=PixelRange(256, 512), height=PixelRange(512, 1024), default_side_px=768)
    said = rendering(Model(NOTHING, entry=tall))
    assert (said.min_side, said.max_width, said.max_height) == (256, 512, 1024)
    assert (said.default_width, said.default_height) == (512, 512), "a square within both ranges"


def test_steps_at_launch_are_on_the_allow_list() -> None:
    assert "--steps" in FLAGS


# Over the channel.


@pytest.fixture
def checkpoint(model: Any) -> str:
    write_checkpoint(model.parent / "sd15.safetensors", "sd15")
    return "sd15.safetensors"


async def test_a_plan_tells_how_its_model_is_asked(fit: Any, ledger: Any, checkpoint: str) -> None:
    answered = await fit.PlanModel(pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB)))
    assert answered.launch.sd.rendering == plan_pb2.SdRendering(
        steps=20, default_width=512, default_height=512, min_side=64, max_width=4096, max_height=4096,
        size_multiple=64, weights_kind="checkpoint",
    )  # fmt: skip


async def test_a_plan_tells_of_all_but_the_unets_that_they_were_trained_on_flows(
    fit: Any, ledger: Any, checkpoint: str
) -> None:
    async def flow(model: Any) -> bool:
        answered = await fit.PlanModel(pb.PlanModelRequest(model=model, machine=cpu(256 * GIB)))
        return bool(answered.launch.sd.rendering.flow)

    assert [await flow(named(name)) for name in ("sd-1.5", "sd-turbo", "sdxl-turbo")] == [False] * 3
    assert [await flow(named(name)) for name in ("flux-1-schnell-q4", "krea-2-turbo-q6")] == [True] * 2
    assert not await flow(at(checkpoint))


@pytest.mark.parametrize(("architecture", "is_flow"), [("klein", True), ("sd3m", True), ("sd15", False), ("", False)])
def test_a_size_of_a_family_that_was_not_measured_is_trained_as_the_family_is(architecture: str, is_flow: bool) -> None:
    told = rendering_of(
        Model(NOTHING), Profile(512), SideRange((64, 512), (64, 512), 64), architecture, checkpoint=True
    )
    assert told.flow == is_flow


@pytest.mark.parametrize(
    ("quality", "side"),
    [
        (plan_pb2.QUALITY_TIER_DRAFT, 256),
        (plan_pb2.QUALITY_TIER_STANDARD, 512),
        (plan_pb2.QUALITY_TIER_HIGH, 768),
    ],
)
async def test_a_plan_at_a_tier_tells_the_size_that_it_is(
    fit: Any, ledger: Any, checkpoint: str, quality: Any, side: int
) -> None:
    asked = pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB))
    asked.workload.image.quality = quality
    image = (await fit.PlanModel(asked)).workload.image
    assert (image.width_px, image.height_px) == (side, side)


async def test_a_catalogue_model_that_is_not_here_tells_it_too(fit: Any, ledger: Any) -> None:
    asked = pb.PlanModelRequest(model=named("sdxl-turbo"), machine=cpu(64 * GIB))
    asked.workload.image.quality = plan_pb2.QUALITY_TIER_HIGH
    answered = await fit.PlanModel(asked)
    assert (answered.workload.image.width_px, answered.launch.sd.rendering.steps) == (768, 4)


@pytest.mark.parametrize(("width", "height"), [(65_536, 65_536), (65_536, 64), (2**31 - 1, 2**31 - 1), (-64, 64)])
async def test_a_size_that_is_no_picture_is_refused_with_its_field(
    fit: Any, ledger: Any, checkpoint: str, width: int, height: int
) -> None:
    asked = pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB))
    asked.workload.image.width_px, asked.workload.image.height_px = width, height
    refused = await refusal(fit.PlanModel(asked))
    assert refused.reason == "INVALID_OPTION"
    assert [field for field, _ in refused.field_violations] == ["workload.image.width_px"]
    assert "pixels of width" in refused.message and "16,384" in refused.message


async def test_the_largest_size_that_is_priced_is_a_verdict(fit: Any, ledger: Any, checkpoint: str) -> None:
    asked = pb.PlanModelRequest(model=at(checkpoint), machine=cpu(64 * GIB))
    asked.workload.image.width_px = asked.workload.image.height_px = 16_384
    answered = await fit.PlanModel(asked)
    assert answered.assessment.verdict == requirement_pb2.VERDICT_WONT_RUN
    assert "SIZE_OUTSIDE_RANGE" in {note.code for note in answered.notes}
