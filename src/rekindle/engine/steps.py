"""Steps of replies, one after the other, where an engine has no faster way to take them."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from rekindle.engine.base import GoOn, Sampled, Work

Step = Callable[[Seq[Work]], list[Sampled | None]]


def run_on(step: Step, work: Seq[Work], go_on: GoOn | None) -> list[Sampled | None]:
    """What the last of the steps brings, as `Engine.step` promises it."""
    results = step(work)
    while go_on is not None and go_on(results):
        tokens = [sampled.token for sampled in results if sampled is not None]
        work = [item._replace(tokens=[token]) for item, token in zip(work, tokens, strict=True)]
        results = step(work)
    return results
