"""Defines the events of a turn, the parts of a reply, and the report on reuse.

Every turn ends with exactly one of the events in `TERMINAL`.
"""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct

FinishReason = Literal["stop", "length", "tool_calls"]
Status = Literal["hit", "partial_hit", "miss"]


class ErrorInfo(Struct, kw_only=True):
    """An error that travels from a runtime to the front: OpenAI's error object and the status."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    tokens: int | None = None  # length of a prompt that is too long, as far as it was counted
    limit: int | None = None  # maximum length of a prompt
    retry_after_s: int | None = None  # None: a 429 or 503 asks the client to wait for a second


class TokenLogprob(Struct, array_like=True):
    """One sampled token with its log probability and the best alternatives."""

    piece: bytes
    logprob: float
    top: list[tuple[bytes, float]]
    token: int = -1
    top_tokens: list[int] = []


class TextDelta(Struct, tag=True):
    """Final text for the user: whole characters, never part of a stop string."""

    text: str
    logprobs: list[TokenLogprob] | None = None
    tokens: list[int] | None = None  # sampled since the previous part, if the request asks for them


class ReasoningDelta(Struct, tag=True):
    text: str


class ToolCallStart(Struct, tag=True):
    """A function call whose arguments follow. `index` counts the calls of the reply from 0."""

    index: int
    name: str
    id: str = ""


class ArgumentsDelta(Struct, tag=True):
    """The next piece of a call's JSON arguments."""

    index: int
    text: str


Part = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


class Divergence(Struct):
    """The first difference between a request and the stored state, quoted from both sides."""

    message: int | None  # index in the request; None for a prompt without messages
    role: str | None
    stored: str  # the first words that differ, in the stored state
    sent: str  # the first words that differ, in the request


class Reason(StrEnum):
    """Why the turn did not reuse more of the stored state: a problem with the name, or a change."""

    FULL_MATCH = "full_match"
    NOT_CACHED = "not_cached"
    OPTED_OUT = "opted_out"  # the request asked for no reuse
    CACHE_KEY_NOT_FOUND = "cache_key_not_found"
    EXPIRED = "expired"
    MODEL_MISMATCH = "model_mismatch"  # the key belongs to another loaded model
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TURN_CHANGED = "turn_changed"
    PREFIX_CHANGED = "prefix_changed"  # a prompt without messages differs
    REQUEST_SHORTER = "request_shorter"  # the stored conversation has later turns
    EVICTED = "evicted"
    CORRUPT = "corrupt"  # stored state was damaged, so it is computed again
    FETCH_TIMEOUT = "fetch_timeout"  # a tier did not answer in time
    COMPUTED_CHEAPER = "computed_cheaper"  # computing is faster here than restoring
    EXACT_BOUNDARY = "exact_boundary"  # exact mode reuses only whole prefill chunks
    KV_BITS_CHANGED = "kv_bits_changed"  # the named state has another KV type
    CHECKPOINT_BOUNDARY = "checkpoint_boundary"  # this model resumes only at checkpoints


class CacheReport(Struct):
    """What a turn reused, and why not more."""

    status: Status
    reason: Reason
    reused_tokens: int  # prompt tokens that were not computed
    cached_tokens: int  # tokens of this turn whose state is now kept for later turns
    tier: str | None  # the slowest tier that held reused state
    cache_key: str | None = None  # as sent; else of the entry that another name stands for
    new_cache_key: str | None = None  # of this turn's own entry, if the request asks for it
    pin_refused: bool = False  # the request asks for a temporary pin, but there was no room for it
    diverged_at: Divergence | None = None
    normalised: list[str] = []  # normalisers that changed the prompt
    kv_bits: int | None = None  # of the KV type at the end of the turn
    kv_group_size: int | None = None  # values per scale; None: not quantised in groups


class Stages(Struct):
    """Seconds that each stage took until the first token, in the order of the stages."""

    front: float = 0.0  # HTTP, validation and the way into the runtime process
    encode: float = 0.0  # rendering the template and tokenising
    queue: float = 0.0  # waiting for admission
    plan: float = 0.0  # finding what can be reused
    restore: float = 0.0  # fetching state and restoring it into the engine
    compute: float = 0.0  # prefill and sampling the first token


class Started(Struct, tag=True):
    """The prompt is tokenised, the reused state is in the engine, and prefill begins."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    cache: CacheReport | None = None  # as far as it is known before prefill
    prompt: str | None = None  # its text with control tokens, if the request asks for it


class Prefill(Struct, tag=True):
    """Progress through the prompt. `done_tokens` includes reused tokens."""

    turn: int
    done_tokens: int
    prompt_tokens: int


class Delta(Struct, tag=True):
    turn: int
    part: Part


class Finished(Struct, tag=True):
    turn: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prompt_eval_s: float
    cache: CacheReport
    message_id: str | None = None  # of the reply, if the request asks for it
    stages: Stages | None = None
    first_token_at_s: float | None = None  # on the machine's monotonic clock
    reasoning_tokens: int = 0  # completion tokens that are reasoning
    completion_s: float = 0.0  # from the first token to the last
    stop_string: str | None = None  # the stop string that ended the reply


class Embedded(Struct, tag=True):
    """The vectors of a request, in the order of its inputs."""

    turn: int
    vectors: bytes  # little-endian f32, concatenated
    dimensions: int  # of each vector
    prompt_tokens: int
    reused_tokens: int  # prompt tokens that were not computed for this request


class Ranked(Struct, tag=True):
    """The scores of a request, from 0 to 1, in the order of its documents."""

    turn: int
    scores: list[float]
    prompt_tokens: int
    reused_tokens: int


class Failed(Struct, tag=True):
    turn: int
    error: ErrorInfo


class Cancelled(Struct, tag=True):
    turn: int


Event = Started | Prefill | Delta | Finished | Embedded | Ranked | Failed | Cancelled
TERMINAL = (Finished, Embedded, Ranked, Failed, Cancelled)


def new_call_id() -> str:
    """Return a random id of nine characters. Mistral's templates refuse any other length."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class ToolCall:
    """A function call with the arguments received so far."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)

    def as_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class AssistantMessage:
    """Accumulates the parts of one reply: in the runtime to store it, in the front to send it."""

    def __init__(self, *, keeps_logprobs: bool = True) -> None:
        self._keeps_logprobs = keeps_logprobs
        self.tool_calls: list[ToolCall] = []
        self.logprobs: list[TokenLogprob] = []
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, part: Part) -> None:
        match part:
            case TextDelta(text, logprobs):
                self._text.append(text)
                if self._keeps_logprobs:
                    self.logprobs += logprobs or []
            case ReasoningDelta(text):
                self._reasoning.append(text)
            case ToolCallStart(_, name, id):
                self.tool_calls.append(ToolCall(id, name))
            case ArgumentsDelta(index, text):
                self.tool_calls[index].pieces.append(text)

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning(self) -> str | None:
        return "".join(self._reasoning) if self._reasoning else None

    def as_dict(self) -> dict[str, Any]:
        """The message in OpenAI's format. Content is null if there are only tool calls."""
        content = self.text or (None if self.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
