"""A turn that is cancelled at any moment ends exactly once and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from rekindle.protocol.events import Cancelled, Finished
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.rounds import rounds

CANCELS = rounds(200, 10_000)
CANCELS_WITH_DISK = rounds(50, 1_000)
TALKS = 40  # conversations repeat, so that turns fetch and restore state
SALTS = (b"", b"other")


def begin(harness: RuntimeHarness, chance: Random) -> Reply:
    talk = chance.randrange(TALKS)
    tokens = [talk, *range(100, 100 + chance.randrange(1, 90)), chance.randrange(900)]
    return harness.submit(
        tokens,
        salt=chance.choice(SALTS),
        max_tokens=chance.randrange(1, 30),
        exact=chance.random() < 0.1,
        priority=chance.randrange(-2, 3),
    )


@pytest.mark.long
@pytest.mark.parametrize("can_truncate", [True, False])
@pytest.mark.parametrize("disk", [False, True])
def test_turns_cancelled_at_any_moment_free_all_their_resources(
    can_truncate: bool, disk: bool, tmp_path: Path
) -> None:
    engine = FakeEngine(pool_tokens=512, can_truncate=can_truncate)
    folder = tmp_path if disk else None
    harness = RuntimeHarness(engine, folder=folder, ram_bytes=20_000, idle_tokens=64)
    chance, live, cancelled = Random(7), list[Reply](), 0
    while cancelled < (CANCELS_WITH_DISK if disk else CANCELS):
        if len(live) < 12:
            live.append(begin(harness, chance))
        for _ in range(chance.randrange(4)):
            harness.take_events()
            harness.scheduler.step()
        victim = live.pop(chance.randrange(len(live)))
        harness.cancel(victim)
        assert victim.ended
        cancelled += isinstance(victim.events[-1], Cancelled)
        live = [reply for reply in live if not reply.ended]
        assert harness.scheduler.turns == len(live)
    harness.run(*live)
    assert all(isinstance(reply.events[-1], Finished) for reply in live)
    assert harness.scheduler.turns == 0
    harness.offload()
    assert harness.kv.make_room(engine.pool_tokens)
    assert engine.open_sequences == 0
    harness.close()
