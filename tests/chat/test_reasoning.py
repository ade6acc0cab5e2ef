from __future__ import annotations

import pytest

from rekindle.chat.reasoning import REASONING_FORMATS
from rekindle.chat.tools.registry import select
from rekindle.protocol.events import ReasoningDelta, TextDelta
from tests.chat.tools.parsing import BAR, Call, parse_reply

QWEN3 = select("<think> </think> <tool_call>")


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_leading_reasoning_is_taken_off_with_the_space_around_its_markers(name: str) -> None:
    begin, end = REASONING_FORMATS[name]
    form = select(None, reasoning_format=name)
    parsed = parse_reply(form, f"\n{begin}\nLet me  see.\n\nYes.\n{end}\n\n Hello. \n")
    assert parsed.parts == [ReasoningDelta("Let me  see.\n\nYes."), TextDelta("Hello. \n")]


def test_calls_after_reasoning_are_calls() -> None:
    """Qwen3's own example of a thinking call."""
    parsed = parse_reply(
        QWEN3,
        "<think>\nOkay, the user wants <tool_call>.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    )
    assert parsed.reasoning == "Okay, the user wants <tool_call>."
    assert parsed.calls == [Call("get_weather", '{"city": "Paris"}')]
    assert parsed.text == ""
    assert parsed.ended_calls == 1


def test_reasoning_opened_by_the_prompt_begins_immediately() -> None:
    parsed = parse_reply(QWEN3, "\nHm.\n</think>\n\nHello", opened=True)
    assert parsed.parts == [ReasoningDelta("Hm."), TextDelta("Hello")]


def test_reasoning_opened_twice_is_opened_once() -> None:
    parsed = parse_reply(QWEN3, "<think>\nHm.</think>Hello", opened=True)
    assert parsed.parts == [ReasoningDelta("Hm."), TextDelta("Hello")]


@pytest.mark.parametrize("opened", [True, False])
def test_a_reply_that_ends_inside_reasoning_is_all_reasoning(opened: bool) -> None:
    text = "Hm, </thin\n"
    parsed = parse_reply(QWEN3, text if opened else "<think>" + text, opened=opened)
    assert parsed.parts == [ReasoningDelta(text)]


def test_empty_reasoning_is_none() -> None:
    assert parse_reply(QWEN3, "<think>\n\n</think>\n\nHello").parts == [TextDelta("Hello")]


@pytest.mark.parametrize("text", ["Hello <think>x</think>", " \n<thin", "\n\nHello", ""])
def test_a_reply_that_does_not_begin_with_reasoning_has_none(text: str) -> None:
    parsed = parse_reply(QWEN3, text)
    assert (parsed.text, parsed.reasoning) == (text, "")


def test_reasoning_is_separated_from_text_without_calls_too() -> None:
    parsed = parse_reply(QWEN3, "<think>a</think><tool_call>", calls=False)
    assert parsed.parts == [ReasoningDelta("a"), TextDelta("<tool_call>")]


def test_the_parser_knows_whether_it_is_in_reasoning() -> None:
    parser = QWEN3.parser([], calls=True, opened=True)
    assert parser.in_reasoning
    parser.push("Hm.")
    assert parser.in_reasoning
    parser.push("</think>")
    assert not parser.in_reasoning


def test_only_the_analysis_channel_of_harmony_is_reasoning() -> None:
    parser = select(None, tool_format="harmony").parser([], calls=True, opened=False)
    parser.push("<|channel|>analysis<|message|>Hm")
    assert parser.in_reasoning
    parser.push("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert not parser.in_reasoning


def test_harmony_continues_reasoning_opened_by_the_prompt() -> None:
    parsed = parse_reply(
        "harmony", "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", opened=True
    )
    assert parsed.parts == [ReasoningDelta("Hm"), TextDelta("Yes")]


def test_two_messages_of_a_kind_do_not_run_together() -> None:
    parsed = parse_reply(
        "harmony",
        "<|channel|>commentary<|message|>First.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Second.",
    )
    assert parsed.text == "First.\n\nSecond."


def test_a_header_that_was_cut_off_is_not_said() -> None:
    assert parse_reply("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assis").text == ""


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\nOkay, the", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("[INST] what is <think>? [/INST]", False),
        ("<start_of_turn>user\n<think><end_of_turn>\n<start_of_turn>model\n", False),
        (f"<{BAR}User{BAR}>hi<{BAR}Assistant{BAR}><think>\n", True),
    ],
)
def test_a_prompt_shows_whether_it_ends_inside_reasoning(prompt: str, inside: bool) -> None:
    reasoning = select("<think>").reasoning
    assert reasoning is not None
    assert reasoning.is_open(prompt) is inside


def test_a_prompt_of_gpt_oss_can_end_inside_its_analysis() -> None:
    reasoning = select(None, tool_format="harmony").reasoning
    assert reasoning is not None
    assert reasoning.is_open("<|start|>assistant<|channel|>analysis<|message|>")
    assert not reasoning.is_open("<|start|>assistant")
    assert not reasoning.is_open("<|start|>assistant<|channel|>final<|message|>")


def test_a_template_without_reasoning_has_no_reasoning_format() -> None:
    assert select(None).reasoning is None
