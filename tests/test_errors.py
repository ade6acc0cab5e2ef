"""Every error that reaches a client has OpenAI's format."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rekindle.errors import BadRequest, ContextTooLong, RekindleError, ServerError


def kinds(base: type[ServerError]) -> Iterator[type[ServerError]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_an_error_has_a_message_a_type_a_field_and_a_code() -> None:
    assert BadRequest("too hot", param="temperature").body() == {
        "error": {
            "message": "too hot",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }
    }


@pytest.mark.parametrize("kind", [ServerError, *kinds(ServerError)], ids=lambda kind: kind.__name__)
def test_every_error_says_whose_fault_it_is(kind: type[ServerError]) -> None:
    assert 400 <= kind.status < 600
    blamed = kind.kind in ("invalid_request_error", "rate_limit_error")
    assert blamed == (kind.status < 500)
    assert kind.code
    assert issubclass(kind, RekindleError)


def test_the_error_for_a_long_prompt_has_both_numbers() -> None:
    error = ContextTooLong(9000, 4096, param="prompt")
    assert "9000" in str(error)
    assert "4096" in str(error)
    assert error.code == "context_length_exceeded"
