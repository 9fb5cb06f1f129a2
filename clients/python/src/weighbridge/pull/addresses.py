"""Where a download may go, and where the token may. Pure."""

import ipaddress
import socket
from dataclasses import dataclass, field
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from weighbridge.pull.errors import PullError, PullReason

HUB = "https://huggingface.co"
"""The hub that catalogue entries' repositories and most addresses belong to."""

MAX_ADDRESS = 8192
"""Characters. Storage signs its addresses with a kilobyte or two."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Route:
    """How addresses are reached: a mirror in place of the hub, and a token for that one host.

    `hub` is the base that takes the place of the hub, with or without a path; `token` "" for none.
    """

    hub: str = HUB
    token: str = field(default="", repr=False)

    def address(self, url: str) -> str:
        """The address that is asked for `url`: the mirror's where the hub was meant.

        Raises PullError BAD_ENTRY for what is no web address.
        """
        parts = urlsplit(check(url))
        if origin(url) != origin(HUB):
            return url
        base = urlsplit(self.hub)
        return urlunsplit((base.scheme, base.netloc, base.path.rstrip("/") + parts.path, parts.query, ""))

    def headers(self, url: str) -> dict[str, str]:
        """What a request to `url` carries: the token, on the hub's own host alone, and not in the clear."""
        if not self.token or origin(url) != origin(self.hub):
            return {}
        if urlsplit(url).scheme != "https" and not is_private(url):
            return {}
        return {"Authorization": f"Bearer {self.token}"}


def check(url: str) -> str:
    """The address itself. Raises PullError BAD_ENTRY unless it is an http or https address without credentials, spelt
    as requests spell them: no blanks or control characters, the host in ASCII, no steps up or in place."""
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError:
        port_is_number = False
    # The parser leaves line ends out in silence, and a host in other scripts is another one to each library.
    if (
        not port_is_number
        or parts.scheme not in _DEFAULT_PORTS
        or not parts.hostname
        or "@" in parts.netloc
        or "\\" in url
        or not parts.netloc.isascii()
        or not url.isprintable()
        or any(character.isspace() for character in url)
        or {".", ".."} & {unquote(step) for step in parts.path.split("/")}
        or len(url) > MAX_ADDRESS
    ):
        raise PullError(PullReason.BAD_ENTRY, f"{shown(url)} is no address that models are downloaded from.")
    return url


def shown(url: str) -> str:
    """An address for people: without its query, which may be a key to the file."""
    return repr(url.partition("?")[0].partition("#")[0][:200])


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what has to be the same for a token to be sent."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip(".").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def redirected(url: str, location: str) -> str:
    """Where a redirect leads. Raises PullError REDIRECT_REFUSED: out of https, or from the open net into a private
    one."""
    target = location
    try:
        target = urljoin(url, location)
        check(target)
    except (PullError, ValueError) as error:
        raise PullError(PullReason.REDIRECT_REFUSED, f"The host redirects to {shown(target)}: refused.") from error
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
        message = f"The host redirects from an encrypted address to {shown(target)}: refused."
        raise PullError(PullReason.REDIRECT_REFUSED, message)
    if is_private(target) and not is_private(url):
        message = f"The host redirects into a private network ({shown(target)}): refused."
        raise PullError(PullReason.REDIRECT_REFUSED, message)
    return target


def is_private(url: str) -> bool:
    """Whether an address names this machine or a private network by number or as localhost."""
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            # As the system reads numbers: 127.1, 2130706433 and 0x7f000001 are this machine too.
            address = ipaddress.ip_address(socket.inet_aton(host))
        except (OSError, ValueError):
            return False
    inner = getattr(address, "ipv4_mapped", None) or getattr(address, "sixtofour", None)
    return not address.is_global or (inner is not None and not inner.is_global)
