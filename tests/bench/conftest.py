"""Serves the fake server on a free port."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvicorn

from tests.bench.fake_openai import FakeOpenAI

Serve = Callable[[FakeOpenAI], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Serve a fake until the test ends, and return its URL."""
    with ExitStack() as stack:
        yield lambda fake: stack.enter_context(_serving(fake))


@contextmanager
def _serving(fake: FakeOpenAI) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(fake.app(), ws="none", log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
