"""How each format lays out the calls of a reply, as grammars."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.schema import moved
from rekindle.chat.grammar.tool import PARAM, Member, Tool
from rekindle.chat.grammar.values import (
    PYTHON,
    Values,
    gemma,
    json_value,
    options,
    shaped,
)
from rekindle.errors import Unsupported

_BAR = "\uff5c"  # a vertical line of full width
_IDENTIFIER = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Calls stand one by one between `trigger` and `close`, or all in one block.

    `bare`: at the beginning of a reply, this character begins calls without a trigger.
    """

    call: Callable[[Rules, Tool], str]
    trigger: str = ""  # the text that tells calls from speech
    hidden: bool = False  # the trigger need not be written
    lead: str = ""  # between the trigger and the first call
    comma: str = ""  # between the calls of a block
    close: str = ""
    gap: str | None = None  # between blocks; None: there is one block
    bare: str = ""


def layout(format_name: str, control: Mapping[str, int]) -> Layout | None:
    """The layout of a format, in the spelling that this vocabulary's control tokens suggest."""
    make = _LAYOUTS.get(format_name)
    return None if make is None else make(control)


def _json_call(rules: Rules, tool: Tool) -> str:
    """`{"name": …, "arguments": {…}}`"""
    head = literal(f'{{"name": {literal(tool.name)}, "arguments": ')
    return f"{head} {_arguments(rules, tool)} {literal('}')}"


def _llama_call(rules: Rules, tool: Tool) -> str:
    """`{"name": …, "parameters": {…}}`: all of it one schema, for an answer may begin like it."""
    place = "#/properties/parameters"
    schema = {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "parameters": moved(tool.schema, place)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
    return rules.json(schema, lenient=tool.lenient)


def _arguments(rules: Rules, tool: Tool) -> str:
    return rules.json(tool.schema, lenient=tool.lenient)


def _hermes(control: Mapping[str, int]) -> Layout:
    tag = "<|tool_call|>"
    if tag in control:
        end = "<|/tool_call|>"
        close = "]" + (end if end in control else "")
        return Layout(call=_json_call, trigger=tag, lead="[", comma=", ", close=close)
    return Layout(
        call=_json_call, trigger="<tool_call>", lead="\n", close="\n</tool_call>", gap="\n"
    )


def _coder(control: Mapping[str, int]) -> Layout:
    tag = "seed:tool_call" if "<seed:tool_call>" in control else "tool_call"
    close = f"</function>\n</{tag}>"
    return Layout(call=_tagged_call, trigger=f"<{tag}>", lead="\n", close=close, gap="\n")


def _tagged_call(rules: Rules, tool: Tool) -> str:
    members = tool.arguments()
    found = (_tagged(rules, tool, member) for member in members)
    return f"{literal(f'<function={tool.name}>' + chr(10))} {' '.join(found)}"


def _tagged(rules: Rules, tool: Tool, member: Member) -> str:
    tag = literal(f"<parameter={member.name}>\n")
    value = f"{tag} {_bare_value(rules, tool, member.schema)}"
    return value if member.required else f"({value})?"


def _bare_value(rules: Rules, tool: Tool, schema: Mapping[str, Any]) -> str:
    """A value in a tag: strings are bare, all else is JSON."""
    end = "\n</parameter>\n"
    constants = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if constants and all(isinstance(each, str) for each in constants):
        return f"{either(map(literal, constants))} {literal(end)}"
    if not _is_bare(tool, schema):
        return f"{json_value(rules, tool, schema)} {literal(end)}"
    return rules.until(end, shaped(rules, tool, schema))


def _is_bare(tool: Tool, schema: Mapping[str, Any], levels: int = 4) -> bool:
    """Whether a value may be a string, and is then read as one."""
    if levels and (ways := options(schema)):
        return any(_is_bare(tool, tool.resolved(way), levels - 1) for way in ways)
    return schema.get("type", "string") == "string" and "enum" not in schema


def _llama(control: Mapping[str, int]) -> Layout:
    tag = "<|python_tag|>"
    trigger = tag if tag in control else ""
    return Layout(call=_llama_call, trigger=trigger, hidden=True, comma="; ", bare="{")


def _pythonic(control: Mapping[str, int]) -> Layout:
    for name in ("tool_call", "python"):
        if f"<|{name}_start|>" in control:
            trigger, close = f"<|{name}_start|>", f"]<|{name}_end|>"
            break
    else:
        trigger, close = "", "]"
    return Layout(call=_python_call, trigger=trigger, lead="[", comma=", ", close=close, bare="[")


def _python_call(rules: Rules, tool: Tool) -> str:
    members = tool.arguments()
    odd = [member for member in members if not _IDENTIFIER.fullmatch(member.name)]
    if any(member.required for member in odd):
        raise Unsupported(
            f"This model writes calls in Python, which has no way to pass {odd[0].name!r} to "
            f"{tool.name!r}.",
            param=PARAM,
        )
    known = [member for member in members if member not in odd]
    arguments = Values(rules, tool, PYTHON).members(lambda name: f"{name}=", known)
    return f"{literal(tool.name + '(')} {arguments} {literal(')')}"


def _tool_code(_control: Mapping[str, int]) -> Layout:
    return Layout(call=_python_call, trigger="```tool_code", lead="\n", comma="\n", close="\n```")


def _gemma(open: str, close: str, quote: str) -> Callable[[Mapping[str, int]], Layout]:
    def call(rules: Rules, tool: Tool) -> str:
        notation = gemma(quote)
        members = Values(rules, tool, notation).members(notation.key, tool.arguments())
        return f"{literal(f'call:{tool.name}{{')} {members} {literal('}')}"

    return lambda _control: Layout(call=call, trigger=open, close=close, gap="")


def _mistral(control: Mapping[str, int]) -> Layout:
    trigger = "[TOOL_CALLS]"
    if "[ARGS]" in control:
        return Layout(call=_named_call, trigger=trigger, gap="")
    return Layout(call=_json_call, trigger=trigger, lead="[", comma=", ", close="]")


def _named_call(rules: Rules, tool: Tool) -> str:
    return f"{literal(tool.name)} {rules.spelt('[ARGS]')} {_arguments(rules, tool)}"


def _deepseek(_control: Mapping[str, int]) -> Layout:
    begin, end = (f"<{_BAR}tool▁calls▁{edge}{_BAR}>" for edge in ("begin", "end"))
    return Layout(call=_separated_call, trigger=begin, close=end)


def _separated_call(rules: Rules, tool: Tool) -> str:
    """As V3 and R1 write it, or as V3.1 does: the model knows which it is."""
    begin, end, separator = (
        f"<{_BAR}tool▁{name}{_BAR}>" for name in ("call▁begin", "call▁end", "sep")
    )
    name, parted, json = literal(tool.name), rules.spelt(separator), _arguments(rules, tool)
    fenced = f'"function" {parted} {name} {literal(_FENCE)} {json} {literal(_FENCE_END)}'
    ways = either((fenced, f"{name} {parted} {json}"))
    return f"{rules.spelt(begin)} {ways} {rules.spelt(end)}"


_FENCE, _FENCE_END = "\n```json\n", "\n```"

_LAYOUTS: Mapping[str, Callable[[Mapping[str, int]], Layout]] = {
    "hermes": _hermes,
    "qwen3-coder": _coder,
    "llama3-json": _llama,
    "pythonic": _pythonic,
    "gemma3": _tool_code,
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "mistral": _mistral,
    "deepseek": _deepseek,
}
