"""A client may name a conversation by message id, session or key, or not at all."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import tiny
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.model import write_numpy
from tests.support.server import Server, running
from tests.support.tiny_mlx import write_tiny_mlx

Json = dict[str, Any]

SESSIONS = "/v1/internal/model/kv_cache"
OUR_FILES = re.compile(
    r"[0-9a-f]{32,64}|\.[0-9a-f]{32,64}\.tmp|index\.db[-.\w]*|blocks|pictures|aside|lock|model|"
    r"secret"
)
ODD_NAMES = ("../../etc/passwd", "/etc/passwd", "x" * 256, "名前/ñ\u202e\uff0e\uff0f", "a\0b\n")

# The guide's requests, byte for byte.
FIRST = """{
      "messages": [
          {"role": "user", "content": "Hello! I read the book 'Harry Potter and the Prisoner of \
Azkaban' today.", "message_id": "msg_1_uuid"}
      ],
      "use_kv_cache": true,
      "temperature": 0.7
  }"""
SECOND = """{
      "messages": [
          {"role": "user", "content": "Hello! I read the book 'Harry Potter and the Prisoner of \
Azkaban' today.", "message_id": "msg_1_uuid"},
          {"role": "assistant", "content": "That's great. Was it fun?", "message_id": "msg_2_uuid"},
          {"role": "user", "content": "Which of the characters is your favourite?", \
"message_id": "msg_3_uuid"}
      ],
      "use_kv_cache": true,
      "temperature": 0.7
  }"""


@pytest.fixture(scope="module", params=["llamacpp", "numpy", "mlx"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """One folder per engine, because names must not depend on the engine."""
    return tmp_path_factory.mktemp(request.param)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    if folder.name.startswith("numpy"):
        model = write_numpy(folder / f"tiny{SUFFIX}")
    elif folder.name.startswith("mlx"):
        model = write_tiny_mlx(folder / "tiny")
    else:
        model = tiny.write_llama(folder / "tiny.gguf")
    with running(model, folder, "--threads", "1") as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("smollm2")
    with running(smollm2_path, folder, "--threads", "1") as server, server.client() as client:
        yield client


def user(text: str, **more: Any) -> Json:
    return {"role": "user", "content": text, **more}


def chat(client: httpx.Client, messages: list[Json], **more: Any) -> Json:
    """A turn that is greedy and short by default."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 6, **more}
    return post(client, "/v1/chat/completions", **body)


def post(client: httpx.Client, path: str, **body: Any) -> Json:
    answer = client.post(path, json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    told: Json = answer.json()
    return told


def said(answer: Json) -> Json:
    message = answer["choices"][0]["message"]
    return {name: message[name] for name in ("role", "content", "message_id") if name in message}


def reused(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def held(answer: Json) -> int:
    """The tokens whose state a turn leaves. The last token was sampled but never computed."""
    return int(answer["usage"]["total_tokens"]) - 1


def events(client: httpx.Client, path: str, **body: Any) -> list[Json]:
    text = client.post(path, json={**body, "stream": True}).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def curl(server: Server, body: str) -> Json:
    command = ["curl", "-s", "-X", "POST", "-H", "Content-Type: application/json",
               "-H", "X-Model-Id: 0", "-d", body, f"{server.url}/v1/chat/completions"]  # fmt: skip
    told: Json = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return told


def test_the_two_requests_of_the_guide_work_with_curl(server: Server) -> None:
    first = curl(server, FIRST)
    reply = said(first)
    assert reply["message_id"]
    second = curl(server, SECOND)
    assert reused(second) >= first["usage"]["prompt_tokens"] - 1, "only the reply was rewritten"
    assert said(second)["message_id"] not in (None, reply["message_id"])


def test_a_message_id_names_the_conversation_up_to_that_message(client: httpx.Client) -> None:
    messages = [user("Which book is the best of them?", message_id="mine-1")]
    first = chat(client, messages, use_kv_cache=True)
    messages += [said(first), user("And the second best?", message_id="mine-2")]
    body = {"messages": messages, "use_kv_cache": True, "temperature": 0, "max_tokens": 6}
    *_, last, report = events(client, "/v1/chat/completions", **body)
    assert report["status"] == "hit"
    assert report["reused_tokens"] == held(first)
    assert report["cache_key"] == key_of(client, said(first)["message_id"])
    [choice] = last["choices"]
    assert choice["finish_reason"] == "length"
    assert key_of(client, choice["delta"]["message_id"])


def test_the_newest_known_id_is_used(client: httpx.Client) -> None:
    messages = [user("Newest first, please.")]
    messages += [said(chat(client, messages, use_kv_cache=True)), user("Go on.")]
    messages += [said(chat(client, messages, use_kv_cache=True)), user("Once more.")]
    older, newer = (key_of(client, messages[at]["message_id"]) for at in (1, 3))
    assert older != newer
    assert chat(client, messages, use_kv_cache=True)["x_cache"]["cache_key"] == newer
    messages[3]["message_id"] = "unknown"
    assert chat(client, messages, use_kv_cache=True)["x_cache"]["cache_key"] == older


def test_message_ids_are_used_only_on_request(client: httpx.Client) -> None:
    told = chat(client, [user("No ids here.", message_id="msg_1_uuid")])
    assert "message_id" not in told["choices"][0]["message"]


def key_of(client: httpx.Client, name: str) -> str:
    """The cache key of the entry with this name."""
    entries = client.get("/v1/cache").json()["entries"]
    [key] = [
        each["cache_key"] for each in entries if name in {said["name"] for said in each["names"]}
    ]
    return str(key)


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
def test_a_name_is_never_treated_as_a_path(client: httpx.Client, folder: Path, name: str) -> None:
    messages = [user(f"{ODD_NAMES.index(name)} is how many?", message_id=name)]
    for field in ({"session_id": name}, {"use_kv_cache": True}, {"prompt_cache_key": name}):
        first = chat(client, messages, **field)
        second = chat(client, [*messages, said(first), user("Sure?", message_id=name)], **field)
        assert second["x_cache"]["status"] == "hit"
        assert second["x_cache"]["cache_key"]
    listed = client.get(f"{SESSIONS}/info").json()["caches"]
    assert name in {each["session_id"] for each in listed}
    assert post(client, f"{SESSIONS}/remove_cache", session_id=name)["removed"] == 1
    written = [path.name for path in (folder / "kv").rglob("*")]
    assert written
    assert [file for file in written if not OUR_FILES.fullmatch(file)] == []


def test_an_unknown_model_number_is_refused_with_the_known_ones(
    client: httpx.Client,
) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        body = {"messages": [user("Hello")], "prompt": "Hello"}
        answer = client.post(path, json=body, headers={"X-Model-Id": "7"})
        assert answer.status_code == httpx.codes.BAD_REQUEST
        assert "0 (tiny)" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "name",
    [
        {"session_id": "story"},
        {"kv_cache_session_id": 7},
        {"prompt_cache_key": "story"},
        {"prompt_cache_key": "day", "prompt_cache_retention": "24h"},
        {"prompt_cache_key": "now", "prompt_cache_retention": "in_memory"},
        {"return_cache_key": True},
    ],
    ids=json.dumps,
)
def test_a_text_completion_continues_under_its_names_streamed_or_not(
    client: httpx.Client, name: Json
) -> None:
    text = f"{json.dumps(name)} Once upon a time there was a lighthouse. "
    body: Json = {"prompt": text, "temperature": 0, "max_tokens": 8, **name}
    first = post(client, "/v1/completions", **body)
    body["prompt"] += first["choices"][0]["text"] + " And then"
    if "return_cache_key" in name:
        body["cache_key"] = first["x_cache"]["new_cache_key"]
    *chunks, report = events(client, "/v1/completions", **body)
    assert (report["status"], report["reason"]) == ("hit", "full_match")
    assert report["cache_key"]
    assert report["reused_tokens"] == held(first)
    body["prompt"] += "".join(chunk["choices"][0]["text"] for chunk in chunks) + " and so on"
    body |= {"cache_key": report["new_cache_key"]} if "cache_key" in body else {}
    third = post(client, "/v1/completions", **body)
    assert (third["x_cache"]["status"], reused(third)) == ("hit", report["cached_tokens"])


def test_prompt_cache_retention_is_obeyed_or_refused(client: httpx.Client) -> None:
    for retention, ttl in (("24h", 86400), ("in_memory", None)):
        name = f"kept {retention}"
        body: Json = {"prompt": f"{name}: {'a word ' * 20}", "max_tokens": 2, "temperature": 0}
        post(
            client, "/v1/completions", **body, prompt_cache_key=name,
            prompt_cache_retention=retention,
        )  # fmt: skip
        entry = client.get(f"/v1/cache/{key_of(client, name)}").json()
        assert entry["ttl"] == ttl
        if retention == "in_memory":
            assert entry["stored_tokens"] == 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        bad = {"prompt": "x", "messages": [user("x")], "prompt_cache_retention": "1h"}
        answer = client.post(path, json=bad)
        assert answer.status_code == httpx.codes.BAD_REQUEST
        assert answer.json()["error"]["param"] == "prompt_cache_retention"


@pytest.mark.parametrize("name", [{}, {"session_id": "spelling"}], ids=["unnamed", "named"])
@pytest.mark.parametrize("unit", ["th", "あ", "й"])
def test_a_reply_that_comes_back_is_matched_by_its_sampled_tokens(
    client: httpx.Client, unit: str, name: Json
) -> None:
    """The model samples byte by byte, where the tokenizer would merge `th`, and a letter takes
    several tokens."""
    spelled = unit.encode()
    first_byte = len(tiny.CONTROL)
    forced: Json = {
        "logit_bias": {str(first_byte + byte): 100 - 25 * at for at, byte in enumerate(spelled)},
        "repetition_penalty": 100.0,  # no byte repeats before all others were used
        "repetition_context_size": len(spelled) - 1,
        "max_tokens": 4 * len(spelled),
    }
    messages: list[Json] = []
    before = None
    for question in ("Say it.", "Again.", "Once more."):
        messages.append(user(f"{unit} {name}: {question}"))
        answer = chat(client, messages, **forced, **name)
        if before is not None:
            assert reused(answer) == held(before)
            assert answer["x_cache"]["status"] == "hit"
        assert said(answer)["content"] == unit * 4
        messages.append(said(answer))
        before = answer


def test_turns_sampled_at_high_temperature_are_reused_completely(smollm2: httpx.Client) -> None:
    openings = ["Schreib ein Wort: größer", "напиши слово: море", "日本語で「海」と書いて。"]
    names: list[Json] = [{}, {"session_id": "wild"}, {"use_kv_cache": True}]
    wild: Json = {"temperature": 1.5, "top_p": 1.0, "max_tokens": 16}
    for seed, (opening, name) in enumerate(zip(openings, names, strict=True)):
        messages: list[Json] = []
        before = None
        for question in (opening, "Another.", "And another."):
            messages.append(user(question))
            answer = chat(smollm2, messages, **wild, seed=seed, **name)
            if before is not None:
                assert reused(answer) >= held(before)
            messages.append(said(answer))
            if "\ufffd" in messages[-1]["content"]:
                break  # half a character was sampled, so the client sends something else
            before = answer


def test_a_session_name_is_compared_and_not_trusted(smollm2: httpx.Client) -> None:
    """These are the guide's two requests.

    The second one contains another reply than the server gave.
    """
    explain = user("Explain KV cache")
    first = chat(smollm2, [explain], model="default", session_id="chat-123")
    edited = [explain, {"role": "assistant", "content": "KV cache is..."}, user("Tell me more")]
    warm = chat(smollm2, edited, model="default", session_id="chat-123")
    assert warm["x_cache"]["reason"] == "turn_changed"
    assert warm["x_cache"]["diverged_at"]["message"] == 1
    assert first["usage"]["prompt_tokens"] - 1 <= reused(warm) < warm["usage"]["prompt_tokens"] - 5
    more = [*edited, said(warm), user("And more")]
    told = chat(smollm2, more, model="default", session_id="chat-123")
    assert (told["x_cache"]["status"], reused(told)) == ("hit", held(warm))
    exact = {"model": "default", "cache_exact": True}
    again, cold = (
        chat(smollm2, edited, **exact, **how)
        for how in ({"session_id": "chat-123"}, {"use_kv_cache": False})
    )
    assert reused(cold) == 0
    assert said(again) == said(cold)


@contextlib.contextmanager
def guided(folder: Path, *flags: str) -> Iterator[Server]:
    """A server started as in the guide."""
    log = folder / "guided.log"
    command = [sys.executable, "-m", "rekindle.cli.main", "--server", "--port", "0",
               "--threads", "1", "--cache-dir", str(folder / "kv")]  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen([*command, *flags], stdout=output, stderr=subprocess.STDOUT)
    try:
        yield Server(address_in(log, process), process, log)
    finally:
        process.terminate()
        process.wait(30)


def address_in(log: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"Serving on (http://\S+?)/v1", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the server did not come up: {log.read_text()}")


def test_conversations_without_a_name_get_one_that_the_log_shows(tmp_path: Path) -> None:
    model = tiny.write_llama(tmp_path / "tiny.gguf")
    flags = ("--m", str(model), "--context-cache", "--force-cache")
    with guided(tmp_path, *flags) as server, server.client() as client:
        hello = [user("Hello")]
        first = chat(client, hello, model="default")
        second = chat(client, [*hello, said(first), user("How are you?")], model="default")
        assert second["x_cache"]["status"] == "hit"
        assert second["x_cache"]["cache_key"]
        assert reused(second) == held(first)
        guide = [*hello, {"role": "assistant", "content": "Hi there!"}, user("How are you?")]
        third = chat(client, guide, model="default")
        assert reused(third) >= first["usage"]["prompt_tokens"]
    told = re.findall(
        r"FingerprintManager: .*?\b(\w+) .*?\b(auto_session_\d)", server.log.read_text()
    )
    assert told == [
        ("registered", "auto_session_0"), ("extended", "auto_session_0"),
        ("matched", "auto_session_0"), ("extended", "auto_session_0"),
        ("registered", "auto_session_1"), ("extended", "auto_session_1"),
    ]  # fmt: skip
