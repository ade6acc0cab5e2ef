"""A call as Python would write it: `name(key=value, …)`."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from rekindle.chat.tools.json_value import quoted
from rekindle.chat.tools.literal import PYTHON, literal
from rekindle.chat.tools.reader import Reading, Source

_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")


class Signature(NamedTuple):
    name: str
    arguments: str  # JSON


def signature(source: Source, names: Collection[str]) -> Reading[Signature | None]:
    """The call that comes next; None when there is none of a known tool."""
    name = yield from source.run(_NAME)
    if name not in names:
        return None
    yield from source.space()
    if not (yield from source.starts("(")):
        return None
    pairs: list[str] = []
    while True:
        yield from source.space()
        if (yield from source.starts(")")):
            return Signature(name, "{" + ", ".join(pairs) + "}")
        pair = yield from _pair(source)
        if pair is None:
            return None
        pairs.append(pair)
        yield from source.space()
        yield from source.starts(",")


def _pair(source: Source) -> Reading[str | None]:
    key = yield from source.run(_KEY)
    yield from source.space()
    if not key or not (yield from source.starts("=")):
        return None
    value = yield from literal(source, PYTHON)
    return None if value is None else f"{quoted(key)}: {value}"


def signatures(source: Source, names: Collection[str]) -> Reading[list[Signature] | None]:
    """A list of calls in brackets, of which the text's end may be the last; None for any other."""
    if not (yield from source.starts("[")):
        return None
    found: list[Signature] = []
    while True:
        yield from source.space()
        if found and (yield from source.starts("]")):
            return found
        call = yield from signature(source, names)
        if call is None:
            return None
        found.append(call)
        yield from source.space()
        if not (yield from source.starts(",")) and (yield from source.peek()) not in ("]", ""):
            return None
        if not (yield from source.peek()):
            return found
