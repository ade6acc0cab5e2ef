"""Encodes conversations into prompts, and keeps recent encodings so that the next turn is cheap."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rekindle.chat.encode import Encoder
from rekindle.chat.escaping import EndMarkers
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import Message, with_parsed_arguments
from rekindle.chat.normalise import without_strict
from rekindle.chat.prompt import ChatPrompt, Pictures
from rekindle.errors import TemplateFailed
from rekindle.kvcache.entries.index import EntryIndex, TextIndex
from rekindle.protocol.admin import IndexPrompt, Tokenize, Validate
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.encode.replay import History, RestoredMessage, find_replies
from rekindle.runtime.encode.request import EncodedPrompt

_encoder = msgspec.msgpack.Encoder()


class ChatTools(NamedTuple):
    """The tools of a request. Equal tools stay the same objects from turn to turn."""

    key: bytes
    sent: Sequence[Any] | None
    shown: Sequence[Any] | None  # as the template gets them

    @classmethod
    def of(cls, tools: Sequence[Any] | None, earlier: RecentChat | None) -> ChatTools:
        """Return the tools of the earlier turn if they are equal."""
        key = _encoder.encode(tools)
        if earlier is not None and earlier.tools.key == key:
            return earlier.tools
        return cls(key, tools, without_strict(tools))


@dataclass(frozen=True, slots=True)
class RecentChat:
    """The encoding of one request. Its messages must not be modified, because others share them."""

    messages: Sequence[Message]  # as they were sent, with the arguments of calls parsed
    hashes: ConversationHashes
    prompt: ChatPrompt
    tools: ChatTools
    restored: Mapping[int, RestoredMessage] = field(default_factory=dict)  # by message index

    def cost_bytes(self, key: bytes) -> int:
        """Estimate its memory: texts in the index and as objects, and 1 KiB for each message."""
        prompt = self.prompt
        rendered = len(prompt.escaped) + len(prompt.tokens.packed)
        texts = 3 * (len(key) + len(self.tools.key))
        return texts + rendered + 1024 * len(self.messages)


def chat_key(messages: Sequence[Message]) -> bytes:
    """Serialise messages so that a key is a prefix of another exactly if its messages are.

    The order of fields and the types of numbers count, because a template can see them.
    """
    return b"".join(map(_encoder.encode, messages))


class RecentChats:
    """Recently encoded conversations, found by the messages of a request. Thread-safe.

    The next turn of a conversation takes over everything that depends on single messages or on the
    messages before them. The rendered text and the tokens depend on more and are always made again
    (decision 36). Over the limit, the tenant with the most bytes loses its oldest conversation.
    """

    def __init__(self, limit_bytes: int = 64 << 20) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._texts: dict[bytes, TextIndex[RecentChat]] = {}  # by tenant
        self._chats: dict[bytes, OrderedDict[bytes, RecentChat]] = {}  # by tenant, in LRU order
        self._held_bytes: Counter[bytes] = Counter()

    @property
    def used_bytes(self) -> int:
        return self._held_bytes.total()

    def find(self, tenant: bytes, key: bytes) -> RecentChat | None:
        """Return the longest conversation of the tenant that is a prefix of the one with `key`."""
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
        """Drop all conversations of a tenant, because it has deleted some of its entries."""
        with self._lock:
            for kept in (self._texts, self._chats, self._held_bytes):
                kept.pop(tenant, None)

    def _drop(self, tenant: bytes, key: bytes) -> None:
        chats = self._chats.get(tenant, OrderedDict[bytes, RecentChat]())
        chat = chats.pop(key, None)
        if chat is None:
            return
        self._texts[tenant].drop(key, chat)
        self._held_bytes[tenant] -= chat.cost_bytes(key)
        if not chats:
            del self._texts[tenant], self._chats[tenant], self._held_bytes[tenant]


class ChatEncoder:
    """Encodes the conversations of one model. Any thread may call it."""

    def __init__(self, encoder: Encoder, entries: EntryIndex, ends: EndMarkers) -> None:
        """`ends` are the markers that end an assistant message in a prompt."""
        self.recent_chats = RecentChats()
        self._encoder = encoder
        self._entries = entries
        self._ends = ends

    def plain(self, about: GenerateRequest | Tokenize, pictures: Pictures) -> ChatPrompt:
        """Encode a conversation without using or storing anything."""
        sent = list(map(with_parsed_arguments, about.messages or ()))
        tools = without_strict(about.tools)
        return self._encoder.chat(sent, tools=tools, pictures=pictures, **_options(about))

    def prefix(
        self, about: GenerateRequest | IndexPrompt, tenant: bytes, pictures: Pictures
    ) -> EncodedPrompt:
        """Encode the common prefix of all conversations that start with these messages."""
        messages = about.messages or []
        prompt = self._encoder.prefix(
            list(map(with_parsed_arguments, messages)),
            tools=without_strict(about.tools),
            template_kwargs=about.template_kwargs if isinstance(about, GenerateRequest) else {},
            pictures=pictures,
        )
        hashes = ConversationHashes(messages, about.tools)
        replies = find_replies(self._entries, tenant, hashes)
        return EncodedPrompt(prompt, hashes, known_replies=replies)

    def encode(
        self, about: GenerateRequest | Validate, tenant: bytes, pictures: Pictures, *, recalls: bool
    ) -> EncodedPrompt:
        """Encode a tenant's conversation. With `recalls` it gets the tokens that are stored for
        it, and its tool calls and reasoning as they were sampled."""
        messages = about.messages or []
        key = chat_key(messages)
        earlier = self.recent_chats.find(tenant, key)
        known = earlier.messages if earlier else ()
        sent = [*known, *map(with_parsed_arguments, messages[len(known) :])]
        tools = ChatTools.of(about.tools, earlier)
        # Hash here, on an encoder thread. On the engine's thread it would delay the next step.
        hashes = ConversationHashes(
            messages,
            tools.sent,
            continued=isinstance(about, GenerateRequest) and about.continue_final_message,
            earlier=earlier.hashes if earlier else None,
        )
        history = History(self._entries, tenant, sent, hashes)
        restored: dict[int, RestoredMessage] = {}
        if recalls:
            restored = history.restored_messages(earlier.restored if earlier else {})
        encode = partial(
            self._encoder.chat,
            tools=tools.shown,
            pictures=pictures,
            recall=partial(history.recall, ends=self._ends) if recalls else None,
            earlier=earlier.prompt if earlier else None,
            **_options(about),
        )
        prompt, changes = _encode_restored(encode, sent, restored)
        if isinstance(about, GenerateRequest):
            recent = RecentChat(sent, hashes, prompt, tools, restored)
            self.recent_chats.put(tenant, key, recent)
        return EncodedPrompt(prompt, hashes, changes, history.replies)


def _encode_restored(
    encode: Callable[[Sequence[Message]], ChatPrompt],
    sent: Sequence[Message],
    restored: Mapping[int, RestoredMessage],
) -> tuple[ChatPrompt, list[str]]:
    """Encode the messages as they were sampled; also return the names of the changes."""
    changes = sorted({name for each in restored.values() for name in each.changes})
    if changes:
        places = enumerate(sent)
        as_sampled = [restored[at].message if at in restored else each for at, each in places]
        with suppress(TemplateFailed):  # the template rejects what its model wrote
            return encode(as_sampled), changes
    return encode(sent), []


def _options(about: GenerateRequest | Validate | Tokenize) -> dict[str, Any]:
    """The request's own options of the template."""
    names = ("template_kwargs", "add_generation_prompt", "continue_final_message")
    return {name: getattr(about, name) for name in names if hasattr(about, name)}
