"""Records what a process promised about its disk, in a file that survives a kill.

A line is in the file when the call returns. A promise is revoked in the diary before it is revoked
on disk, so every promise that is not revoked must be found on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rekindle.kvcache.block import Block, chain
from rekindle.kvcache.disk.entry_table import Change, DropEntry
from rekindle.kvcache.disk.files import Calls
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.memory import Buffer
from tests.stress.trouble import block_files_with
from tests.support.harness import RuntimeHarness

SALTS = (b"", b"other")


def document_of(key: str, items: int) -> bytes:
    """The only document with this key and number of items, in lines as the front stores it."""
    lines = [f"item {number} of {key}: {'text ' * (number * 37 % 200)}" for number in range(items)]
    return "\n".join([*lines, f"{items} items"]).encode()


def items_of(document: bytes) -> int:
    return document.count(b"\n")


class Diary:
    """Appends lines, and reads back the promises."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._promises = Promises()
        self._read_bytes = 0
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def close(self) -> None:
        os.close(self._handle)

    def write(self, **line: Any) -> None:
        os.write(self._handle, json.dumps(line).encode() + b"\n")

    def read(self) -> Promises:
        """The promises so far. Always returns the same object."""
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                with contextlib.suppress(json.JSONDecodeError):  # a kill tore the line
                    self._promises.apply(json.loads(line))
            self._read_bytes = file.tell()
        return self._promises


@dataclass
class Promises:
    blocks: dict[str, tuple[bytes, list[int]]] = field(
        default_factory=dict
    )  # a salt and tokens each
    entries: set[str] = field(default_factory=set)
    pinned: set[str] = field(default_factory=set)
    answers: int = 0  # answers to pins, unpins and deletions
    unpinned: set[str] = field(default_factory=set)
    deleted: set[str] = field(default_factory=set)  # entries
    gone: set[str] = field(default_factory=set)  # blocks that a deletion removed
    leaving: set[str] = field(default_factory=set)  # blocks that are being removed
    errors: list[str] = field(default_factory=list)
    # Documents by key, as the number of their items: the acknowledged one, and one being stored.
    documents: dict[str, set[int]] = field(default_factory=dict)
    stored_documents: int = 0  # answers to requests to store one

    def apply(self, line: dict[str, Any]) -> None:
        match line:
            case {"opening": _}:
                self.leaving = set()  # a later change is not part of the promise
            case {"stored": key, "salt": salt, "tokens": tokens}:
                self.blocks[key] = (salt.encode(), tokens)
            case {"removing": key}:
                self.blocks.pop(key, None)
                self.leaving.add(key)
            case {"putting": key}:
                self.leaving.discard(key)
                self.gone.discard(key)
            case {"error": text}:
                self.errors.append(text)
            case {"storing": key, "items": items}:
                if key in self.documents:
                    self.documents[key].add(items)
            case {"document": key, "items": items}:
                self.documents[key] = {items}
                self.stored_documents += 1
            case {"done": what, "key": key}:
                self._apply_answer(what, key)
            case _:
                self._apply_to_entry(line)

    def _apply_to_entry(self, line: dict[str, Any]) -> None:
        match line:
            case {"entry": key, "pinned": pinned}:
                self.entries.add(key)
                self.pinned |= {key} if pinned else set()
            case {"pinning": key}:
                self.unpinned.discard(key)
            case {"unpinning": key}:
                self.pinned.discard(key)
            case {"dropping": key}:
                self.entries.discard(key)
                self.pinned.discard(key)
                self.documents.pop(key, None)

    def _apply_answer(self, what: str, key: str) -> None:
        self.answers += 1
        match what:
            case "pin":
                self.pinned.add(key)
                self.entries.add(key)
            case "unpin":
                self.unpinned.add(key)
            case "delete":
                self.deleted.add(key)
                self.gone |= self.leaving
                self.leaving = set()


class WitnessedTier(DiskTier):
    """Records every block before it is removed from disk."""

    diary: Diary

    def put(self, block: Block, blob: Buffer) -> None:
        self.diary.write(putting=block.key.hex())
        super().put(block, blob)

    def remove(self, block: Block, *, quarantine: bool = False) -> None:
        if self.holds(block):
            self.diary.write(removing=block.key.hex())
        super().remove(block, quarantine=quarantine)

    def journal(self, change: Change) -> None:
        if isinstance(change, DropEntry):
            self.diary.write(dropping=change.key)
        super().journal(change)


class WitnessedHarness(RuntimeHarness):
    """A harness that records its promises in a diary."""

    def __init__(self, *args: Any, diary: Diary, calls: Calls | None = None, **more: Any) -> None:
        self.diary = diary
        self._calls = calls
        diary.write(opening=True)
        super().__init__(*args, **more)
        self._written = {block.key for block in self.store}
        self._written_entries: dict[str, bool] = {}

    def _open_disk(self, folder: Path, disk_bytes: int) -> DiskTier:
        identity = self.capabilities.kv_layout.fingerprint + b"%d" % self.capabilities.block_tokens
        opened = open_folder(folder, identity, limit_bytes=disk_bytes)
        if self._calls is not None:
            opened.block_files = block_files_with(opened.path, self._calls)
        tier = WitnessedTier(opened, self._events.put)
        tier.diary = self.diary
        return tier

    def acknowledge(self) -> None:
        """Wait for the disk, then record everything that is stored."""
        self.flush()
        salts = {self.namespace(salt): salt for salt in SALTS}
        stored = {block.key: block for block in self.store if block.stored}
        for key in stored.keys() - self._written:
            block = stored[key]
            tokens = [t for each in reversed(list(chain(block))) for t in each.tokens]
            self.diary.write(stored=key.hex(), salt=salts[block.namespace].decode(), tokens=tokens)
        self._written = set(stored)
        pinned = {entry.key: entry.pinned for entry in self.entries.of(None)}
        for name in pinned:
            if self._written_entries.get(name) is not pinned[name]:
                self.diary.write(entry=name, pinned=pinned[name])
        self._written_entries = pinned
