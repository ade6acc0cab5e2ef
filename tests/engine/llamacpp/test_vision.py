"""Projectors are checked, and encode images into the tokens that they announce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Matrix, Work, run_step
from rekindle.engine.llamacpp import bindings
from rekindle.engine.llamacpp import vision as mtmd
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.errors import LibraryMismatch, ModelError
from tests.contract.actions import PROMPT, prefill
from tests.support import tiny
from tests.support.pictures import drawn
from tests.support.tiny import WIDTH, write_gemma3, write_llama
from tests.support.tiny_projector import (
    write_gemma3_projector,
    write_idefics3_projector,
    write_llava_projector,
)


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    return EngineOptions(
        path=write_llama(tmp_path / "tiny.gguf"),
        mmproj=write_llava_projector(tmp_path / "mmproj.gguf"),
        parallel=2,
        threads=1,
        context_tokens=512,
    )


@contextmanager
def loaded(options: EngineOptions) -> Iterator[LlamaCppEngine]:
    engine = LlamaCppEngine(options)
    try:
        yield engine
    finally:
        engine.close()


def fingerprint(options: EngineOptions) -> bytes:
    with loaded(options) as engine:
        return engine.capabilities.kv_layout.fingerprint


def test_two_projectors_never_share_state(options: EngineOptions, tmp_path: Path) -> None:
    other = write_llava_projector(tmp_path / "other.gguf", seed=1)
    same = write_llava_projector(tmp_path / "same.gguf")
    known = [fingerprint(replace(options, mmproj=path)) for path in (options.mmproj, other, None)]
    assert len(set(known)) == 3
    assert fingerprint(replace(options, mmproj=same)) == known[0]


def test_text_is_computed_as_without_a_projector(options: EngineOptions) -> None:
    rows: list[np.ndarray[Any, Any]] = []
    for mmproj in (options.mmproj, None):
        with loaded(replace(options, mmproj=mmproj)) as engine:
            engine.observe = lambda _sequence, row: rows.append(row.copy())
            prefill(engine, engine.sequences.open(exact=True), PROMPT)
    seeing, blind = rows
    assert np.array_equal(seeing, blind)


def test_an_image_of_any_size_has_as_many_tokens_as_encoded_vectors(
    options: EngineOptions,
) -> None:
    with loaded(options) as engine:
        for width, height in ((1, 1), (7, 300), (300, 7), (64, 64)):
            picture = drawn(1, width, height)
            tokens = engine.picture_tokens(width, height, picture.digest)
            [vectors] = engine.encode_picture(picture)
            assert [span.length for span in tokens.media] == [len(vectors)] == [len(tokens)]
            assert tokens.media[0].digest == picture.digest


def test_the_tokens_around_an_image_are_part_of_it(tmp_path: Path) -> None:
    options = EngineOptions(
        path=write_gemma3(tmp_path / "tiny.gguf"),
        mmproj=write_gemma3_projector(tmp_path / "mmproj.gguf"),
        parallel=2,
        threads=1,
    )
    with loaded(options) as engine:
        tokens = engine.picture_tokens(100, 80, b"x" * 32)
        [span] = tokens.media
        text = [engine.tokenizer.piece(each, special=True) for each in tokens if each < 1 << 31]
    assert b"".join(text) == b"<start_of_image><end_of_image>"
    assert (span.start, len(tokens) - span.stop) == (len(b"<start_of_image>"), 14)


TILES = ("\n\n", "<fake_token_around_image>", "<global-img>")  # what SmolVLM has around tiles


def test_an_image_in_tiles_has_a_span_for_each_tile(
    options: EngineOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "CONTROL", (*tiny.CONTROL, *TILES))
    monkeypatch.setattr(tiny, "VOCABULARY", tiny.VOCABULARY + len(TILES))
    path, mmproj = write_llama(tmp_path / "model.gguf"), tmp_path / "tiles.gguf"
    with loaded(replace(options, path=path, mmproj=write_idefics3_projector(mmproj))) as engine:
        picture = drawn(1, 64, 64)
        tokens = engine.picture_tokens(64, 64, picture.digest)
        encoded = engine.encode_picture(picture)
        assert [span.length for span in tokens.media] == [len(each) for each in encoded]
        assert len(tokens.media) == 2 * 2 + 1  # and all of it, small
        assert len({span.digest for span in tokens.media}) == len(tokens.media)
        text = b"".join(engine.tokenizer.piece(t, special=True) for t in tokens if t < 1 << 31)
        assert b"<row_1_col_1>" in text
        assert text.endswith(b"<global-img><fake_token_around_image>")


def test_a_model_that_lacks_the_tokens_around_tiles_is_refused(
    options: EngineOptions, tmp_path: Path
) -> None:
    tiles = write_idefics3_projector(tmp_path / "tiles.gguf")
    with pytest.raises(ModelError, match=r"tiny\.gguf lacks tokens"):
        LlamaCppEngine(replace(options, mmproj=tiles))


Row = bytes


def first_row(engine: LlamaCppEngine, ids: list[int], vectors: Matrix) -> Row:
    """Return the state of the first token of an image."""
    sequence = engine.sequences.open(exact=True)
    run_step(engine, [Work(sequence, ids, None, vectors)])
    row = bytes(engine.sequences.export(sequence, 0, 1))
    engine.sequences.close(sequence)
    return row


@pytest.mark.parametrize(
    ("write", "write_projector", "sees_ahead"),
    [(write_llama, write_llava_projector, False), (write_gemma3, write_gemma3_projector, True)],
    ids=["llava", "gemma3"],
)
def test_vectors_attend_to_later_ones_if_the_model_does(
    tmp_path: Path,
    write: Callable[[Path], Path],
    write_projector: Callable[[Path], Path],
    sees_ahead: bool,
) -> None:
    path, mmproj = write(tmp_path / "tiny.gguf"), write_projector(tmp_path / "mmproj.gguf")
    with loaded(EngineOptions(path=path, mmproj=mmproj, parallel=2, threads=1)) as engine:
        [vectors] = engine.encode_picture(drawn(1))
        other = vectors.copy()
        other[-1] += 1
        ids = [0] * len(vectors)
        assert engine.capabilities.whole_pictures == sees_ahead
        is_same = first_row(engine, ids, vectors) == first_row(engine, ids, other)
    assert is_same != sees_ahead


def test_vectors_of_another_width_never_reach_llama_cpp(options: EngineOptions) -> None:
    """It would read beyond their end."""
    with loaded(options) as engine:
        narrow = np.zeros((16, WIDTH - 1), np.float32)
        with pytest.raises(ValueError, match="vectors"):
            run_step(engine, [Work(engine.sequences.open(exact=False), [0] * 16, None, narrow)])


# -- files that are refused ----------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["language model", "truncated", "other width"])
def test_a_projector_of_another_model_is_refused(
    options: EngineOptions, tmp_path: Path, damage: str
) -> None:
    bad = tmp_path / "bad.gguf"
    match damage:
        case "language model":
            write_llama(bad)
        case "truncated":
            assert options.mmproj is not None
            whole = options.mmproj.read_bytes()
            bad.write_bytes(whole[: len(whole) // 2])
        case "other width":
            write_llava_projector(bad, width=WIDTH // 2)
    with pytest.raises(ModelError, match=r"not a projector for tiny\.gguf"):
        LlamaCppEngine(replace(options, mmproj=bad))


def test_a_library_with_another_layout_is_refused() -> None:
    defaults = mtmd.load_mtmd().mtmd_context_params_default()
    defaults.n_threads = 5
    with pytest.raises(LibraryMismatch, match="n_threads"):
        bindings.check_layout("projector", defaults, mtmd._KNOWN_PARAMS)
