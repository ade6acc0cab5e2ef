from __future__ import annotations

import time
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.detokenize import Detokenizer, StopMatcher
from tests.support.effort import calls_made

from .vocabulary import MERGES, Vocabulary

VOCABULARY = Vocabulary()


def shown(tokens: list[int], stop: tuple[str, ...] = ()) -> list[str]:
    stream = Detokenizer(VOCABULARY, stop)
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


def test_a_truncated_character_becomes_a_replacement_at_the_end() -> None:
    assert shown(list("é😀".encode()[:-1])) == ["", "é", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_control_tokens_have_no_text() -> None:
    assert "".join(shown(tokens_of("a<|im_end|>b"))) == "ab"


def test_a_stop_string_ends_the_text_and_is_named() -> None:
    stream = Detokenizer(VOCABULARY, ["\nUser:", "###"])
    text = "".join(stream.push(token) for token in tokens_of("hello\nUse it\nUser: more"))
    assert text + stream.finish() == "hello\nUse it"
    assert (stream.stopped, stream.matched) == (True, "\nUser:")


def test_the_beginning_of_a_stop_string_is_given_back_at_the_end() -> None:
    stream = Detokenizer(VOCABULARY, ["\nUser:"])
    assert "".join(stream.push(token) for token in tokens_of("hello\nUs")) == "hello"
    assert stream.finish() == "\nUs"
    assert (stream.stopped, stream.matched) == (False, None)


def test_long_outputs_are_quick() -> None:
    tokens = list(("lorem ipsum <|" * 8000).encode())
    started = time.monotonic()
    assert len("".join(shown(tokens, ("<|end|>", "never", "zzz")))) == len(tokens)
    assert time.monotonic() - started < 2


# -- stop strings ------------------------------------------------------------------------------

small = st.text(alphabet="ab", max_size=6)


def earliest(text: str, stops: list[str]) -> int:
    return min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))


def held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that may still become a stop string."""
    starts = {""} | {stop[:length] for stop in stops for length in range(len(stop))}
    return max(length for length in range(len(text) + 1) if text[len(text) - length :] in starts)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(small), st.lists(small, max_size=4))
def test_text_ends_at_the_earliest_stop_string_however_it_is_split(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.push, pieces)) + matcher.finish()
    text = "".join(pieces)
    cut = earliest(text, stops)
    assert shown == text[:cut]
    assert matcher.stopped == (cut < len(text))
    if matcher.stopped:
        assert matcher.matched is not None
        assert text.startswith(matcher.matched, cut)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(small), st.lists(small, max_size=4))
def test_no_more_text_is_held_back_than_may_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, text, shown = StopMatcher(stops), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        cut = earliest(text, stops)
        assert text.startswith(shown)
        assert len(shown) <= cut
        if cut == len(text):
            assert len(shown) == len(text) - held(text, stops)


def test_a_stop_string_inside_a_longer_one_waits_for_the_longer() -> None:
    matcher = StopMatcher(["abcd", "bc"])
    assert [matcher.push(piece) for piece in ("xa", "bc")] == ["x", ""]
    assert not matcher.stopped
    assert matcher.push("d") == ""
    assert matcher.matched == "abcd"


def test_a_stop_string_inside_a_longer_one_wins_when_the_longer_fails() -> None:
    for ending in ("e", ""):
        matcher = StopMatcher(["abcd", "bc"])
        assert matcher.push("xabc") + matcher.push(ending) + matcher.finish() == "xa"
        assert (matcher.stopped, matcher.matched) == (True, "bc")


def test_nothing_follows_a_stop_string() -> None:
    matcher = StopMatcher(["!"])
    assert matcher.push("a!b") == "a"
    assert matcher.push("c") + matcher.finish() + matcher.finish() == ""


def test_hostile_stop_strings_take_linear_time() -> None:
    stops = ["a" * length + "b" for length in (10, 1000, 20_000)]
    matcher = StopMatcher(stops)
    started = time.monotonic()
    shown = sum(len(matcher.push("aaaa")) for _ in range(25_000)) + len(matcher.finish())
    assert shown == 100_000
    assert time.monotonic() - started < 2


def test_text_in_which_no_stop_string_begins_is_passed_on_without_looking_at_each_letter() -> None:
    matcher = StopMatcher(["###", "END"])
    effort = [calls_made(partial(matcher.push, "a" * length)) for length in (2, 2000)]
    assert effort[0] == effort[1]
    assert matcher.push("#") == ""
    assert matcher.push("#b") == "##b"


def matched(parts: list[tuple[str, bool]], *stops: str) -> tuple[str, str | None]:
    """The text that gets through, and the stop string. A flag says where a part may stop."""
    matcher = StopMatcher(stops)
    text = "".join([matcher.push(part, may_stop=may_stop) for part, may_stop in parts])
    return text + matcher.finish(), matcher.matched if matcher.stopped else None


def test_a_stop_string_that_ends_where_it_may_not_is_text() -> None:
    assert matched([("a END b", False), (" c END d", True)], "END") == ("a END b c ", "END")
    assert matched([("a END", False)], "END") == ("a END", None)
    assert matched([("a E", False), ("ND b", True)], "END") == ("a ", "END")
    assert matched([("a EN", False), ("d b", True)], "END") == ("a ENd b", None)
    assert matched([("END", False), ("END", True)], "END", "ENDED") == ("END", "END")
