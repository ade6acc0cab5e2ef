"""Every list that a request may contain has a bound, in every dialect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rekindle.api.base.fields import MAX_ITEMS
from rekindle.http.body import LIMITS
from tests.api.scripted import Front, ScriptedRuntime

Json = dict[str, Any]
Place = Callable[[list[Any]], Json]  # a body that has the list in the field under test
Bound = tuple[int, Any, Place]

USER = {"role": "user", "content": "hello"}
PART = {"type": "text", "text": "x"}
ITEM = {"type": "message", **USER}
OUTPUT = {"type": "function_call_output", "call_id": "c1"}
REASONING = {"type": "reasoning", "id": "rs_1"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OLLAMA_CALL = {"function": {"name": "f", "arguments": {}}}
NAMED = {"type": "function", "function": {"name": "f1"}}
ANY_LENGTH = LIMITS.punctuation  # a list without its own bound; it takes little time for each item


def tool(number: int) -> Json:
    return {"type": "function", "function": {"name": f"f{number}"}}


def flat_tool(number: int) -> Json:
    return {"type": "function", "name": f"f{number}"}


def at(name: str, **rest: Any) -> Place:
    return lambda items: {**rest, name: items}


def inside(outer: str, element: Json, name: str, **rest: Any) -> Place:
    return lambda items: {**rest, outer: [{**element, name: items}]}


def with_model(place: Place) -> Place:
    return lambda items: {**place(items), "model": "tiny"}


def chat(**more: Bound) -> dict[str, Bound]:
    """The lists of requests with OpenAI's messages."""
    assistant = {"role": "assistant", "content": ""}
    return {
        "messages": (MAX_ITEMS, USER, at("messages")),
        "messages[].content": (MAX_ITEMS, PART, inside("messages", USER, "content")),
        "messages[].tool_calls": (MAX_ITEMS, CALL, inside("messages", assistant, "tool_calls")),
        "tools": (128, tool, at("tools", messages=[USER])),
        **more,
    }


def structure(**rest: Any) -> dict[str, Bound]:
    return {
        "guided_choice": (1000, "x", at("guided_choice", **rest)),
        "structured_outputs.choice": (
            1000,
            "x",
            lambda items: {**rest, "structured_outputs": {"choice": items}},
        ),
        "stop": (16, "x", at("stop", **rest)),
        "stop_token_ids": (256, 1, at("stop_token_ids", **rest)),
        "bad_words": (128, "x", at("bad_words", **rest)),
        "dry_sequence_breakers": (64, "x", at("dry_sequence_breakers", **rest)),
        "normalise": (6, "dates", at("normalise", **rest)),
    }


def responses(name: str, **more: Bound) -> dict[str, Bound]:
    """The lists of requests with items."""
    return {
        name: (MAX_ITEMS, ITEM, at(name)),
        f"{name}[].content": (MAX_ITEMS, PART, inside(name, ITEM, "content")),
        f"{name}[].output": (MAX_ITEMS, PART, inside(name, OUTPUT, "output")),
        f"{name}[].summary": (MAX_ITEMS, PART, inside(name, REASONING, "summary")),
        **more,
    }


PROMPT_OF_RESPONSES: dict[str, Bound] = responses(
    "input",
    **{
        "tools": (1024, flat_tool, at("tools", input="hello")),
        "tools[].tools": (
            1023,  # the namespace counts
            flat_tool,
            inside("tools", {"type": "namespace", "name": "n"}, "tools", input="hello"),
        ),
        "tool_choice.tools": (
            1024,
            {"type": "function", "name": "f1"},
            lambda items: {
                "input": "hello",
                "tools": [flat_tool(1)],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": items},
            },
        ),
        "normalise": (6, "dates", at("normalise", input="hello")),
    },
)
RESULT = {"type": "tool_result", "tool_use_id": "c1"}
FOUND = {"type": "search_result", "source": "s", "title": "t"}


def document(items: Any) -> Json:
    return {"type": "document", "source": {"type": "content", "content": items}}


PROMPT_OF_MESSAGES: dict[str, Bound] = {
    "messages": (MAX_ITEMS, USER, at("messages", max_tokens=5)),
    "messages[].content": (MAX_ITEMS, PART, inside("messages", USER, "content", max_tokens=5)),
    "messages[].content[].content": (
        MAX_ITEMS,
        PART,
        lambda items: inside("messages", USER, "content", max_tokens=5)(
            [{**RESULT, "content": items}]
        ),
    ),
    "messages[].content[].content[].content": (
        MAX_ITEMS,
        PART,
        lambda items: inside("messages", USER, "content", max_tokens=5)(
            [{**RESULT, "content": [{**FOUND, "content": items}]}]
        ),
    ),
    "messages[].content[].source.content": (
        MAX_ITEMS,
        PART,
        lambda items: inside("messages", USER, "content", max_tokens=5)([document(items)]),
    ),
    "messages[].content[].content[].source.content": (
        MAX_ITEMS,
        PART,
        lambda items: inside("messages", USER, "content", max_tokens=5)(
            [{**RESULT, "content": [document(items)]}]
        ),
    ),
    "system": (MAX_ITEMS, PART, at("system", messages=[USER], max_tokens=5)),
    "tools": (
        1024,
        lambda number: {"name": f"f{number}", "input_schema": {"type": "object"}},
        at("tools", messages=[USER], max_tokens=5),
    ),
    "normalise": (6, "dates", at("normalise", messages=[USER], max_tokens=5)),
}
HELLO = {"messages": [USER]}
GAP = {"input_prefix": "a", "input_suffix": "b"}

#: The lists of each endpoint: the bound, an item or a function of its number, and the body.
LISTS: dict[str, dict[str, Bound]] = {
    "/v1/chat/completions": chat(
        **structure(**HELLO),
        **{
            "resize": (2, 64, at("resize", **HELLO)),
            "functions": (128, lambda number: {"name": f"f{number}"}, at("functions", **HELLO)),
            "tool_choice.allowed_tools.tools": (
                128,
                NAMED,
                lambda items: {
                    **HELLO,
                    "tools": [tool(1)],
                    "tool_choice": {
                        "type": "allowed_tools",
                        "allowed_tools": {"mode": "auto", "tools": items},
                    },
                },
            ),
        },
    ),
    "/v1/completions": {
        **structure(prompt="hello"),
        "prompt": (128, "x", at("prompt")),
        "prompt[]": (ANY_LENGTH, 1, lambda items: {"prompt": [items]}),
    },
    "/completion": {
        **structure(prompt="hello"),
        "prompt": (128, "x", at("prompt")),
        "prompt[]": (ANY_LENGTH, 1, lambda items: {"prompt": [items]}),
        "response_fields": (64, "content", at("response_fields", prompt="hello")),
    },
    "/infill": {
        **structure(**GAP),
        "input_extra": (1000, {"filename": "f", "text": "x"}, at("input_extra", **GAP)),
        "response_fields": (64, "content", at("response_fields", **GAP)),
    },
    "/embedding": {"content": (2048, "x", at("content"))},
    "/v1/chat/completions/input_tokens": chat(),
    "/v1/embeddings": {
        "input": (2048, "x", at("input")),
        "input[]": (ANY_LENGTH, 1, lambda items: {"input": [items]}),
    },
    "/v1/rerank": {
        "documents": (2048, "x", at("documents", query="x")),
        "texts": (2048, "x", at("texts", query="x")),
    },
    "/v1/responses": {
        **PROMPT_OF_RESPONSES,
        "include": (32, "reasoning.encrypted_content", at("include", input="hello")),
    },
    "/v1/responses/input_tokens": PROMPT_OF_RESPONSES,
    "/v1/responses/compact": {
        path: (bound, item, with_model(place))
        for path, (bound, item, place) in PROMPT_OF_RESPONSES.items()
    },
    "/v1/conversations": responses("items"),
    "/v1/conversations/{conversation_id}/items": responses("items"),
    "/v1/messages": {
        **PROMPT_OF_MESSAGES,
        "stop_sequences": (16, "x", at("stop_sequences", messages=[USER], max_tokens=5)),
    },
    "/v1/messages/count_tokens": PROMPT_OF_MESSAGES,
    "/api/chat": {
        "messages": (MAX_ITEMS, USER, at("messages")),
        "messages[].images": (64, "aGk=", inside("messages", USER, "images")),
        "messages[].tool_calls": (
            MAX_ITEMS,
            OLLAMA_CALL,
            inside("messages", {"role": "assistant"}, "tool_calls"),
        ),
        "tools": (128, tool, at("tools", **HELLO)),
        "options.stop": (16, "x", lambda items: {**HELLO, "options": {"stop": items}}),
    },
    "/api/generate": {
        "images": (64, "aGk=", at("images", prompt="hello")),
        "context": (ANY_LENGTH, 1, at("context", prompt="hello")),
        "options.stop": (16, "x", lambda items: {"prompt": "x", "options": {"stop": items}}),
    },
    "/api/embed": {"input": (2048, "x", at("input"))},
    "/api/embeddings": {"input": (2048, "x", at("input"))},
    "/v1/cache/prepare": chat(
        messages=(200, USER, at("messages")), resize=(2, 64, at("resize", **HELLO))
    ),
    "/v1/cache/validate": chat(resize=(2, 64, at("resize", **HELLO))),
    "/v1/tokenize": chat(),
    "/v1/detokenize": {"tokens": (ANY_LENGTH, 1, at("tokens"))},
    "/v1/apply-template": chat(),
}
CASES = [(path, field) for path, fields in LISTS.items() for field in fields]


def front() -> Front:
    return Front(embedders=[ScriptedRuntime(name="vectors"), ScriptedRuntime(name="ranks")])


def sent(path: str, field: str, more: int) -> tuple[Front, int, str]:
    """Send a list that is longer than its bound by `more`; return the status and the message."""
    bound, item, place = LISTS[path][field]
    items = [item(number) if callable(item) else item for number in range(bound + more)]
    body = {**place(items), "cache_key": "k"} if path == "/v1/cache/validate" else place(items)
    asked = front()
    answer = asked.post(path.replace("{conversation_id}", "conv_x"), body)
    if answer.is_success:
        return asked, answer.status_code, ""
    told = answer.json()["error"]
    return asked, answer.status_code, told if isinstance(told, str) else told["message"]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_list_beyond_its_bound_is_refused_before_any_work(path: str, field: str) -> None:
    asked, status, message = sent(path, field, 1)
    assert status == 400, message
    general = "commas, colons and opening brackets"
    assert field.split(".")[0].split("[")[0] in message or general in message
    for runtime in [*asked.runtimes, *asked.embedders]:
        assert not runtime.requests
        assert not runtime.admin_requests


SHORT = [(path, field) for path, field in CASES if LISTS[path][field][0] <= 1024]


@pytest.mark.parametrize(("path", "field"), SHORT)
def test_the_bound_is_where_the_table_says(path: str, field: str) -> None:
    _, _, refusal = sent(path, field, 1)
    _, status, message = sent(path, field, 0)
    assert status == 200 or message != refusal


def test_the_table_has_every_list_of_every_endpoint() -> None:
    document = Front().get("/openapi.json").json()
    schemas = document["components"]["schemas"]

    def lists(schema: Json, path: str, seen: frozenset[str]) -> Iterator[str]:
        name = str(schema.get("$ref", "")).rpartition("/")[2]
        if name in seen:
            return
        schema, seen = (schemas[name], seen | {name}) if name else (schema, seen)
        for form in ("anyOf", "oneOf", "allOf"):
            for each in schema.get(form, ()):
                yield from lists(each, path, seen)
        if schema.get("type") == "array":
            yield path
            yield from lists(schema["items"], f"{path}[]", seen)
        for field, inner in schema.get("properties", {}).items():
            yield from lists(inner, f"{path}.{field}".lstrip("."), seen)

    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if schema := content.get("application/json", {}).get("schema"):
            assert set(lists(schema, "", frozenset())) == set(LISTS.get(path, {})), path
