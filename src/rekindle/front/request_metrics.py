"""Counts requests and their tokens and times, for GET /metrics.

Counters are kept per model and tenant, histograms per model. A name outside of the first hundred
tenants counts as "other", so that the number of series is bounded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from rekindle.http.records import GAP_BOUNDS_S, RequestRecord

MAX_TENANTS = 100
REQUEST_METRICS = "request_metrics"  # key in the application's state
SECONDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
TOKENS = (1, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000)

#: Histograms, as vLLM names them: bounds and description.
HISTOGRAMS: Mapping[str, tuple[Sequence[float], str]] = {
    "time_to_first_token_seconds": (SECONDS, "From the request's arrival to its first token."),
    "inter_token_latency_seconds": (
        GAP_BOUNDS_S, "Between two parts of a reply, as the client gets them. Most are one token.",
    ),
    "e2e_request_latency_seconds": (SECONDS, "From a request's arrival to its end."),
    "request_queue_time_seconds": (SECONDS, "Waiting for a place in the batch."),
    "request_prefill_time_seconds": (SECONDS, "Computing the prompt and the first token."),
    "request_decode_time_seconds": (SECONDS, "From the first token to the last."),
    "request_prompt_tokens": (TOKENS, "Prompt tokens of a request, including reused ones."),
    "request_generation_tokens": (TOKENS, "Generated tokens of a request."),
}  # fmt: skip
#: Counters with these labels besides `model`.
COUNTERS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "requests": (("tenant", "status"), "Requests that named or reached a model."),
    "request_success": (("tenant", "finished_reason"), "Requests whose reply was complete."),
    "prompt_tokens": (("tenant",), "Prompt tokens, including reused ones."),
    "prompt_tokens_reused": (("tenant", "tier"), "Prompt tokens whose state was reused."),
    "generation_tokens": (("tenant",), "Generated tokens."),
}
#: vLLM's names of counters that have other names here. Their labels besides the model are dropped.
VLLM_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "prefix_cache_queries": "prompt_tokens",
    "prefix_cache_hits": "prompt_tokens_reused",
}


class Histogram:
    """Counts of values by upper bound, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def add(self, counts: Iterable[int], total: float) -> None:
        """Add the counts of a histogram with the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        self.sum += total

    def buckets(self) -> list[tuple[str, float]]:
        """The number of values up to each bound, as Prometheus wants them."""
        found, total = [], 0
        names = [*map(str, map(float, self._bounds)), "+Inf"]
        for name, count in zip(names, self._counts, strict=True):
            total += count
            found.append((name, float(total)))
        return found


class RequestMetrics:
    """Observes every request. Only the event loop's thread calls it, so no lock is needed."""

    def __init__(self) -> None:
        self._tenants: set[str] = set()
        self._http: Counter[tuple[str, str, str]] = Counter()
        self._counts: dict[str, Counter[tuple[str, ...]]] = {name: Counter() for name in COUNTERS}
        self._histograms: dict[str, dict[str, Histogram]] = defaultdict(
            lambda: {name: Histogram(bounds) for name, (bounds, _) in HISTOGRAMS.items()}
        )

    def observe(self, record: RequestRecord) -> None:
        status = str(record.status)
        # A path without a route is whatever a client wrote.
        endpoint = record.endpoint if record.is_routed else "other"
        self._http[record.method if record.is_routed else "other", endpoint, status] += 1
        if record.model:
            self._count(record, status)
            if record.turns:
                self._measure(record)

    def _count(self, record: RequestRecord, status: str) -> None:
        key = (record.model, self._bounded(record.tenant))
        self._counts["requests"][(*key, status)] += 1
        if record.finish:
            self._counts["request_success"][(*key, record.finish)] += 1
        self._counts["prompt_tokens"][key] += record.prompt_tokens
        self._counts["generation_tokens"][key] += record.output_tokens
        if record.reused_tokens:
            self._counts["prompt_tokens_reused"][(*key, record.tier or "none")] += (
                record.reused_tokens
            )

    def _measure(self, record: RequestRecord) -> None:
        histograms = self._histograms[record.model]
        histograms["e2e_request_latency_seconds"].observe(record.total_s)
        histograms["request_prompt_tokens"].observe(record.prompt_tokens)
        histograms["inter_token_latency_seconds"].add(record.gaps, record.gaps_s)
        if record.first_token_s is None:
            return  # embeddings and scores have no tokens, and a refused turn has none yet
        histograms["time_to_first_token_seconds"].observe(record.first_token_s)
        histograms["request_generation_tokens"].observe(record.output_tokens)
        if not record.finish:
            return  # only the end of a turn says how long its stages took
        histograms["request_queue_time_seconds"].observe(record.queue_s)
        histograms["request_prefill_time_seconds"].observe(record.prefill_s)
        histograms["request_decode_time_seconds"].observe(record.decode_s)

    def _bounded(self, tenant: str) -> str:
        if tenant not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            return "other"
        self._tenants.add(tenant)
        return tenant

    def collect(self) -> Iterator[Metric]:
        http = CounterMetricFamily(
            "rekindle_http_requests",
            "Requests by route and status, refused ones included.",
            labels=["method", "endpoint", "status"],
        )
        for route, count in self._http.items():
            http.add_metric(route, count)
        yield http
        for name, (labels, text) in COUNTERS.items():
            family = CounterMetricFamily(f"rekindle_{name}", text, labels=["model", *labels])
            for key, count in self._counts[name].items():
                family.add_metric(key, count)
            yield family
        yield from self._timings("rekindle_", "model")
        yield from self._as_vllm()

    def _timings(self, prefix: str, label: str) -> Iterator[Metric]:
        for name, (_, text) in HISTOGRAMS.items():
            family = HistogramMetricFamily(prefix + name, text, labels=[label])
            for model, histograms in self._histograms.items():
                family.add_metric([model], histograms[name].buckets(), histograms[name].sum)
            yield family

    def _as_vllm(self) -> Iterator[Metric]:
        """The same figures under vLLM's names, so that dashboards made for it work here."""
        for name, own in VLLM_COUNTERS.items():
            family = CounterMetricFamily(f"vllm:{name}", COUNTERS[own][1], labels=["model_name"])
            by_model: Counter[str] = Counter()
            for (model, *_), count in self._counts[own].items():
                by_model[model] += count
            for model, count in by_model.items():
                family.add_metric([model], count)
            yield family
        finished = CounterMetricFamily(
            "vllm:request_success",
            COUNTERS["request_success"][1],
            labels=["model_name", "finished_reason"],
        )
        by_reason: Counter[tuple[str, str]] = Counter()
        for (model, _, reason), count in self._counts["request_success"].items():
            by_reason[model, reason] += count
        for labels, count in by_reason.items():
            finished.add_metric(labels, count)
        yield finished
        yield from self._timings("vllm:", "model_name")
