"""Compiled code chooses what NumPy would choose."""

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
from rekindle.engine.sampling import native as compiled_rows
from rekindle.engine.sampling.native import DRAW, PROPOSE, RowChooser
from rekindle.engine.sampling.sampler import Chooser, TokenSampler, build_sampler
from rekindle.protocol.requests import SamplingParams
from tests.engine.sorted_sampling import chances

WAYS = {
    "greedy": SamplingParams(temperature=0),
    "top p": SamplingParams(temperature=0.8, top_p=0.9),
    "as the model": SamplingParams(temperature=1, top_p=1),
    "cold": SamplingParams(temperature=0.3, top_p=0.5),
    "hot": SamplingParams(temperature=3, top_p=0.9),
    "few": SamplingParams(temperature=1, top_p=0.01),
    "top k": SamplingParams(temperature=1, top_p=1, top_k=7),
    "min p": SamplingParams(temperature=1.5, top_p=1, min_p=0.1),
    "usual": SamplingParams(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05),
    "many": SamplingParams(temperature=1.2, top_p=0.8, top_k=700, min_p=0.001),
}
ROWS = 40

needs_compiler = pytest.mark.skipif(
    compiled_rows.load() is None, reason="no C compiler built the package"
)


def make_logits(size: int, spread: float) -> Matrix:
    """A third of the rows has ties, a third has tokens that are forbidden."""
    rows = np.random.default_rng(size).normal(0, spread, (ROWS, size)).astype(np.float32)
    rows[1::3] = rows[1::3].round(1)
    rows[2::3, 1::2] = -inf
    return rows


def choose(way: SamplingParams, logits: Matrix, compiled: RowChooser | None) -> list[int]:
    samplers = [build_sampler(replace(way, seed=seed), ()) for seed in range(len(logits))]
    return [sampled.token for sampled in Chooser(compiled).choose(samplers, logits.copy())]


def test_there_is_compiled_code_where_there_is_a_compiler() -> None:
    assert compiled_rows.load() or not shutil.which("cc"), "run `python hatch_build.py`"


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 12, 65, 3001, 20_000])
def test_a_seed_gives_the_same_token_with_compiled_code_and_without(
    way: SamplingParams, spread: float, size: int
) -> None:
    """All but one of the rows: sums are rounded elsewhere, and a number may fall between two."""
    logits = make_logits(size, spread)
    tokens = choose(way, logits, compiled_rows.build())
    assert sum(np.not_equal(tokens, choose(way, logits, None))) <= 1


def words(shares: Sequence[float]) -> bytes:
    """Random words that stand for such numbers in [0, 1)."""
    every = [int(share * (1 << 53)) << 11 for share in shares]
    every += [0] * (compiled_rows.WORDS - len(every))
    return struct.pack(f"={len(every)}Q", *every)


def drawn_from(row: Row, choices: Iterable[bytes]) -> set[int]:
    compiled = compiled_rows.build()
    assert compiled
    tokens = [compiled.choose(choice, row[None])[0] for choice in choices]
    return set(tokens) - {compiled_rows.UNDECIDED}


def nucleus_of_proposals(row: Row, top_p: float) -> set[int]:
    """Each token is proposed, which at temperature 1 is enough; all rows have one column."""
    settings = compiled_rows.pack(SamplingParams(temperature=1, top_p=top_p), PROPOSE)
    weights = np.exp(row.astype(np.float64))
    middles = (np.cumsum(weights) - weights / 2) / weights.sum()
    choices = [settings + words([0.0, middle, 0.0] * 7) for middle in middles]
    return drawn_from(row, choices)


def nucleus_of_draws(row: Row, top_p: float) -> set[int]:
    """So hot that all tokens have the same chance, each is drawn."""
    settings = compiled_rows.pack(SamplingParams(temperature=1e9, top_p=top_p), DRAW, draws=1)
    middles = (np.arange(4 * row.size) + 0.5) / (4 * row.size)
    return drawn_from(row, [settings + words([middle]) for middle in middles])


@needs_compiler
@given(
    st.lists(st.integers(-24, 24), min_size=1, max_size=60),
    st.floats(0, 1 - 1e-9),
)
def test_a_nucleus_is_that_of_the_sorted_row(eighths: list[int], top_p: float) -> None:
    """Logits are equal or clearly not: which of two neighbours is the heavier is up to `exp`."""
    row = np.array(eighths, np.float32) / np.float32(8)
    defined = set(chances(row, SamplingParams(temperature=1, top_p=top_p)))
    assert nucleus_of_proposals(row, top_p) == defined
    assert nucleus_of_draws(row, top_p) == defined


@needs_compiler
@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_compiled_code_leaves_nothing_to_numpy(
    way: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise AssertionError("NumPy is asked")

    monkeypatch.setattr(TokenSampler, "draw", fail)
    for spread in (0.0, 1.0, 6.0):
        choose(way, make_logits(3001, spread), compiled_rows.build())


@needs_compiler
def test_cold_replies_of_which_hardly_a_proposal_is_taken_are_chosen_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: TokenSampler) -> bytes:
        raise AssertionError("a row is looked at by one thread alone")

    monkeypatch.setattr(TokenSampler, "second_choice", fail)
    choose(
        SamplingParams(temperature=0.2, top_p=0.9), make_logits(3001, 1.0), compiled_rows.build()
    )


def test_code_that_is_missing_damaged_or_of_other_sources_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(library: Path) -> object:
        monkeypatch.setattr(compiled_rows, "LIBRARY", library)
        return compiled_rows._find.__wrapped__()

    ours = compiled_rows.LIBRARY
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
def test_what_is_no_step_of_rows_never_reaches_compiled_code() -> None:
    compiled = compiled_rows.build()
    assert compiled
    choice = bytes(compiled_rows.CHOICE_BYTES)
    rows = np.zeros((2, 9), np.float32)
    for choices, logits in ((choice, rows), (2 * choice, rows[:, ::2]), (2 * choice, rows > 0)):
        with pytest.raises(ValueError, match="rows"):
            compiled.choose(choices, logits)  # type: ignore[arg-type]
