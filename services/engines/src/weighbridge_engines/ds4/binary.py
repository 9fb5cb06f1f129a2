"""Which ds4-server is here: found, asked what it knows, and told apart from other builds.

ds4 has no releases and no version: people build a commit. Between May and September 2026 flags came, and one changed
its meaning. So a build is known by what its help says and by what its file holds.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weighbridge_engines.supervisor import program
from weighbridge_engines.supervisor.environment import scrub
from weighbridge_engines.supervisor.program import BinaryMissingError, Program

PROGRAM = Program("ds4-server", "ds4 (DwarfStar)", "WEIGHBRIDGE_ENGINES_DS4_SERVER")

CACHE_VERSION = 1
"""Of the files that keep what was probed."""

QUESTIONS = (("--help",), ("--help", "all"))
"""Since 30 May 2026 the plain help is a summary without drafting, and `--help all` lists everything. Builds before
print the same to both, and newer ones that know no such topic print the summary again."""

COMPUTE_MARKS = (
    ("metal", b"MTLCreateSystemDefaultDevice"),
    ("rocm", b".hip_fatbin"),
    ("cuda", b".nv_fatbin"),
)
"""A name that stands in every program that was built for Metal, ROCm or CUDA: of a function of the system, or of the
section that holds the card's code. Without any of them it computes on the processor. Its help is no sign: it lists the
flags of all backends."""

LAYOUT_MAY, LAYOUT_JULY = "2026-05", "2026-07"
"""How a build lays out its memory, as fit names it."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_OPTION = re.compile(r"(?m)^[ \t]{0,4}(?P<names>-\S.*?)(?:[ \t]{2,}.*)?$")
_FLAG = re.compile(r"(?P<flag>--[a-z0-9][a-z0-9-]*)(?: (?P<value>[^\s|-]\S*))?")


@dataclass(frozen=True)
class Ds4Binary:
    """One build of ds4-server.

    Attributes:
        path: the program.
        compute: metal, cuda, rocm or cpu: what it was built for. Every build computes on the processor too.
        flags: every long flag that its help names.
        with_value: those of them that are followed by a value.
        build: SHA-256 (hex) of the program.
    """

    path: Path
    compute: str
    flags: frozenset[str]
    with_value: frozenset[str]
    build: str

    @property
    def layout(self) -> str:
        """Which of the memory layouts that fit knows it has: by the flags that came with the second one."""
        return LAYOUT_JULY if {"--prefill-chunk", "--ssd-streaming"} <= self.flags else LAYOUT_MAY

    @property
    def drafter_flag(self) -> str | None:
        """The flag that names a drafter's file; None: it loads none."""
        if "--mtp-model" in self.flags:
            return "--mtp-model"
        return "--mtp" if "--mtp" in self.with_value else None

    @property
    def draft_block_flag(self) -> str | None:
        """The flag that uses the draft block within the model's own file; None: it cannot."""
        if "--mtp" in self.flags - self.with_value:
            return "--mtp"
        return "--glm-mtp" if "--glm-mtp" in self.flags else None

    @property
    def stops_on_disconnect(self) -> bool:
        """Whether it gives up a request whose client is gone, also while it reads the prompt.

        That was merged in August 2026 (antirez/ds4 pull request 707) and left no trace in the help. Vision came in
        September, so a build that has the one has the other; of any other build it is not known.
        """
        return "--vision" in self.flags

    @property
    def samples_while_thinking(self) -> bool:
        """Whether the sampling that a request asks for holds while the model thinks, as since September 2026."""
        return "--mtp-model" in self.flags

    @property
    def metal_folder(self) -> Path | None:
        """The folder that it must be started in to find the sources of its Metal kernels; None: there is none."""
        home = self.path.parent
        for folder in (home, home.parent, home.parent / "share" / "ds4"):
            if next((folder / "metal").glob("*.metal"), None) is not None:
                return folder
        return None

    def environ(self, lock_file: str = "") -> dict[str, str]:
        """What it is started with: the service's environment scrubbed. Stray DS4_* would change what it holds.

        Args:
            lock_file: instead of the lock that all ds4 processes of a machine share; empty: that one.
        """
        return scrub(extra={"DS4_LOCK_FILE": lock_file} if lock_file else {})


def probe(path: Path, cache: Path | None = None) -> Ds4Binary:
    """What a build is and knows. Asked once: what is found is kept by the hash of its file.

    Args:
        path: the program.
        cache: folder of what was found before; None: nothing is kept.

    Raises:
        BinaryMissingError: it cannot be read or does not answer, and why.
    """
    try:
        build = program.build_of((path,))
        compute = next((name for name, mark in COMPUTE_MARKS if program.contains(path, mark)), "cpu")
    except OSError as error:
        raise BinaryMissingError(f"{path} cannot be read: {error.strerror}.") from error
    kept = None if cache is None else cache / f"{build}.json"
    if kept is not None and (known := _recall(kept, path, compute, build)) is not None:
        return known
    found: dict[str, bool] = {}
    for question in QUESTIONS:
        for flag, takes_value in flags_of(program.ask(path, question, scrub(), program.PROBE_TIMEOUT_S)):
            found.setdefault(flag, takes_value)
    if not {"--kv-disk-dir", "--ctx"} <= found.keys():
        raise BinaryMissingError(f"{path} is no ds4-server: its help names no --ctx and --kv-disk-dir.")
    with_value = frozenset(flag for flag, takes_value in found.items() if takes_value)
    if kept is not None:
        content = {"flags": sorted(found), "with_value": sorted(with_value)}
        program.remember(kept, content, CACHE_VERSION)
    return Ds4Binary(path, compute, frozenset(found), with_value, build)


def flags_of(help_text: str) -> Iterator[tuple[str, bool]]:
    """The long flags that a help text lists, and whether a value follows each. Those within a sentence do not count."""
    for option in _OPTION.finditer(_COLOUR.sub("", help_text)):
        for match in _FLAG.finditer(option["names"]):
            yield match["flag"], match["value"] is not None


def _recall(kept: Path, path: Path, compute: str, build: str) -> Ds4Binary | None:
    found = program.recall(kept, CACHE_VERSION) or {}
    with suppress(KeyError, TypeError):
        flags, with_value = (frozenset(map(str, found[name])) for name in ("flags", "with_value"))
        return Ds4Binary(path, compute, flags, with_value, build)
    return None
