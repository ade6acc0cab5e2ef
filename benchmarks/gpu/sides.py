"""Starts the two servers one after the other with the options of a case."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from server_process import free_port, serving

HERE = Path(__file__).parent
STAND_IN = HERE.parent / "llamacpp_server.py"  # runs llama.cpp's server from the xllamacpp package


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The options of a case. None and empty mean the default."""

    slots: int
    context: int  # maximum tokens of one conversation
    peer_slots: int | None = None  # for llama-server, whose memory is slots x context
    kv_fraction: float | None = None
    park_fraction: float | None = None
    on_disk: bool = False  # otherwise the server writes gigabytes at its end that nobody reads
    flags: Sequence[str] = ()  # Rekindle's flags for this case


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The options that are the same for all cases."""

    model: Path
    folder: Path  # for logs and stored state
    threads: int
    ram_cache: str
    disk_cache: str
    always_on_disk: bool
    peer_binary: Path | None
    ours_flags: Sequence[str] = ()
    peer_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """A server as a command line."""

    name: str
    machine: Machine

    def command(self, needs: Needs, port: int) -> list[str]:
        raise NotImplementedError

    @contextmanager
    def running(self, needs: Needs, label: str) -> Iterator[int]:
        """The port of a healthy server, which is ended on every way out."""
        port = free_port()
        log = self.machine.folder / f"{self.name}-{label}.log"
        with serving(self.command(needs, port), port, log):
            yield port


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
