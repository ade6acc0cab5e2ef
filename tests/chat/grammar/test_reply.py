"""A constrained reply of any model parses into calls that follow the schemas of the tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.tools.registry import TOOL_FORMAT_NAMES, select
from rekindle.errors import Unsupported
from rekindle.protocol.events import ArgumentsDelta, Part, ReasoningDelta, TextDelta, ToolCallStart
from rekindle.protocol.requests import StructuredOutput, ToolUse
from tests.chat.grammar.validator import valid
from tests.chat.grammar.writer import Writer, reply_grammars

SEEDS = range(5)
BAR = "\uff5c"  # a vertical line of full width
DEEPSEEK = [
    f"<{BAR}tool▁{name}{BAR}>"
    for name in ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"]
HEADER = "<|channel|>commentary to=functions."
# Each format's control tokens, and what one call looks like.
FORMATS: dict[str, tuple[str, list[str], str]] = {
    "hermes": (
        "hermes",
        [],
        r'<tool_call>\n\{"name": "\S+", "arguments": \{.*\}\}\n</tool_call>',
    ),
    "hermes of Phi-4": (
        "hermes",
        ["<|tool_call|>", "<|/tool_call|>"],
        r'<\|tool_call\|>\[\{"name": "\S+", "arguments": \{.*\}\}\]<\|/tool_call\|>',
    ),
    "qwen3-coder": (
        "qwen3-coder",
        [],
        r"<tool_call>\n<function=\S+>\n"
        r"(<parameter=\w+>\n.*\n</parameter>\n)*"
        r"</function>\n</tool_call>",
    ),
    "llama3-json": (
        "llama3-json",
        ["<|python_tag|>"],
        r'(<\|python_tag\|>)?\{"name": ?"\S+", ?"parameters": ?\{.*\}\}',
    ),
    "pythonic": ("pythonic", [], r"\[[\w.-]+\(.*\)\]"),
    "pythonic of LFM2": (
        "pythonic",
        ["<|tool_call_start|>", "<|tool_call_end|>"],
        r"<\|tool_call_start\|>\[[\w.-]+\(.*\)\]<\|tool_call_end\|>",
    ),
    "mistral": (
        "mistral",
        ["[TOOL_CALLS]"],
        r'\[TOOL_CALLS\]\[\{"name": "\S+", "arguments": \{.*\}\}\]',
    ),
    "mistral since 2025": (
        "mistral",
        ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
        r"\[TOOL_CALLS\][\w.-]+\[ARGS\]\{.*\}",
    ),
    "deepseek": ("deepseek", DEEPSEEK, "{}{}.*{}.*{}{}".format(*DEEPSEEK)),
    "harmony": (
        "harmony",
        HARMONY,
        r"(<\|channel\|>analysis<\|message\|>.*<\|end\|><\|start\|>assistant)?"
        r"<\|channel\|>commentary to=functions\.\S+ <\|constrain\|>json<\|message\|>\{.*\}",
    ),
    "functiongemma": (
        "functiongemma",
        ["<start_function_call>", "<end_function_call>", "<escape>"],
        r"<start_function_call>call:[\w.-]+\{.*\}<end_function_call>",
    ),
    "gemma4": (
        "gemma4",
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        r"<\|tool_call>call:[\w.-]+\{.*\}<tool_call\|>",
    ),
    "gemma3": ("gemma3", [], r"```tool_code\n[\w.-]+\(.*\)\n```"),
}  # fmt: skip
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "capital"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "city": {"type": "string", "maxLength": 12},
        "places": {"type": "array", "items": PLACE, "minItems": 1, "maxItems": 2},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
        "exact": {"type": "boolean"},
        "until": {"type": ["integer", "null"]},
    },
    "required": ["unit", "city", "places"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
    {
        "type": "function",
        "function": {
            "name": "look-up.v2",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string", "maxLength": 20}},
                "required": ["query"],
            },
        },
    },
]
SCHEMAS = {each["function"]["name"]: each["function"].get("parameters", {}) for each in TOOLS}
STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]


class Case:
    """One format with its vocabulary."""

    def __init__(self, name: str) -> None:
        self.format, self.control, self.syntax = FORMATS[name]
        self.writer = Writer(self.control)

    def grammar(
        self,
        tools: Any = TOOLS,
        *,
        required: bool = True,
        name: str | None = None,
        parallel: bool = False,
        max_calls: int | None = None,
        reasoning: str = "none",
        opened: bool = False,
        answer: Any = None,
    ) -> Grammar:
        choice: Literal["required", "auto"] = "required" if required else "auto"
        use = ToolUse(choice=choice, name=name, parallel=parallel, max_calls=max_calls)
        grammars = reply_grammars(self.format, reasoning, self.writer.vocabulary.control_texts)
        grammar = grammars.calls(
            tools, use, opened=opened, answer=answer and StructuredOutput(schema=answer)
        )
        assert grammar is not None
        return grammar

    def read(self, text: str, *, reasons: bool = False, opened: bool = False) -> list[Part]:
        format = select(
            None, tool_format=self.format, reasoning_format="think" if reasons else "none"
        )
        parser = format.parser(TOOLS, calls=True, opened=opened)
        return [*parser.push(text), *parser.finish()]


@pytest.fixture(params=FORMATS)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def calls(parts: list[Part]) -> list[tuple[str, Any]]:
    found: list[tuple[str, list[str]]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            found.append((part.name, []))
        elif isinstance(part, ArgumentsDelta):
            found[part.index][1].append(part.text)
    return [(name, json.loads("".join(texts))) for name, texts in found]


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextDelta))


def reasoning_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ReasoningDelta))


def follows(made: tuple[str, Any], schemas: Mapping[str, Any] = SCHEMAS) -> bool:
    name, arguments = made
    return isinstance(arguments, dict) and valid(arguments, schemas[name])


def test_a_required_call_is_written_as_the_model_writes_it(case: Case) -> None:
    grammar = case.grammar()
    for seed in SEEDS:
        text = case.writer.write(grammar, seed)
        assert re.fullmatch(case.syntax, text, re.DOTALL), text


def test_a_required_call_is_read_as_one_call_that_follows_its_tool(case: Case) -> None:
    grammar = case.grammar()
    seen = set()
    for seed in range(8):
        text = case.writer.write(grammar, seed)
        parts = case.read(text)
        made = calls(parts)
        assert len(made) == 1, text
        assert follows(made[0]), text
        assert not text_of(parts), text
        seen.add(made[0][0])
    assert len(seen) > 1


TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "shade": {"$ref": "#/$defs/shade"}},
    "required": ["root", "shade"],
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "leaf": {"type": "boolean"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["leaf"],
            "additionalProperties": False,
        },
        "shade": {"type": "string", "enum": ["light", "dark"]},
    },
}


def test_a_tool_may_have_definitions_that_contain_themselves(case: Case) -> None:
    grammar = case.grammar([tool(TREE, name="now", strict=True)])
    for seed in SEEDS:
        text = case.writer.write(grammar, seed)
        [made] = calls(case.read(text))
        if case.format != "qwen3-coder":  # whose reader does not follow references to types
            assert follows(made, {"now": TREE}), text


def test_a_named_tool_is_the_one_that_is_called(case: Case) -> None:
    grammar = case.grammar(name="get_weather", parallel=True)
    for seed in SEEDS:
        text = case.writer.write(grammar, seed)
        made = calls(case.read(text))
        assert [name for name, _ in made] == ["get_weather"], text
        assert follows(made[0]), text


def test_parallel_calls_are_all_read(case: Case) -> None:
    grammar = case.grammar(TOOLS[1:2], parallel=True)
    several = 0
    for seed in range(12):
        text = case.writer.write(grammar, seed)
        parts = case.read(text)
        made = calls(parts)
        assert made == [("now", {})] * len(made)
        assert not text_of(parts), text
        several += len(made) > 1
    assert several or case.format == "harmony"  # where a call ends the reply


def test_a_grammar_allows_as_many_calls_as_the_client_takes(case: Case) -> None:
    grammar = case.grammar(TOOLS[1:2], parallel=True, max_calls=2)
    made = [len(calls(case.read(case.writer.write(grammar, seed)))) for seed in range(12)]
    assert max(made) == (1 if case.format == "harmony" else 2)


def test_without_parallel_calls_there_is_one(case: Case) -> None:
    grammar = case.grammar(TOOLS[1:2])
    for seed in SEEDS:
        assert len(calls(case.read(case.writer.write(grammar, seed)))) == 1


def test_free_text_does_not_satisfy_a_required_call(case: Case) -> None:
    assert not case.writer.takes(case.grammar(), "Hello.")
    assert not case.writer.takes(case.grammar(), "")


# -- reasoning -------------------------------------------------------------------------------------

OTHERS = [name for name, (format, *_) in FORMATS.items() if format != "harmony"]


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("control", [(), ("<think>", "</think>")])
def test_reasoning_may_come_before_a_required_call(name: str, control: tuple[str, ...]) -> None:
    case = Case(name)
    case.writer = Writer([*case.control, *control])
    grammar = case.grammar(reasoning="think")
    begun = "<think>\nThe weather {is} [asked] for.\n</think>\n\n"
    parts = case.read(case.writer.write(grammar, 1, start=begun), reasons=True)
    assert reasoning_of(parts) == "The weather {is} [asked] for."
    assert follows(calls(parts)[0])
    assert case.writer.takes(grammar, case.writer.write(case.grammar(), 1))


@pytest.mark.parametrize("name", OTHERS)
def test_reasoning_that_the_prompt_opened_has_to_end_first(name: str) -> None:
    case = Case(name)
    grammar = case.grammar(reasoning="think", opened=True)
    text = case.writer.write(grammar, 1, start="Let me see.</think>")
    parts = case.read(text, reasons=True, opened=True)
    assert reasoning_of(parts) == "Let me see."
    assert follows(calls(parts)[0])


def test_harmony_may_think_before_a_required_call() -> None:
    case = Case("harmony")
    thinking = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    parts = case.read(case.writer.write(case.grammar(), 2, start=thinking))
    assert reasoning_of(parts) == "Hm."
    assert follows(calls(parts)[0])
    opened = case.grammar(opened=True)
    text = case.writer.write(opened, 2, start="Hm.<|end|><|start|>assistant<|channel|>commentary")
    assert follows(calls(read_opened(text))[0])


def read_opened(text: str) -> list[Part]:
    parser = select(None, tool_format="harmony").parser(TOOLS, calls=True, opened=True)
    return [*parser.push(text), *parser.finish()]


# -- strict tools that need not be called ----------------------------------------------------------


def test_without_strict_tools_or_a_required_call_nothing_is_asked(case: Case) -> None:
    assert reply_grammars(case.format).calls(TOOLS, ToolUse(), opened=False) is None


def test_a_reply_need_not_call_strict_tools(case: Case) -> None:
    grammar = case.grammar(STRICT, required=False, parallel=True)
    before = "<|channel|>final<|message|>" if case.format == "harmony" else ""
    assert case.writer.takes(grammar, before + "Hello, {how} [are] <you>?")


def test_a_call_of_a_strict_tool_follows_it_wherever_it_comes(case: Case) -> None:
    grammar = case.grammar(STRICT, required=False, parallel=True)
    text = case.writer.write(case.grammar(STRICT, name="get_weather"), 3)
    between = {"harmony": "<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant"}
    before = between.get(case.format, "Wait.")
    if not case.control and case.format in ("llama3-json", "pythonic"):
        before = ""  # only the beginning distinguishes a call from text
    if case.format == "llama3-json":
        text = "<|python_tag|>" + text.removeprefix("<|python_tag|>")
    assert case.writer.takes(grammar, before + text)
    parts = case.read(before + text)
    assert text_of(parts) == ("Wait." if before else "")
    assert follows(calls(parts)[0])
    spoilt = text.replace("celsius", "kelvin").replace("fahrenheit", "kelvin")
    assert spoilt != text
    assert not case.writer.takes(grammar, before + spoilt)


def test_with_an_answer_schema_a_reply_is_a_call_or_that_answer(case: Case) -> None:
    answer = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    grammar = case.grammar(required=False, answer=answer)
    before = "<|channel|>final<|message|>" if case.format == "harmony" else ""
    assert case.writer.takes(grammar, before + '{"sum": 4}')
    assert not case.writer.takes(grammar, before + "Four.")
    assert case.writer.takes(grammar, case.writer.write(case.grammar(), 3))


# -- what cannot be written ------------------------------------------------------------------------


def tool(parameters: Any, *, strict: bool = False, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def test_a_strict_tool_whose_schema_is_not_enforced_is_refused_by_name() -> None:
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(Unsupported, match=r"'f'.*`uniqueItems`.*#/properties/a") as refused:
        Case("hermes").grammar([tool(unique, strict=True)])
    assert refused.value.param == "tools"
    assert refused.value.info.message == str(refused.value)  # as the client reads it


@pytest.mark.parametrize(
    "odd",
    [
        {"type": "array", "uniqueItems": True},
        {"type": "integer", "format": "int32"},
        {"$ref": "https://example.com/a.json"},
        {"type": "integer", "multipleOf": 10**9},
    ],
)
def test_of_a_tool_that_is_not_strict_as_much_is_enforced_as_can_be(odd: Any, case: Case) -> None:
    schema = {"type": "object", "properties": {"a": odd}, "required": ["a"]}
    for seed in range(2):
        text = case.writer.write(case.grammar([tool(schema, name="now")]), seed)
        [(name, arguments)] = calls(case.read(text))
        assert name == "now"
        assert isinstance(arguments, dict)


def test_an_argument_that_python_cannot_name_is_left_out_or_refused() -> None:
    odd = {"type": "object", "properties": {"my-key": {"type": "null"}}}
    assert Case("pythonic").writer.takes(Case("pythonic").grammar([tool(odd)]), "[f()]")
    with pytest.raises(Unsupported, match="my-key"):
        Case("pythonic").grammar([tool({**odd, "required": ["my-key"]})])


def test_a_format_without_calls_refuses_a_required_call() -> None:
    with pytest.raises(Unsupported):
        reply_grammars("plain").calls(TOOLS, ToolUse(choice="required"), opened=False)


def test_text_in_a_schema_never_becomes_a_control_token(case: Case) -> None:
    spelt = "<|im_end|>" + "".join(case.control[:1])
    schema = {"type": "object", "properties": {"a": {"const": spelt}}, "required": ["a"]}
    grammar = case.grammar([tool(schema, name="now")])
    text = case.writer.write(grammar, 1, start="" if case.format != "harmony" else HEADER)
    assert "<|im_end|>" in text
    matcher = case.writer.matcher(grammar)
    tokens = case.writer.vocabulary.encode(text.split("<|im_end|>")[0], special=True)
    for token in tokens:
        matcher.accept(token)
    assert not case.writer.allowed(matcher) & case.writer.vocabulary.end_tokens
    assert matcher.trouble is None


def test_a_format_without_calls_can_still_constrain_the_answer() -> None:
    grammars = reply_grammars("plain")
    grammar = grammars.calls(
        TOOLS, ToolUse(), opened=False, answer=StructuredOutput(schema={"const": 4})
    )
    assert grammar is not None
    assert Writer().takes(grammar, "4")


def test_every_format_with_calls_has_a_grammar() -> None:
    assert {format for format, *_ in FORMATS.values()} == set(TOOL_FORMAT_NAMES) - {"plain"}


# -- answers ---------------------------------------------------------------------------------------


def test_an_answer_may_come_after_reasoning() -> None:
    writer = Writer()
    for opened, start in ((False, "<think>2 + 2</think>\n"), (True, "2 + 2</think>\n\n")):
        grammar = reply_grammars("hermes", "think").answer(
            StructuredOutput(schema={"type": "integer"}), opened=opened
        )
        assert writer.takes(grammar, start + "4")
        assert writer.takes(grammar, "4") is not opened
        assert not writer.takes(grammar, start + "four")


def test_an_answer_in_harmony_is_the_final_message() -> None:
    writer = Writer(HARMONY)
    control = writer.vocabulary.control_texts
    grammars = reply_grammars("harmony", control=control)
    grammar = grammars.answer(StructuredOutput(schema={"type": "integer"}), opened=False)
    final = "<|channel|>final<|message|>4"
    assert writer.takes(grammar, final)
    assert writer.takes(
        grammar, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" + final
    )
    assert not writer.takes(grammar, "4")


def test_an_answer_ends_with_any_of_the_end_tokens() -> None:
    writer = Writer()
    grammar = reply_grammars("hermes").answer(StructuredOutput(schema={"const": 4}), opened=False)
    matcher = writer.matcher(grammar)
    writer.follow(matcher, "4")
    assert writer.allowed(matcher) == set(writer.vocabulary.end_tokens)
    assert matcher.done
