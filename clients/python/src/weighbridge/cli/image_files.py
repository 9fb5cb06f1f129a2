"""Where rendered pictures go: names that take nobody's place unasked, and files that are whole or not there."""

import contextlib
import errno
import itertools
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from weighbridge.cli.running import CommandError
from weighbridge.failures import ExitCode

DEFAULT_FORMAT = "png"

SUFFIXES = {"png": (".png",), "jpeg": (".jpg", ".jpeg"), "webp": (".webp",)}
"""Endings of file names by format; a name that is made up here gets the first."""

MAX_STEM_CHARS = 40
"""Of a name made of a prompt: whole words of it, so that a folder of pictures can be read."""


def choose_format(asked: str | None, output: str | None) -> str:
    """The format that is meant: the one asked for, else the one that the output's name ends like, else PNG.

    Raises:
        click.UsageError: the two contradict, or the name ends like no format of pictures.
    """
    suffix = "" if output is None or _is_folder(output) else Path(output).suffix.lower()
    meant = next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    if asked is not None and meant is not None and asked != meant:
        raise click.UsageError(f"-o names a {meant} file and --format says {asked}.")
    if asked is None and suffix and meant is None:
        raise click.UsageError(f"{suffix} is no format here. End the name in .png, .jpg or .webp, or say --format.")
    return asked or meant or DEFAULT_FORMAT


def stem_of(prompt: str) -> str:
    """The first words of a prompt as the name of a file."""
    stem = ""
    for word in re.findall(r"\w+", prompt.lower()):
        longer = f"{stem}-{word}" if stem else word[:MAX_STEM_CHARS]
        if len(longer) > MAX_STEM_CHARS:
            break
        stem = longer
    return stem or "image"


class PictureFiles:
    """The files of one render.

    A name that was given is kept, and refused where something is there already; a name made of the prompt gives way to
    what is there. Several pictures are numbered from 1 on.

    Args:
        output: the file or folder that was asked for; None: the current folder.
        prompt: what a name is made of where none was given.
        count: how many pictures.
        image_format: one of :data:`SUFFIXES`.
        force: replace what is there.

    Raises:
        CommandError: the folder cannot be written to, or a name that was given is taken.
    """

    def __init__(self, output: str | None, prompt: str, count: int, image_format: str, *, force: bool) -> None:
        named = output is not None and not _is_folder(output)
        given = Path(output or ".").expanduser()
        self._folder = given.parent if named else given
        self._stem = given.stem if named else stem_of(prompt)
        self._suffix = given.suffix if named else SUFFIXES[image_format][0]
        self._force = force
        if not self._folder.is_dir():
            raise CommandError(f"The folder {self._folder} is not there.", ExitCode.USAGE)
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise CommandError(f"Nothing can be written into {self._folder}.")
        self._paths = self._names(count) if named else self._free_names(count)
        for path in self._paths:
            self._refuse_taken(path)

    @property
    def paths(self) -> Sequence[Path]:
        """The file that is meant for each picture."""
        return self._paths

    def save(self, index: int, data: bytes) -> tuple[Path, bool]:
        """Write picture ``index``; its file, and whether it replaced another.

        Where another program has taken the name meanwhile, the picture gets the next free one, unless it is to replace
        what is there.

        Raises:
            OSError: it cannot be written.
        """
        wanted = self._paths[index]
        with _written_beside(wanted, data) as part:
            if self._force:
                replaced = os.path.lexists(wanted)
                part.replace(wanted)
                return wanted, replaced
            for path in itertools.chain([wanted], self._numbered(wanted.stem)):
                if _take_name(part, path):
                    return path, False
        raise AssertionError("there is always a next number")

    def _names(self, count: int) -> Sequence[Path]:
        if count == 1:
            return [self._folder / (self._stem + self._suffix)]
        return [self._folder / f"{self._stem}-{number}{self._suffix}" for number in range(1, count + 1)]

    def _free_names(self, count: int) -> Sequence[Path]:
        """The first names in order that nothing has."""
        first = self._names(count)
        if self._force or not any(map(os.path.lexists, first)):
            return first
        # In one row, so that they are seen to belong together.
        row: list[Path] = []
        for path in self._numbered(self._stem):
            row = [] if os.path.lexists(path) else [*row, path]
            if len(row) == count:
                break
        return row

    def _numbered(self, stem: str) -> Iterator[Path]:
        for number in itertools.count(2):
            yield self._folder / f"{stem}-{number}{self._suffix}"

    def _refuse_taken(self, path: Path) -> None:
        if not os.path.lexists(path):
            return
        if not self._force:
            raise CommandError(f"{path} is there already. --force replaces it.", ExitCode.USAGE)
        if not path.is_file() or path.is_symlink():
            raise CommandError(f"{path} is no ordinary file, and is not replaced.", ExitCode.USAGE)


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def unwritten_words(error: OSError, unwritten: Sequence[Path], kept: Sequence[Path], seed: int | None) -> str:
    """What a picture that could not be written means for the person who asked for it.

    Args:
        error: why the first one could not.
        unwritten: the files that are not there, in a row.
        kept: those that are.
        seed: of the first one that is not there; None: it is not known.
    """
    why = "the disk is full" if error.errno in _FULL else error.strerror or type(error).__name__
    remedy = "Make room there" if error.errno in _FULL else "Put that right"
    them = "it" if len(unwritten) == 1 else "them"
    count = f" --count {len(unwritten)}" if kept else ""  # without it the same command renders all
    with_seed = "" if seed is None else f" with --seed {seed}{count}"
    return (
        f"{_listed(unwritten)} cannot be written: {why}. {_listed(kept) if kept else 'No image'} "
        f"{'are' if len(kept) > 1 else 'is'} kept. {remedy}, or name another place with -o: "
        f"the same command{with_seed} renders {them} again."
    )


def _listed(paths: Sequence[Path]) -> str:
    return " and ".join(", ".join(map(str, part)) for part in (paths[:-1], paths[-1:]) if part)


def _is_folder(output: str) -> bool:
    return output.endswith(os.sep) or Path(output).expanduser().is_dir()


@contextlib.contextmanager
def _written_beside(path: Path, data: bytes) -> Iterator[Path]:
    """``data`` in a file beside ``path``, gone at the end under that name."""
    part = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as opened:
            opened.write(data)
        yield part
    finally:
        part.unlink(missing_ok=True)


def _take_name(part: Path, path: Path) -> bool:
    """Give the file ``part`` the name ``path`` as well; False: something has it."""
    try:
        os.link(part, path)
        return True
    except FileExistsError:
        return False
    except OSError:  # no hard links on this file system
        if os.path.lexists(path):
            return False
        part.rename(path)
        return True
