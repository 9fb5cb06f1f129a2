"""One file: what has come so far is kept, what comes is appended, and only what was verified gets its name."""

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weighbridge.pull.errors import PullError, PullReason, PullStoppedError
from weighbridge.pull.http import Answer, InterruptedTransferError
from weighbridge.pull.wanted import WantedFile, digest_of

ATTEMPTS = 6
"""Tries in a row that bring nothing, before it is given up. A try that brings something starts the count again."""
LONGEST_WAIT_S = 60.0
SLOWEST_BYTES_PER_S = 1024
"""A host slower than this for a whole minute is asked again: it has most likely forgotten us."""
SLOW_WINDOW_S = 60.0

_TRY_AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})


class Requests(Protocol):
    """Where requests go: `http.Http`."""

    def get(self, url: str, offset: int, etag: str) -> AbstractContextManager[Answer]:
        """See http.Http.get."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who hears of progress, and who may stop it.

    `on_bytes` hears how much of the file is there (it goes back where a host starts over), `on_note` sentences for
    people; `stopped` is asked between pieces.
    """

    on_bytes: Callable[[int], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False


class Transfer:
    """Brings files into one model's folder.

    `work` is a folder on the same file system, for what has come so far. `sleep` waits for so many seconds, and may
    raise PullStoppedError; `clock` returns seconds and never goes back.
    """

    def __init__(
        self,
        requests: Requests,
        work: Path,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._requests = requests
        self._work = work
        self._sleep = sleep
        self._clock = clock

    def bring(self, file: WantedFile, target: Path, watcher: Watcher) -> None:
        """Downloads `file` to `target`, from where an earlier try ended.

        Raises PullError; PullStoppedError when `watcher` stops it. In both cases what has come is kept for the next
        try, unless it was wrong. OSError for what the disk refuses.
        """
        part = _Part(self._work, file)
        fresh = not part.size
        while True:
            self._fill(file, part, watcher)
            hasher = digest_of(part.path, file, lambda _: _stop_if_asked(watcher))
            if file.is_right(hasher):
                break
            part.discard()
            if fresh:
                raise PullError(
                    PullReason.DIGEST_MISMATCH,
                    f"{file.path} came whole, and is not the file that the catalogue describes (its digest is "
                    "another). It was thrown away.",
                )
            # Half of it may have been another version's: once more, from the start.
            watcher.on_note(f"{file.path}: what had come earlier does not match; starting over.")
            fresh = True
        part.become(target)

    def _fill(self, file: WantedFile, part: "_Part", watcher: Watcher) -> None:
        """Until as many bytes are there as the file has."""
        failures = 0
        if part.size > file.size_bytes:
            part.discard()
        watcher.on_bytes(part.size)
        part.create()
        while part.size < file.size_bytes:
            _stop_if_asked(watcher)
            before = part.size
            wait, why = self._once(file, part, watcher)
            if part.size > before:
                failures = 0
            elif why:
                failures += 1
            if failures >= ATTEMPTS:
                message = f"{file.path}: {why}, {failures} times in a row. The same command goes on from there."
                raise PullError(PullReason.UNREACHABLE, message)
            if why and part.size < file.size_bytes:
                pause = min(LONGEST_WAIT_S, 2.0**failures if wait is None else wait)
                watcher.on_note(f"{file.path}: {why}; trying again in {pause:.0f} s.")
                self._sleep(pause)

    def _once(self, file: WantedFile, part: "_Part", watcher: Watcher) -> tuple[float | None, str]:
        """One request. Returns how long the host wants to be left alone, and why more is to be done ("": nothing)."""
        offset = part.size
        try:
            with self._requests.get(file.url, offset, part.etag) as answer:
                if answer.status in _TRY_AGAIN:
                    return answer.retry_after_s, f"the host answers {answer.status}"
                if answer.status == 416 or (answer.status == 206 and answer.start != offset):
                    part.discard()
                    part.create()
                    watcher.on_bytes(0)
                    return None, "the host does not go on from there"
                _refuse(file, answer)
                if answer.status == 200 and offset:
                    # No ranges there, or another version by now.
                    part.discard()
                    part.create()
                    watcher.on_bytes(0)
                part.remember(answer.etag)
                self._append(file, part, answer, watcher)
        except InterruptedTransferError as interrupted:
            return None, str(interrupted)
        return None, "" if part.size == file.size_bytes else "the connection ended early"

    def _append(self, file: WantedFile, part: "_Part", answer: Answer, watcher: Watcher) -> None:
        window_start, window_size = self._clock(), part.size
        with part.path.open("ab") as opened:
            for piece in answer.body:
                if part.size + len(piece) > file.size_bytes:
                    opened.close()
                    part.discard()
                    raise _wrong_size(file, "more")
                opened.write(piece)
                opened.flush()
                part.size += len(piece)
                watcher.on_bytes(part.size)
                _stop_if_asked(watcher)
                now = self._clock()
                if now - window_start >= SLOW_WINDOW_S:
                    if part.size - window_size < SLOWEST_BYTES_PER_S * SLOW_WINDOW_S:
                        raise InterruptedTransferError("the host has become too slow")
                    window_start, window_size = now, part.size


class _Part:
    """What has come of one file so far, and the version that it belongs to."""

    def __init__(self, work: Path, file: WantedFile) -> None:
        # Named by its digest where there is one: what came from one address goes on from another.
        name = file.sha256 or file.path.replace("/", "%")
        self.path = work / f"{name}.part"
        self._version = work / f"{name}.version"
        self._by_digest = bool(file.sha256)
        self.etag = ""
        self.size = self.path.stat().st_size if self.path.is_file() else 0
        if self.size and not self._by_digest:
            self.etag = self._read_version()
            if not self.etag:
                self.discard()

    def create(self) -> None:
        """The file, empty if it was not there."""
        self._version.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def remember(self, etag: str) -> None:
        """Which version comes now. Weak ones do not tell versions apart byte by byte."""
        if self._by_digest or etag == self.etag:
            return
        self.etag = "" if etag.startswith("W/") else etag
        self._version.write_text(json.dumps({"etag": self.etag}))

    def discard(self) -> None:
        """Throws it away."""
        self.path.unlink(missing_ok=True)
        self._version.unlink(missing_ok=True)
        self.size, self.etag = 0, ""

    def become(self, target: Path) -> None:
        """Its own name, once it is certain to be on the disk."""
        target.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("rb") as opened:
            os.fsync(opened.fileno())
        self.path.replace(target)
        self._version.unlink(missing_ok=True)
        sync_folder(target.parent)

    def _read_version(self) -> str:
        try:
            etag = json.loads(self._version.read_text())["etag"]
        except (OSError, ValueError, KeyError, TypeError):
            return ""
        return etag if isinstance(etag, str) else ""


def sync_folder(folder: Path) -> None:
    """Makes new names in `folder` outlive a power cut, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse(file: WantedFile, answer: Answer) -> None:
    """Raises PullError for answers that trying again does not change."""
    if answer.status in (401, 403):
        raise PullError(
            PullReason.NOT_ALLOWED,
            f"{file.path}: the host wants a token, or its licence accepted ({answer.status}). Accept it on the model's "
            "page and set WEIGHBRIDGE_PULL_TOKEN.",
        )
    if answer.status not in (200, 206):
        raise PullError(PullReason.NOT_THERE, f"{file.path}: the host does not have it ({answer.status}).")
    if answer.total_bytes is not None and answer.total_bytes != file.size_bytes:
        raise _wrong_size(file, f"{answer.total_bytes:,}")


def _wrong_size(file: WantedFile, offered: str) -> PullError:
    return PullError(
        PullReason.SIZE_MISMATCH,
        f"{file.path}: the catalogue says {file.size_bytes:,} bytes, the host sends {offered}: not the same file.",
    )


def _stop_if_asked(watcher: Watcher) -> None:
    if watcher.stopped():
        raise PullStoppedError
