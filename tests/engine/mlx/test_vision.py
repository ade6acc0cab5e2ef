"""Pictures on MLX have the logits of mlx_vlm, and keep nothing in the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def computed_logits(
    engine: MlxEngine, pictures: Sequence[Picture], *, exact: bool, chunk: int = 1000
) -> Row:
    """Prefill as the runtime does: text and the spans of pictures in steps of their own."""
    tokens, seen = prompt(engine, pictures), list[Row]()
    engine.observe = lambda _sequence, row: seen.append(np.array(row))
    vectors = [each for picture in pictures for each in engine.encode_picture(picture)]
    sequence, ids = engine.sequences.open(exact=exact), tokens.ids()
    edges = [edge for span in tokens.media for edge in (span.start, span.stop)]
    for start, stop in zip([0, *edges], [*edges, len(ids)], strict=True):
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
