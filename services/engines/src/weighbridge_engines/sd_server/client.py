"""HTTP to one sd-server, and to no other.

sd-server says that it listens before it has bound its port, ends with 0 where the port is taken, and shares a port with
another sd-server without a word (SO_REUSEPORT): 40 requests to two of them were split 26 to 14 (2026-11-30). So an
answer alone proves nothing. Ours is known by a file in the folder of adapters that was made for it alone, with a random
name: its list of adapters has it. Renders go over a connection of their own that was asked for that name just
before, so that no other server can come between; one that leads to another server is left for a new one.
"""

import asyncio
import base64
import binascii
from functools import partial
from typing import Any

import httpx2
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from weighbridge_engines.host.kind import EngineLostError
from weighbridge_engines.sd_server.jobs import RenderJob

PROBE_TIMEOUT_S = 5.0
"""Its GETs are answered in milliseconds, also while it renders."""

CONNECTIONS_TRIED = 10
"""While they lead to another server. The kernel deals new ones out among those that share a port: between two, one
question in 1024 does not come to ours."""

LAST_ON_ITS_CONNECTION = {"Connection": "close"}
"""sd-server writes the head and the body of an answer in two, and Nagle's algorithm holds the second back until the
first is acknowledged: 40 ms on a connection that has had an answer before (Linux, 2026-11-30). Closing sends all."""

_tracer = trace.get_tracer("weighbridge.engines.sd_server")


class OtherServerError(Exception):
    """What answers on the port is not the server that was started."""


class RenderRefusedError(Exception):
    """The server answered a render with an error.

    Attributes:
        status: of HTTP.
        message: its own words.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class SdServerClient:
    """See the module.

    Args:
        port: where it listens, on 127.0.0.1.
        token: the name of the file by which it is known, without its ending.
    """

    def __init__(self, port: int, token: str) -> None:
        self._token = token
        self._port = port
        self._probes = _Line(port, httpx2.Timeout(PROBE_TIMEOUT_S), httpx2.Limits())
        self._renders = _Line(
            port,
            httpx2.Timeout(PROBE_TIMEOUT_S, read=None),
            httpx2.Limits(max_connections=1, max_keepalive_connections=1),
        )

    async def is_ours(self) -> bool:
        """Whether our server answers. The next question goes to the one that did.

        Raises:
            OtherServerError: another one does, on every connection that was tried.
            httpx2.HTTPError: none does.
        """
        return await self._is_ours(self._probes)

    async def _is_ours(self, line: "_Line") -> bool:
        for _ in range(CONNECTIONS_TRIED):
            loras = await self._get("/sdapi/v1/loras", line)
            if isinstance(loras, list) and any(
                isinstance(entry, dict) and entry.get("name") == self._token for entry in loras
            ):
                return True
            await line.renew()
        raise OtherServerError(f"another program answers on its port, {self._port}: end that, or load again")

    async def capabilities(self) -> dict[str, Any]:
        """What it says it can: samplers, schedulers, features, limits."""
        found = await self._get("/sdcpp/v1/capabilities", self._probes)
        return found if isinstance(found, dict) else {}

    async def render(self, job: RenderJob) -> tuple[bytes, ...]:
        """The pictures of one request, as PNG files just as it made them. It renders to the end, whatever becomes of
        this call.

        Raises:
            RenderRefusedError: it answered with an error, and lives.
            EngineLostError: it is gone, or not ours.
        """
        starts_from_picture = job.source_png is not None
        path = "/sdapi/v1/img2img" if starts_from_picture else "/sdapi/v1/txt2img"
        attributes: dict[str, str | int] = {
            "http.request.method": "POST",
            "url.path": path,
            "server.address": "127.0.0.1",
            "server.port": self._port,
            "weighbridge.image.width": job.width,
            "weighbridge.image.height": job.height,
            "weighbridge.image.batch": job.batch,
            "weighbridge.image.steps": job.steps,
        }
        with _tracer.start_as_current_span(f"POST {path}", kind=SpanKind.CLIENT, attributes=attributes) as span:
            # Before the other two: between them there must be no time for the connection to be closed.
            body = await asyncio.to_thread(_body, job)
            try:
                await self._is_ours(self._renders)
                response = await self._renders.http.post(path, json=body, headers=LAST_ON_ITS_CONNECTION)
            except (httpx2.HTTPError, OtherServerError) as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                broke = f"the connection broke ({type(error).__name__})"
                raise EngineLostError(str(error) if isinstance(error, OtherServerError) else broke) from error
            span.set_attribute("http.response.status_code", response.status_code)
            if response.status_code != httpx2.codes.OK:
                span.set_status(Status(StatusCode.ERROR))
                raise RenderRefusedError(response.status_code, _message_of(response))
            return await asyncio.to_thread(_pictures, response)

    async def aclose(self) -> None:
        """Close the connection."""
        await self._probes.aclose()
        await self._renders.aclose()

    async def _get(self, path: str, line: "_Line") -> Any:
        """What it answers; None: that is no JSON, which any other server may send."""
        if line.http.is_closed:
            # A model that is unloaded by force takes its connections along: to whoever asks then, it is lost.
            raise httpx2.ConnectError("the connections to it were closed")
        response = await line.http.get(path, timeout=PROBE_TIMEOUT_S)
        response.raise_for_status()
        try:
            return response.json()
        except (ValueError, RecursionError):
            return None


class _Line:
    """A client with its connections, all of which can be exchanged for new ones."""

    def __init__(self, port: int, timeout: httpx2.Timeout, limits: httpx2.Limits) -> None:
        self._make = partial(
            httpx2.AsyncClient,
            base_url=f"http://127.0.0.1:{port}",
            # A proxy of the environment has no business between us and loopback.
            trust_env=False,
            timeout=timeout,
            limits=limits,
        )
        self.http = self._make()
        self._closed = False

    async def renew(self) -> None:
        """Ask over new connections from now on; not once it was closed."""
        await self.http.aclose()
        if not self._closed:
            self.http = self._make()

    async def aclose(self) -> None:
        """Close it for good."""
        self._closed = True
        await self.http.aclose()


def _body(job: RenderJob) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": job.prompt,
        "negative_prompt": job.negative_prompt,
        "width": job.width,
        "height": job.height,
        "batch_size": job.batch,
        "steps": job.steps,
        "seed": job.seed,
    }
    if job.guidance is not None:
        body["cfg_scale"] = job.guidance
    if job.sampler:
        body["sampler_name"] = job.sampler
    if job.scheduler:
        body["scheduler"] = job.scheduler
    if job.source_png is not None:
        body["init_images"] = [_text_of(job.source_png)]
        if job.strength is not None:
            body["denoising_strength"] = job.strength
        if job.mask_png is not None:
            body["mask"] = _text_of(job.mask_png)
    if job.reference_pngs:
        body["extra_images"] = [_text_of(png) for png in job.reference_pngs]
    return body


def _text_of(png: bytes) -> str:
    return base64.b64encode(png).decode()


def _pictures(response: httpx2.Response) -> tuple[bytes, ...]:
    try:
        images = response.json()["images"]
        return tuple(base64.b64decode(image, validate=True) for image in images)
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise RenderRefusedError(response.status_code, "its answer has no images") from error


def _message_of(response: httpx2.Response) -> str:
    try:
        said = response.json()
        return str(said.get("message") or said.get("error") or said)[:300]
    except (ValueError, AttributeError):
        return response.text[:300]
