"""A runtime without processes: scheduler, device, store and engine, driven step by step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rekindle.chat.encode import Encoder, Prompt
from rekindle.engine.base import Engine
from rekindle.kvcache.clock import Clock
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.entries import Entries
from rekindle.kvcache.key import namespace
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Tier, TierEvent
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.events import TERMINAL, Delta, Event, Finished, Started, TextDelta
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from rekindle.runtime.admin import Queries
from rekindle.runtime.kv_manager import Device
from rekindle.runtime.scheduler import Scheduler
from rekindle.runtime.sessions import Sessions
from rekindle.runtime.turn import Turn

GREEDY = SamplingParams(temperature=0)
SHARED_SALT = b"shared"
PATIENCE_S = 30.0


def _is_shared(ask: GenerateRequest) -> bool:
    return ask.prepare is not None and ask.prepare.shared


class NumberTokenizer:
    """Writes a token as its number; enough where no text matters."""

    bos: int | None = None
    add_bos = False
    control_texts: dict[str, int] = {}  # noqa: RUF012 - a protocol's plain attribute

    def encode(self, text: str, *, special: bool) -> list[int]:
        return [int(word) for word in text.split()]

    def piece(self, token: int, *, special: bool) -> bytes:
        return f"{token} ".encode()


@dataclass
class Reply:
    """Everything one turn said."""

    turn: Turn
    events: list[Event] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], TERMINAL)

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def text(self) -> str:
        return "".join(
            event.part.text
            for event in self.events
            if isinstance(event, Delta) and isinstance(event.part, TextDelta)
        )

    @property
    def tokens(self) -> list[int]:
        return self.turn.tokens[self.turn.prompt_tokens :]

    @property
    def reused(self) -> int:
        return self.finished.cache.reused_tokens

    @property
    def started(self) -> bool:
        return any(isinstance(event, Started) for event in self.events)


class Desk:
    """Submit turns, step, look at what came out."""

    def __init__(
        self,
        engine: Engine,
        *,
        ram_bytes: int = 1 << 30,
        parallel: int = 4,
        resident_tokens: int = 1 << 20,
        encoder: Encoder | None = None,
        tokenizer: Any = None,
        end_tokens: frozenset[int] = frozenset(),
        folder: Path | None = None,
        disk_bytes: int = 1 << 30,
        clock: Clock | None = None,
        **naming: Any,
    ) -> None:
        self.engine = engine
        self.abilities = engine.abilities
        self._news: SimpleQueue[TierEvent] = SimpleQueue()
        self.disk = self._open_disk(folder, disk_bytes) if folder else None
        tiers: list[Tier] = [RamTier(ram_bytes)]
        tiers += [self.disk] if self.disk else []
        self.store = Store(block_tokens=self.abilities.block_tokens, tiers=tiers)
        self.clock = clock or Clock()
        self.entries = Entries(self.store, self.clock, self.disk.journal if self.disk else None)
        if self.disk:
            entries = self.disk.folder.index_db.entries()
            self.store.load()
            self.entries.load(entries)
        self.logs: list[str] = []
        self.names = Sessions(
            self.entries,
            self.store,
            encoder or Encoder(tokenizer or NumberTokenizer(), None),
            self.logs.append,
            token_bytes=self.abilities.token_bytes,
            checkpoint_bytes=self.abilities.checkpoint_bytes,
            **naming,
        )
        self.device = Device(
            engine,
            self.store,
            self.names.explain,
            resident_tokens=resident_tokens,
            shared=self.root(SHARED_SALT),
        )
        self.entries.on_remove = self.device.forget
        self.scheduler = Scheduler(
            engine, self.device, self._emit, self.names.remember, parallel=parallel
        )
        self.queries = Queries(self.entries, self.store, self.device, self.names, self.clock)
        self.replies: dict[int, Reply] = {}
        self._ids = itertools.count(1)
        self._tokenizer = tokenizer or NumberTokenizer()
        self._end_tokens = end_tokens

    def _open_disk(self, folder: Path, disk_bytes: int) -> DiskTier:
        identity = self.abilities.fingerprint + b"%d" % self.abilities.block_tokens
        opened = open_folder(folder, identity, limit_bytes=disk_bytes)
        return DiskTier(opened, self._news.put)

    def root(self, salt: bytes = b"") -> bytes:
        return namespace(self.abilities.fingerprint, salt, self.abilities.block_tokens)

    def hear(self, *, wait: bool = False) -> None:
        """Take in what the disk did; at least one thing when told to wait."""
        with contextlib.suppress(Empty):
            while True:
                self.store.on_event(
                    self._news.get(timeout=PATIENCE_S) if wait else self._news.get_nowait()
                )
                wait = False

    def flush(self) -> None:
        """Wait until all that was put is on disk."""
        assert self.disk is not None
        done: list[bool] = []
        self.disk.flush(lambda: done.append(True))
        while not done:
            self.hear(wait=True)

    def close(self) -> None:
        """Stop as a runtime does: keep everything, then let go."""
        self.scheduler.stop()
        self.device.keep_everything()
        if self.disk:
            self.store.write_everything()
            self.disk.close()

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            reply = self.replies[event.turn]
            assert not reply.ended, "nothing comes after a terminal event"
            reply.events.append(event)

    def submit(self, tokens: Seq[int] | Prompt, *, salt: bytes = b"", **ask: Any) -> Reply:
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(tuple(tokens), ())
        request = GenerateRequest(
            turn=next(self._ids), **{"sampling": GREEDY, "max_tokens": 8, **ask, "salt": salt}
        )
        turn = Turn(
            request,
            prompt,
            namespace=self.root(SHARED_SALT if _is_shared(request) else salt),
            tokenizer=self._tokenizer,
            end_tokens=self._end_tokens,
            context_tokens=self.abilities.context_tokens,
        )
        return self.take(turn)

    def take(self, turn: Turn) -> Reply:
        reply = self.replies[turn.id] = Reply(turn)
        self.names.meet(turn)
        self.scheduler.submit(turn)
        return reply

    def run(self, *replies: Reply) -> None:
        """Step until these turns (or all of them) have ended."""
        wanted = replies or tuple(self.replies.values())
        for _ in range(100_000):
            if all(reply.ended for reply in wanted):
                return
            self.hear()
            if not self.scheduler.step():
                assert any(reply.turn.is_fetching for reply in wanted), "idle with work left"
                self.hear(wait=True)
        raise AssertionError("the turns do not end")

    def settle(self) -> None:
        """Use idle time until nothing is left to keep."""
        for _ in range(100_000):
            if not self.scheduler.step():
                return
        raise AssertionError("the scheduler never comes to rest")

    def ask(self, tokens: Seq[int] | Prompt, **ask: Any) -> Reply:
        reply = self.submit(tokens, **ask)
        self.run(reply)
        return reply

    def cancel(self, reply: Reply) -> None:
        self.scheduler.cancel(reply.turn.id)
