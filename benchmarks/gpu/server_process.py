"""Starts a server in its own process, waits for it and ends it, with only the standard library."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

HOST = "127.0.0.1"
START_TIMEOUT_S = 150
STOP_TIMEOUT_S = 120  # Rekindle writes its state to disk before it ends
_direct = urllib.request.build_opener(
    urllib.request.ProxyHandler({})
)  # independent of the environment


class StartFailed(Exception):
    """The server did not become healthy."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(command: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """The process id of a healthy server, which is ended on every way out."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        output.write(f"\n$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        _wait_until_healthy(port, process, log)
        yield process.pid
    finally:
        _end(process)


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(port):
        if process.poll() is not None or time.monotonic() > give_up_s:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise StartFailed(f"did not start; the end of {log}:\n{tail}")
        time.sleep(0.1)


def _is_healthy(port: int) -> bool:
    try:
        with _direct.open(f"http://{HOST}:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
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
