"""What a runtime remembers: the store over its tiers, the entries, and their upkeep."""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rekindle.buffers import Allocate, plain_memory
from rekindle.engine.base import Capabilities
from rekindle.errors import RekindleError
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.disk.picture_files import PictureFiles, PictureRead
from rekindle.kvcache.disk.secret import read_secret, read_secret_file
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.entry import Clock
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import (
    Found,
    OnEvent,
    Opened,
    Tier,
    TierEvent,
    Unavailable,
    WriteFailed,
    Written,
)
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.admin import Stats
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings, usable_cores
from rekindle.runtime.background import PIECE_ENTRIES, Pieces
from rekindle.runtime.budgets import Budgets
from rekindle.runtime.encoded_pictures import EncodedPictures
from rekindle.runtime.storage_log import opened_lines, reads_line, state_line, unavailable_line

SECRET_BYTES = 32
MOST_QUEUE_BYTES = 128 << 20  # blocks that wait to be written
QUEUED_BLOCKS = 8  # but so many of them in any case
LEAST_QUEUE_BYTES = 16 << 20
QUEUE_SHARE = 8  # of the RAM budget, what they may take at most
MOST_FETCH_BYTES = 256 << 20  # blocks that are being read, or wait to be restored
FETCHED_BLOCKS = 16  # but so many of them in any case
LEAST_READERS, MOST_READERS = 2, 16  # that read them
FETCH_SHARE = 8  # of the RAM budget, what they may take at most
PICTURES_SHARE = 16  # of it, and of the disk budget, what encoded pictures may take
ENTRIES_SHARE = 8  # of it, what entries may take
LEAST_ENTRIES_BYTES = 16 << 20
ENTRIES_DISK_SHARE = 64  # of the disk budget, what they may take of the index
LEAST_ENTRIES_DISK_BYTES = 256 << 10
LIKELY = 0.2  # that a block is used again, for it to be written when it leaves RAM
LOGGED_WRITE_BYTES = 64 << 20  # a stop that writes more than this says so
FROZEN_CHUNKS = 8  # of blocks: when so many are taken in, collections leave them out
BACKUP_TICKS = 10  # ticks between two copies of the index

Log = Callable[[LogLine], None]


class OpenPictures(Protocol):
    """Opens the files of encoded pictures in a model's folder; raises OSError."""

    def __call__(self, folder: Path, /, *, limit_bytes: int) -> PictureFiles: ...


class Storage:
    """Owned by the engine's thread; `on_event` brings it what the tiers' threads report."""

    def __init__(
        self,
        settings: RuntimeSettings,
        store: Store,
        entries: Entries,
        clock: Clock,
        *,
        secret: bytes,
        log: Log,
        pictures: EncodedPictures,
        open_pictures: OpenPictures | None = None,
        disk: DiskTier | None = None,
        no_disk_reason: str = "off",
        gives_way: bool = True,
    ) -> None:
        self.settings = settings
        self.store = store
        self.entries = entries
        self.clock = clock
        self.secret = secret
        self.pictures = pictures
        self._open_pictures = open_pictures  # None: the model sees none
        self.disk = disk
        self._no_disk_reason = no_disk_reason
        self._log = log
        self._gives_way = gives_way  # the engine computes on the cores that writing takes, too
        self._entries_bytes = entries.budget.limit_bytes  # whatever the index has room for
        self._ticks = 0
        self._chunks = 0  # of blocks, that were found in the folder
        if disk and not disk.is_open:
            self._no_disk_reason = "opening"
        else:
            if disk:  # first: an entry says whose the blocks of its namespace are
                entries.load(disk.folder.index_db.entries())
                self._attach_pictures(disk.folder)
            store.load()
            entries.settle()
            if disk:
                self._learn(disk.folder)
        self._logged_states = {tier.name: tier.state for tier in store.tiers}
        store.fetches.on_change = self._log_reads

    def on_event(self, event: TierEvent) -> None:
        """Take in what a tier did; log it once when one starts or stops failing."""
        if isinstance(event, PictureRead):
            self.pictures.on_read(event)
            return
        self.store.on_event(event)
        match event:
            case Unavailable(_, state, reason):
                self._log_unavailable(state, reason)
            case Opened():
                self._attach()
            case Found(is_all=is_all):
                self._take_found(is_all=is_all)
        if not isinstance(event, Written | WriteFailed):
            return  # a tier works when it has been written to, not when it is tried again
        tier = next(each for each in self.store.tiers if each.name == event.tier)
        if tier.state != self._logged_states[tier.name]:
            self._logged_states[tier.name] = tier.state
            self._log(state_line(tier, getattr(event, "reason", "")))

    @property
    def is_settled(self) -> bool:
        """Whether the folder is read, or known to be out of reach for now."""
        return self._no_disk_reason != "opening" or (self.disk is not None and self.disk.is_open)

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a folder, be it that it is still being read."""
        is_open = self.disk is not None and self.disk.is_open
        return is_open or self._no_disk_reason == "opening"

    @property
    def conversations(self) -> int | None:
        """How many are remembered; None: the folder is still being read."""
        return len(self.entries) if self.is_settled else None

    def _log_unavailable(self, state: str, reason: str) -> None:
        if state == self._no_disk_reason:
            return
        self._no_disk_reason = state
        self._log(unavailable_line(self.settings.cache_dir, state, reason))

    def _attach(self) -> None:
        """The folder is ours: what was remembered is known at once, its blocks as they are read."""
        assert self.disk is not None
        assert self.disk.opening is not None
        folder = self.disk.opening.folder
        assert folder is not None
        if self._no_disk_reason != "opening":
            self._log(LogLine("info", "the disk cache can be used now"))
        self._no_disk_reason = "opening"
        for line in opened_lines(folder):
            self._log(line)
        index_bytes = max(folder.limit_bytes // ENTRIES_DISK_SHARE, LEAST_ENTRIES_DISK_BYTES)
        self.entries.budget.limit_bytes = min(self._entries_bytes, index_bytes)
        self.disk.attach(folder, self.entries.budget.limit_bytes, self._attach_pictures(folder))
        self.entries.load(self.disk.opening.entries)

    def _attach_pictures(self, folder: Folder) -> int:
        """Keep encoded pictures in the folder, too; what they may take of it."""
        if self._open_pictures is None:
            return 0
        limit_bytes = folder.limit_bytes // PICTURES_SHARE
        try:
            self.pictures.files = self._open_pictures(folder.path, limit_bytes=limit_bytes)
        except OSError as error:
            self._log(LogLine("warning", f"encoded pictures are kept in memory alone: {error}"))
            return 0
        return limit_bytes

    def _take_found(self, *, is_all: bool) -> None:
        assert self.disk is not None
        assert self.disk.opening is not None
        self.disk.opening.take()
        self._chunks += 1
        if is_all or not self._chunks % FROZEN_CHUNKS:
            gc.freeze()  # or collections would walk over all the blocks, for a second a million
        if is_all:
            self.entries.settle()
            self.disk.begin()
            self.store.join(self.disk)
            self._learn(self.disk.folder)  # what was found counts as used: it would fade before

    def _learn(self, folder: Folder) -> None:
        """Go on from what eviction had learnt when the folder was last used."""
        for tier in self.store.tiers:
            if tier.name in folder.learnt:
                try:
                    tier.budget.learn(folder.learnt[tier.name])
                except ValueError as error:
                    self._log(LogLine("warning", f"eviction in {tier.name} learns anew: {error}"))

    def _keep_learnt(self) -> None:
        if self.disk:
            self.disk.keep_learnt({tier.name: tier.budget.learnt() for tier in self.store.tiers})

    def _log_reads(self, tier: Tier, answers: bool) -> None:
        self._log(reads_line(tier, answers))

    def give_way(self, busy: bool) -> None:
        """Called around every step: on a CPU, writing would slow down the turn that comes next."""
        if self._gives_way and self.disk:
            self.disk.give_way(busy)

    def tick(self) -> None:
        """All of the upkeep at once."""
        for _ in self.upkeep():
            pass

    def upkeep(self) -> Pieces[None]:
        """Once a minute: what has expired goes, a tier that failed is tried again."""
        for number, entry in enumerate(self.entries.index.of(None), start=1):
            if entry.place:  # else it has gone meanwhile
                self.entries.expire(entry)
            if number % PIECE_ENTRIES == 0:
                yield
        self.store.retry()
        self._ticks += 1
        if self.disk and self._ticks % BACKUP_TICKS == 0:
            self.disk.back_up()
            self._keep_learnt()

    def held_bytes(self, namespace: bytes | None) -> tuple[int, int]:
        """What a tenant, or all of them together, hold of RAM and of the disk."""
        held = self.store.tiers.held_bytes(namespace)
        return held.get("ram", 0), held.get("disk", 0)

    def add_totals(self, stats: Stats) -> None:
        """Figures of the whole runtime, for an admin."""
        stats.ram_limit_bytes = self.store.tiers[0].budget.limit_bytes
        stats.disk_state = self._no_disk_reason
        if (disk := self.disk) and disk.is_open:
            stats.disk_limit_bytes = disk.budget.limit_bytes
            stats.disk_state = disk.state if self.store.fetches.answers(disk) else "hung"
            stats.disk_queued_bytes = disk.pending_bytes
            stats.disk_written_bytes = disk.counts.written_bytes
            stats.disk_read_bytes = disk.counts.read_bytes
            stats.corrupt_blocks = disk.counts.corrupt_blocks
        self._add_pictures(stats)

    def _add_pictures(self, stats: Stats) -> None:
        pictures = self.pictures
        stats.encoded_pictures = pictures.counts.encoded
        stats.picture_hits = pictures.counts.hits
        stats.picture_ram_bytes = pictures.used_bytes
        stats.picture_disk_bytes = pictures.files.used_bytes if pictures.files else 0

    def close(self) -> None:
        """Write what there is to write, and let go of the tiers."""
        self.store.retry()
        self.store.write_everything()
        pending_bytes = sum(tier.pending_bytes for tier in self.store.tiers)
        if pending_bytes > LOGGED_WRITE_BYTES:
            self._log(LogLine("info", f"writing {pending_bytes // 10**6} MB of state to disk"))
        self._keep_learnt()
        self.pictures.close()  # before the folder is anybody's again
        for tier in self.store.tiers:
            tier.close()


def open_storage(
    load: LoadModel,
    budgets: Budgets,
    capabilities: Capabilities,
    on_event: OnEvent,
    log: Log,
    allocate: Allocate = plain_memory,
) -> Storage:
    """RAM, and the model's cache folder below it if there can be one; blocks are read into memory
    that is allocated so."""
    settings, clock = load.settings, Clock()
    found = _find_disk(load, budgets.disk_bytes, capabilities, log)
    block_bytes = capabilities.kv_layout.cells_bytes(capabilities.block_tokens)
    queue_bytes = max(LEAST_QUEUE_BYTES, budgets.ram_bytes // QUEUE_SHARE)
    queue_bytes = min(max(MOST_QUEUE_BYTES, QUEUED_BLOCKS * block_bytes), queue_bytes)
    fetch_bytes = max(MOST_FETCH_BYTES, FETCHED_BLOCKS * block_bytes)
    fetch_bytes = min(fetch_bytes, budgets.ram_bytes // FETCH_SHARE)
    if found.open is None:
        queue_bytes = fetch_bytes = 0
    disk = None
    if found.open is not None:
        floor_bytes = settings.disk_floor
        disk = DiskTier(
            found.open,
            on_event,
            floor_bytes=floor_bytes,
            queue_bytes=queue_bytes,
            eviction=settings.cache_eviction,
            allocate=allocate,
            readers=_readers(capabilities),
        )
    pictures_bytes = budgets.ram_bytes // PICTURES_SHARE if capabilities.sees else 0
    ram_bytes = budgets.ram_bytes - queue_bytes - fetch_bytes - pictures_bytes
    tiers: list[Tier] = [RamTier(max(ram_bytes, 0), settings.cache_eviction)]
    tiers += [disk] if disk else []  # a further tier below goes here
    store = Store(
        block_tokens=capabilities.block_tokens,
        tiers=tiers,
        fetch_bytes=fetch_bytes,
        least_chance=LIKELY if settings.cache_write == "likely" else 0.0,
    )
    journal = disk.journal if disk else None
    entries_bytes = max(budgets.ram_bytes // ENTRIES_SHARE, LEAST_ENTRIES_BYTES)
    floor_bytes = settings.disk_floor
    open_pictures = partial(
        PictureFiles, secret=found.secret, on_read=on_event, floor_bytes=floor_bytes
    )
    return Storage(
        settings,
        store,
        Entries(store, clock, journal, limit_bytes=entries_bytes),
        clock,
        secret=found.secret,
        log=log,
        pictures=EncodedPictures(pictures_bytes, clock.steady_s),
        open_pictures=open_pictures if capabilities.sees else None,
        disk=disk,
        no_disk_reason=found.no_disk_reason,
        gives_way=capabilities.device == "cpu",
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
