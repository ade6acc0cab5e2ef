"""Separates reasoning, which a model writes between markers before its answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from rekindle.chat.tools.stream import (
    MarkerFinder,
    ReplyContext,
    ReplyParser,
    Steps,
    StreamParser,
    TrailingSpace,
)
from rekindle.protocol.events import Part, ReasoningDelta


class ReasoningFormat(NamedTuple):
    begin: str
    end: str

    @property
    def control_markers(self) -> tuple[str, str]:
        """The markers as single control tokens. A channel's name after one is plain text."""
        return self.begin.removesuffix("thought"), self.end

    def is_in(self, template: str) -> bool:
        return self.begin in template or self.end in template

    def is_open(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, and not only an earlier message does."""
        at = prompt.rfind(self.begin)
        if at < 0:
            return False
        rest = prompt[at + len(self.begin) :]
        return self.end not in rest and not _TURN.search(rest)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "minimax": ReasoningFormat("<mm:think>", "</mm:think>"),
    "step": ReasoningFormat("<|THINK_START|>", "<|THINK_END|>"),
    "exaone": ReasoningFormat("<thought>", "</thought>"),
}

# Text that only a template writes, where a turn or a message begins or ends.
_TURN = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>"
    r"|\[/?INST\]|<(?:start|end)_of_turn>|</s>"
)


class ReasoningParser(StreamParser):
    """Parses reasoning at the beginning of a reply, and gives the rest to another parser.

    Whitespace around the markers belongs to neither. If the prompt has already opened the
    reasoning, the model may open it once more.
    """

    def __init__(self, reply: ReplyContext, format: ReasoningFormat, rest: ReplyParser) -> None:
        super().__init__(reply)
        self.in_reasoning = reply.opened
        self._format = format
        self._begin = MarkerFinder(format.begin)
        self._rest = rest

    def push(self, text: str) -> list[Part]:
        parts = super().push(text)
        self.ended_calls = self._rest.ended_calls
        return parts

    def finish(self, *, cut: bool = False) -> list[Part]:
        parts = super().finish(cut=cut)
        self.ended_calls = self._rest.ended_calls
        self.is_call_cut |= self._rest.is_call_cut
        return parts

    def _run(self) -> Steps[None]:
        reader = self._reader
        reader.hold()
        yield from reader.space()
        if (yield from reader.starts(self._format.begin)):
            self.in_reasoning = True
        if self.in_reasoning:
            reader.drop()
            yield from reader.space()
            if not (yield from self._reasoning(MarkerFinder(self._format.end))):
                return
            self.in_reasoning = False
            yield from reader.space()
            reader.hold()
        yield from self._rest.push(reader.release())
        while (yield from reader.peek()):
            rest = self._without_partial_marker(reader.rest(), self._begin)
            yield from self._rest.push(rest) if rest else []
        yield from self._rest.finish(cut=self._cut)

    def _reasoning(self, ends: MarkerFinder) -> Steps[bool]:
        """Passes reasoning on up to its end marker. Returns whether there was one."""
        trailing = TrailingSpace()
        while True:
            text, marker = yield from self._reader.until(ends)
            if certain := trailing.add(self._without_partial_marker(text, ends)):
                yield ReasoningDelta(certain)
            if marker is not None:
                self._reader.skip(len(marker))
                return True
            if not text:
                break
        if rest := trailing.take():
            yield ReasoningDelta(rest)
        return False
