"""What a reply has said already, and what saying it again costs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Seq

import numpy as np

from rekindle.engine.base import Row
from rekindle.protocol.requests import SamplingParams


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
