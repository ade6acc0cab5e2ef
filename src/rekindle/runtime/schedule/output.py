"""Turns the sampled tokens of a reply into the parts of an assistant message."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from dataclasses import dataclass
from itertools import accumulate

from rekindle.chat.detokenize import Detokenizer
from rekindle.chat.tools.stream import ReplyParser
from rekindle.engine.base import Sampled, TokenMask
from rekindle.protocol.events import (
    ArgumentsDelta,
    AssistantMessage,
    FinishReason,
    Part,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
    new_call_id,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.tokens import Tokenizer


@dataclass(frozen=True, slots=True)
class ReplyDecoding:
    """How the tokens of one reply become text, reasoning and tool calls."""

    parser: ReplyParser | None = None  # None: the whole reply is text
    shown: Container[int] = ()  # control tokens whose text the parser reads
    token_mask: TokenMask | None = None  # the grammar that constrains sampling
    end_tokens: frozenset[int] = frozenset()


class ReplyOutput:
    """Follows one reply until an end token, a stop string or its token limit ends it."""

    def __init__(
        self,
        request: GenerateRequest,
        decoding: ReplyDecoding,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
    ) -> None:
        self.message = AssistantMessage(keeps_logprobs=False)
        self.finish_reason: FinishReason | None = None  # None until the reply ends
        self.tokens = 0
        self.reasoning_tokens = 0
        self.is_broken_off = False  # ended inside reasoning or a call, or after the only call
        self.max_tokens = max_tokens
        self.min_tokens = request.sampling.min_tokens
        self._max_calls = request.tool_use.max_calls if request.tool_use.parallel else 1
        self._parser = decoding.parser
        self._shown = decoding.shown
        self._tokenizer = tokenizer
        # A constrained reply ends when it is complete, even with `ignore_eos`.
        ends = decoding.token_mask is not None or not request.ignore_eos
        own = decoding.end_tokens if ends else frozenset()
        self._end_tokens = own.union(request.stop_token_ids)
        #: Whether only tokens and the limit end the reply, not its text.
        self.ends_by_token = (
            not request.stop
            and request.max_generate_s is None
            and (self._parser is None or self._max_calls is None)
        )
        self._text = Detokenizer(tokenizer, request.stop, decoding.shown)
        self._raw: list[str] = []
        self._logprobs = LogprobBuffer()
        self._unsent_tokens: list[int] | None = [] if request.returns_tokens else None
        limit_s = request.max_generate_s
        self._time_limit = None if limit_s is None else TimeLimit(limit_s)
        self._is_call_cut = False  # by a stop string
        self._is_enough = False  # the reply has `max_calls` tool calls

    @property
    def raw(self) -> str:
        """Everything the model wrote, including the markers of calls and reasoning."""
        return "".join(self._raw)

    @property
    def is_plain(self) -> bool:
        """Whether the client got everything the model wrote as text."""
        return self.raw == self.message.text

    @property
    def stop_string(self) -> str | None:
        return self._text.matched

    @property
    def remaining_tokens(self) -> int:
        return self.max_tokens - self.tokens

    def ends_with(self, token: int) -> bool:
        """Whether this is an end token, which is not part of the reply."""
        return token in self._end_tokens

    def is_last(self, token: int, before: int) -> bool:
        """Whether a token ends the reply, or reaches its limit after `before` others."""
        return before + 1 >= self.max_tokens or token in self._end_tokens

    def accept(self, sampled: Sampled) -> list[Part]:
        """Return the parts that this token completes. At the end of the reply, return the rest."""
        if self.ends_with(sampled.token):
            return self.finish("stop")
        self.tokens += 1
        has_parser = self._parser is not None
        was_reasoning = has_parser and self._is_reasoning
        text = self._text.push(sampled.token, may_stop=self.tokens > self.min_tokens)
        if sampled.logprob is not None:
            self._note(sampled, sampled.logprob)
        if self._unsent_tokens is not None:
            self._unsent_tokens.append(sampled.token)
        parts = self._parts(text)
        if has_parser and (was_reasoning or self._is_reasoning):
            self.reasoning_tokens += 1
            self._logprobs.drop()
        if self._text.stopped or self._is_enough:
            return parts + self._break_off("stop")
        is_late = self._time_limit is not None and self._time_limit.is_over(text)
        if self.remaining_tokens <= 0 or is_late:
            return parts + self._break_off("length")
        return parts

    def finish(self, reason: FinishReason, *, cut: bool = False) -> list[Part]:
        """Return text that was held back. `cut` means that the model did not end the reply."""
        parts = self._parts(self._text.finish())
        if self._parser is not None:
            parts += self._delivered(self._parser.finish(cut=cut))
            self.is_broken_off |= self._parser.is_call_cut
        self.finish_reason = reason
        if reason == "stop" and self.message.tool_calls and not self._is_call_cut:
            self.finish_reason = "tool_calls"
        return parts

    def _break_off(self, reason: FinishReason) -> list[Part]:
        """End the reply where it is."""
        self.is_broken_off = bool(self.message.tool_calls) or self._is_reasoning
        ended = self._parser.ended_calls if self._parser else 0
        self._is_call_cut = self._text.stopped and ended < len(self.message.tool_calls)
        return self.finish(reason, cut=True)

    @property
    def _is_reasoning(self) -> bool:
        return self._parser is not None and self._parser.in_reasoning

    def _note(self, sampled: Sampled, logprob: float) -> None:
        """Keep the log probability until it is clear whether the token is part of the text."""
        piece = self._tokenizer.piece
        top = [(piece(token, special=True), score) for token, score in sampled.top]
        ids = [token for token, _ in sampled.top]
        own = TokenLogprob(piece(sampled.token, special=True), logprob, top, sampled.token, ids)
        self._logprobs.add(own, marker=sampled.token in self._shown)

    def _parts(self, text: str) -> list[Part]:
        self._raw.append(text)
        if self._parser is not None:
            return self._delivered(self._parser.push(text))
        delta = TextDelta(text, self._logprobs.all() or None)
        if self._unsent_tokens:
            delta.tokens, self._unsent_tokens = self._unsent_tokens, []
        self.message.add(delta)
        return [delta] if text or delta.logprobs or delta.tokens else []

    def _delivered(self, parts: Iterable[Part]) -> list[Part]:
        """Return the parts that are sent to the client."""
        return [part for part in parts if self._deliver(part)]

    def _deliver(self, part: Part) -> bool:
        self._is_enough |= self._is_beyond_last_call(part)
        if self._is_enough:
            return False
        match part:
            case TextDelta(text):
                part.logprobs = (self._logprobs.of(text) or None) if text else None
            case ReasoningDelta(text) if text:
                self._logprobs.drop()
            case ToolCallStart():
                self._logprobs.drop()
                part.id = new_call_id()
        self.message.add(part)
        return isinstance(part, ToolCallStart) or bool(part.text)

    def _is_beyond_last_call(self, part: Part) -> bool:
        if self._max_calls is None or len(self.message.tool_calls) < self._max_calls:
            return False
        return not isinstance(part, ArgumentsDelta)


class TimeLimit:
    """Ends a reply after a time, but not before its first line is complete."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s: float | None = None  # None until the first token
        self._has_line_break = False

    def is_over(self, text: str) -> bool:
        """Called with the text of every token."""
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + self._limit_s
        self._has_line_break |= "\n" in text
        return self._has_line_break and now_s > self._until_s


class LogprobBuffer:
    """Log probabilities of tokens that may turn out to be text, reasoning, a call or a marker."""

    def __init__(self) -> None:
        self._waiting: list[TokenLogprob] = []
        self._after_marker = 0  # index of the first waiting token after a marker

    def add(self, log: TokenLogprob, *, marker: bool) -> None:
        self._waiting.append(log)
        if marker:
            self._after_marker = len(self._waiting)

    def drop(self) -> None:
        """Drop all of them, because none is part of the text."""
        self._take(len(self._waiting))

    def all(self) -> list[TokenLogprob]:
        if not self._waiting:
            return []
        return self._take(len(self._waiting))

    def of(self, text: str) -> list[TokenLogprob]:
        """Take the tokens that wrote this text. Earlier ones are dropped, later ones wait."""
        first = self._first(text)
        pieces = [log.piece for log in self._waiting[first:]]
        written = text.encode(errors="replace")
        at = b"".join(pieces).find(written)
        if at < 0:  # broken bytes were replaced
            return self.all()[first:]
        starts = list(accumulate(map(len, pieces), initial=0))
        before = sum(end <= at for end in starts[1:])
        reached = sum(start < at + len(written) for start in starts[:-1])
        return self._take(first + reached)[first + before :]

    def _first(self, text: str) -> int:
        """A marker may turn out to be ordinary text."""
        at = self._after_marker
        is_text = at > 0 and self._waiting[at - 1].piece in text.encode(errors="replace")
        return 0 if is_text else at

    def _take(self, count: int) -> list[TokenLogprob]:
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        self._after_marker = max(0, self._after_marker - count)
        return taken
