"""The tool formats of this package, and the format in which a model writes its replies."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

import rekindle.chat.tools
from rekindle.chat.grammar.reply import ReplyGrammars
from rekindle.chat.reasoning import REASONING_FORMATS, ReasoningFormat, ReasoningParser
from rekindle.chat.tools.base import ReplyParser
from rekindle.chat.tools.format import PlainTextParser, ReplyContext, ToolFormat, Tools
from rekindle.errors import ModelError

DEFAULT_TOOL_FORMAT = "hermes"  # also what the tool fallback describes
NO_REASONING = "none"


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """A tool format together with a reasoning format."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None

    @property
    def name(self) -> str:
        return self.tools.name

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the control tokens that the parser must see."""
        if self.reasoning is None or self.tools.reasoning is not None:
            return self.tools.markers
        return tuple(dict.fromkeys((*self.tools.markers, *self.reasoning.control_markers)))

    @property
    def end_markers(self) -> tuple[str, ...]:
        """Texts of the control tokens that end a reply beside the model's end tokens."""
        return self.tools.end_markers

    def parser(self, tools: Tools, *, calls: bool, opened: bool) -> ReplyParser:
        """A parser for one reply; without `calls`, it only separates reasoning from text."""
        context = ReplyContext(tools, calls, opened)
        if self.tools.reasoning is not None:
            return self.tools.parser(context)
        parser = self.tools.parser(context) if calls else PlainTextParser()
        if self.reasoning is None:
            return parser
        return ReasoningParser(self.reasoning, parser, opened=opened)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning."""
        return self.reasoning is not None and self.reasoning.is_open(prompt)

    def grammars(self, control: Mapping[str, int]) -> ReplyGrammars:
        """The grammars of its replies, for a model with these control tokens."""
        syntax = self.tools.syntax(control) if self.tools.syntax else None
        return ReplyGrammars(self.name, syntax, self.reasoning, control)


def discover() -> Iterator[ToolFormat]:
    """The formats that the modules of this package declare."""
    for module in pkgutil.iter_modules(rekindle.chat.tools.__path__, f"{__package__}."):
        if module.name != __name__:
            yield from getattr(import_module(module.name), "FORMATS", ())


_FORMATS = {each.name: each for each in sorted(discover(), key=lambda each: each.name)}
_PATTERNS = sorted(
    ((pattern, each) for each in _FORMATS.values() for pattern in each.template_patterns),
    key=lambda pair: -pair[0].precedence,
)

TOOL_FORMAT_NAMES = tuple(_FORMATS)
REASONING_FORMAT_NAMES = (*REASONING_FORMATS, NO_REASONING)


def check_names(tool_format: str | None, reasoning_format: str | None) -> None:
    """Refuse names of formats that do not exist; None stands for what the template shows."""
    _check("tool format", tool_format, TOOL_FORMAT_NAMES)
    _check("reasoning format", reasoning_format, REASONING_FORMAT_NAMES)


def select(
    template: str | None, *, tool_format: str | None = None, reasoning_format: str | None = None
) -> ReplyFormat:
    """The formats that the template shows, unless they are named."""
    check_names(tool_format, reasoning_format)
    source = template or ""
    tools = _FORMATS[tool_format] if tool_format else _shown_by(source)
    if tools.reasoning is not None:
        return ReplyFormat(tools, tools.reasoning)
    return ReplyFormat(tools, _reasoning(source, reasoning_format))


def _shown_by(template: str) -> ToolFormat:
    shown = (each for pattern, each in _PATTERNS if pattern.matches(template))
    return next(shown, _FORMATS[DEFAULT_TOOL_FORMAT])


def _reasoning(template: str, name: str | None) -> ReasoningFormat | None:
    if name is not None:
        return REASONING_FORMATS.get(name)
    shown = (each for each in REASONING_FORMATS.values() if each.is_in(template))
    return next(shown, None)


def _check(what: str, name: str | None, known: Sequence[str]) -> None:
    if name is not None and name not in known:
        raise ModelError(f"unknown {what} {name!r}: use auto, or one of {', '.join(known)}")
