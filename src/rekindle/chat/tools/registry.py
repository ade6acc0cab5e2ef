"""Finds the tool formats of this package, and selects the format of a model's replies."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from importlib import import_module

import rekindle.chat.tools
from rekindle.chat.reasoning import REASONING_FORMATS, ReasoningFormat
from rekindle.chat.tools.format import ReplyFormat, ToolFormat
from rekindle.errors import ModelError

DEFAULT_TOOL_FORMAT = "hermes"  # the format that the tool fallback describes to models
NO_REASONING = "none"

#: The texts by which a chat template shows its tool format. The first row whose texts all occur in
#: the template decides, so a more specific format comes before a more general one.
TEMPLATE_TEXTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("deepseek", ("<\uff5ctool▁call▁begin\uff5c>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("qwen3-coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>",)),
    ("hermes", ("<|tool_call|>",)),
    ("hermes", ("<TOOLCALL>",)),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("pythonic", ("<|tool_call_start|>",)),
    ("llama3-json", ('{"name": function name, "parameters":',)),
    ("llama3-json", ("<|python_tag|>",)),
    ("pythonic", ("<|python_start|>",)),  # Llama 4 has this marker too, but asks for JSON
    ("gemma3", ("tool_code",)),
)


def discover() -> Iterator[ToolFormat]:
    for module in pkgutil.iter_modules(rekindle.chat.tools.__path__, f"{__package__}."):
        if module.name != __name__:
            declared = vars(import_module(module.name)).values()
            yield from (each for each in declared if isinstance(each, ToolFormat))


_FORMATS = {each.name: each for each in sorted(discover(), key=lambda each: each.name)}
TOOL_FORMAT_NAMES = tuple(_FORMATS)
REASONING_FORMAT_NAMES = (*REASONING_FORMATS, NO_REASONING)


def check_names(tool_format: str | None, reasoning_format: str | None) -> None:
    """Refuses unknown names of formats. None means that the template decides."""
    _check("tool format", tool_format, TOOL_FORMAT_NAMES)
    _check("reasoning format", reasoning_format, REASONING_FORMAT_NAMES)


def _check(kind: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ModelError(f"unknown {kind} {name!r}: use auto, or one of {', '.join(known)}")


def select(
    template: str | None, *, tool_format: str | None = None, reasoning_format: str | None = None
) -> ReplyFormat:
    """The formats that the template shows, unless they are named."""
    check_names(tool_format, reasoning_format)
    source = template or ""
    tools = _FORMATS[tool_format or _shown_by(source)]
    if tools.reasoning is not None:
        return ReplyFormat(tools, tools.reasoning)
    return ReplyFormat(tools, _reasoning(source, reasoning_format))


def _shown_by(template: str) -> str:
    shown = (name for name, texts in TEMPLATE_TEXTS if all(text in template for text in texts))
    return next(shown, DEFAULT_TOOL_FORMAT)


def _reasoning(template: str, name: str | None) -> ReasoningFormat | None:
    if name is not None:
        return REASONING_FORMATS.get(name)
    shown = (each for each in REASONING_FORMATS.values() if each.is_in(template))
    return next(shown, None)
