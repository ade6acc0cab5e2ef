"""Sequences with images keep their positions when they are cut, moved or restored (M-RoPE)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Matrix, Sequence, Work, run_step
from rekindle.engine.llamacpp import vision as mtmd
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import CorruptBlock
from rekindle.protocol.requests import Picture
from tests.contract.actions import GREEDY, PROMPT
from tests.support.pictures import drawn
from tests.support.tiny import WIDTH
from tests.support.tiny_projector import write_qwen2vl_projector
from tests.support.tiny_qwen import DEEP_LAYERS, write_qwen2vl, write_qwen3vl, write_qwen35

WIDE, HIGH = drawn(1, 160, 64), drawn(2, 48, 112)  # 10 x 4 and 3 x 7 vectors
ROUNDING = 0.2  # of logits of about 10: cells that lie elsewhere are added up in another order
Row = np.ndarray[Any, np.dtype[np.float32]]
MODELS: dict[str, tuple[Callable[[Path], Path], int]] = {  # and how wide vectors of pictures are
    "qwen2vl": (partial(write_qwen2vl, head_width=32), WIDTH),
    "qwen3vl": (partial(write_qwen3vl, head_width=32), WIDTH * (1 + DEEP_LAYERS)),
    "qwen35": (write_qwen35, WIDTH),
}
Run = tuple[list[int], Matrix | None]  # tokens, of text or of a picture


@contextmanager
def loaded(name: str, folder: Path) -> Iterator[LlamaCppEngine]:
    write, width = MODELS[name]
    engine = LlamaCppEngine(
        EngineOptions(
            path=write(folder / "tiny.gguf"),
            mmproj=write_qwen2vl_projector(folder / "mmproj.gguf", width=width),
            parallel=4,
            threads=1,
            context_tokens=512,
        )
    )
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module", params=["qwen2vl", "qwen3vl"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlamaCppEngine]:
    with loaded(request.param, tmp_path_factory.mktemp("model")) as built:
        yield built


def prompt(engine: LlamaCppEngine) -> list[Run]:
    """Text, an image, text, and two images in a row."""
    runs: list[Run] = [(PROMPT[:9], None)]
    for picture, text in ((WIDE, PROMPT[9:20]), (HIGH, []), (WIDE, PROMPT[20:25])):
        tokens = engine.picture_tokens(picture.width, picture.height, picture.digest)
        [span], [vectors] = tokens.media, engine.encode_picture(picture)
        runs.append((tokens.ids()[span.start : span.stop], vectors))
        if text:
            runs.append((text, None))
    return runs


def run(
    engine: LlamaCppEngine, sequence: Sequence, runs: list[Run], stop: int | None = None
) -> None:
    """Compute the missing tokens of a sequence up to `stop`, one step per run."""
    begin = 0
    for tokens, vectors in runs:
        own = slice(max(sequence.length - begin, 0), None if stop is None else max(stop - begin, 0))
        begin += len(tokens)
        if tokens[own]:
            rows = None if vectors is None else vectors[own]
            run_step(engine, [Work(sequence, tokens[own], None, rows)])


def logits(engine: LlamaCppEngine, sequence: Sequence) -> Row:
    """Return the logits after some more text."""
    rows: list[Row] = []
    engine.observe = lambda _sequence, row: rows.append(row.copy())
    run_step(engine, [Work(sequence, PROMPT[30:37], engine.sampler(GREEDY, []))])
    engine.observe = None
    return rows[0]


@pytest.fixture(scope="module")
def runs(engine: LlamaCppEngine) -> list[Run]:
    return prompt(engine)


@pytest.fixture(scope="module")
def expected(engine: LlamaCppEngine, runs: list[Run]) -> Row:
    sequence = engine.sequences.open(exact=True)
    run(engine, sequence, runs)
    found = logits(engine, sequence)
    engine.sequences.close(sequence)
    return found


def length(runs: list[Run]) -> int:
    return sum(len(tokens) for tokens, _ in runs)


def test_an_image_advances_positions_by_its_longer_side(engine: LlamaCppEngine) -> None:
    for picture, tokens, positions in ((WIDE, 40, 10), (HIGH, 21, 7)):
        [span] = engine.picture_tokens(picture.width, picture.height, picture.digest).media
        assert (span.length, span.positions) == (tokens, positions)


# -- positions are those of llama.cpp's own helper -----------------------------------------------


def helped(engine: LlamaCppEngine, texts: list[bytes], pictures: list[Picture]) -> Row:
    """Return the last logits of llama.cpp's own helper for text with images."""
    library, projector = mtmd.load_mtmd(), engine._vision
    sequence = engine.sequences.open(exact=True)
    context = engine._exact[sequence.slot]
    bitmaps = [
        library.mtmd_bitmap_init(
            each.width, each.height, (ctypes.c_uint8 * len(each.pixels))(*each.pixels)
        )
        for each in pictures
    ]
    written = [mtmd.InputText(text, len(text), False, False) for text in texts]
    parts = [mtmd.InputPart(ctypes.pointer(written[0]), None)]
    for text, bitmap in zip(written[1:], bitmaps, strict=True):
        parts += mtmd.InputPart(None, bitmap), mtmd.InputPart(ctypes.pointer(text), None)
    pointers = (ctypes.POINTER(mtmd.InputPart) * len(parts))(*map(ctypes.pointer, parts))
    chunks = library.mtmd_input_chunks_init()
    library.mtmd_tokenize_from_parts(projector._native, chunks, pointers, len(parts), False)
    native = [ctypes.c_void_p(each) for each in (projector._native, context.native, chunks)]
    status = library.mtmd_helper_eval_chunks(
        *native, 0, 0, 64, ctypes.c_bool(True), ctypes.byref(ctypes.c_int32())
    )
    assert status == 0
    row: Row = context.logits([-1], engine.tokenizer.size)[0].copy()
    for bitmap in bitmaps:
        library.mtmd_bitmap_free(bitmap)
    library.mtmd_input_chunks_free(chunks)
    engine.sequences.close(sequence)
    return row


def computed(engine: LlamaCppEngine, texts: list[bytes], pictures: list[Picture]) -> Row:
    sequence = engine.sequences.open(exact=True)
    ids = engine.tokenizer.encode(texts[0].decode(), special=False)
    for text, picture in zip(texts[1:], pictures, strict=True):
        tokens = engine.picture_tokens(picture.width, picture.height, picture.digest)
        [span], [vectors] = tokens.media, engine.encode_picture(picture)
        own = tokens.ids()
        run_step(engine, [Work(sequence, ids + own[: span.start], None)])
        run_step(engine, [Work(sequence, own[span.start : span.stop], None, vectors)])
        ids = own[span.stop :] + engine.tokenizer.encode(text.decode(), special=False)
    rows: list[Row] = []
    engine.observe = lambda _sequence, row: rows.append(row.copy())
    run_step(engine, [Work(sequence, ids, engine.sampler(GREEDY, []))])
    engine.observe = None
    engine.sequences.close(sequence)
    return rows[0]


@pytest.mark.parametrize("pictures", [[WIDE], [HIGH], [WIDE, HIGH]], ids=["wide", "high", "both"])
def test_a_prompt_gives_the_same_logits_as_the_helper_of_llama_cpp(
    engine: LlamaCppEngine, pictures: list[Picture]
) -> None:
    texts = [b"What is ", b" and then ", b" there?"][-len(pictures) - 1 :]
    assert np.array_equal(computed(engine, texts, pictures), helped(engine, texts, pictures))


# -- cutting and moving --------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 7, 16, 50])
def test_blocks_that_end_inside_images_restore_the_sequence(
    engine: LlamaCppEngine, runs: list[Run], expected: Row, block: int
) -> None:
    sequence, into, total = (
        engine.sequences.open(exact=True),
        engine.sequences.open(exact=True),
        length(runs),
    )
    run(engine, sequence, runs)
    layout = engine.sequences.layouts["f16"]
    for start in range(0, total, block):
        stop = min(start + block, total)
        blob = engine.sequences.export(sequence, start, stop)
        assert len(blob) == layout.fixed + (stop - start) * layout.each
        engine.sequences.restore(into, blob, stop - start)
        assert engine.sequences.export(into, start, stop) == blob
    for each in (into, sequence):  # exporting changes nothing
        assert np.array_equal(logits(engine, each), expected)
        engine.sequences.close(each)


CUTS = [*range(4, 90, 9), 9, 10, 48, 49, 60, 81, 82]  # also beside the edges of pictures


@pytest.mark.parametrize("cut", CUTS)
def test_a_truncated_sequence_continues_as_if_it_had_never_been_longer(
    engine: LlamaCppEngine, runs: list[Run], cut: int
) -> None:
    kept, cut_off = engine.sequences.open(exact=True), engine.sequences.open(exact=True)
    for sequence in (kept, cut_off):
        run(engine, sequence, runs, cut)
        run(engine, sequence, runs)
    engine.sequences.truncate(cut_off, cut)
    assert cut_off.length == cut
    run(engine, cut_off, runs)
    assert engine.sequences.export(cut_off, 0, length(runs)) == engine.sequences.export(
        kept, 0, length(runs)
    )
    assert np.array_equal(logits(engine, cut_off), logits(engine, kept))
    for sequence in (kept, cut_off):
        engine.sequences.close(sequence)


@pytest.mark.parametrize("stop", [17, 48])
def test_an_image_continues_after_restored_blocks(
    engine: LlamaCppEngine, runs: list[Run], stop: int
) -> None:
    sequence, into = engine.sequences.open(exact=True), engine.sequences.open(exact=True)
    run(engine, sequence, runs, stop)
    for start in range(0, stop, 8):
        blob = engine.sequences.export(sequence, start, min(start + 8, stop))
        engine.sequences.restore(into, blob, min(8, stop - start))
    run(engine, into, runs)
    run(engine, sequence, runs)
    assert np.array_equal(logits(engine, into), logits(engine, sequence))
    for each in (sequence, into):
        engine.sequences.close(each)


def test_fragmented_shared_sequences_can_be_moved_and_shared(
    engine: LlamaCppEngine, runs: list[Run], expected: Row
) -> None:
    """Two sequences take turns, and continue in cells before their first ones."""
    first = engine.sequences.open(exact=False)
    run_step(engine, [Work(first, PROMPT[:40], None)])
    one, other, into, total = *(engine.sequences.open(exact=False) for _ in range(3)), length(runs)
    for stop in range(5, total + 5, 5):
        if stop == 25:  # inside a picture
            engine.sequences.close(first)
        for sequence in (one, other):
            run(engine, sequence, runs, stop)
    for start in range(0, total, 11):
        blob = engine.sequences.export(one, start, min(start + 11, total))
        engine.sequences.restore(into, blob, min(11, total - start))
    for token in range(total):
        assert engine.sequences.export(into, token, token + 1) == engine.sequences.export(
            one, token, token + 1
        )
    engine.sequences.close(one)
    engine.sequences.truncate(other, 60)
    shared = engine.sequences.open(exact=False)
    engine.sequences.share(into, 49, shared)
    free = engine.sequences.free_tokens()
    for sequence in (other, shared):
        run(engine, sequence, runs)
    assert engine.sequences.free_tokens() == free - 2 * total + 60 + 49
    for sequence in (into, other, shared):
        found = logits(engine, sequence)
        assert np.allclose(found, expected, rtol=0, atol=ROUNDING)
        engine.sequences.close(sequence)


def test_a_shared_sequence_cannot_be_cut_inside_an_image(
    engine: LlamaCppEngine, runs: list[Run]
) -> None:
    sequence, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    run(engine, sequence, runs)
    with pytest.raises(ValueError, match="inside an image"):
        engine.sequences.truncate(sequence, 20)
    with pytest.raises(ValueError, match="inside an image"):
        engine.sequences.share(sequence, 20, into)
    for each in (sequence, into):
        engine.sequences.close(each)


def test_requantised_blocks_keep_the_places_of_images(
    engine: LlamaCppEngine, runs: list[Run], expected: Row
) -> None:
    sequence, into = (
        engine.sequences.open(exact=True),
        engine.sequences.open(exact=True, kv_type="q8_0"),
    )
    run(engine, sequence, runs)
    for start in range(0, length(runs), 16):
        tokens = min(16, length(runs) - start)
        blob = engine.sequences.export(sequence, start, start + tokens)
        engine.sequences.restore(
            into, engine.sequences.requantise(blob, tokens, "f16", "q8_0"), tokens
        )
    found = logits(engine, into)
    assert np.corrcoef(found, expected)[0, 1] > 0.999
    for each in (sequence, into):
        engine.sequences.close(each)


@pytest.mark.parametrize("stop", [30, 49, 55, 81])  # inside, at the end of, and after a picture
def test_recurrent_state_is_restored_with_blocks_of_images(tmp_path: Path, stop: int) -> None:
    with loaded("qwen35", tmp_path) as engine:
        texts, pictures = [b"What is ", b" and then ", b" there?"], [WIDE, HIGH]
        assert np.array_equal(computed(engine, texts, pictures), helped(engine, texts, pictures))
        runs, sequence, into = (
            prompt(engine),
            engine.sequences.open(exact=True),
            engine.sequences.open(exact=True),
        )
        run(engine, sequence, runs, stop)
        for start in range(0, stop, 16):
            tokens = min(16, stop - start)
            ends = start + tokens == stop
            blob = engine.sequences.export(sequence, start, start + tokens, resumable=ends)
            engine.sequences.restore(into, blob, tokens, resumable=ends)
        for each in (sequence, into):
            run(engine, each, runs)
        assert np.array_equal(logits(engine, sequence), logits(engine, into))


# -- what is refused -----------------------------------------------------------------------------


def test_a_block_at_other_positions_is_refused_before_it_is_read(
    engine: LlamaCppEngine, runs: list[Run], expected: Row
) -> None:
    sequence, into = engine.sequences.open(exact=True), engine.sequences.open(exact=True)
    run(engine, sequence, runs)
    wrong = [engine.sequences.export(sequence, start, start + 8) for start in (8, 16, 56, 72)]
    engine.sequences.restore(into, engine.sequences.export(sequence, 0, 7), 7)
    for blob in wrong:
        with pytest.raises(CorruptBlock):
            engine.sequences.restore(into, blob, 8)
    ids, vectors = runs[1]
    assert vectors is not None
    with pytest.raises(ValueError, match="beginning of this picture"):
        run_step(engine, [Work(into, ids[3:], None, vectors[3:])])
    engine.sequences.restore(
        into, engine.sequences.export(sequence, 7, length(runs)), length(runs) - 7
    )
    assert np.array_equal(logits(engine, into), expected)
    for each in (sequence, into):
        engine.sequences.close(each)
