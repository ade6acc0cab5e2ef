"""Embedding models and rerankers run alongside a chat model, by command line, HTTP and
libraries."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.api.live import soon
from tests.support.server import Server, running
from tests.support.tiny import write_llama
from tests.support.tiny_bert import WIDTH, write_bert

TEXTS = ["the cat sat", "a", "the dog sat on the mat, the cat too", "rain"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("embeddings")
    flags = []
    for path in (write_bert(folder / "bert.gguf"), write_bert(folder / "rank.gguf", classes=1)):
        flags += ["--embedding-model", str(path)]
    model = write_llama(folder / "chat.gguf", context=512)
    with running(model, folder, *flags, "--threads", "1", "--disk-cache", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, body: Any, path: str = "/v1/embeddings") -> httpx.Response:
    return client.post(path, json=body)


def vectors(client: httpx.Client, **body: Any) -> Any:
    answer = post(client, body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data], np.float32)


def refusal(answer: httpx.Response) -> Any:
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_vectors_come_in_the_order_of_the_inputs_in_one_request_or_several(
    client: httpx.Client,
) -> None:
    together = vectors(client, input=TEXTS)
    alone = np.concatenate([vectors(client, input=text, use_kv_cache=False) for text in TEXTS])
    assert together.shape == (len(TEXTS), WIDTH)
    assert (together * alone).sum(axis=1).min() > 0.9999
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
    in_twos = vectors(client, input=TEXTS, batch_size=2, use_kv_cache=False)
    assert (together * in_twos).sum(axis=1).min() > 0.9999


def test_base64_and_floats_hold_the_same_bits(client: httpx.Client) -> None:
    floats = vectors(client, input=TEXTS)
    answer = post(client, {"input": TEXTS, "encoding_format": "base64"}).json()
    encoded = [base64.b64decode(each["embedding"]) for each in answer["data"]]
    assert np.array_equal(np.stack([np.frombuffer(each, "<f4") for each in encoded]), floats)


def test_fewer_dimensions_truncate_and_normalise_the_vector(client: httpx.Client) -> None:
    whole = vectors(client, input=TEXTS)[:, :5]
    few = vectors(client, input=TEXTS, dimensions=5)
    assert np.allclose(few, whole / np.linalg.norm(whole, axis=1, keepdims=True), atol=1e-6)
    assert "at most 64" in refusal(post(client, {"input": "a", "dimensions": 65}))["message"]


def test_usage_counts_prompt_tokens_and_cached_tokens(client: httpx.Client) -> None:
    bodies = [{"input": ["the mat", "the rain", "the mat"]}] * 2
    first, again = (post(client, body, "/embeddings").json()["usage"] for body in bodies)
    assert first["prompt_tokens"] == first["total_tokens"] == 12
    assert first["prompt_tokens_details"] == {"cached_tokens": 4}
    assert again["prompt_tokens_details"] == {"cached_tokens": 12}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "at least one input"),
        ({"input": [[]]}, "at least one"),
        ({"input": ["a", {}]}, "`input` takes"),
        ({"input": ["a"] * 2049}, "at most 2048 inputs"),
        ({"input": ["a", "the " * 130]}, "`input[1]` has 132 tokens; this model takes 128"),
        ({"input": [5, 10**6]}, "`input[0]` has token ids of another model"),
        ({"input": "a", "batch_size": 0}, "`batch_size` takes a number from 1 up"),
        ({"input": "a", "dimensions": 0}, "`dimensions` takes a number from 1 up"),
        ({"input": "a", "encoding_format": "hex"}, "`encoding_format` takes"),
        ({"input": "a", "model": "chat"}, "not one that makes embeddings: use one of bert"),
        ({"input": "a", "model": "rank"}, "not one that makes embeddings: use one of bert"),
    ],
)
def test_errors_name_the_wrong_field(
    client: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(post(client, fields))["message"]


def test_each_model_is_listed_and_does_its_own_task(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["chat", "bert", "rank"]
    assert listed[1]["dimensions"] == WIDTH
    assert client.get("/v1/models/bert").json() == listed[1]
    chat = {"model": "bert", "messages": [{"role": "user", "content": "hello"}]}
    wrong = refusal(post(client, chat, "/v1/chat/completions"))
    assert "generates no text: use /v1/embeddings" in wrong["message"]
    assert post(client, {"input": "a", "model": "other"}).status_code == 404
    assert 'rekindle_up{model="bert"} 1.0' in client.get("/metrics").text
    assert client.get("/v1/cache/stats").status_code == 200


def test_the_openai_library_gets_vectors(server: Server, client: httpx.Client) -> None:
    """The library asks for base64 by default."""
    library = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = library.embeddings.create(model="bert", input=TEXTS)
    found = np.array([each.embedding for each in answer.data], np.float32)
    assert np.array_equal(found, vectors(client, input=TEXTS))


def test_langchain_gets_vectors_for_texts(server: Server, client: httpx.Client) -> None:
    library = langchain(server, check_embedding_ctx_length=False)
    expected = vectors(client, input=TEXTS)
    assert np.allclose(library.embed_documents(TEXTS), expected, atol=1e-6)
    assert np.allclose(library.embed_query(TEXTS[0]), expected[0], atol=1e-6)


def test_langchain_gets_vectors_for_token_lists(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default it sends token lists, made with the encoding it finds for the model."""

    class OfServer:
        def encode(self, text: str, **_: Any) -> list[int]:
            asked = {"model": "bert", "prompt": text}
            tokens: list[int] = post(client, asked, "/tokenize").json()["tokens"]
            return tokens

        def encode_ordinary(self, text: str) -> list[int]:
            return self.encode(text)

    monkeypatch.setattr("tiktoken.encoding_for_model", lambda _name: OfServer())
    found = langchain(server).embed_documents(TEXTS)
    assert np.allclose(found, vectors(client, input=TEXTS), atol=1e-6)


def langchain(server: Server, **options: Any) -> OpenAIEmbeddings:
    url, key = f"{server.url}/v1", SecretStr("none")
    return OpenAIEmbeddings(model="bert", base_url=url, api_key=key, **options)


def rerank(client: httpx.Client, **body: Any) -> Any:
    return post(client, {"query": "the cat", "documents": TEXTS, **body}, "/v1/rerank")


def test_documents_are_ranked_best_first(client: httpx.Client) -> None:
    answer = rerank(client).json()
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(each["index"] for each in answer["results"]) == list(range(len(TEXTS)))
    assert answer["model"] == "rank"
    best = rerank(client, top_n=1, return_documents=True, model="rank").json()["results"]
    assert best == [{**answer["results"][0], "document": {"text": TEXTS[best[0]["index"]]}}]
    objects = [{"text": text} for text in TEXTS]
    again = post(client, {"query": "the cat", "documents": objects}, "/rerank").json()
    assert again["results"] == answer["results"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == again["usage"]["prompt_tokens"]


def test_texts_are_ranked_as_hugging_faces_clients_expect(client: httpx.Client) -> None:
    answer = rerank(client).json()
    ranked = [(each["index"], each["relevance_score"]) for each in answer["results"]]
    listed = post(client, {"query": "the cat", "texts": TEXTS}, "/rerank").json()
    assert [(each["index"], each["score"]) for each in listed] == ranked
    body = {"query": "the cat", "texts": TEXTS, "top_n": 1, "return_text": True}
    [best] = post(client, body, "/rerank").json()
    assert best["text"] == TEXTS[best["index"]]
    for wrong in ({}, {"texts": TEXTS, "documents": TEXTS}):
        response = post(client, {"query": "the cat", **wrong}, "/rerank")
        assert response.status_code == httpx.codes.BAD_REQUEST
        assert "Send one of `documents` and `texts`" in response.text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": []}, "`documents` takes"),
        ({"documents": ["a"] * 2049}, "at most 2048 documents"),
        ({"documents": ["a", 1]}, "`documents` takes"),
        ({"documents": ["a", "the " * 130]}, "`documents[1]` has 135 tokens"),
        ({"top_n": 0}, "`top_n` takes a number from 1 up"),
        ({"model": "bert"}, "not one that ranks documents: use one of rank"),
    ],
)
def test_errors_name_what_is_wrong_with_documents(
    client: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    assert message in refusal(rerank(client, **fields))["message"]


def test_a_model_that_dies_is_unhealthy_until_it_is_restarted(
    server: Server, client: httpx.Client
) -> None:
    before = vectors(client, input=TEXTS)
    _, bert, _ = server.worker_pids()
    os.kill(bert, signal.SIGKILL)
    soon(lambda: client.get("/health").status_code == 503)
    soon(lambda: client.get("/health").status_code == 200)
    assert np.array_equal(vectors(client, input=TEXTS), before)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert post(client, chat, "/v1/chat/completions").status_code == 200
