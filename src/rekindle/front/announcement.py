"""What a server says when it has started: its models, its cache and where it listens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from rekindle.config import Config
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity, Ready
from rekindle.protocol.media import IMAGE
from rekindle.protocol.settings import GB
from rekindle.worker.client import RuntimeClient

PLACES = {POOL: "KV pool", PARKED: "parked on the device", RAM: "RAM"}  # as people call them
FLAGS = {RAM: "--ram-cache", DISK: "--disk-cache"}  # of the places with a budget


def announce(
    config: Config, runtimes: Sequence[RuntimeClient], ports: Sequence[int], console: Console
) -> None:
    """A few lines for each model, one for the cache, and for each address one."""
    for line in _lines(config, runtimes, ports):
        console.print(line, soft_wrap=True)


def _lines(
    config: Config, runtimes: Sequence[RuntimeClient], ports: Sequence[int]
) -> Iterable[str]:
    mode = ", exact mode" if config.exact else ""
    found = []
    for runtime in runtimes:
        assert runtime.ready is not None
        yield f"[bold]{escape(runtime.name)}[/] is loaded: " + (
            _vectors(runtime.ready)
            or f"context {runtime.ready.context_tokens} tokens, "
            f"up to {config.parallel} turns at once{mode}{_sees(runtime.ready)}"
        )
        yield from map(escape, room_lines(runtime.ready))
        if not runtime.ready.dimensions:
            found.append(runtime.ready)
    yield escape(cache_line(config, found))
    host = f"[{config.host}]" if ":" in config.host else config.host
    url, *more = (escape(f"http://{host}:{port}") for port in ports)
    for each in more:
        yield f"Serving Ollama's API on [bold]{each}[/]."
    yield f"Serving on [bold]{url}/v1[/] (interface: {url}/docs). Stop with Ctrl-C."


def _vectors(ready: Ready) -> str:
    """What a model does that generates no text; empty for others."""
    if not ready.dimensions:
        return ""
    what = "ranks documents" if ready.ranks else f"embeddings of {ready.dimensions} dimensions"
    return f"{what}, inputs to {ready.context_tokens} tokens"


def _sees(ready: Ready) -> str:
    return ", sees pictures" if IMAGE in ready.modalities else ""


def room_lines(ready: Ready) -> Iterable[str]:
    """What a model computes on, and what there is room for, or too little, of its state."""
    layers = f": {ready.gpu_layers} of {ready.layers} layers lie there" if ready.layers else ""
    for gpu in ready.gpus:
        yield f"Found {gpu.name} with {gpu.memory_bytes / GB:.1f} GB{layers}"
    if ready.capacities:
        yield "Tokens of its state there is room for: " + ", ".join(
            map(_capacity, ready.capacities)
        )
    for capacity in ready.capacities:
        if capacity.place in FLAGS and 0 < capacity.tokens < ready.context_tokens:
            needed_bytes = ready.context_tokens * capacity.size_bytes / capacity.tokens
            yield (
                f"Warning: one full context of {ready.context_tokens:,} tokens takes "
                f"{needed_bytes / GB:.1f} GB and does not fit into {FLAGS[capacity.place]}: "
                "raise that or lower --max-model-len"
            )


def _capacity(capacity: Capacity) -> str:
    place = PLACES.get(capacity.place, capacity.place)
    return f"{place} {capacity.tokens:,} ({capacity.size_bytes / GB:.1f} GB)"


def cache_line(config: Config, found: Sequence[Ready]) -> str:
    """Where conversations are kept, and how many were found there."""
    on_disk = [each for each in found if each.on_disk]
    if not on_disk:
        return "Conversations are kept in memory only: they are gone when the server stops"
    folder = f"the cache folder {config.cache_dir}"
    known = [each.conversations for each in on_disk if each.conversations is not None]
    if len(known) < len(on_disk):
        return f"Conversations are kept in {folder}, which is still being read"
    count = sum(known)
    return f"{count:,} {'conversation' if count == 1 else 'conversations'} found in {folder}"
