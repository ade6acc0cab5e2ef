"""A reply can be constrained to a pattern, a list of choices or a client's grammar."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.chat.grammar.lark import Grammar
from rekindle.errors import BadRequest
from rekindle.protocol.requests import StructuredOutput, ToolUse
from tests.chat.grammar.writer import Writer, reply_grammars

WRITER = Writer()
GRAMMARS = reply_grammars("hermes")
THINKING = reply_grammars("hermes", "think")
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GBNF = 'root ::= "(" root ")" | [0-9]+  # "a: b"'
LARK = 'start: "(" start ")" | DIGITS\nDIGITS: /[0-9]+/  // not ::= here'


def answer(**fields: Any) -> Grammar:
    return GRAMMARS.answer(StructuredOutput(param="here", **fields), opened=False)


@pytest.mark.parametrize(
    ("fields", "taken", "refused"),
    [
        ({"regex": r"\d{3}-\d{4}"}, ["555-1234"], ["555-12345", "x", ""]),
        ({"regex": r"^(a|b)+/\n$"}, ["ab/\n"], ["ab/", "^a/\n"]),
        ({"regex": r"^a|b$"}, ["a", "b"], ["ab"]),
        ({"regex": r"cost: \$"}, ["cost: $"], ["cost: "]),
        ({"choices": ["yes", "yes please", '"/\n']}, ["yes", "yes please", '"/\n'], ["no", "ye"]),
        ({"grammar": GBNF}, ["1", "((23))"], ["(1", "a"]),
        ({"grammar": LARK}, ["1", "((23))"], ["(1", "a"]),
        ({"grammar": 'start: %json {"type": "integer"}'}, ["-3"], ["x"]),
    ],
)
def test_a_reply_matches_the_requested_output(
    fields: Any, taken: list[str], refused: list[str]
) -> None:
    for made in (answer(**fields), GRAMMARS.text(StructuredOutput(**fields))):
        assert [text for text in taken if not WRITER.takes(made, text)] == []
        assert [text for text in refused if WRITER.takes(made, text)] == []


@pytest.mark.parametrize("fields", [{"regex": "[0-9]+"}, {"choices": ["12"]}, {"grammar": GBNF}])
def test_reasoning_may_precede_the_answer_in_a_chat_but_not_in_a_completion(fields: Any) -> None:
    output = StructuredOutput(**fields)
    thought = "<think>Which (number)?</think>\n\n12"
    assert WRITER.takes(THINKING.answer(output, opened=False), thought)
    assert WRITER.takes(THINKING.answer(output, opened=True), thought.removeprefix("<think>"))
    assert not WRITER.takes(THINKING.text(output), thought)
    assert WRITER.takes(THINKING.text(output), "12")


@pytest.mark.parametrize("fields", [{"regex": "[0-9]+"}, {"choices": ["12"]}, {"grammar": LARK}])
def test_a_reply_may_be_a_call_instead_where_it_may_call(fields: Any) -> None:
    made = GRAMMARS.calls(TOOLS, ToolUse(), opened=False, answer=StructuredOutput(**fields))
    assert made is not None
    assert WRITER.takes(made, "12")
    assert WRITER.takes(made, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>')
    assert not WRITER.takes(made, "Hello")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"regex": "(a"}, "invalid regular expression: unclosed group"),
        ({"regex": "a(?=b)c"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a)|(b"}, "invalid regular expression"),
        ({"grammar": "root ::= nowhere"}, "not valid GBNF: line 1: the rule 'nowhere'"),
        ({"grammar": "start: nowhere"}, 'unknown name: "nowhere"'),
        ({"grammar": 'start: "a"\n}\nstart: "b"'}, "cannot be enforced"),
        ({"schema": {"type": "nothing"}}, "cannot be enforced"),
        ({"schema": {"not": {}}}, "`not`"),
    ],
)
def test_unenforceable_output_is_refused_with_the_field_and_the_reason(
    fields: Any, problem: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        answer(**fields)
    assert refused.value.param == "here"
    assert problem in str(refused.value)
