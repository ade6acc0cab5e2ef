"""Launches a server: checks the settings, loads the models and serves HTTP.

`serve` blocks until a signal. `EmbeddedServer` runs in a thread of another program.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from rich.console import Console
from rich.markup import escape

from rekindle.api.base.models import (
    ServedModels,
    alias_models,
    described_tools,
    preset_models,
)
from rekindle.api.base.specs import model_specs
from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.front.announcement import announce
from rekindle.front.app import api_keys, build_app
from rekindle.front.gpus import unused_gpus
from rekindle.front.library import ModelLibrary, find_files
from rekindle.front.operating import DrainReport, OnDrain, Reloader, Server
from rekindle.front.warmup import warm
from rekindle.http.auth import LOOPBACK, Keys
from rekindle.http.body import LIMITS
from rekindle.http.logs import log_to
from rekindle.http.middleware import Drain
from rekindle.http.protocol import HttpProtocol
from rekindle.models.catalogue import locate
from rekindle.models.progress import progress_bar, progress_on
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import KV_TYPES
from rekindle.worker.client import RuntimeClient
from rekindle.worker.pool import ModelPool

log = logging.getLogger("rekindle")

MAX_OPEN_FILES = 65_536

T = TypeVar("T")


def serve(config: Config, console: Console, load: Callable[[], Config] | None = None) -> None:
    """Serve until a signal stops the server. `load` reads the settings again, at SIGHUP."""
    ignore_hangup()
    check_settings(config)
    log_to(console, config.log_level, config.log_format, config.log_file, config.log_file_size)
    raise_file_limit()
    keys = api_keys(config)
    ports = [config.port] if config.uds is None else []
    ports += [] if config.ollama_port is None else [config.ollama_port]
    with contextlib.ExitStack() as stack:
        # Bind first, so that a port in use is reported before anything slow.
        listeners = [stack.enter_context(bind(config, port)) for port in ports]
        if config.uds is not None:
            listeners.insert(0, stack.enter_context(bound_socket(config.uds)))
        loads = fetch(config, console)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve(config, loads, keys, listeners, console, load or (lambda: config)))


def check_settings(config: Config) -> None:
    """Reject settings that contradict each other, before opening or fetching anything."""
    keyed = bool(config.api_key or config.admin_key or config.api_keys_file)
    if not keyed and not config.no_auth:
        _check_reach(config)
    if config.mmproj is not None and len(config.model) > 1:
        raise ConfigError(
            "`--mmproj` is the projector of one model: give one --model, or put each projector "
            "next to its model"
        )
    if config.adapter and len(config.model) != 1:
        raise ConfigError(
            "`--adapter` is for one model: give exactly one --model, or list the adapters of each "
            "model under `models` in rekindle.yaml"
        )
    if config.llama_lib is not None and not config.llama_lib.is_file():
        raise ConfigError(
            f"`llama_lib`: there is no file {config.llama_lib}: run `rekindle build-gpu` again, or "
            "remove the setting to use the installed library"
        )
    for folder in config.media_folder:
        if not folder.is_dir():
            raise ConfigError(f"`--media-folder`: there is no folder {folder}")
    _check_listening(config)
    _check_models(config)
    alias_models(config)
    preset_models(config)
    for name, preset in config.projects.items():
        described_tools(name, preset)
        if keyed and preset.cache.warm_on_startup and not preset.shared:
            raise ConfigError(
                f"project {name} would belong to nobody, because each API key has its own cache: "
                "say `shared: true` in the project to prepare it for all of them"
            )


def _check_listening(config: Config) -> None:
    """Check the socket's settings, and load the certificate once, so that a wrong file is a
    sentence instead of a traceback."""
    if config.uds is not None and {"host", "port"} & config.given.keys():
        raise ConfigError("`--uds` replaces the port: leave --host and --port out")
    if config.tls_cert is None:
        if config.tls_key is not None:
            raise ConfigError("`--tls-key` is the key of a certificate: give --tls-cert, too")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one, too
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot use the certificate {config.tls_cert} of `--tls-cert` with its key: {reason}. "
            "Give PEM files that belong together, with a key that has no password"
        ) from None


def _check_models(config: Config) -> None:
    """Find wrong names and missing files of models before any request names them."""
    for spec in model_specs(config).values():
        if not spec.at_start:
            locate(spec.source, config.models_dir)
        for flag, file in (("mmproj", spec.mmproj), ("adapter", spec.adapter)):
            if file is not None and not spec.at_start and not file.exists():
                raise ConfigError(f"the model {spec.name}: there is no {flag} {file}")


def _check_reach(config: Config) -> None:
    """Reject an open server that others than the users of this machine can reach."""
    if config.host not in LOOPBACK:
        raise ConfigError(
            f"listening on {config.host} without an API key would let anybody on the network in: "
            "give --api-key KEY, or --no-auth to allow everybody"
        )
    if config.allowed_host:
        raise ConfigError(
            f"`--allowed-host {config.allowed_host[0]}` without an API key would let in anybody "
            "whom the proxy lets in: give --api-key KEY, or --no-auth if the proxy asks for keys"
        )


def raise_file_limit() -> None:
    """Raise the soft limit on open files, because each client needs one.

    A shell's default is 1024, and beyond it every new connection would be reset.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    wanted = MAX_OPEN_FILES if hard == unlimited else min(MAX_OPEN_FILES, hard)
    if soft != unlimited and soft < wanted:
        with contextlib.suppress(ValueError, OSError):  # the kernel allows less
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def bind(config: Config, port: int) -> socket.socket:
    """Bind a port. Connections are accepted once the models are loaded."""
    listener = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, port))
    except OSError as error:
        listener.close()
        flag = "--ollama-port" if port == config.ollama_port else "--port"
        where = f"cannot listen on {config.host} port {port}"
        if error.errno == errno.EADDRINUSE:
            problem = f"another program uses it. Stop that program, or choose another {flag}"
        else:
            problem = f"{error.strerror}. Choose another --host or {flag}"
        raise ConfigError(f"{where}: {problem}") from None
    return listener


def named_models(config: Config) -> list[str]:
    """The models that are loaded at the start, as the operator named them."""
    return [spec.source for spec in model_specs(config).values() if spec.at_start]


@contextlib.contextmanager
def bound_socket(path: Path) -> Iterator[socket.socket]:
    """Bind a Unix socket, which the user and the group may use. It is removed at the end."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and not _has_listener(path):
            path.unlink()  # a server that was killed left it
        before = os.umask(0o117)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            problem = "another program uses it, or it is another kind of file. Choose another --uds"
        else:
            problem = f"{error.strerror or error}. Choose another --uds"
        raise ConfigError(f"cannot listen on {path}: {problem}") from None
    with listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _has_listener(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


def ignore_hangup() -> None:
    """Do not let a closed terminal end the server. From its start on, SIGHUP reloads settings."""
    if hasattr(signal, "SIGHUP") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def fetch(config: Config, console: Console) -> dict[str, LoadModel]:
    """Pull missing files of the models that are loaded at the start. Returns what to load, by
    name."""
    progress = progress_on(console)
    return {
        name: find_files(spec, config, progress)
        for name, spec in model_specs(config).items()
        if spec.at_start
    }


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


async def _serve(
    config: Config,
    loads: dict[str, LoadModel],
    keys: Keys,
    listeners: list[socket.socket],
    console: Console,
    load: Callable[[], Config],
) -> None:
    async with open_models(config, loads, console) as models:
        report = DrainReport(console, lambda: sum(runtime.turns for runtime in models.all))
        server = build_server(config, models, keys, report)
        app, drain = server.app, server.drain
        reloader = Reloader(config, lambda: _checked(load()), keys=keys, app=app, drain=drain)
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.reload)
        for listener in listeners:
            listener.listen(server.config.backlog)
        if hint := unused_gpus(
            (each.loaded for each in models.all_loaded), own_library=config.llama_lib is not None
        ):
            console.print(f"[yellow]{escape(hint)}[/]", highlight=False, soft_wrap=True)
        ports = [each.getsockname()[1] for each in listeners if each.family != socket.AF_UNIX]
        on_request = [each.name for each in models.all if each not in models.all_loaded]
        announce(config, models.all_loaded, ports, console, on_request=on_request)
        await server.serve(sockets=listeners)
        report.end()
        if drain.deadline_s is not None:
            log.info("stopping the models, which store what they hold")


def _checked(config: Config) -> Config:
    check_settings(config)
    return config


@contextlib.asynccontextmanager
async def open_models(
    config: Config, loads: dict[str, LoadModel], console: Console
) -> AsyncIterator[ServedModels]:
    """Load the models and prepare the presets. The models stop when the context ends."""
    default_bits = next((bits for bits, name in KV_TYPES.items() if name == config.kv_type), None)
    if default_bits is not None:
        log.info("KV cache type: %s (%d bits)", config.kv_type, default_bits)
    if config.kv_bits not in (None, default_bits):
        start = config.kv_quantization_start
        log.info("KV cache of turns with more than %d tokens: %d bits", start, config.kv_bits)
    specs = model_specs(config)
    pool = ModelPool(config.max_memory)
    library = ModelLibrary(config, pool, loads)
    runtimes = {name: library.offer(spec) for name, spec in specs.items()}
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        for name in specs:
            if name in loads:
                await _start(pool, runtimes[name], console)
        models = ServedModels(
            config,
            [runtimes[name] for name, spec in specs.items() if spec.kind == "text"],
            [runtimes[name] for name, spec in specs.items() if spec.kind != "text"],
            pool=pool,
            specs=specs,
            offer=library.offer,
        )
        await warm(config, models, console)
        pool.start_upkeep()
        yield models


async def _start(pool: ModelPool, runtime: RuntimeClient, console: Console) -> None:
    with progress_bar(f"loading {runtime.name}", console) as on_progress:
        await pool.load(runtime, lambda fraction: on_progress(fraction, 1))


def build_server(
    config: Config,
    models: ServedModels,
    keys: Keys,
    on_drain: OnDrain = lambda _requests, _left_s: None,
) -> Server:
    drain = Drain(config.drain_timeout)
    app = build_app(config, models, keys, drain)
    return Server(
        uvicorn.Config(
            app,
            http=HttpProtocol,
            access_log=False,  # the application logs every request
            ws="websockets-sansio",
            ws_max_size=LIMITS.body_bytes,
            log_config=None,
            log_level="debug" if config.log_level == "debug" else "error",
            timeout_graceful_shutdown=2,  # to close connections; requests are drained before
            lifespan="on",
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        ),
        app,
        drain,
        on_drain,
    )


class EmbeddedServer:
    """Runs models in a thread of the calling program, and serves HTTP if `serve` is called."""

    def __init__(self, config: Config) -> None:
        console = Console(stderr=True)
        loads = fetch(config, console)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self._http: tuple[Server, Future[None]] | None = None
        self.base_url: str | None = None  # while it serves HTTP
        try:
            self.models: ServedModels = self.submit(
                self._stack.enter_async_context(open_models(config, loads, console))
            ).result()
        except BaseException:
            self._stop_loop()
            raise

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopping.wait())

    def _stop_loop(self) -> None:
        """Stop the loop, which cancels its tasks and waits for them."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread of the models."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        if self._http is not None:
            server, ended = self._http
            server.should_exit = True
            ended.result()
        self.submit(self._stack.aclose()).result()
        self._stop_loop()

    def serve(self, config: Config) -> None:
        """Serve HTTP in the background, with the same models and cache."""
        if self._http is not None:
            raise ConfigError(f"this engine already serves on {self.base_url}")
        keys = api_keys(config)
        listener = bind(config, config.port)
        server = build_server(config, self.models, keys)
        listener.listen(server.config.backlog)
        self._http = server, self.submit(server.serve(sockets=[listener]))
        host, port = listener.getsockname()[:2]
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
