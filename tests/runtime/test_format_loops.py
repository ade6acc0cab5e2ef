"""A tool loop computes only new messages in every tool format, with its family's template."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from rekindle.chat.template import ChatTemplate
from rekindle.chat.tools.registry import TOOL_FORMAT_NAMES, select
from rekindle.protocol.requests import ToolUse
from tests.chat.grammar.validator import valid
from tests.support.agent import CHANGES, Agent, Change, as_it_was, with_json_reordered
from tests.support.families import FAMILIES, SWEEP, Family, sweep
from tests.support.harness import Reply

STEPS = 4
REQUIRED = ToolUse(choice="required")
SAYING = "I will sweep it."
THANKS = {"role": "user", "content": "And the garden?"}

# Templates that render the first reply, or all later ones, not where the prompt asked for it.
MOVING = ("deepseek_r1", "gemma_4_large")
# Templates that insert text before a later user message.
REWRITING = ("mistral_list", "mistral_id", "qwen35", "gemma_4")

STEADY = [name for name in FAMILIES if name not in MOVING]
LASTING = [name for name in FAMILIES if name not in REWRITING]
SPOKEN = (
    *("hermes", "coder", "lfm25", "lfm2", "mistral_args", "deepseek_v3", "deepseek_v31"),
    *("function_gemma", "gemma_3"),
)
PARALLEL = [name for name, family in FAMILIES.items() if family.parallel and name in STEADY]


def called(reply: Reply) -> list[object]:
    return [json.loads("".join(call.arguments)) for call in reply.turn.output.message.tool_calls]


def work(agent: Agent, family: Family, change: Change, rooms: Sequence[int]) -> Reply:
    """One step: the model calls a tool for each room and gets the results."""
    calls = [sweep(room) for room in rooms]
    reply = agent.step(family.calls(calls), end=family.end)
    assert reply.finished.reason == "tool_calls"
    assert {call.name for call in reply.turn.output.message.tool_calls} == {"sweep"}
    assert called(reply) == calls
    agent.go_on(reply, change, *(f"done {room}" for room in rooms))
    return reply


def answer(agent: Agent, family: Family) -> Reply:
    reply = agent.step(family.answer)
    assert reply.message["content"] == "All is tidy."
    return reply


def spelled_new(agent: Agent, reply: Reply) -> str:
    """The part of its prompt that a turn had to compute."""
    return agent.letters.spelled(reply.turn.tokens.ids[reply.reused : reply.turn.prompt_tokens])


def test_every_tool_format_has_a_family() -> None:
    assert {family.format for family in FAMILIES.values()} == set(TOOL_FORMAT_NAMES) - {"plain"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_template_of_a_family_selects_its_format(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    assert select(agent.engine.chat_template).name == family.format
    assert ChatTemplate(agent.engine.chat_template or "").shows_tools


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STEADY)
def test_each_step_computes_only_its_new_message(name: str, change: Change) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    before = work(agent, family, change, [0])
    for step in range(1, STEPS):
        computed = agent.engine.counts.computed_tokens
        reply = work(agent, family, change, [step])
        assert reply.reused == len(before.turn.tokens)
        new = spelled_new(agent, reply)
        assert new.startswith(family.end)
        assert new.count("done") == 1
        computed = agent.engine.counts.computed_tokens - computed
        assert computed == len(reply.turn.tokens) - reply.reused
        before = reply


@pytest.mark.parametrize("name", STEADY)
def test_each_step_computes_only_its_new_message_with_checkpoints(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent(can_truncate=False)
    before = work(agent, family, with_json_reordered, [0])
    for step in range(1, 3):
        reply = work(agent, family, with_json_reordered, [step])
        assert reply.reused == len(before.turn.tokens)
        before = reply


@pytest.mark.parametrize("change", CHANGES)
def test_deepseek_r1_computes_each_call_again(change: Change) -> None:
    """Results end with a marker that its template leaves out once a call follows them. So the
    prompt that asked for a call is not the beginning of the next one: all up to that marker is
    reused, and the call is computed as the template writes it."""
    family = FAMILIES["deepseek_r1"]
    agent = family.agent()
    first = work(agent, family, change, [0])
    before = work(agent, family, change, [1])
    assert before.reused == len(first.turn.tokens)
    for step in range(2, STEPS):
        reply = work(agent, family, change, [step])
        assert reply.reused == before.turn.prompt_tokens - 1
        assert spelled_new(agent, reply).count("done") == 1
        before = reply


@pytest.mark.parametrize("change", CHANGES)
def test_gemma_4_without_thought_computes_its_first_call_again(change: Change) -> None:
    """After a user message, the prompt of a large model has an empty thought, which no history
    has. After tool results it has none, so all other calls are reused."""
    family = FAMILIES["gemma_4_large"]
    agent = family.agent()
    first = work(agent, family, change, [0])
    before = work(agent, family, change, [1])
    no_thought = agent.letters.encode("<|channel>thought\n<channel|>", special=True)
    assert before.reused == first.turn.prompt_tokens - len(no_thought)
    for step in range(2, STEPS):
        reply = work(agent, family, change, [step])
        assert reply.reused == len(before.turn.tokens)
        before = reply


def test_deepseek_v31_with_thought_computes_its_first_call_again() -> None:
    """Its template shows only the end marker of past reasoning, and opens none after results."""
    family = FAMILIES["deepseek_v31"]
    agent = family.agent()
    thinking = {"thinking": True}
    first = agent.step("A room.</think>" + family.calls([sweep(0)]), template_kwargs=thinking)
    assert first.message["reasoning_content"] == "A room."
    agent.go_on(first, as_it_was, "done 0")
    second = agent.step(family.calls([sweep(1)]), template_kwargs=thinking)
    agent.go_on(second, as_it_was, "done 1")
    third = agent.step(family.calls([sweep(2)]), template_kwargs=thinking)
    opened, closed = "<think>", "</think>"
    shared = 1  # both start with the letter <
    assert opened[:shared] == closed[:shared]
    assert second.reused == first.turn.prompt_tokens - len(opened) + shared
    assert third.reused == len(second.turn.tokens)


def test_two_calls_that_a_template_splits_cost_only_the_reply() -> None:
    """Llama's template allows one call per message, so each is shown with its own result."""
    family = FAMILIES["llama3"]
    agent = family.agent()
    first = work(agent, family, with_json_reordered, [0, 1])
    second = work(agent, family, with_json_reordered, [2])
    assert second.reused == first.turn.prompt_tokens


@pytest.mark.parametrize("name", PARALLEL)
def test_two_calls_in_one_reply_are_reused(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = work(agent, family, with_json_reordered, [0, 1])
    second = work(agent, family, with_json_reordered, [2, 3])
    third = work(agent, family, with_json_reordered, [4])
    assert second.reused == len(first.turn.tokens)
    assert third.reused == len(second.turn.tokens)
    assert spelled_new(agent, third).count("done") == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_required_call_fits_its_schema(name: str) -> None:
    """The fake model chooses at random among the allowed tokens."""
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(family.opening, end="", tool_use=REQUIRED)
    assert first.finished.reason == "tool_calls"
    assert first.message["content"] is None
    assert called(first)
    assert all(valid(arguments, SWEEP) for arguments in called(first))


@pytest.mark.parametrize("name", STEADY)
def test_a_required_call_is_reused(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    use = ToolUse(choice="required", parallel=family.parallel)
    first = agent.step(family.opening, end="", tool_use=use)
    agent.go_on(first, with_json_reordered, *("done" for _ in called(first)))
    assert answer(agent, family).reused == len(first.turn.tokens)


@pytest.mark.parametrize("name", ["function_gemma", "gemma_4"])
def test_a_required_call_may_end_with_the_end_marker_of_calls(name: str) -> None:
    """Gemma continues with the tool's result. If that were forbidden, it would rather write
    another call than end its turn."""
    family = FAMILIES[name]
    quote = "<escape>" if name == "function_gemma" else '<|"|>'
    open, close = family.control[3:5] if name == "function_gemma" else family.control[5:7]
    agent = family.agent()
    raw = f"{open}call:sweep{{room:{quote}a{quote},times:1,wet:true}}{close}"
    reply = agent.step(raw, end=family.end, tool_use=REQUIRED)
    assert called(reply) == [{"room": "a", "times": 1, "wet": True}]


@pytest.mark.parametrize("name", SPOKEN)
def test_text_before_a_call_is_reused(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(SAYING + "\n" + family.calls([sweep(0)]), end=family.end)
    assert first.message["content"] == SAYING
    agent.go_on(first, with_json_reordered, "done")
    assert answer(agent, family).reused == len(first.turn.tokens)


@pytest.mark.parametrize("name", ["mistral_list", "mistral_id"])
def test_text_before_a_call_that_the_template_omits_costs_the_reply(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(SAYING + "\n" + family.calls([sweep(0)]))
    assert first.message["content"] == SAYING
    agent.go_on(first, as_it_was, "done")
    last = answer(agent, family)
    assert last.reused == first.turn.prompt_tokens
    assert SAYING not in spelled_new(agent, last)


@pytest.mark.parametrize("name", LASTING)
def test_after_an_answer_only_the_new_user_message_is_computed(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    for step in range(2):
        work(agent, family, with_json_reordered, [step])
    said = answer(agent, family)
    agent.history += said.message, THANKS
    last = answer(agent, family)
    assert last.reused == len(said.turn.tokens)
    assert spelled_new(agent, last).count("done") == 0
    assert spelled_new(agent, last).count("garden") == 1


@pytest.mark.parametrize("name", ["mistral_list", "mistral_id"])
def test_mistral_moves_its_tools_to_the_new_user_message(name: str) -> None:
    """Only the system message before them is reused."""
    family = FAMILIES[name]
    agent = family.agent()
    first = work(agent, family, as_it_was, [0])
    agent.history += answer(agent, family).message, THANKS
    last = answer(agent, family)
    text = agent.letters.spelled(first.turn.tokens)
    before = text[: text.index("[AVAILABLE_TOOLS]")]
    assert before.endswith("[/SYSTEM_PROMPT]")
    assert agent.letters.spelled(last.turn.tokens.ids[: last.reused]) == before


@pytest.mark.parametrize(("name", "shared"), [("qwen35", "<"), ("gemma_4", "")])
def test_reasoning_of_a_finished_loop_is_dropped(name: str, shared: str) -> None:
    """The next user message drops all of it, so only the part before the first reasoning is reused,
    and one letter of its marker if the following text starts with the same letter."""
    family = FAMILIES[name]
    agent = family.agent()
    first = work(agent, family, as_it_was, [0])
    work(agent, family, as_it_was, [1])
    agent.history += answer(agent, family).message, THANKS
    last = answer(agent, family)
    prompt = agent.letters.spelled(first.turn.tokens.ids[: first.turn.prompt_tokens])
    kept = prompt.removesuffix("<think>\n") + shared
    assert agent.letters.spelled(last.turn.tokens.ids[: last.reused]) == kept
