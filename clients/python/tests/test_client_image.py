"""`image` against a fake engine: its request, its files, its words and exit codes."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from weighbridge.cli import main
from weighbridge.cli.image_failures import OPTION_OF_FIELD
from weighbridge.supervision.services import ENGINE_MODULES, MissingServiceError, suite_services
from weighbridge_proto.engines.v1 import image_service_pb2
from weighbridge_proto.engines.v1.engine_service_pb2 import LoadModelRequest
from weighbridge_proto.errors import RequestError, invalid_argument
from weighbridge_proto.fit.v1 import plan_pb2
from weighbridge_proto.fit.v1.fit_service_pb2 import PlanModelRequest

from clients.python.tests.client_fake_images import png

Request = image_service_pb2.GenerateImageRequest

FIRST, SECOND, THIRD = png(10), png(20), png(30)
"""What the fake renders."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of each test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["image", *arguments], input=stdin)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def asked(suite: Any) -> Any:
    return suite.state.asked(Request)[-1]


def test_the_image_goes_to_a_file_named_after_the_prompt_and_its_name_alone_to_stdout(
    image_suite: Any, folder: Path
) -> None:
    done = run("/m", "A red fox, in the snow!")
    assert (done.exit_code, done.stdout) == (0, "a-red-fox-in-the-snow.png\n")
    assert files(folder) == {"a-red-fox-in-the-snow.png": FIRST}
    told = done.stderr.splitlines()
    assert told == [
        "STARTING  weights",
        "QUEUED    place 2",
        "RENDERING reading the prompt",
        "RENDERING sampling, 4 steps",
        "RENDERING decoding",
        "[64 × 64, seed 41, rendered in 1.5 s]",
    ]


def test_what_is_not_given_is_left_to_the_model(image_suite: Any) -> None:
    assert run("/m", "a fox").exit_code == 0
    request = asked(image_suite)
    assert (request.model.path, request.prompt, request.size.batch) == ("/m", "a fox", 1)
    left = ("steps", "guidance", "seed", "strength", "options", "mask")
    assert [name for name in left if request.HasField(name)] == []
    assert request.format == image_service_pb2.IMAGE_FORMAT_PNG


def test_every_option_reaches_the_request(image_suite: Any, folder: Path) -> None:
    for name, data in (("source.png", b"source"), ("mask.png", b"mask"), ("one.png", b"1"), ("two.png", b"2")):
        (folder / name).write_bytes(data)
    options = (
        "--size 128x64 --steps 8 --guidance 3.5 --seed 0 --sampler euler --scheduler karras --count 2 --strength 0.4"
    )
    options += " --from source.png --mask mask.png --reference one.png --reference two.png --require-source"
    options += " --format webp --strip-metadata --set vae_tiling=on --set parts=vae=one.png"
    assert run("/m", "a fox", "--negative", "a cat", *options.split()).exit_code == 0
    request = asked(image_suite)
    assert (request.size.width_px, request.size.height_px, request.size.batch) == (128, 64, 2)
    assert (request.steps, request.guidance, request.sampler, request.scheduler) == (8, 3.5, "euler", "karras")
    assert request.HasField("seed") and request.seed == 0
    assert (request.strength, request.require_source, request.negative_prompt) == (0.4, True, "a cat")
    assert [image.data for image in request.source_images] == [b"source"]
    assert [image.data for image in request.reference_images] == [b"1", b"2"]
    assert request.mask.data == b"mask"
    assert (request.format, request.strip_metadata) == (image_service_pb2.IMAGE_FORMAT_WEBP, True)
    assert request.options.sd.vae_tiling
    assert request.options.sd.parts["vae"] == str(folder / "one.png"), "a part is named as seen from here"


def test_a_tier_takes_the_place_of_a_size(image_suite: Any) -> None:
    assert run("/m", "a fox", "--quality", "draft").exit_code == 0
    assert asked(image_suite).size.quality == plan_pb2.QUALITY_TIER_DRAFT
    assert run("/m", "a fox", "--quality", "draft", "--size", "64x64").exit_code == 2


@pytest.mark.parametrize("arguments", [["/m"], ["/m", "-"]])
def test_the_prompt_is_taken_from_a_pipe(image_suite: Any, arguments: list[str]) -> None:
    assert run(*arguments, stdin="from a pipe\n").stdout == "from-a-pipe.png\n"
    assert asked(image_suite).prompt == "from a pipe"
    assert run(*arguments, stdin=" \n").exit_code == 2


def test_several_images_go_to_numbered_files(image_suite: Any, folder: Path) -> None:
    done = run("/m", "a fox", "-o", "fox.png", "--count", "3")
    assert done.stdout.split() == ["fox-1.png", "fox-2.png", "fox-3.png"]
    assert files(folder) == {"fox-1.png": FIRST, "fox-2.png": SECOND, "fox-3.png": THIRD}
    assert "[64 × 64, seeds 41 to 43, rendered in 1.5 s]" in done.stderr


def test_a_name_that_was_given_is_never_taken_from_another_file_unasked(image_suite: Any, folder: Path) -> None:
    (folder / "fox-2.png").write_bytes(b"mine")
    refused = run("/m", "a fox", "-o", "fox.png", "--count", "2")
    assert refused.exit_code == 2
    assert "fox-2.png is there already. --force replaces it." in refused.stderr
    assert image_suite.state.asked(Request) == [], "refused before minutes of rendering"
    assert files(folder) == {"fox-2.png": b"mine"}
    forced = run("/m", "a fox", "-o", "fox.png", "--count", "2", "--force")
    assert forced.exit_code == 0
    assert "Replaced fox-2.png." in forced.stderr and "Replaced fox-1.png." not in forced.stderr
    assert files(folder) == {"fox-1.png": FIRST, "fox-2.png": SECOND}


def test_a_name_made_of_the_prompt_gives_way(image_suite: Any, folder: Path) -> None:
    (folder / "a-fox.png").write_bytes(b"mine")
    assert run("/m", "a fox").stdout == "a-fox-2.png\n"
    assert run("/m", "a fox", "--count", "2").stdout.split() == ["a-fox-3.png", "a-fox-4.png"], "one row of numbers"
    assert (folder / "a-fox.png").read_bytes() == b"mine"


def test_a_folder_gets_files_named_after_the_prompt(image_suite: Any, folder: Path) -> None:
    (folder / "pictures").mkdir()
    assert run("/m", "a fox", "-o", "pictures").stdout == "pictures/a-fox.png\n"
    missing = run("/m", "a fox", "-o", "elsewhere/")
    assert (missing.exit_code, image_suite.state.asked(Request)[1:]) == (2, [])


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fox.JPG", image_service_pb2.IMAGE_FORMAT_JPEG),
        ("fox.jpeg", image_service_pb2.IMAGE_FORMAT_JPEG),
        ("fox.webp", image_service_pb2.IMAGE_FORMAT_WEBP),
        ("fox", image_service_pb2.IMAGE_FORMAT_PNG),
    ],
)
def test_the_files_name_says_the_format(image_suite: Any, folder: Path, name: str, meant: int) -> None:
    assert run("/m", "a fox", "-o", name).stdout == f"{name}\n"
    assert asked(image_suite).format == meant


def test_a_name_and_a_format_that_contradict_are_refused(image_suite: Any) -> None:
    assert run("/m", "a fox", "-o", "fox.png", "--format", "jpeg").exit_code == 2
    assert run("/m", "a fox", "-o", "fox.gif").exit_code == 2
    assert run("/m", "a fox", "-o", "fox-v1.5", "--format", "webp").stdout == "fox-v1.5\n"


def test_nothing_but_an_ordinary_file_is_replaced(image_suite: Any, folder: Path) -> None:
    (folder / "target").write_bytes(b"mine")
    (folder / "fox.png").symlink_to("target")
    assert run("/m", "a fox", "-o", "fox.png", "--force").exit_code == 2
    assert (folder / "target").read_bytes() == b"mine"


@pytest.mark.parametrize("option", [["--strength", "0.5"], ["--mask", "m.png"], ["--require-source"]])
def test_what_belongs_to_a_source_needs_one(image_suite: Any, folder: Path, option: list[str]) -> None:
    (folder / "m.png").write_bytes(b"m")
    assert run("/m", "a fox", *option).exit_code == 2


def test_images_that_no_request_could_carry_are_refused_here(image_suite: Any, folder: Path) -> None:
    with (folder / "large.png").open("wb") as large:
        large.truncate(32 * 2**20)
    done = run("/m", "a fox", "--from", "large.png")
    assert done.exit_code == 2
    assert "32.00 MiB" in done.stderr or "32.0 MiB" in done.stderr


def test_a_source_that_was_not_used_and_a_size_that_was_rounded_are_told(image_suite: Any, folder: Path) -> None:
    (folder / "source.png").write_bytes(b"source")
    image_suite.state.images.source_skipped_reason = "It does not start from a source image."
    done = run("/m", "a fox", "--from", "source.png", "--size", "60x64")
    assert done.exit_code == 0
    assert "The image of --from was not used. It does not start from a source image." in done.stderr
    assert "Rendered at 64 × 64 instead of 60 × 64" in done.stderr
    assert "instead of" not in run("/m", "a fox", "--size", "64x64").stderr


def test_json_is_one_object_an_event_with_names_of_files_and_no_pictures(image_suite: Any, folder: Path) -> None:
    done = run("/m", "a fox", "--count", "2", "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [next(iter(line)) for line in lines]
    assert kinds == ["load", "queued", *["progress"] * 5, "image", "image", "finished"]
    first = {"image_index": 0, "file": "a-fox-1.png", "media_type": "image/png", "replaced": False}
    assert lines[-3]["image"] == {**first, "size_bytes": str(len(FIRST))}
    assert lines[-1]["finished"]["seed"] == "41"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("field", "told"),
    [
        # README.md is --from, two.png the second --reference: fields as engines.v1 names them.
        ("source_images[0].data", "--from README.md: is wrong."),
        ("mask.data", "--mask mask.png: is wrong."),
        ("reference_images[1].data", "--reference two.png: is wrong."),
        ("reference_images[7].data", "--reference: is wrong."),
        ("source_images", "--from: is wrong."),
        ("size.batch", "--count: is wrong."),
        ("size.height_px", "--size, height: is wrong."),
        ("negative_prompt", "--negative: is wrong."),
        ("model", "model: is wrong."),  # no option: as it came
    ],
)
def test_a_field_that_is_refused_is_told_as_the_option_and_the_file_that_it_came_from(
    image_suite: Any, folder: Path, field: str, told: str
) -> None:
    for name in ("README.md", "mask.png", "one.png", "two.png"):
        (folder / name).write_bytes(b"words")
    options = ("--from", "README.md", "--mask", "mask.png", "--reference", "one.png", "--reference", "two.png")
    image_suite.state.failures["GenerateImage"] = invalid_argument(field, "is wrong.", "INVALID_IMAGE")
    done = run("/m", "a fox", *options)
    assert (done.exit_code, done.stderr) == (1, f"{told} [INVALID_IMAGE]\n")
    program = json.loads(run("/m", "a fox", *options, "--json").stderr)
    assert program["failure"]["message"] == f"{field}: is wrong.", "programs are told the field"


def test_every_option_that_a_field_is_told_as_is_there_and_so_is_the_field() -> None:
    options = {option for parameter in main.commands["image"].params for option in parameter.opts}  # type: ignore[attr-defined]
    for field, option in OPTION_OF_FIELD.items():
        descriptor = Request.DESCRIPTOR
        *outer, last = field.split(".")
        for name in outer:
            descriptor = descriptor.fields_by_name[name].message_type
        assert last in descriptor.fields_by_name
        assert option.split(",")[0] in options | {"PROMPT"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--count 99", "Invalid value for '--count': 99 is not in the range 1<=x<=8."),
        ("--count 0", "Invalid value for '--count': 0 is not in the range 1<=x<=8."),
        ("--count 9999999999", "'--count': 9999999999 is not in the range 1<=x<=8."),
        ("--size 100000x100", "'--size': '100000x100' is too large: a side has at most 4,096 pixels."),
        ("--size 64x4097", "'--size': '64x4097' is too large: a side has at most 4,096 pixels."),
        ("--size " + "9" * 5000 + "x64", "is too large: a side has at most 4,096 pixels."),
        ("--size 64", "'--size': '64' is no size. Write width and height in pixels: 1024x1024."),
        ("--size 0x64", "'--size': '0x64' is no size."),
        ("--steps 9999999999", "Invalid value for '--steps'"),  # more than the field holds
        ("--seed 9999999999", "Invalid value for '--seed'"),
    ],
)
def test_a_number_that_cannot_be_is_refused_with_those_that_can(image_suite: Any, options: str, told: str) -> None:
    refused = run("/m", "a fox", *options.split())
    assert refused.exit_code == 2
    assert told in refused.stderr
    assert image_suite.state.asked(Request) == []


def test_one_step_is_told_as_one(image_suite: Any) -> None:
    image_suite.state.images.steps = 1
    assert "RENDERING sampling, 1 step" in run("/m", "a fox").stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (grpc.StatusCode.FAILED_PRECONDITION, "MODEL_WONT_RUN", 3),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "CANNOT_GROW", 3),
        (grpc.StatusCode.UNAVAILABLE, "LEDGER_UNREACHABLE", 4),
        (grpc.StatusCode.UNAVAILABLE, "ENGINE_DIED", 1),
        (grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_SAMPLER", 1),
    ],
)
def test_a_render_that_fails_says_why_and_leaves_no_file(
    image_suite: Any, folder: Path, code: grpc.StatusCode, reason: str, expected: int
) -> None:
    image_suite.state.failures["GenerateImage"] = RequestError(code, reason, f"Because of {reason}.")
    done = run("/m", "a fox")
    assert (done.exit_code, files(folder)) == (expected, {})
    assert f"Because of {reason}." in done.stderr


def test_images_that_came_whole_before_a_failure_stand(image_suite: Any, folder: Path) -> None:
    late = RequestError(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", "It broke.")
    image_suite.state.failures["AfterImages"] = late
    assert run("/m", "a fox").exit_code == 1
    assert files(folder) == {"a-fox.png": FIRST}


class FullDisk:
    """A disk with room for so many bytes: what is written beyond them fails as on Linux, a part of it there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room_bytes: int) -> None:
        self.room_bytes = room_bytes
        really_open = Path.open

        def opened(path: Path, mode: str = "r", **how: Any) -> Any:
            file = really_open(path, mode, **how)
            return NoMoreThan(file, self) if mode == "xb" else file

        monkeypatch.setattr(Path, "open", opened)


class NoMoreThan:
    """A file on a :class:`FullDisk`."""

    def __init__(self, file: Any, disk: FullDisk) -> None:
        self._file, self._disk = file, disk

    def __enter__(self) -> "NoMoreThan":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> None:
        written = data[: self._disk.room_bytes]
        self._file.write(written)
        self._disk.room_bytes -= len(written)
        if len(written) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        # The first image's seed is 41, and each further one's is by one more.
        (0, "fox-1.png, fox-2.png and fox-3.png cannot be written: the disk is full. No image is kept. Make room "
            "there, or name another place with -o: the same command with --seed 41 renders them again."),
        (1, "fox-2.png and fox-3.png cannot be written: the disk is full. fox-1.png is kept. Make room there, or name "
            "another place with -o: the same command with --seed 42 --count 2 renders them again."),
        (2, "fox-3.png cannot be written: the disk is full. fox-1.png and fox-2.png are kept. Make room there, or name "
            "another place with -o: the same command with --seed 43 --count 1 renders it again."),
    ],
)  # fmt: skip
def test_a_full_disk_keeps_what_was_written_and_tells_how_to_get_the_rest(
    image_suite: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, kept: int, told: str
) -> None:
    rendered = {"fox-1.png": FIRST, "fox-2.png": SECOND, "fox-3.png": THIRD}
    there = dict(list(rendered.items())[:kept])
    FullDisk(monkeypatch, sum(map(len, there.values())) + len(FIRST) // 2)
    done = run("/m", "a fox", "-o", "fox.png", "--count", "3")
    assert done.exit_code == 1
    assert files(folder) == there, "no half image, by no name"
    assert done.stdout.split() == list(there)
    assert done.stderr.splitlines()[-1] == told


def test_an_image_that_cannot_be_written_is_named_with_the_cause(
    image_suite: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (folder / "fox.png").write_bytes(b"mine")
    monkeypatch.setattr(Path, "replace", refuse)
    done = run("/m", "a fox", "-o", "fox.png", "--force", "--json")
    assert done.exit_code == 1
    assert files(folder) == {"fox.png": b"mine"}
    assert [next(iter(json.loads(line))) for line in done.stdout.splitlines()][-1] == "finished", "and no image"
    assert done.stderr == (
        "fox.png cannot be written: Permission denied. No image is kept. Put that right, or name another place with "
        "-o: the same command with --seed 41 renders it again.\n"
    )


def test_a_render_that_fails_after_a_full_disk_tells_of_the_disk(
    image_suite: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    FullDisk(monkeypatch, 0)
    image_suite.state.failures["AfterImages"] = RequestError(grpc.StatusCode.INTERNAL, "ENGINE_ERROR", "It broke.")
    done = run("/m", "a fox", "-o", "fox.png", "--seed", "7")
    assert (done.exit_code, files(folder)) == (1, {})
    assert "fox.png cannot be written: the disk is full." in done.stderr and "with --seed 7 renders" in done.stderr
    assert "the same command renders it again" in run("/m", "a fox", "-o", "fox.png").stderr, "nothing told the seed"


@pytest.mark.parametrize("missing", ["finished", "last"])
def test_a_stream_that_ends_early_is_a_failure_and_no_half_file(image_suite: Any, folder: Path, missing: str) -> None:
    image_suite.state.images.leave_out.add(missing)
    done = run("/m", "a fox")
    assert done.exit_code == 1
    assert "IMAGE_INCOMPLETE" in done.stderr
    assert files(folder) == ({"a-fox.png": FIRST} if missing == "finished" else {})


def test_load_asks_the_plan_of_what_is_to_be_loaded_which_engine_it_is_for(image_suite: Any, folder: Path) -> None:
    image_suite.state.plan.engine_kind = plan_pb2.ENGINE_KIND_SD
    (folder / "vae.safetensors").touch()
    done = CliRunner().invoke(main, ["load", "/m", "--set", "parts=vae=vae.safetensors"])
    assert done.exit_code == 0, done.output
    (planned,) = image_suite.state.asked(PlanModelRequest)
    assert planned.options.sd.parts["vae"] == str(folder / "vae.safetensors"), "without it no law may know the model"


def test_load_says_how_large_the_renders_will_be(image_suite: Any) -> None:
    image_suite.state.plan.engine_kind = plan_pb2.ENGINE_KIND_SD
    load = ("load", "/m", "--engine", "sd")
    assert CliRunner().invoke(main, [*load, "--size", "768x512", "--batch", "2"]).exit_code == 0
    assert CliRunner().invoke(main, [*load, "--quality", "high"]).exit_code == 0
    assert CliRunner().invoke(main, [*load, "--size", "64x64", "--context", "4096"]).exit_code == 2
    sized, tiered = (request.workload.image for request in image_suite.state.asked(LoadModelRequest))
    assert (sized.width_px, sized.height_px, sized.batch) == (768, 512, 2)
    assert (tiered.quality, tiered.width_px) == (plan_pb2.QUALITY_TIER_HIGH, 0)


@pytest.mark.parametrize("kind", ["sd", "ds4"])
def test_an_engine_whose_libraries_are_missing_is_not_started(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(ENGINE_MODULES, kind, ("no_such_library_of_anybody",))
    with pytest.raises(MissingServiceError, match=rf"pip install 'weighbridge-engines\[{kind}\]'"):
        suite_services([kind])


def test_without_an_engine_for_images_it_says_how_to_start_one(fake_suite: Any) -> None:
    done = run("/m", "a fox")
    assert done.exit_code == 4
    assert "What runs: mlx." in done.stderr and "weighbridge up --engines mlx,sd" in done.stderr


def test_without_a_suite_it_says_how_to_start_one(run_dir: Path) -> None:
    done = run("/m", "a fox")
    assert done.exit_code == 4
    assert "weighbridge up" in done.stderr


@pytest.mark.parametrize("place", ["sampling", "chunk"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_render_and_leaves_no_file(
    image_suite: Any, folder: Path, place: str, number: signal.Signals
) -> None:
    images = image_suite.state.images
    images.hang_at = place
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "image", "/m", "a fox"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert images.hanging.wait(60)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out, files(folder)) == (130, "", {})
    assert "Traceback" not in errors
    assert images.cancelled.wait(10)


def test_a_terminal_sees_a_bar_with_steps_and_the_picture(image_suite: Any, folder: Path) -> None:
    ours, theirs = os.openpty()
    environ = {name: value for name, value in os.environ.items() if name not in ("TMUX", "STY", "ZELLIJ")}
    process = subprocess.Popen(
        [sys.executable, "-m", "weighbridge", "image", "/m", "a fox"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**environ, "TERM": "xterm-kitty", "COLUMNS": "100"},
    )
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # how Linux tells that the other side is closed
        pass
    os.close(ours)
    assert process.wait(60) == 0
    assert b"RENDERING sampling 2/4" in seen
    assert b"\x1b_Ga=T,f=100,q=2," in seen
    assert seen.index(b"\x1b_G") < seen.rindex(b"a-fox.png") < seen.rindex(b"seed 41")
