"""Engines that take images keep these promises."""

from __future__ import annotations

import numpy as np
import pytest

from rekindle.engine.base import Engine, Matrix, Sequence, Work, run_step
from rekindle.errors import Unsupported
from rekindle.protocol.requests import Picture
from rekindle.tokens import Media, Tokens
from tests.contract.actions import GREEDY, PROMPT, blocks, decode, prefill
from tests.contract.engines import blind_engines, seeing_engines, splitting_engines
from tests.support.pictures import drawn

BEFORE, AFTER = PROMPT[:10], PROMPT[10:20]


def encoded(engine: Engine, picture: Picture) -> tuple[Tokens, Media, Matrix]:
    tokens = engine.picture_tokens(picture.width, picture.height, picture.digest)
    [span], [vectors] = tokens.media, engine.encode_picture(picture)
    return tokens, span, vectors


def show(engine: Engine, sequence: Sequence, picture: Picture, *, cut: int | None = None) -> None:
    """Append an image, in one step or in two."""
    tokens, span, vectors = encoded(engine, picture)
    ids = tokens.ids()
    if span.start:
        run_step(engine, [Work(sequence, ids[: span.start], None)])
    for rows in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        run_step(engine, [Work(sequence, ids[span.start : span.stop][rows], None, vectors[rows])])
    if ids[span.stop :]:
        run_step(engine, [Work(sequence, ids[span.stop :], None)])


def answer(engine: Engine, *pictures: Picture, exact: bool = False) -> list[int]:
    sequence = engine.sequences.open(exact=exact)
    run_step(engine, [Work(sequence, BEFORE, None)])
    for picture in pictures:
        show(engine, sequence, picture)
    said = ask(engine, sequence)
    engine.sequences.close(sequence)
    return said


def ask(engine: Engine, sequence: Sequence) -> list[int]:
    [sampled] = run_step(engine, [Work(sequence, AFTER, engine.sampler(GREEDY, AFTER))])
    assert sampled is not None
    return decode(engine, sequence, sampled.token, 8)


@seeing_engines
def test_an_image_has_a_vector_for_each_token(engine: Engine) -> None:
    assert engine.capabilities.modalities == {"text", "image"}
    tokens, span, vectors = encoded(engine, drawn(1))
    assert len(vectors) == span.length >= span.positions
    assert len(tokens) - span.length == len([each for each in tokens if each < 1 << 31])
    assert vectors.dtype == np.float32
    assert np.array_equal(vectors, engine.encode_picture(drawn(1))[0])


@seeing_engines
@pytest.mark.parametrize("exact", [False, True])
def test_the_reply_depends_only_on_the_image(engine: Engine, exact: bool) -> None:
    one, other = drawn(1), drawn(2)
    said = {order: answer(engine, *order, exact=exact) for order in ((one,), (one, other))}
    assert answer(engine, one, exact=exact) == said[one,]
    assert answer(engine, one, other, exact=exact) == said[one, other]
    first, second = (engine.encode_picture(each)[0] for each in (one, other))
    assert not np.array_equal(first, second)


@seeing_engines
def test_images_and_text_of_several_sequences_share_a_step(engine: Engine) -> None:
    expected = [answer(engine, drawn(seed)) for seed in (1, 2)]
    sequences = [engine.sequences.open(exact=False) for _ in range(3)]
    shown = [encoded(engine, drawn(seed)) for seed in (1, 2)]
    for sequence, (tokens, span, _) in zip(sequences, shown, strict=False):
        run_step(engine, [Work(sequence, [*BEFORE, *tokens.ids()[: span.start]], None)])
    pictures = [
        Work(sequence, tokens.ids()[span.start : span.stop], None, vectors)
        for sequence, (tokens, span, vectors) in zip(sequences, shown, strict=False)
    ]
    text = Work(sequences[2], PROMPT[:30], engine.sampler(GREEDY, []))
    *nothing, sampled = run_step(engine, [*pictures, text])
    assert nothing == [None, None]
    assert sampled is not None
    for sequence, (tokens, span, _), said in zip(sequences, shown, expected, strict=False):
        if rest := tokens.ids()[span.stop :]:
            run_step(engine, [Work(sequence, rest, None)])
        assert ask(engine, sequence) == said


@pytest.mark.parametrize(
    "engine",
    [
        *("fake", "numpy", "llama", "gemma3", "qwen2vl"),
        *("mlx-vision-llava", "mlx-vision-qwen2_vl", "mlx-vision-qwen3_vl"),
    ],
    indirect=True,
)
def test_an_image_is_restored_from_blocks(engine: Engine) -> None:
    sequence, size = engine.sequences.open(exact=True), engine.capabilities.block_tokens
    prefill(engine, sequence, PROMPT[: size - 6])
    show(engine, sequence, drawn(3))
    prefill(engine, sequence, [*PROMPT[: size - 6], *[0] * (sequence.length - size + 6), *BEFORE])
    stop = sequence.length - sequence.length % size
    kept = blocks(engine, sequence, stop)
    tail = engine.sequences.export(sequence, stop, sequence.length)
    into = engine.sequences.open(exact=True)
    for blob in kept:
        engine.sequences.restore(into, blob, size)
    engine.sequences.restore(into, tail, sequence.length - stop)
    assert ask(engine, into) == ask(engine, sequence)


@splitting_engines
def test_an_image_is_split_into_steps_if_the_engine_allows_it(engine: Engine) -> None:
    assert not engine.capabilities.whole_pictures
    whole, cut = engine.sequences.open(exact=True), engine.sequences.open(exact=True)
    show(engine, whole, drawn(4))
    show(engine, cut, drawn(4), cut=5)
    assert ask(engine, cut) == ask(engine, whole)


@seeing_engines
def test_vectors_of_another_shape_are_refused(engine: Engine) -> None:
    sequence = engine.sequences.open(exact=False)
    _, span, vectors = encoded(engine, drawn(1))
    with pytest.raises(ValueError, match="vectors"):
        run_step(engine, [Work(sequence, [0] * span.length, None, vectors[1:])])


@blind_engines
def test_images_without_a_projector_are_refused(engine: Engine) -> None:
    assert engine.capabilities.modalities == {"text"}
    with pytest.raises(Unsupported):
        engine.picture_tokens(8, 8, b"digest")
    with pytest.raises(Unsupported):
        engine.encode_picture(drawn(1))
