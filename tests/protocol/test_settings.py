"""The settings that travel to the runtime."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rekindle.protocol.frames import frame, receive
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import (
    GB,
    GIB,
    RuntimeSettings,
    format_size,
    parse_size,
    usable_cores,
)


@pytest.mark.parametrize(
    "settings",
    [
        RuntimeSettings(),
        RuntimeSettings(
            parallel=3,
            max_model_len=512,
            kv_fraction=0.5,
            fp8_kvcache=True,
            kv_bits=4,
            kv_quantization_start=7,
            threads=2,
            gpu_layers=0,
            gpu=(0, 1),
            tensor_split=(3.0, 1.0),
            tool_format="hermes",
            reasoning_format="none",
            ram_cache=1 << 40,
            disk_cache=0,
            disk_floor=1,
            cache_dir=Path("/kv"),
            cache_secret_file=Path("/secret"),
            cache_write="on-evict",
            key_ttl=None,
        ),
    ],
)
def test_settings_arrive_unchanged(settings: RuntimeSettings) -> None:
    sent = LoadModel(path="m.gguf", served=["m.gguf"], settings=settings)
    front, runtime = socket.socketpair()
    with front, runtime:
        front.sendall(frame(sent))
        assert next(receive(runtime)).message == sent


def test_the_runtime_reads_settings_without_pydantic() -> None:
    """The runtime validates nothing, and starts faster without pydantic."""
    code = "import sys, rekindle.protocol.frames; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_settings_decide_the_kv_type() -> None:
    assert RuntimeSettings().kv_type == "f16"
    assert RuntimeSettings(fp8_kvcache=True).kv_type == "q8_0"
    assert RuntimeSettings(kv_bits=8).kv_type == "f16"  # up to the start of quantisation
    assert RuntimeSettings(kv_bits=8, kv_quantization_start=0).kv_type == "q8_0"
    assert RuntimeSettings(kv_bits=4, kv_quantization_start=0).kv_type == "q4_0"
    assert RuntimeSettings(kv_bits=4, fp8_kvcache=True).kv_type == "q8_0"


def test_threads_default_to_the_cores_within_a_limit() -> None:
    assert 1 <= RuntimeSettings().thread_count <= 16
    assert RuntimeSettings(threads=40).thread_count == 40


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (7, "7B"), (1000, "1KB"), (1024, "1KiB"), (2 * GIB, "2GiB"), (10 * GB, "10GB")],
)
def test_a_formatted_size_can_be_parsed_again(size: int, text: str) -> None:
    assert format_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("said", "cores"),
    [("200000 100000", 2), ("50000 100000", 1), ("max 100000", 64), ("", 64), (None, 64)],
)
def test_a_container_gets_the_cores_of_its_quota(
    said: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(64)), raising=False)
    quota = tmp_path / "cpu.max"
    if said is not None:
        quota.write_text(said)
    assert usable_cores(quota) == cores
