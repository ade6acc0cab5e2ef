"""What a model writes for itself before it answers, between markers."""

from __future__ import annotations

import re
from typing import NamedTuple

from rekindle.chat.reply import Parser
from rekindle.chat.tools.base import Machine, Tail
from rekindle.chat.tools.reader import Finder, Steps
from rekindle.protocol.events import Part, ReasoningDelta


class Pair(NamedTuple):
    open: str
    close: str


PAIRS = {
    "think": Pair("<think>", "</think>"),
    "mistral": Pair("[THINK]", "[/THINK]"),
    "gemma4": Pair("<|channel>thought", "<channel|>"),
    "seed": Pair("<seed:think>", "</seed:think>"),
    "cohere": Pair("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi": Pair("◁think▷", "◁/think▷"),
    "minimax": Pair("<mm:think>", "</mm:think>"),
    "step": Pair("<|THINK_START|>", "<|THINK_END|>"),
    "exaone": Pair("<thought>", "</thought>"),
}

#: Text that only a template writes: where a turn or a message begins or ends.
_TURN = re.compile(
    r"<\|[^<>|\s]{1,40}\|?>|<[^<>|\s]{1,40}\|>|<\uff5c[^<>\uff5c]{1,40}\uff5c>"
    r"|\[/?INST\]|<(?:start|end)_of_turn>|</s>"
)


def is_open(pair: tuple[str, str], prompt: str) -> bool:
    """Whether a prompt ends inside a thought.

    Such text in an earlier message does not count: a turn's marker comes after it.
    """
    begin, end = pair
    at = prompt.rfind(begin)
    if at < 0:
        return False
    tail = prompt[at + len(begin) :]
    return end not in tail and not _TURN.search(tail)


class Thinker(Machine):
    """Takes the thought off the beginning of a reply; the rest is another parser's.

    Whitespace around the markers belongs to neither. With `opened`, the prompt has already opened
    the thought; models that open it once more are understood.
    """

    def __init__(self, pair: tuple[str, str], rest: Parser, *, opened: bool = False) -> None:
        super().__init__()
        self.thinking = opened
        self._pair = pair
        self._rest = rest

    def push(self, text: str) -> list[Part]:
        parts = super().push(text)
        self.ended_calls = self._rest.ended_calls
        return parts

    def finish(self) -> list[Part]:
        parts = super().finish()
        self.ended_calls = self._rest.ended_calls
        return parts

    def _run(self) -> Steps[None]:
        source, (begin, end) = self._source, self._pair
        source.hold()
        yield from source.space()
        if (yield from source.starts(begin)):
            self.thinking = True
        if self.thinking:
            source.drop()
            yield from source.space()
            if not (yield from self._think(Finder(end))):
                return
            self.thinking = False
            yield from source.space()
            source.hold()
        yield from self._rest.push(source.release())
        while (yield from source.peek()):
            yield from self._rest.push(source.rest())
        yield from self._rest.finish()

    def _think(self, ends: Finder) -> Steps[bool]:
        """ReasoningDelta up to its end marker; whether there was one."""
        tail = Tail()
        while True:
            text, marker = yield from self._source.until(ends)
            if certain := tail.add(text):
                yield ReasoningDelta(certain)
            if marker is not None:
                self._source.skip(len(marker))
                return True
            if not text:
                break
        if rest := tail.rest():
            yield ReasoningDelta(rest)
        return False
