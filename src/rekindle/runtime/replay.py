"""A conversation that came back, beside the replies that are remembered of it.

A reply is found by the ids of its calls or by all that was said up to it; that proposes it. Whether
it is the same, and whether the prompt shows it where it was sampled, is looked at byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from rekindle.chat.arguments import parsed
from rekindle.chat.content import Message
from rekindle.chat.known_prefix import Remembered
from rekindle.chat.replay import Ends, Keys, canonical, restored, same, shows
from rekindle.kvcache.entries import Entries, Entry
from rekindle.kvcache.replies import Reply
from rekindle.runtime.turn import Turn
from rekindle.tokens import Tokens, common_bytes

Known = tuple[Entry, Reply]


class History:
    """Any thread may make one and use it."""

    def __init__(
        self,
        entries: Entries,
        root: bytes,
        messages: Sequence[Message],
        keys: Keys,
    ) -> None:
        self._entries = entries
        self._root = root
        self._sent = messages
        self._known: dict[int, list[Known]] = {}  # by message, oldest first
        self._said: dict[int, str] = {}  # the key of all that was said up to it
        if entries.knows_replies(root):
            for index, each in keys.known.items():
                if known := list(self._find(each)):
                    self._known[index], self._said[index] = known, each[-1]

    def _find(self, names: Sequence[str]) -> Iterator[Known]:
        seen: set[Known] = set()
        for name in names:
            for known in self._entries.replies(self._root, name):
                if known not in seen:
                    seen.add(known)
                    yield known

    def restored(self) -> tuple[list[Message], list[str]]:
        """The messages with calls as they were sampled; and what that changed."""
        messages, done = list(self._sent), dict[str, None]()
        for index, known in self._known.items():
            sent = messages[index]
            delivered = ((reply, _message(reply)) for _, reply in known)
            fitting = ((reply, was) for reply, was in delivered if was and same(sent, was))
            if sent.get("tool_calls") and (found := next(fitting, None)):
                reply, was = found
                follows = self._follows(index, reply)  # else it may quote what was taken out
                message, changes = restored(sent, was, reasoning=follows)
                messages[index] = parsed(message)
                done.update(dict.fromkeys(changes))
        return messages, sorted(done)

    def _follows(self, index: int, reply: Reply) -> bool:
        """Whether all that was said before a reply is what was said before it then."""
        return self._said[index] in reply.keys

    def recall(self, marked: bytes, ends: Ends) -> Remembered | None:
        """The longest beginning of a prompt of this conversation whose tokens are remembered."""
        by_text, overlap = self._by_text(marked), _Overlap(marked)
        for index, known in reversed(self._known.items()):
            reached = (self._reach(overlap, ends, index, *each) for each in known)
            far = max(filter(None, reached), key=lambda each: len(each.marked), default=None)
            if far is not None:
                least = len(by_text.marked) if by_text else 0
                return far if len(far.marked) > least else by_text
        return by_text

    def _by_text(self, marked: bytes) -> Remembered | None:
        entry = self._entries.recall(self._root, marked)
        return Remembered(entry.text, entry.first(entry.text_tokens)) if entry else None

    def _reach(
        self, overlap: _Overlap, ends: Ends, index: int, entry: Entry, reply: Reply
    ) -> Remembered | None:
        """The prompt up to the end of a reply, or up to its beginning, or nothing of it."""
        if not reply.prompt_tokens or reply.prompt_bytes > overlap.text_bytes(entry):
            return None
        end = self._end(overlap, ends, index, entry, reply)
        if end is None:
            prompt = overlap.text[: reply.prompt_bytes]
            return Remembered(prompt, entry.first(reply.prompt_tokens))
        return Remembered(overlap.text[:end], entry.first(reply.end_tokens))

    def _end(
        self, overlap: _Overlap, ends: Ends, index: int, entry: Entry, reply: Reply
    ) -> int | None:
        """Where the reply ends in the prompt; None when what is there is not the reply."""
        marked, begin, delivered = overlap.text, reply.prompt_bytes, _message(reply)
        if delivered is None:  # it is nothing but text
            return reply.end_bytes if 0 < reply.end_bytes <= overlap.text_bytes(entry) else None
        end = ends.after(marked, begin) if reply.end_tokens else None
        if end is None or not self._follows(index, reply):  # after other messages it is another
            return None
        is_there = same(self._sent[index], delivered) and shows(marked[begin:end], delivered)
        return end if is_there else None

    def carried(self, text: bytes, tokens: Tokens) -> tuple[list[Reply], Entry | None]:
        """What is still true of these replies in a head with this text and these tokens; and the
        head that this one goes on from, if one ends with a reply of it."""
        overlap, replies = _Overlap(text, tokens), list[Reply]()
        before: Entry | None = None
        for known in reversed(self._known.values()):
            kept = [(each, still) for each, reply in known if (still := overlap.kept(each, reply))]
            replies += [max((reply for _, reply in kept), key=_worth)] if kept else []
            whole = (entry for entry, reply in kept if reply.end_tokens == len(entry.tokens))
            before = before or next(whole, None)
        return replies[::-1], before


class _Overlap:
    """What a text, and the tokens of one, have in common with entries."""

    def __init__(self, text: bytes, tokens: Tokens | None = None) -> None:
        self.text = text
        self._tokens = tokens or Tokens()
        self._common: dict[Entry, int] = {}
        self._bytes: dict[Entry, int] = {}

    def text_bytes(self, entry: Entry) -> int:
        if entry not in self._bytes:
            self._bytes[entry] = common_bytes(entry.text, self.text)
        return self._bytes[entry]

    def kept(self, entry: Entry, reply: Reply) -> Reply | None:
        """What is true of an entry's reply here, too."""
        if entry not in self._common:
            self._common[entry] = entry.tokens.common_prefix(self._tokens)
        return reply.kept(self.text_bytes(entry), self._common[entry])


def replies_after(
    entries: Entries, turn: Turn, text: bytes, tokens: Tokens, *, end_tokens: int
) -> tuple[tuple[Reply, ...], Entry | None]:
    """A conversation's replies up to the turn's own, and the head that it goes on from. Without
    `end_tokens`, the tokens of the turn's reply are not all that was delivered, or more."""
    messages, marked = turn.ask.messages or [], turn.prompt.marked
    if not messages or not marked:
        return (), None
    is_said = turn.ask.prepare is None
    keys = turn.keys or Keys(messages)
    earlier, before = History(entries, turn.namespace, messages, keys).carried(text, tokens)
    if is_said:
        plain = turn.is_plain
        message, end_bytes = (b"", len(text)) if plain else (canonical(turn.message), 0)
        prompt = len(marked), turn.prompt_tokens
        own = tuple(keys.after(turn.message))
        earlier.append(Reply(own, message, *prompt, end_tokens, end_bytes))
    return tuple(earlier), before


def _worth(reply: Reply) -> tuple[int, int]:
    return reply.end_tokens, reply.prompt_tokens


def _message(reply: Reply) -> dict[str, Any] | None:
    return json.loads(reply.message) if reply.message else None
