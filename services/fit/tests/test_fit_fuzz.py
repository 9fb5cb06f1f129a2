"""A little of the fuzzing of `make fuzz` in every test run, and that the fuzzing would notice what it looks for."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weighbridge_fit.facts import TensorFact

from services.fit.fuzz import targets
from services.fit.fuzz.guard import ForbiddenError, nothing_executed
from services.fit.fuzz.mutations import files, insides
from services.fit.fuzz.targets import TARGETS, BrokenPromiseError, MemoryFile, check

SMALL = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", TARGETS)
def test_every_seed_is_read(name: str) -> None:
    target = TARGETS[name]
    for content in target.seeds():
        assert check(target, content)
    assert any(check(target, target.wrap(content)) for content in insides(name))


@SMALL
@given(files("safetensors", TARGETS["safetensors"]))
def test_fuzz_safetensors(data: bytes) -> None:
    check(TARGETS["safetensors"], data)


@SMALL
@given(files("gguf", TARGETS["gguf"]))
def test_fuzz_gguf(data: bytes) -> None:
    check(TARGETS["gguf"], data)


@SMALL
@given(files("checkpoint", TARGETS["checkpoint"]))
def test_fuzz_checkpoints(data: bytes) -> None:
    check(TARGETS["checkpoint"], data)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(sorted(TARGETS)))
def test_fuzz_arbitrary_bytes(data: bytes, name: str) -> None:
    check(TARGETS[name], data)
    check(TARGETS[name], TARGETS[name].wrap(data))


# That it would be noticed


ROOT = Path(__file__).parents[3]
FACT = TensorFact("w", "F32", (1,), 1, 4)


def broken(what: str) -> Any:
    """A reader that breaks one promise."""

    def read(file: MemoryFile) -> Any:
        match what:
            case "raises":
                raise KeyError("w")
            case "reads before the file":
                file.read_exactly(-1, 4)
            case "asks for everything":
                file.read_exactly(0, 1 << 40)
            case "executes":
                eval("1 + 1")
            case "imports":
                importlib.import_module("antigravity")
            case "starts":
                os.system("true")
            case "opens to write":
                os.open(os.devnull, os.O_WRONLY)
            case "spawns":
                subprocess.run(["true"])
            case "a name twice":
                return (FACT, FACT), 100
            case "a negative size":
                return (FACT._replace(elements=-1),), 100
            case "more than the file":
                return (FACT._replace(bytes=101),), 100
        return (FACT,), 100

    return replace(TARGETS["gguf"], read=read)


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("raises", KeyError),
        ("reads before the file", BrokenPromiseError),
        ("asks for everything", BrokenPromiseError),
        ("executes", ForbiddenError),
        ("imports", ForbiddenError),
        ("starts", ForbiddenError),
        ("opens to write", ForbiddenError),
        ("spawns", ForbiddenError),
        ("a name twice", BrokenPromiseError),
        ("a negative size", BrokenPromiseError),
        ("more than the file", BrokenPromiseError),
    ],
)
def test_a_broken_promise_is_noticed(what: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        check(broken(what), b"x")
    assert check(broken("nothing"), b"x")


def test_too_much_time_and_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([0.0, 2.5])
    monkeypatch.setattr(targets.time, "process_time", lambda: next(spent))
    with pytest.raises(BrokenPromiseError, match=r"took 2\.5 s"):
        check(broken("nothing"), b"x")
    monkeypatch.undo()
    held = iter([0, 97 << 20])
    monkeypatch.setattr(targets, "_peak_bytes", lambda: next(held))
    with pytest.raises(BrokenPromiseError, match="took 97 MiB"):
        check(broken("nothing"), b"x")


def test_outside_of_the_guard_everything_is_allowed() -> None:
    with nothing_executed():
        pass
    assert eval("1 + 1") == 2


def test_one_command_runs_it_and_replays_an_input(tmp_path: Path) -> None:
    # The seeds alone: no seconds, and no input that must be reached.
    command = [sys.executable, "-m", "services.fit.fuzz.with_hypothesis", "gguf", "0", "1", "1", str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert said.stdout.startswith("inputs: ")
    path = tmp_path / "input"
    path.write_bytes(TARGETS["gguf"].seeds()[0])
    command = [sys.executable, "-m", "services.fit.fuzz", "gguf", "--replay", str(path)]
    assert subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout == "facts\n"
