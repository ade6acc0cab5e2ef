from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.detokenize import TextStream

from .vocabulary import MERGES, Vocabulary

VOCABULARY = Vocabulary()


def shown(tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(VOCABULARY, stop)
    return [*map(stream.push, tokens), stream.finish()]


def tokens_of(text: str) -> list[int]:
    return VOCABULARY.encode(text, special=True)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.integers(0, 255 + len(MERGES))))
def test_any_tokens_give_the_text_of_their_bytes(tokens: list[int]) -> None:
    spelled = b"".join(VOCABULARY.piece(token, special=False) for token in tokens)
    assert "".join(shown(tokens)) == spelled.decode("utf-8", "replace")


@settings(deadline=None)  # the machine may be busy
@given(st.text())
def test_characters_split_over_tokens_arrive_whole(text: str) -> None:
    pieces = shown(list(text.encode()))  # one byte a token
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


@settings(deadline=None)  # the machine may be busy
@given(st.text(alphabet="aé😀<|"), st.lists(st.text(alphabet="aé😀<|", min_size=1), max_size=3))
def test_stop_strings_are_met_across_tokens_and_characters(text: str, stop: list[str]) -> None:
    cut = min((text.index(item) for item in stop if item in text), default=len(text))
    assert "".join(shown(list(text.encode()), tuple(stop))) == text[:cut]


def test_a_character_cut_short_becomes_a_replacement_at_the_end() -> None:
    assert shown(list("é😀".encode()[:-1])) == ["", "é", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_control_tokens_show_no_text() -> None:
    assert "".join(shown(tokens_of("a<|im_end|>b"))) == "ab"


def test_a_stop_string_ends_the_text_and_is_named() -> None:
    stream = TextStream(VOCABULARY, ["\nUser:", "###"])
    text = "".join(stream.push(token) for token in tokens_of("hello\nUse it\nUser: more"))
    assert text + stream.finish() == "hello\nUse it"
    assert (stream.stopped, stream.matched) == (True, "\nUser:")


def test_the_beginning_of_a_stop_string_is_given_back_at_the_end() -> None:
    stream = TextStream(VOCABULARY, ["\nUser:"])
    assert "".join(stream.push(token) for token in tokens_of("hello\nUs")) == "hello"
    assert stream.finish() == "\nUs"
    assert (stream.stopped, stream.matched) == (False, None)


def test_long_outputs_are_quick() -> None:
    tokens = list(("lorem ipsum <|" * 8000).encode())
    started = time.monotonic()
    assert len("".join(shown(tokens, ("<|end|>", "never", "zzz")))) == len(tokens)
    assert time.monotonic() - started < 2
