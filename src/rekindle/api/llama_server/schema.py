"""Validates the requests of llama.cpp's own endpoints. Unknown fields are dropped."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rekindle.api.base.completions import CompletionsBase
from rekindle.api.base.fields import (
    MAX_CHARACTERS,
    MAX_INPUTS,
    MAX_TOKENS,
    NO_LIMIT,
    WHOLE,
    StrictModel,
    Text,
    as_prompts,
    at_most,
    explain_items,
    takes,
)
from rekindle.api.base.known_fields import LLAMA_SERVER, FieldTable, Ignored, Refused
from rekindle.api.base.sampling import MAX_BIASES, Seed
from rekindle.config import Config
from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import ExtraFile, SamplingParams

MAX_TURNS = 128  # of one request: prompts times choices
MAX_EXTRA = 1_000  # files in `input_extra`
PROMPT = (
    "a string, a list of token ids and strings, an object with `prompt_string`, or a list of these"
)
SERVED = (
    *("n_probs", "n_cmpl", "return_tokens", "response_fields", "t_max_predict_ms"),
    "cache_prompt",
)
#: The table of /completion. Editors send some fields here that other dialects refuse or serve.
NATIVE_FIELDS: FieldTable = {
    **{name: entry for name, entry in LLAMA_SERVER.items() if name not in SERVED},
    "samplers": Ignored("samplers have a fixed order"),
    "n_indent": Ignored("a reply may indent less than the line before it", (0,)),
    "t_max_prompt_ms": Ignored("prompts have no time limit", (-1, 0)),
    "sse_ping_interval": Ignored("prompts of every length are answered without pings", (-1,)),
    "chat_format": Refused("text completions have no chat format: remove"),
}


class PromptObject(StrictModel):
    prompt_string: str
    multimodal_data: Any = None  # refused, whatever it is


Mixed = Annotated[list[int | str], Field(fail_fast=True)]
PromptItem = str | Mixed | PromptObject


def _limit_characters(prompt: Any) -> Any:
    """Refuse texts that are longer than any prompt can be, before they are validated."""
    found = sum(map(len, _texts(prompt)))
    if found > MAX_CHARACTERS:
        raise ValueError(f"may have at most {MAX_CHARACTERS} characters of text, not {found}")
    return prompt


def _texts(prompt: Any) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, dict):
        yield from _texts(prompt.get("prompt_string"))
    elif isinstance(prompt, list):
        for each in prompt:
            yield from _texts(each)


NativePrompt = Annotated[
    PromptItem | Annotated[list[PromptItem], Field(fail_fast=True)],
    takes(PROMPT),
    BeforeValidator(_limit_characters),
]


def _plain(item: PromptItem) -> str | list[int | str]:
    if isinstance(item, PromptObject):
        if item.multimodal_data:
            raise Unsupported(
                "text completions take no images: send them in `messages` to "
                "/v1/chat/completions, or remove `multimodal_data`",
                param="prompt",
            )
        return item.prompt_string
    if item == []:
        raise BadRequest(f"`prompt` takes {PROMPT}, and at least one token.", param="prompt")
    return item


def _biases(value: Any) -> dict[str | int, float]:
    """Read pairs of a token or a text and its bias, or an object. False forbids the token."""
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or len(pairs) > MAX_BIASES:
        raise ValueError(
            f"takes an object, or a list of at most {MAX_BIASES} pairs of a token and a bias"
        )
    found: dict[str | int, float] = {}
    for pair in pairs:
        match pair:
            case [int() | str() as token, False]:
                bias = float("-inf")
            case [int() | str() as token, int() | float() as bias] if -100 <= bias <= 100:
                pass
            case _:
                raise ValueError(
                    "takes pairs of a token id or a text and a bias from -100 to 100, or false"
                )
        is_id = isinstance(token, str) and token.isascii() and token.isdecimal()
        found[int(token) if is_id and len(str(token)) <= 10 else token] = float(bias)
    return found


def _sampled(seed: int) -> int:
    return secrets.randbits(62) if seed == -1 else seed


NPredict = Annotated[
    int,
    Field(ge=-2, le=MAX_TOKENS),
    AfterValidator(lambda limit: max(limit, NO_LIMIT)),
    WHOLE,
]


class NativeRequest(CompletionsBase):
    """What /completion and /infill have in common. None stands for the server's default."""

    field_table: ClassVar[FieldTable] = NATIVE_FIELDS

    # 0 computes the prompt and generates nothing; -1 and -2 mean no limit.
    n_predict: NPredict | None = None
    seed: Annotated[Seed, AfterValidator(_sampled)] | None = Field(None, description="-1: random")
    # The bounds of each item are in `_biases`.
    logit_bias: Annotated[Any, AfterValidator(_biases)] = None
    n_probs: Annotated[int, Field(ge=0, le=100), WHOLE] | None = None
    n_cmpl: Annotated[int, Field(ge=1, le=32), WHOLE] | None = Field(
        None, description="Alias of `n`"
    )
    return_tokens: bool | None = None
    cache_prompt: bool | None = None
    t_max_predict_ms: float | None = Field(
        None, ge=-1, le=1e9, description="Ends a response after its first line"
    )
    response_fields: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _in_our_words(self) -> Self:
        self.n = self.n or self.n_cmpl
        if self.cache_prompt is False:
            self.use_kv_cache = False
        return self

    @property
    def predicts_nothing(self) -> bool:
        return self.n_predict == 0

    @property
    def wants_prompt(self) -> bool:
        """Whether the response shows the prompt, which then has to be turned into text."""
        return not self.response_fields or "prompt" in self.response_fields

    @property
    def max_generate_s(self) -> float | None:
        limit_ms = self.t_max_predict_ms or 0
        return limit_ms / 1000 if limit_ms > 0 else None

    def sampling_params(self, config: Config, top_logprobs: int | None = None) -> SamplingParams:
        biases = self.logit_bias or {}
        return replace(
            super().sampling_params(config, top_logprobs),
            logit_bias={token: bias for token, bias in biases.items() if isinstance(token, int)},
            text_bias=[(text, bias) for text, bias in biases.items() if isinstance(text, str)],
        )


class NativeCompletionRequest(NativeRequest):
    """POST /completion."""

    prompt: NativePrompt

    @property
    def prompts(self) -> list[str | list[int | str]]:
        """The prompts. A list with a token id among its items is a single prompt."""
        given = self.prompt
        if isinstance(given, list) and not any(isinstance(each, int) for each in given):
            return [_plain(each) for each in given]  # type: ignore[arg-type]
        return [_plain(given)]  # type: ignore[arg-type]

    @model_validator(mode="after")
    def _bounded_turns(self) -> Self:
        count = len(self.prompts)
        if not count:
            raise BadRequest("`prompt` takes at least one prompt.", param="prompt")
        if count * (self.n or 1) > MAX_TURNS:
            raise Unsupported(
                f"one request may ask for at most {MAX_TURNS} answers (prompts times `n_cmpl`)",
                param="prompt",
            )
        return self


class InputExtra(StrictModel):
    filename: str = Field(max_length=4096)
    text: str


class InfillRequest(NativeRequest):
    """POST /infill."""

    input_prefix: Text
    input_suffix: Text
    prompt: Text = Field("", description="The beginning of the text in the gap")
    input_extra: (
        Annotated[
            list[InputExtra],
            Field(fail_fast=True),
            explain_items("file", "takes a list of objects with `filename` and `text`"),
            at_most(MAX_EXTRA, "files"),
        ]
        | None
    ) = None

    @property
    def extra(self) -> list[ExtraFile]:
        return [ExtraFile(each.filename, each.text) for each in self.input_extra or ()]


class EmbeddingRequest(StrictModel):
    """POST /embedding. Vectors are normalised to length 1."""

    model: str | None = None
    content: Annotated[
        Text | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)],
        takes("a string, or a list of strings"),
    ]
    embd_normalize: int | None = Field(None, description="2, which is the length of the vector")

    @property
    def inputs(self) -> list[Any]:
        return as_prompts(self.content)
