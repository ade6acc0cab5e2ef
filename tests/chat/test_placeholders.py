from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rekindle.chat.placeholders import PRIVATE, Placeholders


def test_a_placeholder_a_template_cut_short_leaves_only_the_text() -> None:
    placeholders = Placeholders()
    whole = placeholders.of(7)
    assert list(placeholders.split(f"a{whole}b")) == ["a", 7, "b"]
    assert "".join(map(str, placeholders.split(f"a{whole[:17]}"))).startswith("a")


@given(st.text(alphabet="a" + PRIVATE, max_size=40), st.integers(0, 2**32 - 1))
def test_numbers_come_back_and_private_characters_of_users_stay_text(
    text: str, number: int
) -> None:
    placeholders = Placeholders()
    found = list(placeholders.split(text + placeholders.of(number) + text))
    assert found == [text, number, text]


def test_placeholders_of_another_conversation_are_only_text() -> None:
    other = Placeholders().of(1)
    assert list(Placeholders().split(other)) == [other]
