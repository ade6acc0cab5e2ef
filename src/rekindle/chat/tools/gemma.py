"""The calls of Gemma 4 and FunctionGemma: `call:name{key:value}`, with a token around strings."""

from __future__ import annotations

import re
from typing import NamedTuple

from rekindle.chat.grammar.arguments import Notation, Tool, Values
from rekindle.chat.grammar.lark import Rules, literal
from rekindle.chat.grammar.reply import CallSyntax
from rekindle.chat.messages import dump_json
from rekindle.chat.tools.format import ToolFormat
from rekindle.chat.tools.literals import loose_syntax, read_literal, read_string
from rekindle.chat.tools.stream import (
    NAME,
    MarkerFinder,
    Reading,
    ReplyContext,
    Steps,
    StreamParser,
)

_CALL = "call:"
_BARE_KEY = re.compile(r"[\w-]+")


class Spelling(NamedTuple):
    open: str
    close: str
    quote: str
    response: str  # after its calls, a model may invent the tool's response


FUNCTION_GEMMA = Spelling(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)
GEMMA_4 = Spelling("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class GemmaParser(StreamParser):
    """Passes arguments on in whole pairs of key and value."""

    def __init__(self, reply: ReplyContext, spelling: Spelling) -> None:
        self.opens = MarkerFinder(spelling.open, spelling.response)
        self.closes = (spelling.close,)
        super().__init__(reply)
        self._spelling = spelling
        self._syntax = loose_syntax(spelling.quote)
        self._ends = MarkerFinder(spelling.close, spelling.open, spelling.response)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        if marker == self._spelling.response:
            if not self._calls:
                yield from self._text(marker)
                return
            while (yield from reader.peek()):
                reader.rest()
            return
        reader.hold(marker)
        while (name := (yield from self._called())) is not None:
            yield self._start_call(name)
            yield from self._pairs()
            reader.hold()
        yield from self._release_as_text()

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments come next, or None without a call."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.starts(_CALL)):
            return None
        yield from reader.space()
        name = yield from reader.run(NAME)
        yield from reader.space()
        return name or None if (yield from reader.starts("{")) else None

    def _pairs(self) -> Steps[None]:
        """Converts arguments to JSON. From the first invalid one on, they pass unchanged."""
        reader, before = self._reader, "{"
        while True:
            reader.hold()
            yield from reader.space()
            if (yield from reader.starts("}")):
                break
            yield from reader.starts(",")
            pair = yield from self._pair()
            if pair is None:
                yield from self._broken(before.strip(", ") + reader.release())
                return
            reader.drop()
            yield self._arguments(before + pair)
            before = ", "
        reader.drop()
        yield self._arguments("{}" if before == "{" else "}")
        self._end_call()

    def _pair(self) -> Reading[str | None]:
        reader = self._reader
        yield from reader.space()
        key = yield from read_string(reader, self._syntax)
        if key is None:
            key = (yield from reader.run(self._syntax.key)).strip()
        yield from reader.space()
        if not key or not (yield from reader.starts(":")):
            return None
        value = yield from read_literal(reader, self._syntax)
        return None if value is None else f"{dump_json(key)}: {value}"

    def _broken(self, text: str) -> Steps[None]:
        marker = None
        while True:
            if text:
                yield self._arguments(text)
            if marker is not None:
                self._end_call()
                return
            text, marker = yield from self._reader.until(self._ends)
            if marker is None and not text:
                return


def _format(name: str, spelling: Spelling) -> ToolFormat:
    notation = Notation({}, spelling.quote, key=_key, comma=",")

    def call(rules: Rules, tool: Tool) -> str:
        members = Values(rules, tool, notation).members(notation.key, tool.arguments())
        return f"{literal(f'{_CALL}{tool.name}{{')} {members} {literal('}')}"

    syntax = CallSyntax(call=call, trigger=spelling.open, close=spelling.close, gap="")
    return ToolFormat(
        name=name,
        parser=lambda reply: GemmaParser(reply, spelling),
        syntax=lambda control: syntax,
        markers=tuple(spelling),
        end_markers=(spelling.response,),
    )


def _key(name: str) -> str:
    return f"{name if _BARE_KEY.fullmatch(name) else dump_json(name)}:"


GEMMA_4_FORMAT = _format("gemma4", GEMMA_4)
FUNCTION_GEMMA_FORMAT = _format("functiongemma", FUNCTION_GEMMA)
