"""The choices of a whole step: its rows of logits, shared by the cores there are."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from threading import local
from typing import NamedTuple

from rekindle.engine import compiled_rows
from rekindle.engine.base import Matrix, Sampled, Sampler
from rekindle.engine.compiled_rows import CompiledRows
from rekindle.engine.sampling import Chooser, TokenSampler
from rekindle.engine.team import LEAST_WORK, Compute, Team
from rekindle.protocol.settings import usable_cores

log = logging.getLogger("rekindle.engine")


class Sharing(NamedTuple):
    """What is worth a thread, and how much a thread takes at a time."""

    most_threads: int
    least_rows: int  # of a thread
    group_logits: int
    drawn_work: int  # of a logit, as a team counts it
    greedy_work: int


#: A greedy choice is as fast as its logits come from memory.
COMPILED = Sharing(8, 2, 1 << 40, drawn_work=70, greedy_work=27)
#: More threads, or fewer rows for each, wait for the interpreter's lock, which every call needs:
#: as few calls as a core's cache allows.
BY_NUMPY = Sharing(4, 16, 800_000, drawn_work=70, greedy_work=14)


class StepSampler:
    """Used by one thread at a time. What it chooses depends neither on its threads nor on which
    rows come together."""

    def __init__(self, threads: int, compiled: CompiledRows | None) -> None:
        """`threads` counts the one that asks; without compiled code NumPy chooses."""
        self.threads = threads
        self._compiled = compiled
        self._sharing = _sharing(compiled)
        self._team: Team | None = None
        self._choosers = local()

    def sample(self, samplers: Seq[Sampler], logits: Matrix) -> list[Sampled]:
        """The next token of each reply, from a row of logits each, which are used up."""
        ours = [_ours(sampler) for sampler in samplers]
        if len(ours) == 1:
            return self._own_chooser().choose(ours, logits)
        vocabulary = logits.shape[1]
        group = max(self._sharing.group_logits // vocabulary, 1)
        chosen: dict[int, list[Sampled]] = {}

        def compute(part: slice) -> None:
            for start in range(part.start, part.stop, group):
                rows = slice(start, min(start + group, part.stop))
                chosen[start] = self._own_chooser().choose(ours[rows], logits[rows])

        self._share(compute, len(ours), vocabulary * sum(map(self._work, ours)))
        return [sampled for start in sorted(chosen) for sampled in chosen[start]]

    def _share(self, compute: Compute, rows: int, work: int) -> None:
        threads = min(self.threads, rows // self._sharing.least_rows)
        if threads < 2 or work < 2 * LEAST_WORK:
            compute(slice(0, rows))
            return
        if self._team is None:
            self._team = Team(self.threads, "sampler")
        self._team.share(compute, rows, work // rows, most=threads)

    def _work(self, sampler: TokenSampler) -> int:
        return self._sharing.greedy_work if sampler.is_greedy else self._sharing.drawn_work

    def _own_chooser(self) -> Chooser:
        """That of the thread."""
        if not hasattr(self._choosers, "own"):
            self._choosers.own = Chooser(self._compiled)
        own: Chooser = self._choosers.own
        return own

    def close(self) -> None:
        if self._team is not None:
            self._team.close()
            self._team = None


def build_step_sampler(busy_cores: int) -> StepSampler:
    """With compiled code if there is any, on half of the cores that nothing keeps busy: threads of
    OpenMP wait busily for their next step on others."""
    compiled = compiled_rows.load()
    if compiled is None:
        log.warning(
            "tokens are chosen by NumPy, which takes several times as long as compiled code: no C "
            "compiler was found when rekindle was installed (install one, then rekindle again)"
        )
    threads = min((usable_cores() - busy_cores) // 2, _sharing(compiled).most_threads)
    return StepSampler(max(threads, 1), compiled)


def _sharing(compiled: CompiledRows | None) -> Sharing:
    return BY_NUMPY if compiled is None else COMPILED


def _ours(sampler: Sampler) -> TokenSampler:
    assert isinstance(sampler, TokenSampler)
    return sampler
