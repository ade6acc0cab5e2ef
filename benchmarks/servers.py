"""Starts the two servers in separate processes. Only one of them computes at a time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rekindle.bench import BenchFailed

sys.path.append(str(Path(__file__).with_name("gpu")))  # the modules that start the servers
from server_process import HOST, StartFailed, free_port, serving

LLAMACPP = Path(__file__).with_name("llamacpp_server.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings that both servers share."""

    model: Path
    mmproj: Path | None = None
    slots: int
    threads: int = 2
    context: int = 8192
    embedding_model: Path | None = None  # only for Rekindle


@dataclass(frozen=True, slots=True)
class Server:
    label: str
    url: str
    process_id: int


@contextmanager
def rekindle(setup: Setup, log: Path, cache_dir: Path | None = None) -> Iterator[Server]:
    """Run Rekindle with the given cache folder, or with an empty one."""
    if cache_dir is None:
        with (
            tempfile.TemporaryDirectory(prefix="rekindle-bench-") as empty,
            rekindle(setup, log, Path(empty)) as server,
        ):
            yield server
        return
    port = str(free_port())
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
    port = str(free_port())
    arguments = [str(LLAMACPP), "--port", port, "--model", str(setup.model)]
    arguments += ["--slots", str(setup.slots), "--threads", str(setup.threads)]
    arguments += ["--context", str(setup.context), *_projector(setup)]
    with _serving("llama.cpp", port, arguments, log) as server:
        yield server


@contextmanager
def mlx_lm(setup: Setup, log: Path) -> Iterator[Server]:
    """Run mlx_lm's own server with its default prompt cache."""
    port = str(free_port())
    arguments = ["-m", "mlx_lm", "server", "--host", HOST, "--port", port]
    arguments += ["--model", str(setup.model), "--decode-concurrency", str(setup.slots)]
    with _serving("mlx_lm.server", port, arguments, log) as server:
        yield server


def _projector(setup: Setup) -> list[str]:
    return ["--mmproj", str(setup.mmproj)] if setup.mmproj else []


@contextmanager
def _serving(label: str, port: str, arguments: list[str], log: Path) -> Iterator[Server]:
    log.unlink(missing_ok=True)
    try:
        with serving([sys.executable, *arguments], int(port), log) as process_id:
            yield Server(label, f"http://{HOST}:{port}", process_id)
    except StartFailed as error:
        raise BenchFailed(f"{label} {error}") from None
