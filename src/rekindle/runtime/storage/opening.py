"""Opening what a runtime remembers: RAM, and the model's cache folder below it."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rekindle.engine.base import Capabilities, Engine
from rekindle.errors import RekindleError
from rekindle.kvcache.disk.folder import Folder, open_folder, used_bytes
from rekindle.kvcache.disk.image_files import PictureFiles
from rekindle.kvcache.disk.secret import read_secret, read_secret_file
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Clock
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import OnEvent, Tier
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.memory import Allocate, host_free_bytes, plain_memory
from rekindle.models.gguf_files import split_names
from rekindle.protocol.frames import PARKED, POOL, Capacity
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import GB, GIB, RuntimeSettings, usable_cores
from rekindle.runtime.device.images import EncodedPictures
from rekindle.runtime.storage.storage import Log, RamShares, Storage, unavailable_line

# ----------------------------------------------------------------------
# How much RAM and disk cached state may take: as told, or as fits the machine.

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


SECRET_BYTES = 32
LEAST_READERS, MOST_READERS = 2, 16  # of blocks
LIKELY = 0.2  # that a block is used again, for it to be written when it leaves RAM


def open_storage(
    load: LoadModel,
    budgets: Budgets,
    capabilities: Capabilities,
    on_event: OnEvent,
    log: Log,
    allocate: Allocate = plain_memory,
) -> Storage:
    """With RAM alone if there can be no folder; blocks are read into memory that is allocated
    so."""
    settings, clock = load.settings, Clock()
    found = _find_disk(load, budgets.disk_bytes, capabilities, log)
    shares = RamShares.of(budgets.ram_bytes, capabilities, has_disk=found.open is not None)
    disk = None
    if found.open is not None:
        disk = DiskTier(
            found.open,
            on_event,
            floor_bytes=settings.disk_floor,
            queue_bytes=shares.queue_bytes,
            eviction=settings.cache_eviction,
            allocate=allocate,
            readers=_readers(capabilities),
        )
    store = _store_over(disk, settings, shares, capabilities.block_tokens)
    journal = disk.journal if disk else None
    pictures = EncodedPictures(shares.pictures_bytes, clock.steady_s)
    if capabilities.sees:
        pictures.open_files = partial(
            PictureFiles, secret=found.secret, on_read=on_event, floor_bytes=settings.disk_floor
        )
    return Storage(
        settings,
        store,
        Entries(store, clock, journal, limit_bytes=shares.entries_bytes),
        clock,
        secret=found.secret,
        log=log,
        pictures=pictures,
        disk=disk,
        no_disk_reason=found.no_disk_reason,
        gives_way=capabilities.device == "cpu",
    )


def _store_over(
    disk: DiskTier | None, settings: RuntimeSettings, shares: RamShares, block_tokens: int
) -> Store:
    tiers: list[Tier] = [RamTier(shares.blocks_bytes, settings.cache_eviction)]
    tiers += [disk] if disk else []  # a further tier below goes here
    return Store(
        block_tokens=block_tokens,
        tiers=tiers,
        fetch_bytes=shares.fetch_bytes,
        least_chance=LIKELY if settings.cache_write == "likely" else 0.0,
    )


def _readers(capabilities: Capabilities) -> int:
    """Threads that read blocks: fewer where the engine computes on the same cores."""
    cores = usable_cores()
    if capabilities.device == "cpu":
        return min(max(cores // 2, LEAST_READERS), MOST_READERS // 2)
    return min(max(cores, LEAST_READERS), MOST_READERS)


@dataclass(frozen=True, slots=True)
class _FoundDisk:
    secret: bytes
    open: Callable[[], Folder] | None = None
    no_disk_reason: str = "off"


def _find_disk(
    load: LoadModel, limit_bytes: int, capabilities: Capabilities, log: Log
) -> _FoundDisk:
    """How to open the folder of this model's state; without one there is RAM, and a warning."""
    settings, cache_dir = load.settings, load.settings.cache_dir
    configured = settings.cache_secret_file
    secret = read_secret_file(configured) if configured else None  # a wrong one is no small matter
    if not limit_bytes:
        return _FoundDisk(secret or secrets.token_bytes(SECRET_BYTES))
    try:
        own_secret = read_secret(cache_dir, secret)
    except (OSError, RekindleError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        log(unavailable_line(cache_dir, "failing", reason))
        own_secret = secret or secrets.token_bytes(SECRET_BYTES)
        return _FoundDisk(own_secret, no_disk_reason="failing")
    open_ = partial(
        open_folder,
        cache_dir,
        capabilities.kv_layout.fingerprint + capabilities.block_tokens.to_bytes(4, "big"),
        limit_bytes=limit_bytes,
        served=[load.files, *(files for files in load.served if files != load.files)],
        secret=secret,
    )
    return _FoundDisk(own_secret, open_)


# ----------------------------------------------------------------------
# What there is room for of a model's state, place by place.


def capacities(engine: Engine, tiers: Iterable[Tier]) -> tuple[Capacity, ...]:
    """Nearest first; the disk once its folder is open."""
    capabilities = engine.capabilities
    token_bytes = max(capabilities.kv_layout.token_bytes, 1)
    on_device = {POOL: capabilities.pool_tokens}
    if engine.sequences.parking:
        on_device[PARKED] = engine.sequences.parking.tokens
    found = [Capacity(place, tokens, tokens * token_bytes) for place, tokens in on_device.items()]
    for tier in tiers:
        limit_bytes = tier.budget.limit_bytes
        if limit_bytes or tier.is_open:
            found.append(Capacity(tier.name, limit_bytes // token_bytes, limit_bytes))
    return tuple(found)
