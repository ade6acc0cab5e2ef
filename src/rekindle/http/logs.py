"""Writes the log, as text or JSON, and adds the id of the request that each line is about.

The request id comes from the client or is generated. It is returned with the response, and never
interpreted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.logging import RichHandler

from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle.http.records import RequestRecord

REQUEST_ID_HEADER = "x-request-id"
PROGRESS_LOG = "rekindle.progress"  # its lines are for a person who watches a terminal
LOG_FILES = 5  # how many full log files are kept
PROBES = {"/health", "/health/ready", "/metrics"}  # asked every few seconds by other programs

LogFormat = Literal["text", "json"]

_request_log = logging.getLogger("rekindle.request")

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


def log_to(
    console: Console,
    level: str,
    style: LogFormat = "text",
    file: Path | None = None,
    file_bytes: int = 0,
) -> None:
    """Send everything at this level or above to the file, or else to the console."""
    if file is None:
        handler = log_handler(console, style)
    else:
        handler = LogFile(file, file_bytes)
        _set_format(handler, style)
        handler.addFilter(_drop_progress)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def log_handler(console: Console, style: LogFormat = "text") -> logging.Handler:
    """Return a handler that writes colours to a terminal, and one line per record elsewhere."""
    if console.is_terminal and style == "text":
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(request)s%(message)s", "%H:%M:%S"))
        handler.addFilter(_add_request_id)
        return handler
    handler = logging.StreamHandler(console.file)
    _set_format(handler, style)
    if not console.is_terminal:
        handler.addFilter(_drop_progress)
    return handler


def log_request(record: RequestRecord) -> None:
    """Write the one line of a request. Successful probes leave theirs at debug level only."""
    is_probe = record.endpoint in PROBES and record.status == 200
    _request_log.log(
        logging.DEBUG if is_probe else logging.INFO,
        "%s",
        record.line(),
        extra={"request_id": record.request_id, "fields": record.fields()},
    )


class LogFile(RotatingFileHandler):
    """A log file that begins anew when it is full, and also when another program has moved it."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, maxBytes=size_bytes, backupCount=LOG_FILES, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"`--log-file`: cannot write {path}: {error.strerror}. Choose a file in a folder "
                "that this user may write to."
            ) from None

    def _open(self) -> TextIOWrapper:
        """Open the file for its owner only, because its lines name tenants."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        return TextIOWrapper(os.fdopen(os.open(self.baseFilename, flags, 0o600), "ab"), "utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is not None and self._has_moved(self.stream):
                self.stream.close()
                self.stream = self._open()
        except OSError:  # the folder is gone or full, and the server continues without its log
            self.handleError(record)
        else:
            super().emit(record)

    def _has_moved(self, stream: TextIOWrapper) -> bool:
        """Whether the open file is no longer the one at the path: logrotate moves a file that is
        being written, and expects the next line in a new one."""
        try:
            found = Path(self.baseFilename).stat()
        except FileNotFoundError:
            return True
        own = os.fstat(stream.fileno())
        return (found.st_dev, found.st_ino) != (own.st_dev, own.st_ino)


def _set_format(handler: logging.Handler, style: LogFormat) -> None:
    if style == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        line = "%(asctime)s %(levelname)-8s %(request)s%(message)s"
        handler.setFormatter(_OneLineFormatter(line, "%Y-%m-%d %H:%M:%S"))
    handler.addFilter(_add_request_id)


def _drop_progress(record: logging.LogRecord) -> bool:
    """Drop the progress of long prompts, unless the operator asked for every detail."""
    return record.name != PROGRESS_LOG or logging.getLogger().isEnabledFor(logging.DEBUG)


def _add_request_id(record: logging.LogRecord) -> bool:
    request_id = getattr(record, "request_id", None) or current_id()
    record.__dict__["request_id"] = request_id  # as `extra` does
    record.request = f"[{request_id}] " if request_id else ""
    return True


class _OneLineFormatter(logging.Formatter):
    """Escapes line ends, because a message may quote a client, which could forge log lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in line)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line. The fields of a request's line are fields of the object."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        found = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", None),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)
        kept = {name: value for name, value in found.items() if value is not None}
        return json.dumps(kept, default=str)
