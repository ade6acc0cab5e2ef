"""Pictures on MLX have the logits of mlx_vlm, and keep nothing in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Row, Work, run_step
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.protocol.requests import Picture
from rekindle.tokens import Tokens
from tests.contract.actions import GREEDY, PROMPT
from tests.support.pictures import drawn
from tests.support.tiny_vision import FAMILIES, write_tiny_vision
from tests.support.vlm_reference import reference_logits

BEFORE, BETWEEN, AFTER = PROMPT[:7], PROMPT[7:10], PROMPT[10:18]
#: Wide, high, small, and much larger than a tower's square.
PICTURES = (drawn(1), drawn(2, 30, 61), drawn(3, 9, 9), drawn(4, 200, 90))


def open_engine(path: Path) -> MlxEngine:
    return MlxEngine(EngineOptions(path=path, mmproj=path, parallel=3, context_tokens=600))


@pytest.fixture(params=FAMILIES)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MlxEngine]:
    built = open_engine(write_tiny_vision(tmp_path / request.param, request.param))
    yield built
    built.close()


def prompt(engine: MlxEngine, pictures: Sequence[Picture]) -> Tokens:
    tokens = Tokens.of(BEFORE)
    for picture in pictures:
        shown = engine.picture_tokens(picture.width, picture.height, picture.digest)
        tokens = tokens + shown + Tokens.of(BETWEEN)
    return tokens + Tokens.of(AFTER)


def edges(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """The runs of text and the pictures, in order."""
    inner = [edge for span in tokens.media for edge in (span.start, span.stop)]
    return ((a, b) for a, b in pairwise([0, *inner, len(tokens)]) if a < b)


def computed_logits(
    engine: MlxEngine, pictures: Sequence[Picture], *, exact: bool, chunk: int = 1000
) -> Row:
    """Prefill as the runtime does: text and the spans of pictures in steps of their own."""
    tokens, seen = prompt(engine, pictures), list[Row]()
    engine.observe = lambda _sequence, row: seen.append(np.array(row))
    vectors = [each for picture in pictures for each in engine.encode_picture(picture)]
    sequence, ids = engine.sequences.open(exact=exact), tokens.ids()
    for start, stop in edges(tokens):
        shown = next((n for n, span in enumerate(tokens.media) if span.start == start), None)
        for at in range(start, stop, chunk):
            until = min(at + chunk, stop)
            rows = None if shown is None else vectors[shown][at - start : until - start]
            sampler = engine.sampler(GREEDY, []) if until == len(ids) else None
            run_step(engine, [Work(sequence, ids[at:until], sampler, rows)])
    engine.sequences.close(sequence)
    [row] = seen
    return row


@pytest.mark.parametrize("shown", [PICTURES[:1], PICTURES[1:3], PICTURES[3:]])
def test_logits_equal_those_of_mlx_vlm(
    engine: MlxEngine, tmp_path: Path, shown: tuple[Picture, ...]
) -> None:
    folder = tmp_path / engine.capabilities.architecture
    expected = reference_logits(folder, prompt(engine, shown).ids(), shown)
    for exact in (False, True):
        found = computed_logits(engine, shown, exact=exact)
        assert np.abs(found - expected[: len(found)]).max() < 1e-3 * np.abs(expected).max()


@pytest.mark.parametrize("engine", sorted(set(FAMILIES) - {"gemma3"}), indirect=True)
def test_a_picture_may_be_cut_into_chunks(engine: MlxEngine) -> None:
    """Not with Gemma 3, where every vector of a picture attends to all others."""
    whole, cut = (computed_logits(engine, PICTURES[1:3], exact=True, chunk=n) for n in (1000, 3))
    assert np.abs(whole - cut).max() < 1e-3 * np.abs(whole).max()


def test_sequences_with_different_pictures_decode_in_one_batch(engine: MlxEngine) -> None:
    """Positions of M-RoPE differ from row to row."""
    shown: tuple[tuple[Picture, ...], ...] = (PICTURES[:1], (), PICTURES[2:4])
    alone = [replies(engine, [pictures]) for pictures in shown]
    together = replies(engine, shown)
    for found, [expected] in zip(together, alone, strict=True):
        assert np.abs(found - expected).max() < 1e-3 * np.abs(expected).max()


def replies(engine: MlxEngine, shown: Sequence[Sequence[Picture]]) -> list[Row]:
    """The logits behind each of four fixed tokens, which all sequences append together."""
    sequences = [engine.sequences.open(exact=False) for _ in shown]
    for sequence, pictures in zip(sequences, shown, strict=True):
        tokens = prompt(engine, pictures)
        vectors = [each for picture in pictures for each in engine.encode_picture(picture)]
        spans = {span.start: rows for span, rows in zip(tokens.media, vectors, strict=True)}
        for start, stop in edges(tokens):
            part = tokens.ids()[start:stop]
            run_step(engine, [Work(sequence, part, None, spans.get(start))])
    rows: dict[int, list[Row]] = {sequence.slot: [] for sequence in sequences}
    engine.observe = lambda sequence, row: rows[sequence.slot].append(np.array(row))
    for token in (40, 50, 60, 70):
        run_step(engine, [Work(each, [token], engine.sampler(GREEDY, [])) for each in sequences])
    engine.observe = None
    for sequence in sequences:
        engine.sequences.close(sequence)
    return [np.array(rows[sequence.slot]) for sequence in sequences]
