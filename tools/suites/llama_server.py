"""Takes the flags of llama.cpp's server and starts Rekindle instead, for llama.cpp's own tests.

The tests name models that they would download. A model of the same kind stands in for each: the
default model for those that write text, a tiny one of random weights where only tokens matter.
`SUITE_MODELS` is the folder of these files (`python -m tools.suites.llama_server FOLDER`
writes them). A flag that Rekindle has no counterpart for is left out, and its test shows that.

The tests start hundreds of servers. With `SUITE_SERVERS`, a folder, servers with equal settings are
started once: the next start connects its port to the one that runs. At most eight run at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

MODELS_VARIABLE = "SUITE_MODELS"
SERVERS_VARIABLE = "SUITE_SERVERS"
MAX_SERVERS = 8
START_S = 120.0
#: Parts of the names of models in the tests, and the file that stands in for each.
STAND_INS = {
    "infill": "code.gguf",
    "bert": "embeddings.gguf",
    "rerank": "reranker.gguf",
}
TEXT_MODEL = "text.gguf"
NOT_GENERATING = ("embeddings.gguf", "reranker.gguf")
#: Flags of llama.cpp's server that have a value and no counterpart here.
IGNORED = (
    *("hf-file", "model-url", "model-draft", "models-dir", "models-max", "models-preset"),
    *("batch-size", "ubatch-size", "n-gpu-layers", "tags", "slot-save-path", "grp-attn-n"),
    *("grp-attn-w", "lora", "spec-type", "spec-draft-n-max", "spec-draft-n-min", "pooling"),
    *("reasoning-format", "reasoning", "chat-template", "chat-template-file", "mmproj-url"),
    *("sleep-idle-seconds", "cache-ram", "tools", "tools-runtime", "mcp-servers-config"),
    *("mcp-servers-json",),
)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("host", "port", "temp", "seed", "alias", "hf-repo", "model", "api-key"):
        parser.add_argument(f"--{flag}")
    for flag in ("ctx-size", "parallel", "n-predict", "threads"):
        parser.add_argument(f"--{flag}", type=int)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--media-path")
    parser.add_argument("--cors-origins")
    for flag in IGNORED:
        parser.add_argument(f"--{flag}")
    for flag in ("-ctk", "-ctv", "-fa"):
        parser.add_argument(flag)
    known, _switches = parser.parse_known_args(arguments)
    return known


def stand_in(options: argparse.Namespace, models: Path) -> Path:
    named = f"{options.hf_repo or ''} {options.hf_file or ''} {options.model or ''}".lower()
    file = next((file for part, file in STAND_INS.items() if part in named), TEXT_MODEL)
    return models / file


def flags_of(options: argparse.Namespace, model: Path) -> list[str]:
    """Return the flags of the server, except its model, address and folder."""
    slots = options.parallel or 4
    flags = ["--parallel", str(slots), "--any-model-name", "--prefill-assistant"]
    if options.ctx_size:
        shared = options.kv_unified or model.name in NOT_GENERATING
        flags += ["--max-model-len", str(options.ctx_size // (1 if shared else slots))]
    for flag, value in (
        ("--api-key", options.api_key),
        ("--threads", options.threads and str(options.threads)),
        ("--media-folder", options.media_path),
        ("--cors-origin", None if options.cors_origins or options.tools else "*"),
    ):
        flags += [flag, value] if value else []
    return [*flags, "--disk-cache", "0"]


def command(options: argparse.Namespace, model: Path, folder: Path, port: str) -> list[str]:
    """Return the command line of the server. The model's file is called like its alias."""
    alias = (options.alias or model.stem).split(",")[0]
    named = folder / f"{alias}.gguf"
    named.symlink_to(model)
    models = ["--model", str(named)]
    if model.name in NOT_GENERATING:
        models = ["--model", str(model.parent / TEXT_MODEL), "--embedding-model", str(named)]
    address = ["--host", options.host or "127.0.0.1", "--port", port]
    serve = [sys.executable, "-m", "rekindle.cli.main", "serve"]
    storage = ["--cache-dir", str(folder / "kv")]
    return [*serve, *models, *address, *storage, *flags_of(options, model)]


def defaults(options: argparse.Namespace) -> dict[str, str]:
    """The defaults of requests, which are settings without a flag."""
    limit = options.n_predict if options.n_predict and options.n_predict > 0 else None
    found = {
        "REKINDLE_TEMPERATURE": options.temp,
        "REKINDLE_SEED": options.seed,
        "REKINDLE_MAX_TOKENS": limit,
        "REKINDLE_COMPLETION_MAX_TOKENS": limit or "null",
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def write_models(folder: Path) -> None:
    """Write the stand-ins, and link the default model and the default embedding model."""
    from rich.console import Console

    from rekindle.config import load_config
    from rekindle.models.progress import progress_on
    from rekindle.models.pull import pull
    from tests.support.tiny import CodeModel, write_llama
    from tests.support.tiny_bert import write_bert

    folder.mkdir(parents=True, exist_ok=True)
    config = load_config({}, {})
    progress = progress_on(Console(quiet=True))
    for file, name in ((TEXT_MODEL, "smollm2"), ("embeddings.gguf", "minilm")):
        path = pull(name, models_dir=config.models_dir, progress=progress)
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(path)
    write_llama(folder / "code.gguf", kind=CodeModel)
    write_bert(folder / "reranker.gguf", context=512, classes=1)


class SharedServers:
    """The servers that run, in a folder with one file for each: its process and its port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def port(self, options: argparse.Namespace, model: Path) -> int:
        """Return the port of a server with these settings. Starts it if there is none."""
        settings = repr((options.alias, model, flags_of(options, model), defaults(options)))
        file = self._folder / hashlib.sha256(settings.encode()).hexdigest()[:16]
        if file.exists():
            file.touch()
            return int(file.read_text().split()[1])
        for old in sorted(self._folder.iterdir(), key=lambda each: each.stat().st_mtime)[
            : -MAX_SERVERS + 1
        ]:
            self._stop(old)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        folder = Path(tempfile.mkdtemp(prefix="rekindle-suite-"))
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(
                command(options, model, folder, str(port)),
                env={**os.environ, **defaults(options)},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _await_health(port, process)
        file.write_text(f"{process.pid} {port}")
        return port

    def stop(self) -> None:
        for file in self._folder.iterdir():
            self._stop(file)

    def _stop(self, file: Path) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(file.read_text().split()[0]), signal.SIGTERM)
        file.unlink()


def _await_health(port: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            return
        time.sleep(0.1)
    sys.exit("the server did not start")


async def connect(host: str, port: int, target: int) -> None:
    """Pass the connections to one port on to another until a signal ends this process."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, their_writer), copy(their_reader, writer))

    await (await asyncio.start_server(accept, host, port)).serve_forever()


def main() -> None:
    if len(sys.argv) == 2:
        write_models(Path(sys.argv[1]))
        return
    models = os.environ.get(MODELS_VARIABLE)
    if models is None:
        sys.exit(f"Set {MODELS_VARIABLE} to the folder with the models.")
    options = parsed(sys.argv[1:])
    model = stand_in(options, Path(models))
    if shared := os.environ.get(SERVERS_VARIABLE):
        target = SharedServers(Path(shared)).port(options, model)
        asyncio.run(connect(options.host or "127.0.0.1", int(options.port), target))
    folder = Path(tempfile.mkdtemp(prefix="rekindle-suite-"))
    line = command(options, model, folder, options.port)
    os.execvpe(line[0], line, {**os.environ, **defaults(options)})


if __name__ == "__main__":
    main()
