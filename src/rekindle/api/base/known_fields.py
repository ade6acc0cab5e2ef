"""Sorts request fields of known APIs that this server does not act on.

Each dialect has one table. A field that would change the answer is refused. A field that clients
send without needing it is ignored, and the response header `x-ignored-fields` names it. Fields that
no API has are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ModelWrapValidatorHandler, PrivateAttr, model_validator

from rekindle.errors import Unsupported

IGNORED_FIELDS_HEADER = "x-ignored-fields"


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer."""

    instead: str  # what to do; the name of the field completes the sentence
    neutral: tuple[Any, ...] = ()  # values that change nothing, in addition to null
    switch: str | None = None  # if this other field is sent as 0, every value changes nothing


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that changes nothing in the answer, or that clients do not rely on."""

    why: str
    neutral: tuple[Any, ...] = ()  # values that ask for what the server does anyway


#: By name. `a.b` is the field `b` of the object `a`.
FieldTable = Mapping[str, Refused | Ignored]


class KnownFields(BaseModel):
    """A request whose dialect has a table of fields. Raises Unsupported for a refused one."""

    field_table: ClassVar[FieldTable] = {}
    _ignored_fields: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _sort_fields(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):  # an instance that is validated already, or a wrong body
            return handler(data)
        ignored = sort_fields(cls.field_table, data)
        request = handler(data)
        request._ignored_fields = ignored
        return request

    @property
    def ignored_fields(self) -> list[str]:
        """Names of the fields that the client sent and the server ignores."""
        return self._ignored_fields


def sort_fields(table: FieldTable, data: Mapping[str, Any]) -> list[str]:
    """Return the names of ignored fields; raises Unsupported for a refused one."""
    ignored = []
    for name, entry in table.items():
        value = _value(data, name)
        if value is None or value in entry.neutral:
            continue
        if isinstance(entry, Ignored):
            ignored.append(name)
        elif entry.switch is None or _value(data, entry.switch) != 0:
            raise Unsupported(f"{entry.instead} `{name}`", param=name)
    return ignored


def _value(data: Mapping[str, Any], name: str) -> Any:
    if name in data:
        return data[name]
    outer, _, inner = name.partition(".")
    inside = data.get(outer) if inner else None
    return inside.get(inner) if isinstance(inside, dict) else None


TRIGGER = "a grammar that waits for a trigger is not supported: remove"
MIROSTAT = "Mirostat is not supported: use `min_p` or `typical_p` instead of"
TOKEN_IDS = "token ids are not returned: use /v1/tokenize and remove"
ONE_QUEUE = "the server schedules requests itself"

#: Fields that llama.cpp adds to the completions of every dialect.
LLAMA_SERVER: FieldTable = {
    "mirostat": Refused(MIROSTAT, (0,)),
    "mirostat_tau": Refused(MIROSTAT, (0,), switch="mirostat"),
    "mirostat_eta": Refused(MIROSTAT, (0,), switch="mirostat"),
    "samplers": Refused("samplers have a fixed order: remove"),
    "dynatemp_range": Refused("dynamic temperature is not supported: remove", (0,)),
    "xtc_probability": Refused("XTC is not supported: use `typical_p` instead of", (0,)),
    "top_n_sigma": Refused("top-n-sigma is not supported: use `min_p` instead of", (-1, 0)),
    "adaptive_target": Refused("adaptive-p is not supported: remove", (-1,)),
    "min_keep": Refused("filters keep at least one token: remove", (0, 1)),
    "n_indent": Refused("a minimum indentation is not supported: use `grammar` instead of", (0,)),
    "n_probs": Refused("use `logprobs` and `top_logprobs` instead of", (0,)),
    "n_cmpl": Refused("use `n` instead of", (1,)),
    "post_sampling_probs": Refused("log probabilities are the model's own: remove", (False,)),
    "return_tokens": Refused(TOKEN_IDS, (False,)),
    "response_fields": Refused("responses have all their fields: remove", ([],)),
    "t_max_predict_ms": Refused("replies have no time limit: use `max_tokens` instead of", (-1, 0)),
    "t_max_prompt_ms": Refused("prompts have no time limit: remove", (-1, 0)),
    "lora": Refused("adapters are models of their own: choose one by `model` and remove", ([],)),
    "image_data": Refused("send images in `messages` instead of", ([],)),
    "grammar_lazy": Refused(TRIGGER, (False,)),
    "grammar_triggers": Refused(TRIGGER, ([],)),
    "cache_prompt": Ignored("`use_kv_cache: false` turns reuse off", (True,)),
    "id_slot": Ignored(ONE_QUEUE, (-1,)),
    "n_keep": Ignored("a context is never shifted", (0,)),
    "n_discard": Ignored("a context is never shifted", (0,)),
    "n_cache_reuse": Ignored("equal prefixes are always reused", (0,)),
    "dynatemp_exponent": Ignored("it belongs to `dynatemp_range`", (1,)),
    "xtc_threshold": Ignored("it belongs to `xtc_probability`"),
    "adaptive_decay": Ignored("it belongs to `adaptive_target`"),
    "preserved_tokens": Ignored("the model's template decides them", ([],)),
    "backend_sampling": Ignored("it does not change a reply", (False,)),
    **{
        f"speculative.{name}": Ignored("speculation does not change a reply")
        for name in (
            "type",
            "n_min",
            "n_max",
            "p_min",
            "ngram_size_n",
            "ngram_size_m",
            "ngram_m_hits",
        )
    },
}
#: Fields that vLLM adds.
VLLM: FieldTable = {
    "prompt_logprobs": Refused("log probabilities of the prompt are not computed: remove"),
    "prompt_embeds": Refused("prompts are texts or token ids: remove"),
    "allowed_token_ids": Refused("use `guided_regex` or `grammar` instead of", ([],)),
    "logprob_token_ids": Refused("use `top_logprobs` instead of", ([],)),
    "use_beam_search": Refused("beam search is not supported: remove", (False,)),
    "length_penalty": Refused("beam search is not supported: remove", (1,)),
    "include_stop_str_in_output": Refused("a reply ends before its stop string: remove", (False,)),
    "skip_special_tokens": Refused("control tokens are never shown: remove", (True,)),
    "logits_processors": Refused("logits processors are not supported: remove", ([],)),
    "return_tokens_as_token_ids": Refused(TOKEN_IDS, (False,)),
    "return_token_ids": Refused(TOKEN_IDS, (False,)),
    "return_token_offsets": Refused(TOKEN_IDS, (False,)),
    "return_prompt_text": Refused("use /v1/apply-template and remove", (False,)),
    "truncation_side": Refused("prompts are truncated at their beginning: remove", ("left",)),
    "thinking_token_budget": Refused("reasoning has no limit of its own: remove"),
    "repetition_detection": Refused("use `dry_multiplier` instead of"),
    "watermarking": Refused("replies have no watermarks: remove", (False,)),
    "mm_processor_kwargs": Refused("images have one preprocessing; use `resize` or remove", ({},)),
    "media_io_kwargs": Refused("videos have one preprocessing: remove", ({},)),
    "vllm_xargs": Refused("extra arguments are not supported: remove", ({},)),
    "cache_salt": Refused("each API key has a cache of its own: use another key and remove"),
    "guided_whitespace_pattern": Refused("a whitespace pattern for JSON is not supported: remove"),
    "guided_decoding_backend": Ignored("there is one backend"),
    "spaces_between_special_tokens": Ignored("control tokens are never shown", (True,)),
    "stream_options.continuous_usage_stats": Ignored("usage comes at the end", (False,)),
    "request_id": Ignored("the header X-Request-Id names a request"),
    "kv_transfer_params": Ignored("state does not move between servers"),
    "ec_transfer_params": Ignored("state does not move between servers"),
    "data_parallel_rank": Ignored(ONE_QUEUE),
    "stream_interval": Ignored("tokens are sent as they come"),
}

NOT_HERE = "only chat and text completions take this field: use them, or remove"
TEXT_ONLY = "answers are only text: remove"

#: Fields that completions take, and that a dialect without its own form of them refuses.
COMPLETIONS_ONLY: FieldTable = {
    "min_tokens": Refused(NOT_HERE, (0,)),
    "stop_token_ids": Refused(NOT_HERE, ([],)),
    "bad_words": Refused(NOT_HERE, ([],)),
    "logit_bias": Refused(NOT_HERE, ({},)),
    "ignore_eos": Refused(NOT_HERE, (False,)),
    "truncate_prompt_tokens": Refused(NOT_HERE),
    "dry_multiplier": Refused(NOT_HERE, (0,)),
    "n": Refused(NOT_HERE, (1,)),
    "kv_bits": Refused(NOT_HERE),
    "repeat_penalty": Refused("use `repetition_penalty` instead of", (1,)),
    "functions": Refused("use `tools` instead of", ([],)),
    "function_call": Refused("use `tool_choice` instead of", ("none", "auto")),
    "modalities": Refused(TEXT_ONLY, (["text"], [])),
    "audio": Refused(TEXT_ONLY),
    "web_search_options": Refused("there is no web search: remove"),
    "prediction": Ignored("it makes a reply faster and does not change it"),
}


def output_form(instead: str) -> FieldTable:
    """The fields by which completions say what a reply has to be. The dialect has its own one."""
    names = (
        *("response_format", "structured_outputs", "json_schema", "grammar"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    )
    return {name: Refused(f"use `{instead}` instead of") for name in names}
