"""Images through a suite and straight from its sd-server, for end-to-end tests and benchmarks."""

import base64
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from weighbridge_proto.engines.v1 import (
    engine_service_pb2,
    engine_service_pb2_grpc,
    image_service_pb2,
    image_service_pb2_grpc,
)
from weighbridge_proto.fit.v1 import plan_pb2, weights_pb2

from tests.harness import Suite, make_model

PROMPT = "a small red fox"

SIDE_PX = 64
"""Of the images that tests render: the smallest that sd-server offers."""

PATIENCE_S = 120.0
"""How long sd-server may take to answer on a busy machine."""


@dataclass(frozen=True)
class ImageModel:
    """A model for sd-server, as requests name it.

    Attributes:
        path: of the model.
        parts: its further files by role, where they are not found by themselves.
    """

    path: Path
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def ref(self) -> weights_pb2.ModelRef:
        return weights_pb2.ModelRef(path=str(self.path))

    @property
    def options(self) -> plan_pb2.EngineOptions:
        return plan_pb2.EngineOptions(sd=plan_pb2.SdOptions(parts=dict(self.parts)))


def made_of_parts(models_root: Path) -> ImageModel:
    """A tiny FLUX.2 [klein], one file for each part."""
    return ImageModel(make_model("tiny_sd", models_root / "tiny-sd"))


def made_of_one_file(models_root: Path) -> ImageModel:
    """The same in one checkpoint and other weights. As a checkpoint it starts from a picture too."""
    folder = make_model("tiny_sd", models_root / "tiny-sd-checkpoint", "--single", "--format", "q4_0")
    return ImageModel(folder / "model.gguf", {"taesd": str(folder / "tae.safetensors")})


@dataclass
class Told:
    """What a stream of images told, or one of a chat."""

    events: list[Any] = field(default_factory=list)

    @property
    def kinds(self) -> list[str]:
        """Of all events; see :func:`kind_of`."""
        return [kind_of(event) for event in self.events]

    @property
    def images(self) -> list[bytes]:
        """The files, put together."""
        found: list[bytes] = []
        for event in self.events:
            if event.HasField("chunk"):
                if event.chunk.image_index == len(found):
                    found.append(b"")
                found[event.chunk.image_index] += event.chunk.data
        return found

    @property
    def finished(self) -> image_service_pb2.ImageFinished:
        assert self.kinds[-1] == "finished", self.kinds
        return self.events[-1].finished


def kind_of(event: Any) -> str:
    """Which event it is; those of a load are "load.queued" and so on."""
    kind = event.WhichOneof("event")
    return f"load.{event.load.WhichOneof('event')}" if kind == "load" else str(kind)


class ImageEngine:
    """The sd engine of a suite, over gRPC."""

    def __init__(self, channel: Any) -> None:
        self.engines = engine_service_pb2_grpc.EngineServiceStub(channel)
        self._images = image_service_pb2_grpc.ImageServiceStub(channel)

    def generate(self, model: ImageModel, *, side_px: int = SIDE_PX, batch: int = 1, **asked: Any) -> Any:
        """Begin a render of a square; the stream of its events."""
        size = plan_pb2.ImageWorkload(width_px=side_px, height_px=side_px, batch=batch)
        asked = {"prompt": PROMPT, "seed": 7, "steps": 1, **asked}
        return self._images.GenerateImage(
            image_service_pb2.GenerateImageRequest(model=model.ref, options=model.options, size=size, **asked)
        )

    def load(self, model: ImageModel, *, side_px: int = SIDE_PX) -> Any:
        """Begin to load for squares of that side; the stream of its events."""
        image = plan_pb2.ImageWorkload(width_px=side_px, height_px=side_px, batch=1)
        return self.engines.LoadModel(
            engine_service_pb2.LoadModelRequest(
                model=model.ref, options=model.options, workload=plan_pb2.Workload(image=image)
            )
        )

    async def engine(self) -> engine_service_pb2.Engine:
        return (await self.engines.GetEngine(engine_service_pb2.GetEngineRequest())).engine

    async def unload(self) -> None:
        await self.engines.UnloadModel(engine_service_pb2.UnloadModelRequest())


async def told(call: Any, *, until: str = "") -> Told:
    """What a stream tells up to its end, or to the first event of kind ``until``."""
    heard = Told()
    async for event in call:
        heard.events.append(event)
        if kind_of(event) == until:
            break
    return heard


def admitted(heard: Told) -> str:
    """The lease of the load that a stream told of."""
    [event] = [event for event in heard.events if kind_of(event) == "load.admitted"]
    return str(event.load.admitted.lease.lease_id)


def sd_server_of(suite: Suite) -> psutil.Process:
    """The engine's process itself, and not the guard that has its words on its command line too."""
    [process] = [
        process
        for process in suite.processes()
        if "--listen-port" in _words(process) and not any(word.endswith("guard.py") for word in _words(process))
    ]
    return process


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def port_of(process: psutil.Process) -> int:
    """Where an sd-server listens."""
    words = process.cmdline()
    return int(words[words.index("--listen-port") + 1])


def answers(port: int) -> bool:
    """Whether an sd-server answers there; it loads its model first."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=PATIENCE_S):
            return True
    except OSError:
        return False


def ask_directly(port: int, path: str, **body: Any) -> list[bytes]:
    """The pictures of an sd-server, asked as anybody asks it who has no suite."""
    asked = {"prompt": PROMPT, "seed": 7, "steps": 1, "width": SIDE_PX, "height": SIDE_PX, "cfg_scale": 1, **body}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        return [base64.b64decode(image) for image in json.load(response)["images"]]
