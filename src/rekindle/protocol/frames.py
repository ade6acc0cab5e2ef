"""Messages between front and runtime: length-prefixed msgpack frames over a socketpair."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from rekindle.protocol.admin import AdminReply, AdminRequest
from rekindle.protocol.embeddings import EmbedRequest, RankRequest
from rekindle.protocol.events import Event
from rekindle.protocol.requests import Cancel, GenerateRequest, LoadModel, Stop

_LENGTH = struct.Struct(">I")


class LogLine(Struct, tag=True):
    """A line for the server's log."""

    level: Literal["info", "warning", "error"]
    text: str
    request_id: str | None = None  # of the HTTP request it is about


class Loading(Struct, tag=True):
    fraction: float


class DeviceInfo(Struct):
    """A GPU that was found."""

    name: str
    memory_bytes: int


class Capacity(Struct):
    """What one place has room for of a model's state."""

    place: str
    tokens: int
    size_bytes: int


POOL, PARKED = "pool", "parked"  # places of the engine's own; others have the names of tiers
RAM, DISK = "ram", "disk"


class Ready(Struct, tag=True):
    context_tokens: int
    pool_tokens: int
    chat_template: str | None = None  # the model's own
    vocabulary: int = 0  # token ids go from 0 to one less
    bos: str = ""  # the texts of its control tokens; empty: it has none
    eos: str = ""
    has_reasoning: bool = False  # it writes for itself before it answers
    architecture: str = ""  # as its engine calls it
    parameters: int = 0
    quantization: str = ""  # of its weights
    modalities: tuple[str, ...] = ("text",)  # what a prompt may hold
    on_disk: bool = False  # conversations outlive the process
    conversations: int | None = None  # found on disk; None: the folder is still being read
    dimensions: int = 0  # of the vectors that the model makes; 0: it generates text
    ranks: bool = False  # instead of vectors, it makes scores of pairs
    gpus: tuple[DeviceInfo, ...] = ()
    layers: int = 0
    gpu_layers: int = 0  # of them, those that lie on GPUs
    capacities: tuple[Capacity, ...] = ()  # for its state, by place

    @property
    def kept_bytes(self) -> int:
        """What the cache keeps at most."""
        return sum(
            capacity.size_bytes for capacity in self.capacities if capacity.place in (RAM, DISK)
        )


class Heartbeat(Struct, tag=True):
    """A sign of life, every so often."""

    working_s: float  # how long the engine's thread has been at its current step; 0: at rest


class LoadFailed(Struct, tag=True):
    message: str


class Events(Struct, tag=True):
    """The events of one engine step, in order."""

    events: list[Event]


TurnRequest = GenerateRequest | EmbedRequest | RankRequest
ToRuntime = LoadModel | TurnRequest | Cancel | AdminRequest | Stop
ToFront = Loading | Ready | LoadFailed | Events | AdminReply | LogLine | Heartbeat


def _path_as_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(f"{type(value)} does not travel")


def _text_as_path(kind: type, value: Any) -> Path:
    if issubclass(kind, Path):
        return Path(value)
    raise NotImplementedError(f"{kind} does not travel")


_encoder = msgspec.msgpack.Encoder(enc_hook=_path_as_text)
_to_runtime: msgspec.msgpack.Decoder[ToRuntime] = msgspec.msgpack.Decoder(
    ToRuntime, dec_hook=_text_as_path
)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def frame(message: ToRuntime | ToFront) -> bytes:
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class Received(NamedTuple):
    message: ToRuntime
    size_bytes: int


def receive(sock: socket.socket) -> Iterator[Received]:
    """The runtime's side: messages until the front closes the socket."""
    arriving = select.poll()
    arriving.register(sock, select.POLLIN)
    # Where `recv` waits, Linux wakes it up for all that the front reads of this socket, too.
    while arriving.poll() and (length := _read(sock, _LENGTH.size)) is not None:
        body = _read(sock, _LENGTH.unpack(length)[0])
        if body is None:
            return
        yield Received(_to_runtime.decode(body), len(body))


def _read(sock: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


class FrameReader(asyncio.Protocol):
    """The front's side: every message as it arrives, None when the runtime has gone.

    A protocol, not a stream: a token costs one callback here, where a stream costs two wake-ups.
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
