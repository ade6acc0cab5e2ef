"""GET /metrics counts every request, its tokens and its times, per model and tenant."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rekindle.front.metrics import ModelMetrics
from rekindle.front.request_metrics import MAX_TENANTS, Histogram, RequestMetrics
from rekindle.http.records import RequestRecord
from tests.api.live import live
from tests.api.scripted import HELLO, Front, ScriptedRuntime, finished, hit, reply

CHAT = "/v1/chat/completions"
DEPLOY = Path(__file__).parents[2] / "deploy"
#: Prometheus' rule for names. Those of vLLM have a colon besides.
NAME = re.compile(r"(vllm:|rekindle_|process_)[a-z0-9_]+")


def parsed(metrics: RequestMetrics) -> dict[str, Metric]:
    text = generate_latest(ModelMetrics([], metrics)).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Metric, name: str | None = None) -> dict[tuple[str, ...], float]:
    """The samples by the values of their labels, in the order of the labels' names."""
    return {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in family.samples
        if name is None or sample.name == name
    }


def turn(**fields: object) -> RequestRecord:
    record = RequestRecord("r", "POST", CHAT, is_routed=True, model="tiny", status=200, turns=1)
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def counted(*records: RequestRecord) -> dict[str, Metric]:
    metrics = RequestMetrics()
    for record in records:
        metrics.observe(record)
    return parsed(metrics)


def test_tokens_are_counted_by_model_and_tenant() -> None:
    found = counted(
        turn(tenant="alice", prompt_tokens=10, reused_tokens=4, tier="ram", output_tokens=3),
        turn(tenant="alice", prompt_tokens=5, output_tokens=1),
        turn(tenant="bob", prompt_tokens=7, reused_tokens=7, tier="disk", output_tokens=2),
    )
    assert values(found["rekindle_prompt_tokens"]) == {("tiny", "alice"): 15, ("tiny", "bob"): 7}
    assert values(found["rekindle_generation_tokens"]) == {("tiny", "alice"): 4, ("tiny", "bob"): 2}
    assert values(found["rekindle_prompt_tokens_reused"]) == {
        ("tiny", "alice", "ram"): 4,
        ("tiny", "bob", "disk"): 7,
    }


def test_refused_requests_are_counted_by_status() -> None:
    refused = RequestRecord("r", "POST", "/v1/*", status=401)
    limited = turn(status=429, turns=0, tenant="alice")
    found = counted(refused, limited, turn(tenant="alice", finish="stop"))
    assert values(found["rekindle_http_requests"]) == {
        ("other", "other", "401"): 1,
        (CHAT, "POST", "429"): 1,
        (CHAT, "POST", "200"): 1,
    }
    assert values(found["rekindle_requests"]) == {
        ("tiny", "429", "alice"): 1,
        ("tiny", "200", "alice"): 1,
    }
    assert values(found["rekindle_request_success"]) == {("stop", "tiny", "alice"): 1}


def test_a_path_that_a_client_invents_makes_no_series() -> None:
    found = counted(*(RequestRecord("r", "GET", f"/v1/{n}", status=404) for n in "abc"))
    assert values(found["rekindle_http_requests"]) == {("other", "other", "404"): 3}


def test_the_number_of_tenants_is_bounded() -> None:
    records = [turn(tenant=f"t{n}", prompt_tokens=1) for n in range(MAX_TENANTS + 50)]
    found = values(counted(*records)["rekindle_prompt_tokens"])
    assert len(found) == MAX_TENANTS + 1
    assert found["tiny", "other"] == 50


def test_times_are_histograms_with_vllms_names_as_well() -> None:
    times = {"total_s": 2.0, "queue_s": 0.02, "prefill_s": 0.3, "decode_s": 1.5}
    record = turn(**times, output_tokens=9, finish="stop")
    record.first_token_at_s = record.started_s + 0.4
    record.add_gap(0.018)
    record.add_gap(0.3)
    found = counted(record)
    for prefix, label in (("rekindle_", "model"), ("vllm:", "model_name")):
        for name, total in (
            ("time_to_first_token_seconds", 0.4),
            ("inter_token_latency_seconds", 0.318),
            ("e2e_request_latency_seconds", 2.0),
            ("request_queue_time_seconds", 0.02),
            ("request_prefill_time_seconds", 0.3),
            ("request_decode_time_seconds", 1.5),
        ):
            family = found[prefix + name]
            assert family.type == "histogram"
            assert values(family, f"{prefix}{name}_sum")["tiny",] == pytest.approx(total)
            assert all(label in sample.labels for sample in family.samples)
    gaps = values(found["rekindle_inter_token_latency_seconds"])
    assert gaps["0.015", "tiny"] == 0
    assert gaps["0.02", "tiny"] == 1
    assert gaps["+Inf", "tiny"] == 2


def test_a_request_that_was_cut_has_no_times_of_its_stages() -> None:
    record = turn(output_tokens=3, error="client_gone")
    record.first_token_at_s = record.started_s + 0.4
    found = counted(record)
    assert values(found["rekindle_time_to_first_token_seconds"])["+Inf", "tiny"] == 1
    assert values(found["rekindle_request_decode_time_seconds"])["+Inf", "tiny"] == 0
    assert not found["rekindle_request_success"].samples


def test_vllms_counters_add_up_all_tenants() -> None:
    found = counted(
        turn(tenant="a", prompt_tokens=10, reused_tokens=4, tier="ram", finish="stop"),
        turn(tenant="b", prompt_tokens=5, reused_tokens=1, tier="disk", finish="stop"),
    )
    assert values(found["vllm:prefix_cache_queries"]) == {("tiny",): 15}
    assert values(found["vllm:prefix_cache_hits"]) == {("tiny",): 5}
    assert values(found["vllm:request_success"]) == {("stop", "tiny"): 2}


def test_a_histogram_counts_a_value_at_its_bound_as_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 2.0), ("+Inf", 3.0)]
    assert histogram.sum == 5.5


def test_names_follow_prometheus_rules() -> None:
    for family in ModelMetrics([], RequestMetrics()).collect():
        assert NAME.fullmatch(family.name), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket")), family.name
        assert family.documentation


def test_metrics_count_what_clients_did() -> None:
    runtime = ScriptedRuntime(reply("a", "b", end=finished(prompt_tokens=50, cache=hit(40))))
    with live(Front(runtime)) as server, server.client() as client:
        assert client.post(CHAT, json=HELLO).status_code == 200
        assert client.post(CHAT, json={"messages": 1}).status_code == 400
        text = client.get("/metrics").text
    assert f'rekindle_http_requests_total{{endpoint="{CHAT}",method="POST",status="400"}} 1' in text
    assert 'rekindle_prompt_tokens_reused_total{model="tiny",tenant="",tier="ram"} 40.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0' in text


def expressions(node: object) -> Iterable[str]:
    """Every query of a dashboard, also those of its variables."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name in ("expr", "definition") and isinstance(value, str):
                yield value
            yield from expressions(value)
    elif isinstance(node, list):
        for each in node:
            yield from expressions(each)


def exported() -> set[str]:
    """The names of all samples that the server can export."""
    names = set()
    for family in ModelMetrics([], RequestMetrics()).collect():
        suffixes = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
            "info": ("_info",),
        }.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_the_dashboard_and_the_alerts_query_only_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "rekindle.json").read_text())
    alerts = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    queries = [*expressions(dashboard), *expressions(alerts)]
    used = {name for query in queries for name in re.findall(r"\b(?:rekindle_|vllm:)\w+", query)}
    assert len(used) > 15
    assert used <= exported()


def test_each_panel_of_the_dashboard_has_its_own_id_and_place() -> None:
    panels = json.loads((DEPLOY / "grafana" / "rekindle.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
