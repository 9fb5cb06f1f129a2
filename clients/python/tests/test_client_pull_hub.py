"""A repository through the hub's own library, from a small hub on loopback."""

import errno
import hashlib
import json
from pathlib import Path

import pytest

pytest.importorskip("urllib3")
pytest.importorskip("huggingface_hub")

from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Http
from weighbridge.pull.hub import HubRepository
from weighbridge.pull.pulling import Listener, Order, Pulled, pull
from weighbridge.pull.transfer import ATTEMPTS, Transfer, Watcher
from weighbridge.pull.wanted import WantedFile

from clients.python.tests.client_broken_host import Handler, Host, running

COMMIT = "c" * 40
WEIGHTS, CONFIG = b"w" * 3_000_000, b'{"model_type": "qwen3"}\n'


class Hub:
    """What the library asks of a hub: the list of a repository's files, and each file."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.files = {"model.safetensors": WEIGHTS, "config.json": CONFIG, ".gitattributes": b"x"}
        self.lies: dict[str, bytes] = {}
        self.elsewhere = ""
        self.status = 200
        host.behave = self.answer

    def answer(self, handler: Handler, number: int) -> bool:
        if self.status != 200:
            handler.answer(self.status, b"{}", {"X-Error-Code": "GatedRepo"} if self.status == 403 else None)
            return True
        if handler.path.startswith("/api/models/a/b"):
            handler.answer(200, json.dumps(self._info()).encode(), {"Content-Type": "application/json"})
            return True
        name = handler.path.rpartition("/")[2]
        content = self.lies.get(name, self.files.get(name))
        if content is None or not handler.path.startswith(f"/a/b/resolve/{COMMIT}/"):
            handler.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return True
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(self.files[name]).hexdigest()}"'}
        if self.elsewhere:
            headers |= {"Location": f"{self.elsewhere}/{name}", "X-Linked-Size": str(len(content))}
            headers |= {"X-Linked-Etag": headers["ETag"]}
            handler.answer(302, b"", headers)
            return True
        handler.answer(200, content, headers)
        return True

    def _info(self) -> dict:
        siblings = []
        for name, content in self.files.items():
            entry = {"rfilename": name, "size": len(content), "blobId": git_digest(content)}
            if name.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"size": len(content), "sha256": digest, "pointerSize": 134}
            siblings.append(entry)
        return {"id": "a/b", "modelId": "a/b", "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}


def git_digest(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


@pytest.fixture
def hub():
    with running(Host()) as host:
        yield Hub(host)


def run(hub: Hub, folder: Path, *, listed=(), token: str = "", revision: str = COMMIT, **listening) -> Pulled:
    route = Route(hub.host.address, token)
    http = Http(route, 30.0)
    return pull(
        Order("m", "1", folder, tuple(listed), "a/b", revision),
        lambda work: Transfer(http, work, sleep=lambda _: None),
        lambda work: HubRepository("a/b", revision, route, work),
        Listener(**listening),
    )


def test_all_of_a_repository_comes_and_its_revision_is_recorded(hub: Hub, tmp_path: Path) -> None:
    pulled = run(hub, tmp_path, revision="")
    assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
    assert (tmp_path / "config.json").read_bytes() == CONFIG
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "weighbridge.json"]
    assert pulled.revision == COMMIT == json.loads((tmp_path / "weighbridge.json").read_text())["revision"]


def test_other_weights_of_the_repository_stay_there(hub: Hub, tmp_path: Path) -> None:
    """Repositories hold other editions beside those that the catalogue lists, and pictures of what they make."""
    hub.files |= {"whole-model.safetensors": b"o" * 100, "model-q8.GGUF": b"g" * 100, "sample.mp4": b"m" * 100}
    hub.files |= {"model.safetensors.index.json": b"{}", "spiece.model": b"s"}
    run(hub, tmp_path, listed=[WantedFile("model.safetensors", len(WEIGHTS))])
    there = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert there == {
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "spiece.model",
        "weighbridge.json",
    }


def test_a_pinned_repository_that_is_whole_is_not_asked_again(hub: Hub, tmp_path: Path) -> None:
    run(hub, tmp_path)
    hub.host.requests.clear()
    assert run(hub, tmp_path).downloaded_bytes == 0
    assert not hub.host.requests


def test_progress_is_heard(hub: Hub, tmp_path: Path) -> None:
    heard: dict[str, int] = {}
    run(hub, tmp_path, on_bytes=lambda file, count: heard.update({file.path: count}))
    assert heard == {"model.safetensors": len(WEIGHTS), "config.json": len(CONFIG)}


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_not_what_the_repository_describes_is_thrown_away(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.lies[name] = hub.files[name][::-1]
    hub.lies[name] = b"x" * len(hub.files[name])
    with pytest.raises(PullError) as caught:
        run(hub, tmp_path)
    assert caught.value.reason is PullReason.DIGEST_MISMATCH
    assert not (tmp_path / name).exists()
    assert not (tmp_path / "weighbridge.json").exists()


def test_a_repository_that_is_not_what_the_catalogue_says_is_refused(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(PullError) as caught:
        run(hub, tmp_path, listed=[WantedFile("model.safetensors", len(WEIGHTS) + 1)])
    assert caught.value.reason is PullReason.SIZE_MISMATCH
    with pytest.raises(PullError) as caught:
        run(hub, tmp_path, listed=[WantedFile("other.safetensors", 7)])
    assert caught.value.reason is PullReason.NOT_THERE
    assert not (tmp_path / "model.safetensors").exists()


def test_the_token_stays_with_the_hub(hub: Hub, tmp_path: Path) -> None:
    served = {f"/{name}": content for name, content in hub.files.items()}
    with running(Host(files=served), "localhost") as storage:
        hub.elsewhere = storage.address
        run(hub, tmp_path, token="hf_secret")
        assert (tmp_path / "model.safetensors").read_bytes() == WEIGHTS
        assert set(hub.host.header("Authorization")) == {"Bearer hf_secret"}
        assert storage.requests
        assert not any(storage.header("Authorization"))


def test_no_token_of_the_machine_is_used(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_machine")
    run(hub, tmp_path)
    assert not any(hub.host.header("Authorization"))


@pytest.mark.parametrize(("status", "reason"), [(401, PullReason.NOT_ALLOWED), (403, PullReason.NOT_ALLOWED)])
def test_a_gated_repository_says_what_to_do(hub: Hub, tmp_path: Path, status: int, reason: PullReason) -> None:
    hub.status = status
    with pytest.raises(PullError, match="WEIGHBRIDGE_PULL_TOKEN") as caught:
        run(hub, tmp_path)
    assert caught.value.reason is reason


def test_a_stop_is_noticed_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(PullStoppedError):
        run(hub, tmp_path, stopped=lambda: len(hub.host.requests) > 2)
    assert not (tmp_path / "weighbridge.json").exists()
    assert run(hub, tmp_path).files == 2


def test_a_file_out_of_the_folder_is_refused(hub: Hub, tmp_path: Path) -> None:
    hub.files["../evil"] = b"x"
    with pytest.raises(PullError) as caught:
        run(hub, tmp_path)
    assert caught.value.reason is PullReason.BAD_ENTRY
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("name", "revision"), [("a", ""), ("../b", ""), ("a/b/c", ""), ("a/b", "x/../y"), ("a/b?x", "")]
)
def test_names_that_are_no_repository(tmp_path: Path, name: str, revision: str) -> None:
    with pytest.raises(PullError) as caught:
        HubRepository(name, revision, Route(), tmp_path)
    assert caught.value.reason is PullReason.BAD_ENTRY


def repository(hub: Hub, work: Path, route: Route | None = None, slept: list[float] | None = None) -> HubRepository:
    made = HubRepository(
        "a/b", COMMIT, route or Route(hub.host.address), work, sleep=(slept if slept is not None else []).append
    )
    made.files()
    return made


def test_a_hub_that_breaks_off_is_asked_again_and_not_taken_for_one_without_the_file(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library calls a network that fails a file that is not found."""
    notes: list[str] = []
    file = WantedFile("model.safetensors", len(WEIGHTS), hashlib.sha256(WEIGHTS).hexdigest())
    slept = [0.0]
    made = repository(hub, tmp_path, slept=slept)
    download, tries = made._library.hf_hub_download, []

    def twice_broken(*arguments, **settings):
        tries.append(1)
        if len(tries) < 3:
            raise made._library.errors.LocalEntryNotFoundError("no network")
        return download(*arguments, **settings)

    monkeypatch.setattr(made._library, "hf_hub_download", twice_broken)
    made.bring(file, tmp_path / "m", Watcher(on_note=notes.append))
    assert (tmp_path / "m").read_bytes() == WEIGHTS
    assert slept == [0.0, 2.0, 4.0]
    assert all("Trying again" in note for note in notes)
    monkeypatch.setattr(
        made._library,
        "hf_hub_download",
        lambda *arguments, **settings: (_ for _ in ()).throw(ConnectionError("still none")),
    )
    with pytest.raises(PullError) as caught:
        made.bring(file, tmp_path / "n", Watcher())
    assert caught.value.reason is PullReason.UNREACHABLE
    assert len(slept) == 3 + ATTEMPTS - 1


def test_a_full_disk_is_not_taken_for_a_hub_that_does_not_answer(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = repository(hub, tmp_path)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(made._library, "hf_hub_download", full)
    with pytest.raises(PullError) as caught:
        made.bring(WantedFile("config.json", len(CONFIG)), tmp_path / "m", Watcher())
    assert caught.value.reason is PullReason.DISK_FULL


def test_the_library_gets_no_token_for_a_mirror_in_the_clear(tmp_path: Path) -> None:
    assert HubRepository("a/b", "", Route("http://mirror.example", "secret"), tmp_path)._token is False
    assert HubRepository("a/b", "", Route("https://mirror.example/hf", "secret"), tmp_path)._token == "secret"
