"""One file from a host that breaks in every way: what is kept, what is thrown away, what is sent."""

import hashlib
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("urllib3")

from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Http
from weighbridge.pull.transfer import ATTEMPTS, Transfer, Watcher
from weighbridge.pull.wanted import WantedFile

from clients.python.tests.client_broken_host import Handler, Host, running

CONTENT = bytes(range(256)) * 4096  # 1 MiB


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def host():
    with running(Host(files={"/m.bin": CONTENT})) as served:
        yield served


class Puller:
    """One transfer with what it slept and said."""

    def __init__(self, host: Host, folder: Path, *, route: Route | None = None, stall_s: float = 30.0) -> None:
        self.host, self.folder = host, folder
        self.slept: list[float] = []
        self.notes: list[str] = []
        self.counts: list[int] = []
        self.stop_after = -1
        self.http = Http(route or Route(), stall_s)
        self.transfer = Transfer(self.http, folder / ".work", sleep=self.slept.append)

    def bring(self, content: bytes = CONTENT, *, sha256: str | None = None, path: str = "/m.bin") -> bytes:
        file = WantedFile(
            "m.bin", len(content), digest(content) if sha256 is None else sha256, self.host.address + path
        )
        watcher = Watcher(self.counts.append, self.notes.append, self._stopped)
        self.transfer.bring(file, self.folder / "m.bin", watcher)
        return (self.folder / "m.bin").read_bytes()

    def _stopped(self) -> bool:
        return 0 <= self.stop_after <= (self.counts[-1] if self.counts else 0)

    def refused(self, **settings) -> PullReason:
        with pytest.raises(PullError) as caught:
            self.bring(**settings)
        assert not (self.folder / "m.bin").exists()
        return caught.value.reason


@pytest.fixture
def puller(host: Host, tmp_path: Path) -> Puller:
    return Puller(host, tmp_path)


def test_a_file_comes_whole(puller: Puller) -> None:
    assert puller.bring() == CONTENT
    assert puller.counts[-1] == len(CONTENT)
    assert sorted(path.name for path in puller.folder.rglob("*")) == [".work", "m.bin"]


def test_an_empty_file_comes_too(puller: Puller) -> None:
    puller.host.files["/m.bin"] = b""
    assert puller.bring(b"") == b""


@pytest.mark.parametrize("known", [True, False], ids=["digest known", "digest unknown"])
def test_a_cut_connection_goes_on_from_where_it_was_cut(puller: Puller, known: bool) -> None:
    def cut_twice(handler: Handler, number: int) -> bool:
        if number > 2:
            return False
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        rest = CONTENT[start:]
        span = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"} if start else {}
        handler.answer(206 if start else 200, rest, {"ETag": '"1"', **span}, cut=300_000)
        return True

    puller.host.behave = cut_twice
    assert puller.bring(sha256=None if known else "") == CONTENT
    assert puller.host.header("Range") == ["", "bytes=300000-", "bytes=600000-"]


def test_a_new_process_goes_on_where_an_old_one_was_stopped(host: Host, tmp_path: Path) -> None:
    first = Puller(host, tmp_path)
    first.stop_after = 1
    with pytest.raises(PullStoppedError):
        first.bring()
    assert not (tmp_path / "m.bin").exists()
    kept = first.counts[-1]
    second = Puller(host, tmp_path)
    assert second.bring() == CONTENT
    assert second.counts[0] == kept > 0
    assert host.header("Range")[-1] == f"bytes={kept}-"


def test_a_host_without_ranges_starts_over(host: Host, tmp_path: Path) -> None:
    first = Puller(host, tmp_path)
    first.stop_after = 1
    with pytest.raises(PullStoppedError):
        first.bring()
    host.ranges = False
    second = Puller(host, tmp_path)
    assert second.bring() == CONTENT
    assert 0 in second.counts


def test_a_file_that_changed_meanwhile_is_not_patched_together(host: Host, tmp_path: Path) -> None:
    """Nobody knows its digest, so the version that the host names decides."""
    first = Puller(host, tmp_path)
    first.stop_after = 1
    with pytest.raises(PullStoppedError):
        first.bring(sha256="")
    changed = CONTENT[::-1]
    host.files["/m.bin"], host.etag = changed, '"2"'
    second = Puller(host, tmp_path)
    assert second.bring(changed, sha256="") == changed


def test_without_digest_and_version_nothing_is_resumed(host: Host, tmp_path: Path) -> None:
    host.etag = 'W/"weak"'
    first = Puller(host, tmp_path)
    first.stop_after = 1
    with pytest.raises(PullStoppedError):
        first.bring(sha256="")
    host.requests.clear()
    assert Puller(host, tmp_path).bring(sha256="") == CONTENT
    assert host.header("Range") == [""]


def test_half_of_another_version_is_noticed_and_fetched_anew(host: Host, tmp_path: Path) -> None:
    work = tmp_path / ".work"
    work.mkdir()
    (work / f"{digest(CONTENT)}.part").write_bytes(b"x" * 1000)
    puller = Puller(host, tmp_path)
    assert puller.bring() == CONTENT
    assert any("starting over" in note for note in puller.notes)


def test_a_wrong_digest_is_refused_and_thrown_away(puller: Puller) -> None:
    assert puller.refused(sha256="0" * 64) is PullReason.DIGEST_MISMATCH
    assert len(puller.host.requests) == 1  # another time would bring the same
    assert not list((puller.folder / ".work").iterdir())


def test_a_file_of_another_size_is_refused_before_it_comes(puller: Puller) -> None:
    puller.host.files["/m.bin"] = CONTENT + b"more"
    assert puller.refused() is PullReason.SIZE_MISMATCH
    assert not any(puller.counts)


def test_a_host_that_sends_more_than_it_says_is_stopped(puller: Puller) -> None:
    def endless(handler: Handler, number: int) -> bool:
        handler.send_response(200)
        handler.end_headers()
        handler.close_connection = True
        try:
            for _ in range(64):
                handler.wfile.write(CONTENT)
        except OSError:
            pass
        return True

    puller.host.behave = endless
    assert puller.refused() is PullReason.SIZE_MISMATCH
    assert max(puller.counts) <= len(CONTENT)


def test_a_range_that_is_not_the_one_asked_for_is_not_appended(host: Host, tmp_path: Path) -> None:
    first = Puller(host, tmp_path)
    first.stop_after = 1
    with pytest.raises(PullStoppedError):
        first.bring()

    def wrong_range(handler: Handler, number: int) -> bool:
        if "Range" not in handler.headers:
            return False
        handler.answer(206, CONTENT[7:], {"Content-Range": f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}"})
        return True

    host.behave = wrong_range
    assert Puller(host, tmp_path).bring() == CONTENT


def test_busy_hosts_are_asked_again_when_they_say(puller: Puller) -> None:
    def busy(handler: Handler, number: int) -> bool:
        if number > 3:
            return False
        handler.answer((503, 429, 500)[number - 1], b"", {"Retry-After": "7"} if number == 2 else None)
        return True

    puller.host.behave = busy
    assert puller.bring() == CONTENT
    assert puller.slept == [2.0, 7.0, 8.0]


def test_a_host_that_stays_broken_is_given_up(puller: Puller) -> None:
    puller.host.behave = lambda handler, number: handler.answer(503, b"") or True
    assert puller.refused() is PullReason.UNREACHABLE
    assert len(puller.host.requests) == ATTEMPTS
    assert puller.slept == [2.0, 4.0, 8.0, 16.0, 32.0]


def test_a_host_that_brings_a_little_each_time_is_not_given_up(puller: Puller) -> None:
    def drip(handler: Handler, number: int) -> bool:
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        span = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"} if start else {}
        handler.answer(206 if start else 200, CONTENT[start:], span, cut=60_000)
        return True

    puller.host.behave = drip
    assert puller.bring() == CONTENT
    assert len(puller.host.requests) > 2 * ATTEMPTS


def test_a_host_that_falls_silent_is_asked_again(host: Host, tmp_path: Path) -> None:
    release = threading.Event()

    def silent_once(handler: Handler, number: int) -> bool:
        if number > 1:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(CONTENT)))
        handler.end_headers()
        handler.wfile.write(CONTENT[:1000])
        handler.wfile.flush()
        release.wait(20)
        handler.close_connection = True
        return True

    host.behave = silent_once
    puller = Puller(host, tmp_path, stall_s=0.2)
    try:
        assert puller.bring() == CONTENT
    finally:
        release.set()
    assert host.header("Range") == ["", "bytes=1000-"]
    assert any("said nothing" in note for note in puller.notes)


def test_a_host_that_trickles_is_asked_again(host: Host, tmp_path: Path) -> None:
    puller = Puller(host, tmp_path)
    moments = iter(range(0, 10**9, 61))
    puller.transfer = Transfer(puller.http, tmp_path / ".work", sleep=puller.slept.append, clock=lambda: next(moments))

    def a_byte(handler: Handler, number: int) -> bool:
        if number > 1:
            return False
        handler.answer(200, CONTENT, cut=1)
        return True

    host.behave = a_byte
    assert puller.bring() == CONTENT
    assert any("too slow" in note for note in puller.notes)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (401, PullReason.NOT_ALLOWED),
        (403, PullReason.NOT_ALLOWED),
        (404, PullReason.NOT_THERE),
        (410, PullReason.NOT_THERE),
    ],
)
def test_what_asking_again_does_not_change_is_said_at_once(puller: Puller, status: int, reason: PullReason) -> None:
    puller.host.behave = lambda handler, number: handler.answer(status, b"") or True
    assert puller.refused() is reason
    assert len(puller.host.requests) == 1


def test_nobody_listens(tmp_path: Path) -> None:
    puller = Puller(Host(address="http://127.0.0.1:1"), tmp_path)
    assert puller.refused() is PullReason.UNREACHABLE


# -- redirects and the token -----------------------------------------------------------------------------------------


def redirecting(to: str, status: int = 302):
    def behave(handler: Handler, number: int) -> bool:
        if handler.path != "/m.bin":
            return False
        handler.answer(status, b"moved", {"Location": to})
        return True

    return behave


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed_and_the_token_stays_with_its_host(host: Host, tmp_path: Path, status: int) -> None:
    with running(Host(files={"/elsewhere": CONTENT}), "localhost") as other:
        host.behave = redirecting(f"{other.address}/elsewhere", status)
        puller = Puller(host, tmp_path, route=Route(host.address, "secret"))
        assert puller.bring() == CONTENT
        assert host.header("Authorization") == ["Bearer secret"]
        assert other.header("Authorization") == [""]


def test_the_token_goes_to_no_host_but_its_own(host: Host, tmp_path: Path) -> None:
    puller = Puller(host, tmp_path, route=Route("https://hub.example", "secret"))
    assert puller.bring() == CONTENT
    assert host.header("Authorization") == [""]


def test_a_mirror_takes_the_hubs_place(host: Host, tmp_path: Path) -> None:
    host.files = {"/mirror/a/b/resolve/main/m.bin": CONTENT}
    puller = Puller(host, tmp_path, route=Route(f"{host.address}/mirror/", "secret"))
    file = WantedFile("m.bin", len(CONTENT), digest(CONTENT), "https://huggingface.co/a/b/resolve/main/m.bin")
    puller.transfer.bring(file, tmp_path / "m.bin", Watcher())
    assert (tmp_path / "m.bin").read_bytes() == CONTENT
    assert host.header("Authorization") == ["Bearer secret"]


def test_a_loop_of_redirects_ends(host: Host, tmp_path: Path) -> None:
    host.behave = redirecting("/m.bin")
    assert Puller(host, tmp_path).refused() is PullReason.REDIRECT_REFUSED
    assert len(host.requests) == 6


@pytest.mark.parametrize("to", ["file:///etc/passwd", "ftp://x/y", "http://user:word@127.0.0.1/"])
def test_redirects_out_of_the_web_are_refused(host: Host, tmp_path: Path, to: str) -> None:
    host.behave = redirecting(to)
    assert Puller(host, tmp_path).refused() is PullReason.REDIRECT_REFUSED


def test_a_stop_is_noticed_between_tries(puller: Puller) -> None:
    def stop(seconds: float) -> None:
        raise PullStoppedError

    puller.transfer = Transfer(puller.http, puller.folder / ".work", sleep=stop, clock=time.monotonic)
    puller.host.behave = lambda handler, number: handler.answer(503, b"") or True
    with pytest.raises(PullStoppedError):
        puller.bring()
