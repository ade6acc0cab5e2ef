"""Encodes conversations into prompts, with the sampled tokens of earlier replies.

A client often sends a reply back with other whitespace, or without its reasoning. We look a reply
up by the ids of its tool calls, or by the hash of all messages up to it. That only proposes a
reply. Comparing messages and bytes decides whether it is the same one, and whether the prompt shows
it where it was sampled. Recent encodings are kept, so that the next turn is cheap.
"""

from __future__ import annotations

import json
import sys
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
from rekindle.chat.messages import (
    Message,
    restored,
    same_message,
    shows_whole,
    with_parsed_arguments,
)
from rekindle.chat.normalise import without_strict
from rekindle.chat.prompt import ChatPrompt, KnownPrefix, Pictures
from rekindle.errors import TemplateFailed
from rekindle.kvcache.entries.entry import Entry, Reply
from rekindle.kvcache.entries.index import EntryIndex, TextIndex
from rekindle.protocol.admin import IndexPrompt, Tokenize, Validate
from rekindle.protocol.requests import GenerateRequest, levels
from rekindle.runtime.encode.request import EncodedPrompt
from rekindle.tokens import Tokens, common_bytes

#: The stored replies that may be an assistant message of a conversation, by the message's index.
KnownReplies = dict[int, list[tuple[Entry, Reply]]]


def find_replies(entries: EntryIndex, namespace: bytes, hashes: ConversationHashes) -> KnownReplies:
    """Return the stored replies that may be messages of a conversation, by message index."""
    if not entries.knows_replies(namespace):
        return {}
    found: KnownReplies = {}
    for index, keys in hashes.reply_keys.items():
        replies = (each for key in keys for each in entries.replies(namespace, key))
        if unique := list(dict.fromkeys(replies)):
            found[index] = unique
    return found


class RestoredMessage(NamedTuple):
    """An assistant message with its tool calls and reasoning as they were sampled."""

    reply: Reply
    with_reasoning: bool  # the reasoning was restored, if the reply has any
    message: Message
    changes: tuple[str, ...]  # names of the differences from the message that was sent
    size_bytes: int  # memory of the message and the reply


class History:
    """The stored replies of one conversation. Any thread may create one and use it."""

    def __init__(
        self,
        entries: EntryIndex,
        namespace: bytes,
        messages: Sequence[Message] = (),
        hashes: ConversationHashes | None = None,
    ) -> None:
        self._entries = entries
        self._namespace = namespace
        self._messages = messages
        self.replies = find_replies(entries, namespace, hashes) if hashes else {}
        self._reply_keys = hashes.reply_keys if hashes else {}

    def restored_messages(
        self, earlier: Mapping[int, RestoredMessage]
    ) -> dict[int, RestoredMessage]:
        """Return the messages with tool calls as they were sampled, by index.

        `earlier` has the results for a conversation that this one continues.
        """
        calling = [index for index in self.replies if self._messages[index].get("tool_calls")]
        found = ((index, self._restored(index, earlier.get(index))) for index in calling)
        return {index: message for index, message in found if message}

    def _restored(self, index: int, earlier: RestoredMessage | None) -> RestoredMessage | None:
        sent = self._messages[index]
        for _, reply in self.replies[index]:
            # After other messages, the reasoning may quote something that is no longer there.
            follows = self._follows_same_history(index, reply)
            if earlier and (earlier.reply, earlier.with_reasoning) == (reply, follows):
                return earlier
            original = _message(reply)
            if original and same_message(sent, original):
                message, changes = restored(sent, original, reasoning=follows)
                message = with_parsed_arguments(message)
                size_bytes = object_bytes(message) + len(reply.message)
                return RestoredMessage(reply, follows, message, tuple(changes), size_bytes)
        return None

    def _follows_same_history(self, index: int, reply: Reply) -> bool:
        """Whether the reply was sampled after the same messages that precede it here."""
        # The last key hashes all messages up to the reply.
        return self._reply_keys[index][-1] in reply.keys

    def recall(self, escaped: bytes, ends: EndMarkers) -> KnownPrefix | None:
        """Return the longest prefix of the rendered prompt whose tokens are known."""
        entry = self._entries.recall(self._namespace, escaped)
        by_text = KnownPrefix(entry.text, entry.tokens[: entry.text_tokens]) if entry else None
        overlap = _Overlap(escaped)
        for index, candidates in reversed(self.replies.items()):
            found = (self._prefix_up_to(overlap, ends, index, *each) for each in candidates)
            longest = max(filter(None, found), key=lambda each: len(each.escaped), default=None)
            if longest is not None:
                by_text_bytes = len(by_text.escaped) if by_text else 0
                return longest if len(longest.escaped) > by_text_bytes else by_text
        return by_text

    def _prefix_up_to(
        self, overlap: _Overlap, ends: EndMarkers, index: int, entry: Entry, reply: Reply
    ) -> KnownPrefix | None:
        """Return the prompt up to the end of the reply, or else up to its beginning."""
        if not reply.prompt_tokens or reply.prompt_bytes > overlap.text_bytes(entry):
            return None
        end = self._end_bytes(overlap, ends, index, entry, reply)
        if end is None:
            prompt = overlap.text[: reply.prompt_bytes]
            return KnownPrefix(prompt, entry.tokens[: reply.prompt_tokens])
        return KnownPrefix(overlap.text[:end], entry.tokens[: reply.end_tokens])

    def _end_bytes(
        self, overlap: _Overlap, ends: EndMarkers, index: int, entry: Entry, reply: Reply
    ) -> int | None:
        """Where the reply ends in the prompt, or None if the prompt shows something else."""
        escaped, begin, original = overlap.text, reply.prompt_bytes, _message(reply)
        if original is None:  # the reply is plain text
            return reply.end_bytes if 0 < reply.end_bytes <= overlap.text_bytes(entry) else None
        end = ends.first_after(escaped, begin) if reply.end_tokens else None
        if end is None or not self._follows_same_history(index, reply):
            return None
        is_same = same_message(self._messages[index], original)
        return end if is_same and shows_whole(escaped[begin:end], original) else None


def still_valid(
    replies: KnownReplies, text: bytes, tokens: Tokens
) -> tuple[list[Reply], Entry | None]:
    """Return the replies that hold in an entry with this text and these tokens.

    The second value is the entry that the new one continues, if one ends with such a reply.
    """
    overlap, kept_replies = _Overlap(text, tokens), list[Reply]()
    continued: Entry | None = None
    for candidates in reversed(replies.values()):
        valid = [
            (entry, kept) for entry, reply in candidates if (kept := overlap.kept(entry, reply))
        ]
        if valid:
            found = (reply for _, reply in valid)
            kept_replies.append(max(found, key=lambda each: (each.end_tokens, each.prompt_tokens)))
        whole = (entry for entry, reply in valid if reply.end_tokens == len(entry.tokens))
        continued = continued or next(whole, None)
    return kept_replies[::-1], continued


class _Overlap:
    """Caches how many bytes and tokens each entry has in common with a prompt."""

    def __init__(self, text: bytes, tokens: Tokens | None = None) -> None:
        self.text = text
        self._own_tokens = tokens or Tokens()
        self._tokens: dict[Entry, int] = {}
        self._bytes: dict[Entry, int] = {}

    def text_bytes(self, entry: Entry) -> int:
        if entry not in self._bytes:
            self._bytes[entry] = common_bytes(entry.text, self.text)
        return self._bytes[entry]

    def kept(self, entry: Entry, reply: Reply) -> Reply | None:
        """The part of an entry's reply that holds for this prompt as well."""
        if entry not in self._tokens:
            self._tokens[entry] = entry.tokens.common_prefix(self._own_tokens)
        return reply.kept(self.text_bytes(entry), self._tokens[entry])


def _message(reply: Reply) -> dict[str, Any] | None:
    return json.loads(reply.message) if reply.message else None


_encoder = msgspec.msgpack.Encoder()


def object_bytes(value: Any) -> int:
    """The memory of a JSON value. It may be 60 times its JSON, as of a list of empty lists."""
    size_bytes = 0
    for level in levels(value):
        size_bytes += sum(map(sys.getsizeof, level))
        names = (name for each in level if isinstance(each, Mapping) for name in each)
        size_bytes += sum(map(sys.getsizeof, names))
    return size_bytes


class ChatTools(NamedTuple):
    """The tools of a request. Equal tools stay the same objects from turn to turn."""

    key: bytes
    sent: Sequence[Any] | None
    shown: Sequence[Any] | None  # as the template gets them
    size_bytes: int  # memory of `sent` and `shown`

    @classmethod
    def of(cls, tools: Sequence[Any] | None, earlier: RecentChat | None) -> ChatTools:
        """Return the tools of the earlier turn if they are equal."""
        key = _encoder.encode(tools)
        if earlier is not None and earlier.tools.key == key:
            return earlier.tools
        return cls(key, tools, without_strict(tools), object_bytes(tools))


@dataclass(frozen=True, slots=True)
class RecentChat:
    """The encoding of one request. Its messages must not be modified, because others share them."""

    messages: Sequence[Message]  # as they were sent, with the arguments of calls parsed
    hashes: ConversationHashes
    prompt: ChatPrompt
    tools: ChatTools
    message_bytes: int  # memory of the messages
    restored: Mapping[int, RestoredMessage] = field(default_factory=dict)  # by message index

    def cost_bytes(self, key: bytes) -> int:
        """Estimate its memory: keys of indexes, the objects, and 1 KiB for each message's hashes
        and spans. Objects that other chats share count in each."""
        prompt = self.prompt
        rendered = len(prompt.escaped) + len(prompt.tokens.packed)
        keys = 3 * (len(key) + len(self.tools.key))
        restored = sum(each.size_bytes for each in self.restored.values())
        objects = self.message_bytes + self.tools.size_bytes + restored
        return keys + rendered + objects + 1024 * len(self.messages)


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


@dataclass(eq=False)
class ChatEncoder:
    """Encodes the conversations of one model. Any thread may call it."""

    encoder: Encoder
    entries: EntryIndex
    ends: EndMarkers  # the markers that end an assistant message in a prompt
    recent_chats: RecentChats = field(default_factory=RecentChats)

    def plain(self, about: GenerateRequest | Tokenize, pictures: Pictures) -> ChatPrompt:
        """Encode a conversation without using or storing anything."""
        sent = list(map(with_parsed_arguments, about.messages or ()))
        tools = without_strict(about.tools)
        return self.encoder.chat(sent, tools=tools, pictures=pictures, **_options(about))

    def prefix(self, about: GenerateRequest | IndexPrompt, pictures: Pictures) -> EncodedPrompt:
        """Encode the common prefix of all conversations that start with these messages."""
        messages = about.messages or []
        prompt = self.encoder.prefix(
            list(map(with_parsed_arguments, messages)),
            tools=without_strict(about.tools),
            template_kwargs=about.template_kwargs if isinstance(about, GenerateRequest) else {},
            pictures=pictures,
        )
        hashes = ConversationHashes(messages, about.tools)
        return EncodedPrompt(prompt, hashes)

    def encode(
        self, about: GenerateRequest | Validate, tenant: bytes, pictures: Pictures, *, recalls: bool
    ) -> EncodedPrompt:
        """Encode a tenant's conversation. With `recalls` it gets the tokens that are stored for
        it, and its tool calls and reasoning as they were sampled."""
        messages = about.messages or []
        key = chat_key(messages)
        earlier = self.recent_chats.find(tenant, key)
        known = earlier.messages if earlier else ()
        added = list(map(with_parsed_arguments, messages[len(known) :]))
        sent = [*known, *added]
        tools = ChatTools.of(about.tools, earlier)
        # Hash here, on an encoder thread. On the engine's thread it would delay the next step.
        hashes = ConversationHashes(
            messages,
            tools.sent,
            continued=isinstance(about, GenerateRequest) and about.continue_final_message,
            earlier=earlier.hashes if earlier else None,
        )
        history = History(self.entries, tenant, sent, hashes)
        restored: dict[int, RestoredMessage] = {}
        if recalls:
            restored = history.restored_messages(earlier.restored if earlier else {})
        encode = partial(
            self.encoder.chat,
            tools=tools.shown,
            pictures=pictures,
            recall=partial(history.recall, ends=self.ends) if recalls else None,
            earlier=earlier.prompt if earlier else None,
            **_options(about),
        )
        prompt, changes = _encode_restored(encode, sent, restored)
        if isinstance(about, GenerateRequest):
            message_bytes = (earlier.message_bytes if earlier else 0) + object_bytes(added)
            recent = RecentChat(sent, hashes, prompt, tools, message_bytes, restored)
            self.recent_chats.put(tenant, key, recent)
        return EncodedPrompt(prompt, hashes, changes)


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
