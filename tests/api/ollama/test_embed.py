"""POST /api/embed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rekindle.protocol.admin import AdminOp, AdminResult, Tokenize, Tokenized
from rekindle.protocol.embeddings import Embedded, EmbedRequest
from rekindle.protocol.frames import Ready
from tests.api.scripted import Front, ScriptedRuntime

VECTORS = np.array([[0.5, 0.25], [1.0, 0.0]], "<f4")


def tokens(op: AdminOp) -> AdminResult:
    assert isinstance(op, Tokenize)
    ids = [1, *range(100, 100 + len(op.text or "")), 2]
    return Tokenized(len(ids), 16, ids)


@pytest.fixture
def front() -> Front:
    embedded = Embedded(0, VECTORS.tobytes(), 2, prompt_tokens=7, reused_tokens=0)
    embedder = ScriptedRuntime([embedded], name="bert", answers=tokens)
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


def inputs_of(front: Front, **fields: Any) -> list[str | list[int]]:
    front.post("/api/embed", fields)
    asked = front.embedders[0].asked[-1]
    assert isinstance(asked, EmbedRequest)
    return asked.inputs


def test_a_long_input_is_cut_unless_it_may_not_be(front: Front) -> None:
    long = "x" * 40
    assert inputs_of(front, input=["short", long]) == ["short", [1, *range(100, 114), 2]]
    assert inputs_of(front, input=long, truncate=False) == [long]


def test_no_input_asks_whether_the_model_is_there(front: Front) -> None:
    answer = front.post("/api/embed", {"model": "bert"}).json()
    assert answer["embeddings"] == []
