"""POST /api/embed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle.api.base.fields import MAX_CHARACTERS, MAX_INPUTS
from rekindle.http.auth import OPEN_SALT
from rekindle.protocol.events import Embedded
from rekindle.protocol.frames import Ready
from rekindle.protocol.requests import EmbedRequest
from tests.api.scripted import Front, ScriptedRuntime

VECTORS = np.array([[0.5, 0.25], [1.0, 0.0]], "<f4")


@pytest.fixture
def front() -> Front:
    embedded = Embedded(0, VECTORS.tobytes(), 2, prompt_tokens=7, reused_tokens=0)
    embedder = ScriptedRuntime([embedded], name="bert")
    embedder.supervisor.ready = Ready(context_tokens=16, pool_tokens=0, dimensions=2)
    return Front(embedders=[embedder])


def test_each_input_has_a_vector(front: Front) -> None:
    answer = front.post("/api/embed", {"model": "bert:latest", "input": ["a", "b"]}).json()
    assert answer["embeddings"] == VECTORS.tolist()
    assert answer["model"] == "bert:latest"
    assert answer["prompt_eval_count"] == 7
    assert answer["total_duration"] >= 0


def test_older_clients_send_a_prompt(front: Front) -> None:
    answer = front.post("/api/embeddings", {"model": "bert", "prompt": "a"}).json()
    assert answer == {"embedding": VECTORS[0].tolist()}


def asked(front: Front, **fields: Any) -> EmbedRequest:
    front.post("/api/embed", fields)
    request = front.embedders[0].asked[-1]
    assert isinstance(request, EmbedRequest)
    return request


def test_a_long_input_is_cut_unless_it_may_not_be(front: Front) -> None:
    long = "x" * 40
    assert asked(front, input=["short", long]) == EmbedRequest(
        inputs=["short", long], truncate=True, salt=OPEN_SALT
    )
    assert asked(front, input=long, truncate=False).truncate is False


def test_the_number_of_inputs_and_their_text_are_limited(front: Front) -> None:
    answer = front.post("/api/embed", {"input": ["x"] * (MAX_INPUTS + 1)})
    assert answer.status_code == 400
    assert f"at most {MAX_INPUTS} inputs, not {MAX_INPUTS + 1}" in answer.json()["error"]
    answer = front.post("/api/embed", {"input": ["x" * (MAX_CHARACTERS // 2 + 1)] * 2})
    assert answer.status_code == 400
    assert "characters" in answer.json()["error"]
    assert not front.embedders[0].asked


def test_no_input_asks_whether_the_model_is_there(front: Front) -> None:
    answer = front.post("/api/embed", {"model": "bert"}).json()
    assert answer["embeddings"] == []
