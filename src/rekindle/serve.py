"""A running server: models pulled and loaded, then HTTP until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape
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

GOODBYE_S = 1
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
    with _bind(config) as door:  # before anything slow: a taken port is known at once
        models = {
            served: pull(name, models_dir=config.models_dir, progress=progress_on(console))
            for served, name in _served_names(config).items()
        }
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, models, door, console))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def _bind(config: Config) -> socket.socket:
    """Take the port; nobody is let in before the models are loaded."""
    door = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((config.host, config.port))
    except OSError as error:
        door.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port}: {error.strerror}; "
            "choose others with --host and --port"
        ) from None
    return door


def _refuse_open_door(config: Config) -> None:
    if config.host not in LOOPBACK and not config.api_key and not config.no_auth:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or say --no-auth if that is what you want"
        )


def _served_names(config: Config) -> dict[str, str]:
    """The models by what clients call them, in the order they were asked for."""
    named: dict[str, str] = {}
    for name in config.model or (DEFAULT_MODEL,):
        served = _served_name(name)
        if named.setdefault(served, name) != name:
            raise ConfigError(
                f"{named[served]} and {name} would both be called {served}: rename one of the files"
            )
    return named


def _served_name(name: str) -> str:
    """The name it was asked for by, or its file's stem."""
    path = Path(name)
    return path.stem if path.suffix == ".gguf" and path.exists() else name


async def _serve(
    config: Config, models: dict[str, Path], door: socket.socket, console: Console
) -> None:
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
                log_config=None,
                log_level="warning" if config.log_level == "info" else config.log_level,
                timeout_graceful_shutdown=DRAIN_S,
                lifespan="on",
            )
        )
        door.listen(server.config.backlog)
        _announce(config, runtimes, door, console)
        with _signals_kept_quiet():
            await server.serve(sockets=[door])
        await say_goodbye(server)


async def say_goodbye(server: uvicorn.Server) -> None:
    """Uvicorn cancels what did not finish in time, and does not wait for its last words."""
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=GOODBYE_S)


@contextlib.contextmanager
def _signals_kept_quiet() -> Iterator[None]:
    """Uvicorn repeats the signal that stopped it; by then there is nothing left to stop."""
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


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


def _announce(
    config: Config, runtimes: list[Runtime], door: socket.socket, console: Console
) -> None:
    for runtime in runtimes:
        assert runtime.ready is not None
        context = f"context {runtime.ready.context_tokens} tokens"
        console.print(
            f"[bold]{escape(runtime.name)}[/] is loaded: {context}, "
            f"up to {config.parallel} turns at once" + (", exact mode" if config.exact else ""),
            soft_wrap=True,
        )
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = escape(f"http://{host}:{door.getsockname()[1]}")
    console.print(
        f"Serving on [bold]{url}/v1[/] (interface: {url}/docs). Stop with Ctrl-C.", soft_wrap=True
    )
