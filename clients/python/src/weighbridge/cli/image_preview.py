"""A picture within the terminal, where that shows pictures.

Two protocols take the file as it is, so nothing is decoded here: kitty's (kitty, Ghostty, Konsole) and iTerm2's
(iTerm2, WezTerm, mintty). Sixel would need a decoder and a palette, and no library for it is kept up.
"""

import base64
from collections.abc import Iterator, Mapping
from enum import Enum

MAX_BYTES = 8 * 2**20
"""Of a file that is shown: over a slow line more would hold up the terminal."""

MAX_COLUMNS, MAX_ROWS = 40, 20
"""Of the terminal's cells. A cell is about twice as high as it is wide."""

KITTY_CHUNK = 4096
"""Characters of base64 that kitty's protocol takes in one go."""

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_MULTIPLEXERS = ("TMUX", "STY", "ZELLIJ")
"""Variables of programs between us and the terminal, which do not pass pictures on."""


class Protocol(Enum):
    """How a terminal is told to show a picture."""

    KITTY = "kitty"
    ITERM2 = "iterm2"


def protocol(environ: Mapping[str, str]) -> Protocol | None:
    """What the terminal of ``environ`` says that it is; None: none that is known to show pictures."""
    term, program = environ.get("TERM", ""), environ.get("TERM_PROGRAM", "")
    if any(environ.get(name) for name in _MULTIPLEXERS) or term.startswith(("screen", "tmux")) or term == "dumb":
        return None
    if term in ("xterm-kitty", "xterm-ghostty") or program == "ghostty":
        return Protocol.KITTY
    if program in ("iTerm.app", "WezTerm", "mintty") or environ.get("LC_TERMINAL") == "iTerm2":
        return Protocol.ITERM2
    # Variables that programs started from such a terminal keep, whatever they show themselves in: looked at last.
    return Protocol.KITTY if environ.get("KITTY_WINDOW_ID") or environ.get("KONSOLE_VERSION") else None


def preview(data: bytes, how: Protocol, width: int, height: int, columns: int) -> str:
    """What shows the picture ``data`` when it is printed; empty: it cannot be shown so.

    Args:
        data: a PNG, JPEG or WebP file.
        how: the terminal's protocol.
        width: of the picture in pixels.
        height: of the picture in pixels.
        columns: of the terminal.
    """
    if len(data) > MAX_BYTES or columns < 1 or width < 1 or height < 1:
        return ""
    most_columns = min(MAX_COLUMNS, columns)
    if how is Protocol.ITERM2:
        options = f"inline=1;size={len(data)};width={most_columns};height={MAX_ROWS};preserveAspectRatio=1"
        return f"\x1b]1337;File={options}:{base64.b64encode(data).decode()}\x07\n"
    if not data.startswith(_PNG_SIGNATURE):
        return ""  # kitty decodes PNG alone
    # One side is given, the terminal works out the other one and so keeps the shape.
    rows = most_columns * height / width / 2
    box = f"r={MAX_ROWS}" if rows > MAX_ROWS else f"c={most_columns}"
    return "".join(_kitty(base64.b64encode(data).decode(), box)) + "\n"


def _kitty(text: str, box: str) -> Iterator[str]:
    for start in range(0, len(text), KITTY_CHUNK):
        more = int(start + KITTY_CHUNK < len(text))
        # a=T: take it and show it; f=100: PNG; q=2: answer nothing, or the answer would be typed into the shell.
        control = f"a=T,f=100,q=2,{box},m={more}" if start == 0 else f"m={more}"
        yield f"\x1b_G{control};{text[start : start + KITTY_CHUNK]}\x1b\\"
