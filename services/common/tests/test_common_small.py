"""Targets, sizes, logs and owned tasks."""

import asyncio
import errno
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import structlog
from weighbridge_common import logs, sizes
from weighbridge_common.immutable import immutable
from weighbridge_common.tasks import TaskOwner, cancel_and_wait
from weighbridge_proto import targets


def test_the_run_folder_follows_its_variable_then_xdg_then_home() -> None:
    home, xdg = {"HOME": "/home/a"}, {"XDG_RUNTIME_DIR": "/run/user/1"}
    assert targets.run_dir(home) == Path("/home/a/.weighbridge/run")
    assert targets.run_dir({**home, **xdg}) == Path("/run/user/1/weighbridge")
    assert targets.run_dir({**home, **xdg, "WEIGHBRIDGE_RUN_DIR": "/x"}) == Path("/x")


@pytest.mark.parametrize(
    ("name", "variable"),
    [("fit", "WEIGHBRIDGE_FIT_TARGET"), ("engine-sd", "WEIGHBRIDGE_ENGINE_SD_TARGET")],
)
def test_a_service_is_found_by_its_variable_or_its_socket(name: str, variable: str) -> None:
    assert targets.target(name, {"WEIGHBRIDGE_RUN_DIR": "/x"}) == f"unix:/x/{name}.sock"
    assert targets.target(name, {"WEIGHBRIDGE_RUN_DIR": "/x", variable: "host:1"}) == "host:1"


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    folder = "/" + "x" * (targets.MAX_SOCKET_PATH_BYTES - len("/fit.sock") - 1)
    assert len(str(targets.socket_path("fit", {"WEIGHBRIDGE_RUN_DIR": folder}))) == 100
    with pytest.raises(ValueError, match="101 bytes"):
        targets.socket_path("fit", {"WEIGHBRIDGE_RUN_DIR": folder + "x"})
    with pytest.raises(ValueError, match="no service named 'fits'"):
        targets.target("fits", {})


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00 GiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20, "less than 0.01 GiB"),
        (20 * 2**20, "0.02 GiB"),
        (-(2**30), "-1.00 GiB"),
    ],
)
def test_sizes_are_written_in_gib(size: int, text: str) -> None:
    assert sizes.format_gib(size) == text


def lines(out: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_its_trace(recorder: Any) -> None:
    out = StringIO()
    logs.configure("weighbridge-fit", "info", out)
    log = structlog.get_logger()
    log.debug("too quiet")
    log.info("outside")
    with recorder.tracer.start_as_current_span("request") as span:
        log.info("inside", bytes_free=5)
    outside, inside = lines(out)
    assert (outside["event"], outside["service"], outside["level"]) == ("outside", "weighbridge-fit", "info")
    assert outside["timestamp"].endswith("Z") and "trace_id" not in outside
    assert inside["trace_id"] == f"{span.get_span_context().trace_id:032x}"
    assert inside["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert inside["bytes_free"] == 5


def test_fields_that_can_hold_a_prompt_or_a_secret_are_withheld() -> None:
    out = StringIO()
    logs.configure("s", "info", out)
    structlog.get_logger().info("call", prompt="a cat", secret=b"key", messages=["a cat"], steps=4)
    (line,) = lines(out)
    assert line["prompt"] == line["secret"] == line["messages"] == "[withheld]" and line["steps"] == 4


def test_what_libraries_warn_about_comes_in_the_same_form() -> None:
    out = StringIO()
    logs.configure("s", "info", out)
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("look: %s", "here")
    (line,) = lines(out)
    assert (line["event"], line["logger"], line["service"]) == ("look: here", "library", "s")


def test_a_log_that_cannot_be_written_fails_nobody_and_goes_on_when_there_is_room() -> None:
    """Of a full disk is told just when it is full: the ledger's log may lie beside its store."""

    class Disk(StringIO):
        is_full = True

        def write(self, text: str) -> int:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

        def flush(self) -> None:
            if self.is_full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = Disk()
    logs.configure("s", "info", out)
    structlog.get_logger("ours").error("lost")
    logging.getLogger("a.library").warning("lost, too")
    out.is_full = False
    structlog.get_logger("ours").info("kept")
    assert [json.loads(line)["event"] for line in out.getvalue().splitlines()] == ["kept"]


def test_an_error_without_its_text_still_tells_what_the_system_said() -> None:
    def fields(error: Exception, with_text: bool) -> dict[str, str]:
        try:
            raise error
        except Exception as caught:
            return logs.describe_error(caught, with_text=with_text)

    assert fields(ValueError("a cat"), True)["error_text"] == "a cat"
    assert "a cat" not in str(fields(ValueError("a cat"), False))
    told = fields(OSError(28, "No space left on device", "/a cat"), False)
    assert told["error_text"] == "No space left on device" and "/a cat" not in str(told)


async def test_an_owner_ends_its_tasks_and_their_failures_are_seen() -> None:
    out = StringIO()
    logs.configure("s", "info", out)
    owner, cleaned = TaskOwner(), []

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append(True)

    async def broken() -> None:
        raise ValueError("why")

    running = owner.start(endless(), "endless")
    failed = owner.start(broken(), "broken")
    await asyncio.wait([failed])
    await owner.aclose()
    assert running.cancelled() and cleaned == [True]
    (line,) = lines(out)
    assert (line["event"], line["task"], line["error_text"]) == ("background_task_failed", "broken", "why")


async def test_cancel_and_wait_returns_when_the_task_has_ended() -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("on the way out") from None

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.done() and isinstance(task.exception(), ValueError)


@immutable
class _Size:
    """What every immutable is like."""

    gib: int
    exact: bool = True


def test_an_immutable_is_compared_hashed_and_replaced_like_a_frozen_dataclass() -> None:
    size = _Size(3)
    assert size == _Size(3, exact=True) != _Size(4)
    assert hash(size) == hash(_Size(3))
    assert replace(size, gib=4) == _Size(4)
    assert not hasattr(size, "__dict__"), "slots"


def test_the_type_checker_lets_nobody_change_an_immutable(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from weighbridge_common.immutable import immutable\n"
        "@immutable\nclass Size:\n    gib: int\n"
        "size = Size(3)\nsize.gib = 4\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 'py:6: error: Property "gib"' in checked.stdout, checked.stdout + checked.stderr
