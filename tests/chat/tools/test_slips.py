"""Parsers cope with mistakes of models and with text that only looks like a call."""

from __future__ import annotations

import pytest

from rekindle.chat.tools.registry import select
from rekindle.protocol.events import TextDelta
from tests.chat.tools.parsing import BAR, Call, join, parse_reply, tool

SEPARATED = f"<{BAR}tool▁call▁begin{BAR}>f<{BAR}tool▁sep{BAR}>"


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"a": 1}}'),
        ("hermes", '<tool_call>{"id": [1, {"x": "}"}], "name": "f", "arguments": {"a": 1}}'),
        ("qwen3-coder", "<tool_call><function=f><parameter=a>1</parameter></function>"),
        ("qwen3-coder", "<tool_call><function=f><parameter=a>1</parameter>"),
        ("qwen3-coder", "<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}'),
        ("llama3-json", '{"name": "f", "parameters": {"a": 1}'),
        ("llama3-json", '{"function": "f", "parameters": {"a": 1}}'),
        ("pythonic", "[f(a=1)"),
        ("pythonic", "<|python_start|>[f(a=1)]"),
        ("deepseek", SEPARATED + '{"a": 1}'),
        ("functiongemma", "<start_function_call>call:f{a:1}"),
        ("gemma3", "```tool_code\nf(a=1)"),
        ("harmony", '<|start|>assistant<|channel|>analysis to=f code<|message|>{"a": 1}'),
    ],
)
def test_a_call_is_a_call_without_its_last_markers(format: str, text: str) -> None:
    parsed = parse_reply(format, text)
    assert [(call.name, call.value) for call in parsed.calls] == [("f", {"a": 1})]
    assert parsed.text == parsed.reasoning == ""
    assert parsed.ended_calls == 1


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", '<tool_call>{"name": "g"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g"\n</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": null}</tool_call>'),
        ("hermes", '<tool_call>{"name": "g", "arguments": ""}</tool_call>'),
        ("qwen3-coder", "<function=g></function>"),
        ("llama3-json", '{"name": "g"}'),
        ("pythonic", "[g()]"),
        ("mistral", "[TOOL_CALLS]g[ARGS]"),
        ("deepseek", SEPARATED.replace("f<", "g<") + f"<{BAR}tool▁call▁end{BAR}>"),
        ("functiongemma", "<start_function_call>call:g{}<end_function_call>"),
        ("harmony", "<|channel|>commentary to=functions.g<|message|><|call|>"),
    ],
)
def test_a_call_without_arguments_has_an_empty_object(format: str, text: str) -> None:
    assert parse_reply(format, text).calls == [Call("g", "{}")]


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "Par', '{"b": "Par'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"b": "\\', '{"b": "\\'),
        ("qwen3-coder", "<function=f><parameter=b>\nPar", '{"b": "Par'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"b": "Par', '{"b": "Par'),
        ("functiongemma", "<start_function_call>call:f{b:<escape>Par", "{b:<escape>Par"),
    ],
)
def test_arguments_that_were_cut_off_look_cut_off(format: str, text: str, arguments: str) -> None:
    """No client may take them for complete."""
    parsed = parse_reply(format, text)
    assert parsed.calls == [Call("f", arguments)]
    assert parsed.ended_calls == 0


@pytest.mark.parametrize(
    ("format", "text", "arguments"),
    [
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {a: \'x\', "b": "y\n}}\n</tool_call>',
            '{a: \'x\', "b": "y\n}}\n',
        ),
        ("hermes", '<tool_call>{"name": "f", "arguments": x y}</tool_call>', "x"),
        ("mistral", "[TOOL_CALLS]f[ARGS] a=1 [TOOL_CALLS]", "a=1"),
        ("harmony", " to=functions.f<|message|>a=1<|call|>", "a=1"),
        ("deepseek", SEPARATED + f"a=1<{BAR}tool▁call▁end{BAR}>", "a=1"),
        ("gemma4", "<|tool_call>call:f{a:1,=,b:2}<tool_call|>", '{"a": 1,=,b:2}'),
    ],
)
def test_arguments_that_are_not_json_are_passed_on_up_to_the_end_marker(
    format: str, text: str, arguments: str
) -> None:
    assert parse_reply(format, text).calls[0] == Call("f", arguments)


def test_an_end_marker_in_a_string_is_part_of_the_string() -> None:
    parsed = parse_reply(
        "hermes", '<tool_call>{"name": "f", "arguments": {"b": "</tool_call>"}}</tool_call>'
    )
    assert parsed.calls == [Call("f", '{"b": "</tool_call>"}')]
    assert parsed.text == ""


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "Write <tool_call> before a call and </tool_call> after it. "),
        ("hermes", '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", '),
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("qwen3-coder", "<tool_call>\n<function=f> is how it begins"),
        ("qwen3-coder", "<function=f>"),
        ("llama3-json", '{"name": "Alice", "parameters": {"a": 1}}'),
        ("llama3-json", '{"answer": 42, "name": "f"}'),
        ("llama3-json", 'So: {"name": "f", "parameters": {}}'),
        ("llama3-json", '<|python_tag|>brave_search.call(query="x")'),
        ("pythonic", "[f(a=1), unknown(b=2)]"),
        ("pythonic", "[1, 2, 3]"),
        ("pythonic", "[f](https://example.org)"),
        ("pythonic", "[f(a=__import__('os'))]"),
        ("pythonic", "[f(a=1"),
        ("mistral", "[TOOL_CALLS] is a marker"),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("deepseek", f"<{BAR}tool▁calls▁begin{BAR}>\n and no call"),
        ("deepseek", SEPARATED),
        ("functiongemma", "<start_function_call>f{}<end_function_call>"),
        ("gemma3", "```tool_code\nimport os\n```"),
        ("gemma3", "```tool_code\nf(a=1)\nunknown()\n```"),
        ("plain", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)
def test_text_that_is_not_a_call_is_passed_on_with_its_markers(format: str, text: str) -> None:
    parsed = parse_reply(format, text)
    assert parsed.calls == []
    assert parsed.text == text


def test_an_answer_in_json_is_not_held_back_for_a_name_that_never_comes() -> None:
    parser = select(None, tool_format="llama3-json").parser([tool("f")], calls=True, opened=False)
    assert join(parser.push('{"answer": "')) == [TextDelta('{"answer": "')]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "integer"}, 5),
        ("five", {"type": "integer"}, "five"),
        ("1e3", {"type": "number"}, 1000.0),
        ("True", {"type": "boolean"}, True),
        ("5", {"type": "string"}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("[1, 2] and", {"type": "array"}, "[1, 2] and"),
        ("NaN", {"type": "number"}, "NaN"),
        ("5", {}, "5"),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_a_bare_value_gets_the_type_of_its_schema_if_it_fits(
    text: str, schema: dict[str, object], value: object
) -> None:
    tools = [tool("h", x=schema)]
    reply = f"<function=h>\n<parameter=x>\n{text}\n</parameter>\n</function>"
    assert parse_reply("qwen3-coder", reply, tools=tools).calls[0].value == {"x": value}


def test_a_lone_surrogate_is_never_passed_on() -> None:
    """UTF-8 cannot encode a lone surrogate."""
    for format, text in [
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": "\\udfff"}</tool_call>'),
        ("pythonic", r"[f(b='\ud800 \ud83d\ude00')]"),
    ]:
        call = parse_reply(format, text).calls[0]
        assert (call.name + call.arguments).encode()
    assert call.value == {"b": "\ufffd \U0001f600"}


def test_text_after_a_call_is_passed_on_but_not_whitespace() -> None:
    call = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
    assert parse_reply("hermes", f"{call}\n\n{call}\n").text == ""
    assert parse_reply("hermes", f" {call}\nDone. \n").text == "\nDone. \n"
