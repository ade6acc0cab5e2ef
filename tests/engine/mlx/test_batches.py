"""Decoding batches have little padding."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

from rekindle.engine.base import EngineOptions, KvType, Work, run_step
from rekindle.engine.mlx.batches import by_length
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.engine.mlx.layers import STEP
from tests.contract.actions import GREEDY, prefill
from tests.support.tiny_mlx import write_tiny_mlx

LONG, SHORT, ROWS = 1200, 20, 8


def test_the_padding_of_a_group_is_bounded() -> None:
    chosen = random.Random(0)
    for _ in range(500):
        longest = chosen.choice([10, 1000, 100_000])
        lengths = {row: chosen.randint(1, longest) for row in range(chosen.randint(1, 16))}
        groups = by_length(lengths, STEP)
        assert sorted(row for group in groups for row in group) == list(lengths)
        for group in groups:
            cells = len(group) * max(lengths[row] for row in group)
            tokens = sum(lengths[row] for row in group)
            assert cells - tokens <= tokens + len(group) * STEP


def test_rows_of_similar_length_stay_together() -> None:
    assert by_length({}, 256) == []
    assert by_length({"a": 30_000, "b": 29_000, "c": 16_000}, 256) == [["a", "b", "c"]]
    assert by_length({"a": 5, "b": 250, "c": 90}, 256) == [["b", "c", "a"]]
    assert by_length({"a": 100, "b": 30_000, "c": 100, "d": 90}, 256) == [["b", "a"], ["c", "d"]]


def test_the_padding_of_all_groups_fits_into_the_free_tokens() -> None:
    chosen = random.Random(0)
    for _ in range(500):
        lengths = {row: chosen.randint(1, 1000) for row in range(chosen.randint(1, 16))}
        free = chosen.choice([0, 100, 1000])
        groups = by_length(lengths, STEP, free)
        assert sorted(row for group in groups for row in group) == list(lengths)
        widths = [len(group) * max(lengths[row] for row in group) for group in groups]
        assert sum(widths) - sum(lengths.values()) <= free


def test_growing_rows_rarely_change_groups() -> None:
    chosen = random.Random(0)
    for _ in range(50):
        lengths = {row: chosen.randint(1, 3000) for row in range(8)}
        arranged = [
            by_length({row: each + more for row, each in lengths.items()}, STEP)
            for more in range(0, 3000, 10)
        ]
        assert sum(one != two for one, two in pairwise(arranged)) <= 8
        assert len(arranged[-1]) == 1


def held_bytes(engine: MlxEngine, kv_type: KvType) -> int:
    found = engine._batches[kv_type]._batches
    return sum(cache.nbytes for batch in found for cache in batch._caches)


def test_a_full_pool_has_no_padding(tmp_path: Path) -> None:
    """Rows decode by themselves rather than take more memory than the KV budget has."""
    path = write_tiny_mlx(tmp_path / "tiny")
    engine = MlxEngine(EngineOptions(path=path, parallel=2, context_tokens=512))
    sequences = [engine.sequences.open(exact=False) for _ in range(2)]
    for each, tokens in zip(sequences, (300, 200), strict=True):
        prefill(engine, each, [3] * tokens)
    filler = engine.sequences.open(exact=False)
    work = [Work(each, [5], engine.sampler(GREEDY, [])) for each in sequences]
    for free, batches in ((102, 1), (99, 0)):
        tokens = engine.sequences.free_tokens() - free
        engine.sequences.grow(filler, tokens)
        run_step(engine, work)
        found = engine._batches[engine.capabilities.kv_type]._batches
        assert len(found) == batches
    engine.close()


def test_one_long_row_does_not_widen_the_others(tmp_path: Path) -> None:
    path = write_tiny_mlx(tmp_path / "tiny", "llama-wide")
    engine = MlxEngine(EngineOptions(path=path, parallel=ROWS, context_tokens=4096))
    for kv_type in (engine.capabilities.kv_type, list(engine.capabilities.kv)[-1]):
        sequences = [engine.sequences.open(exact=False, kv_type=kv_type) for _ in range(ROWS)]
        for number, each in enumerate(sequences):
            tokens = LONG if number == 3 else SHORT
            prefill(engine, each, [3 + (7 * n + number) % 200 for n in range(tokens)])
        for _ in range(3):
            run_step(engine, [Work(each, [5], engine.sampler(GREEDY, [])) for each in sequences])
        tokens = sum(each.length for each in sequences)
        cells = 2 * tokens + 2 * ROWS * STEP  # and buffers grow by as much
        token_bytes = engine.capabilities.kv[kv_type].token_bytes
        assert 0 < held_bytes(engine, kv_type) <= cells * token_bytes < ROWS * LONG * token_bytes
        for each in sequences:
            engine.sequences.close(each)
    engine.close()
