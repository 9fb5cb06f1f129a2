"""Hosts that do not just break: they keep a download waiting, start it over, or lead it where it must not go."""

import gzip
import hashlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("urllib3")

from weighbridge.pull import http as pull_http
from weighbridge.pull.addresses import Route
from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.http import Http, InterruptedTransferError
from weighbridge.pull.transfer import ATTEMPTS, Transfer, Watcher
from weighbridge.pull.wanted import WantedFile
from weighbridge.pull.watchdog import Watchdog

from clients.python.tests.client_broken_host import Handler, Host, running

CONTENT = bytes(range(256)) * 1024  # 256 KiB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@contextmanager
def talking(say: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A server below HTTP: `say` gets each connection once a request has come, and an event that says to end."""
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                try:
                    connection.recv(65536)
                    say(connection, over)
                except OSError:
                    pass  # the client has had enough: what these tests are about

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/m.bin"
    finally:
        over.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


class Bringing:
    """One transfer that does not sleep."""

    def __init__(self, folder: Path, *, stall_s: float = 30.0, step_s: float | None = None) -> None:
        self.folder = folder
        self.notes: list[str] = []
        self.counts: list[int] = []
        self.slept: list[float] = []
        self.http = Http(Route(), stall_s, step_s)
        self.transfer = Transfer(self.http, folder / ".work", sleep=self.slept.append)

    def bring(self, url: str, *, sha256: str = DIGEST, size: int = len(CONTENT)) -> bytes:
        watcher = Watcher(self.counts.append, self.notes.append)
        self.transfer.bring(WantedFile("m.bin", size, sha256, url), self.folder / "m.bin", watcher)
        return (self.folder / "m.bin").read_bytes()

    def refused(self, url: str, **settings) -> PullError:
        with pytest.raises(PullError) as caught:
            self.bring(url, **settings)
        assert not (self.folder / "m.bin").exists()
        return caught.value


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(CONTENT)


def drip(connection: socket.socket, over: threading.Event, text: bytes) -> None:
    """One piece now and then, always before anybody's patience for a single read ends."""
    while not over.wait(0.02):
        connection.sendall(text)


@pytest.mark.parametrize(
    "start",
    [b"H", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 100 Continue\r\n\r\n"],
    ids=["status line", "header", "interim responses"],
)
def test_a_head_without_an_end_is_cut_off(tmp_path: Path, start: bytes) -> None:
    endless = start if b"100" in start else b"x"

    def say(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(start)
        drip(connection, over, endless)

    bringing = Bringing(tmp_path, step_s=0.1)
    with talking(say) as url:
        assert bringing.refused(url).reason is PullReason.UNREACHABLE
    assert len(bringing.slept) == ATTEMPTS - 1
    assert all("too slow" in note for note in bringing.notes)


def test_a_chunk_without_an_end_is_cut_off(tmp_path: Path) -> None:
    def say(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;")
        drip(connection, over, b"x")

    with talking(say) as url:
        assert Bringing(tmp_path, step_s=0.1).refused(url).reason is PullReason.UNREACHABLE


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 999999 OK\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\n",
        b"",
    ],
    ids=["a thousand headers", "a header of 100 KB", "no status", "no HTTP", "two lengths", "nothing"],
)
def test_heads_that_are_none_are_given_up(tmp_path: Path, head: bytes) -> None:
    with talking(lambda connection, over: connection.sendall(head)) as url:
        assert Bringing(tmp_path).refused(url).reason is PullReason.UNREACHABLE


def test_an_old_host_that_names_no_length_is_understood(tmp_path: Path) -> None:
    with talking(lambda connection, over: connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + CONTENT)) as url:
        assert Bringing(tmp_path).bring(url) == CONTENT


def test_interim_responses_before_the_one_that_counts_do_no_harm(tmp_path: Path) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n" * 3
    with talking(lambda connection, over: connection.sendall(interim + HEAD + CONTENT)) as url:
        assert Bringing(tmp_path).bring(url) == CONTENT


@pytest.mark.parametrize(
    "span", ["bytes 0-9/99999999999999999999", "bytes 0-9/-1", "lines 0-9/10", "x", "bytes */*", ""]
)
def test_an_absurd_range_is_never_appended(tmp_path: Path, span: str) -> None:
    """A 206 that nobody asked for: taken only if it says that it starts at the start."""
    with running(Host(files={"/m.bin": CONTENT})) as host:
        host.behave = lambda handler, number: handler.answer(206, CONTENT[:10], {"Content-Range": span}) or True
        bringing = Bringing(tmp_path)
        assert bringing.refused(f"{host.address}/m.bin").reason is PullReason.UNREACHABLE
    assert max(bringing.counts) <= 10 * ATTEMPTS


def test_a_packed_body_is_refused_by_name(tmp_path: Path) -> None:
    packed = gzip.compress(CONTENT)
    with running(Host()) as host:
        host.behave = lambda handler, number: handler.answer(200, packed, {"Content-Encoding": "gzip"}) or True
        error = Bringing(tmp_path).refused(f"{host.address}/m.bin")
    assert error.reason is PullReason.BAD_ANSWER
    assert "gzip" in error.message
    assert [headers["accept-encoding"] for _, headers in host.requests] == ["identity"]


def test_a_tag_that_is_none_is_not_sent_back(tmp_path: Path) -> None:
    def cut(handler: Handler, number: int) -> bool:
        if number > 1:
            return False
        handler.answer(200, CONTENT, {"ETag": '"a"\r\n X-Evil: "b"'}, cut=1000)
        return True

    with running(Host(files={"/m.bin": CONTENT}, behave=cut)) as host:
        assert Bringing(tmp_path).bring(f"{host.address}/m.bin", sha256="") == CONTENT
    assert host.header("If-Range") == ["", ""]


def test_a_host_that_starts_over_each_time_is_given_up(tmp_path: Path) -> None:
    """It knows no ranges and always breaks at the same place: each try brings much, and none of them more."""
    with running(Host(ranges=False)) as host:
        host.behave = lambda handler, number: handler.answer(200, CONTENT, cut=200_000) or True
        assert Bringing(tmp_path).refused(f"{host.address}/m.bin").reason is PullReason.UNREACHABLE
    assert len(host.requests) == ATTEMPTS + 1  # the first one counts as a step forward


def test_a_host_that_gives_a_byte_each_time_is_given_up_and_the_bytes_are_kept(tmp_path: Path) -> None:
    def a_byte(handler: Handler, number: int) -> bool:
        start = int(handler.headers.get("Range", "bytes=0-")[6:].partition("-")[0])
        span = {"Content-Range": f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}"} if start else {}
        handler.answer(206 if start else 200, CONTENT[start:], span, cut=1)
        return True

    with running(Host(behave=a_byte)) as host:
        bringing = Bringing(tmp_path)
        assert bringing.refused(f"{host.address}/m.bin").reason is PullReason.UNREACHABLE
    assert (tmp_path / ".work" / f"{DIGEST}.part").read_bytes() == CONTENT[:ATTEMPTS]


def test_a_host_whose_file_is_shorter_costs_nothing_of_what_has_come(tmp_path: Path) -> None:
    (tmp_path / ".work").mkdir()
    part = tmp_path / ".work" / f"{DIGEST}.part"
    part.write_bytes(CONTENT[:1000])
    with running(Host(files={"/m.bin": b"short"})) as host:
        assert Bringing(tmp_path).refused(f"{host.address}/m.bin").reason is PullReason.SIZE_MISMATCH
    assert part.read_bytes() == CONTENT[:1000]


@pytest.mark.parametrize("status", [520, 529, 507])
def test_every_trouble_of_the_hosts_own_is_worth_another_try(tmp_path: Path, status: int) -> None:
    with running(Host(files={"/m.bin": CONTENT})) as host:
        host.behave = lambda handler, number: number == 1 and (handler.answer(status, b"") or True)
        assert Bringing(tmp_path).bring(f"{host.address}/m.bin") == CONTENT


def test_a_connection_that_took_all_the_time_to_make_is_cut_as_soon_as_it_is_there() -> None:
    """The dog barks while nobody is there yet, as when a name is looked up for long."""
    now, (ours, theirs) = [0.0], socket.socketpair()
    watchdog = Watchdog(0.01, clock=lambda: now[0])
    with ours, theirs:
        theirs.settimeout(10)
        with watchdog.step():
            now[0] = 1.0
            while not watchdog.barked:
                threading.Event().wait(0.001)
            watchdog.watch(ours)
            assert theirs.recv(1) == b""
    watchdog.close()


def test_what_was_cut_stays_cut() -> None:
    ours, theirs = socket.socketpair()
    watchdog = Watchdog(30.0)
    with ours, theirs:
        theirs.settimeout(10)
        watchdog.cut()
        watchdog.watch(ours)
        assert theirs.recv(1) == b""
    watchdog.close()


def test_a_cut_from_another_thread_is_a_broken_connection(tmp_path: Path) -> None:
    reached = threading.Event()

    def silent(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(HEAD + CONTENT[:10])
        reached.set()
        over.wait(30)

    http = Http(Route(), 30.0)
    with talking(silent) as url, pytest.raises(InterruptedTransferError):
        cutter = threading.Thread(target=lambda: (reached.wait(30), http.cut()), daemon=True)
        cutter.start()
        with http.get(url, 0, "") as answer:
            list(answer.body)
    http.close()


# -- where it leads --------------------------------------------------------------------------------------------------


def test_a_name_that_leads_into_a_private_network_is_refused_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the connection shows where a name leads. The first host plays one of the open net."""
    with running(Host(files={"/m.bin": CONTENT})) as inner, running(Host()) as outer:
        port = inner.address.rpartition(":")[2]
        outer.behave = lambda handler, number: (
            handler.answer(302, b"", {"Location": f"http://inner.example:{port}/m.bin"}) or True
        )
        seen = []

        def private(url: str) -> bool:
            seen.append(url)
            return len(seen) > 2  # the address asked for, and whom it led to, are of the open net

        resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **more: resolve("127.0.0.1", *rest, **more))
        monkeypatch.setattr(pull_http, "is_private", private)
        monkeypatch.setattr(pull_http, "getproxies", dict)
        error = Bringing(tmp_path).refused(f"{outer.address}/m.bin")
    assert error.reason is PullReason.REDIRECT_REFUSED
    assert not inner.requests


def test_the_systems_proxy_carries_what_is_not_private_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(Host(files={"http://models.example/m.bin": CONTENT, "/m.bin": CONTENT})) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address.replace("http://", "http://user:word@"))
        monkeypatch.setenv("no_proxy", "")
        assert Bringing(tmp_path).bring("http://models.example/m.bin") == CONTENT
        assert [path for path, _ in proxy.requests] == ["http://models.example/m.bin"]
        assert proxy.header("Proxy-Authorization") == ["Basic dXNlcjp3b3Jk"]
        (tmp_path / "m.bin").unlink()
        proxy.requests.clear()
        assert Bringing(tmp_path).bring(f"{proxy.address}/m.bin") == CONTENT
        assert proxy.header("Proxy-Authorization") == [""]


def test_a_host_that_cannot_show_who_it_is_is_not_asked_twice(tmp_path: Path) -> None:
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("needs openssl to make a certificate of its own")
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"),
            *("-keyout", tmp_path / "k.pem", "-out", tmp_path / "c.pem"),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "c.pem", tmp_path / "k.pem")
    met: list[bool] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            met.append(True)
            connection.settimeout(10)
            try:
                with context.wrap_socket(connection, server_side=True):
                    pass
            except OSError:
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        bringing = Bringing(tmp_path)
        error = bringing.refused(f"https://127.0.0.1:{listener.getsockname()[1]}/m.bin")
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
    assert error.reason is PullReason.NOT_TRUSTED
    assert "SSL_CERT_FILE" in error.message
    assert (len(met), bringing.slept) == (1, [])
