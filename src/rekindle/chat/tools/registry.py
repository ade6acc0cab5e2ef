"""Which format a model writes: told by its template, or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rekindle.chat.reply import Parser
from rekindle.chat.tools import (
    deepseek,
    gemma,
    harmony,
    hermes,
    llama3,
    mistral,
    pythonic,
    qwen3_coder,
    reasoning,
)
from rekindle.chat.tools.gemma3 import ToolCode
from rekindle.chat.tools.parameters import Tools, names
from rekindle.chat.tools.plain import Plain

HARMONY = "harmony"


class _Kind(NamedTuple):
    """One format of calls."""

    make: Callable[[Tools], Parser]
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


def _gemma(spelling: gemma.Spelling) -> _Kind:
    return _Kind(lambda tools: gemma.Gemma(spelling), spelling.markers, (spelling.response,))


_KINDS: Mapping[str, _Kind] = {
    "hermes": _Kind(lambda tools: hermes.Hermes(), hermes.MARKERS),
    "qwen3-coder": _Kind(qwen3_coder.Coder, qwen3_coder.MARKERS),
    "llama3-json": _Kind(lambda tools: llama3.Llama(names(tools)), llama3.MARKERS),
    "pythonic": _Kind(lambda tools: pythonic.Pythonic(names(tools)), pythonic.MARKERS),
    "mistral": _Kind(lambda tools: mistral.Mistral(), mistral.MARKERS),
    "deepseek": _Kind(lambda tools: deepseek.DeepSeek(), deepseek.MARKERS),
    HARMONY: _Kind(lambda tools: harmony.Harmony(names(tools)), harmony.MARKERS),
    "functiongemma": _gemma(gemma.FUNCTION_GEMMA),
    "gemma4": _gemma(gemma.GEMMA_4),
    "gemma3": _Kind(lambda tools: ToolCode(names(tools))),
    "plain": _Kind(lambda tools: Plain()),
}

# Texts that a template has, all of a row; the first row that fits decides.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (HARMONY, (harmony.CHANNEL, harmony.MESSAGE)),
    ("gemma4", (gemma.GEMMA_4.open,)),
    ("functiongemma", (gemma.FUNCTION_GEMMA.open,)),
    ("deepseek", (deepseek.BEGIN,)),
    ("mistral", (mistral.OPEN,)),
    ("qwen3-coder", (qwen3_coder.FUNCTION, qwen3_coder.PARAMETER)),
    *(("hermes", (marker,)) for marker in hermes.OPENS),
    ("pythonic", ("[func_name1(params_name1=",)),
    ("pythonic", ("<|tool_call_start|>",)),
    # Llama 4's own template has the markers of Python and asks for JSON.
    ("llama3-json", ('{"name": function name, "parameters":',)),
    ("llama3-json", (llama3.TAG,)),
    ("pythonic", (llama3.START,)),
    ("gemma3", ("tool_code",)),
)

NAMES = tuple(_KINDS)
THOUGHT_NAMES = (*reasoning.PAIRS, "none")
FALLBACK = "hermes"


@dataclass(frozen=True, slots=True)
class Format:
    """How a model writes calls and reasoning."""

    name: str
    markers: tuple[str, ...]  # texts of control tokens that the parser must see
    thought: tuple[str, str] | None
    ends: tuple[str, ...] = ()  # texts of further control tokens that end a reply

    def parser(self, tools: Sequence[Mapping[str, Any]], *, calls: bool, opened: bool) -> Parser:
        """A parser for one reply; without `calls`, only thought is told from text."""
        if self.name == HARMONY:
            return harmony.Harmony(names(tools), calls=calls, opened=opened)
        parser: Parser = _KINDS[self.name].make(tools) if calls else Plain()
        return reasoning.Thinker(self.thought, parser, opened=opened) if self.thought else parser


def choose(
    template: str | None, *, name: str | None = None, thought_name: str | None = None
) -> Format:
    """The format whose markers the template writes, unless it is named."""
    source = template or ""
    name = _told(source) if name is None else _known(name, NAMES, "tool format")
    kind = _KINDS[name]
    if name == HARMONY:
        return Format(name, kind.markers, harmony.THOUGHT)
    pair = _thought(source, thought_name)
    markers = dict.fromkeys((*kind.markers, *_tokens(pair)))
    return Format(name, tuple(markers), pair, kind.ends)


def opened(format: Format, prompt_text: str) -> bool:
    """Whether a rendered prompt ends inside an open reasoning."""
    return format.thought is not None and reasoning.is_open(format.thought, prompt_text)


def _told(template: str) -> str:
    for name, signs in _SIGNS:
        if all(sign in template for sign in signs):
            return name
    return FALLBACK


def _thought(template: str, name: str | None) -> tuple[str, str] | None:
    if name is not None:
        return reasoning.PAIRS.get(_known(name, THOUGHT_NAMES, "thought format"))
    pairs = reasoning.PAIRS.values()
    return next((pair for pair in pairs if pair.open in template or pair.close in template), None)


def _tokens(pair: tuple[str, str] | None) -> tuple[str, ...]:
    """The control tokens of a pair: the channel's name after one is text."""
    return tuple(marker.removesuffix("thought") for marker in pair or ())


def _known(name: str, known: Sequence[str], what: str) -> str:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}; known are: {', '.join(known)}")
    return name
