"""Admin requests: look at the cache or change it; and their results."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rekindle.protocol.events import Divergence, ErrorInfo, Reason, Status
from rekindle.protocol.media import Picture
from rekindle.protocol.requests import Prepare
from rekindle.protocol.settings import Normalise

# ----------------------------------------------------------------------
# Questions about a model's tokens, and their answers. They travel as admin requests do.


class Tokenize(Struct, tag=True, kw_only=True):
    """The tokens of a text, or of a conversation as the model reads it. Answered with Tokenized."""

    text: str | None = None
    add_special: bool = False  # the tokens that the model wants around a text
    parse_special: bool = True  # a control token's text in a text is that token
    messages: list[dict[str, Any]] | None = None
    pictures: list[Picture] = []  # of the messages' image parts, in order
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    normalise: Normalise = True
    with_tokens: bool = True  # False: how many there are is enough
    with_pieces: bool = False


class Detokenize(Struct, tag=True):
    """Answered with Detokenized."""

    tokens: list[int]


class Tokenized(Struct, tag=True):
    count: int
    context_tokens: int  # that the model takes
    tokens: list[int] = []
    pieces: list[bytes] = []


class Detokenized(Struct, tag=True):
    text: str


class ListEntries(Struct, tag=True, kw_only=True):
    """A page of entries, the newest use first. Answered with EntryList."""

    limit: int = 100
    before: int | None = None  # a place in the order of use: entries below it; None: from the top


class ShowEntry(Struct, tag=True):
    """Answered with EntryInfo."""

    cache_key: str


class GetStats(Struct, tag=True):
    """Answered with Stats."""

    of_entries: bool = True  # False: leave out what has to be counted entry by entry


class Validate(Struct, tag=True, kw_only=True):
    """Would this request hit this entry? Changes nothing. Answered with Validation."""

    cache_key: str
    messages: list[dict[str, Any]]
    pictures: list[Picture] = []
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    normalise: Normalise = True


class IndexPrompt(Struct, tag=True, kw_only=True):
    """`prepare` without computing: an entry that knows its tokens. Answered with EntryInfo."""

    messages: list[dict[str, Any]]
    pictures: list[Picture] = []
    tools: list[Any] | None = None
    prepare: Prepare
    normalise: Normalise = True


class Flush(Struct, tag=True):
    """Answered with EntryInfo once the entry is in the slowest tier that takes it."""

    cache_key: str


class ExportState(Struct, tag=True):
    """Write the state of the tenant's own entry into a file in a folder of the front's. Answered
    with StateFile."""

    cache_key: str
    folder: str


class ImportState(Struct, tag=True):
    """Keep the state in a file of the front's as the tenant's own. Answered with EntryInfo."""

    path: str
    session_id: str | None = None  # that the entry is named by


class StoreDocument(Struct, tag=True, kw_only=True):
    """Keep a document with the tenant's own entry of this key; where there is none, as one without
    state. Answered with DocumentStored, when a restart would not lose it any more."""

    key: str
    content: bytes
    ttl_s: float | None = None  # of an entry without state


class GetDocument(Struct, tag=True):
    """The document of the tenant's own entry. Answered with Document."""

    key: str


class DeleteEntry(Struct, tag=True):
    """Answered with Removed."""

    cache_key: str


class PinEntry(Struct, tag=True):
    """Pin or unpin. Answered with EntryInfo."""

    cache_key: str
    pinned: bool


class CollectExpired(Struct, tag=True):
    """Remove what has expired now. Answered with Removed."""


class RemoveSession(Struct, tag=True):
    """Remove the tenant's own entry of a numbered session, a session or a message. Answered with
    Removed."""

    session_id: int | str


class RemoveOld(Struct, tag=True):
    """Remove unpinned entries not used for so long. Answered with Removed."""

    seconds: float


AdminOp = (
    ListEntries
    | ShowEntry
    | GetStats
    | Validate
    | IndexPrompt
    | Flush
    | ExportState
    | ImportState
    | StoreDocument
    | GetDocument
    | DeleteEntry
    | PinEntry
    | CollectExpired
    | RemoveSession
    | RemoveOld
    | Tokenize
    | Detokenize
)


class AdminRequest(Struct, tag=True, kw_only=True):
    """One operation, on behalf of a tenant; an admin sees every tenant's entries."""

    id: int
    salt: bytes
    admin: bool = False
    op: AdminOp
    request_id: str | None = None  # of the HTTP request, for the log


class Segment(Struct, array_like=True):
    """A hashed part of a conversation: "system", "tools" or "turn"."""

    type: str
    hash: str


class EntryName(Struct):
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
    names: list[EntryName]
    tenant: str  # a digest of who owns it
    preview: str = ""  # first words of its last user message; for its own tenant alone
    durable: bool = True  # False: what was asked is done in memory, but the disk did not take it
    lru_position: int = 0  # in the order of use


class StateFile(Struct, tag=True):
    name: str  # in the folder
    token_count: int
    size_bytes: int


class EntryList(Struct, tag=True):
    entries: list[EntryInfo]
    next: int | None = None  # `before` of the next page; None: this is the last


class Document(Struct, tag=True):
    key: str
    content: bytes


class DocumentStored(Struct, tag=True):
    kept: bool  # False: it is too large for what entries may take
    durable: bool = True  # False: the disk did not take it


HEALTHY_DISK_STATES = ("ok", "opening", "off")


class Stats(Struct, tag=True, kw_only=True):
    """One tenant's view, or the sum of all for an admin."""

    entries: int
    pinned_entries: int
    by_tier: dict[str, int]  # entries, by where their last block lies
    ram_bytes: int
    disk_bytes: int
    unique_bytes: int  # of state, each block once
    logical_bytes: int  # what the entries would take if they shared nothing
    hits: int
    partial_hits: int
    misses: int
    evictions: int  # blocks removed to make room
    # Of the whole runtime; zero for a tenant that is not the admin.
    ram_limit_bytes: int = 0
    disk_limit_bytes: int = 0
    #: "ok", "off", or why nothing is written ("opening", "full", "failing", "locked") or read
    #: ("hung").
    disk_state: str = "off"
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    corrupt_blocks: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    active_turns: int = 0  # waiting and running
    encoded_pictures: int = 0  # by the projector
    picture_hits: int = 0  # vectors that were kept, in memory or on disk
    picture_ram_bytes: int = 0
    picture_disk_bytes: int = 0


class Validation(Struct, tag=True, kw_only=True):
    status: Status
    reusable_tokens: int
    invalidated_at: str | None  # "system", "tools" or "turn N"
    reason: Reason
    diverged_at: Divergence | None = None


class Removed(Struct, tag=True):
    entries: int
    freed_bytes: int
    durable: bool = True  # False: they are gone from memory, and may come back with a restart


AdminResult = (
    EntryInfo
    | EntryList
    | StateFile
    | Document
    | DocumentStored
    | Stats
    | Validation
    | Removed
    | Tokenized
    | Detokenized
)


class AdminReply(Struct, tag=True):
    """The result, or the error instead of one."""

    id: int
    result: AdminResult | None = None
    error: ErrorInfo | None = None
