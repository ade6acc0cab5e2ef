"""Matching the assistant messages of a request with the replies that are remembered.

A reply is looked up by the ids of its calls or by the hash of all messages up to it; that only
proposes it. Whether it is the same, and whether the prompt shows it where it was sampled, is
decided by comparing messages and bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rekindle.chat.escaping import EndMarkers
from rekindle.chat.message_hashes import ConversationHashes
from rekindle.chat.messages import (
    Message,
    canonical,
    restored,
    same_message,
    shows_whole,
    with_parsed_arguments,
)
from rekindle.chat.prompt import KnownPrefix
from rekindle.kvcache.entries.entry import Entry, Reply
from rekindle.kvcache.entries.index import EntryIndex
from rekindle.runtime.schedule.turn import Turn
from rekindle.tokens import Tokens, common_bytes

Candidate = tuple[Entry, Reply]


class Restoration(NamedTuple):
    """A message as it was sampled, and what it was found by."""

    reply: Reply
    with_reasoning: bool  # its reasoning was restored, if it had any
    message: Message
    changes: tuple[str, ...]  # the names of what is different from the message that was sent


class History:
    """The remembered replies of one conversation. Any thread may make one and use it."""

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
        self._candidates: dict[int, list[Candidate]] = {}  # by message index, in order
        self._history_keys: dict[int, str] = {}  # the key by all messages up to that one
        if hashes is not None and entries.knows_replies(namespace):
            for index, keys in hashes.reply_keys.items():
                if found := list(self._find(keys)):
                    self._candidates[index], self._history_keys[index] = found, keys[-1]

    def _find(self, keys: Sequence[str]) -> Iterator[Candidate]:
        seen: set[Candidate] = set()
        for key in keys:
            for candidate in self._entries.replies(self._namespace, key):
                if candidate not in seen:
                    seen.add(candidate)
                    yield candidate

    def restorations(self, earlier: Mapping[int, Restoration]) -> dict[int, Restoration]:
        """The messages with calls as they were sampled, by index; `earlier` are those of a
        conversation that this one goes on from."""
        calling = [index for index in self._candidates if self._messages[index].get("tool_calls")]
        found = ((index, self._restoration(index, earlier.get(index))) for index in calling)
        return {index: restoration for index, restoration in found if restoration}

    def _restoration(self, index: int, earlier: Restoration | None) -> Restoration | None:
        sent = self._messages[index]
        for _, reply in self._candidates[index]:
            # After another history, the reasoning may quote what is no longer there.
            follows = self._follows_same_history(index, reply)
            if earlier and (earlier.reply, earlier.with_reasoning) == (reply, follows):
                return earlier
            original = _message(reply)
            if original and same_message(sent, original):
                message, changes = restored(sent, original, reasoning=follows)
                message = with_parsed_arguments(message)
                return Restoration(reply, follows, message, tuple(changes))
        return None

    def _follows_same_history(self, index: int, reply: Reply) -> bool:
        """Whether the messages before a reply are those that it was sampled after."""
        return self._history_keys[index] in reply.keys

    def recall(self, escaped: bytes, ends: EndMarkers) -> KnownPrefix | None:
        """The longest prefix of a prompt of this conversation whose tokens are known."""
        by_text, overlap = self._recall_by_text(escaped), _Overlap(escaped)
        for index, candidates in reversed(self._candidates.items()):
            found = (self._prefix_up_to(overlap, ends, index, *each) for each in candidates)
            longest = max(filter(None, found), key=lambda each: len(each.escaped), default=None)
            if longest is not None:
                least = len(by_text.escaped) if by_text else 0
                return longest if len(longest.escaped) > least else by_text
        return by_text

    def _recall_by_text(self, escaped: bytes) -> KnownPrefix | None:
        entry = self._entries.recall(self._namespace, escaped)
        return KnownPrefix(entry.text, entry.tokens[: entry.text_tokens]) if entry else None

    def _prefix_up_to(
        self, overlap: _Overlap, ends: EndMarkers, index: int, entry: Entry, reply: Reply
    ) -> KnownPrefix | None:
        """The prompt up to the end of a reply, or up to its beginning, or nothing of it."""
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
        """Where the reply ends in the prompt; None when what is there is not the reply."""
        escaped, begin, original = overlap.text, reply.prompt_bytes, _message(reply)
        if original is None:  # it is nothing but text
            return reply.end_bytes if 0 < reply.end_bytes <= overlap.text_bytes(entry) else None
        end = ends.first_after(escaped, begin) if reply.end_tokens else None
        if end is None or not self._follows_same_history(index, reply):
            return None
        is_same = same_message(self._messages[index], original)
        return end if is_same and shows_whole(escaped[begin:end], original) else None

    def still_valid(self, text: bytes, tokens: Tokens) -> tuple[list[Reply], Entry | None]:
        """What holds of these replies in an entry with this text and these tokens; and the entry
        that this one continues, if one ends with a reply of it."""
        overlap, replies = _Overlap(text, tokens), list[Reply]()
        before: Entry | None = None
        for candidates in reversed(self._candidates.values()):
            valid = [
                (entry, kept) for entry, reply in candidates if (kept := overlap.kept(entry, reply))
            ]
            replies += [max((reply for _, reply in valid), key=_known_tokens)] if valid else []
            whole = (entry for entry, reply in valid if reply.end_tokens == len(entry.tokens))
            before = before or next(whole, None)
        return replies[::-1], before


class _Overlap:
    """How much of a text, and of its tokens, entries have in common with it."""

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
        """What holds of an entry's reply here, too."""
        if entry not in self._tokens:
            self._tokens[entry] = entry.tokens.common_prefix(self._own_tokens)
        return reply.kept(self.text_bytes(entry), self._tokens[entry])


def replies_after(
    entries: EntryIndex,
    turn: Turn,
    text: bytes,
    tokens: Tokens,
    *,
    keys: tuple[str, ...],
    end_tokens: int,
) -> tuple[tuple[Reply, ...], Entry | None]:
    """A conversation's replies including the turn's own, and the entry that it continues.

    `keys` are those of the turn's own reply, if it has one; `end_tokens` is 0 when the tokens of
    that reply are not exactly what its client got.
    """
    messages, escaped = turn.request.messages or [], turn.encoded.prompt.escaped
    if not messages or not escaped:
        return (), None
    history = History(entries, turn.namespace, messages, turn.encoded.hashes)
    replies, before = history.still_valid(text, tokens)
    if keys:
        output = turn.output
        is_plain = output.is_plain
        message = b"" if is_plain else canonical(output.message.as_dict())
        end_bytes = len(text) if is_plain else 0
        prompt = len(escaped), turn.prompt_tokens
        replies.append(Reply(keys, message, *prompt, end_tokens, end_bytes))
    return tuple(replies), before


def _known_tokens(reply: Reply) -> tuple[int, int]:
    return reply.end_tokens, reply.prompt_tokens


def _message(reply: Reply) -> dict[str, Any] | None:
    return json.loads(reply.message) if reply.message else None
