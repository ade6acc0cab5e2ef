"""Implements `rekindle selftest`: checks the results on this machine, and writes a report.

It loads a model as a server does, with a cache of its own, and asks it over HTTP. The report can be
attached to an issue: it has no prompts, no paths and no keys.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import msgspec
import orjson
from rich.console import Console
from rich.markup import escape

from rekindle.bench.client import Recording, StreamedReply
from rekindle.cli.build_gpu import probe
from rekindle.config import Config
from rekindle.errors import ConfigError, RekindleError
from rekindle.event_stream import EventReader
from rekindle.front.launch import EmbeddedServer
from rekindle.models.catalogue import CATALOGUE
from rekindle.protocol.frames import Ready
from rekindle.protocol.settings import GB, usable_cores
from rekindle.version import __version__

QUESTIONS = ("When does it open on day 7?", "And on day 9?", "Which day is the latest?")
MIN_DAYS, TOKENS_PER_DAY = 30, 8  # a sentence of the notes has more tokens in every vocabulary
REPLY_TOKENS, SPEED_TOKENS = 24, 64
PARALLEL = 4
TIMEOUT_S = 900
PACKAGES = ("numpy", "mlx")  # libraries that compute; the report has the versions of installed ones
#: The same prompt has to give the same bits, so the answer may not depend on anything else.
EXACT = {
    "temperature": 0,
    "cache_exact": True,
    "max_tokens": REPLY_TOKENS,
    "ignore_eos": True,
    "logprobs": True,
    "top_logprobs": 2,
}
COLD = {"use_kv_cache": False}  # reuses nothing and keeps nothing
PATH = re.compile(r"(?<![\w<])(?:~|[A-Za-z]:)?[/\\][^\s'\",;]+")

Json = dict[str, Any]
Messages = list[dict[str, str]]


class CheckFailed(RekindleError):
    """A result is wrong. The message says which."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    name: str
    ok: bool
    detail: str
    duration_s: float


@dataclass(slots=True)
class Report:
    """The content of the file. It says nothing about the user."""

    rekindle: str = __version__
    machine: Json = field(default_factory=dict)
    library: Json = field(default_factory=dict)
    model: Json = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)


def selftest(config: Config, name: str, output: Path, console: Console) -> bool:
    """Check the model `name` on this machine and write the report. Returns whether all is well."""
    known = name if name in CATALOGUE else "not in the catalogue"
    report = Report(machine=_machine(), model={"name": known})
    _require_writable(output)
    with TemporaryDirectory(prefix="rekindle-selftest-") as folder:
        SelfTest(isolated(config, name, Path(folder)), report, console).run()
    output.write_bytes(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2) + b"\n")
    verdict = "[green]All checks passed.[/]" if report.ok else "[bold red]A check failed.[/]"
    where = f"{verdict} The report is in {escape(str(output))}."
    console.print(where, highlight=False, soft_wrap=True)
    return report.ok


def _require_writable(output: Path) -> None:
    is_new = not output.exists()
    try:
        output.touch()
        if is_new:
            output.unlink()
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {output} ({error.strerror}): give another --output"
        ) from None


def isolated(config: Config, name: str, folder: Path) -> Config:
    """The user's settings of the engine, without their keys, their cache and their models."""
    return Config(
        model=(name,),
        port=0,
        cache_dir=folder,
        disk_cache=2 * GB,
        log_level="error",
        models_dir=config.models_dir,
        engine=config.engine,
        llama_lib=config.llama_lib,
        threads=config.threads,
        gpu_layers=config.gpu_layers,
        kv_fraction=config.kv_fraction,
        park_fraction=config.park_fraction,
        max_model_len=config.max_model_len,
    )


class SelfTest:
    """Runs the checks on one server, and then on a second one with the same cache folder."""

    def __init__(self, config: Config, report: Report, console: Console) -> None:
        self._config = config
        self._report = report
        self._console = console
        self._notes = notes(0)
        self._last_turn: tuple[Messages, Json] | None = None  # a prompt with its cold answer

    def run(self) -> None:
        if not self._passes("library", self._library):
            return
        with self._server() as client:
            if client is None:
                return
            self._passes("streaming", lambda: self._streaming(client))
            self._passes("warm equals cold", lambda: self._conversation(client))
            self._passes("parallel requests", lambda: _parallel(client))
            self._passes("speed", lambda: self._speed(client))
        with self._server() as client:
            if client is not None:
                self._passes("restart", lambda: self._restart(client))

    def _passes(self, name: str, check: Callable[[], str]) -> bool:
        # Loading a model shows its own progress.
        shown = nullcontext() if name == "model" else self._console.status(f"Checking: {name}")
        started_s = time.monotonic()
        try:
            with shown:
                detail, ok = check(), True
        except (RekindleError, httpx.HTTPError) as error:
            detail, ok = str(error), False
        duration_s = round(time.monotonic() - started_s, 2)
        self._report.checks.append(CheckResult(name, ok, without_paths(detail), duration_s))
        mark = "[green]ok[/]    " if ok else "[bold red]failed[/]"
        self._console.print(
            f"{mark} {name}: {escape(detail)} ({duration_s:.1f} s)", highlight=False, soft_wrap=True
        )
        return ok

    @contextmanager
    def _server(self) -> Iterator[ChatClient | None]:
        """Load the model and serve it. None: it does not load, which is a failed check."""
        servers: list[EmbeddedServer] = []

        def load() -> str:
            servers.append(EmbeddedServer(self._config))
            servers[0].serve(self._config)
            return self._model(servers[0].models.all[0].loaded)

        try:
            if not self._passes("model", load):
                yield None
                return
            assert servers[0].base_url is not None
            with httpx.Client(base_url=servers[0].base_url, timeout=TIMEOUT_S) as http:
                yield ChatClient(http)
        finally:
            for server in servers:
                server.close()

    def _library(self) -> str:
        info = probe(self._config.llama_lib)
        own = self._config.llama_lib is not None
        self._report.library = {**msgspec.to_builtins(info), "built_by_user": own}
        devices = " and ".join(gpu.name for gpu in info.gpus)
        return f"{info.engine} {info.digest} on {devices or 'the CPU'}"

    def _model(self, ready: Ready) -> str:
        self._report.model |= {
            "architecture": ready.architecture,
            "parameters": ready.parameters,
            "quantization": ready.quantization,
            "context_tokens": ready.context_tokens,
            "layers": ready.layers,
            "gpu_layers": ready.gpu_layers,
            "exact_step_tokens": ready.exact_step_tokens,
            "capacities": {each.place: each.tokens for each in ready.capacities},
        }
        self._notes = notes(ready.exact_step_tokens)
        where = f", {ready.gpu_layers} of {ready.layers} layers on the GPU" if ready.gpus else ""
        return f"{ready.architecture}, context of {ready.context_tokens} tokens{where}"

    def _streaming(self, client: ChatClient) -> str:
        messages = _question(QUESTIONS[1])
        whole = client.ask(messages, EXACT | COLD)
        stream = client.stream(messages, EXACT | COLD)
        if stream.text != _text(whole):
            raise CheckFailed("a streamed answer differs from the same answer in one piece")
        if stream.first_s == stream.last_s:
            raise CheckFailed("a stream arrived in one piece")
        return "equal to the whole answer"

    def _conversation(self, client: ChatClient) -> str:
        """Three turns, each computed without the cache and then with it."""
        messages: Messages = []
        reused = 0
        first, *later = QUESTIONS
        for number, question in enumerate((f"{self._notes} {first}", *later), 1):
            messages = [*messages, *_question(question)]
            cold = client.ask(messages, EXACT | COLD)
            warm = client.ask(messages, EXACT)
            _require_equal(
                warm, cold, f"the warm answer of turn {number} differs from the cold one"
            )
            if number > 1:
                reused += _require_reuse(warm, f"turn {number} reused nothing")
            self._last_turn = messages, cold
            messages = [*messages, {"role": "assistant", "content": _text(warm)}]
        return f"{len(QUESTIONS)} turns with equal bits, {reused} prompt tokens reused"

    def _restart(self, client: ChatClient) -> str:
        if self._last_turn is None:
            raise CheckFailed("there is no conversation to continue, because its check failed")
        messages, cold = self._last_turn
        warm = client.ask(messages, EXACT)
        _require_equal(warm, cold, "the answer after a restart differs from the cold one")
        reused = _require_reuse(warm, "a restarted server reused nothing")
        return f"equal bits, {reused} prompt tokens from {warm['x_cache']['tier'] or 'nowhere'}"

    def _speed(self, client: ChatClient) -> str:
        options = {"temperature": 0, "max_tokens": SPEED_TOKENS, "ignore_eos": True}
        reply = client.stream(_question(f"{self._notes} {self._notes} Sum up."), options | COLD)
        prompt_tokens, decoded = reply.usage.prompt_tokens, reply.usage.completion_tokens - 1
        speed = self._report.speed = {
            "prompt_tokens": prompt_tokens,
            "first_token_s": round(reply.ttft_s, 4),
            "prefill_tokens_per_s": round(prompt_tokens / reply.ttft_s, 1),
            "decode_tokens_per_s": round(decoded / max(reply.last_s - reply.first_s, 1e-6), 1),
        }
        return (
            f"prefill {speed['prefill_tokens_per_s']} tokens/s, "
            f"decode {speed['decode_tokens_per_s']} tokens/s"
        )


class ChatClient:
    """Asks the server. Raises CheckFailed for answers that are errors."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def ask(self, messages: Messages, options: Json) -> Json:
        response = self._http.post("chat/completions", json={"messages": messages, **options})
        if response.is_error:
            raise CheckFailed(f"the server answered {response.status_code}: {response.text[:300]}")
        answer: Json = response.json()
        return answer

    def stream(self, messages: Messages, options: Json) -> StreamedReply:
        fields = {"messages": messages, "stream": True, **options}
        fields["stream_options"] = {"include_usage": True}
        recording, reader, is_whole = Recording(time.monotonic()), EventReader(), False
        with self._http.stream("POST", "chat/completions", json=fields) as response:
            if response.is_error:
                raise CheckFailed(f"the server answered {response.status_code} to a stream")
            for data in (data for part in response.iter_bytes() for data in reader.feed(part)):
                recording.take(data, time.monotonic())
                is_whole = data == "[DONE]"
        if not is_whole:
            raise CheckFailed("a stream ended early")
        return recording.finish(time.monotonic())


def notes(step_tokens: int) -> str:
    """Return a text of more than one step, because exact mode reuses only whole steps."""
    days = range(1, 1 + max(MIN_DAYS, step_tokens // TOKENS_PER_DAY))
    return " ".join(f"On day {day} the harbour opens at {day % 12 + 1}." for day in days)


def _text(answer: Json) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def _question(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def _require_equal(answer: Json, expected: Json, problem: str) -> None:
    """Compare texts and the probabilities behind them."""
    if _text(answer) != _text(expected):
        raise CheckFailed(f"{problem}: another text")
    if answer["choices"][0]["logprobs"] != expected["choices"][0]["logprobs"]:
        raise CheckFailed(f"{problem}: the same text with other probabilities")


def _require_reuse(answer: Json, problem: str) -> int:
    """Return how many prompt tokens were reused. On a fast machine computing may take less time."""
    found = answer["x_cache"]
    reused: int = found["reused_tokens"]
    if not reused and found["reason"] != "computed_cheaper":
        raise CheckFailed(f"{problem} ({found['reason']})")
    return reused


def _parallel(client: ChatClient) -> str:
    options = {"temperature": 0, "max_tokens": REPLY_TOKENS, "ignore_eos": True}
    asked = [_question(f"{number} boats and {number} boats?") for number in range(PARALLEL)]
    with ThreadPoolExecutor(PARALLEL) as pool:
        answers = list(pool.map(lambda messages: client.ask(messages, options), asked))
    counts = [answer["usage"]["completion_tokens"] for answer in answers]
    if counts != [REPLY_TOKENS] * PARALLEL:
        raise CheckFailed(f"answers have {counts} tokens, and not {REPLY_TOKENS} each")
    return f"{PARALLEL} answers at a time"


def without_paths(text: str) -> str:
    """Remove everything from a message that could be a path of the user."""
    return PATH.sub("<path>", text)


def _machine() -> Json:
    return {
        "system": platform.system(),
        "release": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GB, 1),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES if find_spec(name)},
    }


def _processor() -> str:
    """The name of the processor, if the system has it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return platform.processor()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor()
