"""Harmony's messages as grammars: analysis, then a call to a function or a final message."""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.chat.grammar.lark import Rules, either, literal
from rekindle.chat.grammar.tool import Tool

_CHANNEL, _MESSAGE, _END = "<|channel|>", "<|message|>", "<|end|>"
_NEXT = "<|start|>assistant"  # how a further message of the same reply begins
_CONSTRAINED = " <|constrain|>json"
_MOST_MESSAGES = 8  # before the last one


def calls(
    rules: Rules, tools: Sequence[Tool], *, required: bool, opened: bool, answer: str | None
) -> str:
    """Messages of which the last is a call, for a call ends the reply, or need not be one."""
    ways = [_call(rules, tool) for tool in tools]
    if not required:
        ways.append(f"{rules.spelt(_header('final'))} {answer or rules.text}")
    channels = ("analysis",) if required else ("analysis", "commentary")
    return f"{_before(rules, channels, opened)} {either(map(rules.rule, ways))}"


def answer(rules: Rules, answer: str, *, opened: bool) -> str:
    """Messages of which the last is the answer."""
    return f"{_before(rules, ('analysis',), opened)} {rules.spelt(_header('final'))} {answer}"


def _call(rules: Rules, tool: Tool) -> str:
    before = rules.spelt(f"{_CHANNEL}commentary to=functions.")
    header = f"{before} {literal(tool.name)} {rules.spelt(_CONSTRAINED + _MESSAGE)}"
    return f"{header} {rules.json(tool.schema, lenient=tool.lenient)}"


def _before(rules: Rules, channels: Sequence[str], opened: bool) -> str:
    """The messages before the last one; the first of them may be open already."""
    rest = f"{rules.until(_END)} {rules.spelt(_NEXT)}"
    headers = either(rules.spelt(_header(channel)) for channel in channels)
    messages = f"({rules.rule(f'{headers} {rest}')}){{0,{_MOST_MESSAGES}}}"
    return f"{rest} {messages}" if opened else messages


def _header(channel: str) -> str:
    return f"{_CHANNEL}{channel}{_MESSAGE}"
