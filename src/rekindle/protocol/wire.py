"""Messages between front and runtime: length-prefixed msgpack frames over a socketpair."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
from msgspec import Struct

from rekindle.engine.sampling import Sampling
from rekindle.protocol.events import Divergence, Event, Status

_LENGTH = struct.Struct(">I")


WritePolicy = Literal["always", "named", "on-evict"]


class Load(Struct, tag=True, kw_only=True):
    """The first message: which model to load, and within what limits."""

    path: str
    parallel: int
    context_tokens: int | None
    kv_fraction: float
    threads: int
    gpu_layers: int | None
    ram_bytes: int
    kv_type: str = "f16"  # of the engine's KV cells: "f16" or "q8_0"
    disk_bytes: int = 0  # 0: nothing is kept on disk
    disk_floor_bytes: int = 0  # free space that is left to others
    cache_dir: str = ""
    write_policy: WritePolicy = "always"
    key_ttl_s: float | None = 1800.0  # of entries whose key a client asked for
    served: list[str] = []  # all models of this server, which share the disk budget
    tool_format: str | None = None  # None: the one that the model's template speaks of
    reasoning_format: str | None = None


class Naming(Struct, kw_only=True):
    """What a request calls the state it goes on from, and what its own is to be called."""

    cache_key: str | None = None
    return_cache_key: bool = False
    session_id: str | None = None
    session_number: int | None = None  # `kv_cache_session_id`
    message_ids: list[str] = []  # newest first
    wants_message_id: bool = False
    prompt_cache_key: str | None = None
    by_fingerprint: bool = False  # `--force-cache`: a conversation without a name gets one
    ttl_s: float | None = None  # None: the default of its kind
    in_memory: bool = False  # never written to disk


class Preparing(Struct, kw_only=True):
    """Compute the prompt, sample nothing, and keep its state as an entry."""

    pinned: bool = False
    ttl_s: float | None = 1800.0
    shared: bool = False  # for every tenant; the operator's own prompts only


class ToolUse(Struct, frozen=True, kw_only=True):
    """Which of the request's tools the reply may call, or has to."""

    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None  # with "required": this one
    parallel: bool = True  # more than one call in a reply


class Structure(Struct, kw_only=True):
    """What the reply's text has to be: any JSON object, or JSON that a schema describes."""

    schema: dict[str, Any] | bool | None = None  # None: any object


class Ask(Struct, tag=True, kw_only=True):
    """One turn: a chat (`messages`) or a completion (`prompt`: text, or token ids)."""

    turn: int
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    tool_use: ToolUse = ToolUse()
    structure: Structure | None = None
    priority: int = 0  # higher goes first
    normalise: bool = True  # volatile headers that clients put at the top
    naming: Naming | None = None
    preparing: Preparing | None = None
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
    """Finish nothing more, keep what there is, end the process."""


# -- questions about the cache -------------------------------------------------------------------


class ListEntries(Struct, tag=True):
    """Answered with Listing."""


class ShowEntry(Struct, tag=True):
    """Answered with EntryInfo."""

    cache_key: str


class GetStats(Struct, tag=True):
    """Answered with Stats."""


class Validate(Struct, tag=True, kw_only=True):
    """Would this request hit this entry? Answered with Validity; changes nothing."""

    cache_key: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    normalise: bool = True


class IndexPrompt(Struct, tag=True, kw_only=True):
    """`prepare` without computing: an entry that knows its tokens. Answered with EntryInfo."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    preparing: Preparing
    normalise: bool = True


class Settle(Struct, tag=True):
    """Answered with EntryInfo when the entry is stored as safely as this server can."""

    cache_key: str


class DeleteEntry(Struct, tag=True):
    """Answered with Removed."""

    cache_key: str


class PinEntry(Struct, tag=True):
    """Pin or unpin. Answered with EntryInfo."""

    cache_key: str
    pinned: bool


class Collect(Struct, tag=True):
    """Remove what has expired now. Answered with Removed."""


class RemoveSession(Struct, tag=True):
    """Remove the entry of a numbered session, a session or a message. Answered with Removed."""

    session_id: int | str


class RemoveOld(Struct, tag=True):
    """Remove unpinned entries not used for so long. Answered with Removed."""

    seconds: float


CacheOp = (
    ListEntries
    | ShowEntry
    | GetStats
    | Validate
    | IndexPrompt
    | Settle
    | DeleteEntry
    | PinEntry
    | Collect
    | RemoveSession
    | RemoveOld
)


class Query(Struct, tag=True, kw_only=True):
    """A question about the cache, as one tenant sees it; an admin sees every tenant's."""

    id: int
    salt: bytes
    admin: bool = False
    op: CacheOp


class Segment(Struct, array_like=True):
    """A part of a conversation that explains a decision: "system", "tools" or "turn"."""

    type: str
    hash: str


class NameInfo(Struct):
    kind: str  # "session_id", "kv_cache_session_id", "message_id", "prompt_cache_key", …
    name: str


class EntryInfo(Struct, tag=True, kw_only=True):
    cache_key: str
    segments: list[Segment]
    token_count: int
    tier: str | None  # the slowest of those that hold its state; None: nothing is held
    size_bytes: int  # of its state, whoever else shares it
    held_tokens: int  # whose state there is
    stored_tokens: int  # of those, that would survive the end of this process
    hit_count: int
    pinned: bool
    ttl: float | None
    created_at: float
    last_used: float
    expires_at: float | None
    names: list[NameInfo]
    tenant: str  # a digest of who owns it


class Listing(Struct, tag=True):
    entries: list[EntryInfo]


class Stats(Struct, tag=True, kw_only=True):
    """One tenant's view, or the sum of all for an admin."""

    entries: int
    pinned_entries: int
    by_tier: dict[str, int]
    ram_bytes: int
    disk_bytes: int
    unique_bytes: int  # of state, each block once
    logical_bytes: int  # what the entries would take if they shared nothing
    hits: int
    partial_hits: int
    misses: int
    evictions: int  # blocks forgotten to make room
    # Of the whole runtime; zero for a tenant that is not the admin.
    ram_limit_bytes: int = 0
    disk_limit_bytes: int = 0
    disk_state: str = "off"  # "ok", "off", or why nothing is written: "full", "failing", "locked"
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    corrupt_blocks: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    turns: int = 0  # waiting and running


class Validity(Struct, tag=True, kw_only=True):
    status: Status
    reusable_tokens: int
    invalidated_at: str | None  # "system", "tools" or "turn N"
    reason: str
    diverged_at: Divergence | None = None


class Removed(Struct, tag=True):
    entries: int
    freed_bytes: int


class Refused(Struct, tag=True):
    """A question that has no answer, as an error in OpenAI's shape."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None


CacheAnswer = EntryInfo | Listing | Stats | Validity | Removed | Refused


class Answer(Struct, tag=True):
    id: int
    answer: CacheAnswer


class Note(Struct, tag=True):
    """A line for the server's log."""

    level: Literal["info", "warning", "error"]
    text: str


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


ToRuntime = Load | Ask | Cancel | Query | Stop
ToFront = Loading | Ready | LoadFailed | Events | Answer | Note

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
