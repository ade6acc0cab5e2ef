"""Parsers survive any text, lose nothing, ignore the cuts and take linear time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.chat.reasoning import REASONING_FORMATS
from rekindle.chat.tools.registry import REASONING_FORMAT_NAMES, TOOL_FORMAT_NAMES, select
from tests.chat.tools.parsing import TOOLS, ParsedReply, cut, feed
from tests.chat.tools.transcripts import REPLIES
from tests.support.rounds import rounds

SCRAPS = [
    "{", "}", "[", "]", "(", ")", '"', "'", "\\", ":", ",", "=", ";", " ", "\n", "<", ">", "|",
    "f", "g", "a", "1", "null", '"name"', '"arguments"', '"parameters"', '"function"', '"f"',
    '{"name": "f", "arguments": {"a": 1}}', '{"a": "x"}', "f(a=1)", "call:f{", "call:g{}", "a:1",
    "<function=f>", "<parameter=a>", "</parameter>", "<function=", "```", "```json", "print(",
    "```tool_code", "assistant", " to=functions.f", "analysis", "final", "function", "{}",
]  # fmt: skip
MARKS = sorted(
    {marker for name in TOOL_FORMAT_NAMES for marker in select(None, tool_format=name).markers}
)


def texts(*marks: str) -> st.SearchStrategy[str]:
    """Texts mixed from a format's markers, scraps of calls, and anything."""
    scraps = st.sampled_from([*marks, *SCRAPS]) | st.sampled_from(marks or SCRAPS)
    return st.lists(scraps | st.text(max_size=3), max_size=25).map("".join)


def slips(name: str) -> st.SearchStrategy[str]:
    """A model's real reply, with pieces of it lost or replaced."""
    replies = [reply.text for reply in REPLIES.values() if reply.format == name] or SCRAPS
    marks = select(None, tool_format=name).markers

    def spoil(reply: str, slips: list[tuple[int, int, str]]) -> str:
        for start, length, scrap in slips:
            start %= len(reply) + 1
            reply = reply[:start] + scrap + reply[start + length :]
        return reply

    slip = st.tuples(
        st.integers(0, 400), st.integers(0, 12), st.sampled_from(["", *marks, *SCRAPS])
    )
    return st.builds(spoil, st.sampled_from(replies), st.lists(slip, max_size=4))


def parsed(
    name: str, pieces: list[str], *, reasoning: str = "none", opened: bool = False
) -> ParsedReply:
    form = select(None, tool_format=name, reasoning_format=reasoning)
    return feed(form.parser(TOOLS, calls=True, opened=opened), pieces)


@pytest.mark.long
@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_any_cut_of_any_text_gives_the_same_parts_and_loses_nothing(name: str) -> None:
    @settings(deadline=None, max_examples=rounds(150, 1000))  # the machine may be busy
    @given(
        texts(*select(None, tool_format=name).markers) | slips(name),
        st.lists(st.integers(0, 500), max_size=8),
    )
    def holds(text: str, places: list[int]) -> None:
        whole = parsed(name, [text])
        assert parsed(name, cut(text, places)) == whole
        assert parsed(name, list(text)) == whole
        if not whole.calls and name != "harmony":
            assert whole.text == text

    holds()


@pytest.mark.long
@pytest.mark.parametrize("reasoning", [name for name in REASONING_FORMAT_NAMES if name != "none"])
def test_any_cut_of_any_reasoning_gives_the_same_parts(reasoning: str) -> None:
    pair = REASONING_FORMATS[reasoning]

    @settings(deadline=None, max_examples=rounds(50, 500))
    @given(texts(*pair, "<tool_call>"), st.lists(st.integers(0, 500), max_size=8), st.booleans())
    def holds(text: str, places: list[int], opened: bool) -> None:
        whole = parsed("hermes", [text], reasoning=reasoning, opened=opened)
        assert parsed("hermes", cut(text, places), reasoning=reasoning, opened=opened) == whole
        assert parsed("hermes", list(text), reasoning=reasoning, opened=opened) == whole

    holds()


@pytest.mark.long
@settings(deadline=None, max_examples=rounds(100, 500))
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[`{"), max_size=40))
def test_text_without_markers_is_passed_on_unchanged(text: str) -> None:
    for name in TOOL_FORMAT_NAMES:
        assert parsed(name, list(text)).text == text, name


@pytest.mark.long
@settings(deadline=None, max_examples=rounds(100, 500))
@given(texts(*select(None, tool_format="harmony").markers))
def test_harmony_loses_no_text_of_a_message(text: str) -> None:
    """Only markers and headers are dropped. Here every text is in a message of its own."""
    inside = text
    for marker in MARKS:
        inside = inside.replace(marker, "")
    whole = parsed("harmony", [f"<|channel|>final<|message|>x{inside}x<|end|>"])
    assert "<|" in inside or whole.text == f"x{inside}x"


LARGE = 1_000_000


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
@pytest.mark.parametrize("unit", ["<", "[", "{", " "])
def test_a_megabyte_of_one_character_is_a_text_like_any_other(name: str, unit: str) -> None:
    text = unit * (LARGE // len(unit))
    pieces = [text[start : start + 4096] for start in range(0, len(text), 4096)]
    whole = parsed(name, pieces)
    assert whole.calls == []
    assert whole.text == text


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_a_flood_of_markers_is_a_text_like_any_other(name: str) -> None:
    for marker in select(None, tool_format=name).markers:
        text = marker * (LARGE // 8 // len(marker))
        whole = parsed(name, [text])
        if name != "harmony" and not whole.calls:
            assert whole.text == text


BEGINNINGS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "qwen3-coder": "<function=f><parameter=b>",
    "llama3-json": '{"name": "f", "parameters": ',
    "mistral": "[TOOL_CALLS]f[ARGS]",
    "harmony": " to=functions.f<|message|>",
    "functiongemma": "<start_function_call>call:f{b:",
    "gemma4": "<|tool_call>call:f{b:",
}


@pytest.mark.parametrize("name", BEGINNINGS)
@pytest.mark.parametrize(
    "body", ["{" * 100_000, "[" * LARGE, '{"' + "a" * LARGE, '{"' + "\\" * LARGE]
)
def test_arguments_without_end_are_passed_on(name: str, body: str) -> None:
    """100,000 levels deep, or one endless string."""
    text = BEGINNINGS[name] + body
    pieces = [text[start : start + 4096] for start in range(0, len(text), 4096)]
    (call,) = parsed(name, pieces).calls
    assert len(call.arguments) >= len(body) - 1


def test_a_pythonic_list_without_end_is_text() -> None:
    for body in ("(" * 100_000, "[" * 100_000, '"' + "a" * LARGE, "'" + "\\" * LARGE):
        text = "[f(a=" + body
        assert parsed("pythonic", [text]).text == text
