"""Where a download may go, and where the token may. Pure."""

import ipaddress
from dataclasses import dataclass, field
from urllib.parse import urljoin, urlsplit, urlunsplit

from weighbridge.pull.errors import PullError, PullReason

HUB = "https://huggingface.co"
"""The hub that catalogue entries' repositories and most addresses belong to."""

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
    """The address itself. Raises PullError BAD_ENTRY unless it is an http or https address without credentials."""
    try:
        parts = urlsplit(url)
        port_is_number = parts.port is None or parts.port > 0
    except ValueError:
        port_is_number = False
    if not port_is_number or parts.scheme not in _DEFAULT_PORTS or not parts.hostname or "@" in parts.netloc:
        raise PullError(PullReason.BAD_ENTRY, f"{url[:200]!r} is no address that models are downloaded from.")
    return url


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what has to be the same for a token to be sent."""
    parts = urlsplit(url)
    return parts.scheme, (parts.hostname or "").rstrip(".").lower(), parts.port or _DEFAULT_PORTS.get(parts.scheme, 0)


def redirected(url: str, location: str) -> str:
    """Where a redirect leads. Raises PullError REDIRECT_REFUSED: out of https, or from the open net into a private
    one."""
    target = urljoin(url, location)
    try:
        check(target)
    except PullError as error:
        raise PullError(PullReason.REDIRECT_REFUSED, f"The host redirects to {target[:200]!r}: refused.") from error
    if urlsplit(url).scheme == "https" and urlsplit(target).scheme != "https":
        message = f"The host redirects from an encrypted address to {target[:200]!r}: refused."
        raise PullError(PullReason.REDIRECT_REFUSED, message)
    if is_private(target) and not is_private(url):
        message = f"The host redirects into a private network ({target[:200]!r}): refused."
        raise PullError(PullReason.REDIRECT_REFUSED, message)
    return target


def is_private(url: str) -> bool:
    """Whether an address names this machine or a private network by number or as localhost."""
    host = (urlsplit(url).hostname or "").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not address.is_global
