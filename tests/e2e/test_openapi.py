"""Every operation of the OpenAPI document accepts valid requests and refuses invalid ones.

Every answer has a documented status, type and shape, and none is a server error.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.api.scripted import Front
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.tiny import write_llama
from tests.support.tiny_bert import write_bert

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from its own dependencies
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import (
        content_type_conformance,
        not_a_server_error,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
NUMBER = "X-Model-Id"
ANSWER_S = 120


def valid(found: Any) -> Any:
    """An operation that the document describes completely."""
    return found.ok()


SCHEMA = schemathesis.openapi.from_dict(Front().get("/openapi.json").json())
ENDLESS = {"GET /v1/internal/live"}  # a stream that ends with its client
OPERATIONS = {
    each.label: each
    for each in map(valid, SCHEMA.get_all_operations())
    if each.label not in ENDLESS
}
WITH_BODY = [label for label, each in OPERATIONS.items() if "requestBody" in each.definition.raw]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    flags = []
    for path in (write_bert(folder / "bert.gguf"), write_bert(folder / "rank.gguf", classes=1)):
        flags += ["--embedding-model", str(path)]
    with running(write_llama(folder / "tiny.gguf", context=128), folder, *flags) as running_server:
        yield running_server


def attempt(server: Server, label: str, mode: GenerationMode) -> None:
    @settings(
        max_examples=rounds(4, 30),
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(OPERATIONS[label].as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        if mode is GenerationMode.POSITIVE:  # a random name or number would be the only error
            case.headers.pop(NUMBER, None)
            if isinstance(case.body, dict):
                case.body.pop("model", None)
        answer = case.call(base_url=server.url, timeout=ANSWER_S)
        case.validate_response(answer, checks=CHECKS)

    send()


@pytest.mark.long
@pytest.mark.parametrize("label", OPERATIONS)
def test_a_valid_request_is_answered_as_documented(server: Server, label: str) -> None:
    attempt(server, label, GenerationMode.POSITIVE)


@pytest.mark.long
@pytest.mark.parametrize("label", WITH_BODY)
def test_an_invalid_request_is_refused_as_documented(server: Server, label: str) -> None:
    attempt(server, label, GenerationMode.NEGATIVE)


def test_the_document_has_operations_to_try() -> None:
    assert {"POST /v1/chat/completions", "GET /v1/models"} <= set(OPERATIONS)
    assert "POST /v1/cache/prepare" in WITH_BODY
