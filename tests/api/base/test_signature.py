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
def test_whatever_is_sent_as_a_signature_is_no_error(damaged: str) -> None:
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


def test_what_is_damaged_counts_as_well() -> None:
    allowance, damaged = TextBudget(3 * PIECE_BYTES), seal("x" * (PIECE_BYTES // 2))[:-8]
    damaged += "AAAAAAA="  # another checksum
    assert signed_text("", damaged, allowance) is None
    assert signed_text("", damaged, allowance) is None
    with pytest.raises(BadRequest, match="characters of text"):
        signed_text("", damaged, allowance)


def test_what_is_unpacked_counts_for_the_whole_request() -> None:
    """Whether it is a text of ours or not."""
    allowance = TextBudget(1_000_000)
    assert len(bomb(600_000)) < 2000
    assert signed_text("", bomb(600_000), allowance) is None
    with pytest.raises(BadRequest, match="characters of text"):
        signed_text("", bomb(600_000), allowance)
