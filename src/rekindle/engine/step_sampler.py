"""The choices of a whole step: its rows of logits, shared by the cores there are."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from threading import local
from typing import NamedTuple

from rekindle.engine import compiled_rows
from rekindle.engine.base import Matrix, Sampled, Sampler
from rekindle.engine.sampling import Chooser, TokenSampler
from rekindle.engine.team import LEAST_WORK, Compute, Team
from rekindle.protocol.settings import usable_cores

#: What a group of rows has at most: few calls of NumPy, each of which needs the interpreter's lock,
#: and still in a core's cache.
GROUP_LOGITS = 800_000

_DRAWN, _GREEDY = 70, 14  # work of a logit, as a team counts it


class Limits(NamedTuple):
    """Of what is worth sharing: more threads, or fewer rows for each, only wait for that lock."""

    most_threads: int
    least_rows: int


COMPILED, BY_NUMPY = Limits(8, 4), Limits(4, 16)


class StepSampler:
    """Used by one thread at a time. What it chooses depends neither on its threads nor on which
    rows come together."""

    def __init__(self, threads: int) -> None:
        """`threads` counts the one that asks."""
        self._threads = threads
        self._team: Team | None = None
        self._choosers = local()

    def sample(self, samplers: Seq[Sampler], logits: Matrix) -> list[Sampled]:
        """The next token of each reply, from a row of logits each, which are used up."""
        ours = [_ours(sampler) for sampler in samplers]
        vocabulary = logits.shape[1]
        group = max(GROUP_LOGITS // vocabulary, 1)
        chosen: dict[int, list[Sampled]] = {}

        def compute(part: slice) -> None:
            for start in range(part.start, part.stop, group):
                rows = slice(start, min(start + group, part.stop))
                chosen[start] = self._own_chooser().choose(ours[rows], logits[rows])

        self._share(compute, len(ours), vocabulary * sum(map(_work, ours)))
        return [sampled for start in sorted(chosen) for sampled in chosen[start]]

    def _share(self, compute: Compute, rows: int, work: int) -> None:
        threads = min(self._threads, rows // _limits().least_rows)
        if threads < 2 or work < 2 * LEAST_WORK:
            compute(slice(0, rows))
            return
        if self._team is None:
            self._team = Team(self._threads, "sampler")
        self._team.share(compute, rows, work // rows, most=threads)

    def _own_chooser(self) -> Chooser:
        """That of the thread."""
        if not hasattr(self._choosers, "own"):
            self._choosers.own = Chooser()
        own: Chooser = self._choosers.own
        return own

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
            self._team = None


def spare_threads(busy_cores: int) -> int:
    """How many threads should choose, on half of the cores that nothing keeps busy: threads of
    OpenMP wait busily for their next step on others."""
    return max(min((usable_cores() - busy_cores) // 2, _limits().most_threads), 1)


def _limits() -> Limits:
    return COMPILED if compiled_rows.load() else BY_NUMPY


def _ours(sampler: Sampler) -> TokenSampler:
    assert isinstance(sampler, TokenSampler)
    return sampler


def _work(sampler: TokenSampler) -> int:
    return _GREEDY if sampler.is_greedy else _DRAWN
