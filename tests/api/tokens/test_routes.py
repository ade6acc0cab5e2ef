"""POST /v1/tokenize with many tokens, and counting those of a chat."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

import pytest

from rekindle.api.tokens.routes import MAX_TEXT_BYTES, PART_TOKENS, TokenizeRequest, _parts
from rekindle.http.body import BodyLimits
from rekindle.protocol.admin import Tokenize, Tokenized, pack_ids
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


def test_the_tokens_of_a_chat_are_counted_without_sending_them() -> None:
    """llama.cpp's `/chat/completions/input_tokens`, with and without /v1."""
    front = Front(ScriptedRuntime(answers=lambda _op: Tokenized(21, 4096)))
    for path in ("/v1/chat/completions/input_tokens", "/chat/completions/input_tokens"):
        answer = front.post(path, {"messages": [{"role": "user", "content": "hi"}]})
        assert answer.json() == {"object": "response.input_tokens", "input_tokens": 21}
    op = front.runtime.admin_requests[0].op
    assert isinstance(op, Tokenize)
    assert not op.with_tokens
    assert op.messages == [{"role": "user", "content": "hi"}]


def test_a_rendered_conversation_is_the_text_of_the_template_and_not_of_its_tokens() -> None:
    """Tokenizers that add a space would show it in the text of the tokens."""
    answer = Tokenized(2, 4096, text="<|user|>hi")
    front = Front(ScriptedRuntime(answers=lambda _op: answer))
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert front.post("/apply-template", body).json() == {"prompt": "<|user|>hi"}
    [received] = front.runtime.admin_requests
    assert isinstance(received.op, Tokenize)
    assert (received.op.with_text, received.op.with_tokens) == (True, False)
