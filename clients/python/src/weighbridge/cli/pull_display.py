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
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from weighbridge.pull.pulling import Listener
from weighbridge.pull.wanted import WantedFile
from weighbridge.sizes import format_size

JSON_PERIOD_S = 1.0
"""Programs hear of progress this often, and of each file's beginning and end."""


class PullDisplay:
    """Bars on a terminal, else a line for each file; a context manager, so that bars end with the pull."""

    def __init__(self, to: Console) -> None:
        self._to = to
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=to,
            disable=not to.is_terminal,
        )
        self._all: TaskID | None = None
        self._file: TaskID | None = None
        self._before = 0
        self._current: WantedFile | None = None

    def __enter__(self) -> "PullDisplay":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def listener(self, stopped: Callable[[], bool]) -> Listener:
        """What the pull reports to."""
        return Listener(self.on_plan, self.on_file, self.on_bytes, self.on_note, stopped)

    def on_plan(self, files: int, total: int, missing: int) -> None:
        """How much is to come."""
        self._to.print(f"{files} files, {format_size(total)}; {format_size(missing)} to come.")
        if missing:
            self._all = self._progress.add_task("all", total=missing)

    def on_file(self, file: WantedFile, there: bool) -> None:
        """One file begins, or is there already."""
        self._end_file()
        if there:
            self._to.print(f"there      {file.path}")
            return
        self._current = file
        if self._to.is_terminal:
            self._file = self._progress.add_task(file.path, total=file.size_bytes)
        else:
            self._to.print(f"getting    {file.path}, {format_size(file.size_bytes)}")

    def on_bytes(self, file: WantedFile, count: int) -> None:
        """So much of it is there."""
        if self._file is not None:
            self._progress.update(self._file, completed=count)
        if self._all is not None:
            self._progress.update(self._all, completed=self._before + count)

    def on_note(self, text: str) -> None:
        """Something that a person should know."""
        self._to.print(text)

    def _end_file(self) -> None:
        if self._current is not None:
            self._before += self._current.size_bytes
            self._current = None
        if self._file is not None:
            self._progress.remove_task(self._file)
            self._file = None


class JsonPullDisplay(PullDisplay):
    """One JSON object per line."""

    def __init__(self, to: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(to)
        self._out = to
        self._clock = clock
        self._told = 0.0

    def __enter__(self) -> "JsonPullDisplay":
        return self

    def on_plan(self, files: int, total: int, missing: int) -> None:
        """How much is to come."""
        self._print(event="planned", files=files, total_bytes=str(total), missing_bytes=str(missing))

    def on_file(self, file: WantedFile, there: bool) -> None:
        """One file begins, or is there already."""
        self._told = 0.0
        self._print(event="file", path=file.path, size_bytes=str(file.size_bytes), there=there)

    def on_bytes(self, file: WantedFile, count: int) -> None:
        """So much of it is there."""
        now = self._clock()
        if count < file.size_bytes and now - self._told < JSON_PERIOD_S:
            return
        self._told = now
        self._print(event="progress", path=file.path, bytes=str(count), size_bytes=str(file.size_bytes))

    def on_note(self, text: str) -> None:
        """Something that a person should know."""
        self._print(event="note", message=text)

    def _print(self, **values: object) -> None:
        self._out.file.write(json.dumps(values, ensure_ascii=False) + "\n")
        self._out.file.flush()
