"""Chooses the budgets of a runtime's cache, and opens it: RAM, and below it the model's folder."""

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
from rekindle.kvcache.entries.entry import Clock, Entry
from rekindle.kvcache.entries.retention import EntryLimits
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Tier
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.memory import Allocate, host_free_bytes, plain_memory
from rekindle.models.gguf_files import split_names
from rekindle.protocol.frames import PARKED, POOL, Capacity
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import GB, GIB, RuntimeSettings, usable_cores
from rekindle.runtime.device.images import EncodedPictures
from rekindle.runtime.storage.storage import (
    Log,
    RamShares,
    Storage,
    StorageEvent,
    reads_line,
    unavailable_line,
)


@dataclass(frozen=True, slots=True)
class Budgets:
    ram_bytes: int  # of one model
    disk_bytes: int  # of all models that share the cache folder


class Machine:
    """Measures the free memory and disk of this machine."""

    def free_memory_bytes(self) -> int:
        return host_free_bytes()

    def free_disk_bytes(self, folder: Path) -> int:
        """Free space plus the bytes that the folder takes; 0 if unknown."""
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
    """Choose budgets that are not set: a quarter of the free memory, at least 2 GiB if there is
    that much, and a tenth of the free disk, at least 10 GB. The weights of this model, which is not
    loaded yet, count as used, and all models of the server share the memory."""
    machine = machine or Machine()
    ram_bytes, disk_bytes = load.settings.ram_cache, load.settings.disk_cache
    if ram_bytes is None:
        left_bytes = max(machine.free_memory_bytes() - _weights_bytes(Path(load.path)), 0)
        left_bytes //= max(len(load.served), 1)
        ram_bytes = max(left_bytes // 4, 2 * GIB if left_bytes >= 2 * GIB else 0)
    if disk_bytes is None:
        free_bytes = machine.free_disk_bytes(load.settings.cache_dir)
        disk_bytes = max(free_bytes // 10, 10 * GB)
    return Budgets(ram_bytes, disk_bytes)


def _weights_bytes(path: Path) -> int:
    """Size of a model file, of all parts of a split one, or of a folder."""
    if path.is_dir():
        return used_bytes(path)
    parts = (path.with_name(name) for name in split_names(path.name))
    return sum(part.stat().st_size for part in parts if part.is_file())


def open_storage(
    load: LoadModel,
    budgets: Budgets,
    capabilities: Capabilities,
    on_event: Callable[[StorageEvent], None],
    log: Log,
    allocate: Allocate = plain_memory,
    on_remove: Callable[[Entry], None] = lambda _entry: None,
    on_forget: Callable[[Entry], None] = lambda _entry: None,
) -> Storage:
    """Open RAM, and the folder in the background if there is one. Blocks are read into memory from
    `allocate`. `Entries` describes the callbacks."""
    settings, clock = load.settings, Clock()
    found = _find_disk(load, budgets.disk_bytes, capabilities, log)
    shares = RamShares.of(budgets.ram_bytes, capabilities, has_disk=found.open is not None)
    disk = found.open and DiskTier(
        found.open,
        on_event,
        floor_bytes=settings.disk_floor,
        queue_bytes=shares.queue_bytes,
        eviction=settings.cache_eviction,
        allocate=allocate,
        readers=_readers(capabilities),
    )
    store = _open_store(settings, shares, capabilities.block_tokens, disk, log)
    layout = capabilities.kv_layout
    limits = EntryLimits(shares.entries_bytes, layout.token_bytes, layout.checkpoint_bytes)
    journal = disk.journal if disk else None
    entries = Entries(store, clock, journal, limits, on_remove=on_remove, on_forget=on_forget)
    open_files = partial(
        PictureFiles, secret=found.secret, on_read=on_event, floor_bytes=settings.disk_floor
    )
    opener = open_files if capabilities.sees else None
    return Storage(
        settings,
        store,
        entries,
        clock,
        secret=found.secret,
        log=log,
        pictures=EncodedPictures(shares.pictures_bytes, clock.steady_s, opener),
        disk=disk,
        no_disk_reason=found.no_disk_reason,
        gives_way=capabilities.device == "cpu",
    )


def _open_store(
    settings: RuntimeSettings,
    shares: RamShares,
    block_tokens: int,
    disk: DiskTier | None,
    log: Log,
) -> Store:
    tiers: list[Tier] = [RamTier(shares.blocks_bytes, settings.cache_eviction)]
    tiers += [disk] if disk else []  # a further tier goes here
    return Store(
        block_tokens=block_tokens,
        tiers=tiers,
        fetch_bytes=shares.fetch_bytes,
        min_reuse_probability=0.2 if settings.cache_write == "likely" else 0.0,
        on_stall=lambda tier, answers: log(reads_line(tier, answers)),
    )


def _readers(capabilities: Capabilities) -> int:
    """Threads that read blocks. The engine may compute on the same cores."""
    if capabilities.device == "cpu":
        return min(max(usable_cores() // 2, 2), 8)
    return min(max(usable_cores(), 2), 16)


@dataclass(frozen=True, slots=True)
class _FoundDisk:
    secret: bytes
    open: Callable[[], Folder] | None = None
    no_disk_reason: str = "off"


def _find_disk(
    load: LoadModel, limit_bytes: int, capabilities: Capabilities, log: Log
) -> _FoundDisk:
    """Prepare opening the folder of this model. Without one, state is kept in RAM, with a
    warning."""
    settings, cache_dir = load.settings, load.settings.cache_dir
    configured = settings.cache_secret_file
    secret = read_secret_file(configured) if configured else None  # raises if it is invalid
    if not limit_bytes:
        return _FoundDisk(secret or secrets.token_bytes(32))
    try:
        own_secret = read_secret(cache_dir, secret)
    except (OSError, RekindleError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        log(unavailable_line(cache_dir, "failing", reason))
        own_secret = secret or secrets.token_bytes(32)
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


def capacities(engine: Engine, tiers: Iterable[Tier]) -> tuple[Capacity, ...]:
    """What each place can hold, fastest first. The disk is listed once its folder is open."""
    capabilities = engine.capabilities
    token_bytes = max(capabilities.kv_layout.token_bytes, 1)
    on_device = {POOL: capabilities.pool_tokens}
    if engine.sequences.parking:
        on_device[PARKED] = engine.sequences.parking.tokens
    found = [Capacity(place, tokens, tokens * token_bytes) for place, tokens in on_device.items()]
    for tier in tiers:
        size_bytes = tier.capacity_bytes
        if size_bytes or tier.is_open:
            found.append(Capacity(tier.name, size_bytes // token_bytes, size_bytes))
    return tuple(found)
