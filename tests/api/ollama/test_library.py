"""Models that requests create, copy and delete, and `keep_alive`."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.protocol.admin import Tokenize
from tests.api.live import live, soon
from tests.api.on_demand import LoadableRuntime, OnDemandFront
from tests.api.scripted import HELLO
from tests.models.tiny import write_gguf

ADMIN = {"Authorization": "Bearer root"}
TENANT = {"Authorization": "Bearer guest"}


def front_of(folder: Path, **settings: Any) -> OnDemandFront:
    return OnDemandFront(LoadableRuntime(name="base"), models_dir=folder, **settings)


def names(client: httpx.Client) -> list[str]:
    return [each["name"] for each in client.get("/api/tags").json()["models"]]


def delete(client: httpx.Client, name: str, **options: Any) -> httpx.Response:
    return client.request("DELETE", "/api/delete", json={"model": name}, **options)


def test_a_model_is_created_from_a_file_with_a_system_prompt_and_parameters(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "weights.gguf")
    front = front_of(tmp_path / "models")
    body = {
        "model": "pirate",
        "from": str(file),
        "system": "Talk like a pirate.",
        "parameters": {"temperature": 0.25, "num_predict": 7, "num_ctx": 512},
    }
    with live(front) as server, server.client() as client:
        lines = client.post("/api/create", json=body).text.splitlines()
        assert json.loads(lines[-1]) == {"status": "success"}
        assert names(client) == ["base:latest", "pirate:latest"]
        shown = client.post("/api/show", json={"model": "pirate"}).json()
        assert shown["system"] == "Talk like a pirate."
        assert set(shown["parameters"].splitlines()) == {
            "temperature 0.25",
            "num_predict 7",
            "num_ctx 512",
        }
        answer = client.post("/v1/chat/completions", json={**HELLO, "model": "pirate"})
        assert answer.json()["model"] == "pirate"
        [made] = front.made
        assert made.requested.messages is not None
        assert made.requested.messages[0] == {"role": "system", "content": "Talk like a pirate."}
        assert made.requested.sampling.temperature == 0.25
        assert made.requested.max_tokens == 7
        own = {"role": "system", "content": "Be plain."}
        chat = {"model": "pirate", "messages": [own, *HELLO["messages"]]}
        assert client.post("/api/chat", json=chat).is_success
        assert made.requests[1].messages is not None
        assert [each["content"] for each in made.requests[1].messages] == ["Be plain.", "hello"]


def test_the_tokens_of_a_conversation_include_the_models_own_system_prompt(tmp_path: Path) -> None:
    front = front_of(tmp_path)
    body = {"model": "pirate", "from": "base", "system": "Arr.", "stream": False}
    with live(front) as server, server.client() as client:
        client.post("/api/create", json=body)
        client.post("/v1/chat/completions/input_tokens", json={**HELLO, "model": "pirate"})
        [op] = [each.op for each in front.made[0].admin_requests]
        assert isinstance(op, Tokenize)
        assert op.messages is not None
        assert [each["role"] for each in op.messages] == ["system", "user"]


def test_a_copy_has_the_prompt_of_its_source_and_survives_a_restart(tmp_path: Path) -> None:
    front = front_of(tmp_path)
    with live(front) as server, server.client() as client:
        create = {"model": "one", "from": "base", "system": "Be brief.", "stream": False}
        assert client.post("/api/create", json=create).json() == {"status": "success"}
        copy = {"source": "one", "destination": "team/two:small"}
        assert client.post("/api/copy", json=copy).status_code == 200
        assert names(client)[1:] == ["one:latest", "team/two:small"]
    from rekindle.models.created import read_created

    records = read_created(tmp_path)
    assert (
        records["team/two:small"]
        == records["one"]
        == {
            "from": "base",
            "system": "Be brief.",
            "parameters": {},
        }
    )


def test_a_created_model_can_be_deleted_and_its_number_stays_unused(tmp_path: Path) -> None:
    with live(front_of(tmp_path)) as server, server.client() as client:
        for name in ("one", "two"):
            client.post("/api/copy", json={"source": "base", "destination": name})
        assert delete(client, "one").status_code == 200
        assert names(client) == ["base:latest", "two:latest"]
        listed = client.get("/v1/internal/model/list").json()["models"]
        assert [(each["name"], each["number"]) for each in listed] == [("base", 0), ("two", 2)]
        assert delete(client, "one").status_code == 404
        refused = delete(client, "base")
        assert refused.status_code == 400
        assert "settings" in refused.json()["error"]


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"parameters": {"mirostat": 1}}, "options"),
        ({"parameters": {"temperature": "hot"}}, "temperature"),
        ({"from": "/no/such/file.gguf"}, "no model file"),
        ({"from": ""}, "`from` is missing"),
        ({"quantize": "q4_0"}, "rekindle convert"),
        ({"files": {"a": "sha256:1"}}, "from"),
        ({"model": "../evil"}, "letters"),
        ({"model": "base"}, "is taken"),
    ],
)
def test_what_cannot_be_created_is_refused_with_a_remedy(
    tmp_path: Path, fields: dict[str, Any], remedy: str
) -> None:
    body = {"model": "new", "from": "base", **fields}
    with live(front_of(tmp_path)) as server, server.client() as client:
        refused = client.post("/api/create", json=body)
        assert refused.status_code == 400, refused.text
        assert remedy in refused.json()["error"]
        assert names(client) == ["base:latest"]


def test_changes_of_models_need_an_admin_key(tmp_path: Path) -> None:
    front = front_of(tmp_path, api_key=("guest",), admin_key=("root",))
    copy = {"source": "base", "destination": "mine"}
    create = {"model": "mine", "from": "base"}
    with live(front) as server, server.client() as client:
        assert client.post("/api/copy", json=copy, headers=TENANT).status_code == 403
        assert client.post("/api/create", json=create, headers=TENANT).status_code == 403
        assert delete(client, "base", headers=TENANT).status_code == 403
        assert client.post("/api/copy", json=copy, headers=ADMIN).status_code == 200


def test_keep_alive_decides_when_the_model_goes() -> None:
    front = OnDemandFront(LoadableRuntime(name="base"))
    runtime = front.runtimes[0]
    with live(front) as server, server.client() as client:
        chat = {**HELLO, "stream": False}
        assert client.post("/api/chat", json=chat).status_code == 200
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
        client.post("/api/chat", json={**chat, "keep_alive": "10m"})
        [listed] = client.get("/api/ps").json()["models"]
        left = datetime.fromisoformat(listed["expires_at"]) - datetime.now().astimezone()
        assert 500 < left.total_seconds() <= 600
        assert listed["size"] == 100
        client.post("/api/chat", json={**chat, "keep_alive": -1})
        assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
        done = client.post("/api/generate", json={"keep_alive": 0, "stream": False}).json()
        assert done["done_reason"] == "unload"
        soon(lambda: runtime.ready is None)
        assert client.get("/api/ps").json() == {"models": []}
        assert client.post("/api/generate", json={"keep_alive": "soon"}).status_code == 400
        loaded = client.post("/api/generate", json={"model": "base", "stream": False}).json()
        assert loaded["done_reason"] == "load"
        assert runtime.ready is not None


def test_keep_alive_of_a_pinned_model_is_ignored_and_the_header_says_so() -> None:
    front = OnDemandFront(LoadableRuntime(name="base"), pinned=("base",))
    with live(front) as server, server.client() as client:
        answer = client.post("/api/chat", json={**HELLO, "keep_alive": 0, "stream": False})
        assert answer.headers["x-ignored-fields"] == "keep_alive"
        client.post("/api/generate", json={"keep_alive": 0})
        assert front.runtime.ready is not None
