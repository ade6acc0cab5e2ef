"""The turn of a Responses request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.protocol.events import CacheReport, Reason, Started
from rekindle.protocol.requests import Names, ToolUse
from tests.api.responses.asking import (
    LOOK,
    TOOL,
    answered,
    ask,
    front_of,
    refused,
    requested,
    runtime_of,
)
from tests.api.scripted import Front, Script, ScriptedRuntime, finished, reply

MONTH_S = 30 * 86_400.0
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes a file."}


def names(**fields: Any) -> Names:
    found = requested(**fields).names
    assert found is not None
    return found


def functions(front: Front | None = None, **fields: Any) -> list[dict[str, Any]]:
    """The functions that the model is shown."""
    found = front.runtime.requested if front else requested(**fields)
    return [tool["function"] for tool in found.tools or ()]


def test_a_stored_response_is_an_entry_of_its_own_key() -> None:
    front = front_of()
    response = answered(front)
    sent = front.runtime.requested.names
    assert sent == Names(entry_key=response["id"], ttl_s=MONTH_S)
    assert requested(store=False).names is None


def test_each_name_reaches_the_runtime() -> None:
    assert names(store=False, prompt_cache_key="k", session_id="s") == Names(
        prompt_cache_key="k", session_id="s"
    )
    assert names(store=False, prompt_cache_retention="24h").ttl_s == 86_400.0
    assert names(prompt_cache_retention="in_memory").in_memory


def test_lifetimes_are_pins_for_a_while() -> None:
    assert names(prompt_cache_options={"ttl": "12h"}).pin_s == 43_200.0
    assert names(prompt_cache_options={"mode": "implicit"}).pin_s is None


def test_the_previous_response_is_compared_unless_another_is_named() -> None:
    front = front_of()
    first = answered(front)["id"]
    answered(front, previous_response_id=first)
    options = {"comparison_response_id": "resp_other"}
    answered(front, previous_response_id=first, prompt_cache_options=options)
    keys = [each.names.cache_key for each in front.runtime.requests if each.names]
    assert keys == [None, first, "resp_other"]


def test_prewarming_prepares() -> None:
    sent = requested(prompt_cache_options={"prewarm": True}, store=False)
    assert sent.prepare is not None
    assert sent.prepare.ttl_s == 1800.0
    assert requested().prepare is None


def test_explicit_caching_without_a_breakpoint_is_none() -> None:
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    assert not requested(**explicit).reuse
    marked = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": {"ttl": "30m"}}
    assert requested(input=[{"role": "user", "content": [marked]}], **explicit).reuse
    assert not requested(use_kv_cache=False).reuse


@pytest.mark.parametrize(
    ("report", "told"),
    [
        (CacheReport("hit", Reason.FULL_MATCH, 7, 12, "ram", "resp_x"), {"type": "cache_hit"}),
        (
            CacheReport("partial_hit", Reason.TOOLS_CHANGED, 7, 12, "ram", "resp_x"),
            {
                "type": "cache_miss",
                "reason": "tools_changed",
                "cache_missed_tokens": 3,
                "comparison_reusable_tokens": 7,
            },
        ),
        (CacheReport("miss", Reason.EVICTED, 0, 12, None, "resp_x"), {"type": "unavailable"}),
        (
            CacheReport("miss", Reason.CACHE_KEY_NOT_FOUND, 0, 12, None),
            {"type": "comparison_response_not_found"},
        ),
    ],
)
def test_diagnostics_report_the_change(report: CacheReport, told: Any) -> None:
    script: Script = [Started(0, 10, 0), finished(cache=report)]
    options = {"comparison_response_id": "resp_x"}
    response = answered(front_of(script), prompt_cache_options=options)
    assert response["prompt_cache_diagnostics"] == told
    assert response["prompt_cache_options"]["comparison_response_id"] == "resp_x"


def test_a_response_of_another_model_is_gone_on_from_by_its_text() -> None:
    missed = CacheReport("miss", Reason.CACHE_KEY_NOT_FOUND, 0, 12, None)
    one = runtime_of(name="one")
    other = ScriptedRuntime(reply("x", end=finished(cache=missed)), name="other")
    front = Front(one, other)
    first = answered(front, model="one")["id"]
    second = answered(front, model="other", previous_response_id=first)
    sent = other.requested.messages
    assert sent is not None
    assert [each["role"] for each in sent] == ["user", "assistant", "user"]
    assert second["store"] is False  # that runtime here keeps nothing


def test_structured_output_is_enforced() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    form = {"type": "json_schema", "name": "f", "schema": schema, "strict": True}
    structure = requested(text={"format": form}).structured_output
    assert structure is not None
    assert (structure.schema, structure.param) == (schema, "text.format")
    assert requested(text={"format": {"type": "json_object"}}).structured_output is not None
    assert requested(text={"format": {"type": "text"}}).structured_output is None


@pytest.mark.parametrize(
    ("effort", "kwargs"),
    [
        ("high", {"reasoning_effort": "high"}),
        ("xhigh", {"reasoning_effort": "high"}),
        ("minimal", {"reasoning_effort": "low"}),
        ("none", {"enable_thinking": False}),
        (None, {}),
    ],
)
def test_effort_is_the_templates(effort: Any, kwargs: Any) -> None:
    assert requested(reasoning={"effort": effort}).template_kwargs == kwargs


def test_sampling_is_as_asked_or_as_configured() -> None:
    sent = requested(temperature=0, top_p=0.5, seed=7, max_output_tokens=3)
    assert (sent.sampling.temperature, sent.sampling.top_p, sent.sampling.seed) == (0, 0.5, 7)
    assert sent.max_tokens == 3
    assert requested().sampling.temperature == 0.7
    assert requested().sampling.top_logprobs is None


# -- tools ---------------------------------------------------------------------------------------


def test_functions_are_described_as_in_a_chat() -> None:
    assert requested(tools=[TOOL]).tools == [LOOK]
    assert requested(tools=[]).tools is None


def test_namespaces_are_part_of_names_and_introduced_once() -> None:
    other = {**TOOL, "name": "touch"}
    tools = [
        {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [TOOL, other]}
    ]
    first, second = functions(tools=tools)
    assert (first["name"], second["name"]) == ("crm__look", "crm__touch")
    assert first["description"] == "crm: Customers.\n\nLook at something."
    assert second["description"] == "Look at something."
    tools[0]["name"] = "mcp__crm__"
    [found, _] = functions(tools=tools)
    assert found["name"] == "mcp__crm__look"


def test_a_custom_tool_takes_a_text() -> None:
    [tool] = functions(tools=[CUSTOM])
    assert tool["parameters"]["properties"] == {"input": {"type": "string"}}
    assert tool["description"] == "Changes a file."


def test_a_regular_expression_is_enforced_and_a_lark_grammar_is_described() -> None:
    regex = {"type": "grammar", "syntax": "regex", "definition": "a|b"}
    [tool] = functions(tools=[{**CUSTOM, "format": regex}])
    assert tool["strict"] is True
    assert tool["parameters"]["properties"]["input"]["pattern"] == "^(?:a|b)$"
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
    front = front_of()
    response = ask(front, tools=[{**CUSTOM, "format": lark}])
    assert response.headers["x-unenforced-grammars"] == "patch"
    [tool] = functions(front)
    assert tool["description"].endswith('Lark grammar:\nstart: "a"')


@pytest.mark.parametrize("stream", [False, True])
def test_non_function_tools_refused_or_dropped(stream: bool) -> None:
    """llama.cpp #20156: what there is not here is left out, and named."""
    hosted = [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}, {"type": "bad\nname"}]
    front = front_of()
    response = ask(front, tools=[TOOL, *hosted, CUSTOM], stream=stream)
    assert response.status_code == httpx.codes.OK
    assert response.headers["x-ignored-tools"] == "web_search, mcp, bad?name"
    assert [tool["name"] for tool in functions(front)] == ["look", "patch"]


def test_items_of_tools_that_are_not_here_are_left_out_and_named() -> None:
    front = front_of()
    items = [{"type": "web_search_call", "id": "w"}, {"role": "user", "content": "x"}]
    response = ask(front, input=[*items, {"type": "compaction_trigger"}])
    assert response.headers["x-ignored-items"] == "web_search_call, compaction_trigger"
    assert front.runtime.requested.messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("choice", "use"),
    [
        (None, ToolUse()),
        ("auto", ToolUse()),
        ("none", ToolUse(choice="none")),
        ("required", ToolUse(choice="required", parallel=False)),
        (
            {"type": "function", "name": "look"},
            ToolUse(choice="required", name="look", parallel=False),
        ),
        (
            {"type": "custom", "name": "patch"},
            ToolUse(choice="required", name="patch", parallel=False),
        ),
        ({"type": "web_search"}, ToolUse()),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "look"}],
            },
            ToolUse(choice="required", name="look", parallel=False),
        ),
    ],
)
def test_a_choice_is_the_runtimes(choice: Any, use: ToolUse) -> None:
    sent = requested(tools=[TOOL, CUSTOM], tool_choice=choice)
    assert sent.tool_use == use
    assert len(sent.tools or ()) == 2


def test_tools_that_are_not_allowed_are_not_shown() -> None:
    allowed = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "custom", "name": "patch"}],
    }
    [tool] = functions(tools=[TOOL, CUSTOM], tool_choice=allowed)
    assert tool["name"] == "patch"


def test_calls_one_at_a_time() -> None:
    assert not requested(tools=[TOOL], parallel_tool_calls=False).tool_use.parallel


PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}


@pytest.mark.parametrize(
    "item",
    [
        {"role": "assistant", "content": [PICTURE]},
        {"type": "reasoning", "summary": [], "content": [PICTURE]},
        {"type": "reasoning", "summary": [PICTURE]},
    ],
    ids=["message", "reasoning", "summary"],
)
def test_a_picture_is_none_of_the_models(item: Any) -> None:
    assert "no `input_image`" in refused(input=[item])
    kept = front_of().post("/v1/conversations", {"items": [item]})
    assert kept.status_code == httpx.codes.BAD_REQUEST


@pytest.mark.parametrize(
    ("fields", "about"),
    [
        ({"tools": [TOOL, TOOL]}, "more than one called 'look'"),
        ({"tools": [{"type": "function"}]}, "name"),
        ({"tools": [{"name": "x"}]}, "`type`"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, "name"),
        ({"tool_choice": "required"}, "needs `tools`"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "not among `tools`"),
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "schema"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"previous_response_id": "a", "conversation": "b"}, "send one"),
        ({"truncation": "some"}, "truncation"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "'30m' or '12h'"),
        (
            {
                "tools": [TOOL],
                "tool_choice": "required",
                "text": {"format": {"type": "json_object"}},
            },
            "leave one of them out",
        ),
    ],
)
def test_a_wrong_field_is_named(fields: Any, about: str) -> None:
    assert about in refused(**fields)


def test_a_prompt_of_nothing_is_refused() -> None:
    response = front_of().post("/v1/responses", {})
    assert response.status_code == httpx.codes.BAD_REQUEST


def test_codex_is_understood() -> None:
    """As Codex 0.166 asks: no instructions, two messages of a developer, tools of all kinds, items
    without ids and fields that nobody knows."""
    text = {"type": "input_text", "text": "x"}
    items = [
        {"type": "message", "role": "developer", "content": [text]},
        {"type": "message", "role": "developer", "content": [text]},
        {"type": "message", "role": "user", "content": [text]},
        {"type": "reasoning", "summary": [], "encrypted_content": "strange"},
        {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ]
    tools = [
        {**TOOL, "strict": False},
        {"type": "namespace", "name": "mcp__x__", "description": "x", "tools": [TOOL]},
        {"type": "web_search", "external_web_access": False},
    ]
    front = front_of()
    response = answered(
        front,
        input=items,
        tools=tools,
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "medium", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="session",
        client_metadata={"x": "y"},
        text={"verbosity": "low"},
    )
    assert response["status"] == "completed"
    sent = front.runtime.requested
    assert [message["role"] for message in sent.messages or ()] == [
        *("developer", "developer", "user", "assistant", "tool")
    ]
    assert sent.names == Names(prompt_cache_key="session")


def test_n8n_needs_responses_without_a_version() -> None:
    """n8n #21651."""
    assert front_of().post("/responses", {"input": "x"}).status_code == httpx.codes.OK


# -- what one request can cost -------------------------------------------------------------------


def patterned(number: int, pattern: str) -> dict[str, Any]:
    form = {"type": "grammar", "syntax": "regex", "definition": pattern}
    return {"type": "custom", "name": f"t{number}", "format": form}


PATCH = patterned(1, "a")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": [{"role": "user", "content": "x"}] * 20_001},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": ""}] * 20_001}]},
        {"input": "x" * (16 << 20) + "x"},
        {"input": [{"role": "user", "content": "x" * (4 << 20)}] * 5},
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x" * (17 << 20)}]},
        {"instructions": "x" * (17 << 20)},
        {"tools": [{**TOOL, "name": f"t{number}"} for number in range(1025)]},
        {"tools": [patterned(number, "a" * 40_000) for number in range(2)]},
        {
            "tools": [
                {"type": "namespace", "name": "n", "tools": [patterned(0, "a" * 65_536)]},
                PATCH,
            ]
        },
        {"include": ["x"] * 33},
        {"user": "x" * 513},
        {"safety_identifier": "x" * 513},
    ],
    ids=[
        *("items", "parts", "text", "texts", "output", "instructions", "tools"),
        *("grammars", "grammars of namespaces", "include", "user", "safety"),
    ],
)
def test_a_request_has_bounds(fields: Any) -> None:
    assert "at most" in refused(**fields)


def test_schemas_have_a_depth() -> None:
    deep: dict[str, Any] = {}
    for _ in range(70):
        deep = {"properties": deep}
    assert "nested" in refused(tools=[{**TOOL, "parameters": deep}])
    form = {"type": "json_schema", "name": "f", "schema": deep}
    assert "nested" in refused(text={"format": form})


def test_free_form_json_has_a_depth_limit() -> None:
    deep: dict[str, Any] = {"x": True}
    for _ in range(300):
        deep = {"x": deep}
    part = {"type": "input_text", "text": "x", "prompt_cache_breakpoint": deep}
    assert "nested" in refused(input=[{"role": "user", "content": [part]}])
    assert "nested" in refused(tool_choice={"type": "web_search", "x": deep})
    named = {"type": "function", "name": "look", "x": deep}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named]}
    assert "nested" in refused(tool_choice=allowed, tools=[TOOL])


def test_the_number_of_calls_in_a_response_can_be_limited() -> None:
    assert requested(tools=[TOOL], max_tool_calls=2).tool_use == ToolUse(max_calls=2)
    assert requested(tools=[TOOL]).tool_use == ToolUse()
    assert ask(front_of(), max_tool_calls=2).json()["max_tool_calls"] == 2
    assert ask(front_of(), max_tool_calls=0).status_code == httpx.codes.BAD_REQUEST


@pytest.mark.parametrize(
    "fields", [{"mode": "some"}, {"tools": []}, {"tools": [{"type": "function", "name": 3}]}]
)
def test_a_wrong_list_of_allowed_tools_is_not_taken_for_a_tool_of_openai(
    fields: dict[str, Any],
) -> None:
    named = {"type": "function", "name": "look"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [named], **fields}
    assert "tool_choice" in refused(tools=[TOOL], tool_choice=allowed)
