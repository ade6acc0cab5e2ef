"""One turn: a request from its arrival to its single terminal event."""

from __future__ import annotations

from rekindle.cache.block import Wish
from rekindle.cache.disk import Fetch
from rekindle.cache.entries import Entry
from rekindle.cache.key import pack
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
        self.started = False
        self.named: Entry | None = None  # the entry that a name in the request stands for
        self.trouble: str | None = None  # why that name, or its state, is of no use
        self.session: str | None = None  # what a fingerprint calls this conversation
        self.wish = Wish.NEVER  # when what it computes is to be written to disk
        self.fetch: Fetch | None = None  # its blocks on their way from disk
        self._said: list[str] = []
        self._tokenizer = tokenizer
        self._end_tokens = frozenset() if ask.ignore_eos else end_tokens
        self._text = TextStream(tokenizer, ask.stop)
        self._logs: list[TokenLog] = []
        room = context_tokens - len(prompt.tokens)
        self._most_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)

    @property
    def is_fetching(self) -> bool:
        return self.fetch is not None and not self.fetch.done

    @property
    def said(self) -> str:
        """All the text that its client was given."""
        return "".join(self._said)

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
        self._said.append(text)
        logs, self._logs = self._logs or None, []
        return [Text(self.id, text, logs)]

    def _finish(self, reason: FinishReason, said: list[Event]) -> list[Event]:
        said = [*said, *self._say(self._text.finish())]
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
        return [*said, finished]

    def prepared(self) -> list[Event]:
        """The end of a turn that computes its prompt and says nothing."""
        return [] if self.pending_tokens else self._finish("stop", [])

    def cancelled(self) -> Event:
        return Cancelled(self.id)

    def failed(self, error: ServerError) -> Event:
        return failure(self.id, error)


def failure(turn: int, error: ServerError) -> Failed:
    return Failed(turn, error.status, error.kind, error.code, str(error), error.param)
