"""One request for a part of a file, redirects followed by our own rules.

urllib3 does the speaking: it has no dependencies of its own, streams without buffering, and leaves redirects and
retries to the caller, which a token that must stay at home needs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weighbridge.pull.addresses import Route, redirected
from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.wanted import CHUNK_BYTES
from weighbridge.version import __version__

MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 15.0
REDIRECTS = frozenset({301, 302, 303, 307, 308})


class InterruptedTransferError(Exception):
    """The network failed; trying again may help. The text says how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answered: `total_bytes` is the whole file's size as it says (None: it does not), `start` the offset
    that the body begins at."""

    status: int
    start: int
    total_bytes: int | None
    etag: str
    retry_after_s: float | None
    body: Iterator[bytes]


class Http:
    """Requests along one route. `stall_s` is how long a host may say nothing."""

    def __init__(self, route: Route, stall_s: float) -> None:
        # Imported here: the rest of the command works without the extra.
        try:
            import urllib3
        except ImportError as error:
            message = "Downloads need urllib3. Install it: pip install 'weighbridge[pull]'."
            raise PullError(PullReason.NOT_INSTALLED, message) from error
        self._urllib3: Any = urllib3
        self._route = route
        self._pool = urllib3.PoolManager(
            retries=False, timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=stall_s), num_pools=4
        )

    def close(self) -> None:
        """Closes every connection."""
        self._pool.clear()

    @contextmanager
    def get(self, url: str, offset: int, etag: str) -> Iterator[Answer]:
        """The file from `offset` on; `etag` makes a changed file come whole.

        Raises InterruptedTransferError, also while the body is read; PullError for redirects that are refused.
        """
        address = self._route.address(url)
        try:
            for _ in range(MAX_REDIRECTS + 1):
                response = self._pool.request(
                    "GET",
                    address,
                    headers=self._headers(address, offset, etag),
                    preload_content=False,
                    redirect=False,
                    decode_content=False,
                )
                if response.status not in REDIRECTS or not response.headers.get("Location"):
                    break
                response.close()
                address = redirected(address, response.headers["Location"])
            else:
                message = f"The host redirects more than {MAX_REDIRECTS} times: refused."
                raise PullError(PullReason.REDIRECT_REFUSED, message)
        except self._urllib3.exceptions.HTTPError as error:
            raise InterruptedTransferError(_why(error)) from error
        try:
            yield _answer(response, offset, self._body(response))
        finally:
            # Not given back to the pool: what is left of a body that nobody reads would come first.
            response.close()

    def _headers(self, address: str, offset: int, etag: str) -> dict[str, str]:
        headers = {
            "User-Agent": f"weighbridge/{__version__}",
            "Accept-Encoding": "identity",
            **self._route.headers(address),
        }
        if offset:
            headers["Range"] = f"bytes={offset}-"
            if etag:
                headers["If-Range"] = etag
        return headers

    def _body(self, response: Any) -> Iterator[bytes]:
        try:
            # read1: what is there, at once; read would wait for a whole chunk of a slow host and lose it at a break.
            while piece := response.read1(CHUNK_BYTES):
                yield piece
        except (self._urllib3.exceptions.HTTPError, OSError) as error:
            raise InterruptedTransferError(_why(error)) from error


def _answer(response: Any, offset: int, body: Iterator[bytes]) -> Answer:
    status, headers = int(response.status), response.headers
    start, total = 0, _count(headers.get("Content-Length"))
    if status == 206:
        unit, _, span = headers.get("Content-Range", "").partition(" ")
        extent, _, whole = span.partition("/")
        first = _count(extent.partition("-")[0])
        start = first if unit == "bytes" and first is not None else -1
        total = _count(whole)
    return Answer(status, start, total, headers.get("ETag", ""), _seconds(headers.get("Retry-After")), body)


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 20 else None


def _seconds(text: str | None) -> float | None:
    count = _count(text)
    return None if count is None else float(count)


def _why(error: Exception) -> str:
    name = type(error).__name__
    if "Timeout" in name:
        return "the host said nothing for too long"
    if "NameResolution" in name or "NewConnection" in name:
        return "the host cannot be reached"
    if "SSL" in name or "certificate" in str(error).lower():
        return "the host's certificate is not accepted"
    return "the connection broke"
