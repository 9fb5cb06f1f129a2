"""The laws of stable-diffusion.cpp's working buffers against every measured row, and against graphs never fitted to."""

import gzip
import importlib.util
import json
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from weighbridge_fit.calibration.sd import stable_diffusion
from weighbridge_fit.laws.sd_buffers import (
    diffusion_bytes,
    position_bytes,
    text_bytes,
    tokens_bytes,
    vae_decode_bytes,
    vae_encode_bytes,
)
from weighbridge_fit.laws.sd_process import (
    cpu_work_bytes,
    heap_growth_bytes,
    load_transient_bytes,
    process_base_bytes,
    render_overhead_bytes,
)
from weighbridge_fit.laws.sd_shapes import ARCHITECTURES, BufferOptions, RenderShape, image_tokens
from weighbridge_fit.lines import Range

DATA = Path(__file__).parent / "data" / "sd"
SCRIPT = Path(__file__).parents[1] / "calibrate" / "sd.py"
MIB = 1 << 20
NAMES = {"flux1dev": "flux1", "flux2dev": "flux2", "qwenimage": "qwen_image", "qwenedit": "qwen_image"}
WORDS = {"prompt_p1": 1, "prompt_p60": 60, "prompt_p240": 240}
LARGE_PX = 512 * 512

Measured = tuple[str, str, str, Range, int, bool]
"""Architecture, phase, way of attention, predicted, measured, whether the picture is 512 pixels square or larger."""


@cache
def data(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(gzip.decompress((DATA / name).read_bytes()))
    return document


def shape_of(row: dict[str, Any]) -> RenderShape:
    case, size = row["case"], (row["width"], row["height"])
    words = WORDS.get(case, 0)
    if case == "prompt_p240" and row["arch"] == "flux1dev":
        words = 256  # T5 splits the 240 words into more tokens than one chunk holds
    if case == "hires2x":
        size = (2 * size[0], 2 * size[1])
    return RenderShape(
        *size,
        frames=int(case[6:]) if case.startswith("frames") else 1,
        batch=4 if case == "batch4" else 1,
        prompt_tokens=words,
        reference_images=(size,) * (int(case[3:]) if case.startswith("ref") else 0),
        source_image=case == "img2img",
    )


def options_of(row: dict[str, Any]) -> BufferOptions:
    flags, cell = row["flags"], ARCHITECTURES[NAMES.get(row["arch"], row["arch"])].cell_px
    tile = None
    if "--vae-tile-size" in flags:
        tile = int(flags[flags.index("--vae-tile-size") + 1].split("x")[0]) * cell
    if "--vae-relative-tile-size" in flags:
        tile = int(row["tile"][0].split("x")[0]) * cell
    return BufferOptions(
        flash_attention="--diffusion-fa" in flags,
        flash_attention_everywhere="--fa" in flags,
        vae_tiling="--vae-tiling" in flags,
        vae_tile_px=tile,
        diffusion_conv_direct="--diffusion-conv-direct" in flags,
        vae_conv_direct="--vae-conv-direct" in flags,
        tiny_autoencoder=row["case"] == "taesd",
        vae_rescaled=row["arch"] == "sdxl",
        vision=row["arch"] == "qwenedit",
    )


def compute_rows() -> Iterator[dict[str, Any]]:
    yield from (row for row in data("measurements.json.gz")["rows"] if row["kind"] == "compute" and "error" not in row)


@cache
def predictions() -> tuple[Measured, ...]:
    found: list[Measured] = []
    for row in compute_rows():
        name, shape, options = NAMES.get(row["arch"], row["arch"]), shape_of(row), options_of(row)
        measured, large = row["compute_bytes"], row["width"] * row["height"] >= LARGE_PX
        flash = "flash" if options.flash_attention or options.flash_attention_everywhere else ""
        decode = vae_decode_bytes(name, shape, options)
        encode = vae_encode_bytes(name, shape, options)
        # The log names one buffer of the autoencoder: the largest of the request.
        found.append((name, "autoencoder", "", decode.cover(encode), measured["vae"], large))
        if row.get("vae_encode_bytes"):
            found.append((name, "encode", "", encode, row["vae_encode_bytes"], large))
        found.append((name, "text", "", text_bytes(name, shape, options), measured["text_encoder"], large))
        found.append((name, "diffusion", flash, diffusion_bytes(name, shape, options), measured["diffusion"], large))
    return tuple(found)


def quantile(errors: list[float], share: float) -> float:
    ordered = sorted(errors)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(title: str, errors: dict[tuple[str, ...], list[float]]) -> str:
    """The distribution of errors in per cent, one line for each architecture, phase and way."""
    lines = [f"{title}: error of the expected figure in per cent", f"{'':36} rows    min    p50    p95    max"]
    for key, found in sorted(errors.items()):
        figures = (min(found), quantile(found, 0.5), quantile(found, 0.95), max(found))
        lines.append(f"{' '.join(key):36} {len(found):4}" + "".join(f"{100 * figure:+7.2f}" for figure in figures))
    return "\n".join(lines)


def test_expected_buffers_are_never_low_and_seldom_high(capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for name, phase, way, predicted, measured, large in predictions():
        if large:
            errors[name, phase, way].append(predicted.expected / measured - 1)
            errors["all", phase, way].append(predicted.expected / measured - 1)
    with capsys.disabled():
        print("\n" + table("rows at 512 x 512 and larger", errors))
    for (name, phase, way), found in errors.items():
        if name == "all":
            assert min(found) >= -0.02, (phase, way)
            assert quantile(found, 0.95) <= 0.10, (phase, way)
    everything = [error for key, found in errors.items() if key[0] == "all" for error in found]
    assert len(everything) > 4500
    assert quantile(everything, 0.95) <= 0.03


def test_ranges_hold_every_measured_row_of_any_size() -> None:
    outside = [
        (name, phase, way, predicted, measured)
        for name, phase, way, predicted, measured, _ in predictions()
        if not predicted.low <= measured <= predicted.high
    ]
    assert outside == []


def test_small_pictures_are_not_priced_low() -> None:
    small = [predicted.expected / measured - 1 for _, _, _, predicted, measured, large in predictions() if not large]
    assert len(small) > 150
    assert min(small) >= -0.02


def held_out() -> Iterator[tuple[str, str, Range, int]]:
    for name, width, height, frames, text, pictures, flash, measured in data("sizings.json.gz")["held_out"]:
        side = ARCHITECTURES[name].token_px
        tokens = image_tokens(name, RenderShape(width, height, frames))
        tokens += sum(-(-wide // side) * -(-high // side) for wide, high in pictures)
        predicted = tokens_bytes(name, tokens, text, frames, flash=bool(flash))
        if ARCHITECTURES[name].position_rows:
            positions = position_bytes(name, width, height, text)
            predicted = predicted.cover(Range.exactly(positions))
        if width * height >= LARGE_PX:
            yield name, "flash" if flash else "", predicted, measured


def test_graphs_that_were_never_fitted_to_are_priced_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    errors: dict[tuple[str, ...], list[float]] = defaultdict(list)
    outside = []
    for name, way, predicted, measured in held_out():
        errors[name, "diffusion", way].append(predicted.expected / measured - 1)
        errors["all", "diffusion", way].append(predicted.expected / measured - 1)
        if not predicted.low <= measured <= predicted.high:
            outside.append((name, way, predicted, measured))
    with capsys.disabled():
        print("\n" + table("held-out graphs at 512 x 512 and larger, prompts and references of any length", errors))
    everything = errors["all", "diffusion", ""] + errors["all", "diffusion", "flash"]
    assert len(everything) > 3500
    assert sum(error < -0.02 for error in everything) <= len(everything) / 1000
    assert quantile(everything, 0.95) <= 0.06
    assert outside == []


@pytest.fixture(name="script")
def calibration_script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as `python services/fit/calibrate/sd.py` runs it, with its neighbours importable."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("calibrate_sd", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calibration_is_what_the_script_makes_of_the_rows(script: ModuleType) -> None:
    assert script.OUTPUT.read_text("utf-8") == script.document(*script.read())


def test_the_script_never_reads_the_held_out_graphs(script: ModuleType) -> None:
    measured, sized = script.read()
    assert script.document(measured, sized | {"held_out": None}) == script.OUTPUT.read_text("utf-8")


def test_every_figure_names_its_build_and_date(script: ModuleType) -> None:
    document = json.loads(script.OUTPUT.read_text("utf-8"))
    assert document["build"].startswith("stable-diffusion-cpp-python 0.4.7")
    assert document["date"] == "2026-11-30"
    assert set(document["diffusion"]) == set(ARCHITECTURES)
    for laws in (document["diffusion"], {"autoencoders": document["autoencoders"]}):
        for curves in laws.values():
            assert all(law["rows"] > 0 for name, law in curves.items() if name != "text_token_bytes")
    assert all(figure["basis"] and figure["rows"] for figure in document["figures"].values())


def test_cpu_scratch_is_exact_where_weights_need_any() -> None:
    exact = 0
    for row in compute_rows():
        name, shape, options = NAMES.get(row["arch"], row["arch"]), shape_of(row), options_of(row)
        predicted = cpu_work_bytes(name, row["file_type"], shape, options)
        assert predicted.low <= row["cpu_work_bytes"] <= predicted.high, row
        if row["file_type"] != "F32" and not options.diffusion_conv_direct and not options.vae_conv_direct:
            assert predicted.expected == row["cpu_work_bytes"], row
            exact += 1
    assert exact > 1400


@pytest.mark.parametrize(
    "row",
    [row for row in data("measurements.json.gz")["rows"] if row.get("peak_rss")],
    ids=lambda row: f"{row['arch']}-{row['file_type']}-{row['width']}-{'-'.join(row['flags'])}",
)
def test_peak_of_a_real_process(row: dict[str, Any]) -> None:
    name, shape = NAMES.get(row["arch"], row["arch"]), RenderShape(row["width"], row["height"])
    options = options_of(row | {"case": "txt2img"})
    retyped = "--type" in row["flags"]
    scratch = Range(0, 0, 0)
    for buffer in (text_bytes, diffusion_bytes, vae_decode_bytes):
        scratch = scratch.cover(buffer(name, shape, options))
    kept = "Q8_0" if retyped else row["file_type"]
    base = process_base_bytes(name, retyped) + render_overhead_bytes()
    predicted = base + cpu_work_bytes(name, kept, shape, options) + scratch
    peak = row["params_total"] + predicted.expected
    if "--mmap" in row["flags"]:
        # Pages of the mapped file are a line of their own: all of them, at the end of loading. What is anonymous then
        # is the weights and the base.
        loading = row["params_total"] + process_base_bytes(name).expected + row["file_bytes"]
        peak = max(peak, loading)
    assert abs(peak - row["peak_rss"]) <= 0.05 * row["peak_rss"] + 64 * MIB
    if "--mmap" not in row["flags"]:
        assert row["peak_rss"] <= row["params_total"] + predicted.high
        assert row["peak_rss"] >= row["params_total"] + predicted.low


def test_loading_holds_a_buffer_for_the_largest_tensor_that_is_converted() -> None:
    # SD3.5's positions are 384 x 384 rows of 1,536 half-precision elements in the file, float32 in memory.
    positions = 384 * 384 * 1536 * 2
    transient = load_transient_bytes([1_000_000, positions, 2_000_000], threads=2)
    assert transient == Range(0, positions, positions + 2_000_000)
    peaks = [
        row["load_peak_rss"] - row["load_rss"]
        for row in data("measurements.json.gz")["rows"]
        if row["kind"] == "real" and row["arch"] == "sd35m"
    ]
    assert peaks
    assert all(0.85 * positions < peak < 1.001 * transient.high for peak in peaks)
    assert load_transient_bytes([], threads=8) == Range(0, 0, 0)


def test_the_heap_grows_by_small_text_buffers_only() -> None:
    # A 31 MiB text buffer made 104 MiB of resident set 403 MiB in nine renders; buffers of 32 MiB and more are mapped
    # apart and given back.
    growth = heap_growth_bytes(Range.exactly(31 * MIB))
    assert growth.expected == 0
    assert growth.high >= (403 - 104 - 41) * MIB
    assert heap_growth_bytes(Range.exactly(68 * MIB)) == Range(0, 0, 0)


def test_calibration_is_read_once() -> None:
    assert stable_diffusion() is stable_diffusion()
