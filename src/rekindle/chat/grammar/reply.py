"""The grammar of a reply: thought, then calls that follow their tools' schemas, or an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rekindle.chat.grammar import harmony
from rekindle.chat.grammar.lark import TEXT, Grammar, Rules, blanks, either
from rekindle.chat.grammar.layout import Layout, layout
from rekindle.chat.grammar.schema import as_object, check
from rekindle.chat.grammar.tool import PARAM, Tool, callable_tools, is_strict
from rekindle.errors import Unsupported

Tools = Sequence[Mapping[str, Any]]
Pair = tuple[str, str]

HARMONY = "harmony"
MOST_CALLS = 32  # of one reply: a small model would go on for ever
ANSWER_PARAM = "response_format"


def calls_grammar(
    format_name: str,
    tools: Tools,
    *,
    required: bool,
    name: str | None,
    parallel: bool,
    thought: Pair | None,
    opened: bool,
    control: Mapping[str, int],
    answer: Mapping[str, Any] | bool | None = None,
) -> Grammar | None:
    """The grammar of a reply that has to call, or whose calls have to follow strict schemas.

    None where nothing is asked of the reply. `opened`: the prompt ends inside a thought. With
    `answer`, a reply that does not call is JSON of that schema.
    """
    shape = layout(format_name, control)
    has_calls = shape is not None or format_name == HARMONY
    if required and not has_calls:
        raise Unsupported(
            f"This model's replies are read as {format_name}, which has no calls.",
            param="tool_choice",
        )
    if answer is not None and not (tools and has_calls):
        return answer_grammar(format_name, answer, thought=thought, opened=opened, control=control)
    asked = required or answer is not None or is_strict(tools)
    if not (tools and has_calls and asked):
        return None
    rules = Rules(control, PARAM, _speech(shape))
    said = None if answer is None or required else _json(rules, answer)
    offered = callable_tools(tools, name)
    if shape is None:
        return rules.grammar(
            harmony.calls(rules, offered, required=required, opened=opened, answer=said)
        )
    most = MOST_CALLS if parallel and name is None else 1
    write = _blocks if required or said else _spoken
    body = write(rules, shape, offered, most)
    body = either((body, said)) if said else body
    return rules.grammar(_thought(rules, thought, opened) + body)


def answer_grammar(
    format_name: str,
    schema: Mapping[str, Any] | bool | None,
    *,
    thought: Pair | None,
    opened: bool,
    control: Mapping[str, int],
) -> Grammar:
    """The grammar of a reply that is JSON: of a schema, or any object."""
    rules = Rules(control, ANSWER_PARAM)
    answer = _json(rules, schema)
    if format_name == HARMONY:
        return rules.grammar(harmony.answer(rules, answer, opened=opened))
    return rules.grammar(_thought(rules, thought, opened) + answer)


def _json(rules: Rules, schema: Mapping[str, Any] | bool | None) -> str:
    check(schema)
    return rules.json(as_object(schema))


def _thought(rules: Rules, pair: Pair | None, opened: bool) -> str:
    """What may come first: the rest of a thought that is open, or a whole one."""
    if pair is None:
        return ""
    begin, end = pair
    rest = f"{rules.until(end, rules.terminal(f'/{TEXT}/'))} {blanks()}"
    return f"{rest} " if opened else f"({rules.spelt(begin)} {rest})? "


def _speech(shape: Layout | None) -> str:
    """Text that is no call: not where a call would begin without a marker."""
    if shape is None or not shape.bare:
        return TEXT
    return rf"(?s:\s*|\s*[^\s\{shape.bare}].*)"


def _blocks(rules: Rules, shape: Layout, tools: Sequence[Tool], most: int) -> str:
    """Calls and nothing else."""
    trigger = rules.spelt(shape.trigger)
    if trigger and shape.hidden:
        trigger = f"({trigger})?"
    opening = f"{trigger} {rules.spelt(shape.lead)}"
    if shape.gap is None:
        return f"{opening} {_inside(rules, shape, tools, most)}"
    return rules.some(f"{opening} {_inside(rules, shape, tools, 1)}", shape.gap, most)


def _inside(rules: Rules, shape: Layout, tools: Sequence[Tool], most: int) -> str:
    """Calls, and the end of the block that they are in."""
    one = either(rules.rule(shape.call(rules, tool)) for tool in tools)
    return f"{rules.some(one, shape.comma, most)} {rules.spelt(shape.close)}"


def _spoken(rules: Rules, shape: Layout, tools: Sequence[Tool], most: int) -> str:
    """Speech, and calls wherever their trigger is written."""
    in_block, blocks = (most, 1) if shape.gap is None else (1, most)
    calls = rules.rule(f"{rules.spelt(shape.lead)} {_inside(rules, shape, tools, in_block)}")
    ways = [rules.text]
    if shape.trigger:
        ways = [f"({rules.until(shape.trigger)} {calls}){{0,{blocks}}} {rules.text}"]
    if shape.bare:
        ways.append(calls)
    return either(ways)
