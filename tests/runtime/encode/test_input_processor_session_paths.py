"""A second session reuses the first even if the system prompt contains a session path."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.chat.templates import CHATML
from tests.chat.tool_templates import HERMES
from tests.support.agent import Agent
from tests.support.harness import Reply, RuntimeHarness

INTRODUCTION = "You are an agent at the command line. " * 10
RULES = "Never guess. Read before you write. " * 40
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": "Does one thing and does it well. " * 4,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for number in range(8)
]


def session(agent: Agent) -> Reply:
    """A session's first turn."""
    folder = f"/home/u/.copilot/session-state/{uuid.uuid4()}"
    agent.history = [
        {"role": "system", "content": f"{INTRODUCTION}Plan: {folder}/plan.md. {RULES}"},
        {"role": "user", "content": "Tidy the house."},
    ]
    return agent.step("Done.")


def share_reused(template: str, **settings: Any) -> tuple[float, list[str]]:
    """Share of its prompt that a second session reuses, and the names of its normalisations."""
    agent = Agent(template, tools=TOOLS)
    agent.harness = RuntimeHarness(agent.engine, **settings)
    session(agent)
    second = session(agent)
    return second.reused / second.turn.prompt_tokens, second.finished.cache.normalised


def test_tools_shown_before_the_system_prompt_are_reused() -> None:
    share, _ = share_reused(CHATML)
    assert 0.5 < share < 0.9  # everything before the path


@pytest.mark.parametrize(("template", "without"), [(CHATML, 0.9), (HERMES, 0.4)])
def test_a_second_session_reuses_everything_if_its_path_is_normalised(
    template: str, without: float
) -> None:
    assert share_reused(template)[0] < without
    share, normalised = share_reused(template, normaliser=["session-paths"])
    assert share > 0.99
    assert "session-paths" in normalised
