"""Memory of the machine itself, or of the container that we are in."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np


@dataclass(frozen=True, slots=True)
class _ControlFiles:
    """Where a version of control groups says what a group may take, and takes."""

    controller: str  # as /proc/self/cgroup names it
    mount: str
    limit: str
    usage: str
    file_cache: str  # the line of memory.stat about pages that can be given back at once


_VERSIONS = (
    _ControlFiles("", "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    _ControlFiles(
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def host_free_bytes(root: Path = Path("/")) -> int:
    """Memory that a new process can have without swapping, and within its control groups."""
    return max(min([_machine_free_bytes(root), *_group_free_bytes(root)]), 0)


def _machine_free_bytes(root: Path) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Elsewhere only the total is known; half of it is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _group_free_bytes(root: Path) -> Iterator[int]:
    """What is left to every group that limits us: our own, and those that it is in."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for files in _VERSIONS:
            if files.controller in controllers.split(","):
                # In a container the path may be that of the host, where only its end is mounted.
                for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                    with suppress(OSError, ValueError):  # no such group here, or "max": no limit
                        yield _left_bytes(root / files.mount / group.relative_to("/"), files)


def _left_bytes(folder: Path, files: _ControlFiles) -> int:
    limit, usage = (int((folder / name).read_text()) for name in (files.limit, files.usage))
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split(maxsplit=1) for line in lines)
    return limit - usage + int(stat.get(files.file_cache, 0))


# ----------------------------------------------------------------------
# Memory that the state of blocks lies in.

Allocate = Callable[[int], memoryview]  # so many bytes, whatever is in them


def plain_memory(size_bytes: int) -> memoryview:
    """Not a bytearray: filling that with zeros first takes as long as using it."""
    return np.empty(size_bytes, np.uint8).data
