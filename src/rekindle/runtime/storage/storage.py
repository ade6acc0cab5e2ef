"""Owns the store, the entries and the image cache of a runtime, handles tier events and upkeep."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
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
    BlocksFound,
    Tier,
    TierEvent,
    TierOpened,
    TierUnavailable,
    WriteFailed,
    Written,
)
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.protocol.admin import Stats
from rekindle.protocol.frames import LogLine
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.device.images import EncodedPictures, picture_key
from rekindle.runtime.model_process import PIECE_ENTRIES, Pieces

MIN_QUEUE_BYTES = 16 << 20
PICTURES_SHARE = 16  # encoded images take one of this many bytes of the RAM and disk budgets
MIN_ENTRIES_DISK_BYTES = 256 << 10

Log = Callable[[LogLine], None]
StorageEvent = TierEvent | PictureRead


@dataclass(frozen=True, slots=True, kw_only=True)
class RamShares:
    """How the RAM budget of a model is divided."""

    blocks_bytes: int
    queue_bytes: int  # blocks that wait to be written
    fetch_bytes: int  # blocks that are being read or wait to be restored
    pictures_bytes: int
    entries_bytes: int  # in addition to the budget, which is for state

    @classmethod
    def of(cls, ram_bytes: int, capabilities: Capabilities, *, has_disk: bool) -> RamShares:
        """Queue and fetches take up to an eighth of the budget each: 128 MiB or 8 blocks, and
        256 MiB or 16 blocks."""
        block_bytes = capabilities.kv_layout.cells_bytes(capabilities.block_tokens)
        queue_bytes = max(MIN_QUEUE_BYTES, ram_bytes // 8)
        queue_bytes = min(max(128 << 20, 8 * block_bytes), queue_bytes)
        fetch_bytes = min(max(256 << 20, 16 * block_bytes), ram_bytes // 8)
        if not has_disk:
            queue_bytes = fetch_bytes = 0
        pictures_bytes = ram_bytes // PICTURES_SHARE if capabilities.sees else 0
        return cls(
            blocks_bytes=max(ram_bytes - queue_bytes - fetch_bytes - pictures_bytes, 0),
            queue_bytes=queue_bytes,
            fetch_bytes=fetch_bytes,
            pictures_bytes=pictures_bytes,
            entries_bytes=max(ram_bytes // 8, 16 << 20),
        )


@dataclass(eq=False)
class Storage:
    """Owned by the engine's thread, which passes it the events of the tiers' threads."""

    settings: RuntimeSettings
    store: Store
    entries: Entries
    clock: Clock
    _: KW_ONLY
    secret: bytes
    log: Log
    pictures: EncodedPictures
    disk: DiskTier | None = None
    no_disk_reason: str = "off"
    gives_way: bool = True  # the engine computes on the cores that writing uses
    #: The estimator for idle state in the engine's memory.
    device_estimator: HitDensity = field(default_factory=HitDensity, init=False)

    def __post_init__(self) -> None:
        disk, store, entries = self.disk, self.store, self.entries
        self._entries_bytes = entries.budget.limit_bytes
        self._ticks = 0
        self._chunks = 0  # of blocks that were loaded from the folder
        if disk and not disk.is_open:
            self.no_disk_reason = "opening"
        else:
            if disk:  # before the blocks, because an entry says which tenant owns a namespace
                entries.load(disk.folder.index_db.entries())
                self._attach_pictures(disk.folder)
            store.load()
            entries.settle()
            for _ in self._finish_loading():
                pass
            if disk:
                self._load_policy_state(disk.folder)
        self._logged_states = {tier.name: tier.state for tier in store.tiers}

    @property
    def is_settled(self) -> bool:
        """Whether the folder is loaded, or known to be unavailable for now."""
        return self.no_disk_reason != "opening" or (self.disk is not None and self.disk.is_open)

    @property
    def is_on_disk(self) -> bool:
        """Whether there is a folder, even if it is still being loaded."""
        is_open = self.disk is not None and self.disk.is_open
        return is_open or self.no_disk_reason == "opening"

    @property
    def conversations(self) -> int | None:
        """The number of remembered conversations; None while the folder is being loaded."""
        return len(self.entries) if self.is_settled else None

    def on_event(self, event: StorageEvent) -> Pieces[None] | None:
        """Handle an event of a tier. Logs once when a tier starts or stops failing. Returns work
        that remains to be done between steps."""
        if isinstance(event, PictureRead):
            self.pictures.on_read(event)
            return None
        self.store.on_event(event)
        match event:
            case TierUnavailable(_, state, reason):
                if state != self.no_disk_reason:
                    self.no_disk_reason = state
                    self.log(unavailable_line(self.settings.cache_dir, state, reason))
            case TierOpened():
                self._on_opened()
            case BlocksFound(is_all=is_all):
                self._on_blocks_found(is_all=is_all)
                return self._finish_loading() if is_all else None
            case Written() | WriteFailed():  # only a write shows whether a tier works
                tier = next(each for each in self.store.tiers if each.name == event.tier)
                if tier.state != self._logged_states[tier.name]:
                    self._logged_states[tier.name] = tier.state
                    self.log(state_line(tier, getattr(event, "reason", "")))
        return None

    def _on_opened(self) -> None:
        """Load the entries of the folder. Its blocks follow."""
        assert self.disk is not None
        assert self.disk.opening is not None
        folder = self.disk.opening.folder
        assert folder is not None
        if self.no_disk_reason != "opening":
            self.log(LogLine("info", "the disk cache can be used now"))
        self.no_disk_reason = "opening"
        for line in opened_lines(folder):
            self.log(line)
        disk_bytes = max(folder.limit_bytes // 64, MIN_ENTRIES_DISK_BYTES)
        entries_bytes = min(self._entries_bytes, disk_bytes)
        self.entries.budget.limit_bytes = entries_bytes
        self.disk.attach(folder, entries_bytes, self._attach_pictures(folder))
        self.entries.load(self.disk.opening.entries)

    def _attach_pictures(self, folder: Folder) -> int:
        """Store encoded images in the folder too. Returns their share of its limit."""
        limit_bytes = folder.limit_bytes // PICTURES_SHARE
        try:
            is_open = self.pictures.attach(folder.path, limit_bytes)
        except OSError as error:
            self.log(LogLine("warning", f"encoded images are kept in memory only: {error}"))
            return 0
        return limit_bytes if is_open else 0

    def _on_blocks_found(self, *, is_all: bool) -> None:
        assert self.disk is not None
        assert self.disk.opening is not None
        self.disk.opening.acknowledge()
        self._chunks += 1
        if is_all or self._chunks % 8 == 0:
            gc.freeze()  # otherwise each collection walks all blocks: a second per million
        if is_all:
            self.entries.settle()
            self.disk.begin()
            self.store.join(self.disk)
            self._load_policy_state(self.disk.folder)  # last, because loading blocks counts as uses

    def _finish_loading(self) -> Pieces[None]:
        """Adopt state that no entry uses, and remove the files of images that no entry has."""
        for number, _ in enumerate(self.entries.adopt(), start=1):
            if number % PIECE_ENTRIES == 0:
                yield
        if self.pictures.files is not None:
            shown = tuple(self.entries.index.pictures)
            self.pictures.files.retain(picture_key(*each) for each in shown)

    def drop_pictures(self, tenant: bytes, digests: Iterable[bytes]) -> None:
        """Free the vectors of images that no entry of the tenant has."""
        for digest in digests:
            if (tenant, digest) not in self.entries.index.pictures:
                self.pictures.drop(picture_key(tenant, digest))

    def _load_policy_state(self, folder: Folder) -> None:
        """Continue with what eviction learned in the previous process."""
        for name, estimator in self._estimators.items():
            if name in folder.policy_state:
                try:
                    estimator.load(folder.policy_state[name])
                except ValueError as error:
                    line = f"eviction in {name} starts learning again: {error}"
                    self.log(LogLine("warning", line))

    def _back_up(self, disk: DiskTier) -> None:
        disk.back_up({name: estimator.dump() for name, estimator in self._estimators.items()})

    @property
    def _estimators(self) -> dict[str, HitDensity]:
        tiers = {tier.name: tier.budget.estimator for tier in self.store.tiers}
        return {DEVICE: self.device_estimator} | tiers

    def give_way(self, busy: bool) -> None:
        """Called around every step. On a CPU, writing would slow down the turns."""
        if self.gives_way and self.disk:
            self.disk.give_way(busy)

    def upkeep(self) -> Pieces[None]:
        """Once a minute: delete expired entries, retry failed tiers, back up the index if due."""
        for number, (_, freed_bytes) in enumerate(self.entries.expire_due(), start=1):
            if freed_bytes is not None or number % PIECE_ENTRIES == 0:
                yield
        self.store.retry()
        self._ticks += 1
        if self.disk and (self._ticks % 10 == 0 or self.disk.lacks_backup):
            self._back_up(self.disk)

    def held_bytes(self, tenant: bytes | None) -> tuple[int, int]:
        """RAM and disk bytes of a tenant, or of all tenants."""
        held = self.store.tiers.held_bytes(tenant)
        return held.get("ram", 0), held.get("disk", 0)

    @property
    def disk_state(self) -> str:
        """The state of the disk tier, as in `Stats`. Any thread may ask."""
        if self.disk is None or not self.disk.is_open:
            return self.no_disk_reason
        return self.disk.state if self.store.fetches.answers(self.disk) else "hung"

    def add_totals(self, stats: Stats) -> None:
        """Add the figures of the whole runtime, for an admin."""
        stats.ram_limit_bytes = self.store.tiers[0].budget.limit_bytes
        stats.disk_state = self.disk_state
        if (disk := self.disk) and disk.is_open:
            stats.disk_limit_bytes = disk.budget.limit_bytes
            stats.disk_queued_bytes = disk.pending_bytes
            stats.disk_written_bytes = disk.counts.written_bytes
            stats.disk_read_bytes = disk.counts.read_bytes
            stats.corrupt_blocks = disk.counts.corrupt_blocks
        pictures = self.pictures
        stats.encoded_pictures = pictures.counts.encoded
        stats.picture_hits = pictures.counts.hits
        stats.picture_ram_bytes = pictures.used_bytes
        stats.picture_disk_bytes = pictures.files.used_bytes if pictures.files else 0

    def close(self) -> None:
        """Write all state that may be written, and close the tiers."""
        self.store.retry()
        self.store.write_back.write_everything()
        pending_bytes = sum(tier.pending_bytes for tier in self.store.tiers)
        if pending_bytes > 64 << 20:
            self.log(LogLine("info", f"writing {pending_bytes // 10**6} MB of state to disk"))
        if self.disk:
            self._back_up(self.disk)
        self.pictures.close()  # before another process can lock the folder
        for tier in self.store.tiers:
            tier.close()


def unavailable_line(cache_dir: Path, state: str, reason: str) -> LogLine:
    if state == "locked":
        return LogLine("warning", f"{reason} State is kept in RAM only until the folder is free")
    return LogLine(
        "warning",
        f"the disk cache in {cache_dir} cannot be used ({reason}): state is kept in RAM only and "
        "is lost at a restart; fix the folder, or choose another one with --cache-dir",
    )


def opened_lines(folder: Folder) -> list[LogLine]:
    """What an operator should know about a folder that was opened."""
    lines: list[LogLine] = []
    found = folder.recovery
    if found.set_aside is not None:
        source = "its backup is used" if found.restored_from_backup else "names and pins are lost"
        text = (
            f"the index of the disk cache cannot be used ({found.damage}): it was moved to "
            f"{found.set_aside}, {source}, and blocks were indexed again: {found.adopted}, "
            f"lost: {found.lost}, quarantined: {found.quarantined}"
        )
        lines.append(LogLine("warning", text))
    elif found.rebuilt or found.lost or found.quarantined:
        text = (
            f"the disk cache needed repair: index rebuilt: {found.rebuilt}, blocks lost: "
            f"{found.lost}, quarantined: {found.quarantined}, found again: {found.adopted}"
        )
        lines.append(LogLine("warning", text))
    if folder.superseded_bytes:
        text = (
            f"{folder.superseded_bytes / 1e6:.1f} MB of this model's state come from another "
            "build of the engine, other engine settings or another secret: they are not used, "
            "and are removed when space is needed"
        )
        lines.append(LogLine("info", text))
    return lines


def state_line(tier: Tier, reason: str) -> LogLine:
    """A tier has started or stopped failing."""
    match tier.state:
        case "full":
            text = f"the {tier.name} is full ({reason}): the {tier.name} cache shrinks"
        case "failing":
            text = f"writing to the {tier.name} cache failed ({reason}): state is kept in RAM"
        case _:
            return LogLine("info", f"the {tier.name} cache works again")
    return LogLine("warning", f"{text}, and requests are served as before")


def reads_line(tier: Tier, answers: bool) -> LogLine:
    """A tier has stopped answering reads, or answers again."""
    if answers:
        return LogLine("info", f"the {tier.name} cache answers reads again")
    return LogLine(
        "warning",
        f"the {tier.name} does not answer reads: state that is only there is computed again until "
        "it does",
    )
