"""Requests wait for their model. Streams show that they do, in the form of their dialect."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from rekindle.api.base import loading
from rekindle.worker.client import RuntimeClient
from tests.api.live import Live, live, soon
from tests.api.on_demand import EmbedderRuntime, LoadableRuntime, OnDemandFront
from tests.api.scripted import HELLO, reply

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**HELLO, "stream": True},
    "/v1/completions": {"prompt": "hello", "stream": True},
    "/v1/messages": {**HELLO, "max_tokens": 8, "stream": True},
    "/v1/responses": {"input": "hello", "stream": True},
    "/api/chat": HELLO,
    "/completion": {"prompt": "hello", "stream": True},
}


@pytest.fixture
def soon_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "KEEP_ALIVE_S", 0.02)


def post_later(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.post(path, json=body)))
    thread.start()
    return thread, found


@contextlib.contextmanager
def waiting(server: Live, path: str) -> Iterator[httpx.Response]:
    """A stream that has begun while its model loads."""
    with (
        server.client() as client,
        client.stream("POST", path, json={**ASKED[path], "model": "slow"}) as response,
    ):
        yield response


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.usefixtures("soon_waiting")
def test_a_stream_begins_while_its_model_loads_and_ends_like_any_other(path: str) -> None:
    quick, slow = LoadableRuntime(name="quick"), LoadableRuntime(reply("Hel", "lo"), name="slow")
    slow.may_load = False
    with live(OnDemandFront(quick, slow)) as server, waiting(server, path) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        first = next(lines)
        if path.startswith("/api/"):
            begun = json.loads(first)
            assert (begun["model"], begun["done"]) == ("slow", False)
            assert begun["x_loading"] in (0.0, 0.25)
        else:
            assert first.startswith(": loading slow: ")
        text = first
        while "25" not in text:  # the progress of the load
            text = next(lines)
        slow.may_load = True
        rest = "\n".join(lines)
    assert "Hel" in rest
    assert quick.loads == 0
    ends = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}
    assert ends.get(path, '"done":true' if path.startswith("/api/") else "stop") in rest


@pytest.mark.usefixtures("soon_waiting")
def test_a_stream_whose_model_fails_to_load_ends_with_an_error_event() -> None:
    slow = LoadableRuntime(name="slow")
    slow.may_load, slow.damaged = False, "the file is damaged"
    with live(OnDemandFront(slow)) as server, waiting(server, "/v1/messages") as response:
        lines = response.iter_lines()
        assert next(lines).startswith(": loading slow")
        slow.may_load = True
        rest = "\n".join(lines)
    assert "event: error" in rest
    assert "the file is damaged" in rest


@pytest.mark.usefixtures("soon_waiting")
def test_a_client_that_leaves_while_its_model_loads_leaves_nothing_behind() -> None:
    slow = LoadableRuntime(name="slow")
    slow.may_load = False
    with live(OnDemandFront(slow)) as server:
        with waiting(server, "/v1/chat/completions") as response:
            next(response.iter_lines())
        front = server.front
        assert isinstance(front, OnDemandFront)
        soon(lambda: front.pool.model(slow).waiters == 0)
        slow.may_load = True
        soon(lambda: slow.ready is not None)
        assert front.pool.model(slow).users == 0
        assert not slow.requests


def test_two_requests_wait_for_one_load_and_both_are_answered() -> None:
    slow = LoadableRuntime(name="slow")
    slow.may_load = False
    with live(OnDemandFront(slow)) as server, server.client() as client:
        posted = [post_later(client, "/v1/chat/completions", HELLO) for _ in range(2)]
        front = server.front
        assert isinstance(front, OnDemandFront)
        soon(lambda: front.pool.model(slow).waiters == 2)
        slow.may_load = True
        for thread, found in posted:
            thread.join()
            assert found[0].status_code == 200
    assert slow.loads == 1


def test_a_failed_load_says_why_and_when_to_come_back() -> None:
    good, bad = LoadableRuntime(name="good"), LoadableRuntime(name="bad")
    bad.damaged = "the file is damaged"
    with live(OnDemandFront(good, bad)) as server, server.client() as client:
        refused = client.post("/v1/chat/completions", json={**HELLO, "model": "bad"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "model_load_failed"
        assert "the file is damaged" in refused.json()["error"]["message"]
        assert client.post("/v1/chat/completions", json={**HELLO, "model": "good"}).is_success
        again = client.post("/v1/chat/completions", json={**HELLO, "model": "bad"})
        assert (again.status_code, bad.loads) == (503, 1)
        listed = {each["id"]: each["status"] for each in client.get("/v1/models").json()["data"]}
        assert listed == {"good": "loaded", "bad": "failed"}
        assert client.get("/health").status_code == 200
        bad.damaged = None
        deadline = time.monotonic() + 10
        while not client.post("/v1/chat/completions", json={**HELLO, "model": "bad"}).is_success:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_model_stays_loaded_until_its_answer_was_sent() -> None:
    one, two = LoadableRuntime(name="one"), LoadableRuntime(name="two")
    front = OnDemandFront(one, two, max_bytes=150)
    with live(front) as server, server.client() as client:
        for name in ("one", "two", "one"):
            assert client.post("/v1/chat/completions", json={**HELLO, "model": name}).is_success
        assert front.pool.used_bytes == 100
        assert (one.loads, two.loads) == (2, 1)
        assert all(front.pool.model(each).users == 0 for each in (one, two))


def test_a_number_means_the_same_model_whatever_is_loaded() -> None:
    names = ("one", "two", "three")
    front = OnDemandFront(*(LoadableRuntime(name=name) for name in names))
    with live(front) as server, server.client() as client:
        for number in (2, 0, 2, 1):
            headers = {"X-Model-Id": str(number)}
            answer = client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert answer.json()["model"] == names[number]
        listed = client.get("/v1/internal/model/list").json()["models"]
        assert [(each["name"], each["number"]) for each in listed] == [
            ("one", 0),
            ("two", 1),
            ("three", 2),
        ]


def test_an_embedding_model_is_loaded_on_request_too() -> None:
    text, vectors = LoadableRuntime(name="text"), EmbedderRuntime()
    front = OnDemandFront(text, embedders=(vectors,))
    with live(front) as server, server.client() as client:
        states = client.get("/v1/internal/model/info/vectors").json()
        assert (states["kind"], states["status"]) == ("embedding", "unloaded")
        loaded = client.post("/v1/internal/model/load", json={"model": "vectors"}).json()
        assert (loaded["status"], vectors.loads, text.loads) == ("loaded", 1, 0)


def test_the_cache_of_loaded_models_is_listed_without_loading_others() -> None:
    one, two = LoadableRuntime(name="one"), LoadableRuntime(name="two")
    with live(OnDemandFront(one, two)) as server, server.client() as client:
        assert client.get("/v1/cache").json()["entries"] == []
        assert client.get("/v1/cache/stats").status_code == 200
        assert (one.loads, two.loads) == (0, 0)


def test_a_server_without_models_on_demand_keeps_its_models_loaded() -> None:
    from tests.api.scripted import Front

    front = Front(idle_unload=1.0)
    with live(front) as server, server.client() as client:
        [state] = client.get("/v1/internal/model/list").json()["models"]
        assert (state["status"], state["keep_loaded"]) == ("loaded", True)
        assert isinstance(front.runtime, RuntimeClient)
