"""Opening what a runtime remembers: RAM, and the model's cache folder below it."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rekindle.buffers import Allocate, plain_memory
from rekindle.engine.base import Capabilities
from rekindle.errors import RekindleError
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.disk.picture_files import PictureFiles
from rekindle.kvcache.disk.secret import read_secret, read_secret_file
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.entry import Clock
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import OnEvent, Tier
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings, usable_cores
from rekindle.runtime.budgets import Budgets
from rekindle.runtime.encoded_pictures import EncodedPictures
from rekindle.runtime.storage import Log, Storage
from rekindle.runtime.storage_log import unavailable_line
from rekindle.runtime.storage_shares import RamShares

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
