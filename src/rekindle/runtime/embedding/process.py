"""The process of a model that makes vectors or scores: no chat, no KV state, nothing on disk.

Threads: a reader and a writer at the socket, a few encoders that turn texts into tokens, one that
ticks, and the main thread, which alone owns the embedder.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from functools import partial
from queue import Empty, SimpleQueue

from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import load_embedder
from rekindle.errors import ServerError, Unsupported, as_server_error
from rekindle.protocol.admin import AdminReply, AdminRequest, Detokenize, GetStats, Tokenize
from rekindle.protocol.embeddings import EmbedRequest, RankRequest
from rekindle.protocol.events import Cancelled, Event, Failed
from rekindle.protocol.frames import Events, Loading, Ready, Received
from rekindle.protocol.requests import Cancel, Stop
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.embedding.scheduler import EmbeddingScheduler, VectorCache
from rekindle.runtime.embedding.turn import EmbeddingTurn, begin
from rekindle.runtime.encode.threads import Encoders, Job
from rekindle.runtime.encode.tokenisation import Tokenisation
from rekindle.runtime.link import Link

MOST_CACHE_BYTES = 256 << 20  # of rows; several hundred thousand short texts

_Message = EmbeddingTurn | AdminRequest | Cancel | Stop
_Encoded = EmbeddingTurn | Failed | AdminReply


class EmbeddingProcess:
    """Serves one model until the front hangs up."""

    def __init__(
        self, options: EngineOptions, settings: RuntimeSettings, sock: socket.socket
    ) -> None:
        self.link = Link(sock)
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._embedder = load_embedder(options, lambda done: self.link.send(Loading(done)))
        told = settings.ram_cache
        cache = VectorCache(MOST_CACHE_BYTES if told is None else min(told, MOST_CACHE_BYTES))
        self._scheduler = EmbeddingScheduler(self._embedder, cache, self._emit)
        self._encoders: Encoders[_Encoded] = Encoders(self._deliver)
        self._tokenisation = Tokenisation(
            self._embedder.tokenizer, self._embedder.info.context_tokens, self._embedder.encode
        )
        self.ticking = (self.link.beat,)

    def ready(self) -> Ready:
        info = self._embedder.info
        return Ready(
            context_tokens=info.context_tokens,
            pool_tokens=0,
            vocabulary=self._embedder.tokenizer.size,
            dimensions=info.dimensions,
            ranks=info.ranks,
        )

    def _emit(self, events: list[Event]) -> None:
        self.link.send(Events(events))

    # -- in ------------------------------------------------------------------------------------

    def read(self, received: Iterator[Received]) -> None:
        """The reader thread."""
        with contextlib.suppress(ConnectionResetError):
            for message, size_bytes in received:
                match message:
                    case EmbedRequest() | RankRequest():
                        encode = partial(self._encode, message)
                        self._encoders.submit(
                            Job(message.salt, size_bytes, encode, (message.turn,))
                        )
                    case Cancel(turn) if self._encoders.cancel(turn):
                        pass
                    case AdminRequest() if isinstance(message.op, Tokenize | Detokenize):
                        tokenise = partial(self._tokenisation.reply, message)
                        self._encoders.submit(Job(message.salt, size_bytes, tokenise))
                    case AdminRequest() | Cancel() | Stop():
                        self._inbox.put(message)
        self._inbox.put(Stop())  # a runtime without a front must not go on

    def _encode(self, request: EmbedRequest | RankRequest) -> Sequence[_Encoded]:
        """An encoder thread: the request as tokens, or its refusal."""
        try:
            return [begin(self._embedder, request)]
        except Exception as error:
            return [Failed(request.turn, as_server_error(error, "encoding the input").info)]

    def _deliver(self, encoded: _Encoded | Cancelled) -> None:
        """An encoder thread, or the reader: what has become of a request."""
        match encoded:
            case EmbeddingTurn():
                self._inbox.put(encoded)
            case AdminReply():
                self.link.send(encoded)
            case _:
                self._emit([encoded])

    # -- the embedder's thread -----------------------------------------------------------------

    def run(self) -> None:
        """Compute while there is something to compute; sleep on the inbox while there is not."""
        busy = False
        while True:
            for message in self._messages(wait=not busy):
                self.link.working_since_s = time.monotonic()
                if isinstance(message, Stop):
                    return
                self._handle(message)
            self.link.working_since_s = time.monotonic()
            busy = self._scheduler.step()
            self.link.working_since_s = None

    def _messages(self, *, wait: bool) -> Iterator[_Message]:
        if wait:
            yield self._inbox.get()
        with contextlib.suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _handle(self, message: EmbeddingTurn | AdminRequest | Cancel) -> None:
        match message:
            case EmbeddingTurn():
                self._scheduler.submit(message)
            case Cancel(turn):
                self._scheduler.cancel(turn)
            case AdminRequest():
                self.link.send(self._answer(message))

    def _answer(self, request: AdminRequest) -> AdminReply:
        if isinstance(request.op, GetStats):
            return AdminReply(request.id, self._scheduler.stats())
        refusal: ServerError = Unsupported("this model keeps no conversations")
        return AdminReply(request.id, error=refusal.info)

    def close(self) -> None:
        """The embedder is closed last: whatever its end is like, everything has been sent."""
        self._scheduler.stop()
        self.link.close()
        self._embedder.close()
