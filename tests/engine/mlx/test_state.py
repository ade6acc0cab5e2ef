"""Blocks and checkpoints restore mlx_lm's caches, for tiny models of every kind."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from rekindle.engine.mlx.layers import buffers, leaves
from rekindle.engine.mlx.layouts import Layouts
from rekindle.engine.mlx.state import StateLayout, share, truncate
from rekindle.errors import CorruptBlock
from tests.support.mlx_models import PROMPT, TRUNCATING, WHOLE, WINDOW, answer, step, tiny_model
from tests.support.rounds import rounds

FAMILIES = (*TRUNCATING, *WHOLE)
BLOCK = 16
MORE = [9, 8, 7, 6, 5]


def used(family: str, tokens: int, dtype: mx.Dtype = mx.float32) -> tuple[Any, Layouts, list[Any]]:
    """Return a model, its layouts, and caches with the start of the prompt."""
    model = tiny_model(family, dtype)
    layouts = Layouts(model, b"weights")
    caches = layouts.make_caches(layouts.default)
    for start in range(0, tokens, 20):
        step(model, caches, PROMPT[start : min(start + 20, tokens)])
    return model, layouts, caches


def exported(layout: StateLayout, caches: list[Any], tokens: int) -> list[bytes]:
    """Export a sequence in blocks, the last one resumable."""
    starts = range(0, tokens, BLOCK)
    return [
        layout.export_block(
            caches, start, min(start + BLOCK, tokens), resumable=start + BLOCK >= tokens
        )
        for start in starts
    ]


def restored(layout: StateLayout, caches: list[Any], blobs: list[bytes], tokens: int) -> list[Any]:
    for number, blob in enumerate(blobs):
        start, stop = number * BLOCK, min(number * BLOCK + BLOCK, tokens)
        layout.restore_block(caches, blob, start, stop, resumable=stop == tokens)
    return caches


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, mx.float32) for family in FAMILIES),
        *product(("llama", "gemma3", "mamba"), (mx.bfloat16, mx.float16)),
    ],
)
def test_restored_state_continues_bit_by_bit(family: str, dtype: mx.Dtype) -> None:
    for tokens in (1, WINDOW, 70):
        model, layouts, caches = used(family, tokens, dtype)
        layout = layouts[layouts.default]
        blobs = exported(layout, caches, tokens)
        again = restored(layout, layouts.make_caches(layouts.default), blobs, tokens)
        assert answer(model, again, MORE) == answer(model, caches, MORE)


@pytest.mark.parametrize("family", FAMILIES)
def test_state_exported_within_a_reply_continues_bit_by_bit(family: str) -> None:
    """A window that has wrapped around is not in position order."""
    model, layouts, caches = used(family, 60)
    answer(model, caches, MORE, 7)  # 72 positions
    layout = layouts[layouts.default]
    again = restored(layout, layouts.make_caches(layouts.default), exported(layout, caches, 72), 72)
    assert answer(model, again, [5], 4) == answer(model, caches, [5], 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_have_the_announced_size_and_do_not_change_later(family: str) -> None:
    model, layouts, caches = used(family, 40)
    layout = layouts[layouts.default]
    told = layouts.kv[layouts.default]
    before = layout.export_block(caches, 16, 32)
    assert len(before) == told.cells_bytes(16)
    resumable = layout.export_block(caches, 32, 40, resumable=True)
    assert len(resumable) == told.cells_bytes(8) + told.checkpoint_bytes
    assert layout.can_truncate == (family in TRUNCATING) == (told.checkpoint_bytes == 0)
    step(model, caches, MORE)
    assert layout.export_block(caches, 16, 32) == before
    assert layout.export_block(caches, 32, 40) == resumable[: told.cells_bytes(8)]


def test_a_checkpoint_of_a_partial_window_is_smaller() -> None:
    _, layouts, caches = used("gemma3", 3)
    layout = layouts[layouts.default]
    blob = layout.export_block(caches, 0, 3, resumable=True)
    told = layouts.kv[layouts.default]
    assert len(blob) - told.cells_bytes(3) < told.checkpoint_bytes / 4


def test_a_window_keeps_its_first_positions() -> None:
    """No model of mlx_lm does that, but a cache with `max_kv_size` does."""
    source = RotatingKVCache(max_size=8, keep=2)
    random_rows = [mx.random.normal((1, 1, size, 4)) for size in (6, 7, 1, 1)]
    for rows in random_rows[:3]:
        source.update_and_fetch(rows, rows)
        layout = StateLayout.of([source], [source])
        blob = layout.export_block([source], 0, source.offset, resumable=True)
        again = RotatingKVCache(max_size=8, keep=2)
        layout.restore_block([again], blob, 0, source.offset, resumable=True)
        [twin] = share([source], source.offset)
        for size in (1, 3):
            more = mx.random.normal((1, 1, size, 4))
            keys, _ = again.update_and_fetch(more, more)
            expected, _ = twin.update_and_fetch(more, more)
            assert keys.tolist() == expected.tolist()


def test_a_checkpoint_exists_only_at_the_end() -> None:
    for family in ("gemma3", "llama4"):
        _, layouts, caches = used(family, 30)
        with pytest.raises(ValueError, match="end"):
            layouts[layouts.default].export_block(caches, 0, 29, resumable=True)


def test_missing_positions_and_gaps_are_refused() -> None:
    _, layouts, caches = used("llama", 30)
    layout = layouts[layouts.default]
    with pytest.raises(ValueError, match="cache of 30 positions"):
        layout.export_block(caches, 16, 31)
    blob = layout.export_block(caches, 16, 30)
    with pytest.raises(ValueError, match="to a cache of 0"):
        layout.restore_block(layouts.make_caches(layouts.default), blob, 16, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_writes_to_a_shared_sequence_stay_private(family: str) -> None:
    model, _, caches = used(family, 50)
    _, _, fresh = used(family, 50)
    twin = share(caches, 50)
    answer(model, caches, [4, 4, 4])
    expected = answer(model, fresh, MORE)
    assert answer(model, twin, MORE) == expected


@pytest.mark.parametrize("family", TRUNCATING)
def test_a_prefix_is_shared_and_a_sequence_is_cut(family: str) -> None:
    model, _, caches = used(family, 50)
    _, _, fresh = used(family, 20)
    expected = answer(model, fresh, MORE)
    twin = share(caches, 20)
    assert answer(model, share(twin, 20), MORE) == expected
    assert answer(model, twin, MORE) == expected
    truncate(caches, 20)
    assert answer(model, caches, MORE) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_can_be_emptied(family: str) -> None:
    model, layouts, caches = used(family, 50)
    if family in WHOLE:
        with pytest.raises(ValueError, match="truncated"):
            truncate(caches, 20)
    truncate(caches, 0)
    assert answer(model, caches, MORE) == answer(model, layouts.make_caches(layouts.default), MORE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_foreign_blob_is_refused_and_changes_nothing(family: str) -> None:
    model, layouts, caches = used(family, 40)
    layout = layouts[layouts.default]
    rest = layout.export_block(caches, 16, 40, resumable=True)
    into = layouts.make_caches(layouts.default)
    layout.restore_block(into, layout.export_block(caches, 0, 16), 0, 16)
    cells = layouts.kv[layouts.default].cells_bytes(24)
    bad = [b"", rest[:-1], rest + b"\0", b"\0" + rest[1:], rest[:7], rest[: cells // 2], bytes(64)]
    if family in WHOLE:
        bad += [rest[:cells], rest[:cells] + b"\xff" * (len(rest) - cells)]
    for blob in bad:
        with pytest.raises(CorruptBlock):
            layout.restore_block(into, blob, 16, 40, resumable=True)
    with pytest.raises(CorruptBlock):
        layout.restore_block(into, rest, 16, 39, resumable=True)
    layout.restore_block(into, rest, 16, 40, resumable=True)
    assert answer(model, into, MORE, 1) == answer(model, caches, MORE, 1)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_damaged_blobs_are_refused_or_have_other_values_and_the_same_shapes(family: str) -> None:
    chance = random.Random(7)
    model, layouts, caches = used(family, 40)
    layout = layouts[layouts.default]
    whole = layout.export_block(caches, 0, 40, resumable=True)
    shapes = [[each.shape for each in arrays] for arrays in parsed(layout, caches)]
    header = [*range(8), *range(layouts.kv[layouts.default].cells_bytes(40), len(whole))]
    for _ in range(rounds(60, 3000)):
        blob = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            place = chance.choice((chance.randrange(len(blob)), chance.choice(header)))
            blob[place] = chance.randrange(256)
        blob = blob[: chance.choice((len(blob), len(blob), chance.randrange(len(blob))))]
        into = layouts.make_caches(layouts.default)
        try:
            layout.restore_block(into, blob, 0, 40, resumable=True)
        except CorruptBlock:
            continue
        assert [[each.shape for each in arrays] for arrays in parsed(layout, into)] == shapes
        step(model, into, [5])


def parsed(layout: StateLayout, caches: list[Any]) -> list[list[mx.array]]:
    """Return the arrays of each layer."""
    twin = share(caches, 40)
    return [
        [each for each in cache.cache if each is not None]
        if hasattr(cache, "cache")
        else [each[..., :1, :] for each in buffers(cache)]
        for cache in leaves(twin)
    ]


def test_a_buffer_is_not_copied_for_each_block() -> None:
    """It grows by a quarter, so the cost of copies is proportional to the restored state."""
    source = KVCache()
    rows = mx.zeros((1, 1, 4096, 4))
    source.update_and_fetch(rows, rows)
    layout = StateLayout.of([source], [source])
    blob = layout.export_block([source], 0, 64)
    into = KVCache()
    sizes = set()
    for start in range(0, 4096, 64):
        layout.restore_block([into], blob, start, start + 64)
        sizes.add(into.keys.shape[2])
    assert sum(sizes) < 6 * 4096
    assert into.keys.shape[2] < 4096 * 1.3
