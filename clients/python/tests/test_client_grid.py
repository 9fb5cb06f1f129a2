"""Grids: what is asked for each cell, how it is shown, and the same as a picture."""

import io
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from weighbridge.cli import main
from weighbridge.cli.grid_table import print_grid
from weighbridge.cli.plot import write_plot
from weighbridge.grid import Cell, Column, Grid, Row
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2, plan_pb2
from weighbridge_proto.memory.v1 import machine_pb2, requirement_pb2

GIB = 1 << 30
NO_ENGINE = plan_pb2.ENGINE_KIND_UNSPECIFIED
RUNS, TIGHT, WONT = requirement_pb2.VERDICT_RUNS, requirement_pb2.VERDICT_TIGHT, requirement_pb2.VERDICT_WONT_RUN


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def plan_of(
    size: int, workload: plan_pb2.Workload, engine: "plan_pb2.EngineKind.ValueType" = plan_pb2.ENGINE_KIND_MLX
) -> fit_service_pb2.PlanModelResponse:
    """RUNS up to 4 GiB, TIGHT up to 8, WONT_RUN above."""
    plan = fit_service_pb2.PlanModelResponse(model_name="m", workload=workload, engine_kind=engine)
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
        side * side * (1024 if half else 4096),
        plan_pb2.Workload(image=plan_pb2.ImageWorkload(width_px=side, height_px=image.height_px or side)),
        plan_pb2.ENGINE_KIND_SD,
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
    assert printed["rows"] == [{"context_tokens": "1024"}, {"context_tokens": "65536"}]
    assert printed["columns"] == [{"name": "1", "slots": 1, "options": {}}, {"name": "3", "slots": 3, "options": {}}]
    assert printed["cells"][0][1] == {
        "verdict": "VERDICT_RUNS",
        "reason": "",
        "total": {"low_bytes": "0", "expected_bytes": str(3 * GIB), "high_bytes": "0"},
    }
    assert printed["cells"][1] == [None, None]


def test_an_image_models_grid_is_size_by_precision(grid: Any, fake_suite: Any) -> None:
    result = grid(image_plan, "--grid", "--json", "--frames", "5", "--set", "vae_tiling=on")
    printed = json.loads(result.stdout)
    sides = [512, 768, 1024, 1280, 1536, 2048]
    assert printed["rows"] == [{"width_px": side, "height_px": side} for side in sides]
    assert [column["name"] for column in printed["columns"]] == ["stored", "f16", "q8_0", "q4_0"]
    assert printed["columns"][3]["options"] == {"sd": {"weight_type": "q4_0"}}
    assert printed["cells"][2][0]["total"]["expected_bytes"] == str(4 * GIB)
    assert printed["cells"][2][3]["total"]["expected_bytes"] == str(GIB)
    asked = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)[1:]
    assert all(request.options.sd.vae_tiling and request.workload.image.frames == 5 for request in asked)
    assert {request.options.sd.weight_type for request in asked} == {"", "f16", "q8_0", "q4_0"}


def test_a_model_without_a_price_has_no_grid(grid: Any) -> None:
    result = grid(lambda request: plan_of(GIB, plan_pb2.Workload(), NO_ENGINE), "--grid", "--context", "4096")
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
        ("--grid", "--rows", "512x"),
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


@pytest.mark.parametrize(
    ("arguments", "rows", "columns"),
    [
        (("--context", "8192"), ["8192"], ["1", "2", "4", "8"]),
        (("--context", "8192", "--slots", "3"), ["8192"], ["3"]),
        (("--context", "8192", "--rows", "4096,512"), ["512", "4096"], ["1", "2", "4", "8"]),
        (
            ("--slots", "3", "--rows", "4096", "--columns", "kv_bits=4,2+kv_bits=8"),
            ["4096"],
            ["kv_bits=4", "2+kv_bits=8"],
        ),
    ],
)
def test_what_is_asked_for_by_itself_is_an_axis_of_one(
    grid: Any, fake_suite: Any, arguments: tuple[str, ...], rows: list[str], columns: list[str]
) -> None:
    printed = json.loads(grid(chat_plan, "--grid", "--json", *arguments).stdout)
    assert [row["context_tokens"] for row in printed["rows"]] == rows
    assert [column["name"] for column in printed["columns"]] == columns
    if "kv_bits=4" in columns:
        asked = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)[1:]
        assert {(one.workload.chat.slots, one.options.mlx.kv_bits) for one in asked} == {(3, 4), (2, 8)}


def video_plan(request: Any) -> Any:
    """A pipeline of diffusers that makes 768 x 512 by default and renders no side above 1280."""
    image = request.workload.image
    made = plan_pb2.ImageWorkload(width_px=image.width_px or 768, height_px=image.height_px or 512, frames=121)
    if made.width_px > 1280:
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_OPTION", "Too wide.")
    if request.options.WhichOneof("engine") not in (None, "generic"):
        return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "UNSUPPORTED_ARCHITECTURE", "Not by that engine.")
    plan = plan_of(made.width_px << 20, plan_pb2.Workload(image=made), plan_pb2.ENGINE_KIND_GENERIC)
    plan.notes.add(code="A", message="Priced for 121 frames.")
    if request.options.generic.tiled_decode:
        plan.notes.add(code="B", message="In tiles.")
    plan.capacity.pool = machine_pb2.POOL_KIND_DISCRETE if request.machine.devices else machine_pb2.POOL_KIND_UNIFIED
    return plan


def test_a_video_models_grid_has_its_own_shape_and_what_its_pipeline_can_be_asked_for(
    grid: Any, fake_suite: Any
) -> None:
    printed = json.loads(grid(video_plan, "--grid", "--json", "--machine", "unified:64").stdout)
    sizes = [(row["width_px"], row["height_px"]) for row in printed["rows"]]
    assert sizes == [(384, 256), (576, 384), (768, 512), (960, 640), (1152, 768)]  # 1536 is too wide: no row
    assert [column["name"] for column in printed["columns"]] == ["plain", "tiled", "bfloat16+tiled", "float32+tiled"]
    assert printed["columns"][3]["options"] == {"generic": {"load_dtype": "float32", "tiled_decode": True}}
    assert printed["notes"] == ["Priced for 121 frames."]
    cards = json.loads(grid(video_plan, "--grid", "--json", "--machine", "discrete:64+24").stdout)
    assert [column["name"] for column in cards["columns"]] == ["plain", "tiled", "model+tiled", "sequential+tiled"]
    chosen = grid(video_plan, "--grid", "--rows", "512,640x480", "--columns", "offload=model+load_dtype=float16")
    assert chosen.exit_code == 0, chosen.output
    assert "640x480" in chosen.stdout


def test_the_default_size_and_type_are_an_axis_of_one_too(grid: Any) -> None:
    printed = json.loads(grid(image_plan, "--grid", "--json", "--size", "640x512", "--set", "weight_type=q8_0").stdout)
    assert [(row["width_px"], row["height_px"]) for row in printed["rows"]] == [(640, 512)]
    assert [column["name"] for column in printed["columns"]] == ["q8_0"]


def test_stored_is_stored_whatever_else_is_set(grid: Any, fake_suite: Any) -> None:
    arguments = ("--set", "weight_type=q8_0", "--rows", "512", "--columns", "stored,f16+vae_tiling=on")
    assert grid(image_plan, "--grid", *arguments).exit_code == 0
    first, *cells = fake_suite.state.asked(fit_service_pb2.PlanModelRequest)
    assert first.options.sd.weight_type == "q8_0"
    assert {(one.options.sd.weight_type, one.options.sd.vae_tiling) for one in cells} == {("", False), ("f16", True)}


@pytest.mark.parametrize("columns", ["0", "1+2", "12345", "x", "vae_tiling=on", "kv_bits=x", "1+"])
def test_what_is_no_column_says_what_is(grid: Any, columns: str) -> None:
    result = grid(chat_plan, "--grid", "--columns", columns)
    assert result.exit_code == 2
    assert "is no column of this grid." in result.stderr


def ds4_plan(request: Any) -> Any:
    """Refused as a whole where nothing is asked, and with 8 slots; a guess has no workload."""
    chat = request.workload.chat
    if chat.slots == 8:
        return RequestError(grpc.StatusCode.FAILED_PRECONDITION, "EXPERT_CACHE_UNSAFE", "No cache is safe here.")
    if chat.slots == 4:
        plan = plan_of(3 * GIB, plan_pb2.Workload(), plan_pb2.ENGINE_KIND_DS4)
        plan.assessment.verdict = requirement_pb2.VERDICT_UNKNOWN
        return plan
    return plan_of(80 * GIB, plan_pb2.Workload(), plan_pb2.ENGINE_KIND_DS4)


def test_refusals_and_unknowns_are_cells_and_not_the_end_of_the_grid(grid: Any) -> None:
    shown = grid(ds4_plan, "--grid", "--rows", "4096")
    assert shown.exit_code == 0, shown.output
    row = next(line.split() for line in shown.stdout.splitlines() if line.lstrip().startswith("4,096"))
    assert row == ["4,096", "x", "80.00", "x", "80.00", "?", "3.00", "x"]
    cells = json.loads(grid(ds4_plan, "--grid", "--rows", "4096", "--json").stdout)["cells"][0]
    assert cells[3] == {"verdict": "VERDICT_WONT_RUN", "reason": "No cache is safe here.", "total": None}
    assert cells[2]["verdict"] == "VERDICT_UNKNOWN"


def test_a_grid_without_a_single_cell_says_what_to_do(grid: Any) -> None:
    def too_long(request: Any) -> Any:
        if request.workload.chat.slots:
            return RequestError(grpc.StatusCode.INVALID_ARGUMENT, "CONTEXT_TOO_LONG", "Too long.")
        return chat_plan(request)

    result = grid(too_long, "--grid")
    assert result.exit_code == 2
    assert "--rows" in result.stderr


def test_a_narrow_terminal_gets_several_tables_with_every_figure() -> None:
    columns = tuple(Column(f"{number}+kv_bits=4", number) for number in range(1, 9))
    cells = tuple(Cell(RUNS, "", requirement_pb2.ByteRange(expected_bytes=(10 + index) * GIB)) for index in range(8))
    rows = (Row("262,144", 262_144),)
    made = Grid("m", "context, tokens", "variant", rows, columns, (cells,), machine_pb2.Capacity())
    for width in (40, 80, 200):
        to = Console(file=io.StringIO(), width=width)
        print_grid(to, made)
        printed = to.file.getvalue()  # type: ignore[attr-defined] # the StringIO given above
        assert max(map(len, printed.splitlines())) <= width
        assert "\u2026" not in printed
        for index in range(8):
            assert f"{10 + index}.00" in printed and f"{index + 1}+kv_bits=4" in printed


def test_colours_are_left_out_where_nobody_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def printed() -> str:
        to = Console(file=io.StringIO(), width=100, force_terminal=True)
        print_grid(to, made)
        return to.file.getvalue()  # type: ignore[attr-defined] # the StringIO given above

    cell = Cell(TIGHT, "", requirement_pb2.ByteRange(expected_bytes=GIB))
    made = Grid("m", "r", "c", (Row("1", 1),), (Column("1", 1),), ((cell,),), machine_pb2.Capacity())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[33m" in printed()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in printed()
    assert "~ 1.00" in printed()


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


def test_names_of_models_are_no_formulas_and_break_no_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cells = ((Cell(RUNS, "", requirement_pb2.ByteRange(expected_bytes=GIB)), None), (Cell(WONT, "", None), None))
    rows, columns = (Row("1", 1), Row("2", 2)), (Column("$x$"), Column("a+b"))
    for name in ("a$b_{$c", "\x00\x1b[31m", "<&>", "x" * 500):
        made = Grid(name, "r", "c", rows, columns, cells, machine_pb2.Capacity())
        write_plot(made, tmp_path / "x.svg")
        ElementTree.parse(tmp_path / "x.svg")
        write_plot(made, tmp_path / "x.png")


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
