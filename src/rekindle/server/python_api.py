"""The Python API: `Engine` runs a model inside a program, for chat or to serve HTTP."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

from pydantic import ValidationError
from rich.console import Console

from rekindle.api import validation
from rekindle.api.openai.schema import ChatRequest
from rekindle.config import load_config
from rekindle.errors import BadRequest, ConfigError
from rekindle.server import served_models
from rekindle.server.embedded import EmbeddedServer
from rekindle.server.launch import serve

DTYPES = ("auto", "bf16", "f16")


class EngineConfig:
    """How to run a model. `model_id` is what `rekindle serve --model` takes.

    Every other setting of the server can be given by its name: `force_cache`, `max_model_len`,
    `kv_fraction`, `fp8_kvcache` and so on. What is not given comes from `rekindle.yaml` and
    `REKINDLE_*`, or is the default. `flash_context` is the server's
    `context_cache`: whether state is reused at all.
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
    """A model in a process of its own, loaded when it is first needed.

    `dtype` is accepted for programs that name one: the weights are what the GGUF file holds, and
    "bf16", "f16" and "auto" all mean that. `fp8_kvcache` decides about the KV cells.
    """

    def __init__(self, config: EngineConfig, dtype: str = "auto") -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype takes one of {', '.join(DTYPES)}, not {dtype!r}")
        self._config = config.settings
        served_models.check_settings(self._config)
        self._lock = threading.Lock()
        self._server: EmbeddedServer | None = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and the model, if they run; the next use starts them again."""
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
        """The reply, or with `stream` an iterator over its pieces as they come.

        `options` are the fields of POST /v1/chat/completions, with the same defaults. What is
        wrong raises one of `rekindle.errors`.
        """
        fields = {"messages": [dict(message) for message in messages], "session_id": session_id}
        request = _request({**fields, **options})
        pieces = self._open().chat(request)
        return pieces if stream else "".join(pieces)

    def start_server(self, port: int = 8000, background: bool = False) -> None:
        """Serve HTTP, on 127.0.0.1 unless the config names a host.

        In the foreground it blocks until a signal says stop, as `rekindle serve` does. In the
        background it returns at once, and `chat` and the server share model and cache.
        """
        config = replace(self._config, port=port)
        if background:
            self._open().serve(config)
        else:
            self.close()  # the server loads the model for itself
            serve(config, Console(stderr=True))

    @property
    def base_url(self) -> str | None:
        """The address of the server in the background."""
        return self._server.base_url if self._server else None

    def _open(self) -> EmbeddedServer:
        with self._lock:
            if self._server is None:
                self._server = EmbeddedServer(self._config)
            return self._server


def _request(fields: dict[str, Any]) -> ChatRequest:
    """The body of the same request over HTTP, except that an unknown keyword is an error."""
    try:
        request = ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise validation.explain(error.errors()) from None
    if unknown := fields.keys() - ChatRequest.model_fields.keys():
        raise TypeError(f"chat() has no option {', '.join(sorted(unknown))}")
    if (request.n or 1) > 1:
        raise BadRequest("chat() gives one reply: leave `n` out", param="n")
    if request.tools and request.tool_choice != "none":
        raise BadRequest("chat() gives a text: call tools over HTTP", param="tools")
    return request
