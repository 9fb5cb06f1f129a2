"""One started sd-server, as the host talks to it: what it prints tells how far it is, HTTP makes it render."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator

import grpc
import httpx2
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb
from weighbridge_proto.engines.v1 import engine_service_pb2 as engine_pb
from weighbridge_proto.errors import RequestError
from weighbridge_proto.fit.v1 import fit_service_pb2 as fit_pb

from weighbridge_engines.sd_server.client import OtherServerError, RenderRefusedError, SdServerClient
from weighbridge_engines.sd_server.ends import explain_render
from weighbridge_engines.sd_server.events import FailureKind, LoadProgress
from weighbridge_engines.sd_server.jobs import Rendered, RenderJob, RenderProgress
from weighbridge_engines.sd_server.output import OutputReader
from weighbridge_engines.supervisor.exits import FatalLine

POLL_S = 0.05
"""How often it is asked whether it answers, once it has said that it listens; and how often a load is looked at."""

OUTPUT_LAG_S = 0.25
"""How long lines that it printed before an answer may take to be read after it."""


class OutputFeed:
    """What one process printed, as it comes: kept up by the supervisor, read by the runtime."""

    def __init__(self, classify: Callable[[str, bool], FatalLine | None]) -> None:
        self.reader = OutputReader()
        self.load: LoadProgress | None = None
        self._classify = classify
        self._progress: asyncio.Queue[RenderProgress] | None = None

    def take(self, line: str, from_stderr: bool) -> FatalLine | None:
        """One line; the answer says whether the process cannot go on after it."""
        for event in self.reader.read(line, from_stderr=from_stderr):
            if isinstance(event, LoadProgress):
                self.load = event
            elif isinstance(event, RenderProgress) and self._progress is not None:
                self._progress.put_nowait(event)
        return self._classify(line, from_stderr)

    @contextlib.contextmanager
    def render(self, job: RenderJob) -> Iterator[asyncio.Queue[RenderProgress]]:
        """The progress of the render that begins now."""
        is_given_images = job.source_png is not None or bool(job.reference_pngs)
        self.reader.expect_render(steps=job.steps, has_source=is_given_images)
        self._progress = asyncio.Queue()
        try:
            yield self._progress
        finally:
            self._progress = None


class SdRuntime:
    """See :class:`weighbridge_engines.sd_server.jobs.ImageRuntime`.

    Args:
        client: the connection.
        feed: what the process prints.
    """

    def __init__(self, client: SdServerClient, feed: OutputFeed) -> None:
        self._client = client
        self._feed = feed
        self._samplers: frozenset[str] | None = None
        self._schedulers: frozenset[str] | None = None

    async def is_ready(self) -> bool:
        """At once: it loads by itself from its start on, and :meth:`load` looks on."""
        return True

    async def is_alive(self) -> bool:
        """Whether it still answers; its GETs do while it renders."""
        return await self._client.is_ours()

    async def load(self, plan: fit_pb.PlanModelResponse) -> AsyncGenerator[engine_pb.LoadStarting, None]:
        """Look on while it loads, until it is ours that answers."""
        told: float | None = None
        while not self._feed.reader.is_listening:
            loaded = self._feed.load
            fraction = 0.0 if loaded is None or not loaded.total else min(1.0, loaded.done / loaded.total)
            if fraction != told:
                told = fraction
                yield engine_pb.LoadStarting(phase="weights", fraction=fraction)
            await asyncio.sleep(POLL_S)
        yield engine_pb.LoadStarting(phase="listening", fraction=1.0)
        while True:
            # Another server may answer while ours finds its port taken and ends; the host sees that end.
            with contextlib.suppress(httpx2.HTTPError, OtherServerError):
                await self._client.is_ours()
                capabilities = await self._client.capabilities()
                self._samplers = _names(capabilities.get("samplers"))
                self._schedulers = _names(capabilities.get("schedulers"))
                return
            await asyncio.sleep(POLL_S)

    def check(self, job: RenderJob) -> None:
        """Refuse what sd-server would silently replace by its default.

        Raises:
            RequestError: INVALID_ARGUMENT UNKNOWN_SAMPLER or UNKNOWN_SCHEDULER.
        """
        for field, asked, known in (
            ("sampler", job.sampler, self._samplers),
            ("scheduler", job.scheduler, self._schedulers),
        ):
            if asked and known is not None and asked not in known:
                text = f"sd-server knows no {field} of that name. It knows: {', '.join(sorted(known))}."
                raise RequestError(
                    grpc.StatusCode.INVALID_ARGUMENT, f"UNKNOWN_{field.upper()}", text, field_violations=[(field, text)]
                )

    async def render(self, job: RenderJob) -> AsyncGenerator[RenderProgress | Rendered, None]:
        """One render. Closing the iterator stops nothing: sd-server renders to the end."""
        self.check(job)
        began = time.monotonic()
        with self._feed.render(job) as progress:
            answer = asyncio.ensure_future(self._client.render(job))
            try:
                while not answer.done():
                    heard = asyncio.ensure_future(progress.get())
                    try:
                        await asyncio.wait({answer, heard}, return_when=asyncio.FIRST_COMPLETED)
                        if heard.done():
                            yield heard.result()
                    finally:
                        heard.cancel()
                while not progress.empty():
                    yield progress.get_nowait()
                images = answer.result()
            except RenderRefusedError as error:
                raise await self._refusal(error) from error
            finally:
                answer.cancel()
        yield Rendered(images, job.width, job.height, time.monotonic() - began)

    def chat(self, request: chat_pb.ChatRequest) -> AsyncGenerator[chat_pb.ChatResponse, None]:
        """It does not chat; the host refuses before it comes to this."""
        raise NotImplementedError("sd-server does not chat")

    async def settle(self) -> None:
        """At once: it has no chats to give up."""

    async def aclose(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _refusal(self, error: RenderRefusedError) -> RequestError:
        if error.status == httpx2.codes.BAD_REQUEST:
            return RequestError(
                grpc.StatusCode.INVALID_ARGUMENT, "RENDER_REFUSED", f"sd-server refuses this render: {error.message}."
            )
        # It printed why before it answered, but its lines come another way than its answer.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OUTPUT_LAG_S):
                while not any(each.kind is FailureKind.RENDER_FAILED for each in self._feed.reader.render_failures):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S / 10)
        trouble = explain_render(self._feed.reader.render_failures)
        no_memory = trouble.kind is FailureKind.OUT_OF_MEMORY
        return RequestError(
            grpc.StatusCode.RESOURCE_EXHAUSTED if no_memory else grpc.StatusCode.INTERNAL,
            "RENDER_OUT_OF_MEMORY" if no_memory else "RENDER_FAILED",
            trouble.message,
            metadata=dict(trouble.metadata),
        )


def _names(listed: object) -> frozenset[str] | None:
    return frozenset(map(str, listed)) if isinstance(listed, list) else None
