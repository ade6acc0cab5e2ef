from __future__ import annotations

import pytest

from rekindle.chat.reasoning import REASONING_FORMATS
from rekindle.chat.tools.registry import select
from rekindle.protocol.events import ReasoningDelta, TextDelta
from tests.chat.tools.replay import BAR, Call, hear

QWEN3 = select("<think> </think> <tool_call>")


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_leading_thought_is_taken_off_with_the_space_around_its_markers(name: str) -> None:
    begin, end = REASONING_FORMATS[name]
    form = select(None, reasoning_format=name)
    heard = hear(form, f"\n{begin}\nLet me  see.\n\nYes.\n{end}\n\n Hello. \n")
    assert heard.parts == [ReasoningDelta("Let me  see.\n\nYes."), TextDelta("Hello. \n")]


def test_calls_after_thought_are_calls() -> None:
    """Qwen3's own example of a thinking call."""
    heard = hear(
        QWEN3,
        "<think>\nOkay, the user wants <tool_call>.\n</think>\n\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    )
    assert heard.thought == "Okay, the user wants <tool_call>."
    assert heard.calls == [Call("get_weather", '{"city": "Paris"}')]
    assert heard.said == ""
    assert heard.ended_calls == 1


def test_thought_that_the_prompt_opened_begins_at_once() -> None:
    heard = hear(QWEN3, "\nHm.\n</think>\n\nHello", opened=True)
    assert heard.parts == [ReasoningDelta("Hm."), TextDelta("Hello")]


def test_thought_that_is_opened_twice_is_opened_once() -> None:
    heard = hear(QWEN3, "<think>\nHm.</think>Hello", opened=True)
    assert heard.parts == [ReasoningDelta("Hm."), TextDelta("Hello")]


@pytest.mark.parametrize("opened", [True, False])
def test_a_reply_that_ends_inside_thought_is_all_thought(opened: bool) -> None:
    text = "Hm, </thin\n"
    heard = hear(QWEN3, text if opened else "<think>" + text, opened=opened)
    assert heard.parts == [ReasoningDelta(text)]


def test_empty_thought_is_none() -> None:
    assert hear(QWEN3, "<think>\n\n</think>\n\nHello").parts == [TextDelta("Hello")]


@pytest.mark.parametrize("text", ["Hello <think>x</think>", " \n<thin", "\n\nHello", ""])
def test_a_reply_that_does_not_begin_with_thought_has_none(text: str) -> None:
    heard = hear(QWEN3, text)
    assert (heard.said, heard.thought) == (text, "")


def test_thought_is_told_from_text_without_calls_too() -> None:
    heard = hear(QWEN3, "<think>a</think><tool_call>", calls=False)
    assert heard.parts == [ReasoningDelta("a"), TextDelta("<tool_call>")]


def test_the_parser_knows_whether_it_is_thinking() -> None:
    parser = QWEN3.parser([], calls=True, opened=True)
    assert parser.in_reasoning
    parser.push("Hm.")
    assert parser.in_reasoning
    parser.push("</think>")
    assert not parser.in_reasoning


def test_harmony_thinks_in_analysis_alone() -> None:
    parser = select(None, tool_format="harmony").parser([], calls=True, opened=False)
    parser.push("<|channel|>analysis<|message|>Hm")
    assert parser.in_reasoning
    parser.push("<|end|><|start|>assistant<|channel|>final<|message|>")
    assert not parser.in_reasoning


def test_harmony_goes_on_in_thought_that_the_prompt_opened() -> None:
    heard = hear(
        "harmony", "Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes", opened=True
    )
    assert heard.parts == [ReasoningDelta("Hm"), TextDelta("Yes")]


def test_two_messages_of_a_kind_do_not_run_together() -> None:
    heard = hear(
        "harmony",
        "<|channel|>commentary<|message|>First.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Second.",
    )
    assert heard.said == "First.\n\nSecond."


def test_a_header_that_was_cut_off_is_not_said() -> None:
    assert hear("harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assis").said == ""


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
def test_a_prompt_tells_whether_it_ends_inside_a_thought(prompt: str, inside: bool) -> None:
    assert select("<think>").opens_reasoning(prompt) is inside


def test_a_prompt_of_gpt_oss_can_end_inside_its_analysis() -> None:
    form = select(None, tool_format="harmony")
    assert form.opens_reasoning("<|start|>assistant<|channel|>analysis<|message|>")
    assert not form.opens_reasoning("<|start|>assistant")
    assert not form.opens_reasoning("<|start|>assistant<|channel|>final<|message|>")


def test_without_thought_no_prompt_is_inside_one() -> None:
    assert not select(None).opens_reasoning("<think>")
