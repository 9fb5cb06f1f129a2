"""Pages of lists that are ordered by id. A token says after which id the next page begins, and of which list."""

import base64
import binascii
import hashlib
from collections.abc import Sequence

from weighbridge_proto.errors import invalid_argument

PAGE_SIZE, MAX_PAGE_SIZE = 100, 1000
MAX_TOKEN = 1000


def list_name(what: str, use: int, ids: Sequence[str] = ()) -> str:
    """The name of a list with its filters, as tokens carry it: of many ids only a digest."""
    chosen = hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16] if ids else "all"
    return f"{what} {use} {chosen}"


def page_of(ids: Sequence[str], of: str, size: int, token: str) -> tuple[Sequence[str], str]:
    """The ids of one page out of ordered ones, and the token of the next page ("" after the last).

    `of` names the list with its filters: a token of another list is refused. Zero `size` is 100, more than 1000 is
    1000. Raises RequestError INVALID_PAGE_SIZE, INVALID_PAGE_TOKEN.
    """
    if size < 0:
        raise invalid_argument("page_size", "must not be negative; leave it out for the default", "INVALID_PAGE_SIZE")
    size = min(size or PAGE_SIZE, MAX_PAGE_SIZE)
    after = _after(token, of)
    rest = [item for item in ids if item > after] if after else list(ids)
    page = rest[:size]
    return page, _token(of, page[-1]) if len(rest) > size else ""


def _token(of: str, after: str) -> str:
    return base64.urlsafe_b64encode(f"{of}\n{after}".encode()).decode()


def _after(token: str, of: str) -> str:
    if not token:
        return ""
    try:
        if len(token) > MAX_TOKEN:
            raise ValueError(token)
        listed, _, after = base64.b64decode(token.encode(), altchars=b"-_", validate=True).decode().partition("\n")
    except (binascii.Error, ValueError) as error:
        raise _foreign() from error
    if listed != of or not after:
        raise _foreign()
    return after


def _foreign() -> Exception:
    return invalid_argument("page_token", "is none that this service gave out for the same list", "INVALID_PAGE_TOKEN")
