"""How a download is shown: bars on a terminal, lines elsewhere, JSON for programs."""

import json
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column

from weighbridge.pull.errors import PullError
from weighbridge.pull.pulling import Listener, Pulled
from weighbridge.pull.wanted import WantedFile
from weighbridge.sizes import format_size

JSON_PERIOD_S = 1.0
"""Programs hear of progress this often, and of each file's beginning and end."""
LINES_PERIOD_S = 30.0
"""Logs hear of progress this often."""
WIDTH_FOR_ALL = 100
"""Columns from which a bar has amount, speed and time left beside it; below, share and time left."""

Clock = Callable[[], float]


class PullDisplay:
    """Bars on a terminal, else lines; a context manager, so that bars end with the pull. `clock` never goes back."""

    def __init__(self, to: Console, clock: Clock = time.monotonic) -> None:
        self._to = to
        self._clock = clock
        self._progress = Progress(*_columns(to.width), console=to, disable=not to.is_terminal, expand=True)
        self._all: TaskID | None = None
        self._bar: TaskID | None = None
        self._missing = 0
        self._before = 0
        self._current: WantedFile | None = None
        self._verifying = False
        self._told = 0.0
        self._told_bytes = 0

    def __enter__(self) -> "PullDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def listener(self, stopped: Callable[[], bool]) -> Listener:
        """What the pull reports to."""
        return Listener(
            self.on_plan,
            self.on_file,
            self.on_bytes,
            self.on_note,
            stopped,
            on_verify=self.on_verify,
            on_done=self.on_done,
        )

    def on_plan(self, files: int, total: int, missing: int, partial: int) -> None:
        """How much is to come."""
        self._end_bar()
        count = "1 file" if files == 1 else f"{files:,} files"
        to_come = format_size(missing - partial) if missing else "nothing"
        earlier = f", {format_size(partial)} came earlier" if partial else ""
        self._to.print(f"{count}, {format_size(total)}; {to_come} to come{earlier}.")
        self._missing = missing

    def on_file(self, file: WantedFile, there: bool) -> None:
        """One file begins, or is there already."""
        self._end_bar()
        if there:
            self._to.print(f"there      {file.path}")
            return
        self._current, self._verifying = file, False
        if not self._to.is_terminal:
            self._to.print(f"getting    {file.path}, {format_size(file.size_bytes)}")
            self._told = self._clock()
            return
        if self._all is None and self._missing > file.size_bytes:
            self._all = self._progress.add_task("all", total=self._missing)
        self._bar = self._progress.add_task(file.path, total=file.size_bytes)

    def on_bytes(self, file: WantedFile, count: int) -> None:
        """So much of it is there."""
        if self._bar is not None:
            self._progress.update(self._bar, completed=count)
        if self._all is not None:
            self._progress.update(self._all, completed=self._before + count)
        self._tell("         ", file, count)

    def on_verify(self, file: WantedFile, count: int) -> None:
        """So much of it was read to verify it; of a file that may have been there before the plan."""
        if file != self._current or not self._verifying:
            if file != self._current:
                self._end_bar()
            self._current, self._verifying = file, True
            if self._to.is_terminal:
                if self._bar is not None:
                    self._progress.remove_task(self._bar)
                self._bar = self._progress.add_task(f"verifying {file.path}", total=file.size_bytes)
            self._told = self._clock()
        if self._bar is not None:
            self._progress.update(self._bar, completed=count)
        self._tell("verifying", file, count)

    def on_done(self, file: WantedFile) -> None:
        """It is in its place."""
        self._end_bar()
        self._before += file.size_bytes
        if self._all is not None:
            self._progress.update(self._all, completed=self._before)
        self._to.print(f"verified   {file.path}" if file.hasher() else f"complete   {file.path}")

    def on_note(self, text: str) -> None:
        """Something that a person should know."""
        self._to.print(text)

    def on_pulled(self, pulled: Pulled) -> None:
        """All of it is there."""

    def on_failed(self, error: PullError) -> None:
        """It ended with an error, which the command tells."""

    def on_stopped(self) -> None:
        """The person stopped it."""
        self._to.print("Stopped. What has come is kept: the same command goes on from there.")

    def _tell(self, word: str, file: WantedFile, count: int) -> None:
        """A line now and then, where there are no bars."""
        if self._to.is_terminal or self._clock() - self._told < LINES_PERIOD_S:
            return
        self._told = self._clock()
        share = count * 100 // max(1, file.size_bytes)
        self._to.print(f"{word}  {file.path}, {format_size(count)} of {format_size(file.size_bytes)}, {share}%")

    def _end_bar(self) -> None:
        self._current = None
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None


class JsonPullDisplay(PullDisplay):
    """One JSON object per line. The names are stable: docs/pull.md lists them."""

    def __enter__(self) -> "JsonPullDisplay":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to end."""

    def on_plan(self, files: int, total: int, missing: int, partial: int) -> None:
        """How much is to come."""
        sizes = {"total_bytes": str(total), "missing_bytes": str(missing), "partial_bytes": str(partial)}
        self._print(event="planned", files=files, **sizes)

    def on_file(self, file: WantedFile, there: bool) -> None:
        """One file begins, or is there already."""
        self._current = None
        self._print(event="file", path=file.path, size_bytes=str(file.size_bytes), there=there)

    def on_bytes(self, file: WantedFile, count: int) -> None:
        """So much of it is there."""
        self._step("progress", file, count)

    def on_verify(self, file: WantedFile, count: int) -> None:
        """So much of it was read to verify it."""
        self._step("verifying", file, count)

    def on_done(self, file: WantedFile) -> None:
        """It is in its place."""
        self._print(event="verified", path=file.path, by_digest=file.hasher() is not None)

    def on_note(self, text: str) -> None:
        """Something that a person should know."""
        self._print(event="note", message=text)

    def on_pulled(self, pulled: Pulled) -> None:
        """All of it is there."""
        self._print(
            event="done",
            folder=str(pulled.folder),
            files=pulled.files,
            total_bytes=str(pulled.total_bytes),
            downloaded_bytes=str(pulled.downloaded_bytes),
            revision=pulled.revision,
        )

    def on_failed(self, error: PullError) -> None:
        """It ended with an error."""
        self._print(event="failed", reason=str(error.reason), message=error.message)

    def on_stopped(self) -> None:
        """The person stopped it."""
        self._print(event="stopped")

    def _step(self, event: str, file: WantedFile, count: int) -> None:
        """An event at the beginning, at the end, and now and then between them."""
        now, verifying = self._clock(), event == "verifying"
        begins = file != self._current or verifying is not self._verifying
        if not begins and count < file.size_bytes and now - self._told < JSON_PERIOD_S:
            return
        if not begins and count == self._told_bytes:
            return
        self._current, self._verifying, self._told, self._told_bytes = file, verifying, now, count
        self._print(event=event, path=file.path, bytes=str(count), size_bytes=str(file.size_bytes))

    def _print(self, **values: object) -> None:
        self._to.file.write(json.dumps(values, ensure_ascii=False) + "\n")
        self._to.file.flush()


def _columns(width: int) -> list[ProgressColumn]:
    """What stands on the line of a bar. Names are no markup: a manifest writes them."""
    name = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    if width < WIDTH_FOR_ALL:
        return [name, BarColumn(bar_width=max(5, width // 5)), TaskProgressColumn(), TimeRemainingColumn(compact=True)]
    amount = DownloadColumn(binary_units=True)
    return [name, BarColumn(), amount, TransferSpeedColumn(), TimeRemainingColumn()]
