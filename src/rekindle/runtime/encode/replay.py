"""Matches the assistant messages of a request with stored replies.

A client often sends a reply back with other whitespace, or without its reasoning. We look a reply
up by the ids of its tool calls, or by the hash of all messages up to it. That only proposes a
reply. Comparing messages and bytes decides whether it is the same one, and whether the prompt shows
it where it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rekindle.chat.escaping import EndMarkers
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import (
    Message,
    restored,
    same_message,
    shows_whole,
    with_parsed_arguments,
)
from rekindle.chat.prompt import KnownPrefix
from rekindle.kvcache.entries.entry import Entry, Reply
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.runtime.encode.request import KnownReplies
from rekindle.tokens import Tokens, common_bytes


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
                return RestoredMessage(reply, follows, message, tuple(changes))
        return None

    def _follows_same_history(self, index: int, reply: Reply) -> bool:
        """Whether the reply was sampled after the same messages that precede it here."""
        return (
            self._reply_keys[index][-1] in reply.keys
        )  # the last key hashes all messages up to it

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
            kept_replies.append(max((reply for _, reply in valid), key=_known_tokens))
        # An entry may have been removed since the replies were looked up.
        whole = (e for e, reply in valid if e.place and reply.end_tokens == len(e.tokens))
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


def _known_tokens(reply: Reply) -> tuple[int, int]:
    return reply.end_tokens, reply.prompt_tokens


def _message(reply: Reply) -> dict[str, Any] | None:
    return json.loads(reply.message) if reply.message else None
