"""Messages between front and runtime: length-prefixed msgpack frames over a socketpair."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec import Struct

from rekindle.engine.sampling import Sampling
from rekindle.events import Event

_LENGTH = struct.Struct(">I")


class Load(Struct, tag=True, kw_only=True):
    """The first message: which model to load, and within what limits."""

    path: str
    parallel: int
    context_tokens: int | None
    kv_fraction: float
    threads: int
    gpu_layers: int | None
    ram_bytes: int


class Ask(Struct, tag=True, kw_only=True):
    """One turn: a chat (`messages`) or a completion (`prompt`: text, or token ids)."""

    turn: int
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    template_kwargs: dict[str, Any] = {}
    sampling: Sampling
    max_tokens: int | None
    stop: list[str] = []
    ignore_eos: bool = False
    reuse: bool = True
    exact: bool = False
    salt: bytes = b""
    progress: bool = False

    @property
    def source(self) -> str:
        """The request's field that the prompt comes from."""
        return "messages" if self.prompt is None else "prompt"


class Cancel(Struct, tag=True):
    turn: int


class Stop(Struct, tag=True):
    """Finish nothing more; end the process."""


class Loading(Struct, tag=True):
    fraction: float


class Ready(Struct, tag=True):
    context_tokens: int
    pool_tokens: int
    has_template: bool


class LoadFailed(Struct, tag=True):
    message: str


class Events(Struct, tag=True):
    """Everything one engine step told its clients, in order."""

    events: list[Event]


ToRuntime = Load | Ask | Cancel | Stop
ToFront = Loading | Ready | LoadFailed | Events

_encoder = msgspec.msgpack.Encoder()
_to_runtime: msgspec.msgpack.Decoder[ToRuntime] = msgspec.msgpack.Decoder(ToRuntime)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToRuntime | ToFront) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def receive(sock: socket.socket) -> Iterator[ToRuntime]:
    """The runtime's side: messages until the front hangs up."""
    while (head := _read(sock, _LENGTH.size)) is not None:
        body = _read(sock, _LENGTH.unpack(head)[0])
        if body is None:
            return
        yield _to_runtime.decode(body)


def _read(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


class FrameReader(asyncio.Protocol):
    """The front's side: every message as it arrives, None when the runtime is gone.

    A protocol, not a stream: a token costs one callback here, where a stream costs two wake-ups.
    """

    def __init__(self, hear: Callable[[ToFront | None], None]) -> None:
        self._parts = bytearray()
        self._hear = hear

    def data_received(self, data: bytes) -> None:
        self._parts += data
        while len(self._parts) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._parts)[0]
            if len(self._parts) < stop:
                return
            message = _to_front.decode(self._parts[_LENGTH.size : stop])
            del self._parts[:stop]
            self._hear(message)

    def connection_lost(self, _error: Exception | None) -> None:
        self._hear(None)
