"""Threads of the Messages API on the real server: reuse, other dialects, restarts and tenants."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest

from tests.api.anthropic.stream_grammar import events_of, message_of
from tests.support.server import Server, running
from tests.support.tiny import write_llama

KEYS = ("one", "two")
FLAGS = [word for key in KEYS for word in ("--api-key", key)]
LIMITS = {"max_tokens": 8, "temperature": 0}
SYSTEM = "Harbours are what you know all about. " * 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=8192)


def post(server: Server, path: str, body: dict[str, Any], key: str = KEYS[0]) -> httpx.Response:
    with server.client() as http:
        return http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


def send(server: Server, text: str, after: str | None = None, **fields: Any) -> dict[str, Any]:
    thread = {"type": "continue", "previous_message_id": after} if after else {"type": "create"}
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "thread": thread, **LIMITS, **fields}
    response = post(server, "/v1/messages", body)
    assert response.status_code == httpx.codes.OK, response.text
    return message_of(events_of(response)) if fields.get("stream") else dict(response.json())


def text_of(message: dict[str, Any]) -> str:
    return str(message["content"][0]["text"])


def known_after(message: dict[str, Any]) -> int:
    """The number of tokens with state after a message. The last token was only sampled."""
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    return sum(int(message["usage"][count]) for count in counts) - 1


def test_a_thread_continues_in_every_dialect_from_the_same_blocks(
    model: Path, tmp_path: Path
) -> None:
    """Every turn computes only its own tokens, whichever dialect it is in, and also after a
    restart."""
    history: list[Any] = [{"role": "user", "content": "Where?"}]

    def add(reply: str, question: str) -> None:
        history.append({"role": "assistant", "content": reply})
        history.append({"role": "user", "content": question})

    with running(model, tmp_path, *FLAGS) as server:
        first = send(server, "Where?", system=SYSTEM)
        second = send(server, "When?", first["id"], stream=True)
        assert second["usage"]["cache_read_input_tokens"] == known_after(first)
        add(text_of(first), "When?")
        add(text_of(second), "Why?")
        asked = {"instructions": SYSTEM, "input": history, "max_output_tokens": 8, "temperature": 0}
        third = post(server, "/v1/responses", asked).json()
        assert third["usage"]["input_tokens_details"]["cached_tokens"] == known_after(second)
        add(third["output"][0]["content"][0]["text"], "Who?")
        begun = {"role": "system", "content": SYSTEM}
        chat = {"messages": [begun, *history], **LIMITS}
        fourth = post(server, "/v1/chat/completions", chat).json()
        known = third["usage"]["total_tokens"] - 1
        assert fourth["usage"]["prompt_tokens_details"]["cached_tokens"] == known
    with running(model, tmp_path, *FLAGS) as server:
        fifth = send(server, "How?", second["id"])
        # The third turn began like this one, so its first tokens are known, too.
        assert fifth["usage"]["cache_read_input_tokens"] >= known_after(second)
        assert fifth["x_cache"]["cache_key"] == second["id"]
        assert fifth["x_cache"]["tier"] == "disk"


def test_a_thread_survives_a_kill_and_the_loss_of_its_state(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, *FLAGS) as server:
        first = send(server, "Where?", system=SYSTEM)
        for pid in (server.process.pid, *server.worker_pids()):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    for block in (tmp_path / "kv").glob("*/blocks/*"):
        block.unlink()
    with running(model, tmp_path, *FLAGS) as server:
        second = send(server, "When?", first["id"])
    assert second["usage"]["cache_read_input_tokens"] == 0
    assert second["usage"]["input_tokens"] > known_after(first)  # with the system prompt


def test_a_thread_belongs_to_its_tenant(model: Path, tmp_path: Path) -> None:
    with running(model, tmp_path, *FLAGS) as server:
        first = send(server, "Where?")
        body = {
            "messages": [{"role": "user", "content": "When?"}],
            "thread": {"type": "continue", "previous_message_id": first["id"]},
            **LIMITS,
        }
        assert post(server, "/v1/messages", body, KEYS[1]).status_code == httpx.codes.NOT_FOUND
        with anthropic.Anthropic(base_url=server.url, api_key=KEYS[1], max_retries=0) as client:
            with pytest.raises(anthropic.NotFoundError) as caught:
                client.beta.messages.create(model="tiny", extra_body=body, **_typed(body))
            assert caught.value.error_code == "thread_not_found"
        assert post(server, "/v1/messages", body).status_code == httpx.codes.OK


def _typed(body: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": body["max_tokens"], "messages": body["messages"]}
