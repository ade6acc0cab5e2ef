"""Each step of a tool loop computes only its new message, however a client sends the history."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chat.tool_templates import CHANNELS, HERMES, THINKING
from tests.support.agent import (
    CHANGES,
    TOOLS,
    Agent,
    Change,
    as_it_was,
    call,
    thinking,
    with_json_reordered,
    without_reasoning,
)
from tests.support.conversations import HARMONY_CONTROL
from tests.support.harness import Reply

STEPS = 12


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("can_truncate", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize(("template", "say"), [(HERMES, call), (THINKING, thinking)])
def test_each_of_twelve_steps_computes_only_its_new_message(
    template: str, say: Callable[[int], str], change: Change, can_truncate: bool
) -> None:
    agent = Agent(template, tools=TOOLS, can_truncate=can_truncate)
    before: Reply | None = None
    for step in range(STEPS):
        computed = agent.engine.counts.computed_tokens
        reply = agent.step(say(step))
        assert reply.finished.reason == "tool_calls"
        assert [each.name for each in reply.turn.output.message.tool_calls] == ["write"]
        if before is not None:
            # All tokens of the last turn as they were sampled, then the rest.
            assert reply.reused == len(before.turn.tokens)
            assert reply.finished.cache.status == "hit"
            new = reply.turn.tokens.ids[reply.reused : reply.turn.prompt_tokens]
            assert agent.letters.spelled(new).startswith("<|im_end|>\n<|im_start|>user\n")
            assert agent.letters.spelled(new).count("done") == 1
            computed = agent.engine.counts.computed_tokens - computed
            assert computed == len(new) + len(reply.tokens)
        agent.go_on(reply, change, f"done {step}")
        before = reply
    if template is THINKING and change is not as_it_was:
        assert "reasoning" in reply.finished.cache.normalised


def test_reasoning_that_the_template_drops_costs_only_the_reply() -> None:
    """The next user message hides it, but everything before it is reused."""
    agent = Agent(THINKING)
    first = agent.step("<think>\nHm.\n</think>\n\nAll is tidy.", tools=None)
    assert first.message["reasoning_content"] == "Hm."
    assert first.finished.reasoning_tokens > 0
    answer = without_reasoning(first.message)
    agent.history += answer, {"role": "user", "content": "And the garden?"}
    second = agent.step("Too.", tools=None)
    assert second.reused == first.turn.prompt_tokens


def test_text_that_only_a_generation_prompt_has_costs_only_the_reply() -> None:
    template = THINKING.replace(
        "{{- '<|im_start|>assistant\n' }}{%- endif %}",
        "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}",
    )
    assert template != THINKING
    agent = Agent(template)
    first = agent.step("All is tidy.", tools=None)
    assert first.message["content"] == "All is tidy."
    agent.history += first.message, {"role": "user", "content": "And the garden?"}
    second = agent.step("Too.", tools=None)
    scaffold = len(agent.letters.encode("<think>\n\n</think>\n\n", special=True))
    assert second.reused >= first.turn.prompt_tokens - scaffold


def test_a_harmony_loop_reuses_its_calls() -> None:
    agent = Agent(CHANNELS, control=HARMONY_CONTROL, ends=["<|call|>"], tools=TOOLS)
    before: Reply | None = None
    for step in range(4):
        reply = agent.step(
            f"<|channel|>analysis<|message|>Room {step}.<|end|><|start|>assistant<|channel|>"
            f'commentary to=functions.write <|constrain|>json<|message|>{{"path":"{step}"}}'
        )
        assert reply.message["tool_calls"][0]["function"]["arguments"] == f'{{"path":"{step}"}}'
        assert reply.message["reasoning_content"] == f"Room {step}."
        if before is not None:
            assert reply.reused == len(before.turn.tokens)
        agent.go_on(reply, with_json_reordered, f"done {step}")
        before = reply
