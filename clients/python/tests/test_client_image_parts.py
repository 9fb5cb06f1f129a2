"""What `image` is made of: pictures out of pieces, names, previews, what is left of a render."""

import asyncio
import base64
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from weighbridge import CallError, Suite, SyncSuite
from weighbridge.cli.image_display import Pace, RenderDisplay, duration_words
from weighbridge.cli.image_files import MAX_STEM_CHARS, PictureFiles, stem_of
from weighbridge.cli.image_preview import MAX_BYTES, Protocol, preview, protocol
from weighbridge.pictures import PictureAssembler
from weighbridge_proto.engines.v1 import engine_service_pb2, image_service_pb2
from weighbridge_proto.fit.v1 import plan_pb2

from clients.python.tests.client_fake_images import png, progress

Chunk = image_service_pb2.ImageChunk


def request(count: int) -> image_service_pb2.GenerateImageRequest:
    return image_service_pb2.GenerateImageRequest(prompt="a fox", size=plan_pb2.ImageWorkload(batch=count))


async def test_a_program_gets_whole_pictures(image_suite: Any) -> None:
    async with Suite() as suite:
        rendering = await suite.engine("sd").render(request(2))
    assert [(picture.index, picture.data) for picture in rendering.pictures] == [(0, png(10)), (1, png(20))]
    assert {picture.media_type for picture in rendering.pictures} == {"image/png"}
    assert rendering.finished.seed == 41


def test_a_program_without_asyncio_gets_the_same(image_suite: Any) -> None:
    with SyncSuite() as suite:
        assert [picture.data for picture in suite.render("sd", request(1)).pictures] == [png(10)]
        kinds = [event.WhichOneof("event") for event in suite.generate_image("sd", request(1))]
    assert kinds[-3:] == ["chunk", "chunk", "finished"]


async def test_leaving_a_render_early_cancels_it(image_suite: Any) -> None:
    images = image_suite.state.images
    images.hang_at = "sampling"
    async with Suite() as suite:
        events = suite.engine("sd").generate_image(request(1))
        await anext(events)
        assert await asyncio.to_thread(images.hanging.wait, 10)
        await events.aclose()
    assert images.cancelled.wait(10)


def test_pieces_of_two_pictures_are_never_mixed() -> None:
    assembler = PictureAssembler()
    assert assembler.take(Chunk(image_index=0, data=b"a")) is None
    with pytest.raises(CallError, match="IMAGE_INCOMPLETE"):
        assembler.take(Chunk(image_index=1, data=b"b", last=True))


@pytest.mark.parametrize(
    ("prompt", "stem"),
    [
        ("A red fox, in the snow!", "a-red-fox-in-the-snow"),
        ("../../etc/passwd", "etc-passwd"),
        ("ein Füchslein, größer", "ein-füchslein-größer"),
        ("!?\x1b", "image"),
    ],
)
def test_a_file_is_named_after_the_words_of_the_prompt(prompt: str, stem: str) -> None:
    assert stem_of(prompt) == stem


def test_a_long_prompt_makes_a_name_of_whole_words() -> None:
    stem = stem_of("antidisestablishmentarianism " * 9)
    assert stem == "antidisestablishmentarianism"
    assert len(stem_of("x" * 500)) == MAX_STEM_CHARS


def test_a_name_that_was_taken_meanwhile_is_not_taken_back(tmp_path: Path) -> None:
    made = PictureFiles(str(tmp_path / "fox.png"), "", 1, "png", force=False)
    (tmp_path / "fox.png").write_bytes(b"another program's")
    assert made.save(0, b"mine") == (tmp_path / "fox-2.png", False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "fox.png": b"another program's",
        "fox-2.png": b"mine",
    }


def test_a_file_system_without_hard_links_keeps_what_is_there_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*names: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "a-fox.png").write_bytes(b"there")
    made = PictureFiles(str(tmp_path), "a fox", 1, "png", force=False)
    assert made.save(0, b"mine") == (tmp_path / "a-fox-2.png", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-fox-2.png", "a-fox.png"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = PictureFiles(str(tmp_path), "a fox", 1, "png", force=True)

    def refuse(*names: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        made.save(0, b"mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"TERM": "xterm-kitty"}, Protocol.KITTY),
        ({"TERM": "xterm-ghostty"}, Protocol.KITTY),
        ({"TERM": "xterm-256color", "KONSOLE_VERSION": "220401"}, Protocol.KITTY),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "iTerm.app"}, Protocol.ITERM2),
        ({"TERM": "xterm-256color", "LC_TERMINAL": "iTerm2"}, Protocol.ITERM2),
        ({"TERM": "xterm-256color", "TERM_PROGRAM": "WezTerm", "KITTY_WINDOW_ID": "1"}, Protocol.ITERM2),
        ({"TERM": "xterm-256color"}, None),
        ({"TERM": "tmux-256color", "KITTY_WINDOW_ID": "1"}, None),
        ({"TERM": "xterm-256color", "TMUX": "/tmp/s", "TERM_PROGRAM": "iTerm.app"}, None),
        ({}, None),
    ],
)
def test_a_terminal_is_known_by_what_it_says(environ: dict[str, str], expected: Protocol | None) -> None:
    assert protocol(environ) is expected


def test_kitty_gets_the_file_in_pieces_within_its_bounds() -> None:
    data = png(7, side=64) + bytes(9000)
    shown = preview(data, Protocol.KITTY, 64, 64, 100)
    pieces = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", shown)
    assert base64.b64decode("".join(text for _, text in pieces)) == data
    assert all(len(text) <= 4096 for _, text in pieces)
    assert pieces[0][0] == "a=T,f=100,q=2,c=40,m=1"
    assert [control for control, _ in pieces[1:]] == ["m=1"] * (len(pieces) - 2) + ["m=0"]


def test_a_tall_picture_is_bounded_by_rows_and_a_narrow_terminal_by_columns() -> None:
    assert ",r=20," in preview(png(7), Protocol.KITTY, 64, 128, 100)
    assert ",c=12," in preview(png(7), Protocol.KITTY, 64, 64, 12)


def test_iterm2_gets_the_file_whole() -> None:
    data = b"\xff\xd8 a JPEG"
    shown = preview(data, Protocol.ITERM2, 64, 64, 100)
    options, _, text = shown.partition(":")
    assert options == "\x1b]1337;File=inline=1;size=9;width=40;height=20;preserveAspectRatio=1"
    assert base64.b64decode(text.removesuffix("\x07\n")) == data


def test_what_a_terminal_could_not_show_is_not_sent() -> None:
    assert preview(b"\xff\xd8 a JPEG", Protocol.KITTY, 64, 64, 100) == ""
    assert preview(bytes(MAX_BYTES + 1), Protocol.ITERM2, 64, 64, 100) == ""


def test_what_is_left_of_a_phase_is_told_by_its_steps() -> None:
    now = [100.0]
    pace = Pace(lambda: now[0])

    def left(phase: str, done: int, total: int, at: float) -> str:
        now[0] = at
        return pace.left_words(progress(phase, done, total).progress)

    assert left("text_encode", 0, 1, 100.0) == ""
    assert left("sampling", 0, 20, 110.0) == ""
    assert left("sampling", 5, 20, 120.0) == "30 s left", "5 steps in 10 s, 15 to come"
    assert left("sampling", 20, 20, 150.0) == ""
    assert left("decode", 0, 4, 150.0) == "", "the pace of another phase says nothing"
    assert left("decode", 1, 4, 250.0) == "5 min 00 s left"
    assert duration_words(59.6) == "1 min 00 s"


async def test_a_bar_follows_the_load_s_bar_and_ends_with_the_render(image_suite: Any) -> None:
    to = Console(file=io.StringIO(), force_terminal=True, width=100)
    starting = engine_service_pb2.LoadStarting(phase="weights", fraction=0.5)
    load = engine_service_pb2.LoadModelResponse(starting=starting)
    async with Suite() as suite, RenderDisplay(to, suite.engine("sd")) as display:
        await display.show(image_service_pb2.GenerateImageResponse(load=load))
        await display.show(progress("sampling", 3, 20))
        await display.show(image_service_pb2.GenerateImageResponse(load=load))
        await display.show(progress("sampling", 4, 20))
        await display.show(image_service_pb2.GenerateImageResponse(finished=image_service_pb2.ImageFinished()))
        to.print("after")
    shown = to.file.getvalue()  # type: ignore[attr-defined] # the StringIO given above
    assert "RENDERING sampling 3/20" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h"), "each bar gives the cursor back"
    assert shown.rstrip().endswith("after")
