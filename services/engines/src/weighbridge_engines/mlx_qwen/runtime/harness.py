"""Starts a runtime as its host would and talks to it: for measurements and tests, without supervisor, plan or lease."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2 as pb2
from weighbridge_proto.engines.v1 import runtime_service_pb2_grpc as pb2_grpc
from weighbridge_proto.fit.v1 import plan_pb2

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 30.0


@dataclass
class StartedRuntime:
    """A runtime process and a channel to it. The process's standard input is the lifeline that its host would hold."""

    process: subprocess.Popen[bytes]
    stub: Any
    socket: Path

    def load(self, folder: Path, **launch: Any) -> list[pb2.LoadResponse]:
        """Loads a model and returns the events; launch overrides the fields of a small plan."""
        sizes: dict[str, Any] = {"context_tokens": 2048, "slots": 1, "prefill_step_tokens": 512} | launch
        request = pb2.LoadRequest(model_path=str(folder), model_name=folder.name, launch=plan_pb2.MlxLaunch(**sizes))
        return list(self.stub.Load(request))

    def unload(self) -> None:
        """Drops the model."""
        self.stub.Unload(pb2.UnloadRequest())

    def memory(self) -> pb2.GetMemoryResponse:
        """What the runtime holds."""
        answer: pb2.GetMemoryResponse = self.stub.GetMemory(pb2.GetMemoryRequest())
        return answer

    def stream(self, prompt: str, **fields: Any) -> Any:
        """The call that answers one user message; fields are those of ChatRequest. Greedy by default."""
        message = chat_pb2.ChatMessage(role=chat_pb2.ROLE_USER, parts=[chat_pb2.ContentPart(text=prompt)])
        chat: dict[str, Any] = {"messages": [message], "sampling": chat_pb2.Sampling(temperature=0.0)} | fields
        return self.stub.Generate(pb2.GenerateRequest(chat=chat_pb2.ChatRequest(**chat)))

    def answer(self, prompt: str, **fields: Any) -> "WholeAnswer":
        """The whole answer to one user message."""
        return WholeAnswer.of(self.stream(prompt, **fields))


@dataclass(frozen=True)
class WholeAnswer:
    """An answer whose stream has ended."""

    text: str
    started: chat_pb2.ChatStarted
    finished: chat_pb2.ChatFinished

    @classmethod
    def of(cls, events: Iterator[pb2.GenerateResponse]) -> "WholeAnswer":
        """Reads a stream to its end."""
        text = []
        started, finished = chat_pb2.ChatStarted(), chat_pb2.ChatFinished()
        for event in events:
            kind = event.WhichOneof("event")
            if kind == "delta":
                text.append(event.delta.text)
            elif kind == "started":
                started = event.started
            else:
                finished = event.finished
        return cls("".join(text), started, finished)


@contextlib.contextmanager
def started_runtime(
    *, environ: Mapping[str, str] | None = None, arguments: Sequence[str] = (), log: Any = subprocess.DEVNULL
) -> Iterator[StartedRuntime]:
    """A runtime that serves. It is stopped by SIGTERM at the end, and killed if it does not obey."""
    with tempfile.TemporaryDirectory(prefix="wb-mlx-") as folder:
        socket = Path(folder) / "runtime.sock"
        process = subprocess.Popen(
            [sys.executable, "-m", "weighbridge_engines.mlx_qwen.runtime", "--socket", str(socket), *arguments],
            stdin=subprocess.PIPE,
            stderr=log,
            env=None if environ is None else dict(environ),
        )
        channel = grpc.insecure_channel(f"unix:{socket}")
        try:
            grpc.channel_ready_future(channel).result(timeout=_START_TIMEOUT_S)
            yield StartedRuntime(process, pb2_grpc.RuntimeServiceStub(channel), socket)
        finally:
            channel.close()
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()
