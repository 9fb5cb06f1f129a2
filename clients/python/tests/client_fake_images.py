"""A fake ImageService: a load, a place in the queue, a bar, and pictures in pieces."""

import asyncio
import struct
import threading
import zlib
from collections.abc import AsyncIterator
from typing import Any

from weighbridge_proto.engines.v1 import engine_service_pb2, image_service_pb2, image_service_pb2_grpc
from weighbridge_proto.fit.v1 import plan_pb2

Response = image_service_pb2.GenerateImageResponse


def png(shade: int, side: int = 2) -> bytes:
    """A grey PNG, by the format's specification."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = (b"\0" + bytes([shade]) * side) * side
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


class FakeImageState:
    """What the fake answers. Tests set and read it from their own thread."""

    def __init__(self) -> None:
        self.pictures = [png(10), png(20), png(30)]
        self.media_type = "image/png"
        self.source_skipped_reason = ""
        self.rendered = (64, 64)
        self.steps = 4
        self.leave_out: set[str] = set()
        """Kinds of events that do not come: `finished`, `last` (of the last piece)."""
        self.hang_at = ""
        """Where it goes on no more: `sampling`, or `chunk` (within the first picture)."""
        self.hanging = threading.Event()
        self.cancelled = threading.Event()


class FakeImages(image_service_pb2_grpc.ImageServiceServicer):
    def __init__(self, state: Any) -> None:
        self.state = state

    async def GenerateImage(self, request: Any, context: Any) -> AsyncIterator[Response]:  # noqa: N802
        images: FakeImageState = self.state.images
        await self.state.ask("GenerateImage", request, context)
        try:
            starting = engine_service_pb2.LoadStarting(phase="weights", fraction=0.5)
            yield Response(load=engine_service_pb2.LoadModelResponse(starting=starting))
            yield Response(queued=image_service_pb2.ImageQueued(position=2))
            yield progress("text_encode", 0, 1)
            for step in range(min(3, images.steps)):
                yield progress("sampling", step, images.steps)
            await self._hang("sampling")
            yield progress("decode", 0, 1)
            for index in range(request.size.batch):
                data, half = images.pictures[index], len(images.pictures[index]) // 2
                first = image_service_pb2.ImageChunk(image_index=index, data=data[:half], media_type=images.media_type)
                yield Response(chunk=first)
                await self._hang("chunk")
                last = "last" not in images.leave_out
                yield Response(chunk=image_service_pb2.ImageChunk(image_index=index, data=data[half:], last=last))
            if broken := self.state.failures.get("AfterImages"):
                await context.abort_with_status(broken.failure.to_grpc_status())
            if "finished" not in images.leave_out:
                finished = image_service_pb2.ImageFinished(seed=41, source_skipped_reason=images.source_skipped_reason)
                width, height = images.rendered
                finished.size.CopyFrom(plan_pb2.ImageWorkload(width_px=width, height_px=height))
                finished.render_time.FromMilliseconds(1500)
                yield Response(finished=finished)
        except asyncio.CancelledError:
            images.cancelled.set()
            raise

    async def _hang(self, place: str) -> None:
        if self.state.images.hang_at == place:
            self.state.images.hanging.set()
            await asyncio.Event().wait()


def progress(phase: str, done: int, total: int) -> Response:
    return Response(progress=image_service_pb2.ImageProgress(phase=phase, done=done, total=total))
