"""A loaded model inside a Python program, and the thread whose event loop talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Coroutine, Generator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from rich.console import Console

from rekindle.api.openai.chat import chat_asks
from rekindle.api.openai.schema import ChatRequest
from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.protocol.events import Delta, TextDelta
from rekindle.server.auth import Keys
from rekindle.server.launch import Server, answer, bind, build_server, fetch, open_service
from rekindle.server.service import Service
from rekindle.server.turns import Turns

OPEN_SALT = b""  # whoever runs the program needs no key

T = TypeVar("T")
Said = SimpleQueue[str | None]  # pieces of a reply; None: there are no more


class House:
    """Loaded when it is built; `close` ends the model and the thread."""

    def __init__(self, config: Config) -> None:
        console = Console(stderr=True)
        models = fetch(config, console)
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = contextlib.AsyncExitStack()
        self._serving: tuple[Server, Future[None], str] | None = None
        try:
            self._service: Service = self._begin(
                self._stack.enter_async_context(open_service(config, models, console))
            ).result()
        except BaseException:
            self._end_loop()
            raise

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        if self._serving is not None:
            server, served, _ = self._serving
            server.should_exit = True
            served.result()
        self._begin(self._stack.aclose()).result()
        self._end_loop()

    def _end_loop(self) -> None:
        self._begin(_cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    # -- talking -------------------------------------------------------------------------------

    def say(self, request: ChatRequest) -> Generator[str, None, None]:
        """The reply's pieces; leaving early cancels the turn."""
        said: Said = SimpleQueue()
        told = self._begin(self._answer(request, said))
        try:
            while (piece := said.get()) is not None:
                yield piece
            told.result()
        finally:
            told.cancel()

    async def _answer(self, request: ChatRequest, said: Said) -> None:
        try:
            runtime = self._service.runtime(request.model)
            asks = chat_asks(request, self._config, OPEN_SALT)
            with contextlib.closing(Turns(runtime, asks)) as turns:
                while turns.open:
                    _, event = await turns.next()
                    if isinstance(event, Delta) and isinstance(event.part, TextDelta):
                        said.put(event.part.text)
        finally:
            said.put(None)

    # -- serving -------------------------------------------------------------------------------

    @property
    def base_url(self) -> str | None:
        return self._serving[2] if self._serving else None

    def serve(self, config: Config) -> None:
        if self._serving is not None:
            raise ConfigError(f"this engine already serves on {self.base_url}")
        keys = Keys.of(config)
        door = bind(config)
        server = build_server(config, self._service, keys)
        door.listen(server.config.backlog)
        self._serving = (server, self._begin(answer(server, door)), _url(door))


async def _cancel_all() -> None:
    """What is still going on in this loop comes to its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _url(door: socket.socket) -> str:
    host, port = door.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"
