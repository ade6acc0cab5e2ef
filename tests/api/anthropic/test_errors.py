"""Errors in the format that Anthropic's clients read."""

from __future__ import annotations

import pytest

from rekindle.errors import ContextTooLong, ServerError, TooManyRequests, Unavailable
from rekindle.protocol.events import Failed
from tests.api.anthropic.asking import HELLO, PATH, ask, error
from tests.api.scripted import Front, ScriptedRuntime
from tests.api.scripted import error as openai_error

VERSION = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (TooManyRequests("full"), 429, "rate_limit_error"),
        (Unavailable("loading"), 503, "overloaded_error"),
        (ServerError("broken"), 500, "api_error"),
    ],
)
def test_each_failure_has_its_type(failure: ServerError, status: int, kind: str) -> None:
    response = ask(Front(ScriptedRuntime([failure])))
    assert response.status_code == status
    assert error(response)["type"] == kind


@pytest.mark.parametrize("at_least", [False, True])
def test_a_context_overflow_has_the_wording_that_clients_know(at_least: bool) -> None:
    too_long = ContextTooLong(5000, 4096, param="messages", at_least=at_least)
    response = ask(Front(ScriptedRuntime([Failed(0, too_long.info)])))
    assert response.status_code == 400
    assert error(response) == {
        "type": "invalid_request_error",
        "message": "prompt is too long: 5000 tokens > 4096 maximum",
    }


def test_a_missing_key_and_an_unknown_path_have_this_error_format() -> None:
    keyed = Front(api_key=["secret"])
    assert error(ask(keyed))["type"] == "authentication_error"
    assert error(keyed.post(PATH, HELLO, headers={"x-api-key": "wrong"}))["type"] == (
        "authentication_error"
    )
    for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
        assert keyed.post(PATH, HELLO, headers=headers).status_code == 200
    assert error(Front().get(f"{PATH}/nowhere"))["type"] == "not_found_error"
    assert error(Front().get(PATH))["type"] == "not_found_error"


def test_broken_json_has_this_error_format() -> None:
    headers = {"content-type": "application/json"}
    response = Front().request("POST", PATH, content=b"{", headers=headers)
    assert "not valid JSON" in error(response)["message"]


def test_a_query_changes_nothing() -> None:
    assert Front().post(f"{PATH}?beta=true", HELLO).status_code == 200
    assert Front().post("/messages?beta=true", HELLO).status_code == 200


def test_other_dialects_keep_their_shape() -> None:
    assert openai_error(Front().get("/v1/nowhere"))["code"] == "not_found"
    assert error(Front().get("/v1/models/nowhere", headers=VERSION))["type"] == "not_found_error"
