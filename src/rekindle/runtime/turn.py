"""One turn: a request from its arrival to its single terminal event."""

from __future__ import annotations

from rekindle.cache.key import pack
from rekindle.cache.resolve import Plan
from rekindle.engine.base import Sampler, Sequence
from rekindle.engine.sampling import Sampled
from rekindle.errors import ContextTooLong, ServerError
from rekindle.events import (
    CacheReport,
    Cancelled,
    Event,
    Failed,
    Finished,
    FinishReason,
    Text,
    TokenLog,
)
from rekindle.prompt.output import TextStream
from rekindle.prompt.tokens import Prompt, Tokenizer
from rekindle.runtime.wire import Ask


class Turn:
    """Tokens so far and how far the engine has got with them.

    `tokens` is the prompt and everything sampled. What the sequence does not hold yet is pending:
    one pending token is a decode step, more are prefill; a turn that loses its sequence simply has
    everything pending again.
    """

    def __init__(
        self,
        ask: Ask,
        prompt: Prompt,
        *,
        namespace: bytes,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        context_tokens: int,
    ) -> None:
        if len(prompt.tokens) >= context_tokens:
            raise ContextTooLong(str(len(prompt.tokens)), context_tokens, param=ask.source)
        self.ask = ask
        self.id = ask.turn
        self.prompt = prompt
        self.namespace = namespace
        self.tokens = list(prompt.tokens)
        self.packed = bytearray(pack(self.tokens))
        self.sequence: Sequence | None = None
        self.sampler: Sampler | None = None
        self.report: CacheReport | None = None
        self.prompt_eval_s = 0.0
        self.slice_tokens = 0  # computed since it last came to the front of the prefill queue
        self.restarts = 0
        self._tokenizer = tokenizer
        self._end_tokens = frozenset() if ask.ignore_eos else end_tokens
        self._text = TextStream(tokenizer, ask.stop)
        self._logs: list[TokenLog] = []
        room = context_tokens - len(prompt.tokens)
        self._most_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt.tokens)

    @property
    def generated_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining_tokens(self) -> int:
        return self._most_tokens - self.generated_tokens

    @property
    def held_tokens(self) -> int:
        return self.sequence.length if self.sequence else 0

    @property
    def pending_tokens(self) -> int:
        return len(self.tokens) - (self.sequence.length if self.sequence else 0)

    @property
    def is_reading(self) -> bool:
        """Whether its prompt is still being computed."""
        return self.pending_tokens > 1 or not self.generated_tokens

    @property
    def shares(self) -> bool:
        """Whether other turns may use this one's state while it lives."""
        return self.ask.reuse and not self.ask.exact

    def next_tokens(self, most: int, step_tokens: int) -> list[int]:
        """The tokens of the next step: at most `most`, or one canonical step when exact."""
        start = self.held_tokens
        stop = start + most
        if self.ask.exact:
            # Sampled tokens were computed one by one; so they are again, or bits would differ.
            boundary = start - start % step_tokens + step_tokens
            stop = min(boundary, self.prompt_tokens) if start < self.prompt_tokens else start + 1
        return self.tokens[start : min(stop, len(self.tokens))]

    def accept(self, sampled: Sampled) -> list[Event]:
        """Take a sampled token: its text, and the end of the turn when it is the end."""
        if sampled.token in self._end_tokens:
            return self._finish("stop", [])
        self.tokens.append(sampled.token)
        self.packed += pack([sampled.token])
        text = self._text.push(sampled.token)
        self._log(sampled)
        if self._text.stopped:
            return self._finish("stop", self._say(text))
        if self.remaining_tokens <= 0:
            return self._finish("length", self._say(text))
        return self._say(text)

    def _log(self, sampled: Sampled) -> None:
        if sampled.logprob is not None:
            piece = self._tokenizer.piece
            top = [(piece(token, special=True), score) for token, score in sampled.top]
            own = piece(sampled.token, special=True)
            self._logs.append(TokenLog(own, sampled.logprob, top))

    def _say(self, text: str) -> list[Event]:
        if not text and not self._logs:
            return []
        logs, self._logs = self._logs or None, []
        return [Text(self.id, text, logs)]

    def _finish(self, reason: FinishReason, said: list[Event]) -> list[Event]:
        assert self.report is not None
        kept = self.held_tokens if self.ask.reuse else 0
        self.report.cached_tokens = kept
        finished = Finished(
            self.id,
            reason,
            self.prompt_tokens,
            self.generated_tokens,
            self.prompt_eval_s,
            self.report,
        )
        return [*said, *self._say(self._text.finish()), finished]

    def cancelled(self) -> Event:
        return Cancelled(self.id)

    def failed(self, error: ServerError) -> Event:
        return failure(self.id, error)


def failure(turn: int, error: ServerError) -> Failed:
    return Failed(turn, error.status, error.kind, error.code, str(error), error.param)


def explain(turn: Turn, plan: Plan[Sequence], reused_tokens: int) -> CacheReport:
    """A truthful word on what was reused and why not more."""
    if reused_tokens == 0:
        return CacheReport("miss", _why_nothing(turn, plan), 0, 0, None)
    tier = "ram" if plan.blocks else "device"
    if not plan.diverged:
        return CacheReport("hit", "full_match", reused_tokens, 0, tier)
    return CacheReport("partial_hit", _changed(turn, plan), reused_tokens, 0, tier)


def _why_nothing(turn: Turn, plan: Plan[Sequence]) -> str:
    if not turn.ask.reuse:
        return "opted_out"
    if turn.ask.exact and plan.matched_tokens:
        return "exact_boundary"
    return _changed(turn, plan) if plan.matched_tokens else "not_cached"


def _changed(turn: Turn, plan: Plan[Sequence]) -> str:
    """Which part of the request is the first that differs."""
    for boundary in turn.prompt.boundaries:
        if plan.matched_tokens < boundary.end:
            return "system_changed" if boundary.role == "system" else "turn_changed"
    return "prefix_changed" if not turn.prompt.boundaries else "turn_changed"
