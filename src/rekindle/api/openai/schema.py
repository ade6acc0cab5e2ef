"""Validates OpenAI's chat and text completion requests. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rekindle.api.base.fields import (
    MAX_ITEMS,
    WHOLE,
    CacheRetention,
    FreeObject,
    Id,
    KvBits,
    KvGroupSize,
    KvStart,
    Normalise,
    PrefillProgress,
    Priority,
    PromptInput,
    SessionNumber,
    Stop,
    StrictModel,
    TokenLimit,
    as_prompts,
)
from rekindle.api.base.messages import Messages, Resize
from rekindle.api.base.sampling import LogitBias, SamplingFields
from rekindle.api.base.tools import Tools, ToolSelection
from rekindle.api.openai.constraints import StructuredFields, ToolChoice, select_tools
from rekindle.errors import BadRequest, Unsupported

#: A stream ends with a cache report if the request has one of these fields.
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
NAMES = ("cache_key", "session_id", "kv_cache_session_id")  # each names one conversation

# Fields of OpenAI's and other servers' APIs that would change the answer. They are refused.
NOT_SERVED = {
    "functions": "OpenAI's older tool calling is not supported: send `tools` instead of",
    "function_call": "OpenAI's older tool calling is not supported: send `tool_choice` instead of",
    "audio": "audio is not supported: remove",
    "suffix": "filling in the middle is not supported: remove",
    "best_of": "best_of is not supported: remove",
    "chat_template": "the model's own chat template is always used: remove",
    "grammar_lazy": "a grammar that waits for a trigger is not supported: remove",
    "grammar_triggers": "a grammar that waits for a trigger is not supported: remove",
    "guided_whitespace_pattern": "a whitespace pattern for JSON is not supported: remove",
}
NOT_FOR_TEXTS = {
    "resize": "text completions take no images: use /v1/chat/completions, or remove",
    "tools": "text completions call no tools: use /v1/chat/completions, or remove",
    "tool_choice": "text completions call no tools: use /v1/chat/completions, or remove",
}
# Values of these fields that change nothing. They are accepted.
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

TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]


class StreamOptions(StrictModel):
    include_usage: bool = False


class CompletionsBase(StrictModel, StructuredFields, SamplingFields):
    """What chat and text completions have in common. None stands for the server's default."""

    not_served: ClassVar[Mapping[str, str]] = NOT_SERVED

    model: str | None = None
    max_tokens: TokenLimit | None = None
    stop: Stop | None = None
    n: Annotated[int, Field(ge=1, le=32), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    priority: Priority | None = None
    normalise: Normalise | None = Field(
        None, description="Whether to remove volatile parts of the prompt, or which ones"
    )
    user: str | None = None
    use_kv_cache: bool | None = None
    cache_exact: bool | None = None
    cache_key: Id | None = None
    return_cache_key: bool | None = None
    session_id: Id | None = None
    kv_cache_session_id: SessionNumber | None = None
    prompt_cache_key: Id | None = None
    prompt_cache_retention: CacheRetention | None = None
    kv_bits: KvBits | None = Field(None, description="Bits of a quantised KV cell")
    kv_group_size: KvGroupSize | None = Field(
        None, description="A wish: `x_cache.kv_group_size` reports the size that the engine used"
    )
    kv_quantization_start: KvStart | None = Field(
        None, description="Number of tokens after which KV cells are quantised"
    )
    quantized_kv_start: KvStart | None = Field(None, description="Alias of `kv_quantization_start`")

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
                "`quantized_kv_start` is an alias of `kv_quantization_start`: send one of them.",
                param="quantized_kv_start",
            )
        return self

    @property
    def kv_start(self) -> int | None:
        start = self.kv_quantization_start
        return self.quantized_kv_start if start is None else start

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def reports_cache(self) -> bool:
        return any(getattr(self, field) is not None for field in CACHE_FIELDS)

    @property
    def progress(self) -> Literal["chunks", "comments"] | None:
        """How a stream reports prefill progress, if at all."""
        return None

    @property
    def names_state(self) -> bool:
        """Whether the request names the conversation that it continues."""
        return any(getattr(self, field) is not None for field in NAMES)


class ChatRequest(CompletionsBase):
    """POST /v1/chat/completions."""

    messages: Messages = Field(min_length=1, max_length=MAX_ITEMS)
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: FreeObject | None = None
    reasoning_effort: str | None = Field(None, max_length=32)
    add_generation_prompt: bool | None = Field(
        None, description="False: the prompt ends with the last message"
    )
    continue_final_message: bool | None = Field(
        None, description="The reply continues the last message, which must be the assistant's"
    )
    prefill_progress: PrefillProgress | None = None
    resize: Resize | None = Field(None, description="The size that every image is scaled to")
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
                "`continue_final_message` and `add_generation_prompt` cannot both be true.",
                param="continue_final_message",
            )
        if not self.ends_with_reply:
            raise BadRequest(
                "`continue_final_message` needs a last message of the assistant that has text and "
                "no tool calls.",
                param="continue_final_message",
            )
        return self

    @model_validator(mode="after")
    def _tool_choice_and_format_agree(self) -> ChatRequest:
        structure = self.structure
        self.selection.check_format(structure, structure.param if structure else "")
        return self

    @property
    def selection(self) -> ToolSelection:
        """Raises BadRequest if `tool_choice` names a function that is not in `tools`."""
        return select_tools(self.tool_choice, self.tools)

    @property
    def progress(self) -> Literal["chunks", "comments"] | None:
        if not (self.stream and self.prefill_progress):
            return None
        return "comments" if self.prefill_progress == "comments" else "chunks"

    @property
    def ends_with_reply(self) -> bool:
        """Whether the last message is a text of the assistant, which a reply can continue."""
        last = self.messages[-1]
        return last.role == "assistant" and last.content is not None and not last.tool_calls

    @property
    def message_ids(self) -> list[str]:
        """Ids of messages whose state may be reused, newest first. Empty without `use_kv_cache`."""
        if not self.use_kv_cache:
            return []
        ids = (message.message_id for message in reversed(self.messages))
        return [message_id for message_id in ids if message_id is not None]

    @property
    def names_state(self) -> bool:
        return super().names_state or bool(self.message_ids)


class CompletionRequest(CompletionsBase):
    """POST /v1/completions."""

    not_served: ClassVar[Mapping[str, str]] = {**NOT_SERVED, **NOT_FOR_TEXTS}

    prompt: PromptInput
    echo: bool | None = None
    logprobs: TopLogprobs | None = None

    @model_validator(mode="after")
    def _bounded_turns(self) -> CompletionRequest:
        if len(self.prompts) * (self.n or 1) > 128:
            raise Unsupported(
                "one request may ask for at most 128 answers (prompts times `n`)",
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
                        f"a name belongs to one prompt: send one, or remove `{field}`", param=field
                    )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        return as_prompts(self.prompt)
