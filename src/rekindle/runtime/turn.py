"""One turn: a request from its arrival to its single terminal event."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from rekindle.chat.detokenize import TextStream
from rekindle.chat.encode import Prompt, Tokenizer
from rekindle.chat.message_hashes import Told
from rekindle.chat.replay import Keys
from rekindle.chat.reply import Parser
from rekindle.engine.base import Constraint, Sampler, Sequence
from rekindle.engine.sampling import Sampled
from rekindle.errors import ContextTooLong, ServerError
from rekindle.kvcache.block import WriteBack
from rekindle.kvcache.entries import Entry
from rekindle.kvcache.key import chain_key
from rekindle.kvcache.tiers.base import Fetch
from rekindle.protocol.events import (
    ArgumentsDelta,
    CacheReport,
    Cancelled,
    Delta,
    Event,
    Failed,
    Finished,
    FinishReason,
    Part,
    Reason,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    ToolCallStart,
)
from rekindle.protocol.message import AssistantMessage, new_call_id
from rekindle.protocol.requests import GenerateRequest
from rekindle.runtime.checkpoints import Checkpoints
from rekindle.runtime.logprobs import LogprobBuffer
from rekindle.tokens import TokenBuffer, Tokens


@dataclass(frozen=True, slots=True)
class Kept:
    """How far a turn's state is in the store: so many tokens, and the key of their last block."""

    tokens: int
    key: bytes
    before: Kept | None = None

    def after(self, block: Tokens) -> Kept:
        """One block further."""
        tokens = self.tokens + len(block)
        return Kept(tokens, chain_key(self.key, block), Kept(self.tokens, self.key))

    def whole(self, block_tokens: int) -> Kept:
        """Without the tail: what comes next makes a longer block of it."""
        tail = self.tokens % block_tokens
        return self.before if tail and self.before else self


class Turn:
    """Tokens so far and how far the engine has got with them.

    `tokens` is the prompt and everything sampled. What the sequence does not hold yet is pending:
    one pending token is a decode step, more are prefill; a turn that loses its sequence simply has
    everything pending again.
    """

    def __init__(
        self,
        ask: GenerateRequest,
        prompt: Prompt,
        *,
        namespace: bytes,
        tokenizer: Tokenizer,
        end_tokens: frozenset[int],
        context_tokens: int,
        parser: Parser | None = None,
        shown: Container[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        if len(prompt.tokens) >= context_tokens:
            raise ContextTooLong(str(len(prompt.tokens)), context_tokens, param=ask.source)
        self.ask = ask
        self.id = ask.turn
        self.prompt = prompt
        self.namespace = namespace
        self.buffer = TokenBuffer(Tokens.of(prompt.tokens))
        self.tokens = self.buffer.ids
        self.sequence: Sequence | None = None
        self.kept = Kept(0, namespace)
        self.checkpoints: Checkpoints | None = None  # where state cannot be cut
        self.sampler: Sampler | None = None
        self.report: CacheReport | None = None
        self.prompt_eval_s = 0.0
        self.untold_s = 0.0  # of that, since its progress was told
        self.place = 0  # in the queue: lower goes first
        self.slice_tokens = 0  # computed since it last came to the front of the prefill queue
        self.restarts = 0
        self.started = False
        self.named: Entry | None = None  # the entry that a name in the request stands for
        self.trouble: Reason | None = None  # why that name, or its state, is of no use
        self.session: str | None = None  # what a fingerprint calls this conversation
        self.write_back = WriteBack.NEVER  # when what it computes is written to lower tiers
        self.fetch: Fetch | None = None  # its blocks on their way from lower tiers
        self.normalised: list[str] = []  # what was changed in the request so that more matches
        self.keys: Keys | None = None  # of the conversation's replies
        self.told: Told | None = None  # its segments
        self.constraint = constraint
        self.reasoning_tokens = 0
        self.reply = AssistantMessage()
        self._raw: list[str] = []  # all that the model wrote, markers included
        self._is_enough = (
            False  # the one call that the client takes was made, and the reply goes on
        )
        self.broke_off = False  # in the middle of a thought or a call, or after the one call
        self._is_cut = False  # by a stop string, in the middle of a call
        self._parser = parser
        self._shown = shown
        self._tokenizer = tokenizer
        ends = constraint is not None or not ask.ignore_eos
        self._end_tokens = end_tokens if ends else frozenset()
        self._text = TextStream(tokenizer, ask.stop, shown)
        self._logs = LogprobBuffer()
        room = context_tokens - len(prompt.tokens)
        self._most_tokens = room if ask.max_tokens is None else min(ask.max_tokens, room)

    @property
    def is_fetching(self) -> bool:
        return self.fetch is not None and not self.fetch.done

    @property
    def said(self) -> str:
        """All the text that its client was given."""
        return self.reply.text

    @property
    def raw(self) -> str:
        """All the text the model wrote, markers of calls and reasoning included."""
        return "".join(self._raw)

    @property
    def is_plain(self) -> bool:
        """Whether the model wrote nothing but what was said."""
        return self.raw == self.said

    @property
    def message(self) -> dict[str, Any]:
        """The reply as the client has it."""
        return self.reply.as_dict()

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
        elif self.checkpoints and (place := self.checkpoints.next_after(start)):
            stop = min(stop, place)
        return self.tokens[start : min(stop, len(self.tokens))]

    def accept(self, sampled: Sampled) -> list[Event]:
        """Take a sampled token: its text, and the end of the turn when it is the end."""
        if sampled.token in self._end_tokens:
            return self._finish("stop", [])
        self.buffer.append(sampled.token)
        thinking = self._is_thinking
        text = self._text.push(sampled.token)
        self._log(sampled)
        events = self._say(text)
        if thinking or self._is_thinking:
            self.reasoning_tokens += 1
            self._logs.drop()
        if self._text.stopped or self._is_enough:
            return self._break_off("stop", events)
        if self.remaining_tokens <= 0:
            return self._break_off("length", events)
        return events

    @property
    def _is_thinking(self) -> bool:
        return self._parser is not None and self._parser.thinking

    def _log(self, sampled: Sampled) -> None:
        if sampled.logprob is not None:
            piece = self._tokenizer.piece
            top = [(piece(token, special=True), score) for token, score in sampled.top]
            own = piece(sampled.token, special=True)
            log = TokenLogprob(own, sampled.logprob, top)
            self._logs.add(log, marker=sampled.token in self._shown)

    def _say(self, text: str) -> list[Event]:
        self._raw.append(text)
        if self._parser is None:
            delta = TextDelta(text, self._logs.all() or None)
            self.reply.add(delta)
            return [Delta(self.id, delta)] if text or delta.logprobs else []
        return self._tell(self._parser.push(text))

    def _tell(self, parts: Iterable[Part]) -> list[Event]:
        """Parts of the reply as events."""
        return [event for part in parts if (event := self._event(part)) is not None]

    def _event(self, part: Part) -> Event | None:
        """Log probabilities are those of what is said."""
        self._is_enough |= self._is_beyond(part)
        if self._is_enough:
            return None
        match part:
            case TextDelta(text):
                part.logprobs = (self._logs.of(text) or None) if text else None
            case ReasoningDelta(text) if text:
                self._logs.drop()
            case ToolCallStart():
                self._logs.drop()
                part.id = new_call_id()
        self.reply.add(part)
        is_empty = not isinstance(part, ToolCallStart) and not part.text
        return None if is_empty else Delta(self.id, part)

    def _is_beyond(self, part: Part) -> bool:
        """Whether a client that takes one call at a time is given nothing from here on."""
        if self.ask.tool_use.parallel or not self.reply.tool_calls:
            return False
        return not isinstance(part, ArgumentsDelta)

    def _break_off(self, reason: FinishReason, said: list[Event]) -> list[Event]:
        """The model has not ended its reply itself."""
        self.broke_off = bool(self.reply.tool_calls) or self._is_thinking
        ended = self._parser.ended_calls if self._parser else 0
        self._is_cut = self._text.stopped and ended < len(self.reply.tool_calls)
        return self._finish(reason, said)

    def _finish(self, reason: FinishReason, said: list[Event]) -> list[Event]:
        said = [*said, *self._say(self._text.finish())]
        if self._parser is not None:
            said += self._tell(self._parser.finish())
        if self.constraint is not None and self.constraint.trouble:
            trouble = f"the reply could not be held to its schema: {self.constraint.trouble}"
            return [*said, self.failed(ServerError(trouble))]
        if reason == "stop" and self.reply.tool_calls and not self._is_cut:
            reason = "tool_calls"
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
            reasoning_tokens=self.reasoning_tokens,
        )
        return [*said, finished]

    def prepared(self) -> list[Event]:
        """The end of a turn that computes its prompt and says nothing."""
        return [] if self.pending_tokens else self._finish("stop", [])

    def cancelled(self) -> Event:
        return Cancelled(self.id)

    def failed(self, error: ServerError) -> Event:
        return Failed(self.id, error.info)
