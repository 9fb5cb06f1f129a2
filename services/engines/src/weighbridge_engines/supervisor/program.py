"""The program of an engine that a person installs: found, asked what it knows, told apart from other builds.

What every such program shares. What one build means by its words is its engine's: see
:mod:`weighbridge_engines.sd_server.binary` and :mod:`weighbridge_engines.ds4.binary`.
"""

import hashlib
import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROBE_TIMEOUT_S = 20.0
"""`--help` takes some 20 ms; the first start of a build for cards loads some hundred MB of libraries from disk."""


class BinaryMissingError(Exception):
    """There is no such program here, or none that answers; the text says what to do."""


@dataclass(frozen=True)
class Program:
    """A program that engines are started from.

    Attributes:
        name: of its file.
        origin: whose program it is, for people.
        variable: the environment variable of the setting that names it.
    """

    name: str
    origin: str
    variable: str

    def locate(self, setting: str, environ: Mapping[str, str] = os.environ) -> Path:
        """The file that is to be used.

        Args:
            setting: a file, or a folder with the program in it or in its `bin`; empty: the first on PATH, else
                `~/.weighbridge/bin`.
            environ: for PATH and HOME.

        Raises:
            BinaryMissingError: it is not there.
        """
        if setting:
            named = Path(setting).expanduser()
            for candidate in (named, named / self.name, named / "bin" / self.name):
                if candidate.is_file() and os.access(candidate, os.X_OK):
                    return candidate.resolve()
            raise BinaryMissingError(
                f"{self.variable} names no {self.name} that can be executed. Name the program, or a folder that has it."
            )
        found = shutil.which(self.name, path=environ.get("PATH"))
        own = Path(environ.get("HOME") or "~").expanduser() / ".weighbridge" / "bin" / self.name
        if found is None and own.is_file() and os.access(own, os.X_OK):
            found = str(own)
        if found is None:
            raise BinaryMissingError(
                f"{self.name} of {self.origin} is not on PATH. Install a build for this machine, or name it with "
                f"{self.variable}."
            )
        return Path(found).resolve()

    def cache_folder(self, environ: Mapping[str, str] = os.environ) -> Path:
        """``$XDG_CACHE_HOME/weighbridge/<name>``, by default below ``~/.cache``: where what was probed is kept."""
        return cache_root(environ) / self.name


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """``$XDG_CACHE_HOME/weighbridge``, by default below ``~/.cache``."""
    base = environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return root / "weighbridge"


def build_of(files: Iterable[Path]) -> str:
    """SHA-256 (hex) over all files. Raises OSError."""
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def contains(file: Path, mark: bytes) -> bool:
    """Whether the bytes ``mark`` stand in a file. Raises OSError."""
    with file.open("rb") as opened:
        if not opened.seek(0, os.SEEK_END):
            return False
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(mark) >= 0


def ask(path: Path, question: Sequence[str], environ: Mapping[str, str], timeout_s: float = PROBE_TIMEOUT_S) -> str:
    """What a program prints on standard output when it is started with ``question`` alone.

    Raises:
        BinaryMissingError: it does not answer, and why.
    """
    words = " ".join(question)
    try:
        done = subprocess.run(
            [str(path), *question],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except OSError as error:
        raise BinaryMissingError(f"{path} cannot be started: {error.strerror}.") from error
    except subprocess.TimeoutExpired as error:
        raise BinaryMissingError(f"{path} did not answer {words} within {timeout_s:.0f} s.") from error
    if done.returncode < 0:
        raise BinaryMissingError(
            f"{path} died of signal {-done.returncode} when asked for {words}: it may be built for another processor."
        )
    if not done.stdout:
        why = done.stderr.decode(errors="replace").strip().splitlines()
        raise BinaryMissingError(f"{path} does not start: {why[-1] if why else 'it said nothing'}.")
    return done.stdout.decode(errors="replace")


def recall(kept: Path, cache_version: int) -> dict[str, Any] | None:
    """What was kept of a build; None where nothing is, or nothing of this version."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads(kept.read_text())
        if found["cache_version"] == cache_version:
            return dict(found)
    return None


def remember(kept: Path, content: Mapping[str, object], cache_version: int) -> None:
    """Keep what a build was found to be. Where that cannot be, it is asked again next time."""
    with suppress(OSError):
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps({**content, "cache_version": cache_version}))
        half.replace(kept)
