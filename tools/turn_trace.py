"""Prints the modules that take part in answering one plain chat turn.

`python tools/turn_trace.py` starts `rekindle serve` with an empty cache and sends a chat turn. It
then traces the second, streamed turn in every process of the server. A module counts if one of its
functions runs; importing it does not count. `--list` prints the modules.

The trace uses a profile function that Python installs at the start of each server process, because
the folder of this trace has a `sitecustomize.py` that calls `install_probe`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

FOLDER_VARIABLE, PACKAGE_VARIABLE = "TURN_TRACE_FOLDER", "TURN_TRACE_PACKAGE"
START_S, REPLY_S, REPORT_S = 120, 120, 10
SETTLE_S = 3  # after a turn the server writes its state to disk
ROOT = "(root)"  # modules of the package that are in no folder

Message = dict[str, str]
FIRST_TURN: list[Message] = [
    {"role": "system", "content": "You are a patient teacher. " * 12},
    {"role": "user", "content": "What is gravity?"},
]
FOLLOW_UP: Message = {"role": "user", "content": "And what is mass?"}


class Probe:
    """Records in a server process which files of the package have a function that is called."""

    def __init__(self, package: str, report: Path) -> None:
        self._package = package
        self._report = report
        self._files: set[str] = set()
        self._is_recording = False

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self._is_recording and event == "call" and frame.f_code.co_name != "<module>":
            path = frame.f_code.co_filename
            if path.startswith(self._package):
                self._files.add(path)

    def start(self, *_: object) -> None:
        self._files.clear()
        self._is_recording = True

    def stop(self, *_: object) -> None:
        self._is_recording = False
        self._report.write_text("".join(f"{path}\n" for path in sorted(self._files)) + "\n")


def install_probe() -> None:
    """Trace this process. SIGUSR1 starts the recording, SIGUSR2 ends it and writes a report."""
    report = Path(os.environ[FOLDER_VARIABLE], f"{os.getpid()}.report")
    probe = Probe(os.environ[PACKAGE_VARIABLE], report)
    signal.signal(signal.SIGUSR1, probe.start)
    signal.signal(signal.SIGUSR2, probe.stop)
    threading.setprofile(probe.profile)
    sys.setprofile(probe.profile)
    report.touch()  # only now the process can be signalled


def modules_in(reports: Iterable[str], package: Path) -> list[str]:
    """The modules of all reports, as paths relative to the package."""
    paths = {line for report in reports for line in report.splitlines() if line}
    return sorted(Path(path).relative_to(package).as_posix() for path in paths)


def count_by_folder(modules: Iterable[str]) -> dict[str, int]:
    """The number of modules in each folder of the package, largest first."""
    folders = (module.split("/")[0] if "/" in module else ROOT for module in modules)
    return dict(Counter(folders).most_common())


def streamed_text(lines: Iterable[bytes]) -> str:
    """The text of a streamed chat completion."""
    text = ""
    for line in lines:
        if line.startswith(b"data: {"):
            for choice in json.loads(line.removeprefix(b"data: "))["choices"]:
                text += choice["delta"].get("content") or ""
    return text


def ask(url: str, messages: list[Message]) -> str:
    body = {"messages": messages, "stream": True, "max_tokens": 12, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=REPLY_S) as reply:
        return streamed_text(reply)


@contextlib.contextmanager
def serving(folder: Path, package: Path, flags: list[str]) -> Iterator[str]:
    """Run `rekindle serve` with the probe installed, and yield its URL."""
    (folder / "sitecustomize.py").write_text("import turn_trace\nturn_trace.install_probe()\n")
    found = [str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "REKINDLE_CACHE_DIR": str(folder / "kv"),
        FOLDER_VARIABLE: str(folder),
        PACKAGE_VARIABLE: f"{package}{os.sep}",
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("rekindle")), "serve", "--port", str(port)]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, *flags], cwd=folder, env=environment, stdout=output, stderr=output
        )
    try:
        yield await_server(server, f"http://127.0.0.1:{port}", log)
    finally:
        server.terminate()
        server.wait(60)


def await_server(server: subprocess.Popen[bytes], url: str, log: Path) -> str:
    """Wait until the server answers, and return its URL."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            return url
        time.sleep(0.2)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def send_signal(folder: Path, number: signal.Signals) -> list[Path]:
    """Signal every traced process that is alive, and return their reports."""
    reports = []
    for report in folder.glob("*.report"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(report.stem), number)
            reports.append(report)
    return reports


def collect_reports(folder: Path) -> list[str]:
    """End the recording in all processes and read their reports."""
    reports = send_signal(folder, signal.SIGUSR2)
    deadline = time.monotonic() + REPORT_S
    while not all(report.stat().st_size for report in reports) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [report.read_text() for report in reports]


def trace_second_turn(package: Path, flags: list[str]) -> list[str]:
    """The modules of the package that take part in the second turn of a conversation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with serving(folder, package, flags) as url:
            reply = {"role": "assistant", "content": ask(url, FIRST_TURN)}
            time.sleep(SETTLE_S)
            send_signal(folder, signal.SIGUSR1)
            ask(url, [*FIRST_TURN, reply, FOLLOW_UP])
            time.sleep(SETTLE_S)
            return modules_in(collect_reports(folder), package)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Print the modules that take part in answering one plain chat turn.",
        epilog="All other arguments are passed to `rekindle serve`.",
    )
    parser.add_argument("--list", action="store_true", help="print the modules, too")
    options, flags = parser.parse_known_args()
    spec = importlib.util.find_spec("rekindle")
    if spec is None or spec.origin is None:
        raise SystemExit("rekindle is not installed in this environment; run `make install`")
    modules = trace_second_turn(Path(spec.origin).parent, flags)
    if options.list:
        print("\n".join(modules))
    for folder, count in count_by_folder(modules).items():
        print(f"{count:4} {folder}")
    print(f"{len(modules):4} modules in total")


if __name__ == "__main__":
    main()
