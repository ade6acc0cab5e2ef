"""Samples the next tokens of all replies in a step."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from ctypes import CDLL

from rekindle.engine.base import Matrix, Sampled, Sampler
from rekindle.engine.sampling import native
from rekindle.engine.sampling.native import NativeSampler
from rekindle.engine.sampling.sampler import TokenSampler, sample_rows
from rekindle.protocol.settings import usable_cores

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
