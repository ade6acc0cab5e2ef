"""POST /v1/tokenize with many tokens, and GET /props."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest

from rekindle.api.tokens.routes import MAX_TEXT_BYTES, PART_TOKENS, TokenizeRequest, _parts
from rekindle.http.body import BodyLimits
from rekindle.protocol.admin import Tokenized, pack_ids
from tests.api.scripted import Front, ScriptedRuntime, error
from tests.kvcache.measure import peak_bytes

PIECES = {7: b" a", 70_000: "é".encode()[:1]}


def tokenized(count: int) -> Tokenized:
    return Tokenized(count, 4096, pack_ids(islice(cycle(PIECES), count)), PIECES)


@pytest.mark.parametrize("count", [0, 1, PART_TOKENS, PART_TOKENS + 1, 3 * PART_TOKENS])
def test_an_answer_in_parts_is_the_same_as_in_one(count: int) -> None:
    front = Front(ScriptedRuntime(answers=lambda _op: tokenized(count)))
    ids = list(islice(cycle(PIECES), count))
    strings: dict[int, Any] = {7: " a", 70_000: [0xC3]}

    def ask(**fields: Any) -> Any:
        return front.post("/v1/tokenize", {"content": "x", **fields}).json()

    assert ask() == {"tokens": ids, "count": count, "max_model_len": 4096}
    pieces = [{"id": token, "piece": strings[token]} for token in ids]
    assert ask(with_pieces=True)["tokens"] == pieces
    texts = [{7: " a", 70_000: "\ufffd"}[token] for token in ids]
    assert ask(return_token_strs=True)["token_strs"] == texts


def test_a_long_answer_is_never_whole_in_memory() -> None:
    count = 100 * PART_TOKENS
    found = tokenized(count)
    body = TokenizeRequest.model_validate(
        {"content": "x", "with_pieces": True, "return_token_strs": True}
    )
    sizes: list[int] = []

    def send() -> None:
        sizes.append(sum(map(len, _parts(found, body))))

    assert peak_bytes(send) < 4 << 20
    assert sizes[0] > 20 * count


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/tokenize", "content"),
        ("/v1/tokenize", "prompt"),
        ("/v1/internal/token-count", "text"),
    ],
)
def test_a_text_is_bounded_in_bytes(path: str, field: str) -> None:
    front = Front(ScriptedRuntime(answers=lambda _op: tokenized(1)))
    longest = "é" * (MAX_TEXT_BYTES // 2)
    assert front.post(path, {field: longest}).status_code == 200
    refused = front.post(path, {field: longest + "x"})
    assert refused.status_code == 400
    assert "send it in parts" in error(refused)["message"]


def test_the_tokens_of_an_answer_count_as_memory_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rekindle.http.body.LIMITS", BodyLimits(caller_held_bytes=1000))
    front = Front(ScriptedRuntime(answers=lambda _op: tokenized(500)))
    assert front.post("/v1/tokenize", {"content": "x"}).status_code == 429
    front = Front(ScriptedRuntime(answers=lambda _op: tokenized(200)))
    assert front.post("/v1/tokenize", {"content": "x"}).status_code == 200


def test_props_show_context_template_and_modalities() -> None:
    front = Front(ScriptedRuntime(name="tiny"), ScriptedRuntime(name="seeing", sees=True))
    found = front.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 4096
    assert found["model_alias"] == "tiny"
    assert found["chat_template"] == "{{ x }}"
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["total_slots"] >= 1
    assert front.get("/props?model=seeing").json()["modalities"]["vision"] is True
    assert front.get("/props", headers={"x-model-id": "1"}).json()["model_alias"] == "seeing"


def test_a_model_that_is_away_is_unavailable() -> None:
    front = Front()
    front.runtimes[0].supervisor.ready = None
    answer = front.get("/props")
    assert answer.status_code == 503
    assert "loading" in error(answer)["message"]
