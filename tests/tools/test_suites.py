"""`make suites`: the flags of llama.cpp's server, and the report."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from rekindle.config import load_config
from tools.suites.llama_server import command, connect, defaults, parsed, stand_in
from tools.suites.run import report

FLAGS = (
    "--host 127.0.0.1 --port 8080 --temp 0.8 --seed 42 --hf-repo ggml-org/test-model-stories260K "
    "--batch-size 32 --no-slots --alias tinyllama-2,code --ctx-size 512 --parallel 2 "
    "--n-predict 64 --no-jinja"
)


def test_their_flags_become_ours(tmp_path: Path) -> None:
    """The context is divided among the slots, and the file is called like the alias."""
    options = parsed(FLAGS.split())
    line = command(options, tmp_path / "text.gguf", tmp_path, "1234")
    text = " ".join(line)
    assert f"--model {tmp_path}/tinyllama-2.gguf" in text
    assert "--parallel 2" in text
    assert "--max-model-len 256" in text
    assert "--port 1234" in text
    assert (tmp_path / "tinyllama-2.gguf").readlink() == tmp_path / "text.gguf"


def test_a_unified_cache_is_not_divided(tmp_path: Path) -> None:
    options = parsed([*FLAGS.split(), "--kv-unified"])
    assert "512" in command(options, tmp_path / "text.gguf", tmp_path, "1")


def test_their_defaults_of_requests_are_settings_that_exist() -> None:
    config = load_config({}, defaults(parsed(FLAGS.split())))
    assert (config.temperature, config.seed) == (0.8, 42)
    assert (config.max_tokens, config.completion_max_tokens) == (64, 64)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("ggml-org/test-model-stories260K", "text.gguf"),
        ("ggml-org/test-model-stories260K-infill", "code.gguf"),
        ("jina-reranker-v1-tiny-en", "reranker.gguf"),
        ("bert-bge-small", "embeddings.gguf"),
    ],
)
def test_a_model_of_the_same_kind_stands_in(name: str, file: str) -> None:
    assert stand_in(parsed(["--hf-repo", name]), Path("/m")) == Path("/m") / file


def test_a_running_server_is_reached_through_another_port() -> None:
    async def exchange() -> bytes:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(4))
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        target = server.sockets[0].getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        forwarding = asyncio.create_task(connect("127.0.0.1", port, target))
        while not forwarding.done():
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.01)
        writer.write(b"ping")
        echoed = await reader.read()
        writer.close()
        await writer.wait_closed()
        while len(asyncio.all_tasks()) > 2:  # this one and the forwarding one
            await asyncio.sleep(0.01)
        forwarding.cancel()
        server.close()
        return echoed

    assert asyncio.run(exchange()) == b"ping"


def test_the_report_counts_by_file_and_names_failures() -> None:
    outcomes = [
        {"test": "unit/test_a.py::test_x", "outcome": "passed", "reason": []},
        {"test": "unit/test_a.py::test_y", "outcome": "failed", "reason": ["assert 1 == 2"]},
        {"test": "unit/test_b.py::test_z", "outcome": "skipped", "reason": []},
    ]
    told = report(outcomes).splitlines()
    assert told == [
        "unit/test_a.py: 1 of 2 passed",
        "unit/test_b.py: 0 of 0 passed",
        "in all: 1 of 2 passed",
        "FAILED unit/test_a.py::test_y: assert 1 == 2",
    ]
