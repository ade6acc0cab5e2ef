"""Runs the programs of other projects against a server with the default model.

They are examples of SDKs, tests and load tools. Each runs in an environment of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
START_S, PROGRAM_S = 180.0, 600.0
LOAD_TOOLS = {"guidellm": "guidellm==0.8.1", "aiperf": "aiperf==0.13.0"}
#: Examples of ollama-python that need a model, a file or a service that is not here.
LEFT_OUT = (
    *("chat-with-history", "create", "pull", "multimodal-chat", "multimodal-generate"),
    *("structured-outputs-image", "generate-image", "web-search", "web-search-mcp"),
    *("web-search-gpt-oss", "web_search_gpt_oss_helper", "gpt-oss-tools", "ps"),
    *("gpt-oss-tools-stream", "fill-in-middle", "thinking", "thinking-generate"),
)


@contextlib.contextmanager
def serving(port: int) -> Iterator[str]:
    """Run a server with the default models, and yield its address."""
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="rekindle-suite-") as folder:
        command = [sys.executable, "-m", "rekindle.cli.main", "serve", "--model", "smollm2"]
        options = ["--embedding-model", "minilm", "--any-model-name", "--port", str(port)]
        storage = ["--cache-dir", folder, "--disk-cache", "0"]
        with (Path(folder) / "server.log").open("wb") as log:
            process = subprocess.Popen([*command, *options, *storage], stdout=log, stderr=log)
        try:
            _await_health(address, process)
            yield address
        finally:
            process.terminate()
            process.wait(60)


def _await_health(address: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            urllib.request.urlopen(f"{address}/health").close()
            return
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def sdk_environment(address: str) -> dict[str, str]:
    """The variables in which the SDKs look for their server."""
    return {
        "OPENAI_BASE_URL": f"{address}/v1",
        "OPENAI_API_KEY": "none",
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "none",
        "OLLAMA_HOST": address,
    }


def run(
    name: str, command: list[str], environment: Mapping[str, str], folder: Path = ROOT
) -> tuple[str, bool]:
    """Run a program, print the end of its output if it fails, and tell whether it succeeded."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROGRAM_S,
            check=False,
        )
        passed, shown = done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
    except subprocess.TimeoutExpired:
        passed, shown = False, f"took more than {PROGRAM_S:g} s"
    print(f"{'ok' if passed else 'FAILED'} {name}", flush=True)
    if not passed:
        print(shown[-1500:], flush=True)
    return name, passed


def sdk_examples(address: str) -> list[tuple[str, bool]]:
    command = [sys.executable, "-m", "tools.suites.examples"]
    return [run("examples of the SDKs", command, sdk_environment(address))]


def langchain_tests() -> list[tuple[str, bool]]:
    command = [sys.executable, "-m", "pytest", "-q", "tests/e2e/test_sdks.py"]
    return [run("standard tests of LangChain, calls of LiteLLM", command, {})]


def ollama_examples(address: str, folder: Path) -> list[tuple[str, bool]]:
    """Run the examples of ollama-python. `folder` is the folder `examples` of a checkout."""
    scripts = [each for each in sorted(folder.glob("*.py")) if each.stem not in LEFT_OUT]
    environment = sdk_environment(address)
    return [
        run(f"ollama-python {each.stem}", [sys.executable, str(each)], environment, folder)
        for each in scripts
    ]


def open_responses(address: str, folder: Path) -> list[tuple[str, bool]]:
    """Run the compliance tests of a checkout of Open Responses, which needs Bun."""
    options = ["--base-url", f"{address}/v1", "--api-key", "none", "--model", "default"]
    command = ["bun", "run", "bin/compliance-test.ts", *options]
    return [run("Open Responses compliance", command, {}, folder)]


def load_tools(address: str, build: Path) -> list[tuple[str, bool]]:
    """Run small loads. Only whether the tools understand the server is of interest here."""
    prompts = build / "prompts.jsonl"
    line = '{"prompt": "Say hello %d.", "output_tokens_count": 8}\n'
    prompts.write_text("".join(line % number for number in range(8)))
    commands = {
        "guidellm": [
            *("run", "--backend", f"kind=openai_http,target={address}"),
            *("--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=8"),
            *("--data", f"kind=json_file,path={prompts}", "--disable-console-interactive"),
            *("--output", f"kind=json,path={build / 'guidellm.json'}"),
        ],
        "aiperf": [
            *("profile", "--model", "default", "--url", address, "--endpoint-type", "chat"),
            *("--streaming", "--request-count", "8", "--concurrency", "2"),
            *("--isl", "64", "--osl", "16", "--tokenizer", "builtin", "--ui", "none"),
        ],
    }
    return [
        run(name, [str(_installed(build, name)), *options], {}, build)
        for name, options in commands.items()
    ]


def _installed(build: Path, name: str) -> Path:
    """Install a tool into an environment of its own, once, and return its program."""
    folder = build / name
    program = folder / "bin" / name
    if not program.exists():
        uv = str(Path(sys.executable).with_name("uv"))
        python = ["--python", str(folder / "bin" / "python")]
        subprocess.run([uv, "venv", "--quiet", "--clear", str(folder)], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", *python, LOAD_TOOLS[name]], check=True)
    return program
