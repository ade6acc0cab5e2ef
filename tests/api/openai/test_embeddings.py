"""/v1/embeddings at the front: the request to the runtime, and the answer."""

from __future__ import annotations

import struct
from typing import Any

import httpx
import pytest

from rekindle.errors import TooManyRequests
from rekindle.protocol.events import Cancelled, Embedded, Started
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import EmbedRequest
from tests.api.live import live, soon
from tests.api.scripted import Front, Pause, ScriptedRuntime, Step, error, failed
from tests.front.test_disconnect import request

PATH = "/v1/embeddings"
VECTORS = [0.6, 0.8, 1.0, 0.0]
ANSWER: list[Step] = [Started(0, 3, 0), Embedded(0, struct.pack("<4f", *VECTORS), 2, 5, 2)]


def embedder(script: list[Step]) -> ScriptedRuntime:
    runtime = ScriptedRuntime(script, name="minilm")
    runtime.supervisor.ready = Ready(context_tokens=512, pool_tokens=0, dimensions=2)
    return runtime


def front(script: list[Step], **settings: Any) -> Front:
    return Front(embedders=[embedder(script)], **settings)


def post(front: Front, **body: Any) -> httpx.Response:
    return front.post(PATH, {"input": "a", **body})


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ("", [""]),
    ],
)
def test_an_input_in_any_of_its_shapes_is_a_list(given: Any, inputs: Any) -> None:
    served = front(ANSWER)
    assert post(served, input=given, dimensions=2.0, batch_size=7, user="u").status_code == 200
    [asked] = served.embedders[0].asked
    assert isinstance(asked, EmbedRequest)
    assert (asked.inputs, asked.dimensions, asked.batch_size) == (inputs, 2, 7)
    assert asked.reuse


def test_the_answer_has_openais_shape() -> None:
    assert post(front(ANSWER)).json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.6, 0.8]},
            {"object": "embedding", "index": 1, "embedding": [1.0, 0.0]},
        ],
        "model": "minilm",
        "usage": {
            "prompt_tokens": 5,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_each_key_is_a_tenant_of_its_own() -> None:
    served = front(ANSWER, api_key=("one", "two"))
    for key in ("one", "two"):
        answer = served.post(PATH, {"input": "a"}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    first, second = served.embedders[0].asked
    assert first.salt != second.salt
    assert post(served).status_code == 401


@pytest.mark.parametrize(
    ("fields", "settings"), [({"use_kv_cache": False}, {}), ({}, {"context_cache": False})]
)
def test_reuse_can_be_declined(fields: dict[str, Any], settings: dict[str, Any]) -> None:
    served = front(ANSWER, **settings)
    assert post(served, **fields).status_code == 200
    assert not served.embedders[0].asked[0].reuse


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ([failed(400, "invalid_request_error", "context_length_exceeded", "long", "input")], 400),
        ([Cancelled(0)], 503),
        ([TooManyRequests("256 requests are already queued or running")], 429),
    ],
)
def test_a_refusal_of_the_runtime_keeps_its_status(script: list[Step], status: int) -> None:
    answer = post(front(script))
    assert answer.status_code == status
    assert error(answer)["message"]


@pytest.mark.parametrize("script", [[Pause()], [Started(0, 3, 0), Pause()]])
def test_a_client_that_hangs_up_cancels(script: list[Step]) -> None:
    served = front(script)
    runtime = served.embedders[0]
    with live(served) as server:
        sock = server.raw(request({"input": "a"}, PATH))
        soon(lambda: runtime.open_turns == 1)
        sock.close()
        soon(lambda: runtime.open_turns == 0 and server.is_idle())
        assert runtime.cancelled_turns == 1


def test_an_unavailable_model_makes_the_server_unhealthy_but_others_answer() -> None:
    served = front(ANSWER)
    served.embedders[0].supervisor.ready = None
    assert served.get("/health").status_code == 503
    assert served.chat().status_code == 200
