from __future__ import annotations

import time

from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.stop import StopMatcher

small = st.text(alphabet="ab", max_size=6)


def earliest(text: str, stops: list[str]) -> int:
    return min((text.index(stop) for stop in stops if stop and stop in text), default=len(text))


def held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix that may still become a stop string."""
    starts = {""} | {stop[:length] for stop in stops for length in range(len(stop))}
    return max(length for length in range(len(text) + 1) if text[len(text) - length :] in starts)


@settings(deadline=None)  # the machine may be busy
@given(st.lists(small), st.lists(small, max_size=4))
def test_any_cutting_of_any_text_ends_at_the_earliest_stop_string(
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
