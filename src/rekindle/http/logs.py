"""Formats log lines, and adds the id of the request that each line is about.

The request id comes from the client or is generated. It is returned with the response, and never
interpreted.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar

from rich.console import Console
from rich.logging import RichHandler

REQUEST_ID_HEADER = "x-request-id"

_current: ContextVar[str | None] = ContextVar("request_id", default=None)


def current_id() -> str | None:
    return _current.get()


def fresh_id() -> str:
    return f"req_{secrets.token_hex(12)}"


@contextlib.contextmanager
def request_context(given: str | None) -> Iterator[str]:
    """Set the id of the current request: `given`, unless it is not safe to log."""
    is_safe = given and re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", given)
    request_id = given if given and is_safe else fresh_id()
    token = _current.set(request_id)
    try:
        yield request_id
    finally:
        _current.reset(token)


def log_to(console: Console, level: str) -> None:
    """Send everything at this level or above to the console."""
    logging.basicConfig(level=level.upper(), handlers=[log_handler(console)])


def log_handler(console: Console) -> logging.Handler:
    """Return a handler that writes colours to a terminal, and one line per record elsewhere."""
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(request)s%(message)s", "%H:%M:%S"))
    else:
        handler = logging.StreamHandler(console.file)
        line = "%(asctime)s %(levelname)-8s %(request)s%(message)s"
        handler.setFormatter(_OneLineFormatter(line, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(_add_request_id)
    return handler


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = getattr(record, "request_id", None) or current_id()
    record.request = f"[{request_id}] " if request_id else ""
    return True


class _OneLineFormatter(logging.Formatter):
    """Escapes line ends, because a message may quote a client, which could forge log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in line)
