"""Grids: what is asked for each cell, how it is shown, and the same as a picture."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grpc
import pytest
from click.testing import CliRunner, Result
from weighbridge.cli import main
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.memory.v1 import requirement_pb2

GIB = 1 << 30
RUNS, TIGHT, WONT = requirement_pb2.VERDICT_RUNS, requirement_pb2.VERDICT_TIGHT, requirement_pb2.VERDICT_WONT_RUN


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def plan_of(size: int, workload: plan_pb2.Workload) -> fit_service_pb2.PlanModelResponse:
    """RUNS up to 4 GiB, TIGHT up to 8, WONT_RUN above."""
    plan = fit_service_pb2.PlanModelResponse(model_name="m", workload=workload)
    plan.requirement.total.expected_bytes = size
    plan.assessment.verdict = RUNS if size <= 4 * GIB else TIGHT if size <= 8 * GIB else WONT
    return plan


def chat_plan(request: Any) -> Any:
    """1 MiB for each token of each slot; no more than 32,768 tokens."""
    chat = plan_pb2.ChatWorkload(
        context_tokens=request.workload.chat.context_tokens or 4096, slots=request.workload.chat.slots or 1
    )
    if chat.context_tokens > 32_768:
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "Too long.")
    return plan_of(chat.context_tokens * chat.slots << 20, plan_pb2.Workload(chat=chat))


def image_plan(request: Any) -> Any:
    image = request.workload.image
    side = image.width_px or 1024
    half = request.options.sd.weight_type.startswith("q4")
    return plan_of(
        side * side * (1024 if half else 4096), plan_pb2.Workload(image=plan_pb2.ImageWorkload(width_px=side))
    )


@pytest.fixture
def grid(fake_suite: Any):
    def make(plan_for: Any, *arguments: str) -> Result:
        fake_suite.state.plan_for = plan_for
        return run("fit", "/m", *arguments)

    return make


def test_a_chat_models_grid_is_context_by_slots(grid: Any) -> None:
    result = grid(chat_plan, "--grid")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if re.match(r"\s*[\d,]+ ", line)]
    # 4,096 tokens x 1 MiB are 4 GiB: runs; x 2 is tight, x 4 won't run. Beyond 32,768 there are no rows.
    assert rows == [
        ["4,096", "4.00", "~", "8.00", "x", "16.00", "x", "32.00"],
        ["8,192", "~", "8.00", "x", "16.00", "x", "32.00", "x", "64.00"],
        ["16,384", "x", "16.00", "x", "32.00", "x", "64.00", "x", "128.00"],
        ["32,768", "x", "32.00", "x", "64.00", "x", "128.00", "x", "256.00"],
    ]


def test_axes_can_be_chosen_and_what_was_chosen_is_kept(grid: Any) -> None:
    result = grid(chat_plan, "--grid", "--json", "--rows", "65536,1024", "--columns", "1,3")
    printed = json.loads(result.stdout)
    assert (printed["rows"], printed["columns"]) == ([1024, 65536], ["1", "3"])
    assert printed["cells"][0][1] == {
        "verdict": "VERDICT_RUNS",
        "total": {"low_bytes": "0", "expected_bytes": str(3 * GIB), "high_bytes": "0"},
    }
    assert printed["cells"][1] == [None, None]


def test_an_image_models_grid_is_size_by_precision(grid: Any, fake_suite: Any) -> None:
    result = grid(image_plan, "--grid", "--json", "--frames", "5", "--set", "vae_tiling=on")
    printed = json.loads(result.stdout)
    assert printed["rows"] == [512, 768, 1024, 1280, 1536, 2048]
    assert printed["columns"] == ["stored", "f16", "q8_0", "q4_0"]
    assert printed["cells"][2][0]["total"]["expected_bytes"] == str(4 * GIB)
    assert printed["cells"][2][3]["total"]["expected_bytes"] == str(GIB)
    asked = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)[1:]
    assert all(request.options.sd.vae_tiling and request.workload.image.frames == 5 for request in asked)
    assert {request.options.sd.weight_type for request in asked} == {"", "f16", "q8_0", "q4_0"}


def test_a_model_without_a_price_has_no_grid(grid: Any) -> None:
    result = grid(lambda request: plan_of(GIB, plan_pb2.Workload()), "--grid")
    assert result.exit_code == 2
    assert "no price" in result.stderr


def test_a_failure_of_fit_is_the_grids(grid: Any) -> None:
    def broken(request: Any) -> Any:
        if request.workload.chat.slots == 4:
            return RequestError(grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE", "No ledger.")
        return chat_plan(request)

    result = grid(broken, "--grid")
    assert result.exit_code == 4
    assert "No ledger." in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--rows", "4096"),
        ("--grid", "--now"),
        ("--grid", "--rows", "4096,x"),
        ("--grid", "--rows", "0"),
        ("--plot", "picture.pdf"),
        ("--size", "512x512", "--quality", "draft"),
        ("--quality", "draft", "--slots", "2"),
    ],
)
def test_what_is_no_grid_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert run("fit", "/m", *arguments).exit_code == 2


def test_slots_are_numbers_and_a_grid_has_bounds(grid: Any) -> None:
    assert grid(chat_plan, "--grid", "--columns", "q8_0").exit_code == 2
    many = ",".join(str(number) for number in range(1, 202))
    assert "at most 400" in grid(chat_plan, "--grid", "--rows", many, "--columns", "1,2").stderr


def test_the_picture_shows_what_the_table_shows(grid: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.svg"
    result = grid(chat_plan, "--plot", str(picture), "--rows", "4096,65536", "--columns", "1,2,4")
    assert result.exit_code == 0, result.output
    texts = [
        "".join(element.itertext()).strip()
        for element in ElementTree.parse(picture).iter()
        if element.tag.endswith("text")
    ]
    assert {"4.00", "~ 8.00", "x 16.00", "-", "4,096", "65,536", "slots", "context, tokens"} <= set(texts)
    first = picture.read_bytes()
    grid(chat_plan, "--plot", str(picture), "--rows", "4096,65536", "--columns", "1,2,4")
    assert picture.read_bytes() == first, "the same grid is the same file"


def test_a_png_is_one(grid: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "grid.PNG"
    assert grid(image_plan, "--plot", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_picture_that_cannot_be_written_says_so(grid: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = grid(chat_plan, "--plot", str(tmp_path / "nowhere" / "grid.png"))
    assert result.exit_code == 1
    assert "nowhere" in result.stderr


def test_options_of_an_image_travel(fake_suite: Any) -> None:
    arguments = ("--quality", "high", "--batch", "2", "--references", "3", "--sources", "1", "--prompt-tokens", "300")
    assert run("fit", "/m", *arguments).exit_code == 0
    (request,) = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)
    image = request.workload.image
    assert image.quality == plan_pb2.QUALITY_TIER_HIGH
    assert (image.batch, image.reference_images, image.source_images, image.prompt_tokens) == (2, 3, 1, 300)
