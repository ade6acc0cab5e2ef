from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.config import Config
from rekindle.protocol.frames import Ready
from rekindle.server.announcement import announce, cache_line
from tests.api.scripted import ScriptedRuntime

CONFIG = Config(cache_dir=Path("/var/lib/[kv]"))


def ready(conversations: int | None, *, on_disk: bool = True) -> Ready:
    return Ready(4096, 8192, "{{ x }}", on_disk=on_disk, conversations=conversations)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([ready(0)], "0 conversations found in the cache folder /var/lib/[kv]"),
        ([ready(1)], "1 conversation found in the cache folder /var/lib/[kv]"),
        (
            [ready(1200), ready(34), ready(9, on_disk=False)],
            "1,234 conversations found in the cache folder /var/lib/[kv]",
        ),
        (
            [ready(5), ready(None)],
            "Conversations are kept in the cache folder /var/lib/[kv], which is still being read",
        ),
        (
            [ready(None, on_disk=False)],
            "Conversations are kept in memory only: they are gone when the server stops",
        ),
    ],
)
def test_the_cache_folder_and_what_was_found_in_it_are_said(found: list[Ready], line: str) -> None:
    assert cache_line(CONFIG, found) == line


def test_every_line_stays_one_however_narrow_the_console_is() -> None:
    file = io.StringIO()
    runtime = ScriptedRuntime(name="a [model]")
    runtime.ready = ready(3)
    announce(CONFIG, [runtime], [8080], Console(file=file, width=20))
    loaded, cache, address = file.getvalue().splitlines()
    assert loaded == "a [model] is loaded: context 4096 tokens, up to 16 turns at once"
    assert cache == "3 conversations found in the cache folder /var/lib/[kv]"
    assert address.startswith("Serving on http://127.0.0.1:8080/v1 ")


def test_a_model_that_sees_is_said_to() -> None:
    file = io.StringIO()
    announce(CONFIG, [ScriptedRuntime(name="eyes", sees=True)], [8080], Console(file=file))
    assert file.getvalue().splitlines()[0].endswith("up to 16 turns at once, sees pictures")


def test_the_port_where_tools_expect_ollama_is_said_too() -> None:
    file = io.StringIO()
    announce(CONFIG, [ScriptedRuntime()], [8080, 11434], Console(file=file))
    assert "Serving Ollama's API on http://127.0.0.1:11434." in file.getvalue()
