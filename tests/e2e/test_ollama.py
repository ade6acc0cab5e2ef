"""Ollama's own client talks to a real server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from ollama import Client, ResponseError

from tests.support.server import running
from tests.support.tiny import write_llama
from tests.support.tiny_bert import write_bert

GREEDY = {"temperature": 0.0, "num_predict": 8}
QUESTION = [{"role": "user", "content": "what does the cat see from the high window?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("ollama")
    model = write_llama(folder / "chat.gguf", context=2048)
    bert = write_bert(folder / "bert.gguf")
    flags = ("--embedding-model", str(bert), "--disk-cache", "0", "--ollama-port", "0")
    with running(model, folder, *flags) as server:
        [line] = [each for each in server.log.read_text().splitlines() if "Ollama" in each]
        yield line.split()[-1].rstrip(".")


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    with Client(host=url) as client:
        yield client


def test_models_are_listed_and_described(client: Client) -> None:
    names = [each.model for each in client.list().models]
    assert names == ["chat:latest", "bert:latest"]
    shown = client.show("chat")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == 2048
    assert "tools" in (shown.capabilities or [])
    assert [each.model for each in client.ps().models] == names
    assert client.pull("chat").status == "success"


def test_a_streamed_chat_equals_the_unstreamed_one(client: Client) -> None:
    whole = client.chat("chat", QUESTION, options=GREEDY)
    pieces = [*client.chat("chat", QUESTION, options=GREEDY, stream=True)]
    assert "".join(each.message.content or "" for each in pieces) == whole.message.content
    assert pieces[-1].done
    assert pieces[-1].eval_count == whole.eval_count
    assert (pieces[-1].total_duration or 0) > 0


def test_the_second_turn_computes_only_its_own_message(client: Client, url: str) -> None:
    first = client.chat("chat", QUESTION, options=GREEDY)
    again = {"role": "user", "content": "and now?"}
    messages = [*QUESTION, first.message.model_dump(exclude_none=True), again]
    body = {"model": "chat", "messages": messages, "options": GREEDY, "stream": False}
    answer = httpx.post(f"{url}/api/chat", json=body, timeout=60).json()
    assert answer["x_cache"]["reused_tokens"] >= (first.prompt_eval_count or 0)


def test_state_survives_an_unload(client: Client, url: str) -> None:
    """See Open WebUI #19046. Computed state is available again when a model is loaded again."""
    question = [{"role": "user", "content": "who sleeps in the cellar when it rains outside?"}]
    first = client.chat("chat", question, options=GREEDY)
    unloaded = httpx.post(f"{url}/api/chat", json={"model": "chat", "keep_alive": 0}, timeout=60)
    assert unloaded.json()["done_reason"] == "unload"
    messages = [*question, first.message.model_dump(exclude_none=True), *question]
    body = {"model": "chat", "messages": messages, "options": GREEDY, "stream": False}
    answer = httpx.post(f"{url}/api/chat", json=body, timeout=60).json()
    assert answer["x_cache"]["status"] == "hit"
    assert answer["x_cache"]["reused_tokens"] >= (first.prompt_eval_count or 0)


def test_a_chat_from_another_dialect_can_be_continued(client: Client, url: str) -> None:
    question = [{"role": "user", "content": "whose hat lies under the old stairs today?"}]
    body = {"messages": question, "temperature": 0, "max_tokens": 8}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    messages = [*question, reply["choices"][0]["message"], {"role": "user", "content": "why?"}]
    for message in messages:
        message.pop("tool_calls", None)
    asked = {"model": "chat", "messages": messages, "options": GREEDY, "stream": False}
    answer = httpx.post(f"{url}/api/chat", json=asked, timeout=60).json()
    assert answer["x_cache"]["reused_tokens"] >= reply["usage"]["prompt_tokens"]


def test_tools_are_offered_and_their_results_are_read(client: Client) -> None:
    calls = [{"function": {"name": "weather", "arguments": {"city": "Rome"}}}]
    messages: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "sunny", "tool_name": "weather"},
    ]
    answer = client.chat("chat", messages, tools=[WEATHER], options=GREEDY)
    assert answer.done_reason in ("stop", "length")


def test_a_reply_follows_a_schema(client: Client) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    options = {**GREEDY, "num_predict": 64}
    answer = client.chat("chat", QUESTION, format=schema, options=options)
    assert (answer.message.content or "").replace(" ", "") in ('{"a":true}', '{"a":false}')


def test_a_prompt_continues_from_the_context_of_the_previous_answer(
    client: Client, url: str
) -> None:
    first = client.generate("chat", "tell me of the sea", options=GREEDY)
    assert first.context
    body = {"prompt": "go on", "context": list(first.context), "options": GREEDY, "stream": False}
    second = httpx.post(f"{url}/api/generate", json=body, timeout=60).json()
    context = second["context"]
    assert context[: len(first.context)] == list(first.context)
    text = httpx.post(f"{url}/detokenize", json={"tokens": context}, timeout=60).json()["content"]
    assert text.count("<|turn|>") == 4
    assert text.count("<|end|>") == 4
    assert text.endswith(f"{second['response']}<|end|>\n")
    assert second["x_cache"]["reused_tokens"] > 0


def test_texts_are_embedded(client: Client) -> None:
    found = client.embed("bert", ["the cat", "the hat"])
    assert len(found.embeddings) == 2
    assert client.embed("bert", "the cat").embeddings[0] == pytest.approx(found.embeddings[0])
    long = client.embed("bert", "cat " * 2000)
    assert len(long.embeddings) == 1


def test_an_unknown_model_is_reported(client: Client) -> None:
    with pytest.raises(ResponseError, match="none") as caught:
        client.chat("none", QUESTION)
    assert caught.value.status_code == 404
