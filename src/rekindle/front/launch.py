"""A running server: settings checked, models loaded, then HTTP until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from msgspec import structs
from rich.console import Console

from rekindle.api.base.models import (
    ServedModels,
    described_tools,
    preset_models,
    served_embedders,
    served_names,
)
from rekindle.config import Config
from rekindle.errors import ConfigError, ModelError
from rekindle.front.announcement import announce
from rekindle.front.app import api_keys, build_app
from rekindle.front.warmup import warm
from rekindle.http.auth import LOOPBACK, Keys
from rekindle.http.drain import DRAIN_S, Drain, Server
from rekindle.http.logs import log_to
from rekindle.http.protocol import HttpProtocol
from rekindle.models.gguf import check_gguf
from rekindle.models.progress import progress_bar, progress_on
from rekindle.models.pull import find_projector, pull
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import KV_TYPES
from rekindle.worker.client import RuntimeClient

log = logging.getLogger("rekindle")

LAST_WRITES_S = 1


def serve(config: Config, console: Console) -> None:
    """Run until a signal stops it."""
    check_settings(config)
    log_to(console, config.log_level)
    keys = api_keys(config)
    with contextlib.ExitStack() as stack:
        # Before anything slow: a taken port is an error at once.
        listeners = [stack.enter_context(bind(config, port)) for port in _ports(config)]
        files = fetch(config, console)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, files, keys, listeners, console))


def _ports(config: Config) -> list[int]:
    return [config.port, *([] if config.ollama_port is None else [config.ollama_port])]


def check_settings(config: Config) -> None:
    """Refuse settings that contradict each other, before anything is opened or fetched."""
    keyed = bool(config.api_key or config.admin_key or config.api_keys_file)
    if config.host not in LOOPBACK and not keyed and not config.no_auth:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or say --no-auth if that is what you want"
        )
    if config.mmproj is not None and len(config.model) > 1:
        raise ConfigError(
            "`--mmproj` is the projector of one model: give one --model, or put each projector "
            "beside its model"
        )
    _check_adapter(config)
    served_embedders(config)
    for folder in config.media_folder:
        if not folder.is_dir():
            raise ConfigError(f"`--media-folder`: there is no folder {folder}")
    preset_models(config)
    for name, preset in config.projects.items():
        described_tools(name, preset)
        if keyed and preset.cache.warm_on_startup and not preset.shared:
            raise ConfigError(
                f"project {name} would belong to nobody, because each API key has a cache of its "
                "own: say `shared: true` in the project to prepare it for all of them"
            )


def _check_adapter(config: Config) -> None:
    if config.adapter is None:
        return
    if len(config.model) != 1:
        raise ConfigError("`--adapter` is of one model: give that one as --model, and no other")
    if not config.adapter.is_dir():
        raise ConfigError(f"`--adapter`: there is no folder {config.adapter}")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model is loaded from."""

    path: Path
    mmproj: Path | None = None
    adapter: Path | None = None
    requires_vision: bool = True  # the projector was asked for, and not merely found
    is_embedder: bool = False  # it makes vectors or scores, and no text


def fetch(config: Config, console: Console) -> dict[str, ModelFiles]:
    """The models' files by served name; those that are missing are pulled."""
    chat = {served: _files(config, name, console) for served, name in served_names(config).items()}
    embedders = {
        served: ModelFiles(_pull(config, name, console), is_embedder=True)
        for served, name in served_embedders(config).items()
    }
    return chat | embedders


def _pull(config: Config, name: str, console: Console) -> Path:
    return pull(name, models_dir=config.models_dir, progress=progress_on(console))


def _files(config: Config, name: str, console: Console) -> ModelFiles:
    path = _pull(config, name, console)
    if path.is_dir():
        _refuse_projector(config, name)
        return ModelFiles(path, adapter=config.adapter)
    if config.vlm is False:
        return ModelFiles(path, adapter=config.adapter)
    if config.mmproj is not None:
        check_gguf(config.mmproj)
        return ModelFiles(path, config.mmproj, config.adapter)
    projector = find_projector(
        name,
        path,
        models_dir=config.models_dir,
        progress=progress_on(console),
        required=bool(config.vlm),
    )
    return ModelFiles(path, projector, config.adapter, requires_vision=bool(config.vlm))


def _refuse_projector(config: Config, name: str) -> None:
    """Only GGUF models have projectors."""
    if config.vlm or config.mmproj is not None:
        raise ModelError(
            f"{name} is a folder, and those serve text alone. Leave --vlm and --mmproj out, or "
            "give a GGUF model."
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


def bind(config: Config, port: int) -> socket.socket:
    """Take a port; connections are accepted once the models are loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host} port {port}: {error.strerror}; "
            "choose others with --host and --port (--ollama-port)"
        ) from None
    return listener


async def _serve(
    config: Config,
    files: dict[str, ModelFiles],
    keys: Keys,
    listeners: list[socket.socket],
    console: Console,
) -> None:
    async with open_models(config, files, console) as models:
        server = build_server(config, models, keys)
        for listener in listeners:
            listener.listen(server.config.backlog)
        announce(config, models.all, [each.getsockname()[1] for each in listeners], console)
        with _signals_ignored():
            await run(server, *listeners)


@asynccontextmanager
async def open_models(
    config: Config, files: dict[str, ModelFiles], console: Console
) -> AsyncIterator[ServedModels]:
    """The models loaded and the presets prepared; closed on every way out."""
    usual = next((bits for bits, name in KV_TYPES.items() if name == config.kv_type), None)
    if usual is not None:
        log.info("KV cells are %s (%d bits)", config.kv_type, usual)
    if config.kv_bits not in (None, usual):
        start = config.kv_quantization_start
        log.info("KV cells have %d bits after %d tokens", config.kv_bits, start)
    runtimes = {name: _runtime(name, config, files) for name in files}
    async with contextlib.AsyncExitStack() as stack:
        for runtime in runtimes.values():
            stack.push_async_callback(runtime.stop)
            await _start(runtime, console)
        models = ServedModels(
            config,
            [runtimes[name] for name, each in files.items() if not each.is_embedder],
            [runtimes[name] for name, each in files.items() if each.is_embedder],
        )
        model_names = preset_models(config)
        await warm(
            config.projects,
            lambda name: models.runtime(model_names[name]),
            console,
            exact=config.exact,
            normalise=config.normalise,
        )
        yield models


def _runtime(name: str, config: Config, files: dict[str, ModelFiles]) -> RuntimeClient:
    loads = {each: _load(own, config) for each, own in files.items()}
    served = [each.files for each in loads.values() if not each.is_embedder]
    load = structs.replace(loads[name], served=served)
    return RuntimeClient(name, load, queue=config.queue, step_timeout_s=config.step_timeout)


def _load(own: ModelFiles, config: Config) -> LoadModel:
    return LoadModel(
        path=str(own.path),
        mmproj=str(own.mmproj) if own.mmproj else None,
        adapter=str(own.adapter) if own.adapter else None,
        requires_vision=own.requires_vision,
        is_embedder=own.is_embedder,
        settings=config.runtime,
    )


def build_server(config: Config, models: ServedModels, keys: Keys) -> Server:
    @asynccontextmanager
    async def already_open() -> AsyncIterator[ServedModels]:
        yield models

    drain = Drain()
    return Server(
        uvicorn.Config(
            build_app(config, already_open, keys, drain),
            http=HttpProtocol,
            log_config=None,
            log_level="warning" if config.log_level == "info" else config.log_level,
            timeout_graceful_shutdown=DRAIN_S,
            lifespan="on",
        ),
        drain,
    )


async def run(server: Server, *listeners: socket.socket) -> None:
    """Serve until the server is stopped, and let cancelled responses send their last bytes."""
    await server.serve(sockets=list(listeners))
    await finish_responses(server)


async def finish_responses(server: uvicorn.Server) -> None:
    """Uvicorn cancels what did not finish in time, and does not wait for it to end."""
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=LAST_WRITES_S)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """Uvicorn raises the signal that stopped it again, when there is nothing left to stop."""
    before = {sig: signal.signal(sig, signal.SIG_IGN) for sig in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


async def _start(runtime: RuntimeClient, console: Console) -> None:
    with progress_bar(f"loading {runtime.name}", console) as on_progress:
        await runtime.start(lambda fraction: on_progress(fraction, 1))
