"""One request for a part of a file, redirects followed by our own rules.

urllib3 does the speaking: it has no dependencies of its own, streams without buffering, and leaves redirects and
retries to the caller, which a token that must stay at home needs.
"""

import importlib
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from weighbridge.pull.addresses import Route, is_private, redirected
from weighbridge.pull.errors import PullError, PullReason
from weighbridge.pull.wanted import CHUNK_BYTES
from weighbridge.pull.watchdog import Watchdog
from weighbridge.version import __version__

MAX_REDIRECTS = 5
CONNECT_TIMEOUT_S = 15.0
TOO_SLOW = "the host was too slow"
REDIRECTS = frozenset({301, 302, 303, 307, 308})

_TAG = re.compile(r'(W/)?"[\x21\x23-\x7e]{0,256}"')


class InterruptedTransferError(Exception):
    """The network failed; trying again may help. The text says how."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a host answered: `total_bytes` is the whole file's size as it says (None: it does not), `start` the offset
    that the body begins at, `encoding` what it did to the body ("": nothing)."""

    status: int
    start: int
    total_bytes: int | None
    etag: str
    retry_after_s: float | None
    body: Iterator[bytes]
    encoding: str = ""


class Http:
    """Requests along one route, one at a time.

    `stall_s` is how long a host may say nothing, `step_s` how long it may take over the head of a response or the next
    piece of a body, however busy it seems (None: time to connect and twice `stall_s`).
    """

    def __init__(self, route: Route, stall_s: float, step_s: float | None = None) -> None:
        # Imported here: the rest of the command works without the extra.
        try:
            import urllib3
        except ImportError as error:
            message = "Downloads need urllib3. Install it: pip install 'weighbridge[pull]'."
            raise PullError(PullReason.NOT_INSTALLED, message) from error
        self._urllib3: Any = urllib3
        self._route = route
        self._watchdog = Watchdog(CONNECT_TIMEOUT_S + 2 * stall_s if step_s is None else step_s)
        self._settings = {
            "retries": False,
            "timeout": urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=stall_s),
            "num_pools": 4,
            **_authorities(),
        }
        self._pools: dict[str, Any] = {}
        self._only_open_net = False
        self._reached_private = False

    def close(self) -> None:
        """Closes every connection."""
        self._watchdog.close()
        for pool in self._pools.values():
            pool.clear()

    def cut(self) -> None:
        """Ends the request at hand, from another thread, and all that come: they fail as if the network had broken."""
        self._watchdog.cut()

    @contextmanager
    def get(self, url: str, offset: int, etag: str) -> Iterator[Answer]:
        """The file from `offset` on; `etag` makes a changed file come whole.

        Raises InterruptedTransferError, also while the body is read; PullError for redirects that are refused and for
        hosts that cannot show who they are.
        """
        response = self._final(self._route.address(url), offset, etag)
        try:
            yield _answer(response, offset, self._body(response))
        finally:
            # Not given back to the pool: what is left of a body that nobody reads would come first.
            response.close()

    def _final(self, address: str, offset: int, etag: str) -> Any:
        """The response at the end of all redirects."""
        self._only_open_net = self._reached_private = False
        for _ in range(MAX_REDIRECTS + 1):
            response = self._asked(address, self._headers(address, offset, etag))
            location = response.headers.get("Location")
            if response.status not in REDIRECTS or not location:
                return response
            response.close()
            address = redirected(address, location)
            # Names are checked where they lead, once that is known: they can name anything.
            self._only_open_net = not self._reached_private
        message = f"The host redirects more than {MAX_REDIRECTS} times: refused."
        raise PullError(PullReason.REDIRECT_REFUSED, message)

    def _asked(self, address: str, headers: dict[str, str]) -> Any:
        try:
            with self._watchdog.step():
                response = self._pool_for(address).request(
                    "GET", address, headers=headers, preload_content=False, redirect=False, decode_content=False
                )
        except self._urllib3.exceptions.HTTPError as error:
            raise self._interrupted(error) from error
        if self._watchdog.barked:
            # A head that was cut off in its middle passes for a whole one.
            response.close()
            raise InterruptedTransferError(TOO_SLOW)
        return response

    def _headers(self, address: str, offset: int, etag: str) -> dict[str, str]:
        headers = {
            "User-Agent": f"weighbridge/{__version__}",
            "Accept-Encoding": "identity",
            **self._route.headers(address),
        }
        if offset:
            headers["Range"] = f"bytes={offset}-"
            # What a host or a file on disk said once is sent only if it is what such a tag is.
            if _TAG.fullmatch(etag):
                headers["If-Range"] = etag
        return headers

    def _body(self, response: Any) -> Iterator[bytes]:
        try:
            while True:
                with self._watchdog.step():
                    # read1: what is there, at once; read would wait for a whole chunk of a slow host and lose it at a
                    # break.
                    piece = response.read1(CHUNK_BYTES)
                if not piece:
                    return
                yield piece
        except (self._urllib3.exceptions.HTTPError, OSError) as error:
            raise self._interrupted(error) from error

    def _interrupted(self, error: Exception) -> InterruptedTransferError:
        """The same as ours. Raises PullError NOT_TRUSTED for what another try does not change."""
        refused = next((cause for cause in _causes(error) if isinstance(cause, ssl.SSLCertVerificationError)), None)
        if refused is not None:
            why = getattr(refused, "verify_message", "")
            message = (
                f"The host's certificate is not accepted ({why or 'no reason given'}). Nothing was asked of it. "
                "A network that looks into encrypted connections has an authority of its own: SSL_CERT_FILE names its "
                "file."
            )
            raise PullError(PullReason.NOT_TRUSTED, message) from error
        if self._watchdog.barked:
            return InterruptedTransferError(TOO_SLOW)
        return InterruptedTransferError(_why(error))

    def _pool_for(self, address: str) -> Any:
        """Where requests to `address` go: straight there, or through the proxy that the system names for it."""
        parts = urlsplit(address)
        proxy = ""
        # A private address is this network's own: what goes there, a token perhaps, is nobody else's to carry.
        if not is_private(address) and not proxy_bypass(parts.hostname or ""):
            proxy = getproxies().get(parts.scheme, "")
        if proxy not in self._pools:
            self._pools[proxy] = self._new_pool(proxy)
        return self._pools[proxy]

    def _new_pool(self, proxy: str) -> Any:
        urllib3 = self._urllib3
        if proxy:
            try:
                auth = urllib3.util.parse_url(proxy).auth
                headers = urllib3.make_headers(proxy_basic_auth=auth) if auth else None
                made = urllib3.ProxyManager(proxy, proxy_headers=headers, **self._settings)
            except (urllib3.exceptions.HTTPError, ValueError) as error:
                message = "The proxy that HTTPS_PROXY or HTTP_PROXY names cannot be used."
                raise PullError(PullReason.UNREACHABLE, message) from error
        else:
            made = urllib3.PoolManager(**self._settings)
        made.pool_classes_by_scheme = {
            "http": self._watched(urllib3.HTTPConnectionPool, told=bool(proxy)),
            "https": self._watched(urllib3.HTTPSConnectionPool, told=bool(proxy)),
        }
        return made

    def _watched(self, pool: Any, *, told: bool) -> Any:
        """The pool, with connections that the watchdog knows. `told`: a proxy looks names up, not this machine."""
        http = self

        class Connection(pool.ConnectionCls):  # type: ignore[misc] # a class that is known at run time alone
            def _new_conn(self) -> Any:
                connection = super()._new_conn()
                http._watchdog.watch(connection)
                if not told:
                    http._met(connection)
                return connection

        return type(pool.__name__, (pool,), {"ConnectionCls": Connection})

    def _met(self, connection: Any) -> None:
        """Whom a name led to. Raises PullError REDIRECT_REFUSED for a private host at the end of a public one's
        redirect."""
        host = str(connection.getpeername()[0])
        self._reached_private = is_private(f"http://[{host}]/" if ":" in host else f"http://{host}/")
        if self._reached_private and self._only_open_net:
            connection.close()
            message = "The host redirects into a private network: refused."
            raise PullError(PullReason.REDIRECT_REFUSED, message)


def _authorities() -> dict[str, Any]:
    """Whom to believe about hosts: whom the system believes; where Python was built without that, certifi's list."""
    paths = ssl.get_default_verify_paths()
    if paths.cafile or paths.capath:
        return {}
    try:
        return {"ca_certs": importlib.import_module("certifi").where()}
    except ImportError:
        return {}


def _causes(error: BaseException) -> list[BaseException]:
    """An error and what it was made of: urllib3 hands some on as arguments, some as causes."""
    found: list[BaseException] = []
    waiting: list[Any] = [error]
    while waiting and len(found) < 32:
        one = waiting.pop()
        if isinstance(one, BaseException) and one not in found:
            found.append(one)
            waiting += [*one.args, one.__cause__, one.__context__, getattr(one, "reason", None)]
    return found


def _answer(response: Any, offset: int, body: Iterator[bytes]) -> Answer:
    status, headers = int(response.status), response.headers
    start, total = 0, _count(headers.get("Content-Length"))
    if status == 416:
        total = _count(headers.get("Content-Range", "").rpartition("/")[2])
    if status == 206:
        unit, _, span = headers.get("Content-Range", "").partition(" ")
        extent, _, whole = span.partition("/")
        first = _count(extent.partition("-")[0])
        start = first if unit == "bytes" and first is not None else -1
        total = _count(whole)
    etag, encoding = headers.get("ETag", ""), headers.get("Content-Encoding", "").strip().lower()
    return Answer(
        status,
        start,
        total,
        etag if _TAG.fullmatch(etag) else "",
        _seconds(headers.get("Retry-After")),
        body,
        "" if encoding == "identity" else encoding[:40],
    )


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
    if "SSL" in name:
        return "the encrypted connection broke"
    return "the connection broke"
