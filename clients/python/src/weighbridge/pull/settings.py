"""What a pull can be told: variables ``WEIGHBRIDGE_PULL_*``. A token never stands on a command line."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weighbridge.pull.addresses import HUB, Route, check
from weighbridge.pull.errors import PullError

DEFAULT_STALL_S = 30.0

DEFAULTS: Mapping[str, str] = {
    "WEIGHBRIDGE_PULL_TOKEN": "",
    "WEIGHBRIDGE_PULL_TOKEN_FILE": "",
    "WEIGHBRIDGE_PULL_HUB": HUB,
    "WEIGHBRIDGE_PULL_STALL_S": f"{DEFAULT_STALL_S:.0f}",
}
"""Every variable and its default."""


class PullSettingsError(Exception):
    """A variable that cannot be used: its name and why."""


@dataclass(frozen=True, slots=True)
class PullSettings:
    """`stall_s`: how long a host may say nothing, in seconds."""

    route: Route
    stall_s: float


def pull_settings(environ: Mapping[str, str]) -> PullSettings:
    """The settings of this process.

    ``WEIGHBRIDGE_PULL_TOKEN``, or ``WEIGHBRIDGE_PULL_TOKEN_FILE`` for a file that holds it; ``WEIGHBRIDGE_PULL_HUB``
    for a mirror; ``WEIGHBRIDGE_PULL_STALL_S``. Raises PullSettingsError.
    """
    hub = environ.get("WEIGHBRIDGE_PULL_HUB", "").strip() or HUB
    try:
        check(hub)
    except PullError:
        raise PullSettingsError(f"WEIGHBRIDGE_PULL_HUB: {hub[:200]!r} is no http or https address.") from None
    text = environ.get("WEIGHBRIDGE_PULL_STALL_S", "").strip()
    try:
        stall = float(text) if text else DEFAULT_STALL_S
    except ValueError:
        stall = 0.0
    if not 1 <= stall <= 3600:
        raise PullSettingsError("WEIGHBRIDGE_PULL_STALL_S: must be a number of seconds from 1 to 3600.")
    return PullSettings(Route(hub, _token(environ)), stall)


def _token(environ: Mapping[str, str]) -> str:
    token = environ.get("WEIGHBRIDGE_PULL_TOKEN", "").strip()
    name = environ.get("WEIGHBRIDGE_PULL_TOKEN_FILE", "").strip()
    if name and not token:
        try:
            token = Path(name).expanduser().read_text("utf-8").strip()
        except (OSError, ValueError) as error:
            raise PullSettingsError(f"WEIGHBRIDGE_PULL_TOKEN_FILE: {name} cannot be read ({error}).") from None
    if not token.isascii() or any(character.isspace() or not character.isprintable() for character in token):
        raise PullSettingsError("WEIGHBRIDGE_PULL_TOKEN: holds characters that no token has.")
    return token
