"""Tools and `tool_choice`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.api.base.tools import MAX_REQUIRED_CALLS
from rekindle.protocol.requests import ToolUse
from tests.api.anthropic.asking import LOOK, TOOL, ask, error, refused, requested
from tests.api.scripted import Front

SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse()),
        ({"type": "auto"}, ToolUse()),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolUse(parallel=False)),
        ({"type": "any"}, ToolUse(choice="required", parallel=False)),
        (
            {"type": "any", "disable_parallel_tool_use": False},
            ToolUse(choice="required", max_calls=MAX_REQUIRED_CALLS),
        ),
        (
            {"type": "tool", "name": "look"},
            ToolUse(choice="required", name="look", parallel=False),
        ),
        ({"type": "none"}, ToolUse(choice="none")),
    ],
)
def test_each_tool_choice_reaches_the_runtime(choice: Any, use: ToolUse) -> None:
    request = requested(tools=[TOOL], tool_choice=choice)
    assert request.tool_use == use
    assert request.tools == [LOOK]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": {"type": "any"}}, '"any" needs `tools`'),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "'x', which is not"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "needs `name`"),
        ({"tools": [TOOL, TOOL]}, "more than one tool called 'look'"),
        ({"tools": [{"name": "look"}]}, "needs `input_schema`"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "takes a name of 1 to 128 letters"),
    ],
)
def test_a_choice_or_a_tool_that_cannot_be_is_refused(fields: Any, reason: str) -> None:
    assert reason in refused(**fields)


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_other_servers_are_left_out_and_named_in_a_header(stream: bool) -> None:
    """llama.cpp #20156: tools that are no functions were refused."""
    front = Front()
    choice = {"type": "tool", "name": "web_search"}
    response = ask(front, tools=[SEARCH], tool_choice=choice, stream=stream)
    assert response.status_code == httpx.codes.OK
    assert response.headers["x-ignored-tools"] == "web_search"
    assert front.runtime.requested.tools is None
    assert front.runtime.requested.tool_use == ToolUse()


def test_a_strange_type_cannot_write_headers() -> None:
    response = ask(Front(), tools=[{"type": "a\r\nset-cookie: x"}])
    assert response.headers["x-ignored-tools"] == "a??set-cookie??x"


def test_without_ignored_tools_there_is_no_header() -> None:
    assert "x-ignored-tools" not in ask(Front(), tools=[TOOL]).headers


def test_a_form_and_a_forced_call_exclude_each_other() -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    response = ask(Front(), tools=[TOOL], tool_choice={"type": "any"}, output_config=form)
    assert "leave one of them out" in error(response)["message"]
