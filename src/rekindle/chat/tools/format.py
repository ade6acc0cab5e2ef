"""A tool format: everything about one way of writing calls, declared in one module.

A module of this package that declares `FORMATS`, a tuple of ToolFormat, is found by the registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.chat.grammar.syntax import ReplySyntax
from rekindle.chat.reasoning import ReasoningFormat
from rekindle.chat.tools.base import ReplyParser
from rekindle.chat.tools.reader import StreamReader, at_once
from rekindle.chat.tools.values import NUMBER, PYTHON, is_json, quoted, read_literal
from rekindle.protocol.events import Part, TextDelta

# ----------------------------------------------------------------------
# The names of a request's tools, and the types of their parameters.

Tools = Sequence[Mapping[str, Any]]

_DEPTH_LIMIT = 8  # of schemas within anyOf
_TYPES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
    list: "array",
    dict: "object",
}
_WORDS = {
    "boolean": {"true": "true", "false": "false"},
    "null": {"null": "null", "none": "null"},
}


def names(tools: Tools) -> frozenset[str]:
    return frozenset(name for name, _ in _functions(tools))


def properties(tools: Tools) -> dict[str, Mapping[str, Any]]:
    """The schemas of each tool's parameters, by the tool's name."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, function in _functions(tools):
        parameters = function.get("parameters")
        members = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schemas = members if isinstance(members, Mapping) else {}
        found[name] = {each: _resolved(schemas[each], parameters) for each in schemas}
    return found


def _resolved(schema: Any, parameters: Any) -> Any:
    """A parameter's schema, with a reference to elsewhere in the same schema resolved."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    found = parameters
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else schema


def _functions(tools: Tools) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"], function


def types(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema allows; empty when it names none."""
    if not isinstance(schema, Mapping) or depth > _DEPTH_LIMIT:
        return frozenset()
    named = schema.get("type")
    found = {name for name in _listed(named) if isinstance(name, str)}
    if isinstance(named, str):
        found.add(named)
    values = [*_listed(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    found |= {_TYPES[type(value)] for value in values if type(value) in _TYPES and not found}
    for way in ("anyOf", "oneOf", "allOf"):
        for option in _listed(schema.get(way)):
            found |= types(option, depth + 1)
    return frozenset(found)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def typed(text: str, schema: Any) -> str:
    """The JSON of a value given as bare text; a string when no other type fits."""
    allowed = types(schema)
    word = text.strip()
    for type_, words in _WORDS.items():
        if type_ in allowed and word.lower() in words:
            return words[word.lower()]
    if "string" in allowed:
        return quoted(text)
    if allowed & {"integer", "number"} and NUMBER.fullmatch(word):
        return word
    value = _nested(word) if allowed & {"object", "array"} else None
    return quoted(text) if value is None else value


def _nested(word: str) -> str | None:
    """An object or array, as JSON or as Python would print it."""
    if word[:1] not in ("{", "["):
        return None
    if is_json(word):
        return word
    reader = StreamReader(word, ended=True)
    value = at_once(read_literal(reader, PYTHON))
    return None if reader.rest().strip() else value


ControlTokens = Mapping[str, int]  # the text of each control token, and its id


@dataclass(frozen=True, slots=True)
class TemplatePattern:
    """Texts that a chat template of this format contains, all of them.

    Of the patterns that match a template, the one of the highest precedence decides.
    """

    precedence: int
    texts: tuple[str, ...]

    def matches(self, template: str) -> bool:
        return all(text in template for text in self.texts)


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """What a parser has to know about the reply it will read."""

    tools: Tools
    calls: bool = True  # the reply may call tools
    opened: bool = False  # the prompt ends inside reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How models of one kind write tool calls."""

    name: str
    parser: Callable[[ReplyContext], ReplyParser]
    # How calls are written, given the model's control tokens; None: the format has no calls.
    syntax: Callable[[ControlTokens], ReplySyntax] | None = None
    template_patterns: tuple[TemplatePattern, ...] = ()
    markers: tuple[str, ...] = ()  # texts of control tokens that the parser must see
    end_markers: tuple[str, ...] = ()  # texts of further control tokens that end a reply
    # Reasoning that is a part of the format: `parser` and `syntax` then handle it themselves.
    reasoning: ReasoningFormat | None = None


# ----------------------------------------------------------------------
# Replies without any calls.


class PlainTextParser:
    """A reply without calls or reasoning: all of it is text, passed on at once."""

    in_reasoning = False
    ended_calls = 0
    is_call_cut = False

    def push(self, text: str) -> list[Part]:
        return [TextDelta(text)] if text else []

    def finish(self, *, cut: bool = False) -> list[Part]:
        return []


FORMATS = (ToolFormat(name="plain", parser=lambda reply: PlainTextParser()),)
