"""How the log is written: for a person at a terminal, and one line a record everywhere else."""

from __future__ import annotations

import logging

from rich.console import Console
from rich.logging import RichHandler

from rekindle.server.request_id import RequestIds


def log_to(console: Console, level: str) -> None:
    """Send everything at this level or above to the console."""
    logging.basicConfig(level=level.upper(), handlers=[log_handler(console)])


def log_handler(console: Console) -> logging.Handler:
    """A terminal gets colours and lines that fit it; a file or a pipe is read by programs."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(request)s%(message)s", "%H:%M:%S"))
    else:
        handler = logging.StreamHandler(console.file)
        line = "%(asctime)s %(levelname)-8s %(request)s%(message)s"
        handler.setFormatter(_OneLine(line, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(RequestIds())
    return handler


class _OneLine(logging.Formatter):
    """What a client wrote may be part of a message: it must not begin a line of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in line)
