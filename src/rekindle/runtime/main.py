"""The runtime process: one loaded model with its prompt, cache and engine.

Threads: a reader and a writer at the socket, a few encoders that turn requests into tokens, those
of the disk tier, one that ticks, and the main thread, which alone owns the engine and the cache.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from rekindle.chat.encode import Encoder, Prompt
from rekindle.chat.template import ChatTemplate
from rekindle.chat.tools.registry import FALLBACK
from rekindle.engine.llamacpp.engine import LlamaCppEngine, LlamaCppOptions
from rekindle.errors import RekindleError, ServerError, TemplateFailed
from rekindle.kvcache.tiers.base import Fetched, Flushed, TierEvent, WriteFailed, Written
from rekindle.protocol.admin import (
    AdminReply,
    AdminRequest,
    AdminResult,
    Flush,
    IndexPrompt,
    Stats,
    Validate,
)
from rekindle.protocol.events import Event, Failed
from rekindle.protocol.frames import (
    Events,
    LoadFailed,
    Loading,
    LogLine,
    Ready,
    ToFront,
    ToRuntime,
    frame,
    receive,
)
from rekindle.protocol.requests import Cancel, GenerateRequest, LoadModel, Stop
from rekindle.runtime.admin import Queries
from rekindle.runtime.input_processor import SHARED_SALT, Intake
from rekindle.runtime.kv_manager import Device
from rekindle.runtime.output_format import Manner
from rekindle.runtime.scheduler import Scheduler
from rekindle.runtime.sessions import Sessions
from rekindle.runtime.storage import Memory
from rekindle.runtime.turn import Turn

ENCODER_THREADS = 2
TICK_S = 60.0
CPU_RESIDENT_TOKENS = 0  # idle cells slow every step on a CPU, and RAM gives them back at once


@dataclass(frozen=True, slots=True)
class _Arrived:
    turn: int


@dataclass(frozen=True, slots=True)
class _Refused:
    turn: int


@dataclass(frozen=True, slots=True)
class _Encoded:
    """A question about the cache whose prompt has been encoded."""

    query: AdminRequest
    prompt: Prompt


class _Tick:
    """A minute has gone by."""


_Message = _Arrived | _Refused | Turn | Cancel | AdminRequest | _Encoded | _Tick | TierEvent | Stop


class Worker:
    """Answers turns until the front hangs up."""

    def __init__(self, load: LoadModel, sock: socket.socket) -> None:
        self._sock = sock
        self._outbox: SimpleQueue[ToFront | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._encoding: set[int] = set()  # turns between arrival and the scheduler
        self._doomed: set[int] = set()  # of those, the ones cancelled meanwhile
        self._engine = LlamaCppEngine(_options(load), self._on_progress)
        abilities = self._engine.abilities
        self._abilities = abilities
        template = _template(self._engine)
        encoder = Encoder(self._engine.vocabulary, template)
        self._memory = Memory(
            load, abilities, self._inbox.put, self.send, polite=not self._engine.on_gpu
        )
        entries = self._memory.entries
        manner = Manner(
            self._engine.vocabulary,
            self._engine.chat_template,
            tool_format=load.tool_format or _own_format(template),
            reasoning_format=load.reasoning_format,
        )
        self._intake = Intake(
            abilities, self._engine.vocabulary, encoder, entries, self._memory.secret, manner
        )
        self._names = Sessions(
            entries,
            self._memory.store,
            encoder,
            self._log,
            policy=load.write_policy,
            key_ttl_s=load.key_ttl_s,
            token_bytes=abilities.token_bytes,
            checkpoint_bytes=abilities.checkpoint_bytes,
        )
        self._device = Device(
            self._engine,
            self._memory.store,
            self._names.explain,
            resident_tokens=abilities.pool_tokens if self._engine.on_gpu else CPU_RESIDENT_TOKENS,
            shared=self._intake.root(SHARED_SALT),
        )
        entries.on_remove = self._device.forget
        self._scheduler = Scheduler(
            self._engine, self._device, self._emit, self._names.remember, parallel=load.parallel
        )
        self._queries = Queries(
            entries, self._memory.store, self._device, self._names, self._memory.clock
        )
        self._queries.disk_state = self._memory.trouble

    def ready(self) -> Ready:
        return Ready(
            context_tokens=self._abilities.context_tokens,
            pool_tokens=self._abilities.pool_tokens,
            has_template=self._engine.chat_template is not None,
        )

    # -- out -----------------------------------------------------------------------------------

    def send(self, message: ToFront) -> None:
        """Leave the message to the writer. Sending it here would wake the front, which then takes
        the core from us between two steps; the writer runs while the engine computes."""
        self._outbox.put(message)

    def _write(self) -> None:
        """The writer thread; a front that is gone is noticed by the reader."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while (message := self._outbox.get()) is not None:
                self._sock.sendall(frame(message))

    def _emit(self, events: list[Event]) -> None:
        self.send(Events(events))

    def _log(self, text: str) -> None:
        self.send(LogLine("info", text))

    def _on_progress(self, fraction: float) -> None:
        self.send(Loading(fraction))

    # -- in ------------------------------------------------------------------------------------

    def read(self, messages: Iterator[ToRuntime]) -> None:
        """The reader thread."""
        encoders = ThreadPoolExecutor(ENCODER_THREADS, "encoder")
        try:
            for message in messages:
                if isinstance(message, GenerateRequest):
                    self._inbox.put(_Arrived(message.turn))
                    encoders.submit(self._encode, message)
                elif isinstance(message, AdminRequest) and isinstance(
                    message.op, Validate | IndexPrompt
                ):
                    encoders.submit(self._encode_query, message)
                elif isinstance(message, AdminRequest | Cancel | Stop):
                    self._inbox.put(message)
        finally:
            self._inbox.put(Stop())  # a runtime that cannot hear must not go on

    def _encode(self, ask: GenerateRequest) -> None:
        """An encoder thread: the request as a turn, or its refusal."""
        try:
            self._inbox.put(self._intake.turn(ask))
        except ServerError as error:
            self._refuse(ask, error)
        except Exception as error:
            self._refuse(ask, ServerError(f"encoding the prompt failed: {error!r}"))

    def _encode_query(self, query: AdminRequest) -> None:
        """An encoder thread: the prompt that a question is about."""
        op = query.op
        assert isinstance(op, Validate | IndexPrompt)
        try:
            prompt = self._intake.prompt_about(op, query.salt)
        except ServerError as error:
            self._refuse_admin(query, error)
        except Exception as error:
            self._refuse_admin(query, ServerError(f"encoding the prompt failed: {error!r}"))
        else:
            self._inbox.put(_Encoded(query, prompt))

    def _answer(self, query: AdminRequest, answer: AdminResult) -> None:
        self.send(AdminReply(query.id, answer))

    def _refuse_admin(self, query: AdminRequest, error: ServerError) -> None:
        self.send(AdminReply(query.id, error=error.info))

    def _refuse(self, ask: GenerateRequest, error: ServerError) -> None:
        self._emit([Failed(ask.turn, error.info)])
        self._inbox.put(_Refused(ask.turn))

    # -- the engine's thread -------------------------------------------------------------------

    def run(self) -> None:
        """Step while there is work; sleep on the inbox while there is none."""
        busy = True
        while True:
            for message in self._messages(wait=not busy):
                if isinstance(message, Stop):
                    return
                self._handle(message)
            busy = self._scheduler.step()
            self._memory.give_way(busy)

    def _messages(self, *, wait: bool) -> Iterator[_Message]:
        if wait:
            yield self._inbox.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _handle(self, message: _Message) -> None:
        match message:
            case _Arrived(turn):
                self._encoding.add(turn)
            case _Refused(turn):
                self._encoding.discard(turn)
                self._doomed.discard(turn)
            case Cancel(turn):
                if turn in self._encoding:
                    self._doomed.add(turn)
                else:
                    self._scheduler.cancel(turn)
            case Turn():
                self._submit(message)
            case AdminRequest() | _Encoded():
                self._inform(message)
            case _Tick():
                self._memory.tick()
            case Written() | WriteFailed() | Fetched() | Flushed():
                self._memory.on_event(message)

    def _submit(self, turn: Turn) -> None:
        self._encoding.discard(turn.id)
        try:
            self._names.meet(turn)
        except ServerError as error:
            self._doomed.discard(turn.id)
            self._emit([turn.failed(error)])
            return
        self._scheduler.submit(turn)
        if turn.id in self._doomed:
            self._doomed.discard(turn.id)
            self._scheduler.cancel(turn.id)

    def _inform(self, asked: AdminRequest | _Encoded) -> None:
        """Answer a question about the cache."""
        query = asked.query if isinstance(asked, _Encoded) else asked
        try:
            if answer := self._find_answer(query, asked):
                self._answer(query, answer)
        except ServerError as error:
            self._refuse_admin(query, error)
        except Exception as error:  # a question must not cost the turns that are running
            self.send(LogLine("error", f"a question about the cache failed: {error!r}"))
            self._refuse_admin(query, ServerError("the question failed; see the log"))

    def _find_answer(
        self, query: AdminRequest, asked: AdminRequest | _Encoded
    ) -> AdminResult | None:
        op, root = query.op, self._intake.root(query.salt)
        if isinstance(op, Flush):
            view = None if query.admin else root
            self._queries.settle(op.cache_key, view, lambda info: self._answer(query, info))
            return None  # it answers when the disk has
        if isinstance(asked, _Encoded):
            if isinstance(op, Validate):
                return self._queries.validate(op, root, asked.prompt)
            assert isinstance(op, IndexPrompt)
            return self._queries.index(op, root, asked.prompt)
        answer = self._queries.answer(op, root, admin=query.admin)
        if isinstance(answer, Stats) and query.admin:
            answer.turns = self._scheduler.turns
        return answer

    def tick(self) -> None:
        """The ticking thread."""
        while True:
            time.sleep(TICK_S)
            self._inbox.put(_Tick())

    def close(self) -> None:
        """Keep what there is to keep, and end."""
        self._scheduler.stop()
        self._device.keep_everything()
        self._memory.close()
        self._outbox.put(None)
        self._writer.join()
        self._engine.close()


def _template(engine: LlamaCppEngine) -> ChatTemplate | None:
    """The model's own template; one that does not compile leaves completions to be served."""
    vocabulary = engine.vocabulary
    if engine.chat_template is None:
        return None
    try:
        return ChatTemplate(
            engine.chat_template,
            bos_token=vocabulary.text(vocabulary.bos),
            eos_token=vocabulary.text(vocabulary.eos),
        )
    except TemplateFailed as error:
        print(f"chat is not served: {error}", file=sys.stderr)
        return None


def _own_format(template: ChatTemplate | None) -> str | None:
    """The format in which we ask for calls where the template does not; None where it does."""
    return FALLBACK if template is not None and not template.shows_tools else None


def _options(load: LoadModel) -> LlamaCppOptions:
    return LlamaCppOptions(
        path=Path(load.path),
        parallel=load.parallel,
        context_tokens=load.context_tokens,
        kv_fraction=load.kv_fraction,
        threads=load.threads,
        gpu_layers=load.gpu_layers,
        kv_type=load.kv_type,
    )


def main() -> None:
    """Entry point of the child process; its one argument is the socket's descriptor."""
    for stop in (signal.SIGINT, signal.SIGTERM):  # the front decides when we end: when it says
        signal.signal(stop, signal.SIG_IGN)  # so, or by hanging up
    sock = socket.socket(fileno=int(sys.argv[1]))
    messages = receive(sock)
    load = next(messages)
    assert isinstance(load, LoadModel)
    try:
        worker = Worker(load, sock)
    except RekindleError as error:
        sock.sendall(frame(LoadFailed(str(error))))
        return
    worker.send(worker.ready())
    threading.Thread(target=worker.read, args=(messages,), daemon=True).start()
    threading.Thread(target=worker.tick, daemon=True).start()
    worker.run()
    worker.close()
    sys.stdout.flush()
    os._exit(0)  # encoder threads may be in the middle of a template


if __name__ == "__main__":
    main()
