"""An agent's loop in every format of calls, each in the template of a family that writes it."""

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

# Templates that show the first reply, or all but the first, elsewhere than they asked for it.
MOVING = ("deepseek_r1", "gemma_4_large")
# Those that show something before a later user's message that they did not show without it.
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
    """One step: the model calls once for each room, and is told what came of it."""
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
    """What of its prompt a turn had to compute."""
    return agent.letters.spelled(reply.turn.tokens.ids[reply.reused : reply.turn.prompt_tokens])


def test_every_format_of_calls_has_a_family() -> None:
    assert {family.format for family in FAMILIES.values()} == set(TOOL_FORMAT_NAMES) - {"plain"}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_s_template_tells_its_format(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    assert select(agent.engine.chat_template).name == family.format
    assert ChatTemplate(agent.engine.chat_template or "").shows_tools


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", STEADY)
def test_each_step_computes_its_new_message_alone(name: str, change: Change) -> None:
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
def test_so_it_does_where_state_cannot_be_cut(name: str) -> None:
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
    """A large one's prompt says that there is no thought, where a user spoke last; no history says
    that. After results nothing is said, so all other calls are reused."""
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
    """Its template shows no thought that is over, only that it is; after results none is opened."""
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
    shared = 1  # of the two in letters: <
    assert opened[:shared] == closed[:shared]
    assert second.reused == first.turn.prompt_tokens - len(opened) + shared
    assert third.reused == len(second.turn.tokens)


def test_two_calls_that_a_template_shows_one_by_one_cost_the_reply_and_no_more() -> None:
    """Llama's template takes one call in a message, so each is shown with its own result."""
    family = FAMILIES["llama3"]
    agent = family.agent()
    first = work(agent, family, with_json_reordered, [0, 1])
    second = work(agent, family, with_json_reordered, [2])
    assert second.reused == first.turn.prompt_tokens


@pytest.mark.parametrize("name", PARALLEL)
def test_two_calls_in_a_reply_are_reused_as_one_is(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = work(agent, family, with_json_reordered, [0, 1])
    second = work(agent, family, with_json_reordered, [2, 3])
    third = work(agent, family, with_json_reordered, [4])
    assert second.reused == len(first.turn.tokens)
    assert third.reused == len(second.turn.tokens)
    assert spelled_new(agent, third).count("done") == 2


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_has_to_be_made_fits_its_schema(name: str) -> None:
    """The fake model chooses blindly among the tokens that it may choose."""
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(family.opening, end="", tool_use=REQUIRED)
    assert first.finished.reason == "tool_calls"
    assert first.message["content"] is None
    assert called(first)
    assert all(valid(arguments, SWEEP) for arguments in called(first))


@pytest.mark.parametrize("name", STEADY)
def test_a_call_that_had_to_be_made_is_reused(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    use = ToolUse(choice="required", parallel=family.parallel)
    first = agent.step(family.opening, end="", tool_use=use)
    agent.go_on(first, with_json_reordered, *("done" for _ in called(first)))
    assert answer(agent, family).reused == len(first.turn.tokens)


@pytest.mark.parametrize("name", ["function_gemma", "gemma_4"])
def test_a_call_that_has_to_be_made_may_end_as_calls_do(name: str) -> None:
    """Gemma goes on to the tool's answer; were that forbidden, another call would be likelier than
    the end of its turn."""
    family = FAMILIES[name]
    quote = "<escape>" if name == "function_gemma" else '<|"|>'
    open, close = family.control[3:5] if name == "function_gemma" else family.control[5:7]
    agent = family.agent()
    raw = f"{open}call:sweep{{room:{quote}a{quote},times:1,wet:true}}{close}"
    reply = agent.step(raw, end=family.end, tool_use=REQUIRED)
    assert called(reply) == [{"room": "a", "times": 1, "wet": True}]


@pytest.mark.parametrize("name", SPOKEN)
def test_words_before_a_call_are_reused_with_it(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(SAYING + "\n" + family.calls([sweep(0)]), end=family.end)
    assert first.message["content"] == SAYING
    agent.go_on(first, with_json_reordered, "done")
    assert answer(agent, family).reused == len(first.turn.tokens)


@pytest.mark.parametrize("name", ["mistral_list", "mistral_id"])
def test_words_before_a_call_that_the_template_leaves_out_cost_the_reply(name: str) -> None:
    family = FAMILIES[name]
    agent = family.agent()
    first = agent.step(SAYING + "\n" + family.calls([sweep(0)]))
    assert first.message["content"] == SAYING
    agent.go_on(first, as_it_was, "done")
    last = answer(agent, family)
    assert last.reused == first.turn.prompt_tokens
    assert SAYING not in spelled_new(agent, last)


@pytest.mark.parametrize("name", LASTING)
def test_after_an_answer_a_user_s_message_is_computed_alone(name: str) -> None:
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
def test_mistral_s_tools_move_to_a_new_user_s_message(name: str) -> None:
    """What stands before them is reused: the system's message."""
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
def test_thoughts_of_a_loop_that_is_over_are_shown_no_more(name: str, shared: str) -> None:
    """They go with the next user's message, all at once: what comes before the first is reused, and
    a letter of its marker where what follows begins with it, too."""
    family = FAMILIES[name]
    agent = family.agent()
    first = work(agent, family, as_it_was, [0])
    work(agent, family, as_it_was, [1])
    agent.history += answer(agent, family).message, THANKS
    last = answer(agent, family)
    prompt = agent.letters.spelled(first.turn.tokens.ids[: first.turn.prompt_tokens])
    kept = prompt.removesuffix("<think>\n") + shared
    assert agent.letters.spelled(last.turn.tokens.ids[: last.reused]) == kept
