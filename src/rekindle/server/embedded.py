"""A server inside a Python program: loaded models, and the thread whose event loop runs them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from rich.console import Console

from rekindle.api.openai.requests import chat_requests
from rekindle.api.openai.schema import ChatRequest
from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.protocol.events import Delta, TextDelta
from rekindle.server.auth import Keys
from rekindle.server.launch import Server, bind, build_server, fetch, open_service, run
from rekindle.server.service import Service
from rekindle.server.turns import Turns

OPEN_SALT = b""  # the program that runs the server needs no key

T = TypeVar("T")
Texts = SimpleQueue[str | None]  # pieces of a reply; None: there are no more


@dataclass(frozen=True, slots=True)
class HttpServer:
    """HTTP that is being served in the background."""

    server: Server
    ended: Future[None]
    base_url: str

    def stop(self) -> None:
        self.server.should_exit = True
        self.ended.result()


class EmbeddedServer:
    """Loads its models when it is built; `close` ends them and the thread."""

    def __init__(self, config: Config) -> None:
        console = Console(stderr=True)
        models = fetch(config, console)
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self._http: HttpServer | None = None
        try:
            self._service: Service = self._submit(
                self._stack.enter_async_context(open_service(config, models, console))
            ).result()
        except BaseException:
            self._end_loop()
            raise

    def close(self) -> None:
        if self._http is not None:
            self._http.stop()
        self._submit(self._stack.aclose()).result()
        self._end_loop()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._submit(_cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def chat(self, request: ChatRequest) -> Generator[str, None, None]:
        """The reply's text in pieces; closing the generator early cancels the turn."""
        texts: Texts = SimpleQueue()
        turn = self._submit(self._generate(request, texts))
        try:
            while (text := texts.get()) is not None:
                yield text
            turn.result()
        finally:
            turn.cancel()

    async def _generate(self, request: ChatRequest, texts: Texts) -> None:
        try:
            runtime = self._service.runtime(request.model)
            requests = chat_requests(request, self._config, OPEN_SALT)
            with contextlib.closing(Turns(runtime, requests)) as turns:
                while turns.open:
                    _, event = await turns.next()
                    if isinstance(event, Delta) and isinstance(event.part, TextDelta):
                        texts.put(event.part.text)
        finally:
            texts.put(None)

    @property
    def base_url(self) -> str | None:
        return self._http.base_url if self._http else None

    def serve(self, config: Config) -> None:
        """Serve HTTP in the background, from the same models and cache."""
        if self._http is not None:
            raise ConfigError(f"this engine already serves on {self.base_url}")
        keys = Keys.of(config)
        listener = bind(config)
        server = build_server(config, self._service, keys)
        listener.listen(server.config.backlog)
        ended = self._submit(run(server, listener))
        self._http = HttpServer(server, ended, _url(listener))


async def _cancel_all() -> None:
    """Cancel every task of this loop and wait for their ends."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
