"""A bar on the terminal while something takes its time; it leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

OnProgress = Callable[[float, float], None]  # how much is done, and of how much


@contextmanager
def progress_bar(description: str, console: Console) -> Iterator[OnProgress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    hidden = not console.is_terminal  # in a file it would leave an empty line
    with Progress(*columns, console=console, transient=True, disable=hidden) as bars:
        task = bars.add_task(description, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
