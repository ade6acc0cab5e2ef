"""Defines the operations on a model's cache and tokeniser, and their results."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from rekindle.protocol.events import Divergence, ErrorInfo, Reason, Status
from rekindle.protocol.requests import Picture, Prepare
from rekindle.protocol.settings import Normalise


class Tokenize(Struct, tag=True, kw_only=True):
    """Tokenise a text, or a conversation as the chat template renders it. Returns Tokenized."""

    text: str | None = None
    add_special: bool = False  # add BOS and the like around a text
    parse_special: bool = True  # turn the text of a control token into that token
    messages: list[dict[str, Any]] | None = None
    pictures: list[Picture] = []  # one per image part of the messages, in order
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    normalise: Normalise = True
    with_tokens: bool = True  # False: return only the count
    with_text: bool = False  # return the text that the chat template renders
    with_pieces: bool = False


class Detokenize(Struct, tag=True):
    """Turn tokens into text. Returns Detokenized."""

    tokens: list[int]


class Tokenized(Struct, tag=True):
    """Compact, because a text may have millions of tokens, and the event loop decodes this."""

    count: int
    context_tokens: int  # the model's context length
    packed: bytes = b""  # the ids, packed by `pack_ids`
    pieces: dict[int, bytes] = {}  # the text of each id that occurs
    text: str = ""  # of a conversation

    @property
    def ids(self) -> memoryview[int]:
        return memoryview(self.packed).cast("I")


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack ids as 32 bits in the machine's byte order: both processes run on one machine."""
    return array("I", ids).tobytes()


class Detokenized(Struct, tag=True):
    text: str


class ListEntries(Struct, tag=True, kw_only=True):
    """List a page of entries, most recently used first. Returns EntryList."""

    limit: int = 100
    before: int | None = None  # list entries below this `lru_position`; None: from the top


class ShowEntry(Struct, tag=True):
    """Returns EntryInfo."""

    cache_key: str


class GetStats(Struct, tag=True):
    """Returns Stats."""

    of_entries: bool = True  # False: skip the figures that need a walk over all entries


class ShowTree(Struct, tag=True, kw_only=True):
    """Show how conversations share their stored prefixes. Returns PrefixTree."""

    limit: int = 1000  # of branches


class ShowBranch(Struct, tag=True):
    """Show the text of a branch. Returns BranchText."""

    key: str


class Validate(Struct, tag=True, kw_only=True):
    """Compare a request with an entry without changing anything. Returns Validation."""

    cache_key: str
    messages: list[dict[str, Any]]
    pictures: list[Picture] = []
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] = {}
    normalise: Normalise = True


class IndexPrompt(Struct, tag=True, kw_only=True):
    """Create an entry from a prompt's tokens without computing it. Returns EntryInfo."""

    messages: list[dict[str, Any]]
    pictures: list[Picture] = []
    tools: list[Any] | None = None
    prepare: Prepare
    normalise: Normalise = True


class Flush(Struct, tag=True):
    """Write an entry to the slowest tier that accepts it, then return EntryInfo."""

    cache_key: str


class ExportState(Struct, tag=True):
    """Write an entry's state into a file in the front's folder. Returns StateFile."""

    cache_key: str
    folder: str


class ImportState(Struct, tag=True):
    """Store the state in the front's file as an entry of the tenant. Returns EntryInfo."""

    path: str
    session_id: str | None = None  # name for the entry


class StoreDocument(Struct, tag=True, kw_only=True):
    """Store a document with the tenant's entry of this key, or with a new entry without state.

    Returns DocumentStored once the document would survive a restart, or cannot.
    """

    key: str
    content: bytes
    ttl_s: float | None = None  # of a new entry


class GetDocument(Struct, tag=True):
    """Return the Document of the tenant's entry."""

    key: str


class ListDocuments(Struct, tag=True):
    """Return the DocumentKeys of the tenant that begin with a prefix, oldest first."""

    prefix: str


class DeleteEntry(Struct, tag=True):
    """Returns Removed."""

    cache_key: str


class PinEntry(Struct, tag=True):
    """Pin or unpin an entry. Returns EntryInfo."""

    cache_key: str
    pinned: bool


class CollectExpired(Struct, tag=True):
    """Remove expired entries now. Returns Removed."""


class RemoveSession(Struct, tag=True):
    """Remove the tenant's entry with this session number, session id or message id.

    Returns Removed.
    """

    session_id: int | str


class RemoveOld(Struct, tag=True):
    """Remove unpinned entries of sessions and messages that were not used for this long.

    Returns Removed.
    """

    seconds: float


class NameTenants(Struct, tag=True):
    """Tell how EntryInfo names the tenants with these salts. Returns TenantIds."""

    salts: list[bytes]
    groups: list[str] = []


class TenantIds(Struct, tag=True):
    """In the order of the request: of the tenants, of state that all share, and of the groups."""

    tenants: list[str]
    shared: str
    groups: list[str]


class RemoveTenant(Struct, tag=True):
    """End the tenant's turns and remove everything that is stored for it. Returns Removed."""

    salt: bytes


Listing = ListEntries | ShowEntry | GetStats | NameTenants | ShowTree | ShowBranch
Lookup = Listing | Validate | Tokenize | Detokenize
DocumentLookup = GetDocument | ListDocuments
Creation = IndexPrompt | Flush | ExportState | ImportState | StoreDocument | PinEntry
Removal = DeleteEntry | CollectExpired | RemoveSession | RemoveOld | RemoveTenant
AdminOp = Lookup | DocumentLookup | Creation | Removal


class AdminRequest(Struct, tag=True, kw_only=True):
    """One operation for a tenant. An admin sees the entries of all tenants."""

    id: int
    salt: bytes
    groups: list[str] = []  # of the tenant, whose shared entries it may look up
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
    tier: str | None  # the slowest tier that holds its state; None: none does
    size_bytes: int  # of its state, including blocks shared with other entries
    held_tokens: int  # tokens whose state is held
    stored_tokens: int  # tokens whose state would survive a restart
    hit_count: int
    pinned: bool
    ttl: float | None
    created_at: float
    last_used: float
    expires_at: float | None
    names: list[EntryName]
    tenant: str  # digest of the owner's salt
    preview: str = ""  # start of its last user message; shown only to its tenant
    durable: bool = True  # False: changed in memory, but the disk write failed
    lru_position: int = 0  # grows with each use of an entry
    has_document: bool = False  # it belongs to a stored response, conversation or thread


class Branch(Struct):
    """Consecutive blocks that the same conversations use."""

    key: str  # the chain key of its first block, in hexadecimal
    parent: int | None  # index of the branch before it
    start: int  # number of tokens before it
    tokens: int
    size_bytes: int
    tier: str  # the fastest tier that has its first block
    conversations: int  # that use it


class PrefixTree(Struct, tag=True):
    """Stored prefixes, parents first. Each shared part occurs once."""

    branches: list[Branch]
    is_complete: bool  # False: more branches exist, which fewer conversations use


class BranchText(Struct, tag=True):
    text: str
    is_complete: bool = True  # False: the branch is longer


class StateFile(Struct, tag=True):
    name: str  # file name in the folder
    token_count: int
    size_bytes: int


class EntryList(Struct, tag=True):
    entries: list[EntryInfo]
    next: int | None = None  # `before` for the next page; None: this is the last page


class Document(Struct, tag=True):
    key: str
    content: bytes


class DocumentKeys(Struct, tag=True):
    keys: list[str]
    created_at: list[float]  # of each


class DocumentStored(Struct, tag=True):
    kept: bool  # False: it exceeds the budget for entries
    durable: bool = True  # False: it is in memory only, because the disk cannot be written


HEALTHY_DISK_STATES = ("ok", "opening", "off")


class Stats(Struct, tag=True, kw_only=True):
    """The figures of one tenant, or of all tenants for an admin."""

    entries: int
    pinned_entries: int
    by_tier: dict[str, int]  # number of entries by the tier of their last block
    ram_bytes: int
    disk_bytes: int
    unique_bytes: int  # of state, counting each block once
    logical_bytes: int  # of state, if entries shared no blocks
    hits: int
    partial_hits: int
    misses: int
    evictions: int  # blocks evicted to free space
    # The figures below cover the whole runtime. They are zero unless an admin asks.
    ram_limit_bytes: int = 0
    disk_limit_bytes: int = 0
    #: "ok" or "off"; not writing because of "opening", "full", "failing" or "locked"; or not even
    #: reading because of "hung".
    disk_state: str = "off"
    disk_queued_bytes: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    corrupt_blocks: int = 0
    computed_tokens: int = 0
    reused_tokens: int = 0
    active_turns: int = 0  # waiting and running
    encoded_pictures: int = 0  # pictures that the projector encoded
    picture_hits: int = 0  # pictures whose vectors came from RAM or disk
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
    durable: bool = True  # False: removed from memory, but a restart may bring them back


EntryResult = EntryInfo | EntryList | StateFile | Removed
TreeResult = PrefixTree | BranchText
DocumentResult = Document | DocumentStored | DocumentKeys
StateResult = EntryResult | TreeResult | DocumentResult
AdminResult = StateResult | Stats | Validation | TenantIds | Tokenized | Detokenized


class AdminReply(Struct, tag=True):
    """The result of an operation, or its error."""

    id: int
    result: AdminResult | None = None
    error: ErrorInfo | None = None
