"""Tenants of one server cannot see, use or remove the state of others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.http import key_file
from tests.support.server import Server, running
from tests.support.tiny import write_llama

Json = dict[str, Any]

ANNA, BERT, CARL = "key-of-anna-3f9c", "key-of-bert-81d2", "key-of-carl-55aa"
ROOT = "key-of-root-c07e"
COMMON = "You are the office's own assistant, and everybody who comes here hears this first."
PRIVATE = "Be nobody's but Anna's assistant, and keep what she tells you for her alone."
PROJECTS = f"""
max_tokens: 4
temperature: 0
projects:
  shared:
    system_prompt: {COMMON}
    shared: true
    cache: {{warm_on_startup: true, pinned: true, ttl: null}}
"""
SESSIONS = "/v1/internal/model/kv_cache"


@dataclass(frozen=True)
class Shared:
    server: Server
    folder: Path

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=120)

    @property
    def log(self) -> str:
        return self.server.log.read_text()

    @property
    def keys(self) -> Path:
        return self.folder / "keys"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    settings = folder / "rekindle.yaml"
    settings.write_text(PROJECTS)
    key_file.append_key_line(folder / "keys", "# keys that come and go")
    flags = ["--threads", "1", "--config", str(settings), "--api-keys-file", str(folder / "keys"),
             "--admin-key", ROOT]  # fmt: skip
    for key in (ANNA, BERT, CARL):
        flags += ["--api-key", key]
    temporary = folder / "temporary"
    temporary.mkdir()
    where = {"TMPDIR": str(temporary)}
    with running(write_llama(folder / "tiny.gguf"), folder, *flags, environment=where) as server:
        yield Shared(server, folder)


@pytest.fixture
def anna(shared: Shared) -> Iterator[httpx.Client]:
    with shared.client(ANNA) as client:
        yield client


@pytest.fixture
def bert(shared: Shared) -> Iterator[httpx.Client]:
    with shared.client(BERT) as client:
        yield client


@pytest.fixture
def carl(shared: Shared) -> Iterator[httpx.Client]:
    with shared.client(CARL) as client:
        yield client


@pytest.fixture
def root(shared: Shared) -> Iterator[httpx.Client]:
    with shared.client(ROOT) as client:
        yield client


def conversation(text: str, system: str = PRIVATE) -> list[Json]:
    return [{"role": "system", "content": system}, {"role": "user", "content": text}]


def chat(client: httpx.Client, messages: list[Json], **more: Any) -> Json:
    answer = client.post("/v1/chat/completions", json={"messages": messages, **more})
    assert answer.status_code == httpx.codes.OK, answer.text
    told: Json = answer.json()
    return told


def keys_of(client: httpx.Client) -> set[str]:
    return {each["cache_key"] for each in client.get("/v1/cache").json()["entries"]}


Ask = Callable[[httpx.Client, list[Json], Json], httpx.Response]


def by_key(client: httpx.Client, messages: list[Json], names: Json) -> httpx.Response:
    body = {"messages": messages, "cache_key": names["cache_key"], "return_cache_key": False}
    return client.post("/v1/chat/completions", json=body)


def by_message(client: httpx.Client, messages: list[Json], names: Json) -> httpx.Response:
    *before, last = messages
    named = [*before, {**last, "message_id": names["message_id"]}]
    return client.post("/v1/chat/completions", json={"messages": named, "use_kv_cache": True})


def by_session(client: httpx.Client, messages: list[Json], names: Json) -> httpx.Response:
    body = {"messages": messages, "session_id": names["session_id"]}
    return client.post("/v1/chat/completions", json=body)


def validate(client: httpx.Client, messages: list[Json], names: Json) -> httpx.Response:
    body = {"messages": messages, "cache_key": names["cache_key"]}
    return client.post("/v1/cache/validate", json=body)


def show(client: httpx.Client, _messages: list[Json], names: Json) -> httpx.Response:
    return client.get(f"/v1/cache/{names['cache_key']}")


def pin(client: httpx.Client, _messages: list[Json], names: Json) -> httpx.Response:
    return client.post(f"/v1/cache/{names['cache_key']}/pin", json={})


def unpin(client: httpx.Client, _messages: list[Json], names: Json) -> httpx.Response:
    return client.post(f"/v1/cache/{names['cache_key']}/unpin", json={})


def delete(client: httpx.Client, _messages: list[Json], names: Json) -> httpx.Response:
    return client.delete(f"/v1/cache/{names['cache_key']}")


def remove_session(client: httpx.Client, _messages: list[Json], names: Json) -> httpx.Response:
    return client.post(f"{SESSIONS}/remove_cache", json={"session_id": names["session_id"]})


# Requests that create a name come last.
WAYS: tuple[Ask, ...] = (
    validate,
    show,
    pin,
    unpin,
    delete,
    remove_session,
    by_key,
    by_message,
    by_session,
)


def likeness(answer: httpx.Response, names: Json) -> tuple[int, Json]:
    """An answer without the parts that always differ: ids, times, the reply, the key that was sent,
    and whether state is still in the engine, which depends on other turns."""
    body = answer.json()
    report = body.get("x_cache", {})
    report.pop("tier", None)
    if report.get("cache_key") == names["cache_key"]:
        report["cache_key"] = "as sent"
    for name in ("id", "created", "choices", "timings"):
        body.pop(name, None)
    for name in ("prompt_eval_time", "first_token_time"):
        body.get("usage", {}).pop(name, None)
    return answer.status_code, body


def test_a_stolen_name_is_answered_like_an_invented_one(
    anna: httpx.Client, bert: httpx.Client, carl: httpx.Client
) -> None:
    """Bert uses Anna's names, and Carl uses invented ones. Otherwise they do the same."""
    messages = conversation("What did I say about the will?")
    first = chat(anna, messages, session_id="anna's", return_cache_key=True, use_kv_cache=True)
    messages.append(first["choices"][0]["message"])
    stolen = {
        "cache_key": first["x_cache"]["new_cache_key"],
        "session_id": "anna's",
        "message_id": messages[-1].pop("message_id"),
    }
    made_up = {"cache_key": "0" * 32, "session_id": "nobody's", "message_id": "msg_" + "0" * 24}
    before = anna.get(f"/v1/cache/{stolen['cache_key']}").json()
    for way in WAYS:
        told = likeness(way(bert, messages, stolen), stolen)
        assert told == likeness(way(carl, messages, made_up), made_up), way.__name__
        if way is by_key:
            assert told[1]["x_cache"]["reason"] == "cache_key_not_found"
            assert told[1]["x_cache"]["reused_tokens"] < len(PRIVATE), "of hers nothing is reused"
    after = anna.get(f"/v1/cache/{stolen['cache_key']}").json()
    assert {**after, "expires_at": 0, "stored_tokens": 0} == {
        **before, "expires_at": 0, "stored_tokens": 0,
    }  # fmt: skip
    again = chat(anna, messages, session_id="anna's")
    assert again["x_cache"]["cache_key"] == stolen["cache_key"]


def test_the_same_prompt_prepared_by_two_tenants_has_two_keys(
    anna: httpx.Client, bert: httpx.Client
) -> None:
    body = {"messages": conversation("Prepared by both.")}
    mine, his = (each.post("/v1/cache/prepare", json=body).json() for each in (anna, bert))
    assert mine.pop("cache_key") != his.pop("cache_key")
    assert mine == his


def test_lists_and_statistics_cover_one_tenant_or_all_for_an_admin(
    anna: httpx.Client, bert: httpx.Client, root: httpx.Client
) -> None:
    keys = []
    for client in (anna, bert):
        told = chat(client, conversation("Whose is this?"), return_cache_key=True)
        keys.append(told["x_cache"]["new_cache_key"])
    assert not keys_of(anna) & keys_of(bert)
    assert keys_of(root) > keys_of(anna) | keys_of(bert) >= set(keys)
    stats = [each.get("/v1/cache/stats").json() for each in (anna, bert, root)]
    assert [each["total_entries"] for each in stats] == [
        len(keys_of(each)) for each in (anna, bert, root)
    ]
    of_anna, of_bert, of_all = stats
    assert of_all["total_misses"] >= of_anna["total_misses"] + of_bert["total_misses"]
    assert of_all.keys() - of_anna.keys() >= {"computed_tokens", "disk_state", "active_turns"}
    assert anna.get("/metrics").status_code == httpx.codes.FORBIDDEN
    tenants = {
        each["cache_key"]: each["tenant"] for each in root.get("/v1/cache").json()["entries"]
    }
    assert tenants[keys[0]] != tenants[keys[1]]
    assert root.delete(f"/v1/cache/{keys[1]}").status_code == httpx.codes.OK
    assert keys[1] not in keys_of(bert)


def test_a_key_works_soon_after_it_is_added_to_the_file_and_until_it_is_removed(
    shared: Shared,
) -> None:
    before = shared.keys.read_text()
    key = key_file.new_key()
    with shared.client(key) as client:
        assert client.get("/v1/models").status_code == httpx.codes.UNAUTHORIZED
        key_file.append_key_line(shared.keys, key_file.key_line("dora", key, admin=False))
        time.sleep(key_file.RELOAD_INTERVAL_S)
        told = chat(client, conversation("Hello, I am new."), return_cache_key=True)
        assert told["x_cache"]["new_cache_key"]
        shared.keys.write_text(before)
        time.sleep(key_file.RELOAD_INTERVAL_S)
        assert client.get("/v1/models").status_code == httpx.codes.UNAUTHORIZED


def test_a_shared_project_is_warm_for_all_tenants_and_none_can_remove_it(
    anna: httpx.Client, bert: httpx.Client, root: httpx.Client
) -> None:
    [project] = [each for each in root.get("/v1/cache").json()["entries"] if each["pinned"]]
    assert project["expires_at"] is None
    assert project["stored_tokens"] == project["token_count"]
    for client in (anna, bert):
        told = chat(client, conversation("First message.", COMMON))
        assert told["x_cache"]["reused_tokens"] == project["token_count"]
        assert told["x_cache"]["status"] == "hit"
        assert project["cache_key"] not in keys_of(client)
        gone = client.delete(f"/v1/cache/{project['cache_key']}")
        assert gone.status_code == httpx.codes.NOT_FOUND


def test_a_shared_project_is_found_by_its_name_and_its_key_is_in_the_log(
    shared: Shared, anna: httpx.Client, bert: httpx.Client, root: httpx.Client
) -> None:
    [logged] = re.findall(r"project shared is prepared: .*cache key (\w+)", shared.log)
    for client in (anna, bert):
        for name in ("shared", logged):
            told = chat(client, conversation("Who is there?", COMMON), cache_key=name)["x_cache"]
            assert (told["status"], told["reason"]) == ("hit", "full_match")
            shown = client.get(f"/v1/cache/{name}").json()
            assert shown["cache_key"] == logged
            assert shown["names"] == [{"kind": "project", "name": "shared"}]
            assert (shown["hit_count"], shown["last_used"]) == (0, shown["created_at"])
        assert logged not in keys_of(client)
    assert logged in keys_of(root)
    assert root.get("/v1/cache/shared").json()["hit_count"] >= 4


STATE = b"\x02\0\0\0\0\0\0\0{}"  # a safetensors file without tensors


def test_an_engine_without_state_files_takes_none_and_gives_none(
    shared: Shared, anna: httpx.Client
) -> None:
    told = chat(anna, conversation("Keep this here."), return_cache_key=True, session_id="kept")
    headers = {"Content-Type": "application/octet-stream"}
    for content in (STATE, b"junk", b"x" * (1 << 20)):
        refused = anna.post("/v1/cache/import", content=content, headers=headers)
        assert refused.status_code == httpx.codes.BAD_REQUEST, refused.text
        assert "cannot be exported or imported" in refused.json()["error"]["message"]
    for name in (told["x_cache"]["new_cache_key"], "kept"):
        refused = anna.get(f"/v1/cache/{name}/export")
        assert refused.status_code == httpx.codes.BAD_REQUEST
        assert "cannot be exported or imported" in refused.json()["error"]["message"]
    assert anna.get("/v1/cache/nobody/export").status_code == httpx.codes.NOT_FOUND
    assert list((shared.folder / "temporary").iterdir()) == []
    again = chat(anna, conversation("Keep this here."), session_id="kept")
    assert again["x_cache"]["hit"]


def test_logs_metrics_and_file_names_contain_no_prompts_names_or_keys(
    shared: Shared, anna: httpx.Client, root: httpx.Client
) -> None:
    canary = "canary-5b1e77"
    names = {"session_id": f"{canary}-session", "prompt_cache_key": f"{canary}-prompt"}
    chat(anna, conversation(f"The {canary} sings."), **names, user=f"{canary}-user")
    refused = [
        anna.post("/v1/chat/completions", json={"messages": conversation(canary), **bad})
        for bad in ({"model": canary}, {"session_id": canary * 99}, {"temperature": canary})
    ]
    assert all(answer.is_client_error for answer in refused)
    with shared.client(f"{canary}-key") as stranger:
        assert stranger.get(f"/v1/cache/{canary}").status_code == httpx.codes.UNAUTHORIZED
    assert anna.get(f"/v1/cache/{canary}").status_code == httpx.codes.NOT_FOUND
    metrics = root.get("/metrics")
    assert "rekindle_computed_tokens_total" in metrics.text
    files = "\n".join(str(path) for path in (shared.folder / "kv").rglob("*"))
    log = shared.server.log.read_text()
    assert ": prompt " in log
    for secret in (canary, "sings", PRIVATE, COMMON, ANNA, BERT, ROOT):
        for place in (metrics.text, files, log):
            assert secret not in place


def run_cache(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rekindle.cli.main", "cache", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_cache_commands_agree_with_the_server_and_leave_a_clean_folder(
    tmp_path: Path,
) -> None:
    model = write_llama(tmp_path / "tiny.gguf")
    with running(model, tmp_path, "--threads", "1") as server, server.client() as client:
        messages = conversation("What does the cache hold?")
        told = chat(client, messages, temperature=0, max_tokens=4, return_cache_key=True)
        key = told["x_cache"]["new_cache_key"]
        question = tmp_path / "question.json"
        question.write_text(json.dumps({"messages": conversation("What does it not hold?")}))

        def cache(*arguments: str) -> Any:
            done = run_cache(*arguments, "--json", "--base-url", f"{server.url}/v1")
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        assert cache("ls")["entries"][0]["cache_key"] == key
        assert cache("stats")["total_entries"] == 1
        assert cache("show", key[:8])["token_count"] == told["usage"]["total_tokens"]
        assert cache("pin", key)["pinned"] is True
        assert cache("unpin", key)["pinned"] is False
        explained = cache("explain", "--key", key, "--messages", str(question))
        assert (explained["reason"], explained["diverged_at"]["message"]) == ("turn_changed", 1)
        assert cache("gc") == {"status": "ok", "removed": 0, "freed_bytes": 0}
        chat(client, messages, temperature=0, max_tokens=8)
        assert cache("rm", key) == [{"status": "evicted", "cache_key": key}]
        checked = run_cache("check", "--cache-dir", str(tmp_path / "kv"))
        assert checked.returncode == 2
        assert "a server is using it" in checked.stdout
    checked = run_cache("check", "--cache-dir", str(tmp_path / "kv"))
    assert checked.returncode == 0, checked.stdout
    assert "no damage" in checked.stdout
    assert " 0 good blocks" not in checked.stdout
