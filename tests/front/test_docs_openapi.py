"""The OpenAPI document describes requests, responses and errors correctly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rekindle.api.base.messages import NEEDED
from rekindle.api.llama_server.errors import speaks_llama_server
from tests.api.scripted import Front


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
        assert bool(operation["security"]) == (path != "/health")


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
