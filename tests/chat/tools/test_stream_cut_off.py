"""A reply that was cut off loses no text and shows no markup of a call."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rekindle.chat.reasoning import REASONING_FORMATS
from rekindle.chat.tools.registry import TOOL_FORMAT_NAMES, select
from tests.chat.tools.parsing import TOOLS, ParsedReply, feed
from tests.chat.tools.transcripts import REPLIES

PROSE = "Well: a < b | c, [1, 2] and {x: 1}; see ``a`` at `<http://x.org>`, (or <x>) ### 'a' \"b\""


def cut_off(name: str, pieces: Sequence[str], reasoning: str = "none") -> ParsedReply:
    form = select(None, tool_format=name, reasoning_format=reasoning)
    return feed(form.parser(TOOLS, calls=True, opened=False), pieces, cut_off=True)


def is_punctuation(text: str) -> bool:
    return not any(map(str.isalnum, text))


def test_every_format_has_a_reply_here() -> None:
    assert {reply.format for reply in REPLIES.values()} | {"plain"} == set(TOOL_FORMAT_NAMES)


@pytest.mark.parametrize("title", REPLIES)
def test_a_reply_cut_anywhere_has_no_markup_in_its_text(title: str) -> None:
    """Punctuation that could begin a marker, but also anything else, is text."""
    reply = REPLIES[title]
    for end in range(len(reply.text) + 1):
        whole = cut_off(reply.format, [reply.text[:end]])
        assert cut_off(reply.format, reply.text[:end]) == whole
        common = (
            whole.text
            if reply.content.startswith(whole.text)
            else whole.text.rstrip('<[|`{(" \n\uff5c')
        )
        assert reply.content.startswith(common), (end, whole.text)
        assert is_punctuation(whole.text[len(common) :])
        assert reply.reasoning.startswith(whole.reasoning.rstrip("<|\n")), (end, whole.reasoning)


@pytest.mark.parametrize("title", [title for title in REPLIES if REPLIES[title].content])
def test_a_reply_cut_anywhere_has_all_the_text_before_that(title: str) -> None:
    reply = REPLIES[title]
    content = reply.content.strip()
    start = reply.text.index(content)
    for end in range(start, len(reply.text) + 1):
        assert (
            cut_off(reply.format, reply.text[:end])
            .text.strip()
            .startswith(content[: end - start].strip())
        )


@pytest.mark.parametrize("name", TOOL_FORMAT_NAMES)
def test_prose_cut_anywhere_loses_nothing(name: str) -> None:
    for end in range(len(PROSE) + 1):
        assert cut_off(name, [PROSE[:end]]).text == PROSE[:end]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("llama3-json", '{"name": "Alice", "age": 5}'),
        ("llama3-json", '{"answer": {"name": "f"}}'),
        ("pythonic", "[note: none of the tools] fits"),
        ("gemma3", "```python\nf(a=1)\n```"),
    ],
)
def test_text_that_cannot_be_a_call_is_passed_on_wherever_it_is_cut(name: str, text: str) -> None:
    """Only the first letters, with which a call could begin, are held back."""
    shown = [cut_off(name, [text[:end]]).text for end in range(len(text) + 1)]
    doubtful = [end for end, said in enumerate(shown) if said != text[:end]]
    assert all(not shown[end] for end in doubtful)
    assert len(doubtful) <= len('name": "A')
    assert shown[-1] == text


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_a_reply_cut_in_the_markers_of_its_reasoning_shows_none_of_them(reasoning: str) -> None:
    begin, end = REASONING_FORMATS[reasoning]
    text = f"{begin}\nHm, a.\n{end}\n\nSo."
    for at in range(len(text) + 1):
        whole = cut_off("hermes", [text[:at]], reasoning)
        assert cut_off("hermes", text[:at], reasoning) == whole
        assert "So.".startswith(whole.text) or is_punctuation(whole.text)
        said = whole.reasoning
        assert "Hm, a.\n".startswith(said) or is_punctuation(said.removeprefix("Hm, a.\n"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "get_wea'),
        ("hermes", "I will. <tool_c"),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"na'),
        ("qwen3-coder", "<tool_call>\n<function=get_w"),
        ("llama3-json", '{"name": "get_we'),
        ("pythonic", "[get_weather(city='P"),
        ("mistral", "[TOOL_CALLS]get_w"),
        ("deepseek", "<\uff5ctool▁calls▁begin\uff5c><\uff5ctool▁call▁begin\uff5c>get"),
        ("harmony", " to=functions.get_w"),
        ("gemma4", "<|tool_call>call:get"),
        ("gemma3", "```tool_code\nprint(get_w"),
    ],
)
def test_that_a_call_was_cut_is_known(name: str, text: str) -> None:
    parser = select(None, tool_format=name).parser(TOOLS, calls=True, opened=False)
    parser.push(text)
    parser.finish(cut=True)
    assert parser.is_call_cut


def test_a_parameter_that_was_cut_off_leaves_the_arguments_open() -> None:
    """Otherwise an agent would run an incomplete call."""
    text = "<function=get_weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=da"
    [call] = cut_off("qwen3-coder", text).calls
    assert call == ("get_weather", '{"city": "Dallas"')
