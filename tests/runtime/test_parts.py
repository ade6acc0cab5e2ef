"""Replies with calls and reasoning: log probabilities match the text, a client can ask for one call
at a time, and a reply that was cut off is not treated as complete."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.engine.base import Sampled
from rekindle.protocol.events import CacheReport, Delta, Event, Reason, TextDelta
from rekindle.protocol.requests import GenerateRequest, SamplingParams, ToolUse
from rekindle.runtime.schedule.turn import Turn
from tests.chat.tool_templates import CHANNELS, HERMES, THINKING
from tests.support.agent import TOOLS, Agent, as_it_was, call, thinking
from tests.support.conversations import CHATML_CONTROL, HARMONY_CONTROL

PYTHONIC = HERMES.replace("<tool_call>\n", "<|tool_call_start|>").replace("<tools>", "[")
ONE_AT_A_TIME = ToolUse(parallel=False)
TAGGED = (*CHATML_CONTROL, "<think>", "</think>", "<tool_call>", "</tool_call>")


def turn_of(agent: Agent, **fields: Any) -> Turn:
    fields = {"tools": TOOLS, "max_tokens": None, **fields}
    ask = GenerateRequest(
        turn=1, messages=agent.history, sampling=SamplingParams(top_logprobs=0), **fields
    )
    turn = agent.harness.encode_one(ask)
    agent.harness.pipeline.find(turn)
    turn.report = CacheReport("miss", Reason.NOT_CACHED, 0, 0, None)
    return turn


def heard(turn: Turn, tokens: list[int]) -> list[Event]:
    events: list[Event] = []
    for token in tokens:
        turn.take(Sampled(token, -1.0, ()))
        events += turn.accept(Sampled(token, -1.0, ()))
        if turn.output.finish_reason is not None:
            break
    return events


def texts(events: list[Event]) -> list[TextDelta]:
    parts = (event.part for event in events if isinstance(event, Delta))
    return [part for part in parts if isinstance(part, TextDelta)]


def logged(events: list[Event]) -> bytes:
    return b"".join(log.piece for text in texts(events) for log in text.logprobs or ())


CHANNELLED = (
    "<|channel|>analysis<|message|>Hm, a final word.<|end|><|start|>assistant<|channel|>final"
    "<|message|>a thing<|return|>"
)


@pytest.mark.parametrize(
    ("template", "control", "raw", "said"),
    [
        (THINKING, CHATML_CONTROL, "<think>\nHm.\n</think>\n\nHello <b> there\n" + call(0), ...),
        (THINKING, TAGGED, "<think>\nHm.\n</think>\n\nHello <b> there\n" + call(0), ...),
        (HERMES, TAGGED, "x <<y " + call(0), "x <<y"),
        (HERMES, TAGGED, "x <tool_call> y", "x <tool_call> y"),
        (HERMES, TAGGED, call(0), ""),
        (THINKING, TAGGED, "<think>\nHm.", ""),
        (HERMES, CHATML_CONTROL, "Zürich €", "Zürich €"),
        (CHANNELS, HARMONY_CONTROL, CHANNELLED, "a thing"),
    ],
)
def test_log_probabilities_belong_to_the_tokens_of_the_text(
    template: str, control: tuple[str, ...], raw: str, said: Any
) -> None:
    said = "Hello <b> there" if said is ... else said
    end = "<|return|>" if control is HARMONY_CONTROL else "<|im_end|>"
    agent = Agent(template, control=control, ends=(end,), tools=TOOLS)
    events = heard(turn_of(agent), [*agent.letters.sampled(raw), agent.letters.control_texts[end]])
    assert "".join(event.text for event in texts(events)) == said
    assert logged(events) == said.encode()
    assert all(event.text for event in texts(events))  # a call starts without text


def test_a_plain_reply_reports_log_probabilities_with_every_token() -> None:
    agent = Agent(HERMES, tools=TOOLS)
    events = heard(turn_of(agent, tools=None, stop=["ab"]), agent.letters.sampled("xay"))
    assert [text.logprobs and text.logprobs[0].piece for text in texts(events)] == [
        b"x",
        b"a",
        b"y",
    ]


# -- one call at a time --


@pytest.mark.parametrize("more", ["\n" + call(1), "\nDone! " * 3])
def test_without_parallel_calls_the_reply_has_one_call(more: str) -> None:
    agent = Agent(HERMES, tools=TOOLS)
    reply = agent.step(call(0) + more, tool_use=ONE_AT_A_TIME)
    assert reply.finished.reason == "tool_calls"
    assert len(reply.turn.output.message.tool_calls) == 1
    assert reply.message["content"] is None
    assert len(reply.tokens) < len(call(0) + more)  # the rest is not sampled


def test_without_parallel_calls_only_the_first_of_a_list_is_kept() -> None:
    agent = Agent(PYTHONIC, tools=TOOLS)
    reply = agent.step('[read(path="a"), write(path="b")]', tool_use=ONE_AT_A_TIME)
    assert [each.name for each in reply.turn.output.message.tool_calls] == ["read"]


@pytest.mark.parametrize("more", ["", "\n" + call(1)])
def test_a_single_call_is_recalled_completely(more: str) -> None:
    agent = Agent(HERMES, tools=TOOLS)
    first = agent.step(call(0) + more, tool_use=ONE_AT_A_TIME)
    agent.go_on(first, as_it_was, "done")
    second = agent.step("ok", tool_use=ONE_AT_A_TIME)
    spelled = agent.letters.spelled(second.turn.encoded.prompt.tokens)
    assert spelled.count("</tool_call><|im_end|>") == 1
    assert spelled.count('"name": "write"') == 2  # the definition and the call
    if not more:
        assert second.reused == len(first.turn.tokens)


# -- replies that were cut off --


@pytest.mark.parametrize(
    ("fields", "end"), [({"max_tokens": 60}, "length"), ({"stop": ["swept"]}, "stop")]
)
def test_a_cut_off_call_is_encoded_as_the_client_sends_it(fields: dict[str, Any], end: str) -> None:
    agent = Agent(HERMES, tools=TOOLS)
    agent.history[0]["content"] = "Short."
    agent.engine.scripts.append(agent.letters.sampled(call(0)))
    ask = {"max_tokens": None, "tools": TOOLS, **fields}
    request = GenerateRequest(
        turn=1, messages=agent.history, sampling=SamplingParams(temperature=0), **ask
    )
    reply = agent.harness.take_turn(agent.harness.encode_one(request))
    agent.harness.run(reply)
    assert reply.finished.reason == end
    agent.history = [*agent.history, reply.message, {"role": "user", "content": "Go on."}]
    later = agent.step("ok")
    fresh = agent.step("ok", exact=True)
    spelled = agent.letters.spelled
    assert spelled(later.turn.encoded.prompt.tokens) == spelled(fresh.turn.encoded.prompt.tokens)
    assert "</tool_call><|im_end|>" in spelled(later.turn.encoded.prompt.tokens)


@pytest.mark.parametrize("tokens", range(8, 40))
def test_a_call_cut_off_before_its_name_is_not_shown_and_the_next_turn_works(
    tokens: int,
) -> None:
    agent = Agent(HERMES, tools=TOOLS)
    reply = agent.step("I will. " + call(0), max_tokens=tokens)
    assert reply.finished.reason == "length"
    assert reply.text.rstrip("< ") in ("I will.", "")  # as it is streamed
    assert (reply.message["content"] or "").rstrip("< ") == reply.text.rstrip("< ")
    assert "tool_calls" not in reply.message
    agent.history += reply.message, {"role": "user", "content": "Go on."}
    later, fresh = agent.step("ok"), agent.step("ok", exact=True)
    spelled = agent.letters.spelled
    assert spelled(later.turn.encoded.prompt.tokens) == spelled(fresh.turn.encoded.prompt.tokens)


def test_a_call_with_a_stop_string_in_its_arguments_is_not_complete() -> None:
    """In the Harmony format only the next marker ends the arguments."""
    agent = Agent(CHANNELS, control=HARMONY_CONTROL, ends=("<|call|>",), tools=TOOLS)
    raw = '<|channel|>commentary to=functions.write<|message|>{"path": "a", "text": "swept"}'
    assert agent.step(raw).finished.reason == "tool_calls"
    stopped = agent.step(raw, stop=["swept"])
    assert stopped.finished.reason == "stop"
    assert stopped.message["tool_calls"][0]["function"]["arguments"] == ('{"path": "a", "text": "')


def test_cut_off_reasoning_is_encoded_as_the_client_sends_it() -> None:
    agent = Agent(THINKING, tools=TOOLS)
    agent.engine.scripts.append(agent.letters.sampled(thinking(0)))
    sampling = SamplingParams(temperature=0)
    request = GenerateRequest(
        turn=1, messages=agent.history, sampling=sampling, max_tokens=20, tools=TOOLS
    )
    reply = agent.harness.take_turn(agent.harness.encode_one(request))
    agent.harness.run(reply)
    assert reply.finished.reason == "length"
    agent.history = [*agent.history, reply.message]
    later = agent.step("ok")
    assert "</think>\n\n<|im_end|>" in agent.letters.spelled(later.turn.encoded.prompt.tokens)
