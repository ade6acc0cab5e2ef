"""Fields of a request, as the runtime gets them."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import StructuredOutput
from tests.api.anthropic.asking import HELLO, PATH, TOOL, ask, refused, requested
from tests.api.scripted import Front

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
FORM = {"type": "json_schema", "schema": SCHEMA}


def test_sampling_is_as_asked_for_or_as_configured() -> None:
    sampling = requested(temperature=0.5, top_p=0.8, top_k=7).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.8, 7)
    front = Front(temperature=0.25)
    ask(front)
    assert front.runtime.requested.sampling.temperature == 0.25


def test_max_tokens_is_taken_and_needed() -> None:
    assert requested(max_tokens=32000).max_tokens == 32000
    response = Front().post(PATH, {"messages": HELLO["messages"]})
    assert "`max_tokens` is missing" in response.text


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORM}}, {"output_format": FORM}])
def test_a_form_is_enforced(fields: Any) -> None:
    expected = StructuredOutput(schema=SCHEMA, param="output_config.format")
    assert requested(**fields).structured_output == expected


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2048}},
            {"enable_thinking": True, "thinking_budget": 2048},
        ),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "high"}),
    ],
)
def test_the_reasoning_effort_reaches_the_template(fields: Any, kwargs: dict[str, Any]) -> None:
    assert requested(**fields).template_kwargs == kwargs


def test_a_user_id_is_a_name_and_nothing_else() -> None:
    names = requested(metadata={"user_id": "user_1_session_2"}).names
    assert names is not None
    assert names.prompt_cache_key == "user_1_session_2"
    assert requested().names is None
    long = requested(metadata={"user_id": "x" * 1000}).names
    assert long is not None
    assert long.prompt_cache_key is not None
    assert len(long.prompt_cache_key) == 64


@pytest.mark.parametrize(("ttl", "seconds"), [("5m", 300.0), ("1h", 3600.0)])
@pytest.mark.parametrize("place", ["body", "system", "tool", "message", "result"])
def test_a_cache_mark_pins_the_computed_state_for_its_lifetime(
    place: str, ttl: str, seconds: float
) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": ttl}}
    block = {"type": "text", "text": "x", **mark}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [block]}
    places: dict[str, dict[str, Any]] = {
        "body": mark,
        "system": {"system": [block]},
        "tool": {"tools": [{**TOOL, **mark}]},
        "message": {"messages": [{"role": "user", "content": [block]}]},
        "result": {"messages": [{"role": "user", "content": [result]}]},
    }
    names = requested(**places[place]).names
    assert names is not None
    assert names.pin_s == seconds


def test_only_who_asks_for_diagnostics_has_its_replies_named() -> None:
    front = Front()
    message = ask(front, diagnostics={"previous_message_id": None}).json()
    names = front.runtime.requested.names
    assert names is not None
    assert names.message_id == message["id"]
    assert names.message_ids == []
    later = requested(diagnostics={"previous_message_id": "msg_1"}).names
    assert later is not None
    assert later.message_ids == ["msg_1"]


@pytest.mark.parametrize("configured", [False, True])
def test_normalising_is_switched_by_the_request_or_else_by_the_server(configured: bool) -> None:
    front = Front(normalise=configured)
    ask(front)
    assert front.runtime.requested.normalise == configured
    assert requested(normalise=False).normalise is False
    assert requested(normalise=["dates"]).normalise == ["dates"]


def test_fields_of_features_that_are_not_here_are_ignored() -> None:
    request = requested(
        context_management={"edits": [{"type": "clear_tool_uses_20250919"}]},
        service_tier="auto",
        container="x",
        mcp_servers=[],
        speed="fast",
    )
    assert request.messages == HELLO["messages"]


def test_a_model_built_into_clients_is_answered_by_the_first() -> None:
    front = Front()
    assert ask(front, model="claude-haiku-4-5").json()["model"] == "tiny"
    assert ask(Front(), model="gpt-7").status_code == 404


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"messages": []}, "`messages` takes at least 1 item"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages.0.role` takes"),
        ({"max_tokens": 0}, "`max_tokens` takes a number from 1 up"),
        ({"temperature": -1}, "`temperature` takes a number from 0 up"),
        ({"system": 5}, "`system`"),
        ({"stop_sequences": ["x"] * 17}, "`stop_sequences` takes at most 16 items"),
    ],
)
def test_a_wrong_field_is_named(fields: Any, reason: str) -> None:
    assert reason in refused(**fields)
