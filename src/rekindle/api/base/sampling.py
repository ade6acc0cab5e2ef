"""Declares the sampling parameters that clients may send, once for every dialect.

A new parameter takes one line in `SamplingFields` and one in `protocol.requests.SamplingParams`,
under the same name. A dialect that has another name for it declares an alias.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from rekindle.api.base.fields import INT64_LIMIT, MAX_TOKENS, WHOLE, at_most, takes
from rekindle.config import Config
from rekindle.protocol.requests import SamplingParams

#: Parameters for which the operator can set a default.
CONFIGURED = ("temperature", "top_p", "repetition_penalty", "repetition_context_size", "seed")
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BREAKERS = 64


def _as_biases(biases: dict[str, float]) -> dict[int, float]:
    for token, bias in biases.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise ValueError(f"takes token ids as keys, not {token[:32]!r}")
        if not -100 <= bias <= 100:
            raise ValueError("takes biases from -100 to 100")
    return {int(token): bias for token, bias in biases.items()}


def _has_characters(word: str) -> str:
    if not word.strip():
        raise ValueError("takes texts that are not empty")
    return word


Seed = Annotated[int, Field(ge=-INT64_LIMIT, lt=INT64_LIMIT), WHOLE]
# -1 and 0 both disable top-k.
TopK = Annotated[
    int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(lambda top_k: max(top_k, 0)), WHOLE
]
LogitBias = Annotated[
    dict[str, float],
    Field(max_length=MAX_BIASES),
    AfterValidator(_as_biases),
    at_most(MAX_BIASES, "tokens"),
]
# -1 stands for the whole context.
RepeatLastN = Annotated[
    int,
    Field(ge=-1, le=MAX_TOKENS),
    AfterValidator(lambda window: 1 << 20 if window == -1 else window),
    WHOLE,
]
BadWords = Annotated[
    list[Annotated[str, Field(max_length=256), AfterValidator(_has_characters)]],
    Field(fail_fast=True),
    takes(f"a list of at most {MAX_BAD_WORDS} texts of 1 to 256 characters"),
    at_most(MAX_BAD_WORDS),
]
SequenceBreakers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=40)]],
    Field(min_length=1, fail_fast=True),
    takes(f"a list of 1 to {MAX_BREAKERS} texts of 1 to 40 characters"),
    at_most(MAX_BREAKERS),
]


class CommonSampling(BaseModel):
    """Parameters that every dialect has. None stands for the server's default."""

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)

    def sampling_params(self, config: Config, top_logprobs: int | None = None) -> SamplingParams:
        params: dict[str, Any] = {name: getattr(config, name) for name in CONFIGURED}
        for name in PARAMETERS:
            if (value := getattr(self, name, None)) is not None:
                params[name] = value
        return SamplingParams(**params, top_logprobs=top_logprobs)


class SamplingFields(CommonSampling):
    """The parameters that OpenAI's completions and Ollama's `options` take."""

    top_k: TopK | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(
        None, gt=0, le=1, description="Locally typical sampling. 1 is off."
    )
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    repetition_context_size: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: Seed | None = None


# `top_logprobs` is not among them: each dialect has its own way to ask for log probabilities.
PARAMETERS = [each.name for each in fields(SamplingParams) if each.name != "top_logprobs"]
