from __future__ import annotations

import pytest

from rekindle.chat.tools.registry import select
from rekindle.protocol.events import ArgumentsDelta, ToolCallStart
from tests.chat.tools.parsing import TOOLS, parse_reply
from tests.chat.tools.transcripts import REPLIES, Reply, deepseek


@pytest.mark.parametrize("reply", REPLIES.values(), ids=list(REPLIES))
def test_a_reply_is_split_into_the_parts_its_model_meant(reply: Reply) -> None:
    parsed = parse_reply(reply.format, reply.text)
    assert [(call.name, call.value) for call in parsed.calls] == reply.calls
    assert parsed.text == reply.content
    assert parsed.reasoning == reply.reasoning
    assert parsed.ended_calls == len(reply.calls)


@pytest.mark.parametrize("reply", REPLIES.values(), ids=list(REPLIES))
def test_without_calls_the_same_reply_is_text(reply: Reply) -> None:
    parsed = parse_reply(reply.format, reply.text, calls=False)
    assert parsed.calls == []
    if reply.format != "harmony":  # whose markers are never text
        assert parsed.text == reply.text


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a" :  1,"b":"\\u00e9"} }</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a" :  1,"b":"\\u00e9"}'),
        ("llama3-json", '{"name": "f", "parameters": {"a" :  1,"b":"\\u00e9"}}'),
        ("harmony", ' to=functions.f<|message|>{"a" :  1,"b":"\\u00e9"}'),
        ("deepseek", deepseek('<|tool▁call▁begin|>f<|tool▁sep|>{"a" :  1,"b":"\\u00e9"}')),
    ],
)
def test_arguments_in_json_are_passed_on_as_they_were_sampled(format: str, text: str) -> None:
    assert parse_reply(format, text).calls[0].arguments == '{"a" :  1,"b":"\\u00e9"}'


def test_a_call_begins_before_its_arguments_are_there() -> None:
    parser = select(None, tool_format="hermes").parser(TOOLS, calls=True, opened=False)
    assert parser.push('<tool_call>\n{"name": "f", "arg') == []
    assert parser.push('uments": {"a": ') == [ToolCallStart(0, "f"), ArgumentsDelta(0, '{"a": ')]
    assert parser.ended_calls == 0
    assert parser.push("1}") == [ArgumentsDelta(0, "1}")]
    assert parser.push("}") == []
    assert parser.ended_calls == 1
