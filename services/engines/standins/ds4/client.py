"""One connection: a request is read from it, and an answer written as ds4 writes, at once or not at all."""

import asyncio
import contextlib
import json
import socket
import time
from typing import Any

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.stopping import Stopping

RECEIVE_TIMEOUT_S = 10.0
MOST_HEADER_BYTES, MOST_BODY_BYTES = 64 << 10, 64 << 20
_MOST_PATH = 255
_REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 404: "Not Found", 409: "Conflict", 500: "Internal Server Error",
}  # fmt: skip
_CORS = (
    "Access-Control-Allow-Origin: *\r\n"
    "Access-Control-Allow-Methods: GET, POST, OPTIONS\r\n"
    "Access-Control-Allow-Headers: *\r\n"
)


class Client:
    """Whoever is at the other end."""

    def __init__(self, connection: socket.socket, behaviour: Behaviour, stopping: Stopping, *, cors: bool) -> None:
        self._socket = connection
        self._behaviour = behaviour
        self._stopping = stopping
        self._cors = _CORS if cors else ""
        self.left = asyncio.Event()
        """Set when it has left, where that is watched."""
        if behaviour.send_buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, behaviour.send_buffer_bytes)

    async def receive(self) -> tuple[str, str, bytes] | None:
        """Method, path and body; None for what is no request."""
        loop = asyncio.get_running_loop()
        got = b""
        end, body_bytes = -1, 0
        while end < 0 or len(got) < end + body_bytes:
            if end < 0 and len(got) >= MOST_HEADER_BYTES:
                return None
            try:
                more = await asyncio.wait_for(loop.sock_recv(self._socket, 65_536), RECEIVE_TIMEOUT_S)
            except (TimeoutError, OSError):
                return None
            if not more:
                return None
            got += more
            if end < 0 and (at := got.find(b"\r\n\r\n")) >= 0:
                end = at + 4
                body_bytes = _content_length(got[:end])
                if not 0 <= body_bytes <= MOST_BODY_BYTES:
                    return None
        words = got.partition(b"\n")[0].decode("latin-1").split()
        if len(words) < 2:
            return None
        return words[0], words[1][:_MOST_PATH].partition("?")[0], got[end : end + body_bytes]

    def watch(self) -> None:
        """Notice when it leaves, a half-closed connection included."""
        asyncio.get_running_loop().add_reader(self._socket, self._look)

    def _look(self) -> None:
        try:
            if self._socket.recv(4096):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        asyncio.get_running_loop().remove_reader(self._socket)
        self.left.set()

    async def send(self, data: bytes) -> bool:
        """Whether all of it went out: nothing does once the server is to end, or when nothing is taken for too long."""
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self._behaviour.stall_s
        while data:
            if self._stopping.asked:
                return False
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                # Not longer, so that a stop is noticed.
                await _wait_writable(loop, self._socket, 0.05)
                continue
            except OSError:
                return False
            data = data[sent:]
            deadline = time.monotonic() + self._behaviour.stall_s
        return True

    async def respond(self, status: int, told: Any = None) -> bool:
        """A whole answer, as JSON."""
        body = b"" if told is None else json.dumps(told, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        head = f"HTTP/1.1 {status} {_REASONS.get(status, 'Error')}\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\n" if told is not None else ""
        return await self.send(f"{head}{self._cors}Connection: close\r\n\r\n".encode() + body)

    async def refuse(self, status: int, message: str, **more: Any) -> bool:
        """An error."""
        return await self.respond(status, {"error": {"message": message, "type": "invalid_request_error", **more}})

    async def begin_stream(self) -> bool:
        """The headers of an event stream."""
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
        return await self.send(f"{head}{self._cors}Connection: close\r\n\r\n".encode())

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()


async def _wait_writable(loop: asyncio.AbstractEventLoop, connection: socket.socket, timeout_s: float) -> None:
    ready = asyncio.Event()
    loop.add_writer(connection, ready.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), timeout_s)
    finally:
        loop.remove_writer(connection)


def _content_length(head: bytes) -> int:
    for line in head.decode("latin-1").splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-length":
            return int(value) if value.strip().isdigit() else -1
    return 0
