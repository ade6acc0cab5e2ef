"""Signatures of thinking blocks."""

from __future__ import annotations

import base64
import zlib

from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.anthropic import signature
from rekindle.api.anthropic.signature import seal, sign, signed_text


@given(st.text(), st.text())
def test_a_signature_is_of_its_text_alone(text: str, other: str) -> None:
    clean = text.encode(errors="replace").decode()
    assert signed_text(clean, sign(clean)) == clean
    assert signed_text("", seal(clean)) == clean
    if other != text:
        assert signed_text(other, sign(text)) is None or other.encode(
            errors="replace"
        ) == text.encode(errors="replace")


@given(st.text())
def test_whatever_is_sent_as_a_signature_is_no_error(damaged: str) -> None:
    assert signed_text("text", damaged) is None
    assert signed_text("", f"{sign('x')}.{damaged}") is None or not damaged


def test_a_small_signature_holds_no_huge_text() -> None:
    packed = zlib.compress(b"x" * (signature.MOST_TEXT_BYTES + 1))
    bomb = f"{sign('x')}.{base64.urlsafe_b64encode(packed).decode()}"
    assert len(bomb) < 10_000
    assert signed_text("", bomb) is None
