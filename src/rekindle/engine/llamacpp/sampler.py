"""llama.cpp sampler chains, one for each reply."""

from __future__ import annotations

import secrets
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from rekindle.engine.base import Sampled, Sampler, TokenMask
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp.context import LogitsRow
from rekindle.protocol.requests import SamplingParams

WHOLE_REPLY = 1 << 20  # a penalty window no reply outgrows


class GreedySampler:
    """The likeliest token, biases added: one scan of the row, where a chain would copy it."""

    def __init__(self, sampling: SamplingParams, token_mask: TokenMask | None = None) -> None:
        self._mask = token_mask
        self._top_logprobs = sampling.top_logprobs
        self._is_biased = bool(sampling.logit_bias)
        self._biased = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)

    def sample(self, logits: LogitsRow, /) -> Sampled:
        row = logits.values()
        scores = _log_softmax(row) if self._top_logprobs is not None else None
        if self._mask is not None:
            self._mask.mask(row)
        if self._is_biased:
            row = row.copy()
            row[self._biased] += self._bias
        token = int(row.argmax())
        if self._mask is not None:
            self._mask.accept(token)
        return _sampled(token, scores, self._top_logprobs)

    def close(self) -> None: ...


class ChainSampler:
    """Chooses the tokens of one reply. The order follows llama.cpp's own default chain."""

    def __init__(
        self,
        library: Any,
        vocabulary_size: int,
        sampling: SamplingParams,
        prompt: Seq[int],
        token_mask: TokenMask | None = None,
    ) -> None:
        self._library = library
        self._mask = token_mask
        self._vocabulary_size = vocabulary_size
        self._top_logprobs = sampling.top_logprobs
        self._chain = library.llama_sampler_chain_init(library.llama_sampler_chain_default_params())
        self._add_bias(sampling)
        self._add_penalties(sampling, prompt)
        self._add_choice(sampling)

    def _add(self, sampler: int) -> None:
        self._library.llama_sampler_chain_add(self._chain, sampler)

    def _add_bias(self, sampling: SamplingParams) -> None:
        if sampling.logit_bias:
            pairs = [bindings.LogitBias(t, b) for t, b in sampling.logit_bias.items()]
            biases = (bindings.LogitBias * len(pairs))(*pairs)
            self._add(
                self._library.llama_sampler_init_logit_bias(
                    self._vocabulary_size, len(pairs), biases
                )
            )

    def _add_penalties(self, sampling: SamplingParams, prompt: Seq[int]) -> None:
        """Repetition looks back over the prompt too; presence and frequency at the reply alone."""
        make = self._library.llama_sampler_init_penalties
        window = sampling.repetition_context_size
        if sampling.repetition_penalty != 1.0 and window:
            repetition = make(self._vocabulary_size, window, sampling.repetition_penalty, 0.0, 0.0)
            for token in prompt[-window:]:
                self._library.llama_sampler_accept(repetition, token)
            self._add(repetition)
        frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
        if frequency or presence:
            self._add(make(self._vocabulary_size, WHOLE_REPLY, 1.0, frequency, presence))

    def _add_choice(self, sampling: SamplingParams) -> None:
        library = self._library
        if sampling.temperature == 0:
            self._add(library.llama_sampler_init_greedy())
            return
        if sampling.top_k:
            self._add(library.llama_sampler_init_top_k(sampling.top_k))
        if sampling.top_p < 1:
            self._add(library.llama_sampler_init_top_p(sampling.top_p, 1))
        if sampling.min_p:
            self._add(library.llama_sampler_init_min_p(sampling.min_p, 1))
        if sampling.temperature != 1:
            self._add(library.llama_sampler_init_temp(sampling.temperature))
        self._add(library.llama_sampler_init_dist(_seed(sampling.seed)))

    def sample(self, logits: LogitsRow, /) -> Sampled:
        """Choose from one row, which the chain reads where it lies; so that is where it is masked.

        Reading the row costs a call: it happens only for a mask or log probabilities.
        """
        scores = _log_softmax(logits.values()) if self._top_logprobs is not None else None
        if self._mask is not None:
            self._mask.mask(logits.values())
        context, index = logits.context.native, logits.index
        token = int(self._library.llama_sampler_sample(self._chain, context, index))
        if self._mask is not None:
            self._mask.accept(token)
        return _sampled(token, scores, self._top_logprobs)

    def close(self) -> None:
        if self._chain:
            self._library.llama_sampler_free(self._chain)
            self._chain = None


def build_sampler(
    library: Any,
    vocabulary_size: int,
    sampling: SamplingParams,
    prompt: Seq[int],
    token_mask: TokenMask | None = None,
) -> Sampler:
    penalised = (
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )
    if sampling.temperature == 0 and not penalised:
        return GreedySampler(sampling, token_mask)
    return ChainSampler(library, vocabulary_size, sampling, prompt, token_mask)


def _sampled(token: int, scores: Any | None, top: int | None) -> Sampled:
    """The token with log probabilities as the model gave them, before any mask."""
    if scores is None or top is None:
        return Sampled(token)
    return Sampled(token, float(scores[token]), _top(scores, top))


def _seed(seed: int | None) -> int:
    """A 32-bit seed; never the one by which llama.cpp draws its own."""
    wide = secrets.randbits(32) if seed is None else seed
    return (wide & 0xFFFFFFFF) % bindings.RANDOM_SEED


def _log_softmax(logits: Any) -> Any:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def _top(scores: Any, count: int) -> tuple[tuple[int, float], ...]:
    if not count:
        return ()
    best = np.argpartition(-scores, count - 1)[:count]
    return tuple((int(t), float(scores[t])) for t in best[np.argsort(-scores[best])])
