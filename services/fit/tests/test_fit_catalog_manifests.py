"""The 58 manifests that come with weighbridge, and the schema that is published with them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import weighbridge_catalog
from weighbridge_fit.catalog import schema
from weighbridge_fit.catalog.entry import CatalogEntry, Use
from weighbridge_fit.catalog.manifest import ManifestError, read_manifest
from weighbridge_fit.catalog.store import Catalogue
from weighbridge_fit.plans.plan import Engine

MANIFESTS = sorted(weighbridge_catalog.MODELS.glob("*.json"))
ENTRIES = Catalogue(weighbridge_catalog.MODELS, None).snapshot()

# Licences of the catalogue that SPDX lists (licence list 3.27); all others have to be LicenseRef-.
SPDX = {"Apache-2.0", "MIT"}

# Size of all files, as the publishers' pages and the repositories' listings give it.
TOTAL_BYTES = {
    "animagine-xl-4": 6_938_434_056,
    "flux-1-dev-q4": 12_281_372_084,
    "flux-2-klein-4b-q4": 5_207_178_964,
    "krea-2-turbo-q8": 16_457_046_644,
    "sd-1.5": 4_265_146_304,
    "ltx-2-19b": 92_089_843_221,
    "wan2.2-ti2v-5b": 34_201_418_400,
    "deepseek-v4-flash-284b-q2": 86_720_111_488,
    # 164,628,167,004 bytes of tensors and the header of 5,335,588 that the other files of the layout have.
    "deepseek-v4-flash-284b-q4": 164_633_502_592,
    "glm-5.2-754b-q2": 211_075_856_448,
    "deepseek-v4-flash-284b-q4-mlx": 160_150_239_764,
    "gpt-oss-120b-q4": 62_358_097_894,
    "laguna-s-2.1-118b-q8": 124_917_624_491,
    "qwen3.5-2b-q4": 1_749_079_691,
    "ternary-bonsai-27b-q2": 8_521_049_516,
}
# Weight files alone: number and size.
WEIGHTS = {
    "ltx-2-19b": (23, 106_507_972 + 2_862_957_976 + 48_749_441_672 + 37_759_286_096 + 2_444_982_370 + 111_204_124),
    "ltx-video-0.9.7-dev": (11, 19_049_269_744 + 26_085_278_072 + 2_493_855_612),
    "wan2.2-ti2v-5b": (9, 11_361_851_208 + 19_999_234_632 + 2_818_777_808),
    "gemma4-31b-q4": (6, 28_816_512_158),
    "qwen3.5-122b-a10b-q4": (14, 69_593_636_939),
}


def entry(catalog_id: str) -> CatalogEntry:
    return ENTRIES.entries[catalog_id]


def test_all_are_there_and_none_is_left_out() -> None:
    assert ENTRIES.problems == ()
    assert len(MANIFESTS) == len(ENTRIES.entries) == 58
    kinds = Counter((found.use, found.engine) for found in ENTRIES.entries.values())
    assert kinds == {
        (Use.IMAGE, Engine.SD): 12,
        (Use.VIDEO, Engine.GENERIC): 4,
        (Use.CHAT, Engine.DS4): 5,
        (Use.CHAT, Engine.MLX): 37,
    }


def test_the_published_schema_is_the_one_manifests_are_read_by() -> None:
    assert weighbridge_catalog.SCHEMA.read_text("utf-8") == schema.text()
    published = json.loads(weighbridge_catalog.SCHEMA.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(published)
    objects = [published, *published["$defs"].values()]
    assert all(item["additionalProperties"] is False for item in objects if item["type"] == "object")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_follows_the_schema_and_the_rules_beside_it(path: Path) -> None:
    document: dict[str, Any] = json.loads(path.read_text("utf-8"))
    validator = jsonschema.Draft202012Validator(json.loads(weighbridge_catalog.SCHEMA.read_text("utf-8")))
    assert [error.message for error in validator.iter_errors(document)] == []
    assert (path.parent / document["$schema"]).resolve() == weighbridge_catalog.SCHEMA.resolve()
    assert document["id"] == path.stem
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*[a-z0-9]", path.stem)
    assert document["license"] in SPDX or re.fullmatch(r"LicenseRef-[A-Za-z0-9.-]+", document["license"])
    names = [file["path"] for file in document["files"]]
    assert len(set(names)) == len(names)
    for file in document["files"]:
        assert file["size_bytes"] > 0
        assert re.fullmatch(r"([0-9a-f]{64})?", file.get("sha256", ""))
        if "url" in file:
            assert file["url"].startswith("https://")
            assert unquote(urlsplit(file["url"]).path.split("/")[-1]) == file["path"].split("/")[-1]
        else:
            assert document["repository"]["name"].count("/") == 1
    if document["engine"] in ("sd", "ds4"):
        assert all(file["sha256"] and file["url"] for file in document["files"]), "sha256 and address of every file"
    if document["use"] == "video":
        assert all(file["sha256"] for file in document["files"])
        assert re.fullmatch(r"[0-9a-f]{40}", document["repository"]["revision"])


@pytest.mark.parametrize(("catalog_id", "total"), TOTAL_BYTES.items())
def test_sizes_add_up_to_what_is_published(catalog_id: str, total: int) -> None:
    assert entry(catalog_id).file_bytes == total


@pytest.mark.parametrize(("catalog_id", "weights"), WEIGHTS.items())
def test_weight_files_add_up_to_what_is_published(catalog_id: str, weights: tuple[int, int]) -> None:
    found = entry(catalog_id)
    assert (len(found.files), found.weight_bytes) == weights


def test_roles_ranges_and_figures_are_read() -> None:
    flux = entry("flux-1-dev-q4")
    assert [(file.component, file.name) for file in flux.files] == [
        ("diffusion_model", "flux1-dev-Q4_K_S.gguf"),
        ("vae", "ae.safetensors"),
        ("clip_l", "clip_l.safetensors"),
        ("t5xxl", "t5xxl_fp8_e4m3fn.safetensors"),
    ]
    assert (flux.weights_kind, flux.recommended_steps, flux.image_to_image) == ("diffusion-model", 24, True)
    assert (flux.commercial_use, entry("flux-1-schnell-q4").license) == (False, "Apache-2.0")
    small = entry("sd-1.5")
    assert small.width is not None and (small.width.smallest, small.width.largest) == (256, 768)
    assert [file.component for file in small.files] == ["model"]
    video = entry("ltx-video-0.9.7-dev")
    assert video.frames is not None and video.width is not None
    assert (video.frames.smallest, video.frames.largest, video.frames.usual) == (9, 257, 97)
    assert (video.width.usual, video.pipeline, video.guidance) == (768, "LTXConditionPipeline", 3.0)
    glm = entry("glm-5.2-754b-q2")
    assert glm.figures == {
        "resident_bytes": 61_363_217_408,
        "expert_cache_bytes": 34_359_738_368,
        "kv_bytes_per_token": 91_136,
        "resident_context_tokens": 65_536,
        "max_launch_context_tokens": 65_536,
    }
    assert (glm.ssd_streaming, glm.max_context_tokens) == (True, 1_048_576)
    ornith = entry("ornith-9b-q4")
    assert ornith.figures == {"kv_bytes_per_token": 32_768, "kv_fixed_bytes": 51_511_296}
    assert (ornith.repository, ornith.max_context_tokens) == ("mlx-community/Ornith-1.0-9B-4bit", 262_144)


# Elements of the architectures, from their published tensor tables: 4 bytes each make the files, 2 do not.
@pytest.mark.parametrize(("catalog_id", "elements"), [("sd-1.5", 1_066_235_307), ("sd-turbo", 1_302_548_651)])
def test_files_in_32_bits_are_called_so(catalog_id: str, elements: int) -> None:
    found = entry(catalog_id)
    assert 0 <= found.weight_bytes - 4 * elements < 6 << 20, "a header and little more"
    assert found.quantization == "F32"


def test_entries_that_should_be_known_about_say_so() -> None:
    assert "164,633,502,592" in " ".join(entry("deepseek-v4-flash-284b-q4").notes)
    assert "393" in " ".join(entry("ornith1.5-35b-a3b-q8").notes)
    unpinned = {found.catalog_id for found in ENTRIES.entries.values() if found.repository and not found.revision}
    assert unpinned == {"gemma4-26b-q4", "gemma4-31b-q4"}
    assert all("revision" in " ".join(entry(catalog_id).notes) for catalog_id in unpinned)


def test_a_manifest_under_another_name_is_refused() -> None:
    with pytest.raises(ManifestError) as refused:
        read_manifest(MANIFESTS[0].read_bytes(), "other.json")
    assert (refused.value.file, refused.value.field) == ("other.json", "id")
