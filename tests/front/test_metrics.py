"""GET /metrics is valid for Prometheus' own parser."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rekindle.front.metrics import MAX_TENANT_LABELS, OTHER_TENANTS, TenantMetrics
from rekindle.http.limits import TenantUse
from tests.api.cache.entries import answering, stats
from tests.api.scripted import Front, ScriptedRuntime, error

Samples = dict[tuple[str, str], float]


def samples(answer: httpx.Response) -> Samples:
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, sample.labels["model"]): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if "model" in sample.labels  # the others are of tenants
    }


def test_metrics_cover_every_model() -> None:
    found = samples(
        Front(ScriptedRuntime(name='a "b"\\', answers=answering(stats()))).get("/metrics")
    )
    assert {name.removeprefix("rekindle_"): value for (name, _), value in found.items()} == {
        "up": 1,
        "runtime_restarts_total": 0,
        "watchdog_fired_total": 0,
        "open_turns": 0,
        "active_turns": 3,
        "ram_bytes": 1000,
        "ram_limit_bytes": 1 << 20,
        "disk_bytes": 2000,
        "disk_limit_bytes": 1 << 30,
        "disk_queued_bytes": 11,
        "computed_tokens_total": 100,
        "reused_tokens_total": 900,
        "hits_total": 10,
        "partial_hits_total": 2,
        "misses_total": 2,
        "disk_written_bytes_total": 12,
        "disk_read_bytes_total": 13,
        "evictions_total": 7,
        "corrupt_blocks_total": 1,
        "picture_ram_bytes": 0,
        "picture_disk_bytes": 0,
        "encoded_pictures_total": 0,
        "picture_hits_total": 0,
        "disk_degraded": 0,
        "disk_state_info": 1,
    }
    assert {model for _, model in found} == {'a "b"\\'}


@pytest.mark.parametrize(("state", "degraded"), [("ok", 0), ("off", 0), ("full", 1), ("locked", 1)])
def test_a_disk_that_is_not_written_is_reported_with_the_reason(state: str, degraded: int) -> None:
    answer = Front(ScriptedRuntime(answers=answering(stats(disk_state=state)))).get("/metrics")
    assert samples(answer)["rekindle_disk_degraded", "tiny"] == degraded
    assert f'rekindle_disk_state_info{{model="tiny",state="{state}"}} 1.0' in answer.text


def test_a_model_that_does_not_answer_is_down() -> None:
    away = ScriptedRuntime(name="away")
    away.supervisor.ready, away.supervisor.restarts = None, 2
    found = samples(Front(away, ScriptedRuntime(answers=answering(stats()))).get("/metrics"))
    assert (found["rekindle_up", "away"], found["rekindle_up", "tiny"]) == (0, 1)
    assert found["rekindle_runtime_restarts_total", "away"] == 2
    assert ("rekindle_active_turns", "away") not in found


def test_with_keys_metrics_need_an_admin_key() -> None:
    runtime = ScriptedRuntime(answers=answering(stats()))
    front = Front(runtime, api_key=["alpha"], admin_key=["root"])

    def asked_by(key: str) -> httpx.Response:
        return front.get("/metrics", headers={"Authorization": f"Bearer {key}"})

    assert front.get("/metrics").status_code == asked_by("wrong").status_code == 401
    assert asked_by("alpha").status_code == 403
    assert error(asked_by("alpha"))["code"] == "admin_key_required"
    assert runtime.admin_requests == []
    assert samples(asked_by("root"))["rekindle_up", "tiny"] == 1
    assert runtime.admin_request.admin


def of_tenants(used: list[TenantUse]) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels["tenant"]): sample.value
        for metric in TenantMetrics(used).collect()
        for sample in metric.samples
    }


def test_metrics_of_tenants_have_their_names_and_their_use() -> None:
    found = of_tenants([TenantUse("alice", generated_tokens=7, open_turns=2), TenantUse("")])
    assert found["rekindle_tenant_generated_tokens_total", "alice"] == 7
    assert found["rekindle_tenant_open_turns", "alice"] == 2
    assert {tenant for _, tenant in found} == {"alice"}  # the server's own work has no name


def test_many_tenants_have_few_labels_and_nothing_is_lost() -> None:
    used = [TenantUse(f"t{at}", accepted_requests=at + 1) for at in range(3 * MAX_TENANT_LABELS)]
    requests = {
        tenant: value
        for (name, tenant), value in of_tenants(used).items()
        if name == "rekindle_tenant_accepted_requests_total"
    }
    assert len(requests) == MAX_TENANT_LABELS + 1
    assert sum(requests.values()) == sum(each.accepted_requests for each in used)
    assert OTHER_TENANTS in requests
