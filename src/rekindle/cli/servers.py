"""Finds the server that a chat talks to, or starts one for as long as the chat takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import typer
from rich.console import Console

from rekindle.cli.cache import LOCAL_SERVER
from rekindle.cli.cache_client import NoServer, connect, key_problem
from rekindle.cli.chat import DEFAULT_MODEL, ChatServer
from rekindle.cli.interrupts import QuietImports
from rekindle.config import Config, load_config
from rekindle.errors import RekindleError
from rekindle.models.families import find_in_families

TIMEOUT = httpx.Timeout(10, connect=2)


def served_models(
    base_url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
) -> list[str]:
    """Ask a server for its models. Raises NoServer, or RekindleError if it refuses the key."""
    with connect(base_url, api_key, TIMEOUT, transport) as client:
        answer = client.get(f"{base_url.rstrip('/')}/models")
    if answer.status_code in (401, 403):
        raise RekindleError(key_problem(base_url, api_key))
    try:
        return [str(model["id"]) for model in answer.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise RekindleError(
            f"the server at {base_url} is not OpenAI-compatible. Check --base-url: it usually ends "
            "with /v1."
        ) from None


@contextmanager
def running_server(server: ChatServer, console: Console) -> Iterator[ChatServer]:
    """Yield the server if it runs. Otherwise offer to start one, if somebody is there to answer;
    raises NoServer."""
    try:
        served_models(server.base_url, server.api_key)
    except NoServer as error:
        if server.base_url != LOCAL_SERVER:
            raise
        if not _wants_server(console):
            raise RekindleError(f"{error} `rekindle run` chats without a server.") from None
    else:
        yield server
        return
    with started_server(
        None if server.model == DEFAULT_MODEL else server.model, None, console
    ) as own:
        yield own


def _wants_server(console: Console) -> bool:
    if not (sys.stdin.isatty() and console.is_terminal):
        return False
    question = f"No server answers at {LOCAL_SERVER}. Load a model for this chat?"
    return typer.confirm(question, default=True, err=True)


@contextmanager
def server_with(
    model: str | None,
    base_url: str,
    api_key: str | None,
    config_file: Path | None,
    console: Console,
) -> Iterator[ChatServer]:
    """Yield the running server if it serves this model, or any if None is given. Otherwise start
    one."""
    with ExitStack() as stack:
        server = _find_server(base_url, model, api_key)
        yield server or stack.enter_context(started_server(model, config_file, console))


def _find_server(base_url: str, model: str | None, api_key: str | None) -> ChatServer | None:
    try:
        names = served_models(base_url, api_key)
    except NoServer:
        return None
    if model is None:
        return ChatServer(base_url, DEFAULT_MODEL, api_key)
    wanted = {model, Path(model).stem, _full_name(model)}
    found = [name for name in names if name in wanted or _full_name(name) in wanted]
    return ChatServer(base_url, found[0], api_key) if found else None


def _full_name(model: str) -> str:
    """Add the default size to the name of a family."""
    family = find_in_families(model)
    return model if family is None or family.quant else family.name


@contextmanager
def started_server(
    model: str | None, config_file: Path | None, console: Console
) -> Iterator[ChatServer]:
    """Load a model, pulling it if needed, and serve it to this machine until the chat ends."""
    with QuietImports():
        from rekindle.front.launch import EmbeddedServer, check_settings

    config = load_config({"model": [model] if model else None}, file=config_file)
    config, api_key = _for_this_chat(config)
    check_settings(config)
    server = EmbeddedServer(config)
    try:
        server.serve(config)
        assert server.base_url is not None
        name = served_models(server.base_url, api_key)[0]
        console.print(
            f"Loaded {name} for this chat. `rekindle serve` keeps it loaded.",
            style="dim",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        yield ChatServer(server.base_url, name, api_key)
    finally:
        server.close()


def _for_this_chat(config: Config) -> tuple[Config, str | None]:
    """Listen on a free port of this machine. Returns the API key to use, if keys are configured.

    A key from the settings gives the chat that tenant's cache. A file of keys has only digests, so
    the chat gets a key of its own.
    """
    from rekindle.http.key_file import new_key

    config = replace(config, host="127.0.0.1", port=0, ollama_port=None, embedding_model=())
    keys = (*config.api_key, *config.admin_key)
    if keys or config.api_keys_file is None:
        return replace(config, api_keys_file=None), keys[0] if keys else None
    key = new_key()
    return replace(config, api_keys_file=None, api_key=(key,)), key
