from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.describe import first_difference

LETTERS = "ab é日😀\n"

escaped = st.lists(st.sampled_from([b"\xff", b"\xfe", *(each.encode() for each in LETTERS)]))


@pytest.mark.parametrize(
    ("stored", "sent", "expected"),
    [
        ("the red house", "the rod house", ("red house", "rod house")),
        ("one two", "one three", ("two", "three")),
        ("same", "same", ("", "")),
        ("same", "same and more", ("", "and more")),
        ("same and", "same ", ("and", "")),
        ("house", "houses are", ("house", "houses are")),
        ("", "words", ("", "words")),
        ("foo bar", "foobar", ("foo bar", "foobar")),
        ("a  b", "a b", (" b", "b")),
        ("a\n", "a", ("\n", "")),
    ],
)
def test_the_first_words_that_differ_are_shown(
    stored: str, sent: str, expected: tuple[str, str]
) -> None:
    assert first_difference(stored.encode(), sent.encode()) == expected
    assert first_difference(sent.encode(), stored.encode()) == expected[::-1]


def test_eight_words_are_shown_and_the_cut_is_marked() -> None:
    stored, _ = first_difference(b"1 2 3 4 5 6 7 8 9", b"0")
    assert stored == "1 2 3 4 5 6 7 8…"
    assert first_difference(b"1 2 3 4 5 6 7 8 ", b"0")[0] == "1 2 3 4 5 6 7 8"


def test_eighty_characters_are_shown_and_the_cut_is_marked() -> None:
    stored, sent = first_difference(("日" * 200).encode(), ("本" * 80).encode())
    assert (stored, sent) == ("日" * 80 + "…", "本" * 80)


def test_a_script_without_spaces_is_not_shown_from_far_back() -> None:
    shared = "吾輩は猫である。" * 1000
    stored, sent = first_difference((shared + "名").encode(), (shared + "犬").encode())
    assert stored[-9:] == "吾輩は猫である。名"[-9:]
    assert sent[-1] == "犬"
    assert stored[0] == sent[0] == "…"
    assert len(stored) < 40


def test_characters_that_begin_with_the_same_bytes_are_shown_whole() -> None:
    assert first_difference("a 😀 b".encode(), "a 😁 b".encode()) == ("😀 b", "😁 b")


def test_marks_are_not_shown() -> None:
    stored, sent = first_difference(b"a \xff<|im_end|>\xfe b", b"a \xff<s>\xfe b")
    assert (stored, sent) == ("<|im_end|> b", "<s> b")
    assert first_difference(b"a \xff<s>\xfe b", b"a <s> c") == ("<s> b", "<s> c")


@settings(deadline=None)  # the machine may be busy
@given(escaped.map(b"".join), escaped.map(b"".join))
def test_any_two_texts_give_short_words_without_marks(stored: bytes, sent: bytes) -> None:
    for words in first_difference(stored, sent):
        assert len(words) <= 81
        assert "\N{REPLACEMENT CHARACTER}" not in words
        words.encode()


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet=LETTERS), st.text(alphabet=LETTERS))
def test_different_short_texts_are_shown_differently(stored: str, sent: str) -> None:
    shown = first_difference(stored.encode(), sent.encode())
    long = max(len(stored), len(sent)) > 40 or max(map(len, (stored.split(), sent.split()))) > 7
    assert (shown[0] != shown[1]) == (stored != sent) or long


def test_a_difference_at_the_end_of_long_texts_is_found() -> None:
    text = b"lorem ipsum " * 100_000
    assert first_difference(text + b"a", text + b"b") == ("a", "b")
