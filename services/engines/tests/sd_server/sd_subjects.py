"""Whom the behaviour tests question: the real sd-server and its stand-in, started and asked the same way."""

import base64
import http.client
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image
from weighbridge_engines.supervisor.output import LineSplitter
from weighbridge_engines.supervisor.ports import free_loopback_port

from services.engines.standins.sd.behaviour import Behaviour
from services.engines.standins.sd.program import real_sd_server, write_standin
from services.engines.tests.http_answers import HttpAnswer

PATIENCE_S = 90
"""How long anything may take on a busy machine before a test gives up on it."""

MIB = 2**20


class Subject:
    """One of the two. ``short_of_memory`` is how each is brought to run out of memory where the test needs it to."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._folder = folder

    def needs_memory_limit(self) -> None:
        """Skip the test where the real one cannot be kept short of memory: macOS holds nobody to RLIMIT_AS."""
        if self.name == "real" and sys.platform == "darwin":
            pytest.skip("macOS cannot limit a process's memory, and this asks for more than there is")

    def start(self, arguments, *, short_of_memory: str = "", port: int | None = None, **behaviour) -> "Server":
        """Start it; the caller ends it.

        Args:
            short_of_memory: "at_load", or "in_render" for pictures above 1024 x 1024.
            behaviour: of the stand-in alone, where the real one needs no help.
        """
        limit_bytes = 0
        if self.name == "real":
            program = real_sd_server()
            assert program is not None, "the test is skipped then"
            limit_bytes = {"": 0, "at_load": 100 * MIB, "in_render": 900 * MIB}[short_of_memory]
        else:
            faults = {"": {}, "at_load": {"load_fault": "out_of_memory"}, "in_render": {"largest_pixels": 1024 * 1024}}
            self._folder.mkdir(exist_ok=True)
            program = write_standin(self._folder, Behaviour(**behaviour, **faults[short_of_memory]))
        return Server(program, arguments, free_loopback_port() if port is None else port, limit_bytes)


class Answer(HttpAnswer):
    """With what this server has in its answers."""

    @property
    def pictures(self) -> list[bytes]:
        return [base64.b64decode(picture) for picture in self.json["images"]]


class Server:
    """A started sd-server: what it prints, line by line, and what it answers."""

    def __init__(self, program: Path, arguments, port: int, limit_bytes: int) -> None:
        self.port = port
        self.lines: list[tuple[str, bool]] = []
        self._printed = threading.Condition()
        self._open_streams = 2
        self._marks = itertools.count(1)
        library = program.parent.parent / "stable_diffusion_cpp" / "lib"
        # Without GGML_NO_BACKTRACE a failed assertion first calls a debugger, and that takes seconds.
        environ = os.environ | {"MALLOC_ARENA_MAX": "1", "GGML_NO_BACKTRACE": "1"}
        environ["DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"] = str(library)

        # Limits by a shell, not between fork and exec: gRPC's threads of this process do not survive a fork.
        limits = "ulimit -c 0"
        if limit_bytes and sys.platform != "darwin":
            limits += f"; ulimit -v {limit_bytes // 1024}"
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", f'{limits}; exec "$@"', "sh", program, *arguments, "--listen-port", str(port)],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._pumps = [
            threading.Thread(target=self._pump, args=(stream, from_stderr), daemon=True)
            for stream, from_stderr in ((self.process.stdout, False), (self.process.stderr, True))
        ]
        for pump in self._pumps:
            pump.start()

    def _pump(self, stream, from_stderr: bool) -> None:
        splitter = LineSplitter()
        while chunk := stream.read1():
            self._keep(splitter.feed(chunk), from_stderr)
        self._keep(splitter.end(), from_stderr)
        with self._printed:
            self._open_streams -= 1
            self._printed.notify_all()

    def _keep(self, lines, from_stderr: bool) -> None:
        with self._printed:
            self.lines += [(line, from_stderr) for line in lines]
            self._printed.notify_all()

    def text(self, *, from_stderr: bool, after: int = 0) -> str:
        """What it printed on one stream, after line number ``after``."""
        return "\n".join(line for line, is_error in self.lines[after:] if is_error is from_stderr)

    def wait_line(self, pattern: str, after: int = 0) -> str:
        """The first line after line number ``after`` with a match."""
        with self._printed:
            found: list[str] = []

            def is_there() -> bool:
                found[:] = [line for line, _ in self.lines[after:] if re.search(pattern, line)]
                return bool(found) or not self._open_streams

            self._printed.wait_for(is_there, PATIENCE_S)
            assert found, f"no {pattern} in {self.lines[after:]}"
            return found[0]

    def mark(self) -> int:
        """A line number after which everything is printed that is printed from now on.

        Both streams are read by threads of their own, so a line may come in after the answer that it belongs to. This
        asks for something that prints a line on each of them and is refused: they have caught up when those are there.
        """
        number = next(self._marks)
        source = encoded(Image.new("RGB", (number, 1)))
        before = len(self.lines)
        refused = self.post("/sdapi/v1/img2img", {"prompt": "a", "init_images": [source], "cfg_scale": -1})
        assert refused.status == 400, refused.body
        self.wait_line(f"set width x height to {number} x 1$", after=before)
        self.wait_line("cfg_scale must be positive", after=before)
        return len(self.lines)

    def wait_ready(self) -> "Server":
        """Until it answers: the line that says so comes before the port is bound."""
        self.wait_line("listening on")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.get("/v1/models")
                return self
            except OSError:
                assert self.process.poll() is None, self.lines
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def get(self, path: str) -> Answer:
        return self.ask("GET", path)

    def post(self, path: str, body) -> Answer:
        return self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = self.send(method, path, body, **headers)
        try:
            response = connection.getresponse()
            return Answer.of(response)
        finally:
            connection.close()

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str) -> http.client.HTTPConnection:
        """A connection on which a request has been sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        return connection

    def wait_exit(self) -> int:
        """The exit code, negative for a signal; everything printed has been read then."""
        code = self.process.wait(PATIENCE_S)
        for pump in self._pumps:
            pump.join(PATIENCE_S)
        return code

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.wait_exit()


def pixels(picture: bytes) -> tuple[tuple[int, int], bytes]:
    """Size and decoded pixels: the file holds its generation data too, and may differ by them."""
    with Image.open(io.BytesIO(picture)) as opened:
        return opened.size, opened.convert("RGB").tobytes()


def encoded(image: Image.Image, format: str = "PNG") -> str:
    """A picture as requests hold it."""
    out = io.BytesIO()
    image.save(out, format)
    return base64.b64encode(out.getvalue()).decode()
