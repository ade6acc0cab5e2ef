"""The choices of a whole step: its rows of logits, shared by the cores there are."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from ctypes import CDLL
from threading import local
from typing import NamedTuple

from rekindle.engine.base import Matrix, Sampled, Sampler
from rekindle.engine.sampling import native as compiled_rows
from rekindle.engine.sampling.native import RowChooser
from rekindle.engine.sampling.sampler import Chooser, TokenSampler, first_choices
from rekindle.engine.team import LEAST_WORK, Compute, Team
from rekindle.protocol.settings import usable_cores

log = logging.getLogger("rekindle.engine")


#: What a group of rows has at most: few calls of NumPy, each of which needs the interpreter's lock,
#: and still in a core's cache.
GROUP_LOGITS = 800_000

_MOST_THREADS, _LEAST_ROWS = 4, 16  # with more of them, or fewer rows each, they wait for that lock
_DRAWN, _GREEDY = 70, 14  # work of a logit, as a team counts it

_MOST_COMPILED_THREADS = 8
_SHARED_LOGITS = 750_000  # that are worth several threads; of a row that is drawn from, each as
_DRAWN_LOGITS = 5  # as many


class Ahead(NamedTuple):
    """What is known of a step before its logits are."""

    samplers: list[TokenSampler]
    choices: bytes  # by which their tokens are going to be chosen


class StepSampler:
    """Used by one thread at a time. What it chooses depends neither on its threads nor on which
    rows come together."""

    def __init__(self, threads: int, compiled: CDLL | None) -> None:
        """`threads` counts the one that asks; without compiled code NumPy chooses."""
        self.threads = threads
        self._compiled = None if compiled is None else RowChooser(compiled, threads)
        self._ahead: Ahead | None = None
        self._team: Team | None = None
        self._choosers = local()

    def arm(self, samplers: Seq[Sampler], vocabulary: int) -> bool:
        """Wake threads for a step whose logits a device is computing, and do what can be done
        without them; whether that is worth it."""
        ours = [_ours(sampler) for sampler in samplers]
        if self._compiled is None or not self._is_shared(ours, vocabulary):
            return False
        self._compiled.arm()
        self._ahead = Ahead(ours, first_choices(ours))
        return True

    def sample(self, samplers: Seq[Sampler], logits: Matrix) -> list[Sampled]:
        """The next token of each reply, from a row of logits each, which are used up."""
        ours = [_ours(sampler) for sampler in samplers]
        if self._compiled is None:
            return self._sample_by_numpy(ours, logits)
        ahead, self._ahead = self._ahead, None
        choices = ahead.choices if ahead and ahead.samplers == ours else None
        together = self._is_shared(ours, logits.shape[1])
        return self._own_chooser().choose(ours, logits, choices, together=together)

    def _is_shared(self, samplers: Seq[TokenSampler], vocabulary: int) -> bool:
        rows = sum(1 if each.is_greedy else _DRAWN_LOGITS for each in samplers)
        return self.threads > 1 and rows * vocabulary >= _SHARED_LOGITS

    def _sample_by_numpy(self, samplers: list[TokenSampler], logits: Matrix) -> list[Sampled]:
        vocabulary = logits.shape[1]
        group = max(GROUP_LOGITS // vocabulary, 1)
        chosen: dict[int, list[Sampled]] = {}

        def compute(part: slice) -> None:
            for start in range(part.start, part.stop, group):
                rows = slice(start, min(start + group, part.stop))
                chosen[start] = self._own_chooser().choose(samplers[rows], logits[rows])

        self._share(compute, len(samplers), vocabulary * sum(map(_work, samplers)))
        return [sampled for start in sorted(chosen) for sampled in chosen[start]]

    def _share(self, compute: Compute, rows: int, work: int) -> None:
        threads = min(self.threads, rows // _LEAST_ROWS)
        if threads < 2 or work < 2 * LEAST_WORK:
            compute(slice(0, rows))
            return
        if self._team is None:
            self._team = Team(self.threads, "sampler")
        self._team.share(compute, rows, work // rows, most=threads)

    def _own_chooser(self) -> Chooser:
        """That of the thread."""
        if not hasattr(self._choosers, "own"):
            self._choosers.own = Chooser(self._compiled)
        own: Chooser = self._choosers.own
        return own

    def close(self) -> None:
        if self._compiled is not None:
            self._compiled.close()
        if self._team is not None:
            self._team.close()
            self._team = None


def build_step_sampler(busy_cores: int) -> StepSampler:
    """With compiled code if there is any, on half of the cores that nothing keeps busy: threads of
    OpenMP wait busily for their next step on others, and compiled code beside them takes one."""
    compiled = compiled_rows.load()
    threads = (usable_cores() - busy_cores) // 2
    if compiled is None:
        log.warning(
            "tokens are chosen by NumPy, which takes several times as long as compiled code: %s "
            "(see that there is a C compiler, `cc`, and install rekindle again)",
            compiled_rows.trouble(),
        )
        return StepSampler(max(min(threads, _MOST_THREADS), 1), None)
    most = 1 if busy_cores else _MOST_COMPILED_THREADS
    return StepSampler(max(min(threads, most), 1), compiled)


def _ours(sampler: Sampler) -> TokenSampler:
    assert isinstance(sampler, TokenSampler)
    return sampler


def _work(sampler: TokenSampler) -> int:
    return _GREEDY if sampler.is_greedy else _DRAWN
