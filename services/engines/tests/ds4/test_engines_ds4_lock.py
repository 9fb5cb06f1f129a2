"""Whose the machine's lock is, told without taking it; and where conversations are kept on disk."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from weighbridge_engines.ds4 import checkpoints, lock
from weighbridge_proto.errors import RequestError

HOLDS = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); input()"
NOBODY = 65534
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a lock")


@pytest.fixture
def locked(tmp_path: Path):
    """A lock file that another process holds, and that process."""
    file = tmp_path / "ds4.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        yield file, process
        process.stdin.close()


@ON_LINUX
def test_the_holder_of_a_lock_is_told_without_touching_it(locked) -> None:
    file, process = locked
    assert lock.holder(str(file)) == process.pid
    assert lock.holder_outside(str(file)) == process.pid  # our child, not our guard's
    process.stdin.close()
    process.wait()
    assert lock.holder(str(file)) is None  # the file stays behind


@ON_LINUX
def test_looking_takes_no_lock(tmp_path: Path) -> None:
    file = tmp_path / "ds4.lock"
    file.touch()
    assert lock.holder(str(file)) is None
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


@ON_LINUX
def test_an_engine_of_this_service_is_no_holder_outside(tmp_path: Path) -> None:
    """It runs while the next model is planned, and gives the lock up before that one starts."""
    file = tmp_path / "ds4.lock"
    guard = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], stdin=sys.stdin, stdout=subprocess.PIPE); "
        "child.stdout.readline(); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", guard, HOLDS, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        engine = int(process.stdout.readline())
        assert lock.holder(str(file)) == engine
        assert lock.holder_outside(str(file)) is None
        process.stdin.close()


def test_where_nothing_can_be_told_nobody_is_named(tmp_path: Path) -> None:
    assert lock.holder(str(tmp_path / "nope")) is None
    (tmp_path / "ds4.lock").touch()
    assert lock.holder(str(tmp_path / "ds4.lock"), tmp_path / "no-proc") is None


@pytest.fixture
def generous_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


# -- conversations on disk ---------------------------------------------------------------------------------------------


def model(folder: Path, content: bytes, name: str = "model.gguf") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_a_folder_is_one_model_s_chunk_s_and_backend_s_and_nobody_else_s(tmp_path: Path) -> None:
    file = model(tmp_path, b"weights" * 10_000)
    root = tmp_path / "a" / "kv"
    found = checkpoints.folder(root, "digest", file, 4096, "cuda")
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    others = {
        checkpoints.folder(root, "digest", file, 2048, "cuda"),
        checkpoints.folder(root, "digest", file, 4096, "metal"),
        checkpoints.folder(root, "another", file, 4096, "cuda"),
        checkpoints.folder(root, "digest", model(tmp_path, b"Weights" * 10_000, "b.gguf"), 4096, "cuda"),
    }
    assert len(others | {found}) == 5
    assert {path.parent for path in others} == {root}


def test_the_same_model_elsewhere_has_the_same_folder(tmp_path: Path) -> None:
    first, moved = model(tmp_path, b"w" * 99_999), model(tmp_path, b"w" * 99_999, "moved.gguf")
    assert checkpoints.folder(tmp_path, "d", first, 4096, "cuda") == checkpoints.folder(
        tmp_path, "d", moved, 4096, "cuda"
    )


@pytest.mark.parametrize("place", [0, 500_000, 999_999])
def test_a_revision_of_the_same_shape_is_another_model(tmp_path: Path, place: int) -> None:
    """Revisions differ in nearly every byte of their weights; the ends are looked at for certain."""
    content = bytearray(1_000_000)
    before = checkpoints.fingerprint(model(tmp_path, bytes(content)))
    content[place : place + 70_000] = b"\x01" * len(content[place : place + 70_000])
    assert checkpoints.fingerprint(model(tmp_path, bytes(content))) != before


def test_an_empty_file_has_a_fingerprint_too(tmp_path: Path) -> None:
    assert checkpoints.fingerprint(model(tmp_path, b"")) != checkpoints.fingerprint(model(tmp_path, b"x"))


def test_a_folder_that_others_can_look_into_is_shut(tmp_path: Path) -> None:
    file = model(tmp_path, b"w")
    found = checkpoints.folder(tmp_path, "d", file, 4096, "cuda")
    for folder in (found, tmp_path):
        folder.chmod(0o755)
    checkpoints.folder(tmp_path, "d", file, 4096, "cuda")
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (found, tmp_path)] == [0o700, 0o700]


@pytest.mark.usefixtures("generous_umask")
def test_the_folder_of_all_is_this_user_s_alone_from_its_beginning(tmp_path: Path) -> None:
    root = tmp_path / "a" / "kv"
    checkpoints.folder(root, "d", model(tmp_path, b"w"), 4096, "cuda")
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_a_folder_of_all_may_lie_on_another_disk(tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir(0o755)
    (tmp_path / "kv").symlink_to(there)
    checkpoints.folder(tmp_path / "kv", "d", model(tmp_path, b"w"), 4096, "cuda")
    assert stat.S_IMODE(there.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder another user's")
@pytest.mark.parametrize("mode", [0o700, 0o777], ids=oct)
def test_a_folder_of_all_that_is_another_user_s_is_refused(mode: int) -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        Path(open_to_all).chmod(0o755)
        root, file = Path(open_to_all) / "kv", model(Path(open_to_all), b"w")
        root.mkdir()
        root.chmod(mode)
        os.seteuid(NOBODY)
        try:
            with pytest.raises(RequestError, match="WEIGHBRIDGE_ENGINES_DS4_KV_DIR") as refused:
                checkpoints.folder(root, "d", file, 4096, "cuda")
        finally:
            os.seteuid(0)
        assert "another user's" in refused.value.failure.message
        assert (list(root.iterdir()), stat.S_IMODE(root.stat().st_mode)) == ([], mode)


def test_a_folder_that_cannot_be_used_is_told_with_what_to_do(tmp_path: Path) -> None:
    file = model(tmp_path, b"w")
    found = checkpoints.folder(tmp_path, "d", file, 4096, "cuda")
    found.rmdir()
    found.symlink_to(tmp_path)
    for root in (tmp_path, file):  # a link in its place; a file where folders should be made
        with pytest.raises(RequestError, match="disk_kv=false") as refused:
            checkpoints.folder(root, "d", file, 4096, "cuda")
        assert "WEIGHBRIDGE_ENGINES_DS4_KV_DIR" in refused.value.failure.message


def test_by_default_they_lie_in_the_user_s_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setitem(os.environ, "HOME", "/home/somebody")
    assert checkpoints.default_root() == Path("/home/somebody/.cache/weighbridge/ds4/kv")
