"""Defines what all completions have in common: OpenAI's chat and text, and llama.cpp's own.

The fields are those of OpenAI, vLLM and llama.cpp. `build_request` turns them into a turn.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from rekindle.api.base.fields import (
    MAX_TOKENS,
    NO_LIMIT,
    WHOLE,
    CacheRetention,
    Id,
    KvBits,
    KvGroupSize,
    KvStart,
    Normalise,
    Priority,
    SessionNumber,
    Stop,
    StopTokens,
    StrictModel,
    TokenLimit,
    stop_list,
)
from rekindle.api.base.known_fields import KnownFields
from rekindle.api.base.request import RequestBuilder, or_default, retention
from rekindle.api.base.sampling import (
    BadWords,
    LogitBias,
    RepeatLastN,
    SamplingFields,
    SequenceBreakers,
)
from rekindle.api.base.structured import StructuredFields
from rekindle.api.base.tools import CustomTool
from rekindle.config import Config
from rekindle.errors import BadRequest
from rekindle.protocol.requests import Choice, GenerateRequest, Names

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

#: Aliases: the names that other servers have for fields of this one.
ALIASES = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "repeat_last_n": "repetition_context_size",
    "quantized_kv_start": "kv_quantization_start",
}

Progress = Literal["chunks", "comments", "llama.cpp"]
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
        None, description="vLLM: tokens that end the response, in addition to the model's own"
    )
    bad_words: BadWords | None = Field(
        None, description="vLLM: texts that the response must not contain"
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
    return_progress: bool | None = Field(
        None, description="llama.cpp: a stream reports prefill progress in `prompt_progress`"
    )
    timings_per_token: bool | None = Field(
        None, description="llama.cpp: reports of prefill progress have `timings`, too"
    )
    verbose: bool | None = Field(
        None, description="llama.cpp: `__verbose` shows the prompt and the settings"
    )
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
        None,
        description="Preferred group size. `x_cache.kv_group_size` reports the one that was used",
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
    def choices(self) -> int:
        """How many replies each prompt gets."""
        return self.n or 1

    @property
    def calls_functions(self) -> bool:
        """Whether a call is answered in OpenAI's older form, as `function_call`."""
        return False

    @property
    def custom_tools(self) -> dict[str, CustomTool]:
        """The tools whose calls are answered as free text, by name."""
        return {}

    @property
    def wants_message_id(self) -> bool:
        """Whether the reply gets an id, under which later requests find its state."""
        return False

    @property
    def message_ids(self) -> list[str]:
        """Ids of messages whose state may be reused, newest first."""
        return []

    @property
    def may_be_named(self) -> bool:
        """Whether the server may name the conversation by its content, if it is set to do so."""
        return False

    @property
    def progress(self) -> Progress | None:
        """How a stream reports prefill progress, if at all."""
        return "llama.cpp" if self.stream and self.return_progress else None


def build_request(
    body: CompletionsBase,
    builder: RequestBuilder,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt: dict[str, Any],
) -> GenerateRequest:
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise BadRequest(
            f"`min_tokens` is {body.min_tokens}, but the reply may have at most {max_tokens} "
            "tokens: raise `max_tokens` or send less.",
            param="min_tokens",
        )
    fields = {
        "progress": body.progress is not None,
        "returns_prompt": bool(body.verbose),
        **prompt,
    }
    return builder.build(
        **fields,
        sampling=body.sampling_params(builder.config, top_logprobs),
        max_tokens=max_tokens,
        stop=stop_list(body.stop),
        stop_token_ids=body.stop_token_ids or [],
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority or 0,
        normalise=body.normalise,
        ignore_eos=bool(body.ignore_eos),
        structured_output=body.structure,
        use_cache=body.use_kv_cache,
        names=_names(body, builder.config),
        more_choices=[_choice(body, builder.config, number) for number in range(1, body.choices)],
        exact=body.cache_exact,
        kv_bits=body.kv_bits,
        kv_group_size=body.kv_group_size,
        kv_quantization_start=body.kv_quantization_start,
    )


def _choice(body: CompletionsBase, config: Config, number: int) -> Choice:
    """A further choice. Seeds are consecutive, because with equal seeds all choices were equal."""
    names = Names(**_lifetime(body))
    seed = or_default(body.seed, config.seed)
    return Choice(
        seed=None if seed is None else seed + number,
        names=None if names == Names() else names,
    )


def _lifetime(body: CompletionsBase) -> dict[str, Any]:
    """The fields of `Names` that apply to every choice. All others name the first one's state."""
    return {"wants_message_id": body.wants_message_id, **retention(body.prompt_cache_retention)}


def _names(body: CompletionsBase, config: Config) -> Names:
    return Names(
        **_lifetime(body),
        cache_key=body.cache_key,
        return_cache_key=bool(body.return_cache_key),
        session_id=body.session_id,
        session_number=body.kv_cache_session_id,
        message_ids=body.message_ids,
        prompt_cache_key=body.prompt_cache_key,
        by_fingerprint=config.force_cache and body.may_be_named,
    )


def token_limit(requested: int | None, default: int | None) -> int | None:
    """None means: until the model stops or the context is full."""
    return None if requested == NO_LIMIT else or_default(requested, default)
