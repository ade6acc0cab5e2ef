"""Drives a program that takes its next turn only in a terminal."""

from __future__ import annotations

import errno
import os
import pty
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

STEP_S = 0.5
CANNOT_BE_RUN = 127  # the exit status of shells for a command that cannot be run
WHERE_IS_THE_CURSOR, AT_THE_TOP = b"\x1b[6n", b"\x1b[1;1R"


def type_into(
    command: Sequence[str],
    text: str,
    *,
    folder: Path,
    environment: Mapping[str, str],
    asks: bytes,  # the output that shows that the program waits for input
    is_done: Callable[[], bool],
    patience_s: float,
) -> bool:
    """Start a program, type the text when it asks, and end it when `is_done`. False: too late."""
    process, terminal = pty.fork()
    if process == 0:
        try:
            os.chdir(folder)
            os.execve(command[0], [*command], {**environment, "TERM": "xterm-256color"})
        finally:  # this process is a fork and must not continue
            os._exit(CANNOT_BE_RUN)
    try:
        deadline, shown, typed = time.monotonic() + patience_s, b"", False
        while time.monotonic() < deadline and not (typed and is_done()):
            new = _read(terminal)
            if new is None:
                break
            shown += new
            if WHERE_IS_THE_CURSOR in shown:
                os.write(terminal, AT_THE_TOP)
                shown = shown.replace(WHERE_IS_THE_CURSOR, b"")
            if asks in shown and not typed:
                time.sleep(STEP_S)  # the program draws before it reads input
                os.write(terminal, text.encode())
                time.sleep(STEP_S)  # otherwise the line end would be pasted with the text
                os.write(terminal, b"\r")
                typed = True
        return typed and is_done()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def _read(terminal: int) -> bytes | None:
    """The output that arrives soon, if any. None: the program has ended."""
    readable, _, _ = select.select([terminal], [], [], STEP_S)
    if not readable:
        return b""
    try:
        return os.read(terminal, 1 << 16) or None
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
