"""Takes the flags of llama.cpp's server and starts Rekindle instead, for llama.cpp's own tests.

The tests name models that they would download. A model of the same kind stands in for each: the
file that is given (or the default model) for those that write text, a tiny one of random weights
where only tokens matter. `SUITE_MODELS` is the folder of these files
(`python -m tools.suites.llama_server FOLDER [TEXT_MODEL]` writes them). A chat template that is
given as a flag is written into a copy of the model. A flag that Rekindle has no counterpart for is
left out, and its test shows that.

The tests start hundreds of servers. With `SUITE_SERVERS`, a folder, servers with equal settings are
started once: the next start connects its port to the one that runs. At most eight run at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import shutil
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
    "gemma3": "vision.gguf",
}
TEXT_MODEL = "text.gguf"
PROJECTOR = "projector.gguf"
#: llama.cpp's server has these templates built in. Ours are given by the parts around a message.
TEMPLATE = (
    "{{% for message in messages %}}{before}{{{{ message.role }}}}{after}{{{{ message.content }}}}"
    "{end}{{% endfor %}}{{% if add_generation_prompt %}}{before}assistant{after}{{% endif %}}"
)
COMMAND_R = (
    "{% set roles = {'system': 'SYSTEM', 'user': 'USER', 'assistant': 'CHATBOT'} %}"
    "{% for message in messages %}<|START_OF_TURN_TOKEN|><|{{ roles[message.role] }}_TOKEN|>"
    "{{ message.content }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
CHATML = TEMPLATE.format(before="<|im_start|>", after="\n", end="<|im_end|>\n")
TEMPLATES = {
    "chatml": CHATML,
    "llama3": TEMPLATE.format(
        before="<|start_header_id|>", after="<|end_header_id|>\n\n", end="<|eot_id|>"
    ),
    "command-r": COMMAND_R,
}
MAX_EMBEDDED = 512  # tokens that the stand-in for embeddings takes
NOT_GENERATING = ("embeddings.gguf", "reranker.gguf")
#: Flags of llama.cpp's server that have a value and no counterpart here.
IGNORED = (
    *("hf-file", "model-url", "model-draft", "models-dir", "models-max", "models-preset"),
    *("batch-size", "ubatch-size", "n-gpu-layers", "tags", "slot-save-path", "grp-attn-n"),
    *("grp-attn-w", "lora", "spec-type", "spec-draft-n-max", "spec-draft-n-min", "pooling"),
    *("reasoning-format", "mmproj-url"),
    *("sleep-idle-seconds", "cache-ram", "tools", "tools-runtime", "mcp-servers-config"),
    *("mcp-servers-json",),
)


def parsed(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in (
        *("host", "port", "temp", "seed", "alias", "hf-repo", "model", "api-key"),
        *("chat-template", "chat-template-file", "reasoning"),
    ):
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
    template = options.chat_template
    if options.chat_template_file:
        template = Path(options.chat_template_file).read_text()
    return models / file if template is None else with_template(models / file, template)


def with_template(model: Path, template: str) -> Path:
    """Return a copy of a model with this chat template, a name or a text. Writes it once."""
    template = TEMPLATES.get(template, template)
    name = hashlib.sha256(template.encode()).hexdigest()[:16]
    target = model.with_name(f"{model.stem}-{name}.gguf")
    if not target.exists():
        new_metadata(model, target, "--chat-template", template)
    return target


def new_metadata(source: Path, target: Path, *options: str) -> None:
    command = [sys.executable, "-m", "gguf.scripts.gguf_new_metadata", "--force"]
    subprocess.run(
        [*command, *options, str(source), str(target)], check=True, stderr=subprocess.DEVNULL
    )


def flags_of(options: argparse.Namespace, model: Path) -> list[str]:
    """Return the flags of the server, except its model, address and folder."""
    slots = options.parallel or 4
    flags = ["--parallel", str(slots), "--any-model-name", "--prefill-assistant"]
    if options.ctx_size:
        shared = options.kv_unified or model.name in NOT_GENERATING
        tokens = options.ctx_size // (1 if shared else slots)
        most = MAX_EMBEDDED if model.name in NOT_GENERATING else tokens
        flags += ["--max-model-len", str(min(tokens, most))]
    for flag, value in (
        ("--api-key", options.api_key),
        ("--threads", options.threads and str(options.threads)),
        ("--media-folder", options.media_path and str(Path(options.media_path).resolve())),
        ("--cors-origin", None if options.cors_origins or options.tools else "*"),
    ):
        flags += [flag, value] if value else []
    if options.reasoning:  # "auto" means that a template is told to reason if it can be told
        reasons = "false" if options.reasoning == "off" else "true"
        flags += ["--chat-template-kwargs", f'{{"enable_thinking": {reasons}}}']
    return [*flags, "--disk-cache", "0"]


def command(options: argparse.Namespace, model: Path, folder: Path, port: str) -> list[str]:
    """Return the command line of the server. The model's file is called like its alias."""
    alias = (options.alias or model.stem).split(",")[0]
    named = folder / f"{alias}.gguf"
    named.symlink_to(model)
    models = ["--model", str(named)]
    if model.name == STAND_INS["gemma3"]:
        models += ["--mmproj", str(model.with_name(PROJECTOR))]
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


def write_models(folder: Path, text_model: Path | None = None) -> None:
    """Write the stand-ins, and link the default model and the default embedding model.

    A text model that has no chat template gets ChatML, as in llama.cpp's server.
    """
    from rich.console import Console

    from rekindle.config import load_config
    from rekindle.models.progress import progress_on
    from rekindle.models.pull import pull
    from tests.support.tiny import CodeModel, write_gemma3, write_llama
    from tests.support.tiny_bert import write_bert
    from tests.support.tiny_projector import write_gemma3_projector

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = load_config({}, {})
    progress = progress_on(Console(quiet=True))
    for file, name in ((TEXT_MODEL, "smollm2"), ("embeddings.gguf", "minilm")):
        (folder / file).symlink_to(pull(name, models_dir=config.models_dir, progress=progress))
    write_llama(folder / "code.gguf", kind=CodeModel)
    write_bert(folder / "reranker.gguf", context=512, classes=1)
    write_gemma3(folder / STAND_INS["gemma3"])
    write_gemma3_projector(folder / PROJECTOR)
    if text_model is not None:
        _replace_texts(folder, text_model)


def _replace_texts(folder: Path, given: Path) -> None:
    """Put the given model in the place of those that write text and fill gaps."""
    from gguf import GGUFReader

    has_template = GGUFReader(str(given)).get_field("tokenizer.chat_template") is not None
    (folder / TEXT_MODEL).unlink()
    new_metadata(given, folder / TEXT_MODEL, *([] if has_template else ["--chat-template", CHATML]))
    (folder / STAND_INS["infill"]).unlink()
    gap = [("fim_pre", "0"), ("fim_suf", "1"), ("fim_mid", "2")]
    flags = [part for name, token in gap for part in ("--special-token-by-id", name, token)]
    new_metadata(given, folder / STAND_INS["infill"], *flags)


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
    if len(sys.argv) in (2, 3) and not sys.argv[1].startswith("--"):
        write_models(*map(Path, sys.argv[1:]))
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
