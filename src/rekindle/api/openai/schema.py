"""Validates OpenAI's chat and text completion requests. Unknown fields are dropped."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rekindle.api.base.fields import (
    MAX_ITEMS,
    MAX_TOKENS,
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
    StopTokens,
    StrictModel,
    TokenLimit,
    as_prompts,
)
from rekindle.api.base.known_fields import FieldTable, KnownFields
from rekindle.api.base.messages import Messages, Resize
from rekindle.api.base.sampling import (
    BadWords,
    LogitBias,
    RepeatLastN,
    SamplingFields,
    SequenceBreakers,
)
from rekindle.api.base.tools import Tools, ToolSelection
from rekindle.api.openai.constraints import StructuredFields, ToolChoice, select_tools
from rekindle.api.openai.known_fields import CHAT_FIELDS, COMPLETION_FIELDS
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

#: Names that other servers have for fields of this one.
ALIASES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "quantized_kv_start": "kv_quantization_start",
}

TopLogprobs = Annotated[int, Field(ge=0, le=20), WHOLE]


class StreamOptions(StrictModel):
    include_usage: bool = False


class CompletionsBase(KnownFields, StrictModel, StructuredFields, SamplingFields):
    """What chat and text completions have in common. None stands for the server's default."""

    model: str | None = None
    max_tokens: TokenLimit | None = None
    n_predict: TokenLimit | None = Field(None, description="llama.cpp: alias of `max_tokens`")
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="vLLM: least number of tokens to generate"
    )
    stop: Stop | None = None
    stop_token_ids: StopTokens | None = Field(
        None, description="vLLM: tokens that end the reply, besides the model's own"
    )
    bad_words: BadWords | None = Field(
        None, description="vLLM: texts that the reply must not contain"
    )
    truncate_prompt_tokens: TokenLimit | None = Field(
        None, description="vLLM: use only the last tokens of the prompt; -1 for as many as fit"
    )
    dry_multiplier: float | None = Field(
        None, ge=0, le=100, description="llama.cpp: strength of the DRY penalty; 0 is off"
    )
    dry_base: float | None = Field(None, ge=1, le=100)
    dry_allowed_length: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS), WHOLE] | None = None
    dry_sequence_breakers: SequenceBreakers | None = None
    repeat_penalty: float | None = Field(
        None, gt=0, le=100, description="llama.cpp: alias of `repetition_penalty`"
    )
    repeat_last_n: RepeatLastN | None = Field(
        None, description="llama.cpp: alias of `repetition_context_size`"
    )
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

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        """Give each value to the field that its alias stands for."""
        for alias, name in ALIASES.items():
            value, own = getattr(self, alias), getattr(self, name)
            if value is None:
                continue
            if own not in (None, value):
                raise BadRequest(
                    f"`{alias}` is an alias of `{name}`: send one of them.", param=alias
                )
            setattr(self, name, value)
        return self

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


class ChatRequest(CompletionsBase):
    """POST /v1/chat/completions."""

    field_table: ClassVar[FieldTable] = CHAT_FIELDS

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
        if self.continue_final_message and self.add_generation_prompt:
            raise BadRequest(
                "`continue_final_message` and `add_generation_prompt` cannot both be true.",
                param="continue_final_message",
            )
        if self.continue_final_message and not self.ends_with_reply:
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
        """Whether the request names the conversation that it continues."""
        return bool(self.message_ids) or any(getattr(self, name) is not None for name in NAMES)


class CompletionRequest(CompletionsBase):
    """POST /v1/completions."""

    field_table: ClassVar[FieldTable] = COMPLETION_FIELDS

    prompt: PromptInput
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
