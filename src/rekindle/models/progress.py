"""Shows progress on the terminal: of downloads, of one long step, of a list of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

OnProgress = Callable[[float, float], None]  # done and total
Advance = Callable[[int], None]  # takes the size of each chunk


@contextmanager
def progress_bar(description: str, console: Console) -> Iterator[OnProgress]:
    """Show a bar for one long step. It disappears at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal  # a file would get an empty line
    with Bars(*columns, console=console, transient=True, disable=hidden) as bars:
        task_id = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task_id, completed=done, total=total)


class TaskProgress:
    """Shows a bar for each of several counted tasks, or a line per step where there is no terminal.
    The bars disappear at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
        self._bars = Bars(
            *columns,
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> TaskProgress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    @contextmanager
    def task(self, description: str, total: int) -> Iterator[Callable[[], None]]:
        """Show one task. The caller calls what it gets after each step."""
        task_id = self._bars.add_task(description, total=total)
        done = count(1)

        def step() -> None:
            self._bars.advance(task_id)
            if not self._console.is_terminal:
                self._console.print(f"{description}: {next(done)} of {total}", highlight=False)

        yield step


class Progress(Protocol):
    """Shows one download at a time."""

    def say(self, line: str) -> None: ...
    def start(self, total_bytes: int | None, description: str) -> None: ...
    def advance(self, size_bytes: int) -> None: ...
    def done(self) -> None: ...


@contextmanager
def task(progress: Progress, total_bytes: int | None, description: str) -> Iterator[Advance]:
    """Show one download."""
    progress.start(total_bytes, description)
    try:
        yield progress.advance
    finally:
        progress.done()


def progress_on(console: Console) -> Progress:
    """Return the display that suits the console: a bar on a terminal, lines elsewhere."""
    return BarProgress(console) if console.is_terminal else LineProgress(console)


class BarProgress:
    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars: Bars | None = None
        self._task = TaskID(0)

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False)

    def start(self, total_bytes: int | None, description: str) -> None:
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bars.add_task(description, total=total_bytes)
        self._bars.start()

    def advance(self, size_bytes: int) -> None:
        if self._bars:
            self._bars.advance(self._task, size_bytes)

    def done(self) -> None:
        if self._bars:
            self._bars.stop()
        self._bars = None


class LineProgress:
    """Prints a line at the start and at each tenth, for log files."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._total: int | None = None
        self._description = ""
        self._done_bytes = 0
        self._lines = 0

    def say(self, line: str) -> None:
        self._print(line)

    def start(self, total_bytes: int | None, description: str) -> None:
        self._total, self._description = total_bytes, description
        self._done_bytes = self._lines = 0
        self._print(f"{description} ({decimal(total_bytes)})" if total_bytes else description)

    def advance(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        lines = self._done_bytes // self._step_bytes()
        if lines > self._lines:
            self._lines = lines
            self._print(f"{self._description}: {self._reached()}")

    def done(self) -> None:
        pass

    def _step_bytes(self) -> int:
        return max(1, self._total // 10) if self._total else 100_000_000

    def _reached(self) -> str:
        if not self._total:
            return decimal(self._done_bytes)
        share = min(100, 100 * self._done_bytes // self._total)
        return f"{share}% of {decimal(self._total)}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
