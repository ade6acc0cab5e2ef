"""Provides a cache folder with a conversation, which tests damage again and again."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from rekindle.engine.base import Blob, Sequence
from rekindle.kvcache.codec import HEADER_BYTES, MAC_BYTES
from rekindle.protocol.requests import Names
from rekindle.tokens import TOKEN_BYTES
from tests.support.fake import CELL_BYTES, FakeEngine, FakeSequences
from tests.support.harness import Reply, RuntimeHarness

QUESTION = list(range(100, 128))
BLOCK_TOKENS = FakeEngine().block_tokens


class WatchedSequences(FakeSequences):
    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.restored: list[bytes] = []

    def restore(self, into: Sequence, blob: Blob, tokens: int, *, resumable: bool = False) -> None:
        self.restored.append(bytes(blob))
        super().restore(into, blob, tokens, resumable=resumable)


class WatchedEngine(FakeEngine):
    """Remembers all state bytes that it was ever given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sequences = self.watched = WatchedSequences(self)

    @property
    def restored(self) -> list[bytes]:
        return self.watched.restored


@dataclass(frozen=True)
class Shelf:
    """A folder that a harness wrote and closed. `blocks` lists its files in order."""

    folder: Path
    tokens: tuple[int, ...]
    cold: tuple[int, ...]  # the answer of an engine without a cache
    cache_key: str
    blocks: tuple[str, ...]
    states: tuple[bytes, ...]

    def copy(self, to: Path) -> Shelf:
        shutil.copytree(self.folder, to)
        return Shelf(to, self.tokens, self.cold, self.cache_key, self.blocks, self.states)

    @property
    def model(self) -> Path:
        [model] = (path for path in self.folder.iterdir() if path.is_dir())
        return model

    def file(self, number: int) -> Path:
        return self.model / "blocks" / self.blocks[number]

    @property
    def quarantine(self) -> list[Path]:
        return sorted((self.model / "aside").iterdir())

    def open(self) -> RuntimeHarness:
        return RuntimeHarness(WatchedEngine(), folder=self.folder)

    def ask(self, harness: RuntimeHarness) -> Reply:
        """Ask the next turn. Its answer is right and uses only good state, whatever was damaged."""
        reply = harness.ask(self.tokens, names=Names(cache_key=self.cache_key))
        assert reply.tokens == list(self.cold), "a wrong answer"
        assert isinstance(harness.engine, WatchedEngine)
        assert set(harness.engine.restored) <= set(self.states), "the engine saw bad bytes"
        return reply


def write_shelf(folder: Path) -> Shelf:
    """Write two turns of a conversation: full blocks, a tail, a name and a backup of the index."""
    harness = RuntimeHarness(FakeEngine(), folder=folder)
    first = harness.ask(QUESTION, names=Names(session_id="mine"))
    second = harness.ask(
        [*QUESTION, *first.tokens, 7], names=Names(session_id="mine", return_cache_key=True)
    )
    tokens = (*second.turn.tokens, 8, 9)
    harness.close()
    key = second.finished.cache.new_cache_key
    assert key is not None
    blocks = sorted(harness.store, key=lambda block: block.start)
    assert [block.start for block in blocks] == list(range(0, blocks[-1].stop, BLOCK_TOKENS))
    names = tuple(block.key.hex() for block in blocks)
    [model] = (path for path in folder.iterdir() if path.is_dir())
    states = tuple(_state(model / "blocks" / name) for name in names)
    cold = tuple(RuntimeHarness(FakeEngine()).ask(tokens).tokens)
    return Shelf(folder, tokens, cold, key, names, states)


def _state(path: Path) -> bytes:
    raw = path.read_bytes()
    tokens = (len(raw) - HEADER_BYTES - MAC_BYTES) // (TOKEN_BYTES + CELL_BYTES)
    return raw[HEADER_BYTES + tokens * TOKEN_BYTES : -MAC_BYTES]
