from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from rekindle.config import Config
from rekindle.front.announcement import announce, cache_line, room_lines
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
            "Conversations are kept in memory only: they are gone when the server stops",
        ),
    ],
)
def test_the_cache_folder_and_what_was_found_in_it_are_said(found: list[Ready], line: str) -> None:
    assert cache_line(CONFIG, found) == line


def test_every_line_stays_one_however_narrow_the_console_is() -> None:
    file = io.StringIO()
    runtime = ScriptedRuntime(name="a [model]")
    runtime.supervisor.ready = ready(3)
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


def roomy(**tokens: int) -> Ready:
    """An 8B model of 16-bit cells, whose tokens take 147,456 bytes each."""
    places = {"pool": POOL, "parked": PARKED, "ram": RAM, "disk": DISK}
    capacities = tuple(
        Capacity(places[name], each, each * 147_456) for name, each in tokens.items()
    )
    return Ready(40_960, 0, capacities=capacities)


def test_what_each_place_has_room_for_is_said_in_tokens_and_bytes() -> None:
    [line] = room_lines(roomy(pool=244_000, parked=200_000, ram=219_000, disk=68_000))
    assert line == (
        "Tokens of its state there is room for: KV pool 244,000 (36.0 GB), parked on the device "
        "200,000 (29.5 GB), RAM 219,000 (32.3 GB), disk 68,000 (10.0 GB)"
    )


def test_a_budget_that_is_too_small_for_one_context_is_warned_of() -> None:
    _, ram, disk = room_lines(roomy(pool=10, ram=14_563, disk=40_959))
    assert ram == (
        "Warning: one full context of 40,960 tokens takes 6.0 GB and does not fit into "
        "--ram-cache: raise that or lower --max-model-len"
    )
    assert "--disk-cache" in disk


def test_a_tier_that_was_turned_off_is_not_warned_of() -> None:
    assert len(list(room_lines(roomy(ram=0, disk=40_960)))) == 1


def test_the_gpu_and_the_layers_that_lie_there_are_said() -> None:
    gpu = DeviceInfo("NVIDIA H200", 150_000_000_000)
    [line] = room_lines(Ready(4096, 8192, gpus=(gpu,), layers=37, gpu_layers=20))
    assert line == "Found NVIDIA H200 with 150.0 GB: 20 of 37 layers lie there"
    [line] = room_lines(Ready(4096, 8192, gpus=(gpu,)))
    assert line == "Found NVIDIA H200 with 150.0 GB"
