"""How the log is written: for a person at a terminal, and one line a record everywhere else."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

from rich.console import Console
from rich.logging import RichHandler

# ----------------------------------------------------------------------
# The id of the request that is being answered: from its client, or a fresh one.
#
# It is opaque: sent back with the answer and written with every line of the log, never
# interpreted.

HEADER = "x-request-id"
MOST_CHARACTERS = 128

_SAFE = re.compile(rf"[A-Za-z0-9._:-]{{1,{MOST_CHARACTERS}}}")
_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def current_id() -> str | None:
    return _current.get()


def fresh_id() -> str:
    return f"req_{secrets.token_hex(12)}"


@contextlib.contextmanager
def answering(given: str | None) -> Iterator[str]:
    """The id of all that happens inside: the one given, unless it is not fit to be logged."""
    request_id = given if given and _SAFE.fullmatch(given) else fresh_id()
    token = _current.set(request_id)
    try:
        yield request_id
    finally:
        _current.reset(token)


class RequestIds(logging.Filter):
    """Gives each record `request`: the id of the request it is about, to begin its line with."""

    def filter(self, record: logging.LogRecord) -> bool:
        request_id = getattr(record, "request_id", None) or current_id()
        record.request = f"[{request_id}] " if request_id else ""
        return True


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
