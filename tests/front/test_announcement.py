"""The lines that a server prints when it has started."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rekindle.config import Config
from rekindle.front.announcement import announce, cache_lines, conversations_line
from rekindle.protocol.frames import DISK, PARKED, POOL, RAM, Capacity, DeviceInfo, Ready
from tests.api.scripted import ScriptedRuntime

CONFIG = Config(cache_dir=Path("/var/lib/[kv]"))


def ready(conversations: int | None, *, on_disk: bool = True) -> Ready:
    return Ready(4096, 8192, "{{ x }}", on_disk=on_disk, conversations=conversations)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ([ready(0)], "Conversations are kept in the cache folder /var/lib/[kv], which is empty"),
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
    assert conversations_line(CONFIG, found) == line


def announced(runtime: ScriptedRuntime, *ports: int, config: Config = CONFIG) -> list[str]:
    file = io.StringIO()
    announce(config, [runtime], ports or (8080,), Console(file=file, width=20))
    return file.getvalue().splitlines()


def described(**fields: Any) -> ScriptedRuntime:
    runtime = ScriptedRuntime(name="a [model]")
    runtime.supervisor.ready = Ready(4096, 8192, "{{ x }}", conversations=3, on_disk=True, **fields)
    return runtime


def test_the_banner_says_what_is_served_where_and_what_to_try() -> None:
    """No line is wrapped, so that a narrow terminal cuts no address."""
    runtime = described(
        engine="llama.cpp", architecture="llama", parameters=134_515_008, quantization="Q4_1"
    )
    assert announced(runtime, config=replace(CONFIG, threads=2)) == [
        "Model: a [model] (llama, 135M parameters, Q4_1), context of 4,096 tokens",
        "Engine: llama.cpp on the CPU with 2 threads, up to 16 requests at a time",
        "3 conversations found in the cache folder /var/lib/[kv]",
        "Serving on http://127.0.0.1:8080/v1. Stop with Ctrl-C.",
        "Console: http://127.0.0.1:8080/",
        "Documentation: http://127.0.0.1:8080/docs",
        "Try it in another terminal:",
        '  rekindle chat "Why is the sky blue?"',
    ]


def test_the_banner_names_the_settings_file_that_was_read() -> None:
    config = replace(CONFIG, settings_file=Path("/etc/[x]/rekindle.yaml"))
    assert announced(described(), config=config)[0] == "Settings: /etc/[x]/rekindle.yaml"


@pytest.mark.parametrize(
    ("settings", "port", "flags"),
    [
        ({}, 9000, " --base-url http://127.0.0.1:9000/v1"),
        ({"host": "::", "no_auth": True}, 8080, ""),
        ({"host": "::1"}, 8080, " --base-url http://[::1]:8080/v1"),
        ({"host": "10.0.0.7"}, 8080, " --base-url http://10.0.0.7:8080/v1"),
        ({"api_key": ("k",)}, 8080, " --api-key KEY"),
    ],
)
def test_the_command_to_try_reaches_this_server(
    settings: dict[str, Any], port: int, flags: str
) -> None:
    last = announced(described(), port, config=replace(CONFIG, **settings))[-1]
    assert last == f'  rekindle chat "Why is the sky blue?"{flags}'


def test_an_embedding_model_is_not_offered_for_a_chat() -> None:
    lines = announced(described(dimensions=384))
    assert (
        lines[0] == "Model: a [model], embeddings of 384 dimensions, inputs of up to 4,096 tokens"
    )
    assert not any("rekindle chat" in line for line in lines)


def test_a_vision_model_is_announced_as_such() -> None:
    assert announced(ScriptedRuntime(name="eyes", sees=True))[0].endswith(", reads images")


def test_the_port_of_ollamas_api_is_announced() -> None:
    assert "Serving Ollama's API on http://127.0.0.1:11434" in announced(described(), 8080, 11434)


def with_capacities(**tokens: int) -> Ready:
    """An 8B model with 16-bit KV, which takes 147,456 bytes per token."""
    places = {"pool": POOL, "parked": PARKED, "ram": RAM, "disk": DISK}
    capacities = tuple(
        Capacity(places[name], each, each * 147_456) for name, each in tokens.items()
    )
    return Ready(40_960, 0, capacities=capacities)


def test_the_capacity_of_each_tier_is_announced() -> None:
    [line] = cache_lines(
        CONFIG, with_capacities(pool=244_000, parked=200_000, ram=219_000, disk=68_000)
    )
    assert line == (
        "KV cache: 244k tokens in the engine, 200k parked on the device (29.5 GB), "
        "219k in RAM (32.3 GB), 68k on disk (10.0 GB)"
    )


def test_a_budget_too_small_for_one_context_is_warned_about() -> None:
    _, ram, disk = cache_lines(CONFIG, with_capacities(pool=10, ram=14_563, disk=40_959))
    assert ram == (
        "Warning: one full context of 40,960 tokens takes 6.0 GB and does not fit in RAM: "
        "raise --ram-cache or lower --max-model-len"
    )
    assert "--disk-cache" in disk


def test_a_disabled_tier_is_not_warned_about() -> None:
    assert len(list(cache_lines(CONFIG, with_capacities(ram=0, disk=40_960)))) == 1


def test_a_disk_without_space_is_warned_about_instead_of_a_size() -> None:
    kv, warning = cache_lines(CONFIG, with_capacities(disk=0))
    assert kv == "KV cache: 0 tokens on disk (0.0 GB)"
    assert warning.startswith(
        "Warning: nothing fits on disk. Less than 1GiB (--disk-floor) is free"
    )


@pytest.mark.parametrize(
    ("layers", "gpu_layers", "device"),
    [
        (37, 20, "NVIDIA H200 with 150.0 GB (20 of 37 layers)"),
        (0, 0, "NVIDIA H200 with 150.0 GB"),
        (37, 0, "the CPU with 3 threads, and NVIDIA H200 with 150.0 GB is not used"),
    ],
)
def test_the_device_that_computes_is_announced(layers: int, gpu_layers: int, device: str) -> None:
    gpu = DeviceInfo("NVIDIA H200", 150_000_000_000)
    runtime = described(engine="e", gpus=(gpu,), layers=layers, gpu_layers=gpu_layers)
    line = announced(runtime, config=replace(CONFIG, threads=3))[1]
    assert line == f"Engine: e on {device}, up to 16 requests at a time"
