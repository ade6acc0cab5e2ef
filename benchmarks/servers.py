"""The two servers side by side, each in processes of its own, never both computing."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.bench import BenchFailed

HOST = "127.0.0.1"
START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 60  # state is written to disk before it ends
LLAMACPP = Path(__file__).with_name("llamacpp_server.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What both servers are given alike."""

    model: Path
    mmproj: Path | None = None
    slots: int
    threads: int = 2
    context: int = 8192
    embedding_model: Path | None = None  # Rekindle's alone


@dataclass(frozen=True, slots=True)
class Server:
    label: str
    url: str
    process_id: int


@contextmanager
def rekindle(setup: Setup, log: Path, cache_dir: Path | None = None) -> Iterator[Server]:
    """Rekindle with an empty cache of its own, or with the one given."""
    if cache_dir is None:
        with (
            tempfile.TemporaryDirectory(prefix="rekindle-bench-") as empty,
            rekindle(setup, log, Path(empty)) as server,
        ):
            yield server
        return
    port = _free_port()
    arguments = ["-m", "rekindle.cli.main", "serve", "--host", HOST, "--port", port]
    arguments += ["--model", str(setup.model), "--parallel", str(setup.slots)]
    arguments += ["--threads", str(setup.threads), "--max-model-len", str(setup.context)]
    arguments += ["--cache-dir", str(cache_dir), *_projector(setup)]
    if setup.embedding_model is not None:
        arguments += ["--embedding-model", str(setup.embedding_model)]
    with _serving("Rekindle", port, arguments, log) as server:
        yield server


@contextmanager
def llamacpp(setup: Setup, log: Path) -> Iterator[Server]:
    port = _free_port()
    arguments = [str(LLAMACPP), "--port", port, "--model", str(setup.model)]
    arguments += ["--slots", str(setup.slots), "--threads", str(setup.threads)]
    arguments += ["--context", str(setup.context), *_projector(setup)]
    with _serving("llama.cpp", port, arguments, log) as server:
        yield server


@contextmanager
def mlx_lm(setup: Setup, log: Path) -> Iterator[Server]:
    """mlx_lm's own server, with its prompt cache at its defaults."""
    port = _free_port()
    arguments = ["-m", "mlx_lm", "server", "--host", HOST, "--port", port]
    arguments += ["--model", str(setup.model), "--decode-concurrency", str(setup.slots)]
    with _serving("mlx_lm.server", port, arguments, log) as server:
        yield server


def _projector(setup: Setup) -> list[str]:
    return ["--mmproj", str(setup.mmproj)] if setup.mmproj else []


@contextmanager
def _serving(label: str, port: str, arguments: list[str], log: Path) -> Iterator[Server]:
    """A healthy server; it has ended on every way out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=output, stderr=output
        )
    try:
        url = f"http://{HOST}:{port}"
        _wait_until_healthy(label, url, process, log)
        yield Server(label, url, process.pid)
    finally:
        _end(process)


def _wait_until_healthy(label: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(url):
        if process.poll() is not None or time.monotonic() > give_up_s:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BenchFailed(f"{label} did not start; the end of {log}:\n{tail}")
        time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin:
        process.stdin.close()


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return str(probe.getsockname()[1])
