"""Finds out how much memory is free on this machine or in this container, and allocates it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class _ControlFiles:
    """The files in which one version of cgroups states limit and usage."""

    controller: str  # as /proc/self/cgroup names it
    mount: str
    limit: str
    usage: str
    file_cache: str  # the line of memory.stat that counts reclaimable pages


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
    """Bytes that this process can allocate without swapping and within its cgroups."""
    return max(min([_machine_free_bytes(root), *_group_free_bytes(root)]), 0)


def _machine_free_bytes(root: Path) -> int:
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Other systems only tell the total. Half of it is a cautious guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _group_free_bytes(root: Path) -> Iterator[int]:
    """Free bytes in every cgroup that limits this process: its own and its parents."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        for files in _VERSIONS:
            if files.controller in controllers.split(","):
                # In a container the path may be the host's, while only its last part is mounted.
                for group in (PurePosixPath(path), *PurePosixPath(path).parents):
                    with suppress(OSError, ValueError):  # not mounted, or no limit
                        yield _left_bytes(root / files.mount / group.relative_to("/"), files)


def _left_bytes(folder: Path, files: _ControlFiles) -> int:
    limit, usage = (int((folder / name).read_text()) for name in (files.limit, files.usage))
    lines = (folder / "memory.stat").read_text().splitlines()
    stat = dict(line.split(maxsplit=1) for line in lines)
    return limit - usage + int(stat.get(files.file_cache, 0))


Allocate = Callable[[int], memoryview]  # returns this many bytes, not initialised


def plain_memory(size_bytes: int) -> memoryview:
    """Allocate without zeroing. A bytearray would be zeroed, which takes as long as using it."""
    return np.empty(size_bytes, np.uint8).data
