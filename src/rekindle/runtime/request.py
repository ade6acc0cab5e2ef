"""A request before the engine sees it: as tokens, and beside what is known by its names."""

from __future__ import annotations

from dataclasses import dataclass, field

from rekindle.chat.encode import Prompt
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.entries import Entry
from rekindle.protocol.events import Reason
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.output_format import ReplyDecoding


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """Messages or a text as tokens."""

    prompt: Prompt
    hashes: ConversationHashes | None = None  # None: there are no messages
    normalised: list[str] = field(default_factory=list)  # what was changed so that more matches


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request as tokens."""

    request: GenerateRequest
    prompt: Prompt
    namespace: bytes  # of the tenant
    decoding: ReplyDecoding  # how its reply is read, and what it is held to
    hashes: ConversationHashes | None = None  # None: it has no messages
    normalised: list[str] = field(default_factory=list)  # what was changed so that more matches


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What a request's names lead to."""

    write_back: WriteBack  # when what it computes is to be written to disk
    entry: Entry | None = None  # that one of its names stands for
    problem: Reason | None = None  # why its key stands for none
    auto_session: str | None = None  # what a fingerprint calls this conversation
