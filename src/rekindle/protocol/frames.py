"""Sends messages between front and runtime as length-prefixed msgpack over a socketpair."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct

from rekindle.protocol.admin import AdminReply, AdminRequest
from rekindle.protocol.events import Event
from rekindle.protocol.requests import (
    Cancel,
    EmbedRequest,
    GenerateRequest,
    LoadModel,
    RankRequest,
    Stop,
)

_LENGTH = struct.Struct(">I")


class LogLine(Struct, tag=True):
    level: Literal["info", "warning", "error"]
    text: str
    request_id: str | None = None  # of the HTTP request


class Loading(Struct, tag=True):
    fraction: float


class DeviceInfo(Struct):
    """A GPU that the engine found."""

    name: str
    memory_bytes: int


class LibraryInfo(Struct):
    """What the native library of an engine can do on this machine."""

    engine: str
    source: str  # the requirement of the package that has its sources
    digest: str  # of its files
    features: str  # instruction sets and backends, in the words of the library
    gpus: tuple[DeviceInfo, ...]


class Capacity(Struct):
    """How much KV state fits into one place: the KV pool, parked memory or a tier."""

    place: str
    tokens: int
    size_bytes: int


POOL, PARKED = "pool", "parked"  # places inside the engine
RAM, DISK = "ram", "disk"  # tiers


class Ready(Struct, tag=True):
    """The model is loaded, and this is what the front needs to know about it."""

    context_tokens: int
    pool_tokens: int
    chat_template: str | None = None
    vocabulary: int = 0  # number of token ids
    bos: str = ""  # text of the control token; empty: the model has none
    eos: str = ""
    end_tokens: tuple[int, ...] = ()  # with which the model ends its turn
    has_reasoning: bool = False  # the model reasons before it answers
    engine: str = ""  # its name
    architecture: str = ""  # the engine's name for it
    parameters: int = 0
    quantization: str = ""  # of the weights
    modalities: tuple[str, ...] = ("text",)  # that a prompt may contain
    has_state_files: bool = False  # state can be exported and imported as a file
    on_disk: bool = False  # conversations survive a restart
    conversations: int | None = None  # on disk; None: the folder is still being read
    dimensions: int = 0  # of an embedding model's vectors; 0: the model generates text
    ranks: bool = False  # the model is a reranker
    gpus: tuple[DeviceInfo, ...] = ()
    layers: int = 0
    gpu_layers: int = 0  # layers on GPUs
    capacities: tuple[Capacity, ...] = ()
    exact_step_tokens: int = 0  # exact mode reuses whole steps of this many tokens

    @property
    def kept_bytes(self) -> int:
        """Maximum size of the cache."""
        return sum(each.size_bytes for each in self.capacities if each.place in (RAM, DISK))


class Heartbeat(Struct, tag=True):
    """Sent regularly, so that the front notices a runtime that hangs."""

    # Duration of the engine's current step, or of the longest encoding; 0: idle
    working_s: float
    encoding_s: float = 0.0  # duration of the longest encoding
    disk_state: str = "off"  # as in `Stats`


class LoadFailed(Struct, tag=True):
    message: str


class Events(Struct, tag=True):
    """The events of one engine step, in order."""

    events: list[Event]


TurnRequest = GenerateRequest | EmbedRequest | RankRequest
ToRuntime = LoadModel | TurnRequest | Cancel | AdminRequest | Stop
ToFront = Loading | Ready | LoadFailed | Events | AdminReply | LogLine | Heartbeat


# The hooks send paths as text. The settings have no other type that msgspec does not know.
_encoder = msgspec.msgpack.Encoder(enc_hook=os.fspath)
_to_runtime: msgspec.msgpack.Decoder[ToRuntime] = msgspec.msgpack.Decoder(
    ToRuntime, dec_hook=lambda kind, text: kind(text)
)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToRuntime | ToFront) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Received(NamedTuple):
    message: ToRuntime
    size_bytes: int


def receive(sock: socket.socket) -> Iterator[Received]:
    """Yield messages in the runtime until the front closes the socket."""
    arriving = select.poll()
    arriving.register(sock, select.POLLIN)
    # Linux wakes a waiting `recv`, but not `poll`, whenever the front reads from this socket.
    while arriving.poll() and (length := read_exactly(sock, _LENGTH.size)) is not None:
        body = read_exactly(sock, _LENGTH.unpack(length)[0])
        if body is None:
            return
        yield Received(_to_runtime.decode(body), len(body))


def read_exactly(sock: socket.socket, size: int) -> bytes | None:
    """Return this many bytes, or None if the other end has closed the socket."""
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


class FrameReader(asyncio.Protocol):
    """Calls back in the front with every message, and with None when the runtime has gone.

    A protocol needs one callback per token, where an asyncio stream needs two wake-ups.
    """

    def __init__(self, receive_message: Callable[[ToFront | None], None]) -> None:
        self._parts = bytearray()
        self._receive_message = receive_message

    def data_received(self, data: bytes) -> None:
        self._parts += data
        while len(self._parts) >= _LENGTH.size:
            stop = _LENGTH.size + _LENGTH.unpack_from(self._parts)[0]
            if len(self._parts) < stop:
                return
            message = _to_front.decode(self._parts[_LENGTH.size : stop])
            del self._parts[:stop]
            self._receive_message(message)

    def connection_lost(self, _error: Exception | None) -> None:
        self._receive_message(None)
