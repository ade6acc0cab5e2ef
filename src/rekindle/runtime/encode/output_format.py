"""Prepares the decoding of replies: selects the parser and compiles the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.chat.escaping import unescape
from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.chat.prompt import Prompt
from rekindle.chat.tools.registry import select
from rekindle.engine.base import TokenMask
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.schedule.output import ReplyDecoding
from rekindle.tokens import Tokenizer


class OutputFormat:
    """The tool-call and reasoning format of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> None:
        self.format = select(template, tool_format=tool_format, reasoning_format=reasoning_format)
        self._control = tokenizer.control_texts
        self._shown = self._tokens(self.format.markers)
        self.end_tokens = tokenizer.end_tokens | self._tokens(self.format.end_markers)
        self._grammars = self.format.grammars(self._control)
        self._compiler = GrammarCompiler(
            tokenizer, vocabulary_size=tokenizer.size, end_tokens=self.end_tokens
        )

    def _tokens(self, texts: tuple[str, ...]) -> frozenset[int]:
        return frozenset(self._control[text] for text in texts if text in self._control)

    def decodings(
        self, request: GenerateRequest, prompt: Prompt, count: int
    ) -> list[ReplyDecoding]:
        """Return one decoding for each of `count` choices. The grammar is compiled once.

        Raises BadRequest for a schema that cannot be enforced.
        """
        output = request.structured_output
        if request.messages is None or request.prepare is not None:
            masks = self._masks(self._grammars.text(output) if output else None, count)
            return [ReplyDecoding(token_mask=mask, end_tokens=self.end_tokens) for mask in masks]
        # The last 4 KiB suffice to see whether the prompt ends inside reasoning.
        end = unescape(prompt.escaped[-4096:]).decode(errors="ignore")
        opened = self.format.opens_reasoning(end)
        tools = [*(request.tools or ()), *request.loaded_tools]
        calls = bool(tools) and request.tool_use.choice != "none"
        masks = self._masks(self._grammar(request, tools if calls else [], opened=opened), count)
        if not calls and self.format.reasoning is None:
            return [ReplyDecoding(token_mask=mask, end_tokens=self.end_tokens) for mask in masks]
        return [
            ReplyDecoding(
                self.format.parser(tools, calls=calls, opened=opened),
                self._shown,
                mask,
                self.end_tokens,
            )
            for mask in masks
        ]

    def _masks(self, grammar: Grammar | None, count: int) -> Sequence[TokenMask | None]:
        if grammar is None:
            return [None] * count
        first = self._compiler.compile(grammar)
        return [first, *(first.copy() for _ in range(count - 1))]

    def _grammar(
        self, request: GenerateRequest, callable_tools: list[Any], *, opened: bool
    ) -> Grammar | None:
        output = request.structured_output
        if not callable_tools:
            return self._grammars.answer(output, opened=opened) if output else None
        return self._grammars.calls(callable_tools, request.tool_use, opened=opened, answer=output)
