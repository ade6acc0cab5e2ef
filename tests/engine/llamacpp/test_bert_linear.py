"""Products in panels against plain ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from rekindle.engine.llamacpp.bert import COPIED, IN_PLACE, Tiling, Weights
from rekindle.engine.llamacpp.thread_team import MIN_WORK, Share, ThreadTeam, alone

INPUTS, OUTPUTS, SHARDS = 384, 192, 2


@pytest.fixture(scope="module")
def team() -> Iterator[ThreadTeam]:
    made = ThreadTeam(2, "test")
    yield made
    made.close()


@pytest.fixture(params=["alone", "shared"])
def share(request: pytest.FixtureRequest, team: ThreadTeam) -> Share:
    if request.param == "alone":
        return alone
    return lambda compute, count, _item_work: team.share(compute, count, MIN_WORK)


@pytest.mark.parametrize("tiling", [IN_PLACE, COPIED])
@pytest.mark.parametrize("count", [1, 7, 78, 79, 200])  # about what one product takes, and more
def test_shards_of_panels_make_what_the_whole_does(
    tiling: Tiling, count: int, share: Share
) -> None:
    random = np.random.default_rng(count)
    weight = random.standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    bias = random.standard_normal(OUTPUTS).astype(np.float32)
    rows = random.standard_normal((count, INPUTS)).astype(np.float32)
    weights = Weights(3 * weight.size, SHARDS, tiling)
    every = slice(0, SHARDS)
    whole = weights.whole(weight, bias)(rows, slice(0, 1), share)[0]
    by_outputs = weights.by_outputs(weight, bias)(rows, every, share)
    inputs = rows.reshape(count, SHARDS, -1).swapaxes(0, 1)
    by_inputs = weights.by_inputs(weight)(inputs, every, share)
    for made in (whole, np.concatenate(by_outputs, axis=1), by_inputs.sum(axis=0) + bias):
        assert np.allclose(made, rows @ weight.T + bias, atol=1e-3)
