"""Finding ds4-server and telling its builds apart: by their help, and by what their file holds."""

import json
import sys
from pathlib import Path

import pytest
from weighbridge_engines.ds4 import binary
from weighbridge_engines.ds4.binary import Ds4Binary, flags_of
from weighbridge_engines.supervisor.program import BinaryMissingError

MAY = """Usage: ds4-server [options]

Model:
  -m, --model FILE
      Where the model is. See also --ctx.
  --mtp FILE
      Where its draft head is.
  --mtp-draft N
      --tokens and more of a draft.
  -c, --ctx N
      How much it remembers.
  --metal | --cuda | --cpu | --backend NAME
      What it computes on.

Disk:
  --kv-disk-dir DIR
      A folder.
  --kv-disk-space-mb N
      Its size.

Example:
  ./ds4-server --ctx 4096 --imagined

  -h, --help
      This.
"""
"""The way builds of May 2026 list their flags: a flag, and its meaning in the next line."""

JULY_SUMMARY = """ds4-server
Serves.

Model
  -m, --model FILE               Where the model is.
  --metal | --cuda | --cpu       What it computes on.
  --backend NAME                 The same by name.
  -c, --ctx N                    How much it remembers.
  --power N                      1..100
  --ssd-streaming                Reads experts from disk.
  --ssd-streaming-cache-experts N|NGB
      How many it keeps.
  --prefill-chunk N              How much it reads at once.
  --batched-session N            How many at once.
  --kv-disk-dir DIR              A folder.
  --kv-disk-space-mb N           Its size.

More
    Everything:               --help all
"""

JULY_ALL = (
    JULY_SUMMARY
    + """
  --mtp FILE                     Where its drafter is, for --dspark and without.
  --mtp-draft N                  How much it drafts.
  --glm-mtp                      Drafts with the model's own block.
  --dspark                       Drafts with the drafter of --mtp.
"""
)

SEPTEMBER_ALL = JULY_SUMMARY + (
    """
  --mtp                          Drafts with the model's own block.
  --mtp-model FILE               Where its drafter is.
  --mtp-draft N                  How much it drafts.
  --dspark                       Drafts with the drafter of --mtp-model.
  --vision FILE                  Where its eyes are.
"""
)


def program(folder: Path, body: str, mark: str = "") -> Path:
    path = folder / "ds4-server"
    path.write_text(f"#!{sys.executable}\n# {mark}\n{body}\n")
    path.chmod(0o755)
    return path


def helpful(folder: Path, everything: str, summary: str = "", mark: str = "") -> Path:
    """A build that prints its help as the real ones do: a summary, or all of it where that is asked for."""
    asks = f"import sys; print({everything!r} if sys.argv[2:] == ['all'] else {summary or everything!r})"
    return program(folder, asks, mark)


def build_with(
    *flags: str, values: tuple[str, ...] = (), compute: str = "cuda", path: str = "/ds4-server"
) -> Ds4Binary:
    return Ds4Binary(Path(path), compute, frozenset((*flags, *values)), frozenset(values), "")


def test_flags_are_those_that_are_listed_with_whether_a_value_follows() -> None:
    assert dict(flags_of(MAY)) == {
        "--model": True, "--mtp": True, "--mtp-draft": True, "--ctx": True, "--metal": False, "--cuda": False,
        "--cpu": False, "--backend": True, "--kv-disk-dir": True, "--kv-disk-space-mb": True, "--help": False,
    }  # fmt: skip
    july = dict(flags_of(JULY_ALL))
    assert july["--ssd-streaming-cache-experts"]
    assert july["--mtp"]
    assert not july["--ssd-streaming"]
    assert not july["--dspark"]
    assert "--imagined" not in july


def test_colours_of_a_terminal_change_nothing() -> None:
    coloured = "  \x1b[38;5;81m-m,\x1b[0m \x1b[38;5;81m--model\x1b[0m \x1b[1mFILE\x1b[0m  The model"
    assert dict(flags_of(coloured)) == {"--model": True}


@pytest.mark.parametrize(
    ("everything", "summary", "layout", "drafter", "draft_block"),
    [
        (MAY, "", "2026-05", "--mtp", None),
        (JULY_ALL, JULY_SUMMARY, "2026-07", "--mtp", "--glm-mtp"),
        (SEPTEMBER_ALL, JULY_SUMMARY, "2026-07", "--mtp-model", "--mtp"),
        (JULY_SUMMARY, "", "2026-07", None, None),
    ],
    ids=["May", "July", "September", "a build without drafting"],
)
def test_builds_are_told_apart_by_their_help(
    tmp_path: Path, everything: str, summary: str, layout: str, drafter: str | None, draft_block: str | None
) -> None:
    found = binary.probe(helpful(tmp_path, everything, summary))
    assert (found.layout, found.drafter_flag, found.draft_block_flag) == (layout, drafter, draft_block)
    assert found.samples_while_thinking is (everything is SEPTEMBER_ALL)
    assert found.stops_on_disconnect is (everything is SEPTEMBER_ALL)


@pytest.mark.parametrize(
    ("mark", "compute"),
    [("MTLCreateSystemDefaultDevice", "metal"), (".nv_fatbin", "cuda"), (".hip_fatbin", "rocm"), ("", "cpu")],
)
def test_what_it_was_built_for_is_read_from_its_file_and_not_from_its_help(
    tmp_path: Path, mark: str, compute: str
) -> None:
    assert binary.probe(helpful(tmp_path, MAY, mark=mark)).compute == compute


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("print('  --listen-port N')", "no ds4-server"),
        ("import sys; print('libcudart.so.13: cannot open', file=sys.stderr); sys.exit(127)", "libcudart"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another processor"),
    ],
    ids=["another program", "a library is missing", "built for another processor"],
)
def test_a_program_that_does_not_answer_says_why(tmp_path: Path, body: str, why: str) -> None:
    with pytest.raises(BinaryMissingError, match=why):
        binary.probe(program(tmp_path, body))


def test_where_there_is_none_people_are_told_which_setting_names_it(tmp_path: Path) -> None:
    with pytest.raises(BinaryMissingError, match="WEIGHBRIDGE_ENGINES_DS4_SERVER"):
        binary.PROGRAM.locate("", {"PATH": str(tmp_path), "HOME": str(tmp_path)})


def test_it_is_asked_once_and_again_when_its_file_changed(tmp_path: Path) -> None:
    asked, cache = tmp_path / "asked", tmp_path / "cache"
    path = program(tmp_path, f"open({str(asked)!r}, 'a').write('x'); print({JULY_ALL!r})")
    first = binary.probe(path, cache)
    questions = len(binary.QUESTIONS)
    assert (binary.probe(path, cache), asked.read_text()) == (first, "x" * questions)
    path.write_text(path.read_text() + "# another build\n")
    assert binary.probe(path, cache).build != first.build
    assert asked.read_text() == "x" * 2 * questions


def test_a_cache_that_was_damaged_is_asked_anew(tmp_path: Path) -> None:
    path, cache = helpful(tmp_path, JULY_ALL), tmp_path / "cache"
    first = binary.probe(path, cache)
    for damage in ("{", "[]", json.dumps({"cache_version": binary.CACHE_VERSION, "flags": 3, "with_value": []})):
        (cache / f"{first.build}.json").write_text(damage)
        assert binary.probe(path, cache) == first


def test_it_is_started_with_nothing_of_the_service_s_and_no_stray_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_METAL_PREFILL_CHUNK", "512")
    monkeypatch.setenv("DS4_LOCK_FILE", "/elsewhere")
    monkeypatch.setenv("WEIGHBRIDGE_TOKEN", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    environ = build_with().environ()
    assert not [name for name in environ if name.startswith(("DS4_", "WEIGHBRIDGE_"))]
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert build_with().environ("/own.lock")["DS4_LOCK_FILE"] == "/own.lock"


@pytest.mark.parametrize("place", ["bin", ".", "share/ds4"])
def test_the_sources_of_metal_kernels_are_looked_for_beside_it(tmp_path: Path, place: str) -> None:
    (tmp_path / "bin").mkdir()
    found = build_with(compute="metal", path=str(tmp_path / "bin" / "ds4-server"))
    assert found.metal_folder is None
    sources = tmp_path / place / "metal"
    sources.mkdir(parents=True)
    assert found.metal_folder is None  # an empty folder is none
    (sources / "dense.metal").touch()
    assert found.metal_folder is not None
    assert found.metal_folder.resolve() == (tmp_path / place).resolve()
