"""System calls that are recorded and fail where a test wants it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from rekindle.kvcache.disk.files import SYSTEM, Calls

ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EACCES)
KINDS = ("open", "writev", "fsync", "replace", "unlink")


class PulledPlug(BaseException):
    """Simulates the end of the process at this point."""


@dataclass
class Faults:
    """Fails the nth call of a kind once."""

    kind: str = ""
    nth: int = 0
    error: int | type[BaseException] = errno.EIO
    log: list[tuple[str, object]] = field(default_factory=list)
    fired: bool = False

    def calls(self) -> Calls:
        names = [each.name for each in fields(Calls)]
        return Calls(**{name: self._wrap(name, getattr(SYSTEM, name)) for name in names})

    def _wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            self.log.append((kind, args[0]))
            if kind == self.kind and not self.fired:
                self.nth -= 1
                if self.nth <= 0:
                    self.fired = True
                    raise self._exception()
            return call(*args, **options)

        return wrapped

    def _exception(self) -> BaseException:
        if isinstance(self.error, int):
            return OSError(self.error, os.strerror(self.error))
        return self.error()

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.log]


def each_failure(kind: str, error: int | type[BaseException]) -> Iterator[Faults]:
    """Faults at the first call of a kind, the second, and so on, until one is never reached."""
    for nth in range(1, 100):
        faults = Faults(kind, nth, error)
        yield faults
        if not faults.fired:
            return
    raise AssertionError("it never got through")
