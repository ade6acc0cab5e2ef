from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.escaping import (
    PRIVATE,
    ControlTexts,
    Escaper,
    Placeholders,
    TextSpan,
    escape,
    escape_prefix,
    spans_from,
    unescape,
)
from rekindle.errors import BadRequest

texts = st.text(alphabet="ab<|>" + PRIVATE[:2], max_size=30)
span_texts = st.text(alphabet="a<é😀", max_size=4)
spans = st.lists(st.builds(TextSpan, span_texts, st.booleans(), st.just(False)))
pictures = st.builds(TextSpan, st.just("[image 0a]"), st.just(False), st.just(True))
controls = st.lists(st.text(alphabet="ab<|>", min_size=1, max_size=6), max_size=6)


@settings(deadline=None)  # the machine may be busy
@given(st.recursive(texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)), controls)
def test_hidden_values_have_no_control_text_and_are_restored_exactly(
    value: object, control: list[str]
) -> None:
    escaper = Escaper(ControlTexts(control))
    hidden = escaper.hide(value)
    for before, after in zip(strings(value), strings(hidden), strict=True):
        assert not any(text in after for text in control)
        assert escaper.restore(after) == before


@settings(deadline=None)  # the machine may be busy
@given(st.lists(texts, max_size=5), controls)
def test_strings_put_side_by_side_never_make_up_a_control_text(
    parts: list[str], control: list[str]
) -> None:
    escaper = Escaper(ControlTexts(control))
    joined = "".join(escaper.hide(part) for part in parts)
    assert escaper.restore(joined) == "".join(parts)
    for span in escaper.spans(joined):
        assert span.literal or not any(text in span.text for text in control)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.text(alphabet="abc", min_size=1), min_size=1), st.text(alphabet="abc"))
def test_the_longest_control_text_is_taken(control: list[str], text: str) -> None:
    longest_first = "|".join(sorted(map(re.escape, control), key=len, reverse=True))
    spans = list(ControlTexts(control).split(text))[:-1]  # the last is the tail
    assert [span.text for span in spans if span.literal] == re.findall(longest_first, text)


def test_empty_control_texts_are_ignored() -> None:
    assert Escaper(ControlTexts([""])).spans("a") == [TextSpan("a", literal=False)]


def test_values_nested_without_end_are_refused() -> None:
    value: list[object] = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(BadRequest, match="nested"):
        Escaper(ControlTexts([])).hide(value)


def test_a_hostile_text_meets_thousands_of_control_texts_in_linear_time() -> None:
    control = ControlTexts(f"<unused{n}>" for n in range(6000))
    started = time.monotonic()
    spans = list(control.split("<unused" * 100_000 + "<unused5999>"))
    assert time.monotonic() - started < 2
    assert TextSpan("<unused5999>", literal=True) in spans


@settings(deadline=None)  # the machine may be busy
@given(
    st.lists(st.one_of(st.builds(TextSpan, span_texts, st.booleans(), st.just(False)), pictures))
)
def test_escaped_bytes_distinguish_text_literals_and_pictures(given: list[TextSpan]) -> None:
    escaped = escape(given)
    assert unescape(escaped).decode() == "".join(span.text for span in given)
    letters = [(letter, *span[1:]) for span in given for letter in span.text]
    found = spans_from(escaped, 0)
    assert [(letter, *span[1:]) for span in found for letter in span.text] == letters
    assert [span for span in found if span.picture] == [span for span in given if span.picture]


@settings(deadline=None)  # the machine may be busy
@given(spans, st.data())
def test_a_prefix_and_the_rest_make_up_the_whole(
    given: list[TextSpan], data: st.DataObject
) -> None:
    text = "".join(span.text for span in given)
    cut = data.draw(st.integers(0, len(text)))
    escaped, beginning = escape(given), escape_prefix(given, len(text[:cut].encode()))
    assert escaped.startswith(beginning)
    assert unescape(beginning).decode() == text[:cut]
    letters = [(letter, span.literal) for span in given for letter in span.text]
    rest = spans_from(escaped, len(beginning))
    assert [(letter, span.literal) for span in rest for letter in span.text] == letters[cut:]


def test_a_literal_cut_short_stays_open_and_one_not_begun_is_not_opened() -> None:
    literal = [TextSpan("a", literal=False), TextSpan("<s>", literal=True)]
    assert escape_prefix(literal, 1) == b"a"
    assert escape_prefix(literal, 3) == b"a\xff<s"
    assert escape_prefix(literal, 4) == escape(literal) == b"a\xff<s>\xfe"


def test_a_picture_cut_short_is_left_out() -> None:
    given = [TextSpan("a", literal=False), TextSpan("[image 0a]", literal=False, picture=True)]
    assert escape_prefix(given, 10) == escape_prefix(given, 1) == b"a"
    assert escape_prefix(given, 11) == escape(given) == b"a\xfd[image 0a]\xfc"


def test_nobody_writes_a_picture() -> None:
    """Neither the text of a picture nor a placeholder of another conversation becomes a picture."""
    before, escaper = Escaper(ControlTexts([])), Escaper(ControlTexts([]))
    old, shown = before.place_picture("[image 0a]"), escaper.place_picture("[image 0b]")
    forged = f"[image 0b]{old}\xfd[image 0b]\xfc"
    found = escaper.spans(escaper.hide(forged) + shown)
    assert found == [
        TextSpan(forged, literal=False),
        TextSpan("[image 0b]", literal=False, picture=True),
    ]
    assert escape(found[:1]) == forged.encode()
    assert [span.picture for span in spans_from(escape(found), 0)] == [False, True]


def test_adjacent_literals_are_escaped_each_on_its_own() -> None:
    assert escape(ControlTexts(["<s>"]).split("<s><s><")) == b"\xff<s>\xfe" * 2 + b"\xff<\xfe"


@settings(deadline=None)  # the machine may be busy
@given(texts, texts, controls)
def test_a_seam_is_seen_where_both_sides_make_up_a_control_text(
    before: str, after: str, control: list[str]
) -> None:
    whole = before + after
    expected = any(
        whole.startswith(text, start) and start < len(before) < start + len(text)
        for text in control
        for start in range(len(before))
    )
    assert ControlTexts(control).across(before, after) == expected
    escaped = whole.encode()
    assert ControlTexts(control).cut_at(escaped, len(before.encode())) == expected


def test_a_cut_in_a_literal_cuts_no_control_text() -> None:
    control = ControlTexts(["<s>"])
    assert control.cut_at(b"a<s>", 2)
    assert not control.cut_at(b"a\xff<s>\xfe", 3)
    assert not control.cut_at(b"a<\xffs>\xfe", 2)


def strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for part in item for text in strings(part)]
    assert isinstance(value, list)
    return [text for item in value for text in strings(item)]


def test_a_placeholder_a_template_cut_short_leaves_only_the_text() -> None:
    placeholders = Placeholders()
    whole = placeholders.of(7)
    assert list(placeholders.split(f"a{whole}b")) == ["a", 7, "b"]
    assert "".join(map(str, placeholders.split(f"a{whole[:17]}"))).startswith("a")


@given(st.text(alphabet="a" + PRIVATE, max_size=40), st.integers(0, 2**32 - 1))
def test_placeholders_are_decoded_and_private_characters_of_users_stay_text(
    text: str, number: int
) -> None:
    placeholders = Placeholders()
    found = list(placeholders.split(text + placeholders.of(number) + text))
    assert found == [text, number, text]


def test_placeholders_of_another_conversation_are_only_text() -> None:
    other = Placeholders().of(1)
    assert list(Placeholders().split(other)) == [other]
