"""How a model replies: which text is thought, which is a call, and what a reply is held to."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from rekindle.chat.encode import Prompt
from rekindle.chat.escaping import unescape
from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import Grammars
from rekindle.chat.grammar.reply import answer_grammar, calls_grammar
from rekindle.chat.reply import Parser
from rekindle.chat.tools.registry import Format, choose, opened
from rekindle.engine.base import TokenMask
from rekindle.errors import ModelError
from rekindle.protocol.requests import GenerateRequest
from rekindle.tokens import Tokenizer

SEEN_BYTES = 4096  # of a prompt's end: a thought that it opens is in its last words


class Rules(NamedTuple):
    """What one reply is read with and held to."""

    parser: Parser | None = None  # None: all of it is text
    shown: Container[int] = ()  # control tokens whose text the parser reads
    constraint: TokenMask | None = None


class Manner:
    """Of one model. Any thread may call it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        try:
            self.format: Format = choose(template, name=tool_format, thought_name=reasoning_format)
        except ValueError as error:
            raise ModelError(str(error)) from error
        self._control = tokenizer.control_texts
        self._shown = self._tokens(self.format.markers)
        self.end_tokens = tokenizer.end_tokens | self._tokens(self.format.ends)
        self._grammars = Grammars(
            tokenizer, vocabulary_size=tokenizer.size, end_tokens=self.end_tokens
        )

    def _tokens(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._control[text] for text in texts if text in self._control)

    def rules(self, ask: GenerateRequest, prompt: Prompt) -> Rules:
        """Raises BadRequest for a schema that cannot be enforced."""
        if ask.messages is None or ask.prepare is not None:
            return Rules()
        end = unescape(prompt.escaped[-SEEN_BYTES:]).decode(errors="ignore")
        is_open = opened(self.format, end)
        calls = bool(ask.tools) and ask.tool_use.choice != "none"
        grammar = self._grammar(ask, calls=calls, is_open=is_open)
        constraint = self._grammars.constraint(grammar) if grammar else None
        if not calls and self.format.thought is None:
            return Rules(constraint=constraint)
        parser = self.format.parser(ask.tools or [], calls=calls, opened=is_open)
        return Rules(parser, self._shown, constraint)

    def _grammar(self, ask: GenerateRequest, *, calls: bool, is_open: bool) -> Grammar | None:
        name, thought, control = self.format.name, self.format.thought, self._control
        if not calls:
            if ask.structured_output is None:
                return None
            return answer_grammar(
                name, ask.structured_output.schema, thought=thought, opened=is_open, control=control
            )
        answer = None
        if ask.structured_output is not None:
            answer = (
                {"type": "object"}
                if ask.structured_output.schema is None
                else ask.structured_output.schema
            )
        return calls_grammar(
            name,
            ask.tools or [],
            required=ask.tool_use.choice == "required",
            name=ask.tool_use.name,
            parallel=ask.tool_use.parallel,
            thought=thought,
            opened=is_open,
            control=control,
            answer=answer,
        )
