"""Harmony, which gpt-oss writes: messages on channels, some of them addressed to a function."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rekindle.chat.tools.base import Machine, Tail
from rekindle.chat.tools.reader import Finder, Reading, Steps
from rekindle.protocol.events import ReasoningDelta, TextDelta

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
THOUGHT = (f"{CHANNEL}analysis{MESSAGE}", ENDS[0])

_ANY = Finder(*MARKERS)
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+)")
_ADDRESS = re.compile(r"[\w.:/-]*")
_HEADER = re.compile(r"[\w\s=.:/-]{0,200}")


class Header(NamedTuple):
    """What stands before a message."""

    channel: str
    recipient: str


class Harmony(Machine):
    """Analysis is thought, a message to a function is a call, all others are said.

    The reply begins in the middle of a header, for the prompt ends with the start of one. Markers
    and headers are never said; text outside of all messages is.
    """

    def __init__(self, names: Collection[str], *, calls: bool = True, opened: bool = False) -> None:
        super().__init__()
        self._names = names
        self._calling = calls
        self._opened = opened
        self._spoken: set[type[TextDelta] | type[ReasoningDelta]] = set()

    def _run(self) -> Steps[None]:
        if self._opened:
            yield from self._text(ReasoningDelta)
        while (header := (yield from self._header())) is not None:
            name = self._function(header.recipient)
            if name is not None:
                yield self._begin(name)
                yield from self._argue_raw(_ANY)
                yield from self._source.starts(*ENDS)
            else:
                yield from self._text(ReasoningDelta if header.channel == "analysis" else TextDelta)

    def _function(self, recipient: str) -> str | None:
        """The function that a message is addressed to."""
        name = recipient.removeprefix(_FUNCTIONS)
        known = name in self._names or recipient.startswith(_FUNCTIONS)
        return name if name and known and self._calling else None

    def _header(self) -> Steps[Header | None]:
        """The next message's header, up to where its text begins; None at the end."""
        texts = {"": (yield from self._lead())}
        while marker := (yield from self._source.starts(*MARKERS)):
            if marker == MESSAGE:
                return _read(texts)
            if marker in ENDS:
                texts = {"": (yield from self._lead())}
                continue
            if marker == START:
                texts.clear()
            texts[marker] = yield from self._header_text()
        rest = "".join(texts.values())
        if not _HEADER.fullmatch(rest):
            yield TextDelta(rest)
        return None

    def _header_text(self) -> Reading[str]:
        pieces = []
        while True:
            text, marker = yield from self._source.until(_ANY)
            pieces.append(text)
            if marker is not None or not text:
                return "".join(pieces)

    def _lead(self) -> Steps[str]:
        """The beginning of a header before its first marker; any other text there is said."""
        source = self._source
        while True:
            source.hold()
            yield from source.space()
            yield from source.starts("assistant")
            yield from source.space()
            if (yield from source.starts("to=")):
                yield from source.run(_ADDRESS)
            yield from source.space()
            text = source.release()
            if (yield from source.at_marker(_ANY)):
                return text
            yield from self._text(TextDelta, text)
            if not (yield from source.peek()):
                return ""

    def _text(self, kind: type[TextDelta] | type[ReasoningDelta], text: str = "") -> Steps[None]:
        """A message's text up to its end, less the space around it."""
        self.thinking = kind is ReasoningDelta
        first = not self._spoken and not self._calls
        before = "\n\n" if kind in self._spoken else ""
        if not text:
            yield from self._source.space()
        tail, marker = Tail(), None
        while True:
            if certain := tail.add(text):
                yield kind(before + certain)
                self._spoken.add(kind)
                first, before = True, ""
            if marker is not None:
                break
            text, marker = yield from self._source.until(_ANY)
            if marker is None and not text:
                break
        rest = tail.rest()
        if marker is None and rest and first:
            yield kind(rest)
        yield from self._source.starts(*ENDS)
        self.thinking = False


def _read(texts: dict[str, str]) -> Header:
    header = " ".join(texts.values())
    recipient = _RECIPIENT.search(header)
    channel = texts.get(CHANNEL, "").split()
    return Header(channel[0] if channel else "", recipient[1] if recipient else "")
