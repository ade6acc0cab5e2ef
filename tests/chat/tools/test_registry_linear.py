"""Parsers take linear time, also for 100 kB of their own markup."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.reasoning import REASONING_FORMATS
from rekindle.chat.tools.registry import TOOL_FORMAT_NAMES, select
from tests.chat.tools.parsing import TOOLS
from tests.chat.tools.test_fuzz import SCRAPS
from tests.chat.tools.transcripts import REPLIES
from tests.support.rounds import rounds

SIZE = 100_000
BOUND_S = 20.0  # one second is promised; machines are slow and shared


def scraps(name: str) -> list[str]:
    """A format's markers, replies of its models, and pieces of them."""
    replies = [reply.text for reply in REPLIES.values() if reply.format == name]
    halves = [reply[: len(reply) // 2] for reply in replies]
    return [*select(None, tool_format=name).markers, *replies, *halves, *SCRAPS]


def spent_s(name: str, text: str, piece: int, reasoning: str, *, cut: bool) -> float:
    form = select(None, tool_format=name, reasoning_format=reasoning)
    parser = form.parser(TOOLS, calls=True, opened=False)
    begin = time.process_time()
    for at in range(0, len(text), piece):
        parser.push(text[at : at + piece])
    parser.finish(cut=cut)
    return time.process_time() - begin


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_any_repetition_of_markup_is_parsed_in_linear_time(name: str) -> None:
    @settings(deadline=None, max_examples=rounds(3, 60))
    @given(
        st.lists(st.sampled_from(scraps(name)), max_size=3).map("".join),
        st.lists(st.sampled_from(scraps(name)), min_size=1, max_size=4).map("".join),
        st.sampled_from([3, 4096, SIZE]),  # a token, what a socket brings, all at once
        st.sampled_from(["none", *REASONING_FORMATS]),
        st.booleans(),
    )
    def holds(before: str, unit: str, piece: int, reasoning: str, cut: bool) -> None:
        text = before + unit * (SIZE // len(unit))
        assert spent_s(name, text, piece, reasoning, cut=cut) < BOUND_S

    holds()


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_each_marker_and_bracket_without_end_is_parsed_in_linear_time(name: str) -> None:
    opening = next((reply.text for reply in REPLIES.values() if reply.format == name), "")[:60]
    for unit in (*select(None, tool_format=name).markers, "{", "[", '"', "\\", "(", "\n", "call:"):
        text = opening + unit * (SIZE // len(unit))
        assert spent_s(name, text, 4096, "think", cut=True) < BOUND_S, unit
