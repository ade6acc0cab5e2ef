"""Prints what a server serves when it has started: models, cache, addresses and what to try."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape

from rekindle.config import Config
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity, Ready
from rekindle.protocol.requests import IMAGE
from rekindle.protocol.settings import GB, format_size
from rekindle.worker.client import RuntimeClient

PLACES = {POOL: "in the engine", PARKED: "parked on the device", RAM: "in RAM", DISK: "on disk"}
BUDGET_FLAGS = {RAM: "--ram-cache", DISK: "--disk-cache"}
LOCAL_SERVER = "http://127.0.0.1:8080/v1"  # where `rekindle chat` looks for a server
QUESTION = "Why is the sky blue?"


def announce(
    config: Config,
    runtimes: Sequence[RuntimeClient],
    ports: Sequence[int],
    console: Console,
    *,
    on_request: Sequence[str] = (),
) -> None:
    """`on_request` names the models that are loaded when a request names them."""
    for line in _lines(config, runtimes, ports, on_request):
        console.print(line, soft_wrap=True, highlight=False)


def _lines(
    config: Config,
    runtimes: Sequence[RuntimeClient],
    ports: Sequence[int],
    on_request: Sequence[str],
) -> Iterable[str]:
    loaded = [runtime.loaded for runtime in runtimes]
    if config.settings_file:
        yield f"Settings: {escape(str(config.settings_file))}"
    for runtime, ready in zip(runtimes, loaded, strict=True):
        yield f"Model: [bold]{escape(runtime.name)}[/]{escape(_kind(ready))}, {_context(ready)}"
        yield escape(_engine(config, ready))
        yield from map(escape, cache_lines(config, ready))
    if on_request:
        others = f" and {len(on_request) - 5} more" if len(on_request) > 5 else ""
        limit = f", within {format_size(config.max_memory)}" if config.max_memory else ""
        yield escape(f"Loaded on request{limit}: {', '.join(on_request[:5])}{others}")
    if loaded:
        texts = [ready for ready in loaded if not ready.dimensions]
        yield escape(conversations_line(config, texts))
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.tls_cert is None else "https"
    urls = [escape(f"{scheme}://{host}:{port}") for port in ports]
    own = [] if config.uds else urls[:1]
    for each in urls[len(own) :]:
        yield f"Serving Ollama's API on [bold]{each}[/]"
    if config.uds:
        yield f"Serving on the Unix socket [bold]{escape(str(config.uds))}[/]. Stop with Ctrl-C."
        return
    [url] = own
    yield f"Serving on [bold]{url}/v1[/]. Stop with Ctrl-C."
    yield f"Console: {url}/"
    yield f"Documentation: {url}/docs"
    if on_request or any(not ready.dimensions for ready in loaded):
        yield "Try it in another terminal:"
        yield f"  [bold]{escape(_first_chat(config, ports[0]))}[/]"


def _kind(ready: Ready) -> str:
    """Describe the weights in parentheses, as far as the engine knows them."""
    parameters = f"{_count(ready.parameters)} parameters" if ready.parameters else ""
    known = [each for each in (ready.architecture, parameters, ready.quantization) if each]
    return f" ({', '.join(known)})" if known else ""


def _context(ready: Ready) -> str:
    if ready.dimensions:
        kind = "reranker" if ready.ranks else f"embeddings of {ready.dimensions} dimensions"
        return f"{kind}, inputs of up to {ready.context_tokens:,} tokens"
    vision = ", reads images" if IMAGE in ready.modalities else ""
    return f"context of {ready.context_tokens:,} tokens{vision}"


def _engine(config: Config, ready: Ready) -> str:
    """Name the engine and the device that computes."""
    gpus = ", ".join(f"{gpu.name} with {gpu.memory_bytes / GB:.1f} GB" for gpu in ready.gpus)
    on_gpu = bool(ready.gpus) and (ready.gpu_layers > 0 or not ready.layers)
    layers = f" ({ready.gpu_layers} of {ready.layers} layers)" if ready.layers else ""
    threads = f"the CPU with {config.thread_count} thread{'s' if config.thread_count > 1 else ''}"
    device = f"{gpus}{layers}" if on_gpu else threads
    unused = f", and {gpus} is not used" if gpus and not on_gpu else ""
    turns = "" if ready.dimensions else f", up to {config.parallel} requests at a time"
    mode = ", exact mode" if config.exact and not ready.dimensions else ""
    return f"Engine: {ready.engine or 'unknown'} on {device}{unused}{turns}{mode}"


def cache_lines(config: Config, ready: Ready) -> Iterable[str]:
    """Describe the KV cache of a model, and warn about budgets that are too small."""
    if ready.capacities:
        first, *rest = map(_capacity, ready.capacities)
        yield "KV cache: " + ", ".join([first.replace(" ", " tokens ", 1), *rest])
    for capacity in ready.capacities:
        if capacity.place == DISK and not capacity.size_bytes:
            yield (
                f"Warning: nothing fits on disk. Less than {format_size(config.disk_floor)} "
                f"(--disk-floor) is free under {config.cache_dir}, or --disk-cache is too small. "
                "Free some space or choose another --cache-dir"
            )
        elif capacity.place in BUDGET_FLAGS and 0 < capacity.tokens < ready.context_tokens:
            needed_bytes = ready.context_tokens * capacity.size_bytes / capacity.tokens
            yield (
                f"Warning: one full context of {ready.context_tokens:,} tokens takes "
                f"{needed_bytes / GB:.1f} GB and does not fit {PLACES[capacity.place]}: "
                f"raise {BUDGET_FLAGS[capacity.place]} or lower --max-model-len"
            )


def _capacity(capacity: Capacity) -> str:
    size = "" if capacity.place == POOL else f" ({capacity.size_bytes / GB:.1f} GB)"
    where = PLACES.get(capacity.place, f"in {capacity.place}")
    return f"{_thousands(capacity.tokens)} {where}{size}"


def _thousands(tokens: int) -> str:
    return str(tokens) if tokens < 1000 else f"{round(tokens / 1000)}k"


def _count(number: int) -> str:
    """Shorten a number of parameters, such as 135M or 8.2B."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= unit:
            return f"{number / unit:.3g}{letter}"
    return str(number)


def conversations_line(config: Config, models: Sequence[Ready]) -> str:
    """Say where conversations are stored, and how many were found there."""
    on_disk = [each for each in models if each.on_disk]
    if not on_disk:
        return "Conversations are kept in memory only: they are lost when the server stops"
    folder = f"the cache folder {config.cache_dir}"
    counts = [each.conversations for each in on_disk if each.conversations is not None]
    if len(counts) < len(on_disk):
        return f"Conversations are kept in {folder}, which is still being read"
    if not (count := sum(counts)):
        return f"Conversations are kept in {folder}, which is empty"
    return f"{count:,} {'conversation' if count == 1 else 'conversations'} found in {folder}"


def _first_chat(config: Config, port: int) -> str:
    """A command that asks this server a question."""
    host = "127.0.0.1" if config.host in ("localhost", "0.0.0.0", "::") else config.host
    scheme = "https" if config.tls_cert else "http"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1"
    address = "" if url == LOCAL_SERVER else f" --base-url {url}"
    keyed = config.api_key or config.admin_key or config.api_keys_file
    return f'rekindle chat "{QUESTION}"{address}{" --api-key KEY" if keyed else ""}'
