"""Normalises requests: removes volatile text and puts tools in a fixed order.

A difference near the beginning of a prompt makes everything after it new to the cache. A header is
removed or made coarser only if it has a known exact form, stands at the very beginning of the
system prompt and means nothing to a user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rekindle.chat.messages import SYSTEM_ROLES, Message, called_function, is_system
from rekindle.protocol.settings import DEFAULT_NORMALISERS, Normaliser

Rewritten = tuple[list[Message], bool]  # the messages, and whether anything changed


class PromptHeader(NamedTuple):
    """A known beginning of a system prompt. Its pattern matches in linear time."""

    name: Normaliser
    pattern: re.Pattern[str]
    replacement: str  # may refer to groups of the pattern


HEADERS = (
    # Claude Code (claude-code #68900) writes billing data and a hash of the request for one
    # provider. The whole header is removed.
    PromptHeader(
        "claude-code-billing-header",
        re.compile(r"\Ax-anthropic-billing-header:(?: ?[a-z_]+=[^;\n]*;)+[ \t]*\n{0,2}"),
        "",
    ),
    # Home Assistant (core #133687) writes the time of day. The seconds are removed.
    PromptHeader(
        "home-assistant-seconds",
        re.compile(r"\A(Current time is \d\d:\d\d):\d\d(\. Today's date is \d{4}-\d\d-\d\d\.)"),
        r"\1\2",
    ),
    # goose (#4610, and #5192, where goose did the same) writes the time at which it made the
    # prompt. The minutes and seconds are removed.
    PromptHeader(
        "goose-minutes",
        re.compile(
            r"\A(You are an? (?:general[- ]purpose )?AI agent called [Gg]oose\b[^\n]{0,400}\n\n"
            r"The current date is \d{4}-\d\d-\d\d \d\d):\d\d:\d\d\."
        ),
        r"\1:00.",
    ),
)


class Normalised(NamedTuple):
    messages: list[Message]
    tools: list[Any] | None
    changes: list[str]  # names of the normalisers that changed something


def normalise(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    names: Collection[Normaliser] = DEFAULT_NORMALISERS,
) -> Normalised:
    kept, changes = without_headers(messages, [each for each in HEADERS if each.name in names])
    if not kept:  # a request needs a message, even if that is only a header
        kept, changes = list(messages), []
    rewriters: dict[Normaliser, Callable[[Sequence[Message]], Rewritten]] = {
        "session-paths": without_session_paths,
        "dates": without_days,
    }
    for name, rewrite in rewriters.items():
        if name in names:
            kept, found = rewrite(kept)
            changes += [name] if found else []
    if not tools or "tools" not in names:
        return Normalised(kept, None if tools is None else list(tools), changes)
    in_order = ordered_tools(tools)
    if json.dumps(in_order) != json.dumps(tools):  # `==` would ignore the order of keys
        changes.append("tools")
    return Normalised(kept, in_order, changes)


def without_headers(
    messages: Sequence[Message], headers: Sequence[PromptHeader] = HEADERS
) -> tuple[list[Message], list[str]]:
    """The messages without headers in the leading system messages, and the names of those found."""
    leading = list(takewhile(is_system, messages))
    found: list[str] = []
    changed = [_without_header(message, headers, found) for message in leading]
    kept = [each for each in changed if each is not None]
    return [*kept, *messages[len(leading) :]], found


def _without_header(
    message: Message, headers: Sequence[PromptHeader], found: list[str]
) -> Message | None:
    """None if nothing is left of the message."""
    content = message.get("content")
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    first = parts[0] if parts else None
    if not (isinstance(first, dict) and isinstance(first.get("text"), str)):
        return message
    text = first["text"]
    for header in headers:
        if match := header.pattern.match(text):
            text = match.expand(header.replacement) + text[match.end() :]
            found.append(header.name)
    if text == first["text"]:
        return message
    if isinstance(content, str):
        return {**message, "content": text} if text else None
    left = [{**first, "text": text}, *parts[1:]] if text else parts[1:]
    return {**message, "content": left} if left else None


# Agents announce the date before a conversation, which changes the prompt every day. opencode does
# it in the system prompt; Claude Code, Codex and Qwen Code do it in the first user message. With
# the month alone, the prompt changes once a month, but the model does not know the day. This is
# therefore off by default.
_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}"
_WEEKDAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
_DATE = re.compile(
    r"((?:[Tt]oday's date|[Cc]urrent date)(?: is)?:? |<current_date>)"
    rf"(?:(\d{{4}}-\d\d)-\d\d|(?:{_WEEKDAY},? )?({_MONTH}) \d{{1,2}},? (\d{{4}}))(?!\d)"
)
# The text that agents put in front of a user's own words. The words themselves never change.
_CONTEXT = re.compile(r"\s*<(environment_context|system-reminder)>.*?</\1>", re.DOTALL)


def without_days(messages: Sequence[Message]) -> Rewritten:
    """Replaces dates that an agent announces before the first reply by their month."""

    def month(found: re.Match[str]) -> str:
        announced, iso, month, year = found.groups()
        return f"{announced}{iso or f'{month} {year}'}"

    def rewrite(text: str, message: Message) -> str:
        end = len(text)
        if not is_system(message):
            context = _CONTEXT.match(text)
            end = context.end() if context else 0
        return _DATE.sub(month, text[:end]) + text[end:]

    return _rewritten(messages, (*SYSTEM_ROLES, "user"), rewrite)


# Copilot CLI names `~/.copilot/session-state/<UUID>` in the middle of its system prompt, so
# each session has a new prompt. Without the id it has not, but a model that uses the path uses one
# that does not exist. This is therefore off by default.
# The pattern matches a folder whose name is a UUID, or a folder inside a folder of sessions whose
# name has a digit.
_SESSION = re.compile(
    r"(?<=[/\\])"
    r"(?:[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
    r"|(?:(?<=/session-state/)|(?<=\\session-state\\)|(?<=/sessions/)|(?<=\\sessions\\))"
    r"(?=[A-Za-z_-]{0,63}[0-9])[\w-]{8,64})"
    r"(?![\w-])"
)


def without_session_paths(messages: Sequence[Message]) -> Rewritten:
    """Replaces the session's folder in paths of the leading system messages."""
    return _rewritten(messages, SYSTEM_ROLES, lambda text, message: _SESSION.sub("session", text))


def _rewritten(
    messages: Sequence[Message], roles: Collection[str], rewrite: Callable[[str, Message], str]
) -> Rewritten:

    def changed(content: Any, message: Message) -> Any:
        if isinstance(content, str):
            return rewrite(content, message)
        if isinstance(content, list):
            return [changed(part, message) for part in content]
        if isinstance(content, Mapping) and isinstance(content.get("text"), str):
            return {**content, "text": rewrite(content["text"], message)}
        return content

    leading = list(takewhile(lambda each: each.get("role") in roles, messages))
    rewritten = [{**each, "content": changed(each.get("content"), each)} for each in leading]
    if rewritten == leading:
        return list(messages), False
    return [*rewritten, *messages[len(leading) :]], True


# The order of fields in a tool: these first, then the others by name.
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters")
SCHEMA_FIELDS = ("type", "title", "description", "properties", "items", "enum", "required")
# Keywords whose values map names to schemas, and keywords whose values are schemas.
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
SUBSCHEMAS = frozenset(
    {"items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf", "not", "contains"}
    | {"if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


def ordered_tools(tools: Sequence[Any]) -> list[Any]:
    """The tools sorted by name. Properties keep their order, in which models fill in arguments."""
    return sorted(
        map(_ordered_tool, tools),
        key=lambda tool: (str(called_function(tool).get("name") or ""), json.dumps(tool)),
    )


def without_strict(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools for the prompt, without `strict`. The server enforces it, the model ignores it."""
    return [_without_strict(tool) for tool in tools] if tools else None


def _without_strict(tool: Any) -> Any:
    function = called_function(tool)
    if "strict" not in function:
        return tool
    kept = {name: value for name, value in function.items() if name != "strict"}
    return {**tool, "function": kept}


def _ordered_tool(tool: Any) -> Any:
    if not isinstance(tool, Mapping):
        return tool
    ordered = _ordered(tool, TOOL_FIELDS)
    if isinstance(function := ordered.get("function"), Mapping):
        function = _ordered(function, FUNCTION_FIELDS)
        if "parameters" in function:
            function["parameters"] = _ordered_schema(function["parameters"])
        ordered["function"] = function
    return ordered


def _ordered_schema(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_ordered_schema(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    fields = _ordered(schema, SCHEMA_FIELDS)
    for keyword, value in fields.items():
        if keyword in SCHEMAS_BY_NAME and isinstance(value, Mapping):
            fields[keyword] = {name: _ordered_schema(each) for name, each in value.items()}
        elif keyword in SUBSCHEMAS:
            fields[keyword] = _ordered_schema(value)
    return fields


def _ordered(fields: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    names = [*(name for name in first if name in fields), *sorted(fields.keys() - set(first))]
    return {name: fields[name] for name in names}
