"""Serves a model that computes embeddings or ranks documents. It keeps no KV cache, and no disk."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial

from rekindle.engine.base import EngineOptions
from rekindle.engine.registry import kind_of, load_embedder
from rekindle.errors import Unsupported
from rekindle.protocol.admin import AdminReply, AdminRequest, GetStats, Removed, RemoveTenant
from rekindle.protocol.frames import Loading, Ready, TurnRequest
from rekindle.protocol.requests import Cancel, EmbedRequest, RankRequest
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.embedding.scheduler import EmbeddingScheduler, VectorCache
from rekindle.runtime.embedding.turn import EmbeddingTurn, encode_inputs
from rekindle.runtime.encode.threads import Tokenisation
from rekindle.runtime.model_process import ModelProcess

MAX_CACHE_BYTES = 256 << 20  # enough for several hundred thousand short texts


class EmbeddingProcess(ModelProcess[EmbeddingTurn | AdminRequest | Cancel]):
    def __init__(
        self, options: EngineOptions, settings: RuntimeSettings, sock: socket.socket
    ) -> None:
        super().__init__(sock)
        embedder = load_embedder(options, lambda done: self.link.send(Loading(done)))
        limit_bytes = MAX_CACHE_BYTES
        if settings.ram_cache is not None:
            limit_bytes = min(settings.ram_cache, MAX_CACHE_BYTES)
        self._engine_name = kind_of(options.path, None).name
        self._embedder = embedder
        self._scheduler = EmbeddingScheduler(embedder, VectorCache(limit_bytes), self.emit)
        self.tokenisation = Tokenisation(
            embedder.tokenizer, embedder.info.context_tokens, embedder.encode
        )

    def ready(self) -> Ready:
        info = self._embedder.info
        return Ready(
            context_tokens=info.context_tokens,
            pool_tokens=0,
            engine=self._engine_name,
            vocabulary=self._embedder.tokenizer.size,
            dimensions=info.dimensions,
            ranks=info.ranks,
        )

    def _receive(self, message: TurnRequest | AdminRequest | Cancel, size_bytes: int) -> None:
        match message:
            case EmbedRequest() | RankRequest():
                encode = partial(self._encode_turn, message)
                self._encode(message, size_bytes, encode, "encoding the input", (message.turn,))
            case AdminRequest() | Cancel():
                self._inbox.put(message)
            case _:
                raise AssertionError("this model generates no text")

    def _encode_turn(self, request: EmbedRequest | RankRequest) -> Sequence[EmbeddingTurn]:
        return [encode_inputs(self._embedder, request)]

    def _step(self) -> bool:
        return self._scheduler.step()

    def _handle(self, message: EmbeddingTurn | AdminRequest | Cancel) -> None:
        match message:
            case EmbeddingTurn():
                self._scheduler.submit(message)
            case Cancel(turn):
                self._scheduler.cancel(turn)
            case AdminRequest(id=number, op=GetStats()):
                self.link.send(AdminReply(number, self._scheduler.stats()))
            case AdminRequest(id=number, op=RemoveTenant(salt)):
                removed = Removed(self._scheduler.forget_tenant(salt), 0)
                self.link.send(AdminReply(number, removed))
            case AdminRequest():
                refusal = Unsupported("this model keeps no conversations")
                self.link.send(AdminReply(message.id, error=refusal.info))

    def close(self) -> None:
        self._scheduler.stop()
        self.link.close()
        self._embedder.close()
