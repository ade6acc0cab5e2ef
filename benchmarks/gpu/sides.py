"""The two servers, started one after the other with what a case wants of them."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

START_TIMEOUT_S = 150
STOP_TIMEOUT_S = 120  # ours writes its state to disk before it ends
HERE = Path(__file__).parent
STAND_IN = HERE.parent / "llamacpp_server.py"  # llama.cpp's server inside the xllamacpp package


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a case wants of a server; None and empty: the usual."""

    slots: int
    context: int  # tokens of one conversation
    peer_slots: int | None = None  # where llama-server has fewer, as its memory is slots x context
    kv_fraction: float | None = None
    park_fraction: float | None = None
    on_disk: bool = False  # else a server would write gigabytes at its end, that nobody reads
    flags: Sequence[str] = ()  # of ours, for this case alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What does not change from case to case."""

    model: Path
    folder: Path  # for logs and stored state
    threads: int
    ram_cache: str
    disk_cache: str
    always_on_disk: bool
    peer_binary: Path | None
    ours_flags: Sequence[str] = ()
    peer_flags: Sequence[str] = ()


class StartFailed(Exception):
    """A server that did not become healthy."""


@dataclass(frozen=True, slots=True)
class Side:
    """A server as a command line."""

    name: str
    machine: Machine

    def command(self, needs: Needs, port: int) -> list[str]:
        raise NotImplementedError

    @contextmanager
    def running(self, needs: Needs, label: str) -> Iterator[int]:
        """The port of a healthy server; it has ended on every way out."""
        port = _free_port()
        log = self.machine.folder / f"{self.name}-{label}.log"
        command = self.command(needs, port)
        with log.open("ab") as output:
            output.write(f"\n$ {shlex.join(command)}\n".encode())
            output.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
            )
        try:
            _wait_until_healthy(port, process, log)
            yield port
        finally:
            _end(process)


class Rekindle(Side):
    def command(self, needs: Needs, port: int) -> list[str]:
        machine = self.machine
        command = [sys.executable, "-m", "rekindle.cli.main", "serve", "--port", str(port)]
        command += ["--model", str(machine.model), "--parallel", str(needs.slots)]
        command += ["--max-model-len", str(needs.context), "--threads", str(machine.threads)]
        disk_cache = machine.disk_cache if needs.on_disk or machine.always_on_disk else "0"
        command += ["--ram-cache", machine.ram_cache, "--disk-cache", disk_cache]
        command += ["--cache-dir", str(machine.folder / "kv"), "--queue", "1000"]
        fractions = {"kv": needs.kv_fraction, "park": needs.park_fraction}
        for name, fraction in fractions.items():
            if fraction is not None and f"--{name}-fraction" in _known_flags():
                command += [f"--{name}-fraction", str(fraction)]
        return [*command, *needs.flags, *machine.ours_flags]


class LlamaServer(Side):
    def command(self, needs: Needs, port: int) -> list[str]:
        machine = self.machine
        slots = needs.peer_slots or needs.slots
        cells = slots * needs.context
        if machine.peer_binary is None:
            command = [sys.executable, str(STAND_IN), "--port", str(port), "--slots", str(slots)]
            command += ["--model", str(machine.model), "--threads", str(machine.threads)]
            return [*command, "--context", str(cells)]
        command = [str(machine.peer_binary), "--host", "127.0.0.1", "--port", str(port)]
        command += ["-m", str(machine.model), "-c", str(cells), "-np", str(slots), "-fa", "on"]
        command += ["-b", "2048", "-ub", "2048", "-ngl", "999", "--cache-ram", "50000"]
        return [*command, "-t", str(machine.threads), "--no-webui", *machine.peer_flags]


@cache
def _known_flags() -> str:
    command = [sys.executable, "-m", "rekindle.cli.main", "serve", "--help"]
    wide = os.environ | {"COLUMNS": "400", "TERM": "dumb"}
    return subprocess.run(command, capture_output=True, text=True, env=wide, check=False).stdout


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not _is_healthy(port):
        if process.poll() is not None or time.monotonic() > give_up_s:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
            raise StartFailed(f"did not start; the end of {log}:\n{tail}")
        time.sleep(0.1)


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
