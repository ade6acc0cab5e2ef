"""Requests as OpenAI clients send them: known fields are checked, unknown ones ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rekindle.api.base.fields import (
    MOST_TOKENS,
    WHOLE,
    FreeObject,
    Id,
    KvBits,
    KvGroupSize,
    KvStart,
    LogitBias,
    Normalise,
    PrefillProgress,
    Priority,
    PromptInput,
    Seed,
    SessionNumber,
    Stop,
    TokenLimit,
    as_prompts,
)
from rekindle.api.base.messages import MOST_MESSAGES, Messages, Resize
from rekindle.api.base.tools import Tools
from rekindle.api.openai import constraints as tool_choice
from rekindle.api.openai.constraints import StructuredFields, ToolChoice
from rekindle.errors import BadRequest, Unsupported

MOST_CHOICES = 32
MOST_TURNS = 128

CACHE_FIELDS = (
    "use_kv_cache",
    "cache_exact",
    "cache_key",
    "return_cache_key",
    "session_id",
    "kv_cache_session_id",
    "prompt_cache_key",
    "prompt_cache_retention",
    "kv_bits",
)
NAMES = ("cache_key", "session_id", "kv_cache_session_id")  # of one conversation

# Fields of OpenAI's and other servers' APIs that are not served: refused, never ignored.
NOT_SERVED = {
    "functions": "OpenAI's older tool calling is not supported: send `tools` instead of",
    "function_call": "OpenAI's older tool calling is not supported: send `tool_choice` instead of",
    "audio": "audio is not supported: remove",
    "suffix": "filling in the middle is not supported: remove",
    "best_of": "best_of is not supported: remove",
    "chat_template": "a template of your own is not taken, the model has one: remove",
    "grammar_lazy": "a grammar that waits for a trigger is not supported: remove",
    "grammar_triggers": "a grammar that waits for a trigger is not supported: remove",
    "guided_whitespace_pattern": "white space of your own in JSON is not supported: remove",
}
NOT_FOR_TEXTS = {
    "resize": "text completions take no pictures: use /v1/chat/completions, or remove",
    "tools": "text completions call no tools: use /v1/chat/completions, or remove",
    "tool_choice": "text completions call no tools: use /v1/chat/completions, or remove",
}
# Values of such fields that request nothing.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "best_of": (1,),
    "grammar_lazy": (False,),
    "grammar_triggers": ([],),
}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class RequestBase(StructuredFields):
    """What chat and text completions have in common. None means: as the server is configured."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())
    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED

    model: str | None = None
    max_tokens: TokenLimit | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int, Field(ge=-1, le=MOST_TOKENS), WHOLE] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    repetition_context_size: Annotated[int, Field(ge=0, le=MOST_TOKENS), WHOLE] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    normalise: Normalise | None = Field(
        None, description="Whether volatile parts are taken out, or which"
    )
    user: str | None = None
    use_kv_cache: bool | None = None
    cache_exact: bool | None = None
    cache_key: Id | None = None
    return_cache_key: bool | None = None
    session_id: Id | None = None
    kv_cache_session_id: SessionNumber | None = None
    prompt_cache_key: Id | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    kv_bits: KvBits | None = Field(None, description="Of the KV cells beyond the start")
    kv_group_size: KvGroupSize | None = Field(
        None, description="Where the engine has a choice; `x_cache.kv_group_size` says which it is"
    )
    kv_quantization_start: KvStart | None = Field(
        None, description="Tokens after which KV cells are quantised"
    )
    quantized_kv_start: KvStart | None = Field(None, description="The same")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name, instead in cls.not_served.items():
                value = data.get(name)
                if value is not None and value not in HARMLESS.get(name, ()):
                    raise Unsupported(f"{instead} `{name}`", param=name)
        return data

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        starts = {self.kv_quantization_start, self.quantized_kv_start} - {None}
        if len(starts) > 1:
            raise BadRequest(
                "`quantized_kv_start` is another name of `kv_quantization_start`: send one of "
                "them.",
                param="quantized_kv_start",
            )
        return self

    @property
    def kv_start(self) -> int | None:
        """The start of quantisation, by either name."""
        start = self.kv_quantization_start
        return self.quantized_kv_start if start is None else start

    @property
    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_cache(self) -> bool:
        """Whether a stream ends with a cache report: clients that name no state get none."""
        return any(getattr(self, field) is not None for field in CACHE_FIELDS)

    @property
    def progress(self) -> Literal["chunks", "comments"] | None:
        """How a stream reports prefill progress, if at all."""
        return None

    @property
    def names_state(self) -> bool:
        """Whether the request names the state it continues from."""
        return any(getattr(self, field) is not None for field in NAMES)


class ChatRequest(RequestBase):
    """POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    chat_template_kwargs: FreeObject | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message"
    )
    continue_final_message: bool | None = Field(
        None, description="The reply goes on from the last message, which is the assistant's"
    )
    prefill_progress: PrefillProgress | None = None
    resize: Resize | None = Field(None, description="The size that every picture gets")
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise Unsupported("`top_logprobs` needs `logprobs: true`", param="top_logprobs")
        return self

    @model_validator(mode="after")
    def _final_message_can_be_continued(self) -> ChatRequest:
        if not self.continue_final_message:
            return self
        if self.add_generation_prompt:
            raise BadRequest(
                "`continue_final_message` and `add_generation_prompt` cannot both be true: a reply "
                "goes on or begins.",
                param="continue_final_message",
            )
        if not self.ends_with_reply:
            raise BadRequest(
                "`continue_final_message` needs a last message of the assistant that has text and "
                "calls no tools.",
                param="continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _tool_choice_and_format_agree(self) -> ChatRequest:
        tool_choice.check(self.tool_choice, self.tools)
        structure = self.structure
        if structure and tool_choice.forces_call(self.tool_choice):
            raise BadRequest(
                f"`{structure.param}` says what the text has to be, and `tool_choice` asks for a "
                "call and no text: leave one of them out.",
                param=structure.param,
            )
        return self

    @property
    def progress(self) -> Literal["chunks", "comments"] | None:
        if not (self.stream and self.prefill_progress):
            return None
        return "comments" if self.prefill_progress == "comments" else "chunks"

    @property
    def ends_with_reply(self) -> bool:
        """Whether the last message is a text of the assistant, which can be continued."""
        last = self.messages[-1]
        return last.role == "assistant" and last.content is not None and not last.tool_calls

    @property
    def message_ids(self) -> list[str]:
        """The ids by which state is looked for, newest first; none without `use_kv_cache`."""
        if not self.use_kv_cache:
            return []
        ids = (message.message_id for message in reversed(self.messages))
        return [message_id for message_id in ids if message_id is not None]

    @property
    def names_state(self) -> bool:
        return super().names_state or bool(self.message_ids)


class CompletionRequest(RequestBase):
    """POST /v1/completions."""

    not_served: ClassVar[Mapping[str, str]] = {**NOT_SERVED, **NOT_FOR_TEXTS}

    prompt: PromptInput
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    @field_validator("prompt")
    @classmethod
    def _some_prompts(cls, value: Any) -> Any:
        if value == [] or (isinstance(value, list) and [] in value):
            raise ValueError("takes at least one prompt, and of tokens at least one in each")
        return value

    @model_validator(mode="after")
    def _bounded_turns(self) -> CompletionRequest:
        if len(self.prompts) * (self.n or 1) > MOST_TURNS:
            raise Unsupported(
                f"one request may ask for at most {MOST_TURNS} answers (prompts times `n`)",
                param="prompt",
            )
        return self

    @model_validator(mode="after")
    def _one_prompt_for_a_name(self) -> CompletionRequest:
        if len(self.prompts) > 1:
            for field in (*NAMES, "return_cache_key"):
                value = getattr(self, field)
                if value is not None and value is not False:  # session 0 is a name
                    raise Unsupported(
                        f"a name goes with one prompt: send one, or remove `{field}`", param=field
                    )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)
