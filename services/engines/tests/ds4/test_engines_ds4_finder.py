"""`python -m weighbridge_engines.ds4`: which ds4-server is here, who has the lock, what is on disk."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PLAIN_HELP = "Usage: ds4-server [options]\n  -c, --ctx N        Context.\n  --kv-disk-dir DIR   Checkpoints.\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home of this test's own, with a ds4-server of few flags."""
    program = tmp_path / "ds4-server"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{PLAIN_HELP}END\n")
    program.chmod(0o755)
    return tmp_path


def find(home: Path, **settings: str) -> Mapping[str, Any]:
    environ = {"PATH": os.environ["PATH"], "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    names = {f"WEIGHBRIDGE_ENGINES_DS4_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge_engines.ds4"], env={**environ, **names}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_a_build_is_told_with_what_it_cannot_do(home: Path) -> None:
    found = find(home, server=str(home), lock_file=str(home / "lock"))
    assert (found["path"], found["layout"], found["compute"]) == (str(home / "ds4-server"), "2026-05", "cpu")
    assert found["metal_sources"] is None
    assert {"--ssd-streaming", "--prefill-chunk", "--vision", "--mtp-model"} <= set(found["lacks"])
    assert not {"--ctx", "--metal", "--cuda", "--cpu"} & set(found["lacks"])
    assert (found["lock_file"], found["lock_pid"]) == (str(home / "lock"), None)


def test_where_metal_finds_its_sources(home: Path) -> None:
    (home / "metal").mkdir()
    (home / "metal" / "moe.metal").touch()
    assert find(home, server=str(home), lock_file=str(home / "lock"))["metal_sources"] == str(home)


def test_what_is_on_disk_is_told_also_where_there_is_no_program(home: Path) -> None:
    kept = home / "cache" / "weighbridge" / "ds4" / "kv" / "a-2048-cpu"
    kept.mkdir(parents=True)
    (kept / "one.kv").write_bytes(b"x" * 700)
    found = find(home, server=str(home / "elsewhere"), lock_file=str(home / "lock"))
    assert "WEIGHBRIDGE_ENGINES_DS4_SERVER" in found["missing"]
    assert (found["kv_folder"], found["kv_bytes"]) == (str(kept.parent), 700)
    assert find(home, server=str(home / "elsewhere"), kv_dir=str(home / "none"))["kv_bytes"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")
def test_who_holds_the_lock_is_told(home: Path) -> None:
    file = home / "ds4.lock"
    file.write_text("4321\n")
    assert find(home, server=str(home), lock_file=str(file))["lock_pid"] is None, "what is left behind holds nothing"
    with file.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert find(home, server=str(home), lock_file=str(file))["lock_pid"] == os.getpid()
