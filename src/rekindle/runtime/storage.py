"""What a runtime remembers, opened, tended and closed: store, entries, and the disk below them."""

from __future__ import annotations

import secrets
import sqlite3
from collections.abc import Callable

from rekindle.engine.base import Capabilities
from rekindle.errors import FolderLocked, RekindleError
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.disk.folder import Folder, open_folder, read_secret
from rekindle.kvcache.disk.writer import Written
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.disk import DiskTier, News
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

Tell = Callable[[News], None]
Log = Callable[[LogLine], None]


class Memory:
    """Owned by the engine's thread; `tell` brings it the disk's news from others."""

    def __init__(
        self,
        load: LoadModel,
        capabilities: Capabilities,
        tell: Tell,
        log: Log,
        *,
        polite: bool = True,
    ) -> None:
        settings = load.settings
        self._log = log
        self._polite = polite  # the engine computes on the cores that writing takes, too
        self._ticks = 0
        self.clock = Clock()
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self.trouble = "off"  # why there is no disk tier
        folder = self._open_folder(load, abilities) if settings.disk_cache else None
        share = max(LEAST_QUEUE_BYTES, settings.ram_cache // QUEUE_SHARE)
        queue = min(MOST_QUEUE_BYTES, share) if folder else 0
        entries_bytes = max(settings.ram_cache // ENTRIES_SHARE, LEAST_ENTRIES_BYTES)
        if folder:
            most = max(folder.limit_bytes // ENTRIES_DISK_SHARE, LEAST_ENTRIES_DISK_BYTES)
            entries_bytes = min(entries_bytes, most)
        disk = (
            DiskTier(
                folder,
                tell,
                floor_bytes=settings.disk_floor,
                queue_bytes=queue,
                entries_bytes=entries_bytes,
            )
            if folder
            else None
        )
        self.store = Store(
            block_tokens=abilities.block_tokens,
            ram_bytes=max(settings.ram_cache - queue, 0),
            disk=disk,
        )
        self.entries = Entries(
            self.store,
            self.clock,
            disk.journal if disk else None,
            limit_bytes=entries_bytes,
        )
        if folder:
            blocks, entries = folder.ledger.blocks(), folder.ledger.entries()
            self.store.load(blocks)  # from here on the writer uses the ledger
            self.entries.load(entries)
        self._disk_state = "ok"

    def _open_folder(self, load: LoadModel, capabilities: Capabilities) -> Folder | None:
        """The folder of this model's state; without one there is RAM, and a warning."""
        settings, cache_dir = load.settings, load.settings.cache_dir
        identity = abilities.fingerprint + abilities.block_tokens.to_bytes(4, "big")
        try:
            self.secret = read_secret(cache_dir)
            others = [path for path in load.served if path != load.path]
            folder = open_folder(
                cache_dir,
                identity,
                limit_bytes=settings.disk_cache,
                served=[load.path, *others],
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
        if found.rebuilt or found.lost or found.aside:
            self._warn(
                f"the disk cache needed repair: index rebuilt: {found.rebuilt}, blocks lost: "
                f"{found.lost}, set aside: {found.aside}, found again: {found.adopted}"
            )

    def _warn(self, text: str) -> None:
        self._log(LogLine("warning", text))

    def hear(self, news: News) -> None:
        """Take in what the disk did; say so once when it starts or stops failing."""
        self.store.hear(news)
        disk = self.store.disk
        assert disk is not None
        if disk.state == self._disk_state or (disk.state == "ok" and not isinstance(news, Written)):
            return  # a disk is well when it has been written to, not when it is tried again
        self._disk_state = disk.state
        why = getattr(news, "why", "")
        if disk.state == "full":
            self._warn(f"the disk is full ({why}): the disk cache gives way, requests go on")
        elif disk.state == "failing":
            self._warn(f"writing to the disk cache failed ({why}): state is kept in RAM meanwhile")
        else:
            self._log(LogLine("info", "the disk cache works again"))

    def give_way(self, busy: bool) -> None:
        """Called around every step: on a CPU, writing would slow down the turn that comes next."""
        if self._polite and self.store.disk:
            self.store.disk.give_way(busy)

    def tick(self) -> None:
        """Once a minute: what has expired goes, a disk that failed is tried again."""
        self.entries.collect()
        self.store.retry_disk()
        self._ticks += 1
        if self.store.disk and self._ticks % BACKUP_TICKS == 0:
            self.store.disk.back_up()

    def close(self) -> None:
        """Write what there is to write, and let go of the folder."""
        if disk := self.store.disk:
            self.store.retry_disk()
            self.store.write_everything()
            if disk.pending_bytes > WORTH_A_WORD_BYTES:
                megabytes = disk.pending_bytes // 10**6
                self._log(LogLine("info", f"writing {megabytes} MB of state to disk"))
            disk.close()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
