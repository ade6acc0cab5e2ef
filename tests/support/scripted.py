"""A fake engine that says what it is told to, so that real replies pass through a real runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from rekindle.engine.base import Constraint, Sampler, Work
from rekindle.engine.sampling import Sampled, Sampling
from tests.support.fake import FakeEngine


@dataclass
class ScriptedEngine(FakeEngine):
    """Each reply follows the next script; its state is still that of all its tokens."""

    context_tokens: int = 1 << 16
    pool_tokens: int = 1 << 17
    scripts: deque[list[int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lines: dict[int, Iterator[int]] = {}

    def sampler(
        self, sampling: Sampling, prompt: Seq[int], constraint: Constraint | None = None
    ) -> Sampler:
        sampler = super().sampler(sampling, prompt, constraint)
        self._lines[id(sampler)] = iter(self.scripts.popleft())
        return sampler

    def step(self, work: Seq[Work]) -> list[Sampled | None]:
        results = super().step(work)
        return [
            Sampled(next(self._lines[id(item.sampler)])) if item.sampler else None
            for item, _ in zip(work, results, strict=True)
        ]
