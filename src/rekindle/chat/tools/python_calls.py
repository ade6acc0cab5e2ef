"""A call in Python's notation, `name(key=value, …)`: how it is read, and its grammar."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rekindle.chat.grammar.lark import Rules
from rekindle.chat.grammar.lark import literal as lark_literal
from rekindle.chat.grammar.tool import PARAM, Tool
from rekindle.chat.grammar.values import PYTHON as PYTHON_VALUES
from rekindle.chat.grammar.values import Values
from rekindle.chat.tools.reader import Reading, StreamReader
from rekindle.chat.tools.values import PYTHON, quoted, read_literal
from rekindle.errors import Unsupported

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")
_IDENTIFIER = re.compile(r"\w+")


class Signature(NamedTuple):
    name: str
    arguments: str  # JSON


def signature(reader: StreamReader, names: Collection[str]) -> Reading[Signature | None]:
    """The next call; None when there is none of a known tool."""
    name = yield from reader.run(_NAME)
    if name not in names:
        return None
    yield from reader.space()
    if not (yield from reader.starts("(")):
        return None
    pairs: list[str] = []
    while True:
        yield from reader.space()
        if (yield from reader.starts(")")):
            return Signature(name, "{" + ", ".join(pairs) + "}")
        pair = yield from _pair(reader)
        if pair is None:
            return None
        pairs.append(pair)
        yield from reader.space()
        yield from reader.starts(",")


def _pair(reader: StreamReader) -> Reading[str | None]:
    key = yield from reader.run(_KEY)
    yield from reader.space()
    if not key or not (yield from reader.starts("=")):
        return None
    value = yield from read_literal(reader, PYTHON)
    return None if value is None else f"{quoted(key)}: {value}"


def signatures(reader: StreamReader, names: Collection[str]) -> Reading[list[Signature] | None]:
    """A list of calls in brackets, the last of which the end of the text may close; else None."""
    if not (yield from reader.starts("[")):
        return None
    found: list[Signature] = []
    while True:
        yield from reader.space()
        if found and (yield from reader.starts("]")):
            return found
        call = yield from signature(reader, names)
        if call is None:
            return None
        found.append(call)
        yield from reader.space()
        if not (yield from reader.starts(",")) and (yield from reader.peek()) not in ("]", ""):
            return None
        if not (yield from reader.peek()):
            return found


def python_call(rules: Rules, tool: Tool) -> str:
    """The grammar of one call."""
    members = tool.arguments()
    odd = [member for member in members if not _IDENTIFIER.fullmatch(member.name)]
    if any(member.required for member in odd):
        raise Unsupported(
            f"This model writes calls in Python, which has no way to pass {odd[0].name!r} to "
            f"{tool.name!r}.",
            param=PARAM,
        )
    known = [member for member in members if member not in odd]
    arguments = Values(rules, tool, PYTHON_VALUES).members(lambda name: f"{name}=", known)
    return f"{lark_literal(tool.name + '(')} {arguments} {lark_literal(')')}"
