"""Fields that the server does not act on are refused by name, or named in a header."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.api.anthropic.schema import FIELD_TABLE as ANTHROPIC
from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER, FieldTable, Ignored, Refused
from rekindle.api.ollama.schema import FIELD_TABLE as OLLAMA
from rekindle.api.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
from rekindle.api.openai.known_fields import CHAT_FIELDS, COMPLETION_FIELDS
from rekindle.api.responses.schema import FIELD_TABLE as RESPONSES
from tests.api.responses.asking import HELLO as INPUT
from tests.api.scripted import Front

MESSAGES = [{"role": "user", "content": "hello"}]
#: Each endpoint, with the smallest request and its table.
ENDPOINTS: dict[str, tuple[dict[str, Any], FieldTable]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, CHAT_FIELDS),
    "/v1/completions": ({"prompt": "hello"}, COMPLETION_FIELDS),
    "/v1/responses": ({**INPUT, "store": False}, RESPONSES),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 9}, ANTHROPIC),
    "/api/chat": ({"messages": MESSAGES, "stream": False}, OLLAMA),
    "/api/generate": ({"prompt": "hello", "stream": False, "raw": True}, OLLAMA),
}
ENTRIES = [(path, name) for path, (_, table) in ENDPOINTS.items() for name in table]
OTHER = "another value"


def ask(path: str, name: str, value: Any, **fields: Any) -> httpx.Response:
    body = {**ENDPOINTS[path][0], **fields}
    outer, _, inner = name.partition(".")
    body[outer] = {inner: value} if inner and not name.startswith("speculative") else value
    if name.startswith("speculative"):
        body = {**ENDPOINTS[path][0], **fields, name: value}
    return Front().post(path, body)


def assert_sorted(response: httpx.Response, name: str, entry: Refused | Ignored) -> None:
    if isinstance(entry, Ignored):
        assert response.status_code == httpx.codes.OK, response.text
        assert response.headers[IGNORED_FIELDS_HEADER] == name
        return
    assert response.status_code == httpx.codes.BAD_REQUEST, response.text
    assert f"{entry.instead} `{name}`" in response.text.encode().decode("unicode_escape")


@pytest.mark.parametrize(("path", "name"), ENTRIES)
def test_a_known_field_is_refused_by_name_or_named_in_a_header(path: str, name: str) -> None:
    assert_sorted(ask(path, name, OTHER), name, ENDPOINTS[path][1][name])


@pytest.mark.parametrize(("path", "name"), ENTRIES)
def test_a_value_that_changes_nothing_is_accepted(path: str, name: str) -> None:
    for value in (None, *ENDPOINTS[path][1][name].neutral):
        response = ask(path, name, value)
        assert response.status_code == httpx.codes.OK, response.text
        assert IGNORED_FIELDS_HEADER not in response.headers


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", {"user": "me", "prediction": {"type": "content"}}),
        ("/v1/completions", {"store": True, "prediction": {"type": "content"}}),
        ("/v1/responses", {"include": ["file_search_call.results"], "service_tier": "flex"}),
        ("/v1/messages", {"container": "c", "service_tier": "other"}),
        ("/api/chat", {"truncate": True, "options": {"num_ctx": 9}}),
    ],
)
def test_a_stream_names_ignored_fields_in_its_headers(path: str, field: dict[str, Any]) -> None:
    response = Front().post(path, {**ENDPOINTS[path][0], **field, "stream": True})
    assert response.status_code == httpx.codes.OK, response.text
    assert len(response.headers[IGNORED_FIELDS_HEADER].split(", ")) == 2


def test_only_unknown_values_of_include_are_named() -> None:
    include = ["reasoning.encrypted_content", "a.b\r\nset-cookie: x", "code_interpreter_call"]
    response = Front().post("/v1/responses", {**INPUT, "store": False, "include": include})
    assert response.headers[IGNORED_FIELDS_HEADER] == (
        "include.a.b??set-cookie??x, include.code_interpreter_call"
    )


def test_the_parameters_of_mirostat_change_nothing_where_it_is_off() -> None:
    fields = {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1}
    assert Front().chat(**fields).status_code == httpx.codes.OK
    ollama = {"messages": MESSAGES, "stream": False, "options": fields}
    assert Front().post("/api/chat", ollama).status_code == httpx.codes.OK
    assert Front().chat(mirostat_tau=5.0).status_code == httpx.codes.BAD_REQUEST


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_sampling_parameters_have_the_same_effect_in_each_dialect(path: str) -> None:
    front = Front()
    filters = {"top_k": 7, "min_p": 0.2, "typical_p": 0.9}
    penalties = {"repetition_penalty": 1.2, "repetition_context_size": 9, "presence_penalty": 0.5}
    fields = {**filters, **penalties, "frequency_penalty": 0.25, "seed": 5}
    assert front.post(path, {**ENDPOINTS[path][0], **fields}).is_success
    sampling = front.runtime.requested.sampling
    assert {name: getattr(sampling, name) for name in fields} == fields


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_each_dialect_can_turn_reuse_off_and_exactness_on(path: str) -> None:
    front = Front()
    fields = {"use_kv_cache": False, "cache_exact": True}
    assert front.post(path, {**ENDPOINTS[path][0], **fields}).is_success
    assert not front.runtime.requested.reuse
    assert front.runtime.requested.exact


def test_every_field_of_the_tables_is_in_the_documentation() -> None:
    text = Path("docs/clients.md").read_text()
    names = {name for _, table in ENDPOINTS.values() for name in table}
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_no_field_is_both_served_and_refused() -> None:
    models = (OllamaChatRequest, OllamaGenerateRequest)
    assert models[0].field_table is models[1].field_table
    for path, (_, table) in ENDPOINTS.items():
        refused = {name for name, entry in table.items() if isinstance(entry, Refused)}
        schema = Front().get("/openapi.json").json()
        body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        model = body["schema"]["$ref"].rpartition("/")[2]
        assert not refused & set(schema["components"]["schemas"][model]["properties"])
