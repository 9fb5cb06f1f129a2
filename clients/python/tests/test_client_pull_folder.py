"""A model's folder under attack: full disks, links, tampered records, another pull, paths of other systems."""

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

pytest.importorskip("urllib3")

from weighbridge.pull import folder as model_folder
from weighbridge.pull import part as pull_part
from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Http
from weighbridge.pull.pulling import Listener, Order, Pulled, pull
from weighbridge.pull.transfer import Transfer
from weighbridge.pull.wanted import WantedFile, distinct

from clients.python.tests.client_broken_host import Handler, Host, running

BIG, SMALL = b"b" * 700_000, b"s" * 3
RECORD, WORK = model_folder.RECORD_NAME, model_folder.WORK_NAME


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def host():
    with running(Host(files={"/big": BIG, "/small": SMALL})) as served:
        yield served


def order_for(host: Host, folder: Path, *, known: bool = True, **changes) -> Order:
    files = tuple(
        WantedFile(path, len(content), digest(content) if known else "", f"{host.address}{address}")
        for path, content, address in (("main.gguf", BIG, "/big"), ("parts/vae.safetensors", SMALL, "/small"))
    )
    return Order(**{"catalog_id": "m", "version": "1.0.0", "folder": folder, "files": files, **changes})


def run(order: Order, **listening) -> Pulled:
    http = Http(Route(), 30.0)
    return pull(order, lambda work: Transfer(http, work, sleep=lambda _: None), None, Listener(**listening))


def refused(order: Order) -> PullError:
    with pytest.raises(PullError) as caught:
        run(order)
    assert not (order.folder / RECORD).exists()
    return caught.value


# -- the disk --------------------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_keeps_what_fitted(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 300_001
    write = os.write

    def short_of_room(descriptor: int, data: memoryview) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[:room])
        room -= written
        return written

    with monkeypatch.context() as full:
        full.setattr(pull_part.os, "write", short_of_room)
        error = refused(order_for(host, tmp_path))
    assert error.reason is PullReason.DISK_FULL
    assert "main.gguf" in error.message and "kept" in error.message
    assert (tmp_path / WORK / f"{digest(BIG)}.part").read_bytes() == BIG[:300_001]
    assert run(order_for(host, tmp_path)).files == 2
    assert host.header("Range") == ["", "bytes=300001-", ""]


@pytest.mark.parametrize(
    ("number", "reason", "said"),
    [
        (errno.EDQUOT, PullReason.DISK_FULL, "full"),
        (errno.EFBIG, PullReason.NOT_WRITABLE, "too large"),
        (errno.EROFS, PullReason.NOT_WRITABLE, "Read-only"),
        (errno.EXDEV, PullReason.NOT_WRITABLE, "another disk"),
        (errno.EIO, PullReason.NOT_WRITABLE, "main.gguf"),
    ],
)
def test_what_a_disk_refuses_is_told_as_such(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: PullReason, said: str
) -> None:
    replace = Path.replace

    def refuse(path: Path, target: Path) -> Path:
        if target.name == "main.gguf":
            raise OSError(number, os.strerror(number))
        return replace(path, target)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", refuse)
        error = refused(order_for(host, tmp_path))
    assert error.reason is reason
    assert said in error.message
    host.requests.clear()
    assert run(order_for(host, tmp_path)).files == 2
    assert [path for path, _ in host.requests] == ["/small"], "what had come whole is not asked for again"


def test_a_folder_that_cannot_be_made_is_told(host: Host, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    error = refused_anywhere(order_for(host, tmp_path / "models" / "m"))
    assert error.reason is PullReason.NOT_WRITABLE
    assert str(tmp_path / "models") in error.message


def refused_anywhere(order: Order) -> PullError:
    with pytest.raises(PullError) as caught:
        run(order)
    return caught.value


def test_a_folder_in_a_files_place_is_told_before_anything_comes(host: Host, tmp_path: Path) -> None:
    (tmp_path / "main.gguf").mkdir()
    assert refused(order_for(host, tmp_path)).reason is PullReason.NOT_WRITABLE
    assert not host.requests


def test_a_pull_that_is_refused_leaves_no_folder(host: Host, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    assert refused(order_for(host, tmp_path / "m")).reason is PullReason.DISK_FULL
    assert not (tmp_path / "m").exists()


def test_parts_of_other_files_make_no_room_and_are_thrown_away(host: Host, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / WORK / "hub").mkdir(parents=True)
    old = tmp_path / WORK / f"{'0' * 64}.part"
    old.write_bytes(BIG)
    kept = tmp_path / WORK / f"{digest(BIG)}.part"
    kept.write_bytes(BIG[:10])
    usage = shutil.disk_usage(tmp_path)
    free = model_folder.SPARE_BYTES + len(BIG) - 10 + len(SMALL) - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    assert refused(order_for(host, tmp_path)).reason is PullReason.DISK_FULL
    assert kept.exists() and not old.exists() and not (tmp_path / WORK / "hub").exists()


# -- links -----------------------------------------------------------------------------------------------------------


def test_a_link_in_place_of_what_came_is_not_written_through(host: Host, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder = tmp_path / "m"
    (folder / WORK).mkdir(parents=True)
    for name in (f"{digest(BIG)}.part", "verified.json.draft", f"{RECORD}.draft"):
        (folder / WORK / name).symlink_to(victim)
    assert run(order_for(host, folder)).files == 2
    assert victim.read_bytes() == b"precious"
    assert (folder / "main.gguf").read_bytes() == BIG


def test_links_in_place_of_the_work_or_its_lock_are_refused(host: Host, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / WORK).symlink_to(elsewhere)
    assert refused(order_for(host, folder)).reason is PullReason.NOT_WRITABLE
    assert not list(elsewhere.iterdir())
    (folder / WORK).unlink()
    (folder / WORK).mkdir()
    (folder / WORK / "lock").symlink_to(elsewhere / "made")
    assert refused(order_for(host, folder)).reason is PullReason.NOT_WRITABLE
    assert not list(elsewhere.iterdir())


def test_a_file_that_is_a_link_out_of_the_folder_says_what_to_do(host: Host, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "main.gguf").symlink_to(tmp_path / "elsewhere")
    error = refused(order_for(host, tmp_path / "m"))
    assert error.reason is PullReason.BAD_ENTRY
    assert "remove it" in error.message


def test_a_models_folder_may_be_a_link_to_a_larger_disk(host: Host, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "large")
    assert run(order_for(host, tmp_path / "m")).files == 2
    assert (tmp_path / "large" / RECORD).exists()


# -- the record ------------------------------------------------------------------------------------------------------

ABSURD = [
    "[" * 100_000,
    "\x00",
    "[]",
    "{}",
    '{"format": "weighbridge.pulled-model/1", "files": 7}',
    '{"format": "weighbridge.pulled-model/1", "files": {"a": 1}}',
    '{"format": "weighbridge.pulled-model/1", "files": [7, null, {"path": 3}, {"path": "../x"}, {}]}',
    json.dumps({"format": "weighbridge.pulled-model/1", "files": [], "x": "y" * (5 << 20)}),
]


@pytest.mark.parametrize("text", ABSURD, ids=range(len(ABSURD)))
@pytest.mark.parametrize("name", [RECORD, f"{WORK}/verified.json"])
def test_an_absurd_record_counts_as_none(host: Host, tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / name).write_text(text)
    assert run(order_for(host, tmp_path)).downloaded_bytes == len(BIG) + len(SMALL)
    assert len(json.loads((tmp_path / RECORD).read_text())["files"]) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"size_bytes": True},
        {"size_bytes": "700000"},
        {"size_bytes": -1},
        {"sha256": None},
        {"sha256": "0"},
        {"path": "../m/main.gguf"},
        {"path": "/etc/passwd"},
        {"modified_ns": "now"},
        {"modified_ns": 0},
    ],
    ids=str,
)
def test_a_record_that_was_tampered_with_is_not_believed(host: Host, tmp_path: Path, change: dict) -> None:
    """The file is another by now; the record that says otherwise is not right about it."""
    folder = tmp_path / "m"
    run(order_for(host, folder))
    record = json.loads((folder / RECORD).read_text())
    (folder / "main.gguf").write_bytes(b"x" * len(BIG))
    record["files"][0] |= {"modified_ns": (folder / "main.gguf").stat().st_mtime_ns} | change
    (folder / RECORD).write_text(json.dumps(record))
    run(order_for(host, folder))
    assert (folder / "main.gguf").read_bytes() == BIG


def test_an_entry_that_changed_without_its_version_comes_anew(host: Host, tmp_path: Path) -> None:
    run(order_for(host, tmp_path))
    other = BIG[:-1] + b"o"
    host.files["/big"] = other
    order = order_for(host, tmp_path)
    files = (WantedFile("main.gguf", len(other), digest(other), order.files[0].url), order.files[1])
    assert run(order_for(host, tmp_path, files=files)).downloaded_bytes == len(other)
    assert (tmp_path / "main.gguf").read_bytes() == other


def test_a_pipe_in_the_records_place_keeps_nobody_waiting(host: Host, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    assert run(order_for(host, tmp_path)).files == 2
    assert (tmp_path / RECORD).is_file()


def test_files_without_digests_that_came_whole_are_not_asked_for_again_after_a_stop(host: Host, tmp_path: Path) -> None:
    def gone(handler: Handler, number: int) -> bool:
        return handler.path == "/small" and (handler.answer(404, b"") or True)

    host.behave = gone
    assert refused(order_for(host, tmp_path, known=False)).reason is PullReason.NOT_THERE
    host.behave = None
    host.requests.clear()
    assert run(order_for(host, tmp_path, known=False)).downloaded_bytes == len(SMALL)
    assert [path for path, _ in host.requests] == ["/small"]


def test_a_stop_is_noticed_while_files_are_verified(host: Host, tmp_path: Path) -> None:
    (tmp_path / "main.gguf").write_bytes(BIG)
    heard: list[int] = []
    with pytest.raises(PullStoppedError):
        run(order_for(host, tmp_path), on_verify=lambda file, count: heard.append(count), stopped=lambda: bool(heard))
    assert heard == [0]
    assert not host.requests


# -- two at once -----------------------------------------------------------------------------------------------------


def test_a_lock_whose_file_has_gone_is_no_lock(tmp_path: Path) -> None:
    """A pull that ends takes its lock away: whoever waited with it in hand must take the new one."""
    with model_folder.only_one(tmp_path / "m") as work:
        (work / "keep").write_text("x")
        with pytest.raises(PullError) as caught, model_folder.only_one(tmp_path / "m"):
            pass
        assert caught.value.reason is PullReason.BUSY
        assert (work / "keep").exists()
    with model_folder.only_one(tmp_path / "m") as work:
        (work / "keep").unlink()
    assert not (tmp_path / "m").exists(), "an empty folder goes with the lock"


def test_nothing_is_left_of_the_work_when_it_is_done(host: Host, tmp_path: Path) -> None:
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / "hub").symlink_to(tmp_path)
    run(order_for(host, tmp_path))
    assert not (tmp_path / WORK).exists()
    assert (tmp_path / "main.gguf").exists()


# -- paths of other systems ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Model.gguf", "model.GGUF"),
        ("stra\u00dfe", "STRASSE"),
        ("caf\u00e9.gguf", "cafe\u0301.gguf"),
        ("\u01c4", "\u01c6"),
        ("vae", "vae/model.safetensors"),
        ("VAE/x", "vae"),
        ("a/b/c", "a"),
        ("a", "A"),
    ],
)
def test_paths_that_are_one_on_some_system_are_refused(one: str, other: str) -> None:
    with pytest.raises(PullError) as caught:
        distinct([WantedFile(one, 1), WantedFile(other, 1)], RECORD)
    assert caught.value.reason is PullReason.BAD_ENTRY


@pytest.mark.parametrize("path", [RECORD, RECORD.upper(), f"{RECORD}/x"])
def test_the_records_name_is_taken(path: str) -> None:
    with pytest.raises(PullError):
        distinct([WantedFile(path, 1)], RECORD)


def test_paths_of_their_own_are_taken() -> None:
    distinct([WantedFile(path, 1) for path in ("a/b", "a/c", "ab", "a-b", "vae/weighbridge.json")], RECORD)


def test_long_paths_without_digests_have_short_names_of_their_own(tmp_path: Path) -> None:
    paths = ["a/" * 120 + "x" * 200, "a%b", "a/b"]
    names = [pull_part.Part(tmp_path, WantedFile(path, 1)).path.name for path in paths]
    assert len(set(names)) == 3
    assert max(map(len, names)) < 128
