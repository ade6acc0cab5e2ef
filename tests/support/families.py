"""Describes model families: templates, control tokens, and how they write tool calls.

The sampled text of a call differs from what the template makes of it in spaces, quotes and order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chat import deepseek_templates, gemma_templates
from tests.chat import family_templates as templates
from tests.chat.tool_templates import CHANNELS, HERMES
from tests.support.agent import Agent
from tests.support.conversations import CHATML_CONTROL, HARMONY_CONTROL

Arguments = dict[str, Any]

SWEEP = {
    "type": "object",
    "properties": {
        "room": {"type": "string", "maxLength": 12},
        "times": {"type": "integer", "minimum": 1, "maximum": 20},
        "wet": {"type": "boolean"},
    },
    "required": ["room", "times", "wet"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "?", "parameters": SWEEP}}
    for name in ("dust", "sweep")
]


@dataclass(frozen=True)
class Family:
    """`calls` writes the calls of `sweep` in one reply."""

    template: str
    format: str
    calls: Callable[[Sequence[Arguments]], str]
    control: tuple[str, ...]
    ends: tuple[str, ...]
    call_end: str | None = None  # end of a reply with calls, if it differs
    bos: str = ""
    parallel: bool = True  # the template accepts several calls in a reply
    answer: str = "All is tidy."
    opening: str = ""  # part of a forced call that the model writes without the grammar

    @property
    def end(self) -> str:
        """The token that ends a reply with calls."""
        return self.call_end or self.ends[0]

    def agent(self, *, can_truncate: bool = True) -> Agent:
        return Agent(
            self.template,
            control=self.control,
            ends=self.ends,
            bos=self.bos,
            tools=TOOLS,
            can_truncate=can_truncate,
        )


def sweep(room: int) -> Arguments:
    return {"room": f"/room/{room}", "times": room + 1, "wet": room % 2 == 0}


def _spaced(arguments: Arguments) -> str:
    """JSON with unusual spaces and unescaped characters."""
    return json.dumps(arguments, ensure_ascii=False).replace('", "', '",  "')


def _json_calls(key: str) -> Callable[[Arguments], str]:
    return lambda arguments: f'{{"name": "sweep", "{key}": {_spaced(arguments)}}}'


def _each(
    write: Callable[[Arguments], str], *, begin: str = "", between: str = "", end: str = ""
) -> Callable[[Sequence[Arguments]], str]:
    return lambda calls: begin + between.join(map(write, calls)) + end


def _python(arguments: Arguments) -> str:
    """Python calls with reordered keywords and double quotes."""
    pairs = (
        f"{name}={json.dumps(value) if isinstance(value, str) else value}"
        for name, value in reversed(arguments.items())
    )
    return f"sweep({', '.join(pairs)})"


def _tagged(arguments: Arguments) -> str:
    """Values on separate lines between their tags, with Python's words."""
    pairs = (f"<parameter={name}>{value}</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=sweep>\n{''.join(pairs)}</function>\n</tool_call>"


def _gemma(open: str, close: str, quote: str) -> Callable[[Arguments], str]:
    """Pairs in any order, which the template sorts."""

    def write(arguments: Arguments) -> str:
        pairs = (
            f"{name}:{quote + value + quote if isinstance(value, str) else json.dumps(value)}"
            for name, value in reversed(arguments.items())
        )
        return f"{open}call:sweep{{{','.join(pairs)}}}{close}"

    return write


def _wide(*names: str) -> tuple[str, ...]:
    return tuple(f"<\uff5c{name}\uff5c>" for name in names)


def _deepseek(*, fenced: bool) -> Callable[[Sequence[Arguments]], str]:
    all_begin, begin, sep, end, all_end = _wide(
        "tool▁calls▁begin", "tool▁call▁begin", "tool▁sep", "tool▁call▁end", "tool▁calls▁end"
    )

    def write(arguments: Arguments) -> str:
        if fenced:
            return f"{begin}function{sep}sweep\n```json\n{_spaced(arguments)}\n```{end}"
        return f"{begin}sweep{sep}{_spaced(arguments)}{end}"

    return _each(write, begin=all_begin, between="\n" if fenced else "", end=all_end)


_LLAMA_CONTROL = (
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>"),
)
_LFM_CONTROL = (
    *CHATML_CONTROL,
    *("<|startoftext|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>"),
    *("<|tool_list_end|>", "<|tool_response_start|>", "<|tool_response_end|>"),
)
_MISTRAL_CONTROL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    "[/TOOL_RESULTS]",
)
_MISTRAL_NEW_CONTROL = (*_MISTRAL_CONTROL, "[ARGS]", "[CALL_ID]", "[TOOL_CONTENT]")
_DEEPSEEK_CONTROL = _wide(
    *("end▁of▁sentence", "begin▁of▁sentence", "User", "Assistant", "tool▁calls▁begin"),
    *("tool▁calls▁end", "tool▁call▁begin", "tool▁call▁end", "tool▁sep", "tool▁outputs▁begin"),
    *("tool▁outputs▁end", "tool▁output▁begin", "tool▁output▁end"),
)
_GEMMA_CONTROL = ("<bos>", "<start_of_turn>", "<end_of_turn>")
_FUNCTION_GEMMA_CONTROL = (
    *_GEMMA_CONTROL,
    *("<start_function_call>", "<end_function_call>", "<start_function_response>"),
    *("<end_function_response>", "<start_function_declaration>", "<end_function_declaration>"),
    "<escape>",
)
_GEMMA_4_CONTROL = (
    *("<bos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>', "<|channel>", "<channel|>"),
)
_DEEPSEEK_ENDS = _DEEPSEEK_CONTROL[:1]

HERMES_FAMILY = Family(
    HERMES,
    "hermes",
    _each(
        lambda arguments: f"<tool_call>\n{_json_calls('arguments')(arguments)}\n</tool_call>",
        between="\n",
    ),
    CHATML_CONTROL,
    ("<|im_end|>",),
)
CODER = Family(
    templates.QWEN3_CODER,
    "qwen3-coder",
    _each(_tagged, between="\n"),
    CHATML_CONTROL,
    ("<|im_end|>",),
)
QWEN35 = Family(
    templates.QWEN35,
    "qwen3-coder",
    _each(_tagged, begin="The next room.\n</think>\n\n", between="\n"),
    CHATML_CONTROL,
    ("<|im_end|>",),
    answer="No room is left.\n</think>\n\nAll is tidy.",
    opening="Hm.</think>\n\n",
)
LLAMA3 = Family(
    templates.LLAMA3,
    "llama3-json",
    _each(_json_calls("parameters"), between="; "),
    _LLAMA_CONTROL,
    ("<|eot_id|>", "<|eom_id|>"),
    bos="<|begin_of_text|>",
    parallel=False,
)
LFM25 = Family(
    templates.LFM25,
    "pythonic",
    _each(_python, begin="<|tool_call_start|>[", between=", ", end="]<|tool_call_end|>"),
    _LFM_CONTROL,
    ("<|im_end|>",),
    bos="<|startoftext|>",
)
LFM2 = Family(
    templates.LFM2,
    "pythonic",
    LFM25.calls,
    _LFM_CONTROL,
    ("<|im_end|>",),
    bos="<|startoftext|>",
)
MISTRAL_LIST = Family(
    templates.MISTRAL_LIST,
    "mistral",
    _each(_json_calls("arguments"), begin="[TOOL_CALLS][", between=", ", end="]"),
    _MISTRAL_CONTROL,
    ("</s>",),
    bos="<s>",
)
MISTRAL_ID = Family(
    templates.MISTRAL_ID,
    "mistral",
    _each(
        lambda arguments: f"[TOOL_CALLS]sweep[CALL_ID]xK93bVw01[ARGS]{_spaced(arguments)}",
    ),
    _MISTRAL_NEW_CONTROL,
    ("</s>",),
    bos="<s>",
)
MISTRAL_ARGS = Family(
    templates.MISTRAL_ARGS,
    "mistral",
    _each(lambda arguments: f"[TOOL_CALLS]sweep[ARGS]{_spaced(arguments)}"),
    _MISTRAL_NEW_CONTROL,
    ("</s>",),
    bos="<s>",
)
DEEPSEEK_V3 = Family(
    deepseek_templates.DEEPSEEK_V3,
    "deepseek",
    _deepseek(fenced=True),
    _DEEPSEEK_CONTROL,
    _DEEPSEEK_ENDS,
    bos=_DEEPSEEK_CONTROL[1],
)
DEEPSEEK_R1 = Family(
    deepseek_templates.DEEPSEEK_R1,
    "deepseek",
    _deepseek(fenced=True),
    _DEEPSEEK_CONTROL,
    _DEEPSEEK_ENDS,
    bos=_DEEPSEEK_CONTROL[1],
)
DEEPSEEK_V31 = Family(
    deepseek_templates.DEEPSEEK_V31,
    "deepseek",
    _deepseek(fenced=False),
    _DEEPSEEK_CONTROL,
    _DEEPSEEK_ENDS,
    bos=_DEEPSEEK_CONTROL[1],
    opening=_wide("tool▁calls▁begin")[0],  # or it could reason first, without a limit
)
FUNCTION_GEMMA = Family(
    gemma_templates.FUNCTION_GEMMA,
    "functiongemma",
    _each(_gemma("<start_function_call>", "<end_function_call>", "<escape>")),
    _FUNCTION_GEMMA_CONTROL,
    ("<end_of_turn>",),
    call_end="<start_function_response>",
    bos="<bos>",
)
GEMMA_4 = Family(
    gemma_templates.GEMMA_4,
    "gemma4",
    _each(
        _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
        begin="<|channel>thought\nThe next room.\n<channel|>",
    ),
    _GEMMA_4_CONTROL,
    ("<turn|>",),
    call_end="<|tool_response>",
    bos="<bos>",
    opening="<|tool_call>",
)
GEMMA_4_LARGE = Family(
    gemma_templates.GEMMA_4_LARGE,
    "gemma4",
    _each(_gemma("<|tool_call>", "<tool_call|>", '<|"|>')),
    _GEMMA_4_CONTROL,
    ("<turn|>",),
    call_end="<|tool_response>",
    bos="<bos>",
    opening="<|tool_call>",
)
GEMMA_3 = Family(
    gemma_templates.GEMMA_3,
    "gemma3",
    _each(_python, begin="```tool_code\n", between="\n", end="\n```"),
    _GEMMA_CONTROL,
    ("<end_of_turn>",),
    bos="<bos>",
)
GPT_OSS = Family(
    CHANNELS,
    "harmony",
    _each(
        lambda arguments: (
            "<|channel|>analysis<|message|>The next room.<|end|><|start|>assistant<|channel|>"
            f"commentary to=functions.sweep <|constrain|>json<|message|>{_spaced(arguments)}"
        )
    ),
    HARMONY_CONTROL,
    ("<|return|>", "<|call|>"),
    call_end="<|call|>",
    parallel=False,
    answer="<|channel|>final<|message|>All is tidy.",
)

FAMILIES = {
    name.lower().removesuffix("_family"): value
    for name, value in globals().items()
    if isinstance(value, Family)
}
