"""Quantised sequences in a batch give the same replies as single ones."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rekindle.engine.mlx.layouts import Layouts
from tests.support.mlx_models import PROMPT, greedy, step, tiny_model

LENGTHS = (5, 40, 23)
STEPS = 10
#: Of a logit. In another order of additions a value now and then falls on the other side of a
#: quantised step; logits are about 5.
TOLERANCE = {"q8_g64": 0.05, "q4_g32": 0.5}


class Alone:
    """The reply of a single sequence: greedy tokens with their logits."""

    def __init__(self, layouts: Layouts, model: Any, kv_type: str, prompt: list[int]) -> None:
        self.caches = prefilled(layouts, model, kv_type, prompt)
        caches = prefilled(layouts, model, kv_type, prompt)
        self.tokens, self.logits = [PROMPT[-1]], []
        for _ in range(STEPS):
            self.logits.append(step(model, caches, self.tokens[-1:]))
            self.tokens.append(greedy(self.logits[-1]))
        self.done = 0

    def check(self, logits: mx.array, tolerance: float) -> None:
        """The next logits of a batch's row; the next token is nearly, or really, the greatest."""
        mine, expected = np.asarray(logits), np.asarray(self.logits[self.done])
        self.done += 1
        assert np.abs(mine - expected).max() < tolerance
        assert mine.max() - mine[self.tokens[self.done]] < tolerance


def prefilled(layouts: Layouts, model: Any, kv_type: str, tokens: list[int]) -> list[Any]:
    caches = layouts.make_caches(kv_type)
    step(model, caches, tokens)
    return caches


def merged(sequences: list[list[Any]]) -> list[Any]:
    return [caches[0].merge(caches) for caches in zip(*sequences, strict=True)]


def decode(model: Any, batch: list[Any], rows: list[Alone], tolerance: float) -> None:
    """Decode one step of every row."""
    tokens = mx.array([[row.tokens[row.done]] for row in rows])
    logits = model(tokens, cache=batch)[:, -1]
    mx.eval(logits, [each.state for each in batch])
    for row, mine in zip(rows, logits, strict=True):
        row.check(mine, tolerance)


@pytest.mark.parametrize("kv_type", ["q8_g64", "q4_g32"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2", "falcon_h1"])
def test_joining_and_leaving_rows_do_not_affect_the_others(family: str, kv_type: str) -> None:
    model = tiny_model(family)
    layouts = Layouts(model, b"weights")
    tolerance = TOLERANCE[kv_type]
    one, longest, late = (
        Alone(layouts, model, kv_type, PROMPT[start : start + length])
        for start, length in enumerate(LENGTHS)
    )
    batch = merged([one.caches, longest.caches])
    for _ in range(4):
        decode(model, batch, [one, longest], tolerance)
    for mine, other in zip(batch, merged([late.caches]), strict=True):
        mine.extend(other)
    for _ in range(3):
        decode(model, batch, [one, longest, late], tolerance)
    leaving = [each.extract(1) for each in batch]
    for each in batch:
        each.filter([2, 0])
    for _ in range(3):
        decode(model, batch, [late, one], tolerance)
    longest.check(step(model, leaving, [longest.tokens[longest.done]]), tolerance)
    assert [each.done for each in (one, longest, late)] == [10, 8, 6]


def test_a_row_leaves_with_its_own_state() -> None:
    model = tiny_model("llama")
    layouts = Layouts(model, b"weights")
    sequences = [prefilled(layouts, model, "q8_g64", PROMPT[:length]) for length in LENGTHS]
    layout = layouts["q8_g64"]
    before = [
        layout.export_block(caches, 0, length)
        for caches, length in zip(sequences, LENGTHS, strict=True)
    ]
    batch = merged(sequences)
    for place, (blob, length) in enumerate(zip(before, LENGTHS, strict=True)):
        row = [each.extract(place) for each in batch]
        assert layout.export_block(row, 0, length) == blob
    for each in batch:
        each.filter([0, 2])
    assert layout.export_block([each.extract(1) for each in batch], 0, 23) == before[2]
    assert batch[0].size() == 23


def test_a_batch_may_start_empty_and_grow_beyond_its_capacity() -> None:
    model = tiny_model("llama")
    layouts = Layouts(model, b"weights")
    empty = [layouts.make_caches("q8_g64") for _ in range(2)]
    batch = merged(empty)
    assert batch[0].empty()
    assert batch[0].nbytes == 0
    tokens = mx.array([PROMPT[:40] * 8, PROMPT[1:41] * 8])
    logits = model(tokens, cache=batch)[:, -1]
    more = model(mx.array([[5], [5]]), cache=batch)[:, -1]
    assert batch[0].size() == 321
    assert batch[0].nbytes
    for row, prompt in enumerate((PROMPT[:40] * 8, PROMPT[1:41] * 8)):
        caches = layouts.make_caches("q8_g64")
        assert mx.allclose(step(model, caches, prompt), logits[row], rtol=0, atol=0.05).item()
        assert mx.allclose(step(model, caches, [5]), more[row], rtol=0, atol=0.05).item()
    newcomer = merged([layouts.make_caches("q8_g64")])
    for mine, other in zip(batch, newcomer, strict=True):
        mine.extend(other)
    assert batch[0].extract(2).size() == 0
    assert batch[0].extract(1).size() == 321
