"""A running server: models pulled and loaded, then HTTP until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rekindle.api.app import build_app
from rekindle.api.auth import LOOPBACK
from rekindle.api.service import Service
from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.models.progress import progress_on
from rekindle.models.pull import pull
from rekindle.models.registry import DEFAULT_MODEL
from rekindle.runtime.process import Runtime
from rekindle.runtime.wire import Load

log = logging.getLogger("rekindle")

DRAIN_S = 10  # what streams in flight get to finish after a request to stop


def serve(config: Config, console: Console) -> None:
    """Run until a signal says stop."""
    _refuse_open_door(config)
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(message)s",
        datefmt="%H:%M:%S",
        handlers=[RichHandler(console=console, show_path=False)],
    )
    models = {
        _served_name(name): pull(name, models_dir=config.models_dir, progress=progress_on(console))
        for name in config.model or (DEFAULT_MODEL,)
    }
    asyncio.run(_serve(config, models, console))


def _refuse_open_door(config: Config) -> None:
    if config.host not in LOOPBACK and not config.api_key and not config.no_auth:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or say --no-auth if that is what you want"
        )


def _served_name(name: str) -> str:
    """What clients call the model: the name it was asked for by, or its file's stem."""
    path = Path(name)
    return path.stem if path.suffix == ".gguf" and path.exists() else name


async def _serve(config: Config, models: dict[str, Path], console: Console) -> None:
    runtimes = [
        Runtime(name, _load(config, path), queue=config.queue) for name, path in models.items()
    ]
    async with contextlib.AsyncExitStack() as stack:
        for runtime in runtimes:
            stack.push_async_callback(runtime.stop)
            await _start(runtime, console)
        service = Service(config, runtimes)

        @asynccontextmanager
        async def open_service() -> AsyncIterator[Service]:
            yield service

        server = uvicorn.Server(
            uvicorn.Config(
                build_app(config, open_service),
                host=config.host,
                port=config.port,
                log_config=None,
                log_level="warning" if config.log_level == "info" else config.log_level,
                timeout_graceful_shutdown=DRAIN_S,
                lifespan="on",
            )
        )
        _announce(config, runtimes, console)
        await server.serve()


def _load(config: Config, path: Path) -> Load:
    return Load(
        path=str(path),
        parallel=config.parallel,
        context_tokens=config.max_model_len,
        kv_fraction=config.kv_fraction,
        threads=config.threads or default_threads(),
        gpu_layers=config.gpu_layers,
        ram_bytes=config.ram_cache,
    )


def default_threads() -> int:
    """The cores this process may use, up to where more threads stop helping."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(usable or 4, 16)


async def _start(runtime: Runtime, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(f"loading {runtime.name}", total=1.0)
        await runtime.start(lambda fraction: bars.update(task, completed=fraction))


def _announce(config: Config, runtimes: list[Runtime], console: Console) -> None:
    for runtime in runtimes:
        assert runtime.ready is not None
        console.print(
            f"[bold]{runtime.name}[/] is loaded: context {runtime.ready.context_tokens} tokens, "
            f"up to {config.parallel} turns at once" + (", exact mode" if config.exact else "")
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    console.print(
        f"Serving on [bold]http://{host}:{config.port}/v1[/] "
        f"(interface: http://{host}:{config.port}/docs). Stop with Ctrl-C."
    )
