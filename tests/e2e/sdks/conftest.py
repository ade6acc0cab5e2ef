"""Starts the server for the SDK suites, and skips some of LangChain's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.sdks.left_out import reason_for
from tests.support.ending_model import write_ending
from tests.support.server import Server, running


@pytest.fixture(scope="session", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """LangChain's suite creates its models itself, and they find the server by environment
    variables. Its tests compare answers, so no answer may depend on earlier requests."""
    folder = tmp_path_factory.mktemp("server")
    with (
        running(write_ending(folder / "tiny.gguf"), folder, "--exact") as started,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("OPENAI_API_BASE", f"{started.url}/v1")
        patched.setenv("ANTHROPIC_API_URL", started.url)
        patched.setenv("OLLAMA_HOST", started.url)
        yield started


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = [item for item in items if reason_for(item.nodeid)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
