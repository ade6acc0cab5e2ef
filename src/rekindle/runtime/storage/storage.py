"""What a runtime remembers: the store over its tiers, the entries, and their upkeep."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rekindle.engine.base import Capabilities
from rekindle.kvcache.disk.folder import Folder
from rekindle.kvcache.disk.image_files import PictureRead
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Clock
from rekindle.kvcache.eviction.hit_density import HitDensity
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import (
    DEVICE,
    Found,
    Opened,
    Tier,
    TierEvent,
    Unavailable,
    WriteFailed,
    Written,
)
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.protocol.admin import Stats
from rekindle.protocol.frames import LogLine
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.background import PIECE_ENTRIES, Pieces
from rekindle.runtime.device.images import EncodedPictures

# ----------------------------------------------------------------------
# What the log says about the cache: one line for each change of its state.


def unavailable_line(cache_dir: Path, state: str, reason: str) -> LogLine:
    """Why there is RAM only for now."""
    if state == "locked":
        return LogLine("warning", f"{reason} State is kept in RAM only until it is free")
    return LogLine(
        "warning",
        f"the disk cache in {cache_dir} cannot be used ({reason}): state is kept in RAM only and "
        "is lost at a restart; mend it, or choose another with --cache-dir",
    )


def opened_lines(folder: Folder) -> list[LogLine]:
    """What was found in a folder that is worth saying."""
    return [line for line in (_repair_line(folder), _superseded_line(folder)) if line]


def _repair_line(folder: Folder) -> LogLine | None:
    found = folder.recovery
    if not (found.rebuilt or found.lost or found.quarantined):
        return None
    return LogLine(
        "warning",
        f"the disk cache needed repair: index rebuilt: {found.rebuilt}, blocks lost: {found.lost}, "
        f"quarantined: {found.quarantined}, found again: {found.adopted}",
    )


def _superseded_line(folder: Folder) -> LogLine | None:
    if not folder.superseded_bytes:
        return None
    return LogLine(
        "info",
        f"{folder.superseded_bytes / 1e6:.1f} MB of this model's state come from another build of "
        "the engine, other engine settings or another secret: they are not used, and give way when "
        "room is needed",
    )


def state_line(tier: Tier, why: str) -> LogLine:
    """That a tier has begun or ceased to fail."""
    name = tier.name
    if tier.state == "full":
        text = f"the {name} is full ({why}): the {name} cache gives way, requests go on"
        return LogLine("warning", text)
    if tier.state == "failing":
        text = f"writing to the {name} cache failed ({why}): state is kept in RAM meanwhile"
        return LogLine("warning", text)
    return LogLine("info", f"the {name} cache works again")


def reads_line(tier: Tier, answers: bool) -> LogLine:
    if answers:
        return LogLine("info", f"the {tier.name} cache answers reads again")
    return LogLine(
        "warning",
        f"the {tier.name} does not answer reads: state that lies there alone is computed again "
        "until it does",
    )


# ----------------------------------------------------------------------
# How the RAM and the disk that a model's cache may take are divided among what it keeps.

MOST_QUEUE_BYTES = 128 << 20  # blocks that wait to be written
QUEUED_BLOCKS = 8  # but so many of them in any case
LEAST_QUEUE_BYTES = 16 << 20
QUEUE_SHARE = 8  # of the RAM budget, what they may take at most
MOST_FETCH_BYTES = 256 << 20  # blocks that are being read, or wait to be restored
FETCHED_BLOCKS = 16  # but so many of them in any case
FETCH_SHARE = 8  # of the RAM budget, what they may take at most
PICTURES_SHARE = 16  # of it, and of the disk budget, what encoded pictures may take
ENTRIES_SHARE = 8  # of it, what entries may take
LEAST_ENTRIES_BYTES = 16 << 20
ENTRIES_DISK_SHARE = 64  # of the disk budget, what they may take of the index
LEAST_ENTRIES_DISK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RamShares:
    blocks_bytes: int
    queue_bytes: int
    fetch_bytes: int
    pictures_bytes: int
    entries_bytes: int  # beside the budget: it is of state

    @classmethod
    def of(cls, ram_bytes: int, capabilities: Capabilities, *, has_disk: bool) -> RamShares:
        block_bytes = capabilities.kv_layout.cells_bytes(capabilities.block_tokens)
        queue_bytes = max(LEAST_QUEUE_BYTES, ram_bytes // QUEUE_SHARE)
        queue_bytes = min(max(MOST_QUEUE_BYTES, QUEUED_BLOCKS * block_bytes), queue_bytes)
        fetch_bytes = max(MOST_FETCH_BYTES, FETCHED_BLOCKS * block_bytes)
        fetch_bytes = min(fetch_bytes, ram_bytes // FETCH_SHARE)
        if not has_disk:
            queue_bytes = fetch_bytes = 0
        pictures_bytes = ram_bytes // PICTURES_SHARE if capabilities.sees else 0
        return cls(
            blocks_bytes=max(ram_bytes - queue_bytes - fetch_bytes - pictures_bytes, 0),
            queue_bytes=queue_bytes,
            fetch_bytes=fetch_bytes,
            pictures_bytes=pictures_bytes,
            entries_bytes=max(ram_bytes // ENTRIES_SHARE, LEAST_ENTRIES_BYTES),
        )


def index_bytes(disk_bytes: int) -> int:
    """What entries may take of the index on disk."""
    return max(disk_bytes // ENTRIES_DISK_SHARE, LEAST_ENTRIES_DISK_BYTES)


LOGGED_WRITE_BYTES = 64 << 20  # a stop that writes more than this says so
FROZEN_CHUNKS = 8  # of blocks: when so many are taken in, collections leave them out
BACKUP_TICKS = 10  # ticks between two copies of the index

Log = Callable[[LogLine], None]


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
        self.device_estimator = HitDensity()  # of idle state in the engine's memory
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
                self._load_policy_state(disk.folder)
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
        entries_bytes = min(self._entries_bytes, index_bytes(folder.limit_bytes))
        self.entries.budget.limit_bytes = entries_bytes
        self.disk.attach(folder, entries_bytes, self._attach_pictures(folder))
        self.entries.load(self.disk.opening.entries)

    def _attach_pictures(self, folder: Folder) -> int:
        """Keep encoded pictures in the folder, too; what they may take of it."""
        limit_bytes = folder.limit_bytes // PICTURES_SHARE
        try:
            is_open = self.pictures.attach(folder.path, limit_bytes)
        except OSError as error:
            self._log(LogLine("warning", f"encoded pictures are kept in memory alone: {error}"))
            return 0
        return limit_bytes if is_open else 0

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
            self._load_policy_state(
                self.disk.folder
            )  # what was found counts as used: it would fade before

    def _load_policy_state(self, folder: Folder) -> None:
        """Go on from what eviction had learnt when the folder was last used."""
        for name, estimator in self._estimators.items():
            if name in folder.policy_state:
                try:
                    estimator.load(folder.policy_state[name])
                except ValueError as error:
                    self._log(
                        LogLine("warning", f"eviction in {name} starts learning again: {error}")
                    )

    def _save_policy_state(self) -> None:
        if self.disk:
            self.disk.save_policy_state(
                {name: estimator.dump() for name, estimator in self._estimators.items()}
            )

    @property
    def _estimators(self) -> dict[str, HitDensity]:
        """What each tier learns from, by its name."""
        tiers = {tier.name: tier.budget.estimator for tier in self.store.tiers}
        return {DEVICE: self.device_estimator} | tiers

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
            self._save_policy_state()

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
        self.store.write_back.write_everything()
        pending_bytes = sum(tier.pending_bytes for tier in self.store.tiers)
        if pending_bytes > LOGGED_WRITE_BYTES:
            self._log(LogLine("info", f"writing {pending_bytes // 10**6} MB of state to disk"))
        self._save_policy_state()
        self.pictures.close()  # before the folder is anybody's again
        for tier in self.store.tiers:
            tier.close()
