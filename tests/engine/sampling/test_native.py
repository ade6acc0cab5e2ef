"""The compiled sampler agrees with the definition of sampling, and with NumPy where it must."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.engine.base import Matrix, Row
from rekindle.engine.sampling import native
from rekindle.engine.sampling.native import Method, NativeSampler
from rekindle.engine.sampling.sampler import TokenSampler, sample_rows
from rekindle.protocol.requests import SamplingParams
from tests.engine.sampling.reference import probabilities

WAYS = {
    "greedy": SamplingParams(temperature=0),
    "top p": SamplingParams(temperature=0.8, top_p=0.9),
    "as the model": SamplingParams(temperature=1, top_p=1),
    "cold": SamplingParams(temperature=0.3, top_p=0.5),
    "hot": SamplingParams(temperature=3, top_p=0.9),
    "few": SamplingParams(temperature=1, top_p=0.01),
    "top k": SamplingParams(temperature=1, top_p=1, top_k=7),
    "min p": SamplingParams(temperature=1.5, top_p=1, min_p=0.1),
    "llama.cpp defaults": SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05),
    "many": SamplingParams(temperature=1.2, top_p=0.8, top_k=700, min_p=0.001),
}
ROWS = 40

needs_compiler = pytest.mark.skipif(native.load() is None, reason="no C compiler built the package")


def make_logits(size: int, spread: float) -> Matrix:
    """A third of the rows have ties, and a third have forbidden tokens."""
    rows = np.random.default_rng(size).normal(0, spread, (ROWS, size)).astype(np.float32)
    rows[1::3] = rows[1::3].round(1)
    rows[2::3, 1::2] = -inf
    return rows


def build() -> NativeSampler | None:
    library = native.load()
    return None if library is None else NativeSampler(library, threads=1)


def choose(way: SamplingParams, logits: Matrix, compiled: NativeSampler | None) -> list[int]:
    samplers = [TokenSampler(replace(way, seed=seed), ()) for seed in range(len(logits))]
    return [sampled.token for sampled in sample_rows(compiled, samplers, logits.copy())]


def test_there_is_compiled_code_where_there_is_a_compiler() -> None:
    assert native.load() or not shutil.which("cc"), "run `python hatch_build.py`"


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 12, 65, 3001, 20_000])
def test_greedy_tokens_are_the_same_with_compiled_code_and_without(
    spread: float, size: int
) -> None:
    logits = make_logits(size, spread)
    expected = choose(WAYS["greedy"], logits, None)
    assert choose(WAYS["greedy"], logits, build()) == expected


@needs_compiler
@pytest.mark.parametrize("way", [way for way in WAYS.values() if way.temperature], ids=repr)
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 12, 65, 3001])
def test_every_token_is_one_that_the_sorted_row_allows(
    way: SamplingParams, spread: float, size: int
) -> None:
    logits = make_logits(size, spread)
    for row, token in zip(logits, choose(way, logits, build()), strict=True):
        assert token in probabilities(row, way)


def words(shares: Sequence[float]) -> bytes:
    """Pack random words that stand for these numbers in [0, 1)."""
    every = [int(share * (1 << 53)) << 11 for share in shares]
    every += [0] * (native.WORDS - len(every))
    return struct.pack(f"={len(every)}Q", *every)


def drawn_from(row: Row, params: Iterable[bytes]) -> set[int]:
    compiled = build()
    assert compiled
    tokens = [compiled.sample(each, row[None])[0] for each in params]
    return set(tokens) - {native.UNDECIDED}


def nucleus_of_proposals(row: Row, top_p: float) -> set[int]:
    """Propose each token. At temperature 1 every proposal is accepted; the row has one column."""
    settings = native.pack(SamplingParams(temperature=1, top_p=top_p), Method.PROPOSE)
    weights = np.exp(row.astype(np.float64))
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    params = [settings + words([0.0, middle, 0.0] * 7) for middle in middles]
    return drawn_from(row, params)


def nucleus_of_draws(row: Row, top_p: float) -> set[int]:
    """Draw so hot that all tokens have the same probability."""
    settings = native.pack(SamplingParams(temperature=1e9, top_p=top_p), Method.DRAW, draws=1)
    middles = (np.arange(4 * row.size) + 0.5) / (4 * row.size)
    return drawn_from(row, [settings + words([middle]) for middle in middles])


@needs_compiler
@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=60),
    st.floats(0, 1 - 1e-9),
)
def test_a_nucleus_is_that_of_the_sorted_row(eighths: list[int], top_p: float) -> None:
    """Logits are equal or clearly different, so rounding in `exp` cannot decide."""
    row = np.array(eighths, np.float32) / np.float32(8)
    defined = set(probabilities(row, SamplingParams(temperature=1, top_p=top_p)))
    assert nucleus_of_proposals(row, top_p) == defined
    assert nucleus_of_draws(row, top_p) == defined


@needs_compiler
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_compiled_code_leaves_nothing_to_numpy(
    way: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("NumPy is asked")

    monkeypatch.setattr(TokenSampler, "choose", fail)
    for spread in (0.0, 1.0, 6.0):
        choose(way, make_logits(3001, spread), build())


@needs_compiler
def test_cold_replies_that_reject_most_proposals_are_sampled_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: TokenSampler) -> bytes:
        raise AssertionError("a row was retried by one thread")

    monkeypatch.setattr(TokenSampler, "retry_params", fail)
    choose(SamplingParams(temperature=0.2, top_p=0.9), make_logits(3001, 1.0), build())


def test_a_library_that_is_missing_damaged_or_stale_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(library: Path) -> object:
        monkeypatch.setattr(native, "LIBRARY", library)
        return native._find.__wrapped__()

    ours = native.LIBRARY
    assert "no C compiler" in str(find(tmp_path / "missing.so"))
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF and no more")
    assert "cannot be loaded" in str(find(damaged))
    if ours.exists():
        stale = tmp_path / "stale.so"
        shutil.copy(ours, stale)
        (tmp_path / "rows.c").write_text("newer")
        assert "other sources" in str(find(stale))


@needs_compiler
def test_malformed_rows_never_reach_the_compiled_code() -> None:
    compiled = build()
    assert compiled
    one = bytes(native.PARAMS_BYTES)
    rows = np.zeros((2, 9), np.float32)
    for params, logits in ((one, rows), (2 * one, rows[:, ::2]), (2 * one, rows > 0)):
        with pytest.raises(ValueError, match="rows"):
            compiled.sample(params, logits)  # type: ignore[arg-type]
