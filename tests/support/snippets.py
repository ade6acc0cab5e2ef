"""Finds the snippets of a Markdown page, and runs them in order as a reader would.

A comment before a fence says how its snippet is treated:

    <!-- not run: needs a GPU -->     never run, with the reason
    <!-- long: loads two models -->   run by `make stress` only, with the reason
    <!-- continues -->                run after the previous snippet of its language, in one program
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from rekindle.config.sources import ENV_PREFIX
from tests.support.server import ROOT, free_port

RUN_TIMEOUT_S = 300
STOP_TIMEOUT_S = 30
SHELL = ("sh", "bash")
PYTHON = ("python",)
PORTS = (
    "8080",
    "8000",
    "11434",
)  # of servers in the snippets; each gets a free port in their place
SERVER = re.compile(r"(?:127\.0\.0\.1|localhost):(?:8080|11434)")
FENCE = re.compile(r"^( *)```+(\w*) *\n(.*?)^\1```+ *$", re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"<!-- *(not run|long|continues)(?:: *(.+?))? *-->\s*\Z")
MODELS = Path("~/.cache/rekindle/models").expanduser()

CLIENTS = re.compile(r"rekindle (chat|bench|ps|cache (?!check))")  # these commands ask a server

#: Takes the place of the command `rekindle`. A server runs in the background until the page ends,
#: and the commands that ask a server find the page's one.
COMMAND = """#!{python}
import sys
from pathlib import Path
from tests.support.snippets import CLIENTS, serve
from rekindle.cli.main import main
if sys.argv[1:2] == ["serve"]:
    sys.exit(serve(sys.argv[1:], Path({folder!r})))
if CLIENTS.match(" ".join(["rekindle", *sys.argv[1:]])) and "--base-url" not in sys.argv:
    sys.argv += ["--base-url", "http://127.0.0.1:{port}/v1"]
main()
"""


@dataclass(frozen=True)
class Snippet:
    page: Path
    line: int
    language: str  # empty: the fence names none
    code: str
    not_run: str | None = None  # the reason
    long: str | None = None  # the reason
    continues: bool = False

    @property
    def is_runnable(self) -> bool:
        return self.language in (*SHELL, *PYTHON) and self.not_run is None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def snippets_of(page: Path) -> list[Snippet]:
    text = page.read_text(encoding="utf-8")
    return [_snippet(page, text, fence) for fence in FENCE.finditer(text)]


def _snippet(page: Path, text: str, fence: re.Match[str]) -> Snippet:
    before = text[: fence.start()]
    line = before.count("\n") + 1
    indent, language, code = fence.groups()
    code = re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)
    kind = reason = None
    if marker := MARKER.search(before):
        kind, reason = marker.groups()
        if (reason is None) != (kind == "continues"):
            raise ValueError(f"{page.name}:{line}: write `<!-- {kind}: the reason -->`")
    return Snippet(
        page,
        line,
        language,
        code,
        not_run=reason if kind == "not run" else None,
        long=reason if kind == "long" else None,
        continues=kind == "continues",
    )


@dataclass
class Reader:
    """Runs snippets of one page in a folder of its own, with one server."""

    folder: Path
    ports: dict[str, int] = field(default_factory=lambda: {port: free_port() for port in PORTS})
    _programs: dict[str, str] = field(default_factory=dict)  # the last one, by language

    def __post_init__(self) -> None:
        commands = self.folder / "bin"
        commands.mkdir(parents=True)
        content = COMMAND.format(
            python=sys.executable, folder=str(self.folder), port=self.ports["8080"]
        )
        (commands / "rekindle").write_text(content)
        (commands / "rekindle").chmod(0o755)
        (self.folder / ".curlrc").write_text("fail-with-body\nshow-error\n")
        (self.folder / "work").mkdir()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        stop_server(self.folder)

    def run(self, snippet: Snippet) -> None:
        """Run a snippet. Raises AssertionError with its output if it fails."""
        code = re.sub(
            rf"\b({'|'.join(PORTS)})\b", lambda port: str(self.ports[port[0]]), snippet.code
        )
        if snippet.continues:
            code = self._programs[snippet.language] + code
        self._programs[snippet.language] = code
        asks = SERVER.search(snippet.code) or CLIENTS.search(snippet.code)
        if asks and "rekindle serve" not in snippet.code:
            self._ensure_server()
        shell = ["bash", "-e", "-o", "pipefail", "-c", code]
        self._call(
            shell if snippet.language in SHELL else [sys.executable, "-c", code], str(snippet)
        )

    def _ensure_server(self) -> None:
        if not pid_file(self.folder).exists():
            self._call(["rekindle", "serve"], "the server of the page")

    def _call(self, command: list[str], what: str) -> None:
        ran = subprocess.run(
            command,
            cwd=self.folder / "work",
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
        )
        assert ran.returncode == 0, f"{what} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}"

    def _environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)
        }
        folders = [self.folder / "bin", Path(sys.executable).parent]
        return {
            **kept,
            "PATH": os.pathsep.join([*map(str, folders), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder / "work"),
            "CURL_HOME": str(self.folder),
            "REKINDLE_PORT": str(self.ports["8080"]),
            "REKINDLE_THREADS": "1",
            "REKINDLE_MODELS_DIR": str(MODELS),
            "REKINDLE_CACHE_DIR": str(self.folder / "kv"),
        }


def pid_file(folder: Path) -> Path:
    return folder / "server.pid"


def serve(arguments: list[str], folder: Path) -> int:
    """Start a server in the background in place of the page's last one, and wait for it."""
    stop_server(folder)
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "rekindle.cli.main", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    pid_file(folder).write_text(str(process.pid))
    for _ in _waits(RUN_TIMEOUT_S):
        if process.poll() is not None:
            break
        if _is_healthy(_port(arguments)):
            return 0
    print(f"the server did not start:\n{log.read_text()}", file=sys.stderr)
    return 1


def _port(arguments: list[str]) -> str:
    """The port of the server, which the snippet may choose itself."""
    given = re.search(r"--port[ =](\d+)", " ".join(arguments))
    return given[1] if given else os.environ["REKINDLE_PORT"]


def _is_healthy(port: str) -> bool:
    try:
        answer = httpx.get(f"http://127.0.0.1:{port}/health")
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK


def stop_server(folder: Path) -> None:
    """Stop the page's server, if it has one, and wait until it has written its state."""
    if not pid_file(folder).exists():
        return
    pid = int(pid_file(folder).read_text())
    pid_file(folder).unlink()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        for _ in _waits(STOP_TIMEOUT_S):
            if not is_running(pid):
                return


def is_running(pid: int) -> bool:
    """Whether a process runs that is not our child. One that nobody waits for does not count."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # no /proc, so init collects the process
        return True


def _waits(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(0.1)
