from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from rekindle.models.progress import BarProgress, LineProgress, Progress, progress_on, task

from .tiny import RecordedProgress


def test_a_terminal_gets_a_bar_and_a_file_gets_lines() -> None:
    assert isinstance(progress_on(Console(file=StringIO(), force_terminal=True)), BarProgress)
    assert isinstance(progress_on(Console(file=StringIO(), force_terminal=False)), LineProgress)


def test_lines_come_at_each_tenth_and_hold_no_control_characters() -> None:
    output = StringIO()
    with task(LineProgress(Console(file=output)), 1_000_000, "Downloading [x]") as advance:
        for _ in range(1000):
            advance(1000)
    lines = output.getvalue().splitlines()
    assert lines[0] == "Downloading [x] (1.0 MB)"
    assert lines[1] == "Downloading [x]: 10% of 1.0 MB"
    assert lines[-1] == "Downloading [x]: 100% of 1.0 MB"
    assert len(lines) == 11
    assert output.getvalue().replace("\n", "").isprintable()


def test_lines_do_without_a_total() -> None:
    output = StringIO()
    with task(LineProgress(Console(file=output)), None, "Waiting") as advance:
        advance(250_000_000)
    assert output.getvalue().splitlines() == ["Waiting", "Waiting: 250.0 MB"]


def test_a_bar_shows_its_description_and_ends() -> None:
    output = StringIO()
    bar: Progress = BarProgress(Console(file=output, force_terminal=True, width=120))
    with task(bar, 100, "Downloading [x]") as advance:
        advance(100)
    assert "Downloading [x]" in output.getvalue()
    bar.done()  # a second one does no harm
    bar.advance(1)


def test_a_task_is_closed_when_its_work_fails(progress: RecordedProgress) -> None:
    with pytest.raises(OSError, match="broken"), task(progress, 1, "x"):
        raise OSError("broken")
    assert progress.open == 0


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_sentence_is_printed_as_it_is(is_terminal: bool) -> None:
    output = StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=200)
    progress_on(console).say("qwen3:8b is org/[repo], a.gguf: 5.0 GB")
    assert output.getvalue() == "qwen3:8b is org/[repo], a.gguf: 5.0 GB\n"
