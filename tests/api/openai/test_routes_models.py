"""/v1/models, /health and the OpenAPI document."""

from __future__ import annotations

import re

import pytest
from openai.types import Model

from tests.api.scripted import Front, ScriptedRuntime, error


@pytest.fixture
def front() -> Front:
    return Front(ScriptedRuntime(name="tiny"), ScriptedRuntime(name="org/repo:q4"))


def test_the_models_are_listed_with_their_context(
    front: Front, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rekindle.api.base.models.time.time", lambda: 1.0)  # of each server's start
    listed = front.get("/v1/models").json()
    assert listed["object"] == "list"
    models = [Model.model_validate(entry) for entry in listed["data"]]
    assert [model.id for model in models] == ["tiny", "org/repo:q4"]
    assert {model.object for model in models} == {"model"}
    assert listed["data"][0]["max_model_len"] == 4096
    assert front.get("/v1/models/").json() == listed


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("tiny", "tiny"),
        ("org/repo:q4", "org/repo:q4"),
        ("org%2Frepo:q4", "org/repo:q4"),
        ("default", "tiny"),
    ],
)
def test_one_model_is_found_by_its_name(front: Front, path: str, name: str) -> None:
    assert front.get(f"/v1/models/{path}").json()["id"] == name


def test_an_unknown_model_is_not_found(front: Front) -> None:
    answer = front.get("/v1/models/none")
    assert answer.status_code == 404
    assert error(answer)["code"] == "model_not_found"


def test_health_is_good_once_the_startup_model_answers() -> None:
    answer = Front().get("/health")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("place", [0, 1])
def test_health_is_bad_with_a_reason_while_a_model_is_away(front: Front, place: int) -> None:
    front.runtimes[place].supervisor.ready = None
    front.runtimes[
        place
    ].supervisor.down_reason = "the process of a model died and is being restarted"
    answer = front.get("/health")
    assert answer.status_code == 503
    reason = "the process of a model died and is being restarted"
    problem = {"model": front.runtimes[place].name, "code": "model_loading", "message": reason}
    assert answer.json() == {"status": "unavailable", "reason": reason, "problems": [problem]}
    assert answer.headers["retry-after"]
    assert front.get("/v1/models").json()["data"][place]["max_model_len"] is None


def test_the_interface_has_a_page(front: Front) -> None:
    answer = front.get("/docs")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")


def test_the_openapi_document_lists_every_endpoint(front: Front) -> None:
    schema = front.get("/openapi.json").json()
    assert set(schema["paths"]) == {
        "/v1/chat/completions",
        "/v1/chat/completions/{completion_id}",
        "/v1/chat/completions/{completion_id}/messages",
        "/v1/completions",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/tokenize",
        "/v1/detokenize",
        "/v1/internal/token-count",
        "/v1/internal/model/list",
        "/v1/internal/model/load",
        "/v1/internal/model/unload",
        "/v1/internal/model/info/{model}",
        "/management/processes",
        "/v1/apply-template",
        "/v1/chat/completions/input_tokens",
        "/completion",
        "/infill",
        "/embedding",
        "/lora-adapters",
        "/slots",
        "/slots/{slot}",
        "/props",
        "/v1/responses",
        "/v1/responses/compact",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/responses/{response_id}/cancel",
        "/v1/conversations",
        "/v1/conversations/{conversation_id}",
        "/v1/conversations/{conversation_id}/items",
        "/v1/conversations/{conversation_id}/items/{item_id}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/copy",
        "/api/create",
        "/api/delete",
        "/api/pull",
        "/api/show",
        "/api/tags",
        "/api/ps",
        "/api/version",
        "/v1/cache",
        "/v1/cache/prepare",
        "/v1/cache/stats",
        "/v1/cache/tree",
        "/v1/cache/tree/{key}",
        "/v1/internal/live",
        "/v1/internal/settings",
        "/v1/tenants",
        "/v1/tenants/{tenant}",
        "/v1/cache/validate",
        "/v1/cache/gc",
        "/v1/cache/import",
        "/v1/cache/{key}/export",
        "/v1/cache/{key}",
        "/v1/cache/{key}/pin",
        "/v1/cache/{key}/unpin",
        "/v1/internal/model/kv_cache/info",
        "/v1/internal/model/kv_cache/remove_cache",
        "/v1/internal/model/kv_cache/remove_old_caches",
        "/metrics",
        "/health",
        "/health/ready",
    }
    bodies = {
        path: schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        for path in ("/v1/chat/completions", "/v1/completions")
    }
    assert bodies["/v1/chat/completions"] == {"$ref": "#/components/schemas/ChatRequest"}
    assert bodies["/v1/completions"] == {"$ref": "#/components/schemas/CompletionRequest"}
    chat = schema["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["messages"]
    assert {"temperature", "stop", "logit_bias", "cache_exact"} <= set(chat["properties"])


def test_the_schema_describes_the_cache_with_its_answers_and_the_model_number(
    front: Front,
) -> None:
    schema = front.get("/openapi.json").json()
    shown = schema["paths"]["/v1/cache/{key}"]["get"]
    answer = shown["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer == {"$ref": "#/components/schemas/EntryBody"}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            assert operation["tags"], path
            assert operation["description"], path
            assert "422" not in operation["responses"], path
            is_stored = "completion_id" in path or operation is operations.get("get")
            if path.startswith("/v1/chat/completions") and is_stored:
                continue  # a stored completion is found in any model
            if re.match("/v1/(cache|ch|com|internal/(token|model/kv_cache))", path):
                names = [parameter["name"] for parameter in operation["parameters"]]
                assert "X-Model-Id" in names, path
