"""Which models are loaded, and how an admin changes that."""

from __future__ import annotations

import threading

from tests.api.live import live, soon
from tests.api.on_demand import LoadableRuntime, OnDemandFront
from tests.api.scripted import HELLO

LOAD, UNLOAD = "/v1/internal/model/load", "/v1/internal/model/unload"
ADMIN = {"Authorization": "Bearer root"}
TENANT = {"Authorization": "Bearer guest"}


def test_a_model_can_be_loaded_and_unloaded_by_request() -> None:
    one = LoadableRuntime(name="one")
    with live(OnDemandFront(one)) as server, server.client() as client:
        loaded = client.post(LOAD, json={"model": "one"}).json()
        assert loaded["status"] == "loaded"
        assert loaded["memory_bytes"] == 100
        assert loaded["context_tokens"] == 4096
        unloaded = client.post(UNLOAD, json={"model_name": "one"}).json()
        assert (unloaded["status"], unloaded["memory_bytes"]) == ("unloaded", 0)
        assert one.ready is None
        assert client.post(LOAD, json={"model": "none"}).status_code == 404
        assert client.post(LOAD, json={}).status_code == 400


def test_unloading_a_model_that_loads_cancels_the_load_and_tells_those_that_wait() -> None:
    one, two = LoadableRuntime(name="one"), LoadableRuntime(name="two")
    one.may_load = False
    with live(OnDemandFront(one, two)) as server, server.client() as client:
        found = []
        thread = threading.Thread(
            target=lambda: found.append(client.post("/v1/chat/completions", json=HELLO))
        )
        thread.start()
        soon(lambda: one.loads == 1)
        info = client.get("/v1/internal/model/info/one").json()
        assert (info["status"], info["loading"]) == ("loading", 0.25)
        assert client.post(UNLOAD, json={"model": "one"}).json()["status"] == "unloaded"
        thread.join()
        assert found[0].status_code == 503
        assert "was cancelled" in found[0].json()["error"]["message"]
        assert client.post(LOAD, json={"model": "two"}).is_success


def test_only_admins_load_unload_and_see_processes() -> None:
    one = LoadableRuntime(name="one")
    front = OnDemandFront(one, api_key=("guest",), admin_key=("root",))
    with live(front) as server, server.client() as client:
        for path in (LOAD, UNLOAD):
            assert client.post(path, json={"model": "one"}, headers=TENANT).status_code == 403
        assert client.get("/management/processes", headers=TENANT).status_code == 403
        assert client.get("/v1/internal/model/list", headers=TENANT).is_success
        assert client.post(LOAD, json={"model": "one"}, headers=ADMIN).is_success
        processes = client.get("/management/processes", headers=ADMIN).json()["processes"]
        assert processes == []  # a scripted runtime has none


def test_a_tenants_request_loads_a_model_without_an_admin_key() -> None:
    one = LoadableRuntime(name="one")
    front = OnDemandFront(one, api_key=("guest",), admin_key=("root",))
    with live(front) as server, server.client() as client:
        assert client.post("/v1/chat/completions", json=HELLO, headers=TENANT).is_success
