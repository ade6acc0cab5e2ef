"""Starts the real server with its command and a free port, and stops it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from rekindle.protocol.requests import ENGINE_MODULE
from tests.support.numpy_engine import SUFFIX

ROOT = Path(__file__).parents[2]
START_S = 120
STOP_S = 30
ONE_THREAD = {"REKINDLE_THREADS": "1"}  # tests run in parallel


@dataclass(frozen=True)
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300)

    def worker_pids(self) -> list[int]:
        """The pids of the runtimes, which are children of the server."""
        return self._child_pids("rekindle.runtime.main")

    def decoder_pids(self) -> list[int]:
        """The pids of the children that decode pictures. They start with the first picture."""
        return self._child_pids("rekindle.media.decoder_main")

    def _child_pids(self, module: str) -> list[int]:
        listed = subprocess.run(
            ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(self.process.pid)],
            capture_output=True,
            text=True,
        )
        lines = listed.stdout.splitlines()
        return [int(line.split()[0]) for line in lines if module in line]


def _engine_of(model: Path) -> dict[str, str]:
    """The environment for a model whose engine is in the tests."""
    if not model.name.endswith(SUFFIX):
        return {}
    sources = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    return {ENGINE_MODULE: "tests.support.numpy_engine", "PYTHONPATH": sources}


@contextlib.contextmanager
def running(
    model: Path | str | None,
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-m", "rekindle.cli.main", "serve"),
    model_flag: str = "--model",
) -> Iterator[Server]:
    """Run `rekindle serve` until the block ends. It is ready to answer. Without a model, the flags
    say what it serves."""
    models = [] if model is None else [model_flag, str(model)]
    port = free_port()
    log = folder / "server.log"
    if "--cache-dir" not in flags:
        flags = (*flags, "--cache-dir", str(folder / "kv"))
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *models, "--port", str(port), *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **ONE_THREAD,
                **os.environ,
                **_engine_of(Path(model or "")),
                **(environment or {}),
            },
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _await_health(server)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_health(server: Server) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"the server ended: {server.log.read_text()}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health").status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the server did not come up: {server.log.read_text()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
