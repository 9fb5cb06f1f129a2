"""Chats with a ds4 model through a suite, for end-to-end tests: a stand-in that can be changed while the suite runs."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from weighbridge_engines.models import sparse_ds4
from weighbridge_proto.channel import open_channel
from weighbridge_proto.engines.v1 import (
    chat_service_pb2,
    chat_service_pb2_grpc,
    engine_service_pb2,
    engine_service_pb2_grpc,
)
from weighbridge_proto.errors import RpcFailure
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.program import write_standin
from tests.harness import Suite

CONTEXT_TOKENS = 4096


@dataclass(frozen=True)
class Ds4Models:
    """Sparse models under one models root, with their drafters beside them."""

    root: Path

    @property
    def flash(self) -> Path:
        """V4 Flash Q2."""
        return self.root / "flash.gguf"

    @property
    def v41(self) -> Path:
        """V4.1 Flash Q2, which streams on every machine of these tests."""
        return self.root / "v41.gguf"

    @property
    def flash_drafter(self) -> Path:
        return self.root / "flash-drafter.gguf"

    @property
    def v41_drafter(self) -> Path:
        return self.root / "v41-drafter.gguf"


def write_models(root: Path) -> Ds4Models:
    """Write them; a few MB on disk."""
    models = Ds4Models(root)
    sparse_ds4.write(models.flash)
    sparse_ds4.write(models.v41, "v41-q2")
    sparse_ds4.write_drafter(models.flash_drafter)
    sparse_ds4.write_drafter(models.v41_drafter, v41=True)
    return models


class Program:
    """The stand-in, built for Metal, in a folder of its own. What it becomes holds from its next start on."""

    def __init__(self, folder: Path, **always: Any) -> None:
        self.folder = folder
        build = always.get("build", Behaviour.build)
        # A build that knows of pictures stops for a client that left; the engine goes by that, so the stand-in must.
        cancels = build == "2026-09"
        self._always: dict[str, Any] = {"compute": "metal", "metal_sources": True, "cancels": cancels, **always}
        (folder / "metal").mkdir()
        (folder / "metal" / "common.metal").write_text("// Found, and never compiled.\n")
        self.path = self.becomes()

    def becomes(self, **behaviour: Any) -> Path:
        return write_standin(self.folder, Behaviour(**{**self._always, **behaviour}))


def settings_of(program: Program, scratch: Path, machine: str) -> dict[str, str]:
    """Of a suite whose ds4 shares neither lock nor conversations with anybody, and gives up early."""
    return {
        "WEIGHBRIDGE_LEDGER_MACHINE": machine,
        "WEIGHBRIDGE_ENGINES_DS4_SERVER": str(program.path),
        "WEIGHBRIDGE_ENGINES_DS4_LOCK_FILE": str(scratch / "ds4.lock"),
        "WEIGHBRIDGE_ENGINES_DS4_KV_DIR": str(scratch / "kv"),
        "WEIGHBRIDGE_ENGINES_DS4_IDLE_LIMIT_S": "3",
        "WEIGHBRIDGE_ENGINES_START_TIMEOUT_S": "8",
        "WEIGHBRIDGE_ENGINES_STOP_GRACE_S": "1",
    }


class Ds4Engine:
    """The ds4 engine of a suite, over gRPC."""

    def __init__(self, channel: Any) -> None:
        self.engines = engine_service_pb2_grpc.EngineServiceStub(channel)
        self._chats = chat_service_pb2_grpc.ChatServiceStub(channel)

    def load(self, model: Path, *, context_tokens: int = CONTEXT_TOKENS, **options: Any) -> Any:
        """Begin to load; the stream of its events."""
        return self.engines.LoadModel(
            engine_service_pb2.LoadModelRequest(
                model=weights_pb2.ModelRef(path=str(model)),
                options=plan_pb2.EngineOptions(ds4=plan_pb2.Ds4Options(**options)),
                workload=workload(context_tokens),
            )
        )

    def chat(self, text: str = "Hello", *, messages: Sequence[Any] = (), **asked: Any) -> Any:
        """Begin an answer of the loaded model; the stream of its events."""
        return self._chats.Chat(chat_service_pb2.ChatRequest(messages=messages or [said(text)], **asked))

    def chat_with(self, model: Path, text: str = "Hello") -> Any:
        """Begin an answer of this model, which is loaded for it."""
        named = weights_pb2.ModelRef(path=str(model))
        return self.chat(text, model=named, workload=workload(CONTEXT_TOKENS))

    async def engine(self) -> engine_service_pb2.Engine:
        return (await self.engines.GetEngine(engine_service_pb2.GetEngineRequest())).engine

    async def until(self, condition: Any) -> engine_service_pb2.Engine:
        """The first state of the engine of which this is true."""
        watch = self.engines.Watch(engine_service_pb2.WatchRequest(), timeout=60)
        async for told in watch:
            if condition(told.engine):
                watch.cancel()
                return told.engine
        raise AssertionError("the engine's service ended")

    async def unload(self, *, force: bool = False) -> None:
        await self.engines.UnloadModel(engine_service_pb2.UnloadModelRequest(force=force))


def workload(context_tokens: int) -> plan_pb2.Workload:
    return plan_pb2.Workload(chat=plan_pb2.ChatWorkload(context_tokens=context_tokens))


def said(text: str, role: Any = chat_service_pb2.ROLE_USER, **more: Any) -> chat_service_pb2.ChatMessage:
    return chat_service_pb2.ChatMessage(role=role, parts=[chat_service_pb2.ContentPart(text=text)], **more)


@asynccontextmanager
async def connected(suite: Suite) -> AsyncIterator[Ds4Engine]:
    """The engine over a connection of its own."""
    async with open_channel(f"unix:{suite.run_dir}/engine-ds4.sock") as channel:
        yield Ds4Engine(channel)


@asynccontextmanager
async def tended(suite: Suite, program: Program) -> AsyncIterator[Ds4Engine]:
    """The engine for one test. Whatever a test did, unloading gives every byte back, and the stand-in is as before."""
    try:
        async with connected(suite) as opened:
            yield opened
            await opened.unload(force=True)
        assert suite.committed_bytes() == 0
    finally:
        program.becomes()


async def failure_of(call: Any) -> RpcFailure:
    """How a stream fails; what it told before is dropped."""
    try:
        events = [event async for event in call]
    except grpc.aio.AioRpcError as error:
        return RpcFailure.from_rpc_error(error)
    raise AssertionError(f"it went well: {events[-1:]}")


def server_of(suite: Suite) -> psutil.Process:
    """The ds4-server itself, and not the guard that has its words on its command line too."""
    found = []
    for process in suite.processes():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "--model" in words and "--ctx" in words and not any(word.endswith("guard.py") for word in words):
            found.append(process)
    [process] = found
    return process


# Fixtures. A module of tests gives those that it uses names of its own: ``models = ds4_models``.


@pytest.fixture(scope="module")
def ds4_models(tmp_path_factory: Any) -> Ds4Models:
    """Models for a module of tests."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def ds4_program(tmp_path_factory: Any) -> Program:
    """A stand-in of the newest build for a module of tests."""
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def ds4_scratch(tmp_path_factory: Any) -> Path:
    """A folder for a module of tests."""
    return Path(tmp_path_factory.mktemp("scratch"))
