"""Normalising prompts: what clients change from request to request without meaning anything by it.

A difference near the beginning of a prompt makes everything after it new to the cache. Headers are
taken out, or made coarser, only when they have a known exact form, stand at the very beginning of
the system prompt and mean nothing to a user. Tools come in one order, so that a set of tools is one
prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rekindle.chat.messages import SYSTEM_ROLES, Message
from rekindle.protocol.settings import DEFAULT_NORMALISERS, Normaliser

# ----------------------------------------------------------------------
# Dates in what agents put before a conversation, which make each day's prompt a new one.
#
# opencode has the day in its system prompt, Claude Code, Codex and Qwen Code have it in what they
# put into the first user message. Without the day of the month it changes once a month; but a
# model that is asked what day it is then does not know. So this is done only where it is asked
# for.

_MONTH = "(?:Jan|Feb|Mar|Apr|May|June?|July?|Aug|Sept?|Oct|Nov|Dec)[a-z]{0,6}"
_WEEKDAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}"
#: The announcement of a date, as far as its month, its year, and what there is of it between.
_DATE = re.compile(
    r"((?:[Tt]oday's date|[Cc]urrent date)(?: is)?:? |<current_date>)"
    rf"(?:(\d{{4}}-\d\d)-\d\d|(?:{_WEEKDAY},? )?({_MONTH}) \d{{1,2}},? (\d{{4}}))(?!\d)"
)
#: What agents put before a user's own words, which are never changed.
_CONTEXT = re.compile(r"\s*<(environment_context|system-reminder)>.*?</\1>", re.DOTALL)


def without_days(messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """The messages with the month alone where an agent says the date before the first reply; and
    whether one did."""
    opening = list(takewhile(lambda each: each.get("role") in (*SYSTEM_ROLES, "user"), messages))
    changed = [_without_day(each) for each in opening]
    if changed == opening:
        return list(messages), False
    return [*changed, *messages[len(opening) :]], True


def _without_day(message: Message) -> Message:
    in_system = message.get("role") in SYSTEM_ROLES
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": _shortened(content, in_system)}
    if isinstance(content, list):
        return {**message, "content": [_shortened_part(part, in_system) for part in content]}
    return message


def _shortened_part(part: Any, in_system: bool) -> Any:
    if not (isinstance(part, Mapping) and isinstance(part.get("text"), str)):
        return part
    return {**part, "text": _shortened(part["text"], in_system)}


def _shortened(text: str, in_system: bool) -> str:
    if in_system:
        return _DATE.sub(_month, text)
    context = _CONTEXT.match(text)
    end = context.end() if context else 0
    return _DATE.sub(_month, text[:end]) + text[end:]


def _month(found: re.Match[str]) -> str:
    announced, iso, month, year = found.groups()
    return f"{announced}{iso or f'{month} {year}'}"


# ----------------------------------------------------------------------
# Paths of a client's session in its system prompt, which make each session's prompt a new one.
#
# GitHub's Copilot CLI names `~/.copilot/session-state/<UUID>` in the middle of its system prompt:
# all after it, tools included, is new in the next session. Without the id it is not; but a model
# that uses the path then uses one that does not exist. So this is done only where it is asked for.

STAND_IN = "session"

#: A folder that is a UUID, or one in a folder of sessions whose name has a digit in it.
_SESSION = re.compile(
    r"(?<=[/\\])"
    r"(?:[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
    r"|(?:(?<=/session-state/)|(?<=\\session-state\\)|(?<=/sessions/)|(?<=\\sessions\\))"
    r"(?=[A-Za-z_-]{0,63}[0-9])[\w-]{8,64})"
    r"(?![\w-])"
)


def without_session_paths(messages: Sequence[Message]) -> tuple[list[Message], bool]:
    """The messages with a stand-in for the session's folder in the leading system messages; and
    whether there was one."""
    leading = list(takewhile(lambda each: each.get("role") in SYSTEM_ROLES, messages))
    changed = [{**each, "content": _without(each.get("content"))} for each in leading]
    if changed == leading:
        return list(messages), False
    return [*changed, *messages[len(leading) :]], True


def _without(content: Any) -> Any:
    if isinstance(content, str):
        return _SESSION.sub(STAND_IN, content)
    if isinstance(content, list):
        return [_without(part) for part in content]
    if isinstance(content, Mapping) and isinstance(content.get("text"), str):
        return {**content, "text": _without(content["text"])}
    return content


# The order of a tool's fields: these first, the others after them by name.
TOOL_FIELDS = ("type", "function")
FUNCTION_FIELDS = ("name", "description", "parameters")
SCHEMA_FIELDS = ("type", "title", "description", "properties", "items", "enum", "required")
SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
SUBSCHEMAS = frozenset(
    {"items", "prefixItems", "additionalProperties", "anyOf", "allOf", "oneOf", "not", "contains"}
    | {"if", "then", "else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
)


class Header(NamedTuple):
    """A known beginning. Its pattern takes time linear in what it matches."""

    name: Normaliser
    pattern: re.Pattern[str]
    replacement: str  # with the groups of the match


HEADERS = (
    # Claude Code (claude-code #68900): who pays, and a hash of the request. Written for one
    # provider's billing; the model no longer sees it at all.
    Header(
        "claude-code-billing-header",
        re.compile(r"\Ax-anthropic-billing-header:(?: ?[a-z_]+=[^;\n]*;)+[ \t]*\n{0,2}"),
        "",
    ),
    # Home Assistant (core #133687): the model no longer sees the seconds of the time of day.
    Header(
        "home-assistant-seconds",
        re.compile(r"\A(Current time is \d\d:\d\d):\d\d(\. Today's date is \d{4}-\d\d-\d\d\.)"),
        r"\1\2",
    ),
    # goose (#4610, and #5192, where goose did the same): the model no longer sees minutes and
    # seconds of the time at which its prompt was made.
    Header(
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
    changes: list[str]  # names of what was found


#: What works on a whole conversation, and says whether it found anything.
REWRITERS: Mapping[Normaliser, Callable[[Sequence[Message]], tuple[list[Message], bool]]] = {
    "session-paths": without_session_paths,
    "dates": without_days,
}


def normalise(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    names: Collection[Normaliser] = DEFAULT_NORMALISERS,
) -> Normalised:
    """The request without what these normalisers take out of it."""
    kept, changes = without_headers(messages, [each for each in HEADERS if each.name in names])
    if not kept:  # a request has at least one message, if only a header
        kept, changes = list(messages), []
    for name, rewrite in REWRITERS.items():
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
    messages: Sequence[Message], headers: Sequence[Header] = HEADERS
) -> tuple[list[Message], list[str]]:
    """The messages without these headers of the leading system messages, and the names of those
    that were there."""
    leading = list(takewhile(lambda each: each.get("role") in SYSTEM_ROLES, messages))
    found: list[str] = []
    changed = [_without_header(message, headers, found) for message in leading]
    kept = [each for each in changed if each is not None]
    return [*kept, *messages[len(leading) :]], found


def _without_header(
    message: Message, headers: Sequence[Header], found: list[str]
) -> Message | None:
    """None when nothing is left of it."""
    content = message.get("content")
    if isinstance(content, str):
        text = _cut_headers(content, headers, found)
        return message if text == content else {**message, "content": text} if text else None
    first: Any = content[0] if isinstance(content, list) and content else None
    if not (isinstance(first, dict) and isinstance(first.get("text"), str)):
        return message
    text = _cut_headers(first["text"], headers, found)
    if text == first["text"]:
        return message
    assert isinstance(content, list)
    parts = [{**first, "text": text}, *content[1:]] if text else content[1:]
    return {**message, "content": parts} if parts else None


def _cut_headers(text: str, headers: Sequence[Header], found: list[str]) -> str:
    for header in headers:
        if match := header.pattern.match(text):
            text = match.expand(header.replacement) + text[match.end() :]
            found.append(header.name)
    return text


def ordered_tools(tools: Sequence[Any]) -> list[Any]:
    """The tools by name, the fields of each in a fixed order.

    Properties stay in the order of their author: models fill arguments in that order, so it has a
    meaning.
    """
    return sorted(map(_ordered_tool, tools), key=_tool_rank)


def without_strict(tools: Sequence[Any] | None) -> list[Any] | None:
    """The tools as the prompt shows them: `strict` is for the server, which enforces it."""
    return [_without_strict(tool) for tool in tools] if tools else None


def _without_strict(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or "strict" not in function:
        return tool
    kept = {name: value for name, value in function.items() if name != "strict"}
    return {**tool, "function": kept}


def _tool_rank(tool: Any) -> tuple[str, str]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return str(name or ""), json.dumps(tool)


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
    return {keyword: _ordered_keyword(keyword, value) for keyword, value in fields.items()}


def _ordered_keyword(keyword: str, value: Any) -> Any:
    if keyword in SCHEMAS_BY_NAME and isinstance(value, Mapping):
        return {name: _ordered_schema(each) for name, each in value.items()}
    return _ordered_schema(value) if keyword in SUBSCHEMAS else value


def _ordered(fields: Mapping[str, Any], first: Sequence[str]) -> dict[str, Any]:
    names = [*(name for name in first if name in fields), *sorted(fields.keys() - set(first))]
    return {name: fields[name] for name in names}
