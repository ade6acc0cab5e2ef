"""A request's conversation into its prompt: what was found out about it at an earlier turn is taken
over, and replies are put back as they were sampled."""

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
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.kvcache.entries.text_index import TextIndex
from rekindle.protocol.admin import Tokenize, Validate
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.encode.replay import History, Restoration
from rekindle.runtime.encode.request import EncodedPrompt

# ----------------------------------------------------------------------
# Conversations as they were last encoded, so that their next turns encode little but what is new.
#
# They are found by the messages of a request, byte for byte and type for type: a conversation goes
# on from the longest one whose messages it begins with, and takes over what depends on a message
# alone or on those before it. What depends on more, the rendered text and the tokens, is never
# taken from here (decision 36).

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


class ChatEncoder:
    """Any thread may call it."""

    def __init__(self, encoder: Encoder, entries: EntryIndex, ends: EndMarkers) -> None:
        """`ends`: where assistant messages end in a prompt."""
        self.recent_chats = RecentChats()
        self._encoder = encoder
        self._entries = entries
        self._ends = ends

    def plain(self, about: GenerateRequest | Tokenize, pictures: Pictures) -> ChatPrompt:
        """The prompt of a conversation of which nothing is remembered."""
        sent = list(map(with_parsed_arguments, about.messages or ()))
        tools = without_strict(about.tools)
        return self._encoder.chat(sent, tools=tools, pictures=pictures, **_options(about))

    def encode(
        self,
        about: GenerateRequest | Validate,
        tenant: bytes,
        pictures: Pictures,
        *,
        recalls: bool,
    ) -> EncodedPrompt:
        """A tenant's conversation; `recalls`: with the tokens that are remembered of it."""
        messages = about.messages or []
        key = chat_key(messages)
        earlier = self.recent_chats.find(tenant, key)
        known = earlier.messages if earlier else ()
        sent = [*known, *map(with_parsed_arguments, messages[len(known) :])]
        tools = ChatTools.of(about.tools, earlier)
        # Long conversations are hashed here, on an encoder thread, not between two engine steps.
        hashes = ConversationHashes(
            messages,
            tools.sent,
            continued=isinstance(about, GenerateRequest) and about.continue_final_message,
            earlier=earlier.hashes if earlier else None,
        )
        history = History(self._entries, tenant, sent, hashes) if recalls else None
        restored = history.restorations(earlier.restorations if earlier else {}) if history else {}

        def encode(messages: Sequence[Message]) -> ChatPrompt:
            return self._encoder.chat(
                messages,
                tools=tools.shown,
                pictures=pictures,
                recall=partial(history.recall, ends=self._ends) if history else None,
                earlier=earlier.prompt if earlier else None,
                **_options(about),
            )

        prompt, changes = _encoded(encode, sent, restored)
        if isinstance(about, GenerateRequest):
            recent = RecentChat(sent, hashes, prompt, tools, restored)
            self.recent_chats.put(tenant, key, recent)
        return EncodedPrompt(prompt, hashes, changes)


def _encoded(
    encode: Callable[[Sequence[Message]], ChatPrompt],
    sent: Sequence[Message],
    restored: Mapping[int, Restoration],
) -> tuple[ChatPrompt, list[str]]:
    """The messages with tool calls and reasoning as they were sampled, encoded; and the names of
    what that changed."""
    changes = sorted({name for each in restored.values() for name in each.changes})
    if changes:
        places = enumerate(sent)
        as_sampled = [restored[at].message if at in restored else each for at, each in places]
        with suppress(TemplateFailed):  # it refuses what its model wrote: then as it was sent
            return encode(as_sampled), changes
    return encode(sent), []


def _options(about: GenerateRequest | Validate | Tokenize) -> dict[str, Any]:
    """How a request wants its conversation encoded."""
    options = {"template_kwargs": about.template_kwargs}
    if isinstance(about, Validate):
        return options
    ends = ("add_generation_prompt", "continue_final_message")
    return {**options, **{name: getattr(about, name) for name in ends}}
