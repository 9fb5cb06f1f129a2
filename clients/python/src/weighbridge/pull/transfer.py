"""One file: what has come so far is kept, what comes is appended, and only what was verified gets its name."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from weighbridge.pull.errors import PullError, PullReason, PullStoppedError, refused_by_disk
from weighbridge.pull.http import Answer, InterruptedTransferError
from weighbridge.pull.part import Part
from weighbridge.pull.wanted import WantedFile, digest_of

ATTEMPTS = 6
"""Tries in a row that bring next to nothing, before it is given up."""
PROGRESS_BYTES = 32 << 10
"""A try that comes so much further than any before, or to the file's end, starts the count of tries again."""
LONGEST_WAIT_S = 60.0
SLOWEST_BYTES_PER_S = 1024
"""A host slower than this for a whole minute is asked again: it has most likely forgotten us."""
SLOW_WINDOW_S = 60.0

_TRY_AGAIN = frozenset({408, 425, 429})
"""And everything from 500 on: the host's own trouble."""


class Requests(Protocol):
    """Where requests go: `http.Http`."""

    def get(self, url: str, offset: int, etag: str) -> AbstractContextManager[Answer]:
        """See http.Http.get."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who hears of progress, and who may stop it.

    `on_bytes` hears how much of the file is there (it goes back where a host starts over), `on_verify` how much of it
    was read to verify it, `on_note` sentences for people; `stopped` is asked between pieces.
    """

    on_bytes: Callable[[int], None] = lambda _: None
    on_note: Callable[[str], None] = lambda _: None
    stopped: Callable[[], bool] = lambda: False
    on_verify: Callable[[int], None] = lambda _: None

    def stop_if_asked(self) -> None:
        """Raises PullStoppedError."""
        if self.stopped():
            raise PullStoppedError

    def verify(self, path: Path, file: WantedFile) -> bool:
        """Whether what lies at `path` is `file`, by its digest. Raises PullStoppedError, OSError."""
        read = 0

        def hear(count: int) -> None:
            nonlocal read
            self.stop_if_asked()
            read += count
            self.on_verify(read)

        self.on_verify(0)
        return file.is_right(digest_of(path, file, hear))


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

        Raises PullError, also for what the disk refuses; PullStoppedError when `watcher` stops it. In both cases what
        has come is kept for the next try, unless it was wrong.
        """
        try:
            self._bring(file, target, watcher)
        except BrokenPipeError:
            raise  # whoever listened to the progress has gone: not the disk's doing
        except OSError as error:
            raise refused_by_disk(error, file.path) from error

    def _bring(self, file: WantedFile, target: Path, watcher: Watcher) -> None:
        part = Part(self._work, file)
        fresh = not part.size
        while True:
            self._fill(file, part, watcher)
            if watcher.verify(part.path, file):
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

    def _fill(self, file: WantedFile, part: Part, watcher: Watcher) -> None:
        """Until as many bytes are there as the file has."""
        if part.size > file.size_bytes:
            part.discard()
        # By the furthest ever reached: a host that starts over each time would else be asked for good.
        failures, furthest = 0, part.size
        watcher.on_bytes(part.size)
        part.create()
        while part.size < file.size_bytes:
            watcher.stop_if_asked()
            wait, why = self._once(file, part, watcher)
            watcher.stop_if_asked()
            if part.size - furthest >= PROGRESS_BYTES or part.size == file.size_bytes:
                failures, furthest = 0, part.size
            elif why:
                failures += 1
            if failures >= ATTEMPTS:
                message = f"{file.path}: {why}, {failures} times in a row. The same command goes on from there."
                raise PullError(PullReason.UNREACHABLE, message)
            if why and part.size < file.size_bytes:
                pause = min(LONGEST_WAIT_S, 2.0**failures if wait is None else wait)
                watcher.on_note(f"{file.path}: {why}; trying again in {pause:.0f} s.")
                self._sleep(pause)

    def _once(self, file: WantedFile, part: Part, watcher: Watcher) -> tuple[float | None, str]:
        """One request. Returns how long the host wants to be left alone, and why more is to be done ("": nothing)."""
        offset = part.size
        try:
            with self._requests.get(file.url, offset, part.etag) as answer:
                if answer.status in _TRY_AGAIN or answer.status >= 500:
                    return answer.retry_after_s, f"the host answers {answer.status}"
                if answer.status == 416 and answer.total_bytes not in (None, file.size_bytes):
                    raise _wrong_size(file, f"{answer.total_bytes:,}")
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

    def _append(self, file: WantedFile, part: Part, answer: Answer, watcher: Watcher) -> None:
        window_start, window_size = self._clock(), part.size
        with part.appending() as descriptor:
            for piece in answer.body:
                if part.size + len(piece) > file.size_bytes:
                    part.discard()
                    raise _wrong_size(file, "more")
                part.append(descriptor, piece)
                watcher.on_bytes(part.size)
                watcher.stop_if_asked()
                now = self._clock()
                if now - window_start >= SLOW_WINDOW_S:
                    if part.size - window_size < SLOWEST_BYTES_PER_S * SLOW_WINDOW_S:
                        raise InterruptedTransferError("the host has become too slow")
                    window_start, window_size = now, part.size


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
    if answer.encoding:
        message = f"{file.path}: the host sends it packed ({answer.encoding!r}), though asked for it as it is."
        raise PullError(PullReason.BAD_ANSWER, message)
    if answer.total_bytes is not None and answer.total_bytes != file.size_bytes:
        raise _wrong_size(file, f"{answer.total_bytes:,}")


def _wrong_size(file: WantedFile, offered: str) -> PullError:
    return PullError(
        PullReason.SIZE_MISMATCH,
        f"{file.path}: the catalogue says {file.size_bytes:,} bytes, the host sends {offered}: not the same file.",
    )
