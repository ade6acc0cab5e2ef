"""An agent's loop: every step computes its new message and nothing else, however the client sends
the history back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from rekindle.engine.sampling import Sampling
from rekindle.prompt.template import ChatTemplate
from rekindle.prompt.tokens import Encoder
from rekindle.runtime.intake import Intake
from rekindle.runtime.manner import Manner
from rekindle.runtime.wire import Ask
from tests.prompt.tool_templates import CHANNELS, HERMES, THINKING
from tests.support.desk import Desk, Reply
from tests.support.office import CHATML_CONTROL, HARMONY_CONTROL, Letters
from tests.support.scripted import ScriptedEngine

STEPS = 12
Message = dict[str, Any]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read", "write")
]


class Agent:
    """A conversation with a scripted model through the real runtime."""

    def __init__(
        self,
        template: str,
        *,
        control: tuple[str, ...] = CHATML_CONTROL,
        end: str = "<|im_end|>",
        can_cut: bool = True,
    ) -> None:
        self.letters = Letters(control, [end])
        self.engine = ScriptedEngine(can_cut=can_cut)
        vocabulary: Any = self.letters
        encoder = Encoder(self.letters, ChatTemplate(template))
        self.desk = Desk(
            self.engine, encoder=encoder, tokenizer=self.letters, end_tokens=vocabulary.end_tokens
        )
        manner = Manner(vocabulary, template)
        self.intake = Intake(
            self.engine.abilities, vocabulary, encoder, self.desk.entries, b"", manner
        )
        self._end = self.letters.control_texts[end]
        self._ids = itertools.count(1000)
        self.history: list[Message] = [
            {"role": "system", "content": "You work on files. " * 8},
            {"role": "user", "content": "Tidy the house."},
        ]

    def step(self, raw: str, **ask: Any) -> Reply:
        """The model writes `raw`; the request's own tokens that had to be computed are counted."""
        self.engine.scripts.append([*self.letters.sampled(raw), self._end])
        request = Ask(
            turn=next(self._ids),
            messages=json.loads(json.dumps(self.history)),
            sampling=Sampling(temperature=0),
            max_tokens=None,
            **{"tools": TOOLS, **ask},
        )
        reply = self.desk.take(self.intake.turn(request))
        self.desk.run(reply)
        return reply

    def go_on(self, reply: Reply, change: Callable[[Message], Message], result: str) -> None:
        message = change(reply.turn.message)
        call = message["tool_calls"][0]["id"]
        self.history += message, {"role": "tool", "tool_call_id": call, "content": result}


def as_it_was(message: Message) -> Message:
    return message


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def with_json_reordered(message: Message) -> Message:
    """As a client does that parses arguments and writes them again."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _reordered(call)}}
        for call in message["tool_calls"]
    ]
    return without_reasoning({**message, "tool_calls": calls})


def _reordered(call: Message) -> str:
    parsed = json.loads(call["function"]["arguments"])
    return json.dumps(dict(reversed(parsed.items())), indent=1)


def call(step: int) -> str:
    arguments = f'{{"path":"/room/{step}",  "text": "swept {step}"}}'
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


def thinking(step: int) -> str:
    return f"<think>\nRoom {step} comes next.\n</think>\n\n" + call(step)


CHANGES = (as_it_was, without_reasoning, with_json_reordered)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("can_cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize(("template", "say"), [(HERMES, call), (THINKING, thinking)])
def test_each_of_twelve_steps_computes_its_new_message_alone(
    template: str, say: Callable[[int], str], change: Callable[[Message], Message], can_cut: bool
) -> None:
    agent = Agent(template, can_cut=can_cut)
    before: Reply | None = None
    for step in range(STEPS):
        computed = agent.engine.counts.computed_tokens
        reply = agent.step(say(step))
        assert reply.finished.reason == "tool_calls"
        assert [each.name for each in reply.turn.reply.calls] == ["write"]
        if before is not None:
            # All that the last turn computed, its sampled tokens as they were; then the rest.
            assert reply.reused == len(before.turn.tokens)
            new = reply.turn.tokens[reply.reused : reply.turn.prompt_tokens]
            assert agent.letters.spelled(new).startswith("<|im_end|>\n<|im_start|>user\n")
            assert agent.letters.spelled(new).count("done") == 1
            computed = agent.engine.counts.computed_tokens - computed
            assert computed == len(new) + len(reply.tokens)
        agent.go_on(reply, change, f"done {step}")
        before = reply
    if template is THINKING and change is not as_it_was:
        assert "reasoning" in reply.finished.cache.normalised


def test_reasoning_that_the_template_drops_costs_the_reply_and_no_more() -> None:
    """After the next user message it is not shown any more: what comes before it still holds."""
    agent = Agent(THINKING)
    first = agent.step("<think>\nHm.\n</think>\n\nAll is tidy.", tools=None)
    assert first.turn.message["reasoning_content"] == "Hm."
    assert first.finished.reasoning_tokens > 0
    answer = without_reasoning(first.turn.message)
    agent.history += answer, {"role": "user", "content": "And the garden?"}
    second = agent.step("Too.", tools=None)
    assert second.reused == first.turn.prompt_tokens


def test_words_that_only_a_generation_prompt_has_cost_the_reply_and_no_more() -> None:
    template = THINKING.replace(
        "{{- '<|im_start|>assistant\n' }}{%- endif %}",
        "{{- '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{%- endif %}",
    )
    assert template != THINKING
    agent = Agent(template)
    first = agent.step("All is tidy.", tools=None)
    assert first.turn.message["content"] == "All is tidy."
    agent.history += first.turn.message, {"role": "user", "content": "And the garden?"}
    second = agent.step("Too.", tools=None)
    scaffold = len(agent.letters.encode("<think>\n\n</think>\n\n", special=True))
    assert second.reused >= first.turn.prompt_tokens - scaffold


def test_a_loop_in_channels_goes_on_from_its_calls() -> None:
    agent = Agent(CHANNELS, control=HARMONY_CONTROL, end="<|call|>")
    before: Reply | None = None
    for step in range(4):
        reply = agent.step(
            f"<|channel|>analysis<|message|>Room {step}.<|end|><|start|>assistant<|channel|>"
            f'commentary to=functions.write <|constrain|>json<|message|>{{"path":"{step}"}}'
        )
        assert (
            reply.turn.message["tool_calls"][0]["function"]["arguments"] == f'{{"path":"{step}"}}'
        )
        assert reply.turn.message["reasoning_content"] == f"Room {step}."
        if before is not None:
            assert reply.reused == len(before.turn.tokens)
        agent.go_on(reply, with_json_reordered, f"done {step}")
        before = reply
