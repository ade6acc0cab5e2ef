"""The sampler of every engine: tokens chosen from rows of logits.

The order is that of llama.cpp's chain: mask, bias, penalties, top-k, top-p, min-p, temperature,
draw. Each draw depends on the seed, its number in the reply and the row alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq
from itertools import count
from math import inf, log

import numpy as np

from rekindle.engine.base import Matrix, Row, Sampled, TokenMask
from rekindle.engine.sampling import native as compiled_rows
from rekindle.engine.sampling.fallback import (
    Draws,
    Ids,
    Nucleus,
    Scratch,
    WeightedRows,
    highest,
    highest_of_each,
    largest,
    pick,
    uniforms,
)
from rekindle.engine.sampling.native import COLDEST, DRAWS, UNDECIDED, WORDS, RowChooser
from rekindle.protocol.requests import SamplingParams

# ----------------------------------------------------------------------
# What a reply has said already, and what saying it again costs.


class RepetitionPenalty:
    """Looks back over a window of the last tokens, those of the prompt included."""

    def __init__(self, factor: float, window: int, prompt: Seq[int]) -> None:
        self._factor = np.float32(factor)
        self._recent = deque(prompt[-window:], maxlen=window)
        self._counts = Counter(self._recent)

    def apply(self, row: Row) -> None:
        ids = np.fromiter(self._counts, np.int64, len(self._counts))
        logits = row[ids]
        row[ids] = np.where(logits > 0, logits / self._factor, logits * self._factor)

    def accept(self, token: int) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent[0]
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
        self._recent.append(token)
        self._counts[token] += 1


class OccurrencePenalty:
    """Presence and frequency: they look at the reply alone, and at all of it."""

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._places: dict[int, int] = {}  # of each token in the two arrays
        self._ids = np.zeros(64, np.int64)
        self._costs = np.zeros(64, np.float32)

    def apply(self, row: Row) -> None:
        said = len(self._places)
        row[self._ids[:said]] -= self._costs[:said]

    def accept(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == self._ids.size:
                self._ids = np.resize(self._ids, 2 * place)
                self._costs = np.resize(self._costs, 2 * place)
            self._ids[place] = token
            self._costs[place] = self._presence
        self._costs[place] += self._frequency


Penalty = RepetitionPenalty | OccurrencePenalty


def build_penalties(sampling: SamplingParams, prompt: Seq[int]) -> list[Penalty]:
    """Those that a request asks for, in the order they are applied."""
    penalties: list[Penalty] = []
    window = sampling.repetition_context_size
    if sampling.repetition_penalty != 1 and window:
        penalties.append(RepetitionPenalty(sampling.repetition_penalty, window, prompt))
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalties.append(OccurrencePenalty(sampling.presence_penalty, sampling.frequency_penalty))
    return penalties


_GREEDY_CHOICE = bytes(compiled_rows.CHOICE_BYTES)
_NO_MORE_WORDS = bytes(8 * (WORDS - DRAWS))


def build_sampler(
    sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
) -> TokenSampler:
    """A sampler for one reply; `prompt` are the ids of its text."""
    return TokenSampler(sampling, prompt, token_mask)


class TokenSampler:
    """Chooses the tokens of one reply."""

    def __init__(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None
    ) -> None:
        self._sampling = sampling
        self.top_p = sampling.top_p
        self.temperature = max(sampling.temperature, COLDEST)
        self.is_greedy = sampling.temperature == 0
        #: Whether a token comes of `temperature` and `top_p` alone, as proposals do.
        self.is_plain = 0 < sampling.temperature <= 1 and not sampling.top_k and not sampling.min_p
        self._mask = token_mask
        self._prompt = prompt[max(len(prompt) - sampling.repetition_context_size, 0) :]
        self._penalties = build_penalties(sampling, self._prompt)
        self._biased = np.array(list(sampling.logit_bias), dtype=np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        #: Whether there is more to a token than its choice: the row is changed, or kept.
        self.is_involved = bool(
            token_mask is not None
            or sampling.logit_bias
            or self._penalties
            or sampling.top_logprobs is not None
        )
        self._given: Row | None = None  # as the model gave it, if log probabilities are wanted
        self.draws = Draws(sampling.seed)
        self._proposed = compiled_rows.pack(sampling, compiled_rows.PROPOSE, draws=DRAWS)
        self._drawn = compiled_rows.pack(sampling, compiled_rows.DRAW, draws=DRAWS)
        self._drawn_often = compiled_rows.pack(sampling, compiled_rows.DRAW, draws=WORDS)

    def sample(self, row: Row, /) -> Sampled:
        """Choose from one row of logits, which is used up."""
        return Chooser(compiled_rows.build()).choose([self], row[None])[0]

    def prepare(self, row: Row) -> None:
        """Change the logits to those that are chosen from."""
        if self._sampling.top_logprobs is not None:
            self._given = row.copy()
        if self._mask is not None:
            self._mask.mask(row)
        if self._biased.size:
            row[self._biased] += self._bias
        for penalty in self._penalties:
            penalty.apply(row)

    def accept(self, token: int) -> Sampled:
        """Go on to the next token."""
        self.draws.next_token()
        if not self.is_involved:
            return Sampled(token)
        for penalty in self._penalties:
            penalty.accept(token)
        if self._mask is not None:
            self._mask.accept(token)
        if self._given is None:
            return Sampled(token)
        given, self._given = self._given, None
        return with_logprobs(token, given, self._sampling.top_logprobs or 0)

    def replay(self, reply: Seq[int]) -> None:
        """Go on behind a reply that has got this far, whatever was chosen since."""
        self.draws.token, self._given = len(reply), None
        self._penalties = build_penalties(self._sampling, self._prompt)
        for penalty in self._penalties:
            for token in reply:
                penalty.accept(token)
        if self._mask is not None:
            self._mask.replay(reply)

    def first_choice(self) -> bytes:
        """What compiled code chooses the next token by."""
        if self.is_greedy:
            return _GREEDY_CHOICE
        if self.is_plain:
            return self._proposed + self.draws.proposals() + self.draws.attempts(DRAWS)
        return self._drawn + self.draws.attempts(DRAWS) + _NO_MORE_WORDS

    def second_choice(self) -> bytes:
        """The same, where the first did not come to a token, which is rare."""
        return self._drawn_often + self.draws.attempts(WORDS)

    def draw(self, row: Row) -> int:
        """A token by its chance, whatever the parameters; the row is used up."""
        if 0 < self._sampling.top_k < row.size:
            left = largest(row, self._sampling.top_k)
            return int(left[self._draw(row[left])]) if left.size else highest(row)
        return self._draw(row)

    def _draw(self, logits: Row) -> int:
        """The place of a token that is drawn by its chance."""
        most = logits.max()
        if not np.isfinite(most):  # nothing may come, or the model has computed nonsense
            return highest(logits)
        with np.errstate(over="ignore"):  # what is too far below is minus infinity
            logits -= most
            left, nucleus = self._cut(logits)
            scores = logits if left is None else logits[left]
            if nucleus is not None and self._sampling.temperature == 1:
                chances = nucleus.weights
            else:
                scores /= np.float32(self.temperature)
                chances = np.exp(scores, out=scores)
        place = self._pick(chances, nucleus)
        return place if left is None else int(left[place])

    def _cut(self, scores: Row) -> tuple[Ids | None, Nucleus | None]:
        """The places that top-p and min-p leave, or most others left out; None: hardly any are. A
        score is a logit less the highest."""
        top_p, min_p = self._sampling.top_p, self._sampling.min_p
        floor = log(min_p) if min_p else -inf
        nucleus = None
        if top_p < 1:
            nucleus = Nucleus(np.exp(scores), top_p)
            floor = max(floor, log(nucleus.floor))
        if floor == -inf:
            return None, None
        is_left = scores >= np.float32(floor)
        if not min_p and 4 * np.count_nonzero(is_left) > is_left.size:
            return None, nucleus
        left = np.flatnonzero(is_left)
        if nucleus is not None:
            nucleus.keep(left)
        return left, nucleus

    def _pick(self, chances: Row, nucleus: Nucleus | None) -> int:
        """What falls outside the nucleus is drawn again: rare, unless the temperature is high."""
        for attempt in count():
            index = pick(chances, self.draws.uniform(attempt))
            if nucleus is None or index in nucleus:
                return index
            chances = nucleus.without(index, chances)
        raise AssertionError("the heaviest weight is in every nucleus")


class Chooser:
    """Chooses the tokens of many replies, for one thread at a time: by compiled code if there is
    any, and otherwise, or where that does not come to a decision, by NumPy."""

    def __init__(self, compiled: RowChooser | None) -> None:
        self._compiled = compiled
        self._scratch = Scratch()

    def choose(
        self,
        samplers: Seq[TokenSampler],
        logits: Matrix,
        choices: bytes | None = None,
        *,
        together: bool = False,
    ) -> list[Sampled]:
        """The next token of each reply, from a row of logits each, which are used up. `choices` are
        their first ones, if the caller has them; `together`: by all threads of the compiled code.
        """
        for row, sampler in enumerate(samplers):
            if sampler.is_involved:
                sampler.prepare(logits[row])
        if self._compiled is None:
            tokens = _choose_by_numpy(samplers, logits, self._scratch)
        else:
            choices = choices or first_choices(samplers)
            tokens = self._compiled.choose(choices, logits, together=together)
            self._decide_rest(tokens, samplers, logits)
        return [sampler.accept(token) for sampler, token in zip(samplers, tokens, strict=True)]

    def _decide_rest(self, tokens: list[int], samplers: Seq[TokenSampler], logits: Matrix) -> None:
        assert self._compiled is not None
        for row in [row for row, token in enumerate(tokens) if token == UNDECIDED]:
            second = samplers[row].second_choice()
            [token] = self._compiled.choose(second, logits[row : row + 1])
            tokens[row] = samplers[row].draw(logits[row]) if token == UNDECIDED else token


def first_choices(samplers: Seq[TokenSampler]) -> bytes:
    return b"".join([sampler.first_choice() for sampler in samplers])


def _choose_by_numpy(samplers: Seq[TokenSampler], logits: Matrix, scratch: Scratch) -> list[int]:
    tokens: dict[int, int] = {}
    if greedy := [row for row, sampler in enumerate(samplers) if sampler.is_greedy]:
        tokens.update(zip(greedy, highest_of_each(_only(greedy, logits)), strict=True))
    if plain := [row for row, sampler in enumerate(samplers) if sampler.is_plain]:
        drawn = _propose([samplers[row] for row in plain], _only(plain, logits), scratch)
        tokens.update(zip(plain, drawn, strict=True))
    return [
        tokens[row] if row in tokens else sampler.draw(logits[row])
        for row, sampler in enumerate(samplers)
    ]


def _only(rows: list[int], logits: Matrix) -> Matrix:
    return logits if len(rows) == len(logits) else logits[rows]


def _propose(samplers: Seq[TokenSampler], logits: Matrix, scratch: Scratch) -> list[int]:
    """Draw a token for each sampler that is plain."""
    temperatures = np.array([each.temperature for each in samplers])
    shares = np.array([each.top_p if each.top_p < 1 else inf for each in samplers])
    with np.errstate(all="ignore"):  # of rows that turn out not to be usable, and of weights of 0
        rows = WeightedRows(logits, scratch)
        proposed = rows.propose(temperatures, uniforms([each.draws for each in samplers]))
        tokens = proposed.first()
        done = proposed.any() & rows.usable & rows.surely_in(tokens, shares)
    for row in (~done).nonzero()[0].tolist():
        found = None
        if rows.usable[row]:
            accepted = proposed.tokens[row, proposed.accepted[row]]
            found = rows.nucleus(row, float(shares[row])).first_in(accepted)
        tokens[row] = samplers[row].draw(logits[row]) if found is None else found
    result: list[int] = tokens.tolist()
    return result


def with_logprobs(token: int, logits: Row, top: int) -> Sampled:
    """The token with log probabilities as the model gave them, before any mask."""
    most = float(logits.max())
    total = np.exp(logits - np.float32(most)).sum(dtype=np.float64)
    base = most + float(np.log(total))
    best = largest(logits, top) if top else np.zeros(0, np.int64)
    best = best[np.argsort(-logits[best], kind="stable")]
    pairs = tuple((int(each), float(logits[each]) - base) for each in best)
    return Sampled(token, float(logits[token]) - base, pairs)
