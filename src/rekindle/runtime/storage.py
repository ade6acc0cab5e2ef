"""What a runtime remembers, opened and closed: store, entries, and the tiers below them."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rekindle.engine.base import Abilities
from rekindle.errors import FolderLocked, RekindleError
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.disk.folder import Folder, open_folder
from rekindle.kvcache.disk.secret import read_secret, read_secret_file
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import OnEvent, Tier, TierEvent, Written
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import LoadModel

SECRET_BYTES = 32
MOST_QUEUE_BYTES = 128 << 20  # blocks that wait to be written
LEAST_QUEUE_BYTES = 16 << 20
QUEUE_SHARE = 8  # of the RAM budget, what they may take at most
ENTRIES_SHARE = 8  # of it, what entries may take
LEAST_ENTRIES_BYTES = 16 << 20
ENTRIES_DISK_SHARE = 64  # of the disk budget, what they may take of the index
LEAST_ENTRIES_DISK_BYTES = 256 << 10
WORTH_A_WORD_BYTES = 64 << 20  # a stop that writes more than this says so
BACKUP_TICKS = 10  # ticks between two copies of the index

Log = Callable[[LogLine], None]


@dataclass(frozen=True, slots=True)
class _Budgets:
    """The memory that was granted, shared out."""

    ram_bytes: int
    queue_bytes: int  # blocks that wait to be written
    entries_bytes: int

    @classmethod
    def of(cls, load: LoadModel, folder: Folder | None) -> _Budgets:
        share = max(LEAST_QUEUE_BYTES, load.ram_bytes // QUEUE_SHARE)
        queue_bytes = min(MOST_QUEUE_BYTES, share) if folder else 0
        entries_bytes = max(load.ram_bytes // ENTRIES_SHARE, LEAST_ENTRIES_BYTES)
        if folder:
            most = max(folder.limit_bytes // ENTRIES_DISK_SHARE, LEAST_ENTRIES_DISK_BYTES)
            entries_bytes = min(entries_bytes, most)
        return cls(max(load.ram_bytes - queue_bytes, 0), queue_bytes, entries_bytes)


def _open_disk(folder: Folder, load: LoadModel, budgets: _Budgets, on_event: OnEvent) -> DiskTier:
    return DiskTier(
        folder,
        on_event,
        floor_bytes=load.disk_floor_bytes,
        queue_bytes=budgets.queue_bytes,
        entries_bytes=budgets.entries_bytes,
    )


class Memory:
    """Owned by the engine's thread; `on_event` brings it what other threads report."""

    def __init__(
        self,
        load: LoadModel,
        abilities: Abilities,
        on_event: OnEvent,
        log: Log,
        *,
        polite: bool = True,
    ) -> None:
        self._log = log
        self._polite = polite  # the engine computes on the cores that writing takes, too
        self._ticks = 0
        self.clock = Clock()
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.trouble = "off"  # why there is no disk tier
        folder = self._open_folder(load, abilities) if load.disk_bytes else None
        budgets = _Budgets.of(load, folder)
        self.disk = _open_disk(folder, load, budgets, on_event) if folder else None
        tiers: list[Tier] = [RamTier(budgets.ram_bytes)]  # the fastest first
        tiers += [self.disk] if self.disk else []
        self.store = Store(block_tokens=abilities.block_tokens, tiers=tiers)
        journal = self.disk.journal if self.disk else None
        self.entries = Entries(self.store, self.clock, journal, limit_bytes=budgets.entries_bytes)
        entries = folder.index_db.entries() if folder else []
        self.store.load()  # from here on the writer uses the index
        self.entries.load(entries)
        self._states = {tier.name: tier.state for tier in tiers}  # as far as it was logged

    def _open_folder(self, load: LoadModel, abilities: Abilities) -> Folder | None:
        """The folder of this model's state; without one there is RAM, and a warning."""
        cache_dir, secret_file = Path(load.cache_dir), load.cache_secret_file
        identity = abilities.fingerprint + abilities.block_tokens.to_bytes(4, "big")
        try:
            secret = read_secret_file(Path(secret_file)) if secret_file else None
            self.secret = read_secret(cache_dir, secret)
            others = [path for path in load.served if path != load.path]
            folder = open_folder(
                cache_dir,
                identity,
                limit_bytes=load.disk_bytes,
                served=[load.path, *others],
                secret=secret,
            )
        except FolderLocked as error:
            self.trouble = "locked"
            self._warn(f"{error}; this model's state is kept in RAM only")
        except (OSError, sqlite3.Error, RekindleError) as error:
            self.trouble = "failing"
            self._warn(
                f"the disk cache in {cache_dir} cannot be used ({_why(error)}): state is kept in "
                "RAM only and is lost at a restart; mend it, or choose another with --cache-dir"
            )
        else:
            self._report(folder)
            return folder
        return None

    def _report(self, folder: Folder) -> None:
        found = folder.recovery
        if found.rebuilt or found.lost or found.quarantined:
            self._warn(
                f"the disk cache needed repair: index rebuilt: {found.rebuilt}, blocks lost: "
                f"{found.lost}, quarantined: {found.quarantined}, found again: {found.adopted}"
            )

    def _warn(self, text: str) -> None:
        self._log(LogLine("warning", text))

    def on_event(self, event: TierEvent) -> None:
        """Take in what a tier did; log it once when one starts or stops failing."""
        self.store.on_event(event)
        for tier in self.store.tiers:
            is_tried = tier.state != "ok" or isinstance(event, Written)
            if tier.state != self._states[tier.name] and is_tried:
                # A tier works when it has been written to, not when it is tried again.
                self._states[tier.name] = tier.state
                self._log_state(tier, getattr(event, "reason", ""))

    def _log_state(self, tier: Tier, why: str) -> None:
        name = tier.name
        if tier.state == "full":
            self._warn(f"the {name} is full ({why}): the {name} cache gives way, requests go on")
        elif tier.state == "failing":
            self._warn(
                f"writing to the {name} cache failed ({why}): state is kept in RAM meanwhile"
            )
        else:
            self._log(LogLine("info", f"the {name} cache works again"))

    def give_way(self, busy: bool) -> None:
        """Called around every step: on a CPU, writing would slow down the turn that comes next."""
        if self._polite and self.disk:
            self.disk.give_way(busy)

    def tick(self) -> None:
        """Once a minute: what has expired goes, a tier that failed is tried again."""
        self.entries.collect()
        self.store.retry()
        self._ticks += 1
        if self.disk and self._ticks % BACKUP_TICKS == 0:
            self.disk.back_up()

    def close(self) -> None:
        """Write what there is to write, and let go of the tiers."""
        self.store.retry()
        self.store.write_everything()
        pending_bytes = sum(tier.pending_bytes for tier in self.store.tiers)
        if pending_bytes > WORTH_A_WORD_BYTES:
            self._log(LogLine("info", f"writing {pending_bytes // 10**6} MB of state to disk"))
        for tier in self.store.tiers:
            tier.close()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
