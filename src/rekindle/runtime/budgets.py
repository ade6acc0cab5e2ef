"""How much RAM and disk cached state may take: as told, or as fits the machine."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rekindle.host_memory import host_free_bytes
from rekindle.kvcache.disk.folder import used_bytes
from rekindle.models.quant import split_names
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import GB, GIB

RAM_SHARE = 4  # one in so many bytes of the free memory
LEAST_RAM_BYTES = 2 * GIB  # where there is that much
DISK_SHARE = 10  # one in so many bytes of the free disk, with what the cache has taken of it
LEAST_DISK_BYTES = 10 * GB


@dataclass(frozen=True, slots=True)
class Budgets:
    ram_bytes: int  # of one model
    disk_bytes: int  # of all that share the cache folder


class Machine:
    """What budgets are chosen by."""

    def free_memory_bytes(self) -> int:
        return host_free_bytes()

    def free_disk_bytes(self, folder: Path) -> int:
        """What the folder has and could have; 0 where nobody can say."""
        place = folder.absolute()
        try:
            existing = next(path for path in (place, *place.parents) if path.exists())
            free_bytes = shutil.disk_usage(existing).free
        except OSError:
            return 0
        with suppress(OSError):  # another server may be removing files
            free_bytes += used_bytes(folder)
        return free_bytes


def choose_budgets(load: LoadModel, machine: Machine | None = None) -> Budgets:
    """Before the model is loaded, whose weights count as if they were; those of this server share
    the memory."""
    machine = machine or Machine()
    ram_bytes, disk_bytes = load.settings.ram_cache, load.settings.disk_cache
    if ram_bytes is None:
        left_bytes = max(machine.free_memory_bytes() - _weights_bytes(Path(load.path)), 0)
        ram_bytes = _ram_bytes(left_bytes // max(len(load.served), 1))
    if disk_bytes is None:
        free_bytes = machine.free_disk_bytes(load.settings.cache_dir)
        disk_bytes = max(free_bytes // DISK_SHARE, LEAST_DISK_BYTES)
    return Budgets(ram_bytes, disk_bytes)


def _weights_bytes(path: Path) -> int:
    """Of a file, all parts of a split one, or a folder; nothing where there is no model."""
    if path.is_dir():
        return used_bytes(path)
    parts = (path.with_name(name) for name in split_names(path.name))
    return sum(part.stat().st_size for part in parts if part.is_file())


def _ram_bytes(free_bytes: int) -> int:
    least_bytes = LEAST_RAM_BYTES if free_bytes >= LEAST_RAM_BYTES else 0
    return max(free_bytes // RAM_SHARE, least_bytes)
