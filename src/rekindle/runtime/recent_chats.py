"""Conversations as they were last encoded, so that their next turns encode little but what is new.

They are found by the messages of a request, byte for byte and type for type: a conversation goes on
from the longest one whose messages it begins with, and takes over what depends on a message alone
or on those before it. What depends on more, the rendered text and the tokens, is never taken from
here (decision 36).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import Message
from rekindle.chat.normalise import without_strict
from rekindle.chat.prompt import ChatPrompt
from rekindle.kvcache.text_index import TextIndex
from rekindle.runtime.replay import Restoration

LIMIT_BYTES = 64 << 20  # of all that are kept: hundreds of long conversations
MESSAGE_BYTES = 1024  # that a message takes beside its text, at most about

_encoder = msgspec.msgpack.Encoder()


class ChatTools(NamedTuple):
    """The tools of a request: the same objects from turn to turn, as long as they are equal."""

    key: bytes
    sent: Sequence[Any] | None
    shown: Sequence[Any] | None  # what the template sees of them

    @classmethod
    def of(cls, tools: Sequence[Any] | None, earlier: RecentChat | None) -> ChatTools:
        """Those of an earlier turn, if they are the same."""
        key = _encoder.encode(tools)
        if earlier is not None and earlier.tools.key == key:
            return earlier.tools
        return cls(key, tools, without_strict(tools))


@dataclass(frozen=True, slots=True)
class RecentChat:
    """One request's conversation. Its messages are never changed: others share them."""

    messages: Sequence[Message]  # as they were sent, with the arguments of calls parsed
    hashes: ConversationHashes
    prompt: ChatPrompt
    tools: ChatTools
    restorations: Mapping[int, Restoration] = field(default_factory=dict)  # by message

    def cost_bytes(self, key: bytes) -> int:
        """About what it takes: its texts, in the index and as objects, and what is said of them."""
        prompt = self.prompt
        rendered = len(prompt.escaped) + len(prompt.tokens.packed)
        texts = 3 * (len(key) + len(self.tools.key))
        return texts + rendered + MESSAGE_BYTES * len(self.messages)


def chat_key(messages: Sequence[Message]) -> bytes:
    """Equal for equal messages alone: order of fields and types of numbers count, as in templates.
    One that another begins with is that of the messages which that conversation begins with."""
    return b"".join(map(_encoder.encode, messages))


class RecentChats:
    """Any thread may call it. Beyond the limit the tenant that has most gives up its oldest."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._texts: dict[bytes, TextIndex[RecentChat]] = {}  # by tenant
        self._chats: dict[bytes, OrderedDict[bytes, RecentChat]] = {}  # the oldest use first
        self._held_bytes: Counter[bytes] = Counter()

    @property
    def used_bytes(self) -> int:
        return self._held_bytes.total()

    def find(self, tenant: bytes, key: bytes) -> RecentChat | None:
        """The longest of a tenant's conversations that the one with this key begins with."""
        with self._lock:
            texts = self._texts.get(tenant)
            return texts.longest(key) if texts else None

    def put(self, tenant: bytes, key: bytes, chat: RecentChat) -> None:
        cost_bytes = chat.cost_bytes(key)
        if cost_bytes > self._limit_bytes:
            return
        with self._lock:
            self._drop(tenant, key)
            self._chats.setdefault(tenant, OrderedDict())[key] = chat
            self._texts.setdefault(tenant, TextIndex()).put(key, chat)
            self._held_bytes[tenant] += cost_bytes
            while self.used_bytes > self._limit_bytes:
                [(largest, _)] = self._held_bytes.most_common(1)
                self._drop(largest, next(iter(self._chats[largest])))

    def forget(self, tenant: bytes) -> None:
        """Forget a tenant's conversations: it has had some deleted."""
        with self._lock:
            for kept in (self._texts, self._chats, self._held_bytes):
                kept.pop(tenant, None)

    def _drop(self, tenant: bytes, key: bytes) -> None:
        """The one place where less is kept."""
        chats = self._chats.get(tenant, OrderedDict[bytes, RecentChat]())
        chat = chats.pop(key, None)
        if chat is None:
            return
        self._texts[tenant].drop(key, chat)
        self._held_bytes[tenant] -= chat.cost_bytes(key)
        if not chats:
            del self._texts[tenant], self._chats[tenant], self._held_bytes[tenant]
