"""A reply that continues the final message reuses its state."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.events import Reason
from tests.chat.templates import CHATML, HEADERS, PARTS
from tests.support.agent import Agent

CONTINUED: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
STORY = "Once upon a time, the sea was young."


def begun(agent: Agent, tokens: int, **fields: Any) -> Any:
    """Append a reply that was cut off by `max_tokens` as the last message."""
    reply = agent.step(STORY, max_tokens=tokens, **fields)
    assert reply.finished.reason == "length"
    agent.history.append({"role": "assistant", "content": reply.text})
    return reply


@pytest.mark.parametrize("template", [CHATML, HEADERS, PARTS])
@pytest.mark.parametrize("tokens", [1, 5, 12])  # 5 ends right after a space
def test_the_reply_continues_the_sampled_tokens_of_the_text_so_far(
    template: str, tokens: int
) -> None:
    agent = Agent(template)
    first = begun(agent, tokens)
    second = agent.step(STORY[len(first.text) :], **CONTINUED)
    assert second.turn.encoded.prompt.tokens.ids() == first.turn.tokens.ids
    assert second.text == STORY[len(first.text) :]
    assert second.reused == len(first.turn.tokens) - 1  # the last token is always computed


def test_a_text_written_by_the_client_is_tokenised_and_continued() -> None:
    agent = Agent(CHATML)
    agent.history.append({"role": "assistant", "content": "The thing, sa"})
    reply = agent.step("ying hello.", **CONTINUED)
    spelled = agent.letters.spelled(reply.turn.encoded.prompt.tokens)
    assert spelled.endswith("<|im_start|>assistant\nThe thing, sa")
    fresh = agent.letters.encode(spelled, special=True)
    assert reply.turn.encoded.prompt.tokens.ids() == fresh


def test_the_next_turn_reuses_the_state_of_the_whole_continued_reply() -> None:
    agent = Agent(CHATML)
    first = begun(agent, 12)
    second = agent.step(STORY[len(first.text) :], **CONTINUED)
    agent.history[-1]["content"] += second.text
    agent.history.append({"role": "user", "content": "And then?"})
    third = agent.step("It grew.")
    assert third.reused >= len(second.turn.tokens) - 1
    ids = third.turn.encoded.prompt.tokens.ids()
    assert ids[: len(second.turn.tokens)] == second.turn.tokens.ids
    spelled = agent.letters.spelled(ids)
    assert spelled.count("assistant\n") == 2
    assert f"{STORY}<|im_end|>" in spelled


def test_a_prompt_without_a_generation_prompt_ends_with_the_last_message() -> None:
    agent = Agent(CHATML)
    reply = agent.step("x", add_generation_prompt=False)
    spelled = agent.letters.spelled(reply.turn.encoded.prompt.tokens)
    assert spelled.rstrip().endswith("Tidy the house.<|im_end|>")


def test_a_request_that_opts_out_can_be_continued() -> None:
    agent = Agent(CHATML)
    agent.history.append({"role": "assistant", "content": "The thing"})
    reply = agent.step("x", reuse=False, **CONTINUED)
    spelled = agent.letters.spelled(reply.turn.encoded.prompt.tokens)
    assert spelled.endswith("assistant\nThe thing")
    assert reply.finished.cache.reason is Reason.OPTED_OUT
