"""Prints the models, the cache and the addresses of a server that has started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from rekindle.config import Config
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity, Ready
from rekindle.protocol.requests import IMAGE
from rekindle.protocol.settings import GB
from rekindle.worker.client import RuntimeClient

PLACES = {POOL: "in the engine", PARKED: "parked on the device", RAM: "in RAM", DISK: "on disk"}
BUDGET_FLAGS = {RAM: "--ram-cache", DISK: "--disk-cache"}


def announce(
    config: Config, runtimes: Sequence[RuntimeClient], ports: Sequence[int], console: Console
) -> None:
    for line in _lines(config, runtimes, ports):
        console.print(line, soft_wrap=True)


def _lines(
    config: Config, runtimes: Sequence[RuntimeClient], ports: Sequence[int]
) -> Iterable[str]:
    loaded = [runtime.loaded for runtime in runtimes]
    for runtime, ready in zip(runtimes, loaded, strict=True):
        yield f"[bold]{escape(runtime.name)}[/] is loaded: {_model(config, ready)}"
        yield from map(escape, capacity_lines(ready))
    yield escape(cache_line(config, [ready for ready in loaded if not ready.dimensions]))
    host = f"[{config.host}]" if ":" in config.host else config.host
    url, *more = (escape(f"http://{host}:{port}") for port in ports)
    for each in more:
        yield f"Serving Ollama's API on [bold]{each}[/]."
    yield f"Serving on [bold]{url}/v1[/] (interface: {url}/docs). Stop with Ctrl-C."


def _model(config: Config, ready: Ready) -> str:
    if ready.dimensions:
        kind = "reranker" if ready.ranks else f"embeddings of {ready.dimensions} dimensions"
        return f"{kind}, inputs of up to {ready.context_tokens} tokens"
    mode = ", exact mode" if config.exact else ""
    vision = ", reads images" if IMAGE in ready.modalities else ""
    context = f"context {ready.context_tokens} tokens"
    return f"{context}, up to {config.parallel} turns in parallel{mode}{vision}"


def capacity_lines(ready: Ready) -> Iterable[str]:
    """Describe the GPUs and the KV cache of a model, and warn about budgets that are too small."""
    layers = f": {ready.gpu_layers} of {ready.layers} layers offloaded" if ready.layers else ""
    for gpu in ready.gpus:
        yield f"Found {gpu.name} with {gpu.memory_bytes / GB:.1f} GB{layers}"
    if ready.capacities:
        first, *rest = map(_capacity, ready.capacities)
        yield "KV cache: " + ", ".join([first.replace(" ", " tokens ", 1), *rest])
    for capacity in ready.capacities:
        if capacity.place in BUDGET_FLAGS and 0 < capacity.tokens < ready.context_tokens:
            needed_bytes = ready.context_tokens * capacity.size_bytes / capacity.tokens
            yield (
                f"Warning: one full context of {ready.context_tokens:,} tokens takes "
                f"{needed_bytes / GB:.1f} GB and does not fit into {BUDGET_FLAGS[capacity.place]}: "
                "raise it or lower --max-model-len"
            )


def _capacity(capacity: Capacity) -> str:
    tokens = capacity.tokens
    count = str(tokens) if tokens < 1000 else f"{round(tokens / 1000)}k"
    size = "" if capacity.place == POOL else f" ({capacity.size_bytes / GB:.1f} GB)"
    return f"{count} {PLACES.get(capacity.place, f'in {capacity.place}')}{size}"


def cache_line(config: Config, models: Sequence[Ready]) -> str:
    """Say where conversations are stored, and how many were found there."""
    on_disk = [each for each in models if each.on_disk]
    if not on_disk:
        return "Conversations are kept in memory only: they are lost when the server stops"
    folder = f"the cache folder {config.cache_dir}"
    counts = [each.conversations for each in on_disk if each.conversations is not None]
    if len(counts) < len(on_disk):
        return f"Conversations are kept in {folder}, which is still being read"
    count = sum(counts)
    return f"{count:,} {'conversation' if count == 1 else 'conversations'} found in {folder}"
