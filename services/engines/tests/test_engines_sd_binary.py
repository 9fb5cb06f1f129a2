"""Finding sd-server, asking it what it knows, and what of a plan it is given."""

import json
import os
import stat
import sys
from pathlib import Path

import pytest
from weighbridge_engines.sd_server import binary
from weighbridge_engines.sd_server.arguments import command_line
from weighbridge_engines.supervisor import program as program_module
from weighbridge_engines.supervisor.program import BinaryMissingError
from weighbridge_proto.errors import RequestError

HELP = """Usage: sd-server [options]

Svr Options:
  -l, --listen-ip <string>      server listen ip (default: 127.0.0.1)
  --listen-port <int>           server listen port (default: 1234)
  -v, --verbose                 print extra info

Context Options:
  -m, --model <string>                     path to full model
  --lora-model-dir <string>                lora model directory, see --type
  --offload-to-cpu                         place the weights in RAM
  --max-vram <float>                       maximum VRAM budget
"""


def program(folder: Path, body: str) -> Path:
    """A program that says what `body` prints."""
    path = folder / "sd-server"
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return path


def helpful(folder: Path, version: str = "version unknown, commit unknown", text: str = HELP) -> Path:
    return program(folder, f"print({('stable-diffusion.cpp ' + version)!r}); print({text!r})")


@pytest.mark.parametrize("named", ["", "sd-server", "bin"], ids=["its folder", "itself", "the folder above"])
def test_it_is_found_where_the_setting_says(tmp_path: Path, named: str) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    path = helpful(folder)
    setting = {"": folder, "sd-server": path, "bin": tmp_path}[named]
    assert binary.PROGRAM.locate(str(setting)) == path


def test_without_a_setting_it_is_the_first_on_path_else_the_person_s_own(tmp_path: Path) -> None:
    own = tmp_path / "home" / ".weighbridge" / "bin"
    own.mkdir(parents=True)
    on_path = tmp_path / "usr"
    on_path.mkdir()
    environ = {"PATH": str(on_path), "HOME": str(tmp_path / "home")}
    with pytest.raises(BinaryMissingError, match="WEIGHBRIDGE_ENGINES_SD_SERVER"):
        binary.PROGRAM.locate("", environ)
    assert binary.PROGRAM.locate("", environ | {"X": str(helpful(own))}) == own / "sd-server"
    helpful(on_path)
    assert binary.PROGRAM.locate("", environ) == on_path / "sd-server"


def test_a_setting_that_names_nothing_is_no_reason_to_take_another_one(tmp_path: Path) -> None:
    helpful(tmp_path)
    with pytest.raises(BinaryMissingError, match="names no sd-server"):
        binary.PROGRAM.locate(str(tmp_path / "elsewhere"), {"PATH": str(tmp_path)})


def test_its_flags_are_those_that_its_help_lists(tmp_path: Path) -> None:
    found = binary.probe(helpful(tmp_path))
    assert found.flags == {
        "--listen-ip", "--listen-port", "--verbose", "--model", "--lora-model-dir", "--offload-to-cpu", "--max-vram",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("version master-789, commit 1a2b3c4", "master-789"),
        ("version unknown, commit 1a2b3c4", "1a2b3c4"),
        ("version unknown, commit unknown", "unknown"),
    ],
)
def test_its_version_is_what_it_says(tmp_path: Path, said: str, version: str) -> None:
    assert binary.probe(helpful(tmp_path, said)).version == version


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("print('Usage: something else')", "names no --listen-port"),
        ("import sys; print('error while loading shared libraries: libvulkan.so.1', file=sys.stderr); sys.exit(127)",
         "libvulkan"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another processor"),
    ],
    ids=["another program", "a library is missing", "built for another processor"],
)  # fmt: skip
def test_a_program_that_does_not_answer_says_why(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(BinaryMissingError, match=why):
        binary.probe(program(tmp_path, body))


def test_one_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(program_module, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(BinaryMissingError, match="did not answer"):
        binary.probe(program(tmp_path, "import time; time.sleep(99)"))


def test_it_is_asked_once_and_again_when_a_file_of_it_changed(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    path = program(tmp_path, f"open({str(asked)!r}, 'a').write('x'); print({HELP!r})")
    cache = tmp_path / "cache"
    first, again = binary.probe(path, cache), binary.probe(path, cache)
    assert (asked.read_text(), again) == ("x", first)
    path.write_text(path.read_text() + "# another build\n")
    assert binary.probe(path, cache).build != first.build
    assert asked.read_text() == "xx"


def test_a_cache_that_cannot_be_read_or_written_is_done_without(tmp_path: Path) -> None:
    path, cache = helpful(tmp_path), tmp_path / "cache"
    build = binary.probe(path, cache).build
    (cache / f"{build}.json").write_text("{")
    assert binary.probe(path, cache).flags
    assert json.loads((cache / f"{build}.json").read_text())["cache_version"] == binary.CACHE_VERSION
    assert binary.probe(path, tmp_path / "sd-server" / "no folder").flags


def test_a_library_beside_it_is_a_part_of_the_build_and_tells_the_backend(tmp_path: Path) -> None:
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    path = helpful(tmp_path / "bin")
    alone = binary.probe(path)
    (tmp_path / "lib" / "libggml-vulkan.so").write_bytes(b"\x7fELF ggml_backend_vk_init \0")
    found = binary.probe(path)
    assert (alone.backend, found.backend) == ("cpu", "vulkan")
    assert (alone.library_path, found.library_path) == ("", str(tmp_path / "lib"))
    assert alone.build != found.build


def test_it_is_started_with_a_flat_heap_its_libraries_and_nothing_of_the_service_s(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    found = binary.SdBinary(tmp_path, "/its/lib", "unknown", "cpu", frozenset(), "")
    environ = found.environ()
    assert (environ["MALLOC_ARENA_MAX"], environ["MALLOC_MMAP_THRESHOLD_"]) == ("1", "1048576")
    assert environ["GGML_NO_BACKTRACE"] == "1"
    assert "WEIGHBRIDGE_TOKEN" not in environ
    if sys.platform == "linux":
        assert environ["LD_LIBRARY_PATH"] == os.pathsep.join(("/its/lib", "/elsewhere"))


# -- the command line --------------------------------------------------------------------------------------------------


def build_with(*flags: str, backend: str = "cpu") -> binary.SdBinary:
    return binary.SdBinary(Path("/sd-server"), "", "unknown", backend, frozenset(flags), "")


def test_a_plan_is_given_as_it_is_with_the_address_and_a_folder_of_adapters() -> None:
    known = build_with("--model", "--vae-tiling", "--vae-tile-size")
    planned = ("--model", "/m.safetensors", "--vae-tiling", "--vae-tile-size", "32x32")
    arguments, left_out = command_line(known, planned, 4711, Path("/adapters"), 0)
    assert arguments == (
        "/sd-server", *planned, "--listen-ip", "127.0.0.1", "--listen-port", "4711", "--lora-model-dir", "/adapters",
    )  # fmt: skip
    assert left_out == ()


def test_what_changes_no_memory_is_left_out_where_a_build_does_not_know_it() -> None:
    planned = ("--model", "/m", "--steps", "4", "--mmap")
    arguments, left_out = command_line(build_with("--model"), planned, 1, Path("/a"), 0)
    assert left_out == ("--steps", "--mmap")
    assert not {"--steps", "4", "--mmap"} & set(arguments)


def test_a_plan_that_stands_on_a_flag_that_a_build_does_not_know_is_refused() -> None:
    with pytest.raises(RequestError) as refused:
        command_line(build_with("--model"), ("--model", "/m", "--vae-tiling"), 1, Path("/a"), 0)
    assert (refused.value.failure.reason, refused.value.failure.metadata["flag"]) == (
        "ENGINE_LACKS_FLAG",
        "--vae-tiling",
    )


@pytest.mark.parametrize(
    ("backend", "offload", "given"),
    [("cuda", True, ["--max-vram", "6.000"]), ("cuda", False, []), ("cpu", True, [])],
)
def test_the_grant_bounds_a_card_where_weights_are_offloaded(backend: str, offload: bool, given: list[str]) -> None:
    known = build_with("--model", "--offload-to-cpu", "--max-vram", backend=backend)
    planned = ("--model", "/m", *(("--offload-to-cpu",) if offload else ()))
    arguments, _ = command_line(known, planned, 1, Path("/a"), 6 * 2**30)
    found = arguments.index("--max-vram") if "--max-vram" in arguments else len(arguments)
    assert list(arguments[found : found + 2]) == given


def test_prompts_are_never_printed() -> None:
    arguments, _ = command_line(build_with("--model", "--verbose"), ("--model", "/m"), 1, Path("/a"), 0)
    assert not {"-v", "--verbose"} & set(arguments)


def test_only_an_executable_file_is_a_program(tmp_path: Path) -> None:
    path = helpful(tmp_path)
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    with pytest.raises(BinaryMissingError):
        binary.PROGRAM.locate(str(tmp_path))
