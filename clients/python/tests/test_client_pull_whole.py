"""A whole model: what is skipped, what comes, what the record says, and what a stop leaves behind."""

import fcntl
import hashlib
import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("urllib3")

from weighbridge.pull import folder as model_folder
from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Http
from weighbridge.pull.pulling import Listener, Order, Pulled, pull
from weighbridge.pull.transfer import Transfer
from weighbridge.pull.wanted import WantedFile

from clients.python.tests.client_broken_host import Host, running

BIG, SMALL = b"b" * 700_000, b"s" * 3


@pytest.fixture
def host():
    with running(Host(files={"/big": BIG, "/small": SMALL})) as served:
        yield served


def order_for(host: Host, folder: Path, **changes) -> Order:
    files = tuple(
        WantedFile(path, len(content), hashlib.sha256(content).hexdigest(), f"{host.address}{address}")
        for path, content, address in (("main.gguf", BIG, "/big"), ("parts/vae.safetensors", SMALL, "/small"))
    )
    return Order(**{"catalog_id": "m", "version": "1.0.0", "folder": folder, "files": files, **changes})


def run(order: Order, **listening) -> Pulled:
    http = Http(Route(), 30.0)
    return pull(order, lambda work: Transfer(http, work, sleep=lambda _: None), None, Listener(**listening))


def test_the_record_is_written_last_and_names_every_file(host: Host, tmp_path: Path) -> None:
    folder, seen = tmp_path / "m", []
    pulled = run(order_for(host, folder), on_bytes=lambda *_: seen.append((folder / "weighbridge.json").exists()))
    assert not any(seen)
    assert (pulled.files, pulled.total_bytes, pulled.downloaded_bytes) == (2, 700_003, 700_003)
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == [
        "main.gguf",
        "parts",
        "parts/vae.safetensors",
        "weighbridge.json",
    ]
    record = json.loads((folder / "weighbridge.json").read_text())
    assert (record["catalog_id"], record["version"]) == ("m", "1.0.0")
    assert [file["path"] for file in record["files"]] == ["main.gguf", "parts/vae.safetensors"]
    assert record["files"][0]["sha256"] == hashlib.sha256(BIG).hexdigest()


def test_a_second_pull_asks_nobody(host: Host, tmp_path: Path) -> None:
    run(order_for(host, tmp_path))
    host.requests.clear()
    assert run(order_for(host, tmp_path)).downloaded_bytes == 0
    assert not host.requests


def test_a_file_that_was_there_before_is_verified_and_kept(host: Host, tmp_path: Path) -> None:
    (tmp_path / "main.gguf").write_bytes(BIG)
    assert run(order_for(host, tmp_path)).downloaded_bytes == 3
    assert [path for path, _ in host.requests] == ["/small"]


def test_a_file_that_changed_since_comes_again(host: Host, tmp_path: Path) -> None:
    run(order_for(host, tmp_path))
    (tmp_path / "main.gguf").write_bytes(b"x" * len(BIG))
    assert run(order_for(host, tmp_path)).downloaded_bytes == len(BIG)
    assert (tmp_path / "main.gguf").read_bytes() == BIG


def test_a_stopped_pull_does_not_look_whole_and_goes_on(host: Host, tmp_path: Path) -> None:
    run(order_for(host, tmp_path))
    (tmp_path / "main.gguf").unlink()
    heard: list[int] = []
    with pytest.raises(PullStoppedError):
        run(order_for(host, tmp_path), on_bytes=lambda _, count: heard.append(count), stopped=lambda: bool(any(heard)))
    assert not (tmp_path / "weighbridge.json").exists()
    assert run(order_for(host, tmp_path)).files == 2
    assert (tmp_path / "weighbridge.json").exists()


def test_a_failed_file_leaves_the_others_and_no_record(host: Host, tmp_path: Path) -> None:
    del host.files["/small"]
    with pytest.raises(PullError) as caught:
        run(order_for(host, tmp_path))
    assert caught.value.reason is PullReason.NOT_THERE
    assert (tmp_path / "main.gguf").read_bytes() == BIG
    assert not (tmp_path / "weighbridge.json").exists()


def test_two_pulls_of_one_model_do_not_meet(host: Host, tmp_path: Path) -> None:
    with model_folder.only_one(tmp_path), pytest.raises(PullError) as caught:
        run(order_for(host, tmp_path))
    assert caught.value.reason is PullReason.BUSY
    assert run(order_for(host, tmp_path)).files == 2


def test_room_is_made_sure_of_before_anything_comes(host: Host, tmp_path: Path, monkeypatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda _: usage._replace(free=model_folder.SPARE_BYTES + len(BIG) + len(SMALL) - 1)
    )
    with pytest.raises(PullError) as caught:
        run(order_for(host, tmp_path / "m"))
    assert caught.value.reason is PullReason.DISK_FULL
    assert not host.requests


def test_what_has_come_needs_no_new_room(host: Host, tmp_path: Path, monkeypatch) -> None:
    work = tmp_path / model_folder.WORK_NAME
    work.mkdir()
    (work / f"{hashlib.sha256(BIG).hexdigest()}.part").write_bytes(BIG[:-1])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=model_folder.SPARE_BYTES + 4))
    assert run(order_for(host, tmp_path)).files == 2


@pytest.mark.parametrize("path", ["../out.bin", "/tmp/out.bin", "weighbridge.json"])
def test_an_entry_cannot_write_elsewhere_or_over_the_record(host: Host, tmp_path: Path, path: str) -> None:
    order = order_for(host, tmp_path / "m")
    bad = WantedFile(path, len(SMALL), url=f"{host.address}/small")
    with pytest.raises(PullError) as caught:
        run(Order("m", "1", tmp_path / "m", (*order.files, bad)))
    assert caught.value.reason is PullReason.BAD_ENTRY
    assert not host.requests


def test_a_link_out_of_the_folder_is_not_followed(host: Host, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "parts").symlink_to(outside)
    with pytest.raises(PullError) as caught:
        run(order_for(host, tmp_path / "m"))
    assert caught.value.reason is PullReason.BAD_ENTRY
    assert not list(outside.iterdir())


def test_two_files_of_one_name_are_refused(host: Host, tmp_path: Path) -> None:
    order = order_for(host, tmp_path)
    with pytest.raises(PullError) as caught:
        run(Order("m", "1", tmp_path, (*order.files, order.files[0])))
    assert caught.value.reason is PullReason.BAD_ENTRY


def test_the_lock_ends_with_the_pull(host: Host, tmp_path: Path) -> None:
    run(order_for(host, tmp_path))
    with model_folder.only_one(tmp_path) as work, (work / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
