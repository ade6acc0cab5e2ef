"""Texts and conversations can be tokenised with llama.cpp's and with vLLM's fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.server import running
from tests.support.tiny import CONTROL, TEMPLATE, write_llama
from tests.support.tiny_bert import CLS, SEP, write_bert

MESSAGES = [{"role": "user", "content": "hi <|end|>"}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("tokens")
    model = write_llama(folder / "chat.gguf", context=512)
    bert = write_bert(folder / "bert.gguf")
    flags = ("--embedding-model", str(bert), "--threads", "1", "--disk-cache", "0")
    with running(model, folder, *flags) as server, server.client() as client:
        yield client


def ask(client: httpx.Client, body: Any, path: str = "/tokenize") -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(client: httpx.Client, tokens: list[int]) -> str:
    answer = ask(client, {"tokens": tokens}, "/v1/detokenize")
    assert answer["content"] == answer["prompt"]
    return str(answer["content"])


def test_tokenising_and_detokenising_returns_the_text(client: httpx.Client) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        answer = ask(client, {"content": "the naïve cat"}, path)
        assert answer["count"] == len(answer["tokens"]) == 13  # `th` is one token, `ï` two
        assert answer["max_model_len"] == 512
    assert text_of(client, answer["tokens"]) == "the naïve cat"


def test_the_text_of_a_control_token_becomes_that_token_by_default(
    client: httpx.Client,
) -> None:
    [end] = ask(client, {"content": "<|end|>"})["tokens"]
    assert end == CONTROL.index("<|end|>")
    assert ask(client, {"content": "<|end|>", "parse_special": False})["count"] > 1
    assert text_of(client, [end]) == "<|end|>"


def test_pieces_have_the_format_of_llama_cpp_or_vllm(client: httpx.Client) -> None:
    with_pieces = ask(client, {"content": "thï", "with_pieces": True})["tokens"]
    assert [each["piece"] for each in with_pieces] == ["th", [0xC3], [0xAF]]
    answer = ask(client, {"prompt": "tha", "return_token_strs": True})
    assert answer["token_strs"] == ["th", "a"]
    assert len(answer["tokens"]) == 2


def test_a_conversation_is_tokenised_like_a_chat_request(client: httpx.Client) -> None:
    answer = ask(client, {"messages": MESSAGES})
    assert text_of(client, answer["tokens"]) == (
        "<|turn|>user\nhi <|end|><|end|>\n<|turn|>assistant\n"
    )
    end = CONTROL.index("<|end|>")
    assert answer["tokens"].count(end) == 1  # from the template; a user's text has none
    chat = {"messages": MESSAGES, "max_tokens": 1}
    usage = ask(client, chat, "/v1/chat/completions")["usage"]
    assert usage["prompt_tokens"] == answer["count"]
    shorter = ask(client, {"messages": MESSAGES, "add_generation_prompt": False})
    assert answer["tokens"][: shorter["count"]] == shorter["tokens"]
    assert "add_generation_prompt" in TEMPLATE


def test_apply_template_renders_a_conversation_like_llama_cpp(client: httpx.Client) -> None:
    for path in ("/apply-template", "/v1/apply-template"):
        assert ask(client, {"messages": MESSAGES}, path) == {
            "prompt": "<|turn|>user\nhi <|end|><|end|>\n<|turn|>assistant\n"
        }
    assert client.get("/props").json()["chat_template"] == TEMPLATE
    model = client.get("/v1/models").json()["data"][0]
    assert model["meta"]["n_ctx"] == 512
    assert model["meta"]["n_vocab"] > len(CONTROL)


def test_tokens_for_an_embedding_model_include_its_special_tokens(client: httpx.Client) -> None:
    bare = ask(client, {"model": "bert", "content": "the cat"})["tokens"]
    assert ask(client, {"model": "bert", "prompt": "the cat"})["tokens"] == [CLS, *bare, SEP]
    plain = {"model": "bert", "prompt": "the cat", "add_special_tokens": False}
    assert ask(client, plain)["tokens"] == bare
    whole = {"model": "bert", "content": "the cat", "add_special": True}
    assert ask(client, whole)["count"] == len(bare) + 2
    count = {"model": "bert", "text": "the cat"}
    assert ask(client, count, "/v1/internal/token-count") == {"length": len(bare) + 2}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {}, "one of `content`, `prompt` and `messages`"),
        ("/tokenize", {"content": "a", "prompt": "a"}, "one of `content`"),
        ("/tokenize", {"content": 1}, "`content` takes a string"),
        ("/tokenize", {"content": "a" * (17 << 20)}, "at most"),
        ("/tokenize", {"messages": []}, "`messages` takes at least 1 item"),
        ("/tokenize", {"messages": MESSAGES, "model": "bert"}, "no conversations"),
        (
            "/tokenize",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image", "image_url": "http://x/y.png"}]}
                ]
            },
            "send only text",
        ),
        ("/detokenize", {"tokens": [10**6]}, "token ids of this model go from 0 to"),
        ("/detokenize", {"tokens": [-1]}, "token ids of this model go from 0 to"),
        ("/detokenize", {"tokens": "a"}, "`tokens` takes a list"),
        ("/v1/internal/token-count", {}, "`text` is missing"),
        ("/apply-template", {}, "`messages` is missing"),
    ],
)
def test_errors_name_the_wrong_field(
    client: httpx.Client, path: str, body: Any, message: str
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
