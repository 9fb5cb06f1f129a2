"""What a ds4-server was started with, read as it reads it: what it does not take ends it with code 2."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from services.engines.standins.ds4 import log
from services.engines.standins.ds4.behaviour import Behaviour
from services.engines.standins.ds4.flags import JULY, Flag, help_text, known

BACKENDS = ("metal", "cuda", "cpu")
MOST = 2**31 - 1
_INTEGER = re.compile(r"\s*[+-]?\d+", re.ASCII)
_CACHE = re.compile(r"([1-9]\d*)(GB)?", re.ASCII)


@dataclass(frozen=True)
class CommandLine:
    """Flags by their long name without dashes, "" for one without a value; and what they come to."""

    given: dict[str, str]
    backend: str
    cache_slots: int
    cache_gib: int

    def has(self, flag: str) -> bool:
        return flag in self.given

    def text(self, flag: str, default: str = "") -> str:
        return self.given.get(flag, default)

    def number(self, flag: str, default: int) -> int:
        return int(self.given.get(flag, default))

    @property
    def model(self) -> str:
        return self.text("model", "ds4flash.gguf")

    @property
    def context(self) -> int:
        return self.number("ctx", 32768)

    @property
    def host(self) -> str:
        return self.text("host", "127.0.0.1")

    @property
    def port(self) -> int:
        return self.number("port", 8000)

    @property
    def draft_file(self) -> str:
        """The support file, whichever flag names it."""
        return self.text("mtp-model") or self.text("mtp")

    @property
    def dspark(self) -> bool:
        return any(self.has(flag) for flag in ("dspark", "dspark-confidence", "dspark-strict"))

    @property
    def streams(self) -> bool:
        return self.has("ssd-streaming")

    @property
    def sessions(self) -> int:
        return self.number("batched-session", 1)


def parse(arguments: Sequence[str], behaviour: Behaviour) -> CommandLine:
    """Ends the process as ds4-server does: with 0 after --help, with 2 for what it does not take."""
    flags = known(behaviour.build)
    given: dict[str, str] = {}
    backend = "cpu" if behaviour.compute == "cpu" else behaviour.compute or _default_backend()
    words = iter(arguments)
    for word in words:
        if word in ("-h", "--help"):
            sys.stdout.write(help_text(behaviour.build))
            sys.exit(0)
        flag = flags.get(word)
        if flag is None:
            log.server(f"unknown option: {word}")
            log.raw(help_text(behaviour.build))
            sys.exit(2)
        value = next(words, None) if flag.kind != "switch" else ""
        if value is None:
            _refuse(f"missing value for {word}")
        _check(flag, word, value)
        given[flag.name] = value
        if word == "--backend" or flag.name in BACKENDS:
            backend = value or flag.name
    slots, gib = 0, 0
    if found := _CACHE.fullmatch(given.get("ssd-streaming-cache-experts", "")):
        slots, gib = (0, int(found[1])) if found[2] else (int(found[1]), 0)
    line = CommandLine(given, backend, slots, gib)
    _check_together(line, behaviour)
    return line


def _default_backend() -> str:
    return "metal" if sys.platform == "darwin" else "cuda"


def _check(flag: Flag, word: str, value: str) -> None:
    match flag.kind:
        case "positive" | "natural":
            number = int(value) if _INTEGER.fullmatch(value) else -1
            if not (flag.kind == "positive") <= number <= (flag.most or MOST):
                _refuse(f"invalid value for {word}: {value}")
        case "number":
            try:
                fits = flag.least <= float(value) <= flag.most
            except ValueError:
                fits = False
            if not fits:
                _refuse(f"invalid value for {word}: {value}")
        case "backend" if value not in BACKENDS:
            log.server(f"invalid {word} value: {value}")
            _refuse("valid server backends are: metal, cuda, cpu")
        case "cache" if not _CACHE.fullmatch(value):
            log.engine(f"{word} must be a positive count or <number>GB")
            sys.exit(2)


def _check_together(line: CommandLine, behaviour: Behaviour) -> None:
    shortest = line.number("kv-cache-min-tokens", 512)
    if 0 < line.number("kv-cache-cold-max-tokens", 30000) < shortest:
        _refuse("--kv-cache-cold-max-tokens must be 0 or >= --kv-cache-min-tokens")
    if line.dspark and not line.draft_file:
        spelling = "--mtp" if behaviour.build == JULY else "--mtp-model"
        log.engine(f"--dspark requires {spelling} FILE")
        sys.exit(2)


def _refuse(text: str) -> NoReturn:
    log.server(text)
    sys.exit(2)
