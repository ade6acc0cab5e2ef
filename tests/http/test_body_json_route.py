"""Where a body is validated: a small one at once, a large one beside the event loop."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import orjson
import pytest

from rekindle.http import body as json_route
from rekindle.http.body import LARGE_BODY_BYTES, VALIDATORS
from tests.api.scripted import Front, error

LARGE = "x" * LARGE_BODY_BYTES


def parsed_in(front: Front, path: str, body: dict[str, Any]) -> list[str]:
    """The names of the threads in which the body is parsed and made into turns."""
    threads = []

    def loads(content: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return orjson.loads(content)

    with patch.object(json_route, "orjson", loads=loads):
        assert front.post(path, body).status_code == 200
    return threads


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LARGE}]}),
        ("/v1/completions", {"prompt": LARGE}),
    ],
)
def test_a_large_body_does_not_hold_the_event_loop(path: str, body: dict[str, Any]) -> None:
    front = Front()
    [thread] = parsed_in(front, path, body)
    assert thread.startswith(VALIDATORS)
    assert front.runtime.requested


def test_a_small_body_costs_no_thread() -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    [thread] = parsed_in(Front(), "/v1/chat/completions", body)
    assert thread == threading.current_thread().name


@pytest.mark.parametrize("padding", ["", LARGE], ids=["small", "large"])
def test_a_fault_is_told_alike_wherever_it_is_found(padding: str) -> None:
    message = {"role": "user", "content": padding}
    wrong = Front().chat(messages=[message], n="two")
    assert (wrong.status_code, error(wrong)["param"]) == (400, "n")
    unserved = Front().chat(messages=[message], best_of=3)
    assert error(unserved)["code"] == "unsupported_parameter"
    headers = {"content-type": "application/json"}
    no_json = Front().request(
        "POST", "/v1/completions", content=b"{" + padding.encode(), headers=headers
    )
    assert error(no_json)["message"].startswith("The body is not valid JSON: ")
