"""Provides the Python API: `Engine` runs a model inside a program, for chat or to serve HTTP."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, overload

from pydantic import ValidationError
from rich.console import Console

from rekindle.api.base import fields as validation
from rekindle.api.base.reply import Turns
from rekindle.api.base.request import RequestBuilder, load_media, with_system
from rekindle.api.openai.request import chat_requests
from rekindle.api.openai.schema import ChatRequest
from rekindle.config import Config, load_config
from rekindle.errors import BadRequest, ConfigError
from rekindle.front import launch
from rekindle.front.launch import EmbeddedServer
from rekindle.http.auth import OPEN_SALT, Caller
from rekindle.media.loader import MediaLoader
from rekindle.protocol.events import Delta, TextDelta
from rekindle.worker.client import RuntimeClient

DTYPES = ("auto", "bf16", "f16")

Texts = SimpleQueue[str | None]  # pieces of a reply; None marks the end


class EngineConfig:
    """The settings of an engine. `model_id` is what `rekindle serve --model` takes.

    All other settings of the server can be given by name: `force_cache`, `max_model_len`,
    `kv_fraction`, `fp8_kvcache` and so on. The rest comes from `rekindle.yaml`, `REKINDLE_*` or the
    defaults. `flash_context` is the server's `context_cache`: whether state is reused at all.
    """

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        flash_context: bool | None = None,
        **settings: Any,
    ) -> None:
        model = None if model_id is None else [str(model_id)]
        given = {"model": model, "context_cache": flash_context, **settings}
        self.settings = load_config(given, spell=lambda name: f"`{name}`")


class Engine:
    """A model in its own process, loaded at the first use.

    `dtype` exists for compatibility and changes nothing: the weights are those of the GGUF file.
    `fp8_kvcache` chooses the type of the KV cache.
    """

    def __init__(self, config: EngineConfig, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype takes one of {', '.join(DTYPES)}, not {dtype!r}")
        self._config = config.settings
        launch.check_settings(self._config)
        self._lock = threading.Lock()
        self._server: EmbeddedChat | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and the model, if they run. The next use starts them again."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close()

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        session_id: str | None = None,
        stream: Literal[False] = False,
        **options: Any,
    ) -> str: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        session_id: str | None = None,
        *,
        stream: Literal[True],
        **options: Any,
    ) -> Generator[str, None, None]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        session_id: str | None = None,
        stream: bool = False,
        **options: Any,
    ) -> str | Generator[str, None, None]:
        """Return the reply, or with `stream` an iterator over its pieces as they are generated.

        `options` are the fields of POST /v1/chat/completions, with the same defaults. Raises the
        errors of `rekindle.errors`.
        """
        fields = {"messages": [dict(message) for message in messages], "session_id": session_id}
        request = _request({**fields, **options})
        pieces = self._open().chat(request)
        return pieces if stream else "".join(pieces)

    def start_server(self, port: int = 8000, background: bool = False) -> None:
        """Serve HTTP, on 127.0.0.1 unless the config names a host.

        In the foreground, it blocks until a signal stops it, as `rekindle serve` does. In the
        background, it returns immediately, and `chat` and the server share the model and the cache.
        """
        config = replace(self._config, port=port)
        if background:
            self._open().serve(config)
        else:
            self.close()  # the server loads the model itself
            launch.serve(config, Console(stderr=True))

    @property
    def base_url(self) -> str | None:
        return self._server.base_url if self._server else None

    def _open(self) -> EmbeddedChat:
        with self._lock:
            if self._server is None:
                self._server = EmbeddedChat(self._config)
            return self._server


def _request(fields: dict[str, Any]) -> ChatRequest:
    """Validate the fields like an HTTP request, except that an unknown field is an error."""
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation.explain(error.errors()) from None
    if unknown := fields.keys() - ChatRequest.model_fields.keys():
        raise TypeError(f"chat() has no option {', '.join(sorted(unknown))}")
    if (request.n or 1) > 1:
        raise BadRequest("chat() returns one reply: leave `n` out", param="n")
    if request.tools and request.tool_choice != "none":
        raise BadRequest("chat() returns text: call tools over HTTP", param="tools")
    return request


class EmbeddedChat(EmbeddedServer):
    """An embedded server that also answers chats of the calling program, without HTTP."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._media = MediaLoader(allowed=config.media_allow, folders=config.media_folder)

    def close(self) -> None:
        self.submit(self._media.close()).result()
        super().close()

    def chat(self, request: ChatRequest) -> Generator[str, None, None]:
        """Yield the reply in pieces. Closing the generator early cancels the turn."""
        texts: Texts = SimpleQueue()
        turn = self.submit(self._generate(request, texts))
        try:
            while (text := texts.get()) is not None:
                yield text
            turn.result()
        finally:
            turn.cancel()

    async def _generate(self, request: ChatRequest, texts: Texts) -> None:
        try:
            runtime = self.models.runtime(request.model)
            async with self.models.pool.use(runtime):
                await self._generate_with(runtime, request, texts)
        finally:
            texts.put(None)

    async def _generate_with(
        self, runtime: RuntimeClient, request: ChatRequest, texts: Texts
    ) -> None:
        messages = with_system(request.messages, self.models.system_of(runtime))
        chat = await load_media(self._media, runtime, messages, request.resize, OPEN_SALT)
        caller = Caller(OPEN_SALT, admin=True)
        builder = RequestBuilder(self.models.config_of(runtime), caller)
        requests = chat_requests(request, builder, chat)
        with contextlib.closing(Turns(runtime, requests)) as turns:
            while turns.open:
                _, event = await turns.next()
                if isinstance(event, Delta) and isinstance(event.part, TextDelta):
                    texts.put(event.part.text)
