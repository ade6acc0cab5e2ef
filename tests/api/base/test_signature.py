"""Signatures of thinking blocks."""

from __future__ import annotations

import base64
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.base.fields import TextBudget
from rekindle.api.base.signature import PIECE_BYTES, seal, sign, signed_text
from rekindle.errors import BadRequest


def opened(text: str, signature: str) -> str | None:
    return signed_text(text, signature, TextBudget())


@given(st.text(), st.text())
def test_a_signature_is_of_its_text_alone(text: str, other: str) -> None:
    clean = text.encode(errors="replace").decode()
    assert opened(clean, sign(clean)) == clean
    assert opened("", seal(clean)) == clean
    if other != text:
        assert opened(other, sign(text)) is None or other.encode(errors="replace") == text.encode(
            errors="replace"
        )


@given(st.text())
def test_any_signature_is_accepted(damaged: str) -> None:
    assert opened("text", damaged) is None
    assert opened("", f"{sign('x')}.{damaged}") is None or not damaged


@pytest.mark.parametrize("more", [-1, 0, 1, PIECE_BYTES])
@pytest.mark.parametrize("letters", ["x", "0123456789abcdef"])
def test_a_text_of_several_pieces_comes_back_whole(letters: str, more: int) -> None:
    text = "".join(random.Random(1).choices(letters, k=PIECE_BYTES + more))
    assert opened("", seal(text)) == text


def bomb(size_bytes: int) -> str:
    packed = base64.urlsafe_b64encode(zlib.compress(b"x" * size_bytes)).decode()
    return f"{sign('another text')}.{packed}"


def test_damaged_packed_text_counts_towards_the_limit() -> None:
    budget, damaged = TextBudget(3 * PIECE_BYTES), seal("x" * (PIECE_BYTES // 2))[:-8]
    damaged += "AAAAAAA="  # another checksum
    assert signed_text("", damaged, budget) is None
    assert signed_text("", damaged, budget) is None
    with pytest.raises(BadRequest, match="characters of text"):
        signed_text("", damaged, budget)


def test_packed_texts_count_towards_one_limit_for_the_request() -> None:
    """Whether it is a text of ours or not."""
    budget = TextBudget(1_000_000)
    assert len(bomb(600_000)) < 2000
    assert signed_text("", bomb(600_000), budget) is None
    with pytest.raises(BadRequest, match="characters of text"):
        signed_text("", bomb(600_000), budget)
