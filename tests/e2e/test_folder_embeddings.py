"""Embedding models and rerankers in folders run next to a chat model, by command line and HTTP."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.support.reference_text import ReferenceDecoder
from tests.support.server import Server, running
from tests.support.tiny import write_llama
from tests.support.tiny_mlx import write_tiny_mlx
from tests.support.tiny_text_models import (
    WIDTH,
    write_decoder,
    write_encoder,
    write_modules,
    write_reranker_gguf,
)

EXAMPLE_MODEL = "embedding-model-name"
TEXTS = ["the cat sat", "a", "the dog sat on the mat, the cat too", "rain"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("folders")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    models = [
        write_modules(write_decoder(folder / "embedder"), "lasttoken"),
        write_decoder(folder / EXAMPLE_MODEL, hidden_size=1056),
        write_encoder(folder / "cross-encoder", classes=1),
        write_decoder(
            folder / "qwen3-reranker-tiny", appends_end=False, max_position_embeddings=1024
        ),
    ]
    models.append(write_reranker_gguf(models[-1], folder / "judge.gguf"))
    flags = [each for model in models for each in ("--embedding-model", str(model))]
    chat = write_tiny_mlx(folder / "model-name", "llama-wide")  # its state can be quantised
    with running(chat, folder, *flags, "--threads", "1", "--disk-cache", "0") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post(client: httpx.Client, path: str, body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_example_of_swift_mlx_server_is_answered(client: httpx.Client, folder: Path) -> None:
    """The request and the response of its documentation."""
    body = {
        "input": "Your text string goes here",
        "model": EXAMPLE_MODEL,
        "encoding_format": "float",
        "dimensions": 1024,
        "user": "user-id-123",
        "batch_size": 32,
    }
    answer = post(client, "/v1/embeddings", body)
    assert answer["object"] == "list"
    assert answer["model"] == EXAMPLE_MODEL
    [data] = answer["data"]
    assert (data["object"], data["index"]) == ("embedding", 0)
    asked = {"model": EXAMPLE_MODEL, "prompt": body["input"]}
    tokens = post(client, "/tokenize", asked)["tokens"]
    assert tokens[-1] == 0  # the tokenizer appends the end
    used = answer["usage"]
    assert used["prompt_tokens"] == used["total_tokens"] == len(tokens)
    expected = ReferenceDecoder(folder / EXAMPLE_MODEL).states(tokens)[-1][:1024]
    assert np.allclose(data["embedding"], expected / np.linalg.norm(expected), atol=1e-4)


SAMPLING = {
    "max_tokens": 100, "temperature": 0.7, "top_p": 0.9, "stream": False, "stop": ["###", "END"],
    "repetition_penalty": 1.1, "repetition_context_size": 20,
}  # fmt: skip
QUESTION = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "Hello, what can you help me with?"},
]


@pytest.mark.parametrize(
    ("path", "body", "kv_bits"),
    [
        ("/v1/completions",
         {"model": "model-name", "prompt": "Your text prompt goes here", **SAMPLING,
          "kv_bits": 8, "kv_group_size": 64, "kv_quantization_start": 1000}, 32),
        ("/v1/chat/completions",
         {"model": "model-name", "messages": QUESTION, **SAMPLING,
          "kv_bits": 4, "kv_quantization_start": 500}, 32),
        ("/v1/completions",
         {"prompt": "Long text here... " * 80, "max_tokens": 200, "kv_bits": 4,
          "kv_group_size": 64, "kv_quantization_start": 1000}, 4),
    ],
    ids=["completion", "chat", "long-context"],
)  # fmt: skip
def test_the_text_examples_of_swift_mlx_server_are_answered(
    path: str, body: dict[str, Any], kv_bits: int, client: httpx.Client
) -> None:
    """State is quantised only beyond the given length. Before, it has the bits of the weights."""
    answer = post(client, path, {**body, "use_kv_cache": True})
    assert answer["model"] == "model-name"
    [choice] = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    text = choice["text"] if path == "/v1/completions" else choice["message"]["content"]
    assert isinstance(text, str)
    usage = answer["usage"]
    assert 0 < usage["completion_tokens"] <= body["max_tokens"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert answer["x_cache"]["kv_bits"] == kv_bits


def test_the_example_with_several_texts_is_answered(client: httpx.Client) -> None:
    texts = ["First text string", "Second text string"]
    body = {"input": texts, "model": EXAMPLE_MODEL}
    floats = post(client, "/v1/embeddings", body)["data"]
    assert [each["index"] for each in floats] == [0, 1]
    encoded = post(client, "/v1/embeddings", body | {"encoding_format": "base64"})["data"]
    for one, other in zip(floats, encoded, strict=True):
        raw = np.frombuffer(base64.b64decode(other["embedding"]), "<f4")
        assert np.array_equal(np.array(one["embedding"], np.float32), raw)


def test_the_openai_library_gets_vectors_of_a_folder(server: Server) -> None:
    library = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    answer = library.embeddings.create(model="embedder", input=TEXTS)
    vectors = np.array([each.embedding for each in answer.data])
    assert vectors.shape == (len(TEXTS), WIDTH)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_equal_texts_and_token_lists_are_computed_once(client: httpx.Client) -> None:
    text = "equal texts are computed once"
    tokens = post(client, "/tokenize", {"model": "embedder", "prompt": text})["tokens"]
    body = {"model": "embedder", "input": [text, text]}
    used = post(client, "/v1/embeddings", body)["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == len(tokens)
    again = post(client, "/v1/embeddings", {"model": "embedder", "input": [tokens]})
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(tokens)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dimensions": WIDTH + 1}, f"`dimensions` may be at most {WIDTH}"),
        ({"input": [[5] * 257]}, "`input[0]` has 257 tokens; this model takes 256"),
        ({"input": [[5, 10**6]]}, "`input[0]` has token ids of another model"),
    ],
)
def test_errors_name_the_wrong_field(
    client: httpx.Client, fields: dict[str, Any], message: str
) -> None:
    body = {"input": "a", "model": "embedder", **fields}
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("model", ["cross-encoder", "qwen3-reranker-tiny", "judge"])
def test_documents_are_ranked_best_first(client: httpx.Client, model: str) -> None:
    asked = {"model": model, "query": "the cat", "documents": TEXTS, "return_documents": True}
    answer = post(client, "/v1/rerank", asked)
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert len(set(scores)) == len(TEXTS)
    assert [each["document"]["text"] for each in answer["results"]] == [
        TEXTS[each["index"]] for each in answer["results"]
    ]


def test_both_engines_score_the_same_reranker_alike(client: httpx.Client) -> None:
    scores = {}
    for model in ("qwen3-reranker-tiny", "judge"):
        asked = {"model": model, "query": "the cat", "documents": TEXTS}
        results = post(client, "/v1/rerank", asked)["results"]
        scores[model] = {each["index"]: each["relevance_score"] for each in results}
    assert scores["judge"] == pytest.approx(scores["qwen3-reranker-tiny"], abs=0.01)


def test_each_folder_is_listed_with_its_dimensions(client: httpx.Client) -> None:
    listed = {each["id"]: each for each in client.get("/v1/models").json()["data"]}
    assert list(listed) == [
        *("model-name", "embedder", EXAMPLE_MODEL, "cross-encoder", "qwen3-reranker-tiny", "judge")
    ]
    assert listed["embedder"]["dimensions"] == WIDTH
    wrong = client.post("/v1/embeddings", json={"model": "cross-encoder", "input": "a"})
    assert f"use one of embedder, {EXAMPLE_MODEL}" in wrong.json()["error"]["message"]


def test_a_folder_that_is_not_supported_stops_the_start_with_a_remedy(tmp_path: Path) -> None:
    model = write_modules(write_encoder(tmp_path / "dense"), more="Dense")
    chat = write_llama(tmp_path / "chat.gguf", context=512)
    with (
        pytest.raises(RuntimeError, match=r"has a Dense module .*serve a GGUF"),
        running(chat, tmp_path, "--embedding-model", str(model)),
    ):
        raise NotImplementedError
