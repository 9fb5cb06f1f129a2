"""An image model in parts in one folder: every part is what its own file is, in the order of its own container."""

from pathlib import Path

import pytest
from fit_model_files import CLIP_L, FLUX, T5, VAE, write_gguf, write_safetensors
from weighbridge_fit.describe import describe
from weighbridge_fit.facts import WeightFacts, WeightFormat
from weighbridge_fit.model import Model
from weighbridge_fit.models_root import ModelsRoot
from weighbridge_fit.plans.sd.parts import LoadedPart, parts_of

# Wide enough for blocks of 32 in the fastest dimension, and not square: 64 rows of 32.
WIDE = {name: (64, 32) if len(shape) == 2 else shape for name, shape in FLUX.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "m/ae.safetensors", VAE)
    write_safetensors(tmp_path / "m/clip_l.safetensors", CLIP_L)
    write_safetensors(tmp_path / "m/t5xxl_fp16.safetensors", T5)
    return tmp_path / "m"


def facts_of(folder: Path) -> WeightFacts:
    return describe(folder, ModelsRoot(folder.parent).contains)


def parts(facts: WeightFacts) -> dict[str, LoadedPart]:
    return {part.component: part for part in parts_of(Model(facts), facts.architecture)}


@pytest.mark.parametrize("quantised", [True, False], ids=["mixed with GGUF", "safetensors alone"])
def test_every_part_of_a_folder_is_its_own(folder: Path, quantised: bool) -> None:
    if quantised:
        write_gguf(folder / "flux1-dev-Q4_0.gguf", WIDE, "flux", quantised="Q4_0")
    else:
        write_safetensors(folder / "flux1-dev.safetensors", WIDE)
    facts = facts_of(folder)
    assert facts.format is (WeightFormat.MIXED if quantised else WeightFormat.SAFETENSORS)
    found = parts(facts)
    assert {name: part.tensor_bytes for name, part in found.items()} == {
        total.component: total.bytes for total in facts.components
    }
    starts = {
        "diffusion_model": "model.diffusion_model.",
        "vae": "first_stage_model.",
        "clip_l": "text_encoders.clip_l.",
    }
    for name, start in starts.items():
        assert all(weight.name.startswith(start) for weight in found[name].weights)


def test_rows_are_the_fastest_dimension_of_each_parts_own_container(folder: Path) -> None:
    write_gguf(folder / "flux1-dev-Q4_0.gguf", WIDE, "flux", quantised="Q4_0")
    found = parts(facts_of(folder))
    # GGUF gives the fastest dimension first, safetensors last: 32 in both.
    assert {weight.row for weight in found["diffusion_model"].weights if len(weight.fact.shape) == 2} == {32}
    assert {weight.row for weight in found["clip_l"].weights if weight.fact.shape == (16, 768)} == {768}
