"""Rendered pictures out of the pieces in which they come."""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import grpc
from weighbridge_proto.engines.v1 import image_service_pb2
from weighbridge_proto.errors import RpcFailure

from weighbridge.failures import CallError

IMAGE_INCOMPLETE = "IMAGE_INCOMPLETE"
"""Reason of a stream that ended well and did not hold what it should."""


@dataclass(frozen=True)
class Picture:
    """One whole picture.

    Attributes:
        index: which of the batch, from 0.
        media_type: of its file, such as image/png.
        data: the file.
    """

    index: int
    media_type: str
    data: bytes


@dataclass(frozen=True)
class Rendering:
    """What one request made.

    Attributes:
        pictures: in the order of the batch.
        finished: the seed of the first one (the others follow it by one), the size as rendered, why a source image was
            not used, and how long it took.
    """

    pictures: tuple[Picture, ...]
    finished: image_service_pb2.ImageFinished


class PictureAssembler:
    """Puts the chunks of one stream together."""

    def __init__(self) -> None:
        self._index = 0
        self._media_type = ""
        self._pieces: list[bytes] = []

    def take(self, chunk: image_service_pb2.ImageChunk) -> Picture | None:
        """The picture that ``chunk`` completes; None: it goes on.

        Raises:
            CallError: it does not belong to the picture that is under way.
        """
        if chunk.image_index != self._index:
            raise _incomplete(f"A piece of image {chunk.image_index} came within image {self._index}.")
        self._media_type = self._media_type or chunk.media_type
        self._pieces.append(chunk.data)
        if not chunk.last:
            return None
        whole = Picture(self._index, self._media_type, b"".join(self._pieces))
        self._index, self._media_type, self._pieces = self._index + 1, "", []
        return whole

    def check_whole(self) -> None:
        """All that came is whole.

        Raises:
            CallError: the last picture has no end.
        """
        if self._pieces:
            raise _incomplete(f"Image {self._index} has no end.")


async def with_pictures(
    events: AsyncIterator[image_service_pb2.GenerateImageResponse],
) -> AsyncGenerator[image_service_pb2.GenerateImageResponse | Picture, None]:
    """The events of a render, whole pictures in place of their chunks.

    Raises:
        CallError: as the events do, or the stream ended without all that it should have (IMAGE_INCOMPLETE).
    """
    assembler = PictureAssembler()
    finished = False
    async for event in events:
        kind = event.WhichOneof("event")
        if kind == "chunk":
            if (picture := assembler.take(event.chunk)) is not None:
                yield picture
            continue
        if kind == "finished":
            assembler.check_whole()
            finished = True
        yield event
    if not finished:
        raise _incomplete("The engine ended the stream before the render was finished.")


async def collected(events: AsyncIterator[image_service_pb2.GenerateImageResponse]) -> Rendering:
    """What a render made, when all of it has come. Raises as :func:`with_pictures`."""
    pictures: list[Picture] = []
    finished = image_service_pb2.ImageFinished()
    async for event in with_pictures(events):
        if isinstance(event, Picture):
            pictures.append(event)
        elif event.WhichOneof("event") == "finished":
            finished = event.finished
    return Rendering(tuple(pictures), finished)


def _incomplete(message: str) -> CallError:
    return CallError(RpcFailure(grpc.StatusCode.DATA_LOSS, IMAGE_INCOMPLETE, message))
