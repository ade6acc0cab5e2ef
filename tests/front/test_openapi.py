"""The OpenAPI document describes requests, responses and errors correctly."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import msgspec
import pytest

from rekindle.api.base.messages import NEEDED
from rekindle.api.llama_server.errors import speaks_llama_server
from rekindle.front.dialect_answers import ANSWERS
from rekindle.front.openai_answers import Response
from rekindle.front.openapi import forms_of, texts
from rekindle.protocol.events import CacheReport, Divergence, Reason
from tests.api.scripted import Front, ScriptedRuntime, calling, finished, reasoning, reply


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(Front().get("/openapi.json").json())


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, found in document["paths"].items():
        for method, operation in found.items():
            yield method, path, operation


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_are_documented(document: dict[str, Any], path: str) -> None:
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    answer = Front().post(path, {"messages": [], "prompt": "x", "stream": True})
    if answer.status_code == 200:
        assert answer.headers["content-type"].partition(";")[0] in content


def test_each_role_of_a_message_has_its_required_fields(document: dict[str, Any]) -> None:
    forms = document["components"]["schemas"]["Message"]["oneOf"]
    required = {form["properties"]["role"]["const"]: form["required"] for form in forms}
    assert required == {role: ["role", *needed] for role, needed in NEEDED.items()}
    tool = next(form for form in forms if "tool_call_id" in form["required"])
    assert {"type": "null"} not in tool["properties"]["content"]["anyOf"]


def shape_of(path: str) -> str:
    """Return the name of the error type of a path's dialect."""
    dialects = {"/v1/messages": "AnthropicErrorBody", "/api/": "OllamaErrorBody"}
    if speaks_llama_server(path):
        return "LlamaErrorBody"
    shapes = (shape for start, shape in dialects.items() if path.startswith(start))
    return next(shapes, "ErrorBody")


def test_every_error_status_is_documented_with_its_shape(
    document: dict[str, Any],
) -> None:
    for method, path, operation in operations(document):
        answers = operation["responses"]
        assert {"400", "401", "404", "421", "429", "431", "500", "503"} <= set(answers), path
        assert ("415" in answers) == (method == "post"), path
        assert not {"422", "default"} & set(answers), path
        for status, answer in answers.items():
            if status != "200":
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": f"#/components/schemas/{shape_of(path)}"}
                assert answer["description"] not in ("", "Error")


def test_api_keys_are_documented(document: dict[str, Any]) -> None:
    schemes = document["components"]["securitySchemes"]
    assert {scheme["type"] for scheme in schemes.values()} == {"http", "apiKey"}
    for _, path, operation in operations(document):
        assert bool(operation["security"]) == (not path.startswith("/health"))


def test_all_references_resolve(document: dict[str, Any]) -> None:
    defined = document["components"]["schemas"]
    assert "HTTPValidationError" not in defined

    def check(value: Any) -> None:
        if isinstance(value, dict):
            if "$ref" in value:
                assert value["$ref"].rpartition("/")[2] in defined
            for each in value.values():
                check(each)
        elif isinstance(value, list):
            for each in value:
                check(each)

    check(document)


def described_fields(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in document["components"]["schemas"].items():
        for form in forms_of(schema):
            for field, described in form.get("properties", {}).items():
                yield f"{name}.{field}", described


def test_every_field_and_parameter_has_a_description(document: dict[str, Any]) -> None:
    """A new field needs a `description`, or a text in front/fields.yaml."""
    fields = dict(described_fields(document))
    missing = [
        name
        for name, field in fields.items()
        if not field.get("description") and "const" not in field
    ]
    assert missing == []
    for _, path, operation in operations(document):
        assert operation.get("description"), path
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), f"{path} {parameter['name']}"


def test_every_text_describes_a_field(document: dict[str, Any]) -> None:
    """A text of a field that is gone must go, too."""
    fields = [name for name, _ in described_fields(document)]
    known = {*fields, *(name.partition(".")[2] for name in fields)}
    assert set(texts()["fields"]) - known == set()


def test_every_reason_and_status_is_explained() -> None:
    assert set(texts()["reasons"]) == {reason.value for reason in Reason}
    assert list(texts()["statuses"]) == ["hit", "partial_hit", "miss"]


def test_names_and_limits_show_no_trace_of_the_generator(document: dict[str, Any]) -> None:
    assert [name for name in document["components"]["schemas"] if "__" in name] == []
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids))
    assert [name for name in ids if "__" in name] == []
    page = Front().get("/docs").text
    for leftover in ("rekindle__", "e+18", "at least 1 "):
        assert leftover not in page


def test_every_json_answer_has_a_type(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        for kind, content in operation["responses"]["200"]["content"].items():
            assert content.get("schema"), f"{method} {path} {kind}"


# -- real answers ----------------------------------------------------------------------------------

CHANGED = CacheReport(
    "partial_hit",
    Reason.TURN_CHANGED,
    5,
    12,
    "ram",
    cache_key="a",
    new_cache_key="b",
    diverged_at=Divergence(1, "user", "moon", "sun"),
    normalised=["tools"],
    kv_bits=8,
    kv_group_size=32,
)
TALK = reply("Hel", "lo", end=finished(cache=CHANGED, message_id="m"))
THOUGHT = [TALK[0], reasoning("Hm."), *TALK[1:]]
CALL = calling(("get_weather", '{"city": "Paris"}'))
MESSAGES = [{"role": "user", "content": "hello"}]


def undocumented(value: Any, schema: dict[str, Any], types: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of JSON that its schema does not have. A free-form object may have any."""
    forms = [
        types[form["$ref"].rpartition("/")[2]] if "$ref" in form else form
        for form in schema.get("anyOf", [schema])
    ]
    if isinstance(value, list):
        items = next(form["items"] for form in forms if form.get("type") == "array")
        for each in value:
            yield from undocumented(each, items, types)
    if isinstance(value, dict):
        closed = [form["properties"] for form in forms if "properties" in form]
        for fields, (name, each) in product(closed, value.items()):
            if name not in fields:
                yield name
            else:
                yield from undocumented(each, fields[name], types)


def check(operation: str, answer: Any) -> None:
    """Compare an answer with its documented type, which must name all fields of the answer."""
    assert answer.status_code == 200, answer.text
    documented = ANSWERS[operation]
    msgspec.convert(answer.json(), documented)
    if documented is not Response:  # it also has the fields of its request
        [schema], types = msgspec.json.schema_components([documented])
        assert list(undocumented(answer.json(), schema, types)) == []


@pytest.mark.parametrize("script", [TALK, THOUGHT, CALL], ids=["text", "reasoning", "call"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": MESSAGES, "stream": False}),
    ],
)
def test_the_answer_to_a_conversation_has_its_documented_type(
    path: str, body: dict[str, Any], script: Any
) -> None:
    check(f"POST {path}", Front(ScriptedRuntime(script)).post(path, body))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/api/generate", {"prompt": "hello", "stream": False, "raw": True}),
        ("/api/chat", {"stream": False}),
        ("/v1/models", None),
        ("/v1/models/tiny", None),
        ("/health", None),
        ("/health/ready", None),
        ("/props", None),
        ("/api/version", None),
        ("/api/tags", None),
        ("/api/ps", None),
        ("/api/show", {"model": "tiny"}),
        ("/api/pull", {"model": "tiny", "stream": False}),
    ],
)
def test_an_answer_has_its_documented_type(path: str, body: dict[str, Any] | None) -> None:
    front = Front(ScriptedRuntime(TALK))
    operation = path.replace("/tiny", "/{model}")
    if body is None:
        check(f"GET {operation}", front.get(path))
    else:
        check(f"POST {operation}", front.post(path, body))
