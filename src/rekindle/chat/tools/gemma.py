"""Gemma's calls, `call:name{key:value}`, with a token of its own around strings."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from rekindle.chat.grammar.lark import Rules, literal
from rekindle.chat.grammar.syntax import CallSyntax
from rekindle.chat.grammar.tool import Tool
from rekindle.chat.grammar.values import Notation, Values
from rekindle.chat.tools.base import StreamParser
from rekindle.chat.tools.format import TemplatePattern, ToolFormat
from rekindle.chat.tools.reader import MarkerFinder, Reading, Steps
from rekindle.chat.tools.values import Dialect, loose, quoted, read_literal, read_string

_CALL = "call:"
_NAME = re.compile(r"[\w.:/-]*")
_BARE_KEY = re.compile(r"[\w-]+")


class Spelling(NamedTuple):
    open: str
    close: str
    quote: str
    response: str  # after its calls a model may go on to invent the tool's response

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(self)


FUNCTION_GEMMA = Spelling(
    "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)
GEMMA_4 = Spelling("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class GemmaParser(StreamParser):
    """Calls whose arguments come one whole pair at a time."""

    def __init__(self, spelling: Spelling) -> None:
        self.opens = MarkerFinder(spelling.open, spelling.response)
        self.closes = (spelling.close,)
        super().__init__()
        self._spelling = spelling
        self._dialect: Dialect = loose(spelling.quote)
        self._ends = MarkerFinder(spelling.close, spelling.open, spelling.response)

    def _block(self, marker: str) -> Steps[None]:
        reader = self._reader
        if marker == self._spelling.response:
            yield from self._response(marker)
            return
        reader.hold(marker)
        while (name := (yield from self._called())) is not None:
            yield self._start_call(name)
            yield from self._pairs()
            reader.hold()
        yield from self._release_as_text()

    def _response(self, marker: str) -> Steps[None]:
        if not self._calls:
            yield from self._text(marker)
            return
        while (yield from self._reader.peek()):
            self._reader.rest()

    def _called(self) -> Reading[str | None]:
        """The name of a call whose arguments come next; None when this is no call."""
        reader = self._reader
        yield from reader.space()
        if not (yield from reader.starts(_CALL)):
            return None
        yield from reader.space()
        name = yield from reader.run(_NAME)
        yield from reader.space()
        return name or None if (yield from reader.starts("{")) else None

    def _pairs(self) -> Steps[None]:
        """The arguments, as JSON; from the first that cannot be read on, as they are."""
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
        key = yield from read_string(reader, self._dialect)
        if key is None:
            key = (yield from reader.run(self._dialect.key)).strip()
        yield from reader.space()
        if not key or not (yield from reader.starts(":")):
            return None
        value = yield from read_literal(reader, self._dialect)
        return None if value is None else f"{quoted(key)}: {value}"

    def _broken(self, text: str) -> Steps[None]:
        """Arguments from what cannot be read on."""
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


def _format(name: str, precedence: int, spelling: Spelling) -> ToolFormat:
    words = {word: word for word in ("true", "false", "null")}
    notation = Notation(words, spelling.quote, key=_key, comma=",")

    def call(rules: Rules, tool: Tool) -> str:
        members = Values(rules, tool, notation).members(notation.key, tool.arguments())
        return f"{literal(f'{_CALL}{tool.name}{{')} {members} {literal('}')}"

    syntax = CallSyntax(call=call, trigger=spelling.open, close=spelling.close, gap="")
    return ToolFormat(
        name=name,
        parser=lambda reply: GemmaParser(spelling),
        syntax=lambda control: syntax,
        template_patterns=(TemplatePattern(precedence, (spelling.open,)),),
        markers=spelling.markers,
        end_markers=(spelling.response,),
    )


def _key(name: str) -> str:
    return f"{name if _BARE_KEY.fullmatch(name) else json.dumps(name, ensure_ascii=False)}:"


FORMATS = (_format("gemma4", 95, GEMMA_4), _format("functiongemma", 90, FUNCTION_GEMMA))
