"""Whom the behaviour tests question: the real ds4-server and its stand-in, started and asked the same way."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from weighbridge_engines.supervisor.output import LineSplitter
from weighbridge_engines.supervisor.ports import free_loopback_port

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.program import real_ds4_server, write_standin
from services.engines.tests.http_answers import HttpAnswer

PATIENCE_S = 60
"""How long anything may take on a busy machine before a test gives up on it."""

REAL_PATIENCE_S = 600
"""The real one reads six tokens in a minute on one core."""


class Answer(HttpAnswer):
    """With what this server has in its answers."""

    @property
    def events(self) -> list[str]:
        """What follows `data: `, line by line."""
        return [line.removeprefix("data: ") for line in self.body.decode().split("\n") if line.startswith("data: ")]

    @property
    def chunks(self):
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def deltas(self):
        return [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]

    def joined(self, name: str) -> str:
        return "".join(delta.get(name) or "" for delta in self.deltas)

    @property
    def finish(self) -> str:
        (reason,) = [
            choice["finish_reason"] for chunk in self.chunks for choice in chunk["choices"] if choice["finish_reason"]
        ]
        return reason


class Subject:
    """One of the two. The real one computes on the processor: that needs no card, and no weights."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.lock = folder / "ds4.lock"
        self._folder = folder

    def start(self, *arguments: object, port: int | None = None, **behaviour) -> "Server":
        """Start it on the processor as the build of May, which both are; the caller ends it.

        ``behaviour`` is the stand-in's alone, where the real one needs no help.
        """
        if self.name == "real":
            program = real_ds4_server()
            assert program is not None, "the test is skipped then"
        else:
            program = write_standin(self._folder, Behaviour(**{"build": "2026-05", "compute": "cpu"} | behaviour))
        port = free_loopback_port() if port is None else port
        return Server(program, [*map(str, arguments), "--port", str(port)], port, self.lock)


class Server:
    """A started ds4-server: what it prints, line by line, and what it answers."""

    def __init__(self, program: Path, arguments: list[str], port: int, lock: Path) -> None:
        self.port = port
        self.lines: list[str] = []
        self._printed = threading.Condition()
        self._open = True
        self.process = subprocess.Popen(
            [program, *arguments], env=os.environ | {"DS4_LOCK_FILE": str(lock)},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._pump = threading.Thread(target=self._read, daemon=True)
        self._pump.start()

    def _read(self) -> None:
        splitter = LineSplitter()
        assert self.process.stderr is not None
        while chunk := self.process.stderr.read1():
            self._keep(splitter.feed(chunk))
        self._keep(splitter.end())
        with self._printed:
            self._open = False
            self._printed.notify_all()

    def _keep(self, lines) -> None:
        with self._printed:
            self.lines += lines
            self._printed.notify_all()

    def wait_line(self, pattern: str) -> re.Match[str]:
        """The first line with a match."""
        with self._printed:
            found: list[re.Match[str]] = []

            def is_there() -> bool:
                found[:] = [match for line in self.lines if (match := re.search(pattern, line))]
                return bool(found) or not self._open

            self._printed.wait_for(is_there, PATIENCE_S)
            assert found, f"no {pattern} in {self.lines}"
            return found[0]

    def wait_ready(self) -> "Server":
        """Until it listens: the line comes after the port is bound."""
        self.wait_line(r"ds4-server: listening on http://")
        return self

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def chat(self, text: str = "hi", **fields) -> Answer:
        """A chat with one message, or with ``messages``."""
        return self.ask("POST", "/v1/chat/completions", body_of(text, **fields))

    def ask(self, method: str, path: str, body: bytes | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REAL_PATIENCE_S)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return Answer.of(response)
        finally:
            connection.close()

    def open_chat(self, text: str = "hi", **fields) -> socket.socket:
        """A connection on which a chat was asked for; nothing of the answer is read."""
        body = body_of(text, **fields)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    def wait_exit(self) -> int:
        """The exit code, negative for a signal; everything printed has been read then."""
        code = self.process.wait(PATIENCE_S)
        self._pump.join(PATIENCE_S)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.wait_exit()


def body_of(text: str = "hi", **fields) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]} | fields).encode()


def read_all(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    got = b""
    while chunk := connection.recv(65_536):
        got += chunk
    return got


def wait_until(there, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
