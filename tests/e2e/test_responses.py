"""The Responses API on the real server shares one cache with all dialects and keeps responses."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel
from websockets.sync.client import connect

from tests.api.responses.published import check_compaction
from tests.api.responses.stream_grammar import events_of, response_of
from tests.support.server import Server, running
from tests.support.tiny import write_llama

PATH = "/v1/responses"
KEYS = ("one", "two")
HEADERS = {"authorization": f"Bearer {KEYS[0]}"}
QUESTION = {"role": "user", "content": "Where are we?"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", context=8192)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = [word for key in KEYS for word in ("--api-key", key)]
    with running(model, tmp_path_factory.mktemp("server"), *flags) as started:
        yield started


@contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


def http_of(server: Server) -> httpx.Client:
    client = server.client()
    client.headers.update(HEADERS)
    return client


def system(about: str) -> str:
    """A long system prompt that no other test uses."""
    return f"{about} is what you know all about. " * 20


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"max_output_tokens": 8, "temperature": 0, **fields}
    with http_of(server) as http:
        response = http.post(PATH, json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return response_of(events_of(response)) if fields.get("stream") else dict(response.json())


def text_of(response: dict[str, Any]) -> str:
    [item] = response["output"]
    return str(item["content"][0]["text"])


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["input_tokens_details"]["cached_tokens"])


def known_after(response: dict[str, Any]) -> int:
    """The number of tokens with state after a response. The last token was only sampled."""
    return int(response["usage"]["total_tokens"]) - 1


def test_a_conversation_across_chat_messages_and_responses_uses_the_same_blocks(
    server: Server,
) -> None:
    words = system("harbours")
    history: list[Any] = [QUESTION]
    limits = {"max_tokens": 8, "temperature": 0}
    with http_of(server) as http:
        begun = [{"role": "system", "content": words}, *history]
        chat = http.post("/v1/chat/completions", json={"messages": begun, **limits}).json()
        reply = chat["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": reply}, QUESTION]
        told = {"messages": history, "system": words, **limits}
        message = http.post("/v1/messages", json=told).json()
    chat_tokens = chat["usage"]["prompt_tokens"] + chat["usage"]["completion_tokens"]
    assert message["usage"]["cache_read_input_tokens"] == chat_tokens - 1
    history += [{"role": "assistant", "content": message["content"][0]["text"]}, QUESTION]
    third = ask(server, instructions=words, input=history)
    counts = ("input_tokens", "cache_read_input_tokens", "output_tokens")
    assert cached(third) == sum(message["usage"][count] for count in counts) - 1
    fourth = ask(server, instructions=words, input=[QUESTION], previous_response_id=third["id"])
    assert cached(fourth) == known_after(third)
    history += [{"role": "assistant", "content": text_of(third)}, QUESTION]
    history += [{"role": "assistant", "content": text_of(fourth)}, QUESTION]
    with http_of(server) as http:
        begun = [{"role": "system", "content": words}, *history]
        last = http.post("/v1/chat/completions", json={"messages": begun, **limits}).json()
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == known_after(fourth)


@pytest.mark.parametrize("stream", [False, True])
def test_a_previous_response_can_be_continued(server: Server, stream: bool) -> None:
    about = {"instructions": system(f"{stream} tides"), "stream": stream}
    first = ask(server, input="When?", **about)
    second = ask(server, input="And then?", previous_response_id=first["id"], **about)
    assert cached(second) == known_after(first)
    assert second["x_cache"]["cache_key"] == first["id"]
    assert second["x_cache"]["reason"] == "full_match"
    history = [{"role": "user", "content": "When?"}, *first["output"]]
    sent = ask(server, input=[*history, {"role": "user", "content": "And then?"}], **about)
    assert text_of(sent) == text_of(second)
    assert sent["usage"]["input_tokens"] == second["usage"]["input_tokens"]


def test_responses_survive_a_restart_and_the_loss_of_their_state(
    model: Path, tmp_path: Path
) -> None:
    """A finished response is on disk, so it survives a kill, too."""
    about = {"instructions": system("lighthouses")}
    with running(model, tmp_path) as server:
        first = ask(server, input="How high?", **about)
        second = ask(server, input="Why?", previous_response_id=first["id"], **about)
        for pid in (server.process.pid, *server.worker_pids()):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    for block in (tmp_path / "kv").glob("*/blocks/*"):
        block.unlink()
    with running(model, tmp_path) as server, client_of(server) as client:
        kept = client.responses.retrieve(second["id"]).model_dump()["output"]
        assert kept == [{**item, "phase": None} for item in second["output"]]
        third = ask(server, input="Really?", previous_response_id=second["id"], **about)
        assert third["usage"]["input_tokens"] > second["usage"]["total_tokens"]
        assert cached(third) == 0  # its state is gone and is computed again
        client.responses.delete(first["id"])
    with running(model, tmp_path) as server, client_of(server) as client:
        fourth = ask(server, input="Yes?", previous_response_id=third["id"], **about)
        assert cached(fourth) == known_after(third)
        assert fourth["x_cache"]["tier"] == "disk"
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first["id"])


def test_background_responses_survive_a_restart_and_a_kill(model: Path, tmp_path: Path) -> None:
    asked: Any = {"model": "tiny", "input": "How high?", "background": True}
    with running(model, tmp_path) as server, client_of(server) as client:
        first = client.responses.create(**asked, max_output_tokens=8)
        while (done := client.responses.retrieve(first.id)).status in ("queued", "in_progress"):
            time.sleep(0.01)
        told = list(client.responses.retrieve(first.id, stream=True, starting_after=2))
        assert [event.sequence_number for event in told] == list(range(3, 3 + len(told)))
        cut = client.responses.create(**asked, max_output_tokens=8000)
        for pid in (server.process.pid, *server.worker_pids()):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
    with running(model, tmp_path) as server, client_of(server) as client:
        assert client.responses.retrieve(first.id) == done
        assert client.responses.retrieve(cut.id).status == "failed"
        second = ask(server, input="Why?", previous_response_id=first.id)
        assert done.usage is not None
        assert second["usage"]["input_tokens"] > done.usage.total_tokens


def test_a_conversation_over_a_websocket_uses_the_same_blocks(server: Server) -> None:
    """An unstored response is continued on its connection, and computes only its own tokens."""
    create = {"type": "response.create", "store": False, "max_output_tokens": 8, "temperature": 0}
    url = server.url.replace("http", "ws") + PATH
    with connect(url, additional_headers=HEADERS) as socket:

        def answer(**fields: Any) -> dict[str, Any]:
            socket.send(json.dumps({**create, **fields}))
            while "usage" not in (event := json.loads(socket.recv(60))).get("response", {}) or (
                event["response"]["usage"] is None
            ):
                pass
            return dict(event["response"])

        first = answer(instructions=system("buoys"), input="Red?")
        second = answer(
            instructions=system("buoys"), input="Green?", previous_response_id=first["id"]
        )
    assert cached(second) == known_after(first)
    assert second["x_cache"]["reason"] == "full_match"


def test_a_compacted_conversation_is_short_and_its_summary_reuses_the_prompt(
    server: Server,
) -> None:
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 400}]
    first = ask(server, instructions=system("piers"), input=[*history, QUESTION])
    with http_of(server) as http:
        asked = {"model": "tiny", "instructions": system("piers")}
        window = http.post(
            f"{PATH}/compact", json={**asked, "previous_response_id": first["id"]}
        ).json()
    check_compaction(window)
    assert cached({"usage": window["usage"]}) >= known_after(first)
    texts = [item["content"][0]["text"] for item in window["output"][:-1]]
    assert texts == ["a", QUESTION["content"]]
    again = ask(server, instructions=system("piers"), input=[*window["output"], QUESTION])
    assert again["status"] in ("completed", "incomplete")


def test_tenants_do_not_see_each_others_responses(server: Server) -> None:
    with client_of(server) as client:
        one, two = (client.with_options(api_key=key).responses for key in KEYS)
        response = one.create(model="tiny", input="mine", max_output_tokens=1)
        for attempt in (
            lambda: two.retrieve(response.id),
            lambda: two.delete(response.id),
            lambda: two.cancel(response.id),
            lambda: two.input_items.list(response.id),
        ):
            with pytest.raises(openai.NotFoundError):
                attempt()
        with pytest.raises(openai.BadRequestError, match="No response"):
            two.create(model="tiny", input="x", previous_response_id=response.id)
        assert one.retrieve(response.id).id == response.id


def test_a_stored_response_is_an_entry_of_the_cache(server: Server) -> None:
    response = ask(server, input="entries", use_kv_cache=False)
    key = response["id"]
    with http_of(server) as http:
        assert http.get(f"/v1/cache/{key}").json()["token_count"] == 0  # its state was not kept
        second = ask(server, input="more", previous_response_id=key)
        assert second["status"] == "incomplete"
        entry = http.get(f"/v1/cache/{second['id']}").json()
        assert entry["token_count"] == second["usage"]["total_tokens"]
        assert http.post(f"/v1/cache/{second['id']}/pin").json()["pinned"]
        assert http.delete(f"/v1/cache/{key}").status_code == httpx.codes.OK
        assert http.get(f"{PATH}/{key}").status_code == httpx.codes.NOT_FOUND
        # Names of other entries are not responses.
        other = http.post("/v1/cache/prepare", json={"messages": [QUESTION]}).json()["cache_key"]
        for path in (f"{PATH}/{other}", f"/v1/conversations/{other}"):
            assert http.delete(path).status_code == httpx.codes.NOT_FOUND


class Count(BaseModel):
    n: bool


def test_a_reply_follows_a_json_schema(server: Server) -> None:
    with client_of(server) as client:
        response = client.responses.parse(
            model="tiny", input="Count.", text_format=Count, temperature=0, max_output_tokens=64
        )
    assert isinstance(response.output_parsed, Count)


def test_a_forced_tool_call_can_be_answered_and_replayed(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "name": "count", "parameters": schema, "strict": True}],
        "instructions": system("numbers"),
        "max_output_tokens": 200,
    }
    choice = {"type": "function", "name": "count"}
    single = {"tool_choice": choice, "parallel_tool_calls": False}
    first = ask(server, input="Count.", stream=True, **single, **fields)
    [*_, call] = first["output"]
    assert call["type"] == "function_call"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
    second = ask(server, input=[output], previous_response_id=first["id"], **fields)
    assert cached(second) >= first["usage"]["input_tokens"]


def test_the_input_of_a_custom_tool_follows_its_regular_expression(server: Server) -> None:
    tool = {
        "type": "custom",
        "name": "answer",
        "format": {"type": "grammar", "syntax": "regex", "definition": "(yes|no), [0-9]{2}"},
    }
    response = ask(
        server,
        input="Well?",
        tools=[tool],
        tool_choice={"type": "custom", "name": "answer"},
        parallel_tool_calls=False,
        max_output_tokens=200,
        stream=True,
    )
    [*_, call] = response["output"]
    assert call["type"] == "custom_tool_call"
    word, _, digits = call["input"].partition(", ")
    assert word in ("yes", "no")
    assert digits.isdecimal()
    assert len(digits) == 2


def test_a_prompt_can_be_prepared_and_validated(server: Server) -> None:
    words = system("anchors")
    warm = ask(server, instructions=words, input=[], prompt_cache_options={"prewarm": True})
    assert warm["output"] == []
    assert warm["status"] == "completed"
    options = {"comparison_response_id": warm["id"], "ttl": "30m"}
    first = ask(server, instructions=words, input="Heavy?", prompt_cache_options=options)
    assert first["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert cached(first) == warm["usage"]["input_tokens"]
    other = ask(server, instructions=system("ropes"), input="?", prompt_cache_options=options)
    told = other["prompt_cache_diagnostics"]
    assert (told["type"], told["reason"]) == ("cache_miss", "input_changed")
    options["comparison_response_id"] = "resp_nobody"
    strange = ask(server, input="?", prompt_cache_options=options)
    assert strange["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}


def test_input_token_counts_agree_with_the_usage_of_a_response(server: Server) -> None:
    asked: dict[str, Any] = {"input": "hello", "instructions": "Be brief."}
    first = ask(server, **asked)
    asked = {"input": "again", "previous_response_id": first["id"]}
    second = ask(server, **asked)
    with http_of(server) as http:
        counted = http.post(f"{PATH}/input_tokens", json=asked).json()
    assert counted["input_tokens"] == second["usage"]["input_tokens"]


def test_a_prompt_that_is_too_long_ends_a_stream_with_a_failed_response(server: Server) -> None:
    failed = ask(server, input="x" * 9000, stream=True)
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "context_length_exceeded"


def test_empty_input_is_accepted(server: Server) -> None:
    """Codex sends this to find out whether the models of LM Studio answer."""
    assert ask(server, input="", max_output_tokens=1)["status"] == "incomplete"


def test_truncation_keeps_its_position_for_several_turns(
    server: Server,
) -> None:
    about = {"instructions": "Be brief.", "truncation": "auto"}
    history = [{"role": "user", "content": f"{number % 10} " * 400} for number in range(14)]
    first = ask(server, input=history, **about)
    assert first["status"] == "incomplete"
    assert 4000 < first["usage"]["input_tokens"] <= 8192
    second = ask(server, input=QUESTION["content"], previous_response_id=first["id"], **about)
    assert cached(second) == known_after(first)
    with http_of(server) as http:
        items = http.get(f"{PATH}/{second['id']}/input_items?limit=100").json()["data"]
    assert len(items) == len(history) + 2  # the whole conversation is stored
    whole = {**about, "truncation": "disabled", "input": history, "stream": True}
    assert ask(server, **whole)["error"]["code"] == "context_length_exceeded"
