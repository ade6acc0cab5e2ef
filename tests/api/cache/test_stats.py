"""GET /v1/cache/stats."""

from __future__ import annotations

import pytest

from tests.api.cache.entries import answering, stats
from tests.api.scripted import Front, ScriptedRuntime

TENANTS = {
    "total_entries": 5,
    "by_tier": {"ram": 4, "disk": 1},
    "ram_bytes": 1000,
    "disk_bytes": 2000,
    "unique_bytes": 2500,
    "logical_bytes": 9000,
    "turns": 14,
    "total_hits": 10,
    "total_partial_hits": 2,
    "total_misses": 2,
    "hit_rate": 0.8571,
    "pinned_entries": 1,
    "evictions": 7,
}
SERVERS = {
    "ram_limit_bytes": 1 << 20,
    "disk_limit_bytes": 1 << 30,
    "disk_state": "ok",
    "disk_queued_bytes": 11,
    "disk_written_bytes": 12,
    "disk_read_bytes": 13,
    "corrupt_blocks": 1,
    "encoded_pictures": 0,
    "picture_hits": 0,
    "picture_ram_bytes": 0,
    "picture_disk_bytes": 0,
    "computed_tokens": 100,
    "reused_tokens": 900,
    "active_turns": 3,
}


def shown(front: Front, key: str = "") -> dict[str, object]:
    answer = front.get("/v1/cache/stats", headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def servers_in(*states: str) -> Front:
    return Front(*(ScriptedRuntime(name=s, answers=answering(stats(disk_state=s))) for s in states))


def test_an_open_server_shows_everything() -> None:
    assert shown(servers_in("ok")) == TENANTS | SERVERS


def test_a_tenant_sees_nothing_of_the_whole_server() -> None:
    runtime = ScriptedRuntime(answers=answering(stats()))
    front = Front(runtime, api_key=["alpha"], admin_key=["root"])
    assert shown(front, "alpha") == TENANTS
    assert shown(front, "root") == TENANTS | SERVERS
    assert [request.admin for request in runtime.admin_requests] == [False, True]


def test_figures_of_several_models_are_added() -> None:
    first = ScriptedRuntime(answers=answering(stats(by_tier={"ram": 1, "device": 0})))
    second = ScriptedRuntime(name="b", answers=answering(stats(by_tier={"ram": 2, "disk": 3})))
    found = shown(Front(first, second))
    assert found["by_tier"] == {"ram": 3, "device": 0, "disk": 3}
    assert (found["total_entries"], found["turns"], found["active_turns"]) == (10, 28, 6)
    assert found["hit_rate"] == 0.8571


def test_a_cache_that_was_never_asked_has_no_rate() -> None:
    unused = stats(hits=0, partial_hits=0, misses=0)
    assert shown(Front(ScriptedRuntime(answers=answering(unused))))["hit_rate"] == 0.0


@pytest.mark.parametrize(
    ("states", "state"),
    [
        (["off", "ok"], "ok"),
        (["off"], "off"),
        (["ok", "full"], "full"),
        (["off", "locked"], "locked"),
    ],
)
def test_a_disk_that_is_amiss_is_not_hidden_by_another(states: list[str], state: str) -> None:
    assert shown(servers_in(*states))["disk_state"] == state
