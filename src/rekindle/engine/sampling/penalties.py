"""Changes the logits of tokens that a reply should not repeat, or must not contain.

The penalties are those of llama.cpp, in the order of its chain. The bans are those of vLLM.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence as Seq
from math import log

import numpy as np

from rekindle.engine.base import Row
from rekindle.engine.sampling import fallback, native
from rekindle.protocol.requests import SamplingParams

MAX_LOG = 88.7228391  # logarithm of the largest float32


class RepetitionPenalty:
    """Penalises tokens in a window that includes the prompt."""

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
    """Applies presence and frequency penalties, which look at the whole reply but not the prompt.

    The arrays grow by doubling, so that a long reply does not build them again for each token.
    """

    def __init__(self, presence: float, frequency: float) -> None:
        self._presence = presence
        self._frequency = frequency
        self._places: dict[int, int] = {}  # index of each token in the two arrays
        self._ids = np.zeros(64, np.int64)
        self._costs = np.zeros(64, np.float32)

    def apply(self, row: Row) -> None:
        count = len(self._places)
        row[self._ids[:count]] -= self._costs[:count]

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


class DryPenalty:
    """Penalises tokens that would continue a repetition (DRY, "don't repeat yourself").

    The end of the text is compared with every earlier place in the window. A token that followed an
    equal run of at least the allowed length is penalised, exponentially in the length of the run. A
    run does not reach back over a sequence breaker, and a token that breaks by itself is not
    penalised. The prompt is part of the text.
    """

    def __init__(self, sampling: SamplingParams, prompt: Seq[int]) -> None:
        """The window has the last `dry_penalty_last_n` tokens, or all of them with -1."""
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        # A longer run would exceed the range of float32, or with a base of 1 change nothing.
        self._max_exponent = int(MAX_LOG / log(self._base)) if self._base > 1.000001 else 0
        self._window = sampling.dry_penalty_last_n
        # The other tokens of each breaker, by its first token.
        self._tails: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        for head, *tail in sampling.dry_breakers:
            self._tails[head].add(tuple(tail))
        alone = [head for head, tails in self._tails.items() if () in tails]
        self._exempt = np.array(alone, np.int64)
        lengths = {len(tail) for tails in self._tails.values() for tail in tails}
        self._tail_lengths = sorted(lengths)
        self._tokens = np.zeros(len(prompt) + 64, np.int32)  # grows by doubling
        self._tokens[: len(prompt)] = prompt
        self._count = len(prompt)
        self._head = self._end = -1  # first and last token of the last breaker
        self._find_last_breaker()

    def apply(self, row: Row) -> None:
        size = self._count if self._window < 0 else min(self._count, self._window)
        start = self._count - size
        limit = self._count - 1 - self._end if self._head >= start else size
        if size <= self._allowed or limit < self._allowed:
            return
        tokens = self._tokens[start : self._count]
        compiled = native.load()
        if compiled is None:
            reach = min(limit, self._allowed + self._max_exponent)
            lengths = fallback.match_lengths(tokens, reach)[:-1]
        else:
            lengths = native.match_lengths(compiled, tokens)[:-1].astype(np.int64)
        repeated = np.flatnonzero(lengths >= self._allowed)
        if repeated.size:
            self._penalise(row, tokens[repeated + 1], np.minimum(lengths[repeated], limit))

    def _penalise(self, row: Row, following: native.Ids, lengths: fallback.Ids) -> None:
        """Subtract the penalty of the longest run from each token that followed one."""
        longest = np.full(row.size, -1, np.int64)
        np.maximum.at(longest, following, lengths)
        longest[self._exempt] = -1
        ids = np.flatnonzero(longest >= 0)
        exponents = np.minimum(longest[ids] - self._allowed, self._max_exponent)
        penalties = self._multiplier * np.power(self._base, exponents, dtype=np.float64)
        with np.errstate(over="ignore"):  # minus infinity forbids the token
            row[ids] -= np.minimum(penalties, np.finfo(np.float32).max).astype(np.float32)

    def accept(self, token: int) -> None:
        if self._count == self._tokens.size:
            self._tokens = np.resize(self._tokens, 2 * self._count)
        self._tokens[self._count] = token
        self._count += 1
        for length in self._tail_lengths:  # the breaker that begins last wins
            head = self._count - 1 - length
            if head < self._head:
                return
            if head >= 0 and self._is_breaker(head, length):
                self._head, self._end = head, self._count - 1
                return

    def _is_breaker(self, head: int, length: int) -> bool:
        tails = self._tails.get(int(self._tokens[head]), ())
        return tuple(self._tokens[head + 1 : head + 1 + length].tolist()) in tails

    def _find_last_breaker(self) -> None:
        """Find the last breaker of the prompt. Where several begin together, the longest counts."""
        heads = np.fromiter(self._tails, np.int32, len(self._tails))
        for head in np.flatnonzero(np.isin(self._tokens[: self._count], heads))[::-1].tolist():
            for length in reversed(self._tail_lengths):
                if head + length < self._count and self._is_breaker(head, length):
                    self._head, self._end = head, head + length
                    return


Penalty = RepetitionPenalty | OccurrencePenalty | DryPenalty


def build_penalties(sampling: SamplingParams, prompt: Seq[int]) -> list[Penalty]:
    """Build the penalties that a request asks for, in the order in which they are applied."""
    penalties: list[Penalty] = []
    window = sampling.repetition_context_size
    if sampling.repetition_penalty != 1 and window:
        penalties.append(RepetitionPenalty(sampling.repetition_penalty, window, prompt))
    if sampling.presence_penalty or sampling.frequency_penalty:
        penalties.append(OccurrencePenalty(sampling.presence_penalty, sampling.frequency_penalty))
    if sampling.dry_multiplier and sampling.dry_penalty_last_n:
        window = sampling.dry_penalty_last_n
        seen = prompt if window < 0 else prompt[max(len(prompt) - window, 0) :]
        penalties.append(DryPenalty(sampling, seen))
    return penalties


def penalised_prompt(sampling: SamplingParams, prompt: Seq[int]) -> Seq[int]:
    """Copy the end of the prompt, as far as the penalties read it. The original may grow."""
    if sampling.dry_multiplier and sampling.dry_penalty_last_n < 0:
        return prompt[:]
    dry = sampling.dry_penalty_last_n if sampling.dry_multiplier else 0
    return prompt[max(len(prompt) - max(sampling.repetition_context_size, dry), 0) :]


class BannedTokens:
    """Bans the tokens that would complete a bad word, and end tokens up to `min_tokens`.

    Only the reply is searched for bad words, not the prompt.
    """

    def __init__(self, sampling: SamplingParams) -> None:
        # The last tokens of bad words, by the tokens before them.
        self._completing: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for *before, last in sampling.bad_words_tokens:
            self._completing[tuple(before)].append(last)
        self._lengths = sorted({len(before) for before in self._completing})
        self._recent: deque[int] = deque(maxlen=max(self._lengths, default=0))
        self._ends = list(sampling.end_tokens)
        self._ends_left = sampling.min_tokens  # tokens until the reply may end

    def apply(self, row: Row, *, is_masked: bool) -> None:
        """Set the logits of banned tokens to minus infinity.

        A grammar wins: if it allows only banned tokens, they stay allowed.
        """
        banned = self._tokens()
        kept = row[banned]
        row[banned] = -np.inf
        if is_masked and row.max() == -np.inf:
            row[banned] = kept

    def accept(self, token: int) -> None:
        self._ends_left -= 1
        self._recent.append(token)

    def _tokens(self) -> list[int]:
        recent = tuple(self._recent)
        banned = self._ends[:] if self._ends_left > 0 else []
        for length in self._lengths:
            if length <= len(recent):
                banned += self._completing.get(recent[len(recent) - length :], ())
        return banned
