"""Drives a runtime step by step without its process."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.prompt import Prompt
from rekindle.engine.base import Engine
from rekindle.kvcache.disk.folder import open_folder
from rekindle.kvcache.disk.image_files import PictureFiles
from rekindle.kvcache.entries.entries import Entries
from rekindle.kvcache.entries.entry import Clock, Entry
from rekindle.kvcache.entries.retention import EntryLimits
from rekindle.kvcache.store import Store
from rekindle.kvcache.tiers.base import Tier
from rekindle.kvcache.tiers.disk import DiskTier
from rekindle.kvcache.tiers.ram import RamTier
from rekindle.protocol.admin import AdminOp, AdminRequest, AdminResult
from rekindle.protocol.events import TERMINAL, Delta, Event, Finished, Started, TextDelta
from rekindle.protocol.frames import LogLine
from rekindle.protocol.requests import GenerateRequest, Picture, SamplingParams
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.build import build
from rekindle.runtime.device.images import EncodedPictures
from rekindle.runtime.encode.request import EncodedPrompt, EncodedRequest, Stopwatch, precision
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.runtime.schedule.turn import Turn
from rekindle.runtime.storage.storage import Storage, StorageEvent, reads_line
from rekindle.tokens import Tokens
from tests.support.memory_tier import MemoryTier

GREEDY = SamplingParams(temperature=0)
PATIENCE_S = 30.0


@dataclass
class Reply:
    """Everything that one turn returned."""

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
        parts = (event.part for event in self.events if isinstance(event, Delta))
        return "".join(part.text for part in parts if isinstance(part, TextDelta))

    @property
    def tokens(self) -> list[int]:
        return self.turn.tokens.ids[self.turn.prompt_tokens :]

    @property
    def message(self) -> dict[str, Any]:
        """The reply as the client sees it."""
        return self.turn.output.message.as_dict()

    @property
    def reused(self) -> int:
        return self.finished.cache.reused_tokens

    @property
    def started(self) -> bool:
        return any(isinstance(event, Started) for event in self.events)

    @property
    def is_fetching(self) -> bool:
        """Whether the turn waits for blocks or vectors from a lower tier."""
        restoration = self.turn.restoration
        waits_for_blocks = restoration is not None and bool(restoration.fetches)
        return waits_for_blocks or self.turn.waits_for_vectors


class RuntimeHarness:
    """Submits turns, runs steps and collects the results.

    Budgets are exact. The real storage reserves some memory for queues and entries, and the harness
    does not.
    """

    memory: MemoryTier | None = None  # below the other tiers
    _step_clock: Callable[[], float] | None = None

    def __init__(
        self,
        engine: Engine,
        *,
        ram_bytes: int = 1 << 30,
        idle_tokens: int | None = 1 << 20,
        folder: Path | None = None,
        disk_bytes: int = 1 << 30,
        shelf: dict[bytes, bytes] | None = None,
        fetch_bytes: int = 1 << 30,
        clock: Clock | None = None,
        pictures_bytes: int = 1 << 26,
        is_undisturbed: Callable[[], bool] = lambda: False,
        step_clock: Callable[[], float] | None = None,
        **settings: Any,
    ) -> None:
        """`folder` is the disk tier's, and `shelf` holds the blocks of a slow tier in memory.
        `step_clock` measures the engine's steps."""
        self._step_clock = step_clock
        self.engine = engine
        self.capabilities = engine.capabilities
        self._events: SimpleQueue[StorageEvent] = SimpleQueue()
        self.log_lines: list[LogLine] = []
        self.replies: dict[int, Reply] = {}
        self._ids = itertools.count(1)
        open_files = partial(PictureFiles, secret=b"", on_read=self._events.put)
        self.pictures = EncodedPictures(pictures_bytes, open_files=open_files)
        self.memory = None if shelf is None else MemoryTier(1 << 30, self._events.put, shelf=shelf)
        storage = self._storage(
            RuntimeSettings(**{"parallel": 4, **settings}),
            folder,
            ram_bytes,
            disk_bytes,
            fetch_bytes,
            clock,
        )
        self.take_storage(storage, idle_tokens, is_undisturbed)

    def take_storage(
        self,
        storage: Storage,
        idle_tokens: int | None,
        is_undisturbed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.storage = storage
        self.store, self.entries, self.clock = storage.store, storage.entries, storage.clock
        self.runtime = build(
            self.engine,
            storage,
            emit=self._emit,
            log=self.log_lines.append,
            idle_tokens=idle_tokens,
            is_undisturbed=is_undisturbed,
            # By default looked up at each call, because tests replace the system's clock.
            clock=self._step_clock or (lambda: time.perf_counter()),
        )
        self.kv, self.scheduler = self.runtime.kv, self.runtime.scheduler
        self.sessions, self.pipeline = self.runtime.sessions, self.runtime.pipeline

    def _storage(
        self,
        settings: RuntimeSettings,
        folder: Path | None,
        ram_bytes: int,
        disk_bytes: int,
        fetch_bytes: int,
        clock: Clock | None,
    ) -> Storage:
        disk = self._open_disk(folder, disk_bytes) if folder else None
        tiers: list[Tier] = [RamTier(ram_bytes)]
        tiers += [tier for tier in (disk, self.memory) if tier is not None]
        store = Store(
            block_tokens=self.capabilities.block_tokens,
            tiers=tiers,
            fetch_bytes=fetch_bytes,
            on_stall=lambda tier, answers: self.log_lines.append(reads_line(tier, answers)),
        )
        clock = clock or Clock()
        layout = self.capabilities.kv_layout
        entries = Entries(
            store,
            clock,
            disk.journal if disk else None,
            EntryLimits(64 << 20, layout.token_bytes, layout.checkpoint_bytes),
            on_remove=self._remove,
            on_forget=self._forget,
        )
        return Storage(
            settings,
            store,
            entries,
            clock,
            secret=b"",
            disk=disk,
            log=self.log_lines.append,
            pictures=self.pictures,
        )

    def tick(self) -> None:
        """Do all of the storage's upkeep."""
        for _ in self.storage.upkeep():
            pass

    def _remove(self, entry: Entry) -> None:
        self.runtime.remove(entry)

    def _forget(self, entry: Entry) -> None:
        self.runtime.kv.forget(entry)

    def _open_disk(self, folder: Path, disk_bytes: int) -> DiskTier:
        fingerprint = self.capabilities.kv_layout.fingerprint
        identity = fingerprint + b"%d" % self.capabilities.block_tokens
        return DiskTier(open_folder(folder, identity, limit_bytes=disk_bytes), self._events.put)

    @property
    def disk(self) -> DiskTier | None:
        return self.storage.disk

    @property
    def logs(self) -> list[str]:
        return [line.text for line in self.log_lines if line.level == "info"]

    def namespace(self, salt: bytes = b"") -> bytes:
        return self.runtime.input_processor.namespace(salt)

    def take_events(self, *, wait: bool = False) -> None:
        """Take in what the tiers did; at least one event when it waits."""
        if self.memory:
            self.memory.advance()
        with contextlib.suppress(Empty):
            while True:
                event = self._events.get(timeout=PATIENCE_S) if wait else self._events.get_nowait()
                for _ in self.storage.on_event(event) or ():
                    pass
                wait = False

    def flush(self) -> None:
        """Wait until everything is on disk."""
        done: list[bool] = []
        self.store.tiers.flush(done.append)
        while not done:
            self.take_events(wait=True)

    def close(self) -> None:
        """Stop like a runtime: store everything, then release it."""
        self.scheduler.stop()
        self.kv.offload_all()
        self.storage.close()

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            reply = self.replies[event.turn]
            assert not reply.ended, "nothing comes after a terminal event"
            reply.events.append(event)

    def submit(self, tokens: Seq[int] | Prompt, *, salt: bytes = b"", **request: Any) -> Reply:
        """Submit a turn whose prompt is already encoded."""
        prompt = tokens if isinstance(tokens, Prompt) else Prompt(Tokens.of(tokens))
        asked = GenerateRequest(
            turn=next(self._ids),
            **{"sampling": GREEDY, "max_tokens": 8, "kv_quantization_start": 0, **request},
            salt=salt,
        )
        processor = self.runtime.input_processor
        tenant = processor.owner(asked)
        hashes = ConversationHashes(asked.messages, asked.tools) if asked.messages else None
        return self.take(
            EncodedRequest(
                request=asked,
                prompt=prompt,
                namespace=tenant,
                groups=processor.group_namespaces(asked.groups),
                precision=precision(asked, self.capabilities, tenant),
                decoding=ReplyDecoding(end_tokens=self.engine.tokenizer.end_tokens),
                hashes=hashes,
            )
        )

    def take(self, encoded: EncodedRequest) -> Reply:
        return self.take_turn(self.pipeline.begin(encoded, Stopwatch()))

    def encode_one(self, request: GenerateRequest) -> Turn:
        """Encode a request for a single choice."""
        [turn] = self.pipeline.encode_choices(request, Stopwatch())
        return turn

    def take_turn(self, turn: Turn) -> Reply:
        self.pipeline.find(turn)
        reply = self.replies[turn.id] = Reply(turn)
        self.scheduler.submit(turn)
        return reply

    def run(self, *replies: Reply) -> None:
        """Run steps until these turns, or all turns, have ended."""
        wanted = replies or tuple(self.replies.values())
        for _ in range(100_000):
            if all(reply.ended for reply in wanted):
                return
            self.take_events()
            if not self.scheduler.step() and not all(reply.ended for reply in wanted):
                assert any(reply.is_fetching for reply in wanted), "idle with work left"
                self.take_events(wait=True)
        raise AssertionError("the turns do not end")

    def offload(self) -> None:
        """Use idle time until there is nothing left to offload."""
        for _ in range(100_000):
            if not self.scheduler.step():
                return
        raise AssertionError("the scheduler never comes to rest")

    def ask(self, tokens: Seq[int] | Prompt, **request: Any) -> Reply:
        reply = self.submit(tokens, **request)
        self.run(reply)
        return reply

    def ask_text(self, text: str, **request: Any) -> Reply:
        """Complete a text, encoded by the runtime."""
        asked = GenerateRequest(
            turn=next(self._ids), prompt=text, **{"sampling": GREEDY, "max_tokens": 8, **request}
        )
        reply = self.take_turn(self.encode_one(asked))
        self.run(reply)
        return reply

    def submit_chat(
        self, messages: list[dict[str, Any]], pictures: Seq[Picture] = (), **request: Any
    ) -> Reply:
        """Submit a conversation, encoded by the runtime."""
        asked = GenerateRequest(
            turn=next(self._ids),
            messages=messages,
            pictures=list(pictures),
            **{"sampling": GREEDY, "max_tokens": 8, **request},
        )
        return self.take_turn(self.encode_one(asked))

    def ask_chat(
        self, messages: list[dict[str, Any]], pictures: Seq[Picture] = (), **request: Any
    ) -> Reply:
        reply = self.submit_chat(messages, pictures, **request)
        self.run(reply)
        return reply

    def cancel(self, reply: Reply) -> None:
        self.scheduler.cancel(reply.turn.id)

    def administer(
        self,
        op: AdminOp,
        *,
        salt: bytes = b"",
        admin: bool = False,
        groups: Seq[str] = (),
        prompt: Prompt | EncodedPrompt | None = None,
    ) -> AdminResult:
        """The result of an admin request; events are taken in until it comes."""
        encoded = EncodedPrompt(prompt) if isinstance(prompt, Prompt) else prompt
        results: list[AdminResult] = []
        request = AdminRequest(id=1, salt=salt, groups=list(groups), admin=admin, op=op)
        for _ in self.runtime.admin.answer(request, encoded, results.append):
            pass  # between two work items
        while not results:
            self.take_events(wait=not self.scheduler.step())
        return results[0]
