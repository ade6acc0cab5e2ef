"""Harmony, the format of gpt-oss: messages on channels, some of them addressed to a function.

Reasoning has its own channel, so this format parses and constrains reasoning too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rekindle.chat.grammar.arguments import Tool
from rekindle.chat.grammar.lark import TEXT, Rules, either, literal
from rekindle.chat.grammar.reply import CallRules, ReplyStart, json_arguments
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.chat.tools.format import ToolFormat
from rekindle.chat.tools.stream import (
    NAME,
    MarkerFinder,
    ReplyContext,
    Steps,
    StreamParser,
    TrailingSpace,
)
from rekindle.protocol.events import ReasoningDelta, TextDelta

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
MESSAGE_END = "<|end|>"
ENDS = (MESSAGE_END, "<|call|>", "<|return|>")
MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
REASONING = ReasoningFormat(f"{CHANNEL}analysis{MESSAGE}", MESSAGE_END)

_ANY = MarkerFinder(*MARKERS)
_FUNCTIONS = "functions."
_RECIPIENT = re.compile(r"\bto=(\S+)")
_HEADER = re.compile(r"[\w\s=.:/-]{0,200}")

_Delta = type[TextDelta] | type[ReasoningDelta]


class HarmonyParser(StreamParser):
    """Reads analysis as reasoning, a message to a function as a call, and others as text.

    The prompt ends with the start of a header, so the reply begins inside that header. Markers and
    headers are dropped. Text outside of all messages is passed on.
    """

    def __init__(self, reply: ReplyContext) -> None:
        super().__init__(reply)
        self._emitted: set[_Delta] = set()

    def _run(self) -> Steps[None]:
        if self._reply.opened:
            yield from self._message(ReasoningDelta)
        while (header := (yield from self._header())) is not None:
            channel, recipient = header
            name = self._function(recipient)
            if name is not None:
                yield self._start_call(name)
                yield from self._raw_arguments(_ANY)
                yield from self._reader.starts(*ENDS)
            else:
                yield from self._message(ReasoningDelta if channel == "analysis" else TextDelta)

    def _function(self, recipient: str) -> str | None:
        name = recipient.removeprefix(_FUNCTIONS)
        known = name in self._functions or recipient.startswith(_FUNCTIONS)
        return name if name and known and self._reply.calls else None

    def _header(self) -> Steps[tuple[str, str] | None]:
        """Reads the channel and recipient of the next message. Returns None at the end."""
        texts = {"": (yield from self._header_start())}
        while marker := (yield from self._reader.starts(*MARKERS)):
            if marker == MESSAGE:
                return _parse_header(texts)
            if marker in ENDS:
                texts = {"": (yield from self._header_start())}
                continue
            if marker == START:
                texts.clear()
            texts[marker], _ = yield from self._reader.all_until(_ANY)
        rest = "".join(texts.values())
        if self._cut:
            rest = rest[: _ANY.certain(rest, 0)]
        if not _HEADER.fullmatch(rest):
            yield TextDelta(rest)
        return None

    def _header_start(self) -> Steps[str]:
        """Reads a header's text before its first marker. Any other text there is passed on."""
        reader = self._reader
        while True:
            reader.hold()
            yield from reader.space()
            yield from reader.starts("assistant")
            yield from reader.space()
            if (yield from reader.starts("to=")):
                yield from reader.run(NAME)
            yield from reader.space()
            text = reader.release()
            if (yield from reader.at_marker(_ANY)):
                return text
            if self._is_cut_here and (text + reader.rest()).strip():
                self.is_call_cut = True
                return ""
            yield from self._message(TextDelta, text)
            if not (yield from reader.peek()):
                return ""

    def _message(self, kind: _Delta, text: str = "") -> Steps[None]:
        """Passes the text of a message on, without the space around it."""
        self.in_reasoning = kind is ReasoningDelta
        first = not self._emitted and not self._calls
        before = "\n\n" if kind in self._emitted else ""
        if not text:
            yield from self._reader.space()
        trailing, marker = TrailingSpace(), None
        while True:
            if certain := trailing.add(self._without_partial_marker(text, _ANY)):
                yield kind(before + certain)
                self._emitted.add(kind)
                first, before = True, ""
            if marker is not None:
                break
            text, marker = yield from self._reader.until(_ANY)
            if marker is None and not text:
                break
        rest = trailing.take()
        if marker is None and rest and first:
            yield kind(rest)
        yield from self._reader.starts(*ENDS)
        self.in_reasoning = False


def _parse_header(texts: dict[str, str]) -> tuple[str, str]:
    recipient = _RECIPIENT.search(" ".join(texts.values()))
    channel = texts.get(CHANNEL, "").split()
    return channel[0] if channel else "", recipient[1] if recipient else ""


class HarmonySyntax:
    """Messages that end with the answer or with a call, because a call ends the reply."""

    text = TEXT

    def calls(self, rules: Rules, wanted: CallRules, start: ReplyStart) -> str:
        ways = [_call(rules, tool) for tool in wanted.tools]
        if not wanted.required:
            ways.append(f"{_channel(rules, 'final')} {wanted.answer or rules.text}")
        channels = ("analysis",) if wanted.required else ("analysis", "commentary")
        return f"{_before(rules, channels, start.opened)} {either(map(rules.rule, ways))}"

    def answer(self, rules: Rules, answer: str, start: ReplyStart) -> str:
        before = _before(rules, ("analysis",), start.opened)
        return f"{before} {_channel(rules, 'final')} {answer}"


def _call(rules: Rules, tool: Tool) -> str:
    address = rules.marker(f"{CHANNEL}commentary to={_FUNCTIONS}")
    header = f"{address} {literal(tool.name)} {rules.marker(f' {CONSTRAIN}json{MESSAGE}')}"
    return f"{header} {json_arguments(rules, tool)}"


def _before(rules: Rules, channels: Sequence[str], opened: bool) -> str:
    """Up to eight messages before the last one. The prompt may have opened the first."""
    rest = f"{rules.until(MESSAGE_END)} {rules.marker(f'{START}assistant')}"
    headers = either(_channel(rules, channel) for channel in channels)
    messages = f"({rules.rule(f'{headers} {rest}')}){{0,8}}"
    return f"{rest} {messages}" if opened else messages


def _channel(rules: Rules, channel: str) -> str:
    return rules.marker(f"{CHANNEL}{channel}{MESSAGE}")


FORMAT = ToolFormat(
    name="harmony",
    parser=HarmonyParser,
    syntax=lambda control: HarmonySyntax(),
    markers=MARKERS,
    reasoning=REASONING,
)
