"""The lines that a server prints when it has started."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.config import Config
from rekindle.front.announcement import announce, cache_line, capacity_lines
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity, DeviceInfo, Ready
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
            "Conversations are kept in memory only: they are lost when the server stops",
        ),
    ],
)
def test_the_number_of_conversations_in_the_cache_folder_is_announced(
    found: list[Ready], line: str
) -> None:
    assert cache_line(CONFIG, found) == line


def test_lines_are_not_wrapped_in_a_narrow_console() -> None:
    file = io.StringIO()
    runtime = ScriptedRuntime(name="a [model]")
    runtime.supervisor.ready = ready(3)
    announce(CONFIG, [runtime], [8080], Console(file=file, width=20))
    loaded, cache, address = file.getvalue().splitlines()
    assert loaded == "a [model] is loaded: context 4096 tokens, up to 16 turns in parallel"
    assert cache == "3 conversations found in the cache folder /var/lib/[kv]"
    assert address.startswith("Serving on http://127.0.0.1:8080/v1 ")


def test_a_vision_model_is_announced_as_such() -> None:
    file = io.StringIO()
    announce(CONFIG, [ScriptedRuntime(name="eyes", sees=True)], [8080], Console(file=file))
    assert file.getvalue().splitlines()[0].endswith("up to 16 turns in parallel, reads images")


def test_the_port_of_ollamas_api_is_announced() -> None:
    file = io.StringIO()
    announce(CONFIG, [ScriptedRuntime()], [8080, 11434], Console(file=file))
    assert "Serving Ollama's API on http://127.0.0.1:11434." in file.getvalue()


def with_capacities(**tokens: int) -> Ready:
    """An 8B model with 16-bit KV, which takes 147,456 bytes per token."""
    places = {"pool": POOL, "parked": PARKED, "ram": RAM, "disk": DISK}
    capacities = tuple(
        Capacity(places[name], each, each * 147_456) for name, each in tokens.items()
    )
    return Ready(40_960, 0, capacities=capacities)


def test_the_capacity_of_each_tier_is_announced() -> None:
    [line] = capacity_lines(with_capacities(pool=244_000, parked=200_000, ram=219_000, disk=68_000))
    assert line == (
        "KV cache: 244k tokens in the engine, 200k parked on the device (29.5 GB), "
        "219k in RAM (32.3 GB), 68k on disk (10.0 GB)"
    )


def test_a_budget_too_small_for_one_context_is_warned_about() -> None:
    _, ram, disk = capacity_lines(with_capacities(pool=10, ram=14_563, disk=40_959))
    assert ram == (
        "Warning: one full context of 40,960 tokens takes 6.0 GB and does not fit into "
        "--ram-cache: raise it or lower --max-model-len"
    )
    assert "--disk-cache" in disk


def test_a_disabled_tier_is_not_warned_about() -> None:
    assert len(list(capacity_lines(with_capacities(ram=0, disk=40_960)))) == 1


def test_gpus_and_offloaded_layers_are_announced() -> None:
    gpu = DeviceInfo("NVIDIA H200", 150_000_000_000)
    [line] = capacity_lines(Ready(4096, 8192, gpus=(gpu,), layers=37, gpu_layers=20))
    assert line == "Found NVIDIA H200 with 150.0 GB: 20 of 37 layers offloaded"
    [line] = capacity_lines(Ready(4096, 8192, gpus=(gpu,)))
    assert line == "Found NVIDIA H200 with 150.0 GB"
