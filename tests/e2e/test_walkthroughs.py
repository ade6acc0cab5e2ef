"""Cache keys and numbered sessions work as in their guides, with the same requests and client
code."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from rekindle.http import key_file
from tests.support import tiny
from tests.support.server import Server, running
from tests.support.tiny_mlx import write_tiny_mlx

Json = dict[str, Any]

SYSTEM = {"role": "system", "content": "You are a financial analyst..."}
RISKS = {"role": "user", "content": "What are our top risks?"}
NVDA = {"role": "user", "content": "What about NVDA specifically?"}
TOOLS = [{"type": "function", "function": {"name": "get_price", "parameters": {}}}]
OTHER_TOOLS = [{"type": "function", "function": {"name": "get_news", "parameters": {}}}]
SESSIONS = "/v1/internal/model/kv_cache"
LAYERS, BLOCK_TOKENS = 2, 64
VALUE_BYTES = {
    "llama.cpp": 2,
    "mlx": 4,
}  # bytes per key or value; MLX keeps the precision of the weights
TOKEN_VALUES = LAYERS * 2 * tiny.KV_HEADS * tiny.HEAD_WIDTH
SHOWN_TOOLS = "{% if tools %}<|turn|>tools\n{{ tools | tojson }}<|end|>\n{% endif %}"
SETTINGS = "max_tokens: 12\ntemperature: 0\n"  # the guide's requests do not set these
STATS = {"total_entries", "by_tier", "ram_bytes", "total_hits", "total_misses", "hit_rate",
         "pinned_entries", "disk_bytes", "total_partial_hits", "unique_bytes", "logical_bytes",
         "evictions"}  # fmt: skip
REPORT = {"hit", "status", "cache_key", "reused_tokens", "new_cache_key", "cached_tokens",
          "reason", "tier"}  # fmt: skip
ENTRY = {"cache_key", "model", "segments", "token_count", "tier", "size_bytes", "hit_count",
         "pinned", "ttl", "created_at", "last_used", "expires_at", "names"}  # fmt: skip


@pytest.fixture(scope="module")
def keys() -> list[str]:
    """API keys of tenants without any cached state."""
    return [key_file.new_key() for _ in range(60)]


@pytest.fixture(scope="module", params=list(VALUE_BYTES))
def engine(request: pytest.FixtureRequest) -> str:
    """The engine of the model that most requests use."""
    return str(request.param)


@pytest.fixture(scope="module")
def server(
    engine: str, keys: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Two models: the template of one ignores tools, and the template of the other shows them."""
    folder = tmp_path_factory.mktemp("walkthroughs")
    if engine == "mlx":
        plain = write_tiny_mlx(folder / "tiny")
    else:
        plain = tiny.write_llama(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "TEMPLATE", SHOWN_TOOLS + tiny.TEMPLATE)
        showing = tiny.write_llama(folder / "showing.gguf")
    settings = folder / "rekindle.yaml"
    settings.write_text(SETTINGS)
    for number, key in enumerate(keys):
        key_file.append_key_line(
            folder / "keys", key_file.key_line(f"tenant-{number}", key, admin=False)
        )
    flags = ("--model", str(showing), "--threads", "1", "--config", str(settings),
             "--api-keys-file", str(folder / "keys"))  # fmt: skip
    with running(plain, folder, *flags) as started:
        yield started


@pytest.fixture
def api_key(keys: list[str]) -> str:
    """The API key of a new tenant, whose first turn is cold."""
    return keys.pop()


@pytest.fixture
def client(server: Server, api_key: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {api_key}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture
def sdk(server: Server, api_key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=api_key, max_retries=0)


def chat(client: httpx.Client, messages: list[Json], **more: Any) -> Json:
    body = {"model": "tiny", "messages": messages, **more}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    told: Json = answer.json()
    assert told["x_cache"].keys() >= REPORT
    return told


def post(client: httpx.Client, path: str, **body: Any) -> Json:
    answer = client.post(path, json=body)
    assert answer.status_code == httpx.codes.OK, answer.text
    told: Json = answer.json()
    return told


def said(answer: Json) -> Json:
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def conversation(client: httpx.Client) -> tuple[list[Json], str]:
    """Two turns, and the key of the second."""
    messages = [SYSTEM, RISKS]
    messages += [said(chat(client, messages)), NVDA]
    last = chat(client, messages, return_cache_key=True)
    return [*messages, said(last)], last["x_cache"]["new_cache_key"]


def test_a_streamed_turn_returns_a_key_and_the_next_turn_computes_only_its_message(
    client: httpx.Client,
) -> None:
    r1 = client.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": [SYSTEM, RISKS], "return_cache_key": True,
              "stream": True},
    )  # fmt: skip
    cache_key_1, r1_content, first = None, "", {}
    for line in r1.iter_lines():
        if line.startswith("event: x_cache"):
            continue
        if line.startswith("data: ") and line != "data: [DONE]":
            payload = json.loads(line[6:])
            if "new_cache_key" in payload:
                cache_key_1, first = payload["new_cache_key"], payload
            choices = payload.get("choices", [])
            if choices:
                r1_content += choices[0].get("delta", {}).get("content", "")
    assert first.keys() >= REPORT
    assert (first["hit"], first["status"], first["reused_tokens"]) == (False, "miss", 0)

    messages = [SYSTEM, RISKS, {"role": "assistant", "content": r1_content}, NVDA]
    r2 = chat(client, messages, cache_key=cache_key_1, return_cache_key=True)
    report = r2["x_cache"]
    assert (report["hit"], report["status"], report["reason"]) == (True, "hit", "full_match")
    assert report["cache_key"] == cache_key_1
    assert report["reused_tokens"] == first["cached_tokens"]
    assert r2["usage"]["prompt_tokens_details"]["cached_tokens"] == report["reused_tokens"]
    assert report["cached_tokens"] > report["reused_tokens"]
    assert len({cache_key_1, report["new_cache_key"], None}) == 3


def test_the_cache_event_comes_last_and_only_if_a_cache_field_was_sent(
    client: httpx.Client,
) -> None:
    body = {"model": "tiny", "messages": [SYSTEM, RISKS], "stream": True}
    plain = client.post("/v1/chat/completions", json=body).text
    assert "x_cache" not in plain
    keyed = client.post("/v1/chat/completions", json={**body, "cache_key": "abc123"}).text
    *_, event, done, end = keyed.split("\n\n")
    assert event.startswith("event: x_cache\ndata: {")
    assert (done, end) == ("data: [DONE]", "")
    assert json.loads(event.partition("data: ")[2])["reason"] == "cache_key_not_found"


def test_a_prepared_prompt_is_not_computed_for_the_first_user_message(client: httpx.Client) -> None:
    prepared = post(client, "/v1/cache/prepare", model="tiny", messages=[SYSTEM], tools=TOOLS,
                    warm=True, pinned=True)  # fmt: skip
    assert [segment["type"] for segment in prepared["segments"]] == ["system", "tools"]
    assert prepared["size_bytes"] > 0
    key = prepared["cache_key"]
    value = {"role": "user", "content": "What's our portfolio value?"}
    told = {"cache_key": key, "return_cache_key": True}
    without = chat(client, [SYSTEM, value], **told)["x_cache"]  # another prompt, which is reported
    assert without["reason"] == "tools_changed"
    assert without["reused_tokens"] < len(SYSTEM["content"])  # tools come first
    r = chat(client, [SYSTEM, value], tools=TOOLS, **told)
    assert (r["x_cache"]["status"], r["x_cache"]["cache_key"]) == ("hit", key)
    assert r["x_cache"]["reused_tokens"] == prepared["token_count"]
    [entry] = [each for each in client.get("/v1/cache").json()["entries"] if each["pinned"]]
    assert (entry["cache_key"], entry["expires_at"]) == (key, None)
    again = post(client, "/v1/cache/prepare", model="tiny", messages=[SYSTEM], tools=TOOLS)
    assert again["cache_key"] == key


def test_two_agents_take_turns_without_computing_again(client: httpx.Client) -> None:
    systems = [SYSTEM, {"role": "system", "content": "You are a code assistant..."}]
    prepared = [
        post(client, "/v1/cache/prepare", model="tiny", messages=[system], pinned=True)
        for system in systems
    ]
    for _ in range(2):
        for system, agent in zip(systems, prepared, strict=True):
            r = chat(client, [system, RISKS], cache_key=agent["cache_key"])
            assert r["x_cache"]["status"] == "hit"
            assert r["x_cache"]["reused_tokens"] >= agent["token_count"]


def test_the_openai_client_sends_the_fields_and_reads_the_event(sdk: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": [SYSTEM, RISKS]}
    extra = {"cache_key": "abc123", "return_cache_key": True}
    stream = sdk.chat.completions.create(stream=True, extra_body=extra, **options)
    chunks = list(stream)
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    [event] = [chunk for chunk in chunks if "new_cache_key" in (chunk.model_extra or {})]
    assert event is chunks[-1]
    assert event.object == "chat.completion.chunk"

    assert event.model_extra is not None
    extra = {"cache_key": event.model_extra["new_cache_key"], "return_cache_key": True}
    whole = sdk.chat.completions.create(extra_body=extra, **options)
    assert whole.usage is not None
    assert whole.model_extra is not None
    report = whole.model_extra["x_cache"]
    assert report["reused_tokens"] == whole.usage.prompt_tokens - 1
    assert report["new_cache_key"] == extra["cache_key"], "an equal head is the same entry"


def test_an_unknown_model_is_refused_everywhere(client: httpx.Client) -> None:
    body = {"model": "Qwen/Qwen3-8B-GGUF", "messages": [SYSTEM, RISKS], "cache_key": "abc123"}
    for path in ("/v1/chat/completions", "/v1/cache/prepare", "/v1/cache/validate"):
        answer = client.post(path, json=body)
        assert answer.status_code == httpx.codes.NOT_FOUND
        assert answer.json()["error"]["code"] == "model_not_found"


def test_a_key_of_another_model_is_reported_as_a_mismatch(client: httpx.Client) -> None:
    _, key = conversation(client)
    r = chat(client, [SYSTEM, RISKS], model="showing", cache_key=key)
    assert (r["x_cache"]["status"], r["x_cache"]["reason"]) == ("miss", "model_mismatch")


def test_an_appended_turn_hits_and_the_report_names_each_edit(client: httpx.Client) -> None:
    messages, key = conversation(client)
    more = chat(client, [*messages, RISKS], cache_key=key)["x_cache"]
    assert (more["status"], more["reason"], more.get("diverged_at")) == ("hit", "full_match", None)

    edited = [*messages[:3], {"role": "user", "content": "What about AMD specifically?"}]
    told = chat(client, [*edited, messages[4], RISKS], cache_key=key)["x_cache"]
    assert (told["status"], told["reason"]) == ("partial_hit", "turn_changed")
    at = told["diverged_at"]
    assert (at["message"], at["role"]) == (3, "user")
    assert at["stored"].startswith("NVDA specifically?")
    assert at["sent"].startswith("AMD specifically?")
    assert 0 < told["reused_tokens"] < more["reused_tokens"]

    system = {"role": "system", "content": "Answer as a financial analyst would..."}
    other = chat(client, [system, *messages[1:], RISKS], cache_key=key)["x_cache"]
    assert other["reason"] == "system_changed"
    assert other["diverged_at"]["message"] == 0
    assert other["reused_tokens"] < len(SYSTEM["content"])  # one token per byte, none of the prompt


def standing(client: httpx.Client, key: str) -> Json:
    """Everything that using an entry would change.

    Expiry is rounded to milliseconds, because it is relative.
    """
    entry, stats = (client.get(f"/v1/cache/{each}").json() for each in (key, "stats"))
    counted = {name: stats[name] for name in stats if name.startswith("total_")}
    used = {name: entry[name] for name in ("hit_count", "last_used", "ttl", "pinned", "names")}
    return {**counted, **used, "expires_at": pytest.approx(entry["expires_at"], abs=0.01)}


def test_validate_predicts_the_result_of_a_request_and_changes_nothing(
    client: httpx.Client,
) -> None:
    messages, key = conversation(client)
    before = standing(client, key)
    question: Json = {"model": "tiny", "cache_key": key, "messages": [*messages, RISKS]}
    told = post(client, "/v1/cache/validate", **question)
    assert (told["status"], told["reason"]) == ("hit", "full_match")
    assert told["invalidated_at"] is None
    edited = post(client, "/v1/cache/validate", **{**question, "messages": [SYSTEM, NVDA]})
    assert (edited["status"], edited["reason"]) == ("partial_hit", "turn_changed")
    assert edited["invalidated_at"] == "turn 1"
    unknown = post(client, "/v1/cache/validate", **{**question, "cache_key": "abc123"})
    assert (unknown["status"], unknown["reason"]) == ("hit", "cache_key_not_found")
    assert unknown["reusable_tokens"] == told["reusable_tokens"]
    assert standing(client, key) == before
    used = chat(client, question["messages"], cache_key=key)["x_cache"]
    assert used["reused_tokens"] == told["reusable_tokens"]


def test_changed_tools_are_reported_with_any_template(client: httpx.Client) -> None:
    """The template describes the tools, or we do."""
    for model in ("showing", "tiny"):
        body: Json = {"model": model, "messages": [SYSTEM]}
        prepared = post(client, "/v1/cache/prepare", **body, tools=TOOLS)
        asked = {**body, "messages": [SYSTEM, RISKS], "cache_key": prepared["cache_key"]}
        same = post(client, "/v1/cache/validate", **asked, tools=TOOLS)
        assert (same["status"], same["reason"]) == ("hit", "full_match")
        assert same["reusable_tokens"] == prepared["token_count"]
        other = post(client, "/v1/cache/validate", **asked, tools=OTHER_TOOLS)
        assert (other["reason"], other["invalidated_at"]) == ("tools_changed", "tools")


def test_reordering_tools_does_not_change_their_segment(client: httpx.Client) -> None:
    hashes = []
    for tools in ([*TOOLS, *OTHER_TOOLS], [*OTHER_TOOLS, *TOOLS]):
        body: Json = {"model": "tiny", "messages": [SYSTEM], "tools": tools, "warm": False}
        hashes.append(post(client, "/v1/cache/prepare", **body)["segments"])
    assert hashes[0] == hashes[1]


def test_the_list_and_the_statistics_have_all_documented_fields(client: httpx.Client) -> None:
    messages, key = conversation(client)
    chat(client, [*messages, RISKS], cache_key=key)
    chat(client, [SYSTEM, RISKS], cache_key="abc123")
    listing = client.get("/v1/cache").json()
    assert listing["count"] == len(listing["entries"]) > 0
    for entry in listing["entries"]:
        assert entry.keys() >= ENTRY
    [entry] = [each for each in listing["entries"] if each["cache_key"] == key]
    assert (entry["hit_count"], entry["ttl"], entry["model"]) == (3, 1800, "tiny")
    assert [each["type"] for each in entry["segments"]] == ["system", "turn", "turn"]
    stats = client.get("/v1/cache/stats").json()
    assert stats.keys() >= STATS
    assert stats["total_entries"] == listing["count"]
    assert sum(stats["by_tier"].values()) == listing["count"]
    assert stats["total_hits"] == 3, "turns two and three, and the unknown key"
    assert stats["total_misses"] == 1, "the first turn"
    assert stats["hit_rate"] == 0.75
    assert (
        stats["unique_bytes"]
        < stats["logical_bytes"]
        == sum(each["size_bytes"] for each in listing["entries"])
    )


def test_deleting_a_key_deletes_its_state(client: httpx.Client) -> None:
    key = chat(client, [SYSTEM, RISKS], return_cache_key=True)["x_cache"]["new_cache_key"]
    gone = client.delete(f"/v1/cache/{key}")
    assert (gone.status_code, gone.json()) == (200, {"status": "evicted", "cache_key": key})
    again = client.delete(f"/v1/cache/{key}")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "cache_key_not_found")
    told = chat(client, [SYSTEM, RISKS], cache_key=key)["x_cache"]
    assert (told["reason"], told["reused_tokens"]) == ("cache_key_not_found", 0)


def test_garbage_collection_removes_expired_entries_and_their_keys_report_it(
    client: httpx.Client,
) -> None:
    brief = post(client, "/v1/cache/prepare", model="tiny", messages=[SYSTEM], ttl=1)
    lasting = post(client, "/v1/cache/prepare", model="tiny", messages=[RISKS])
    deadline = time.monotonic() + 20
    while not (collected := post(client, "/v1/cache/gc"))["removed"]:
        assert time.monotonic() < deadline, "it does not expire"
        time.sleep(0.1)
    assert collected == {"status": "ok", "removed": 1, "freed_bytes": brief["size_bytes"]}
    assert collected["freed_bytes"] > 0
    [left] = client.get("/v1/cache").json()["entries"]
    assert left["cache_key"] == lasting["cache_key"]
    told = chat(client, [SYSTEM, RISKS], cache_key=brief["cache_key"])["x_cache"]
    assert (told["hit"], told["status"], told["reason"]) == (False, "miss", "expired")


def test_a_numbered_session_is_listed_with_its_size_until_it_is_removed(
    client: httpx.Client, engine: str
) -> None:
    token_bytes = TOKEN_VALUES * VALUE_BYTES[engine]
    messages = [SYSTEM, RISKS]
    first = chat(client, messages, kv_cache_session_id=1)
    messages += [said(first), NVDA]
    second = chat(client, messages, kv_cache_session_id=1)
    assert second["x_cache"]["status"] == "hit"
    assert second["x_cache"]["reused_tokens"] == first["x_cache"]["cached_tokens"]
    assert second["usage"]["prompt_eval_time"] > 0
    [session] = client.get(f"{SESSIONS}/info").json()["caches"]
    assert (session["kind"], session["session_id"]) == ("kv_cache_session_id", 1)
    least = second["x_cache"]["cached_tokens"] * token_bytes
    assert least <= session["size_bytes"] <= (least + BLOCK_TOKENS * token_bytes) * 1.2
    removed = post(client, f"{SESSIONS}/remove_cache", session_id=1)
    assert (removed["removed"], removed["freed_bytes"]) == (1, session["size_bytes"])
    again = client.post(f"{SESSIONS}/remove_cache", json={"session_id": 1})
    assert again.status_code == httpx.codes.NOT_FOUND
    assert chat(client, messages, kv_cache_session_id=1)["x_cache"]["reused_tokens"] == 0


def test_old_sessions_are_removed_and_pinned_entries_stay(client: httpx.Client) -> None:
    for number in (-5, 0, 2**62):
        chat(client, [SYSTEM, RISKS], kv_cache_session_id=number)
    pinned = post(client, "/v1/cache/prepare", messages=[NVDA], pinned=True)
    later = post(client, f"{SESSIONS}/remove_old_caches", seconds=3600)
    assert later == {"status": "ok", "removed": 0, "freed_bytes": 0}
    size_bytes = client.get(f"{SESSIONS}/info").json()["total_size_bytes"]
    told = post(client, f"{SESSIONS}/remove_old_caches", seconds=0)
    assert told == {"status": "ok", "removed": 1, "freed_bytes": size_bytes}, (
        "one head, three names"
    )
    assert client.get(f"{SESSIONS}/info").json()["caches"] == []
    [left] = client.get("/v1/cache").json()["entries"]
    assert left["cache_key"] == pinned["cache_key"]


@pytest.mark.parametrize("seconds", [-1, -0.5, "10", None])
def test_an_invalid_age_is_refused(client: httpx.Client, seconds: object) -> None:
    answer = client.post(f"{SESSIONS}/remove_old_caches", json={"seconds": seconds})
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert answer.json()["error"]["param"] == "seconds"
