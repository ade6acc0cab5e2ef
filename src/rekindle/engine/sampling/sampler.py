"""Chooses the tokens of replies from rows of logits, for every engine.

The order is that of llama.cpp's chain: mask, bias, bans, penalties, DRY, top-k, typical-p, top-p,
min-p, temperature, draw. A draw depends only on the seed, the position of the token in its reply,
and the row.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence as Seq
from ctypes import CDLL
from hashlib import shake_128

import numpy as np

from rekindle.engine.base import Matrix, Row, Sampled, Sampler, TokenMask
from rekindle.engine.sampling import native
from rekindle.engine.sampling.fallback import draw, highest, top_tokens
from rekindle.engine.sampling.native import (
    DRAWS,
    MIN_TEMPERATURE,
    UNDECIDED,
    WORDS,
    Method,
    NativeSampler,
)
from rekindle.engine.sampling.penalties import BannedTokens, build_penalties, penalised_prompt
from rekindle.protocol.requests import SamplingParams
from rekindle.protocol.settings import usable_cores

_GREEDY_PARAMS = bytes(native.PARAMS_BYTES)


class TokenSampler:
    def __init__(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> None:
        """`prompt` has the ids of the text of the prompt."""
        self._sampling = sampling
        self._seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._position = 0  # of the next token in the reply
        # With typical-p even a greedy choice is made among the tokens that are left.
        self.is_greedy = sampling.temperature == 0 and sampling.typical_p >= 1
        self._mask = token_mask
        self._prompt = penalised_prompt(sampling, prompt) if sampling.has_penalties else ()
        self._penalties = build_penalties(sampling, self._prompt) if sampling.has_penalties else []
        has_bans = bool(sampling.bad_words_tokens or sampling.min_tokens)
        self._bans = BannedTokens(sampling) if has_bans else None
        self._biased = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        #: Whether the row is changed before the choice, or kept for log probabilities.
        self.needs_row = bool(
            token_mask is not None
            or sampling.logit_bias
            or self._penalties
            or self._bans
            or sampling.top_logprobs is not None
        )
        self._model_logits: Row | None = None  # kept if log probabilities are wanted
        # Proposals work up to temperature 1, and know no other cut than top-p.
        has_cut = sampling.top_k or sampling.min_p or sampling.typical_p < 1
        method = Method.PROPOSE if sampling.temperature <= 1 and not has_cut else Method.DRAW
        if sampling.temperature == 0:
            method = Method.GREEDY
        self._first = native.pack(sampling, method, draws=DRAWS)
        retried = Method.DRAW if sampling.temperature else Method.GREEDY
        self._retry = native.pack(sampling, retried, draws=WORDS)

    def sample(self, row: Row, /) -> Sampled:
        library = native.load()
        compiled = None if library is None else NativeSampler(library, threads=1)
        return sample_rows(compiled, [self], row[None])[0]

    def prepare(self, row: Row) -> None:
        if self._sampling.top_logprobs is not None:
            self._model_logits = row.copy()
        if self._mask is not None:
            self._mask.mask(row)
        if self._biased.size:
            row[self._biased] += self._bias
        if self._bans is not None:
            self._bans.apply(row, is_masked=self._mask is not None)
        for penalty in self._penalties:
            penalty.apply(row)

    def first_params(self) -> bytes:
        return _GREEDY_PARAMS if self.is_greedy else self._first + self._random_words(0)

    def retry_params(self) -> bytes:
        """Return parameters with more draws, for the rare row that stays undecided at first."""
        return self._retry + self._random_words(1)

    def choose(self, row: Row) -> int:
        """Choose a token from a prepared row with NumPy."""
        if self.is_greedy:
            return highest(row)
        uniform = int.from_bytes(self._random_words(2)[:8], "little") >> 11
        temperature = max(self._sampling.temperature, MIN_TEMPERATURE)
        return draw(row, self._sampling, temperature, uniform * 2.0**-53)

    def _random_words(self, attempt: int) -> bytes:
        name = b"%d %d %d" % (self._seed, self._position, attempt)
        return shake_128(name).digest(8 * WORDS)

    def accept(self, token: int) -> Sampled:
        """Append the chosen token to the reply."""
        self._position += 1
        if not self.needs_row:
            return Sampled(token)
        for penalty in self._penalties:
            penalty.accept(token)
        if self._bans is not None:
            self._bans.accept(token)
        if self._mask is not None:
            self._mask.accept(token)
        if self._model_logits is None:
            return Sampled(token)
        logits, self._model_logits = self._model_logits, None
        return _with_logprobs(token, logits, self._sampling.top_logprobs or 0)

    def replay(self, reply: Seq[int]) -> None:
        self._position, self._model_logits = len(reply), None
        if self._penalties:
            self._penalties = build_penalties(self._sampling, self._prompt)
        self._bans = BannedTokens(self._sampling) if self._bans is not None else None
        for rule in (*self._penalties, *([self._bans] if self._bans else [])):
            for token in reply:
                rule.accept(token)
        if self._mask is not None:
            self._mask.replay(reply)


def sample_rows(
    compiled: NativeSampler | None,
    samplers: Seq[TokenSampler],
    logits: Matrix,
    params: bytes | None = None,
    *,
    parallel: bool = False,
) -> list[Sampled]:
    """Return the next token of each reply from its row of logits, which is overwritten.

    `params` are the first parameters of all samplers, if they are packed already.
    """
    for place, sampler in enumerate(samplers):
        if sampler.needs_row:
            sampler.prepare(logits[place])
    if compiled is None:
        tokens = [each.choose(row) for each, row in zip(samplers, logits, strict=True)]
    else:
        params = params or b"".join([each.first_params() for each in samplers])
        tokens = compiled.sample(params, logits, parallel=parallel)
        if UNDECIDED in tokens:
            _retry_undecided(compiled, samplers, logits, tokens)
    return [sampler.accept(token) for sampler, token in zip(samplers, tokens, strict=True)]


def _retry_undecided(
    compiled: NativeSampler, samplers: Seq[TokenSampler], logits: Matrix, tokens: list[int]
) -> None:
    """Draw more often, and leave rows that compiled code cannot handle, such as NaN, to NumPy."""
    for row in [row for row, token in enumerate(tokens) if token == UNDECIDED]:
        [token] = compiled.sample(samplers[row].retry_params(), logits[row : row + 1])
        tokens[row] = samplers[row].choose(logits[row]) if token == UNDECIDED else token


def _with_logprobs(token: int, logits: Row, top: int) -> Sampled:
    """Add the model's own log probabilities, before mask, bias and penalties."""
    peak = float(logits.max())
    total = np.exp(logits - np.float32(peak)).sum(dtype=np.float64)
    base = peak + float(np.log(total))
    best = top_tokens(logits, top).tolist() if top else []
    pairs = tuple((each, float(logits[each]) - base) for each in best)
    return Sampled(token, float(logits[token]) - base, pairs)


log = logging.getLogger("rekindle.engine")

MIN_SHARED_LOGITS = 750_000  # a smaller step does not pay for waking threads
DRAW_COST = 5  # a row that is drawn from takes the time of this many greedy rows
MAX_THREADS = 8


class StepSampler:
    """Samples steps from one thread at a time.

    A row's token depends neither on the number of threads nor on the other rows of its step.
    """

    def __init__(self, threads: int, compiled: CDLL | None) -> None:
        """`threads` includes the calling thread. Without compiled code NumPy samples, in one."""
        self.threads = threads
        self._native = None if compiled is None else NativeSampler(compiled, threads)
        self._ready: tuple[Seq[Sampler], bytes] | None = None  # parameters packed by `arm`

    def arm(self, samplers: Seq[Sampler], vocabulary: int) -> bool:
        """Prepare for a step while a device computes its logits.

        Wakes the threads and packs the parameters. Returns False if the step is too small for that.
        """
        ours = _token_samplers(samplers)
        if self._native is None or not self._is_shared(ours, vocabulary):
            return False
        self._native.arm()
        self._ready = ours, b"".join([each.first_params() for each in ours])
        return True

    def sample(self, samplers: Seq[Sampler], logits: Matrix) -> list[Sampled]:
        """Return the next token of each reply. The logits, one row per reply, are overwritten."""
        ours = _token_samplers(samplers)
        ready, self._ready = self._ready, None
        params = ready[1] if ready and ready[0] == ours else None
        parallel = self._is_shared(ours, logits.shape[1])
        return sample_rows(self._native, ours, logits, params, parallel=parallel)

    def _is_shared(self, samplers: Seq[TokenSampler], vocabulary: int) -> bool:
        rows = sum(1 if each.is_greedy else DRAW_COST for each in samplers)
        return self.threads > 1 and rows * vocabulary >= MIN_SHARED_LOGITS

    def close(self) -> None:
        if self._native is not None:
            self._native.close()


def build_step_sampler(busy_cores: int) -> StepSampler:
    """Build the sampler of an engine that keeps `busy_cores` cores busy.

    Half of the cores sample for a GPU engine. For a CPU engine one thread does, because the OpenMP
    threads of the engine wait busily for their next step and would compete with it.
    """
    compiled = native.load()
    if compiled is None:
        log.warning(
            "NumPy samples tokens, which takes several times as long as compiled code: %s "
            "(make sure that there is a C compiler, `cc`, and install rekindle again)",
            native.missing_reason(),
        )
    has_threads = compiled is not None and not busy_cores
    threads = min(usable_cores() // 2, MAX_THREADS) if has_threads else 1
    return StepSampler(max(threads, 1), compiled)


def _token_samplers(samplers: Seq[Sampler]) -> list[TokenSampler]:
    ours = [each for each in samplers if isinstance(each, TokenSampler)]
    assert len(ours) == len(samplers)
    return ours
