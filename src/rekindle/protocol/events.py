"""What a turn reports, from arrival to exactly one terminal event, and the parts of its reply."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from msgspec import Struct

from rekindle.protocol.embeddings import Embedded, Ranked

# ----------------------------------------------------------------------
# An error on its way from a runtime to the front.


class ErrorInfo(Struct, kw_only=True):
    """The fields of OpenAI's error object, and the HTTP status."""

    status: int
    kind: str
    code: str | None
    message: str
    param: str | None = None
    tokens: int | None = None  # of a prompt that is too long, at least
    limit: int | None = None  # that it exceeds


FinishReason = Literal["stop", "length", "tool_calls"]

# -- the parts of a reply, the same from the parser to the wire ----------------------------------


class TokenLogprob(Struct, array_like=True):
    """One sampled token with its log probability and the best alternatives."""

    piece: bytes
    logprob: float
    top: list[tuple[bytes, float]]


class TextDelta(Struct, tag=True):
    """Text for the user that is final: whole characters, no part of a stop string."""

    text: str
    logprobs: list[TokenLogprob] | None = None


class ReasoningDelta(Struct, tag=True):
    """Text that the model wrote for itself."""

    text: str


class ToolCallStart(Struct, tag=True):
    """The model calls a function; the arguments follow. `index` counts the reply's calls from 0."""

    index: int
    name: str
    id: str = ""


class ArgumentsDelta(Struct, tag=True):
    """The next piece of a call's arguments, which are JSON."""

    index: int
    text: str


Part = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta

# -- what was reused -----------------------------------------------------------------------------


class Divergence(Struct):
    """Where a request differs from the state it was compared with, in words of both sides."""

    message: int | None  # of the request; None where messages cannot be told apart
    role: str | None
    stored: str  # the first words that differ, as the stored state has them
    sent: str  # and as the request has them


Status = Literal["hit", "partial_hit", "miss"]


class Reason(StrEnum):
    """Why as much was reused as was, and not more."""

    FULL_MATCH = "full_match"
    NOT_CACHED = "not_cached"
    OPTED_OUT = "opted_out"  # the request asked for no reuse
    CACHE_KEY_NOT_FOUND = "cache_key_not_found"
    EXPIRED = "expired"
    MODEL_MISMATCH = "model_mismatch"  # the key is another loaded model's
    SYSTEM_CHANGED = "system_changed"
    TOOLS_CHANGED = "tools_changed"
    TURN_CHANGED = "turn_changed"
    PREFIX_CHANGED = "prefix_changed"  # of a prompt without messages
    REQUEST_SHORTER = "request_shorter"  # than the entry it names
    EVICTED = "evicted"
    CORRUPT = "corrupt"  # stored state was damaged and is computed again
    FETCH_TIMEOUT = "fetch_timeout"  # a tier did not answer in time: its state is computed again
    COMPUTED_CHEAPER = "computed_cheaper"  # computing takes less time here than restoring
    EXACT_BOUNDARY = "exact_boundary"  # exact mode reuses whole canonical steps only
    KV_BITS_CHANGED = "kv_bits_changed"  # the state that was named has cells of another precision
    CHECKPOINT_BOUNDARY = "checkpoint_boundary"  # this model resumes at checkpoints only


class CacheReport(Struct):
    """What was really reused, and why not more. `reused_tokens` were not computed."""

    status: Status
    reason: Reason
    reused_tokens: int
    cached_tokens: int  # tokens of this turn that are now kept for a later one
    tier: str | None  # the slowest tier that the reused state came from
    cache_key: str | None = None  # of the entry that a name in the request stands for
    new_cache_key: str | None = None  # of this turn's own entry, when it was asked for
    diverged_at: Divergence | None = None
    normalised: list[str] = []  # what was changed in the request so that more of it matched
    kv_bits: int | None = None  # of the cells that its state has in the end
    kv_group_size: int | None = None  # of those, how many share a scale; None: none do


class Stages(Struct):
    """Seconds of each stage of a turn up to its first token, in the order they happen."""

    front: float = 0.0  # HTTP and validation, into the runtime process
    encode: float = 0.0  # rendering and tokenising
    queue: float = 0.0  # waiting for a place among the running turns
    plan: float = 0.0  # finding what can be reused
    restore: float = 0.0  # fetching state and putting it in place
    compute: float = 0.0  # prefill, and sampling the first token


# -- events --------------------------------------------------------------------------------------


class Started(Struct, tag=True):
    """The prompt is tokenised and what can be reused is in place; computing begins."""

    turn: int
    prompt_tokens: int
    reused_tokens: int
    cache: CacheReport | None = None  # as far as it is known by now


class Prefill(Struct, tag=True):
    """Progress through the prompt, reused tokens included."""

    turn: int
    done_tokens: int
    prompt_tokens: int


class Delta(Struct, tag=True):
    """The next part of the reply."""

    turn: int
    part: Part


class Finished(Struct, tag=True):
    turn: int
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    prompt_eval_s: float
    cache: CacheReport
    message_id: str | None = None  # by which the reply can be named later, when asked for
    stages: Stages | None = None
    first_token_at_s: float | None = None  # on the machine's monotonic clock
    reasoning_tokens: int = 0  # of the completion's, those the model wrote for itself
    completion_s: float = 0.0  # from the first token to the last
    stop_string: str | None = None  # that ended it


class Failed(Struct, tag=True):
    turn: int
    error: ErrorInfo


class Cancelled(Struct, tag=True):
    turn: int


Event = Started | Prefill | Delta | Finished | Embedded | Ranked | Failed | Cancelled
TERMINAL = (Finished, Embedded, Ranked, Failed, Cancelled)


# ----------------------------------------------------------------------
# A reply, accumulated from its parts.

_ID_CHARACTERS = string.ascii_letters + string.digits
_ID_LENGTH = 9  # Mistral's templates refuse any other length


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass(slots=True)
class ToolCall:
    """A function that the model calls, with its arguments as far as they have come."""

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
    """Accumulates the parts of one reply: in the runtime to store it, in the front to answer."""

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
        """None when the model wrote none."""
        return "".join(self._reasoning) if self._reasoning else None

    def as_dict(self) -> dict[str, Any]:
        """The message in OpenAI's form; a message of calls alone has no content."""
        content = self.text or (None if self.tool_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message
