"""Simulates a disk that fails on command."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Event
from typing import Any

from rekindle.kvcache.disk.block_files import BlockFiles
from rekindle.kvcache.disk.files import SYSTEM, Calls, Files
from rekindle.kvcache.disk.secret import read_secret


@dataclass
class Trouble:
    """Makes the named system calls fail while an error is set, and records all calls."""

    kinds: tuple[str, ...] = ("open",)
    error: int | None = None
    log: list[tuple[str, object]] = field(
        default_factory=list
    )  # name of the call, and its handle or path
    gate: Event = field(default_factory=Event)  # while it is closed, the named calls wait

    def __post_init__(self) -> None:
        self.gate.set()

    def calls(self) -> Calls:
        names = [each.name for each in fields(Calls)]
        return Calls(**{name: self._wrap(name, getattr(SYSTEM, name)) for name in names})

    def _wrap(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **options: Any) -> Any:
            if kind in self.kinds:
                self.gate.wait()
                if self.error is not None:
                    self.log.append((f"{kind} failed", args[0]))
                    raise OSError(self.error, os.strerror(self.error))
            result = call(*args, **options)
            self.log.append((kind, result if kind == "open" else args[0]))
            return result

        return wrapped


def block_files_with(folder: Path, calls: Calls) -> BlockFiles:
    """The block files of a folder that is already owned, with other system calls."""
    secret = read_secret(folder.parent)
    return BlockFiles(Files(folder / "blocks", calls), secret, Files(folder / "aside", calls))
