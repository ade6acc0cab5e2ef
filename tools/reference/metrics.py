"""Writes docs/metrics.md from the metrics that the server exports."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from rekindle.front.metrics import ModelMetrics, TenantMetrics
from tools.reference.markdown import code, fill, table


def render() -> str:
    """Return the whole page."""
    return fill("metrics.md", metrics=table(("metric", "type", "meaning"), sorted(_rows())))


def _rows() -> Iterator[tuple[str, str, str]]:
    for metric in (*ModelMetrics([]).collect(), *TenantMetrics([]).collect()):
        yield code(exported_name(metric)), metric.type, metric.documentation


def exported_name(metric: Metric) -> str:
    """The name of its samples in the text format."""
    return metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, "")
