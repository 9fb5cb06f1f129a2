"""An HTTP host on loopback that breaks in every way that a download has to survive."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Host:
    """What it serves by path, how it misbehaves, and the requests that came: (path, headers)."""

    files: dict[str, bytes] = field(default_factory=dict)
    behave: Callable[["Handler", int], bool] | None = None
    """Called with the handler and the number of the request; True: it has answered."""
    ranges: bool = True
    etag: str = '"1"'
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    address: str = ""

    def header(self, name: str) -> list[str]:
        """The values of one header, "" where a request had none."""
        return [headers.get(name.lower(), "") for _, headers in self.requests]


class Handler(BaseHTTPRequestHandler):
    """Serves `Host.files`, with ranges."""

    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    @property
    def host(self) -> Host:
        return self.server.host

    def content(self) -> bytes:
        return self.host.files[self.path]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        host = self.host
        host.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if host.behave is not None and host.behave(self, len(host.requests)):
            return
        if self.path not in host.files:
            self.answer(404, b"not here")
            return
        content, start = self.content(), 0
        asked = self.headers.get("Range", "")
        if host.ranges and asked.startswith("bytes=") and self.headers.get("If-Range", host.etag) == host.etag:
            start = int(asked[6:].partition("-")[0])
            if start >= len(content):
                self.answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
        if start or (host.ranges and asked):
            span = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            self.answer(206, content[start:], {"ETag": host.etag, **span})
        else:
            self.answer(200, content, {"ETag": host.etag})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        """A response; with `cut` the connection ends after so many bytes of the body."""
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def running(host: Host, name: str = "127.0.0.1") -> Iterator[Host]:
    """Serves until the end of the block."""

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that went away is what these tests are about."""

    server: Any = Quiet(("127.0.0.1", 0), Handler)
    server.host = host
    host.address = f"http://{name}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield host
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
