"""Implements `rekindle build-gpu`: builds llama.cpp for this machine's GPU and remembers it.

A script next to this module compiles. Everything that it needs is checked first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import msgspec
import yaml
from rich.console import Console
from rich.markup import escape

from rekindle.config import default_files, load_config
from rekindle.errors import RekindleError
from rekindle.front.gpus import machine_gpus
from rekindle.models.package import find_uv, pip_command
from rekindle.models.progress import OnProgress, progress_bar
from rekindle.protocol.frames import LibraryInfo
from rekindle.protocol.settings import GB, LIBRARY_VARIABLE, usable_cores

Kind = Literal["cuda", "vulkan", "metal", "cpu"]

SCRIPT = Path(__file__).with_name("build-llama.sh")
SETTING = "llama_lib"
COMPILER_BYTES = {"cuda": 2 * GB, "vulkan": GB, "metal": GB, "cpu": GB}  # memory of one compiler
BUILD_BYTES = 4 * GB
CUDA_FOLDERS = ("/usr/local/cuda/bin", "/opt/cuda/bin")
VULKAN_HEADER = "vulkan/vulkan.h"
STEP = re.compile(r"\[\s*(\d+)(?:/(\d+)|%)\]")  # of ninja, or of make
SHOWN_LINES = 15


class BuildFailed(RekindleError):
    """The machine lacks something, or the build failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    kind: Kind
    arch: str = "native"  # CUDA architectures
    source: Path | None = None  # archive or folder; None: download it
    out: Path
    jobs: int | None = None  # compilers at a time; None: as many as cores and memory allow


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that the build needs: what was found, or what is missing and the remedy."""

    ok: bool
    sentence: str


def default_kind() -> Kind:
    """CUDA for an NVIDIA GPU, Metal on a Mac, and Vulkan for other GPUs."""
    if sys.platform == "darwin":
        return "metal"
    gpus = machine_gpus()
    if not gpus:
        raise BuildFailed(
            "this machine shows no GPU. Check its driver, or say what to build for: "
            "rekindle build-gpu cuda (or vulkan, metal, cpu)"
        )
    return "cuda" if any("NVIDIA" in name for name in gpus) else "vulkan"


def default_folder(kind: Kind) -> Path:
    """A folder that outlives the environment, and that nobody clears like a cache."""
    base = Path(os.environ.get("XDG_DATA_HOME", ""))
    folder = base if base.is_absolute() else Path("~/.local/share").expanduser()
    return folder / "rekindle" / f"llama-{kind}"


def build_gpu(options: BuildOptions, console: Console) -> Path:
    """Check the machine, build the library, try it and write it into the settings."""
    _require(checks(options), console)
    if _settings_file().exists():
        load_config({}, file=_settings_file())  # a broken file is reported before the build
    with TemporaryDirectory(prefix="rekindle-") as scratch:
        source = options.source or _download(Path(scratch), console)
        library = _compile(options, source, console)
    info = probe(library)
    if not info.gpus and options.kind != "cpu":
        raise BuildFailed(
            f"{library} was built, but it finds no GPU, so it is not used. Check the GPU's driver "
            f"and run this command again, or set `{SETTING}: {library}` in rekindle.yaml."
        )
    for gpu in info.gpus:
        _say(console, f"The library finds {gpu.name} with {gpu.memory_bytes / GB:.1f} GB.")
    remember(library, console)
    return library


def _say(console: Console, text: str) -> None:
    console.print(escape(text), highlight=False, soft_wrap=True)


def checks(options: BuildOptions) -> Iterator[Check]:
    yield from _tools(options.kind)
    yield _driver(options)
    yield _memory(options)
    yield _disk(options.out)


def _require(found: Iterator[Check], console: Console) -> None:
    missing = []
    for check in found:
        _say(console, f"{'ok:     ' if check.ok else 'missing:'} {check.sentence}")
        missing += [] if check.ok else [check.sentence]
    if missing:
        raise BuildFailed("the build cannot start. Add what is missing and run this command again.")


def _tools(kind: Kind) -> Iterator[Check]:
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    advice = "Install one (Debian and Ubuntu: apt install g++; macOS: xcode-select --install)."
    yield Check(bool(compiler), compiler or f"A C++ compiler is needed. {advice}")
    yield _tool("cmake", "Install it (apt install cmake, brew install cmake or pip install cmake).")
    if kind == "cuda":
        yield _tool("nvcc", "Install NVIDIA's CUDA toolkit, or choose vulkan.", *CUDA_FOLDERS)
    if kind == "vulkan":
        yield _tool("glslc", "Install it (Debian and Ubuntu: apt install glslc libvulkan-dev).")
        yield _vulkan_headers()


def _tool(name: str, advice: str, *folders: str) -> Check:
    found = shutil.which(name, path=_search_path(*folders))
    return Check(bool(found), found or f"The program {name} is needed. {advice}")


def _search_path(*folders: str) -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *folders])


def _vulkan_headers() -> Check:
    sdk = os.environ.get("VULKAN_SDK")
    folders = [Path("/usr/include"), Path("/usr/local/include")]
    folders += [Path(sdk, "include")] if sdk else []
    found = next((each for folder in folders if (each := folder / VULKAN_HEADER).exists()), None)
    advice = "Install them (Debian and Ubuntu: apt install libvulkan-dev)."
    return Check(bool(found), str(found) if found else f"Vulkan's headers are needed. {advice}")


def _driver(options: BuildOptions) -> Check:
    gpus = machine_gpus()
    if gpus:
        return Check(True, " and ".join(dict.fromkeys(gpus)))
    if options.kind == "cuda" and options.arch == "native":
        return Check(
            False,
            "No NVIDIA driver answers (nvidia-smi), so the kind of the GPU is unknown. Install the "
            "driver, or give the architecture of the GPU, such as --arch 86.",
        )
    unknown = "This machine shows no GPU. " if options.kind in ("cuda", "vulkan") else ""
    return Check(True, f"{unknown}The build is for {options.kind}.")


def _memory(options: BuildOptions) -> Check:
    from rekindle.memory import host_free_bytes  # slow to import, because it needs NumPy

    free_bytes = host_free_bytes()
    jobs = _jobs(options, free_bytes)
    needed_bytes = jobs * COMPILER_BYTES[options.kind]
    compilers = "One compiler needs" if jobs == 1 else f"{jobs} compilers at a time need"
    found = (
        f"{compilers} {needed_bytes / GB:.0f} GB of memory, and {free_bytes / GB:.1f} GB is free."
    )
    if needed_bytes <= free_bytes:
        return Check(True, found)
    advice = "Lower --jobs." if jobs > 1 else "Close other programs."
    return Check(False, f"{found} {advice}")


def _jobs(options: BuildOptions, free_bytes: int) -> int:
    fitting = max(1, free_bytes // COMPILER_BYTES[options.kind])
    return options.jobs or min(usable_cores(), fitting)


def _disk(out: Path) -> Check:
    existing = next(each for each in (out, *out.absolute().parents) if each.exists())
    free_bytes = shutil.disk_usage(existing).free
    enough = free_bytes >= BUILD_BYTES
    advice = "" if enough else f" A build takes {BUILD_BYTES / GB:.0f} GB: choose another --out."
    return Check(enough, f"{free_bytes / GB:.0f} GB of disk is free under {existing}.{advice}")


def _download(folder: Path, console: Console) -> Path:
    """Download the sources that the installed library was built from."""
    requirement = probe(None).source
    pip = pip_command()
    if pip is None and (uv := find_uv()):
        pip = (uv, "tool", "run", "pip")
    if pip is None:
        raise BuildFailed("downloading the sources needs pip or uv: give them with --source")
    command = [*pip, "download", "--no-deps", "--no-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    with progress_bar(f"Downloading {requirement}", console):
        done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or not found:
        reason = " ".join(done.stderr.split()[-60:])
        raise BuildFailed(
            f"the sources ({requirement}) could not be downloaded: {reason}. Check the network, or "
            "give them with --source."
        )
    return found[0]


def _compile(options: BuildOptions, source: Path, console: Console) -> Path:
    """Run the script, show its progress, and return the library that it built."""
    from rekindle.memory import host_free_bytes  # slow to import, because it needs NumPy

    options.out.mkdir(parents=True, exist_ok=True)
    log = options.out / "build.log"
    command = ["bash", str(SCRIPT), f"--{options.kind}", "--arch", options.arch]
    command += ["--source", str(source), "--out", str(options.out)]
    command += ["--jobs", str(_jobs(options, host_free_bytes()))]
    _say(console, f"Compiling llama.cpp into {options.out}. This takes minutes.")
    with progress_bar("Compiling", console) as on_progress:
        lines = _run_logged(command, log, _printing(on_progress, console))
    prefix = f"{LIBRARY_VARIABLE}="
    library = next((line.removeprefix(prefix) for line in lines if line.startswith(prefix)), None)
    if library is None:
        told = "\n".join(_first_error(lines))
        raise BuildFailed(f"llama.cpp could not be compiled. The log is {log}. It says:\n{told}")
    return Path(library)


def _first_error(lines: list[str]) -> list[str]:
    """Return the lines from the first error on, or the last lines. Later errors often follow.

    CMake puts blank lines between an error and its reason.
    """
    lines = [line for line in lines if line]
    is_error = re.compile(r"\berror\b|build-llama:", re.IGNORECASE).search
    start = next((n for n, line in enumerate(lines) if is_error(line)), -SHOWN_LINES)
    return lines[start:][:SHOWN_LINES]


def _printing(on_progress: OnProgress, console: Console) -> OnProgress:
    """Print a line at each tenth of the work, because there is no terminal for a bar."""
    printed = 0

    def report(done: float, total: float) -> None:
        nonlocal printed
        on_progress(done, total)
        tenths = int(10 * done / total)
        if not console.is_terminal and tenths > printed:
            printed = tenths
            _say(console, f"Compiling: {10 * tenths}%")

    return report


def _run_logged(command: list[str], log: Path, on_progress: OnProgress) -> list[str]:
    """Run a command, write its output to `log` and return it."""
    environment = os.environ | {"PATH": _search_path(*CUDA_FOLDERS)}
    lines = []
    with (
        log.open("w", buffering=1) as written,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                written.write(line)
                lines.append(line.rstrip())
                if step := STEP.match(line):
                    on_progress(float(step[1]), float(step[2] or 100))
        except BaseException:  # an interrupt, too
            process.terminate()
            raise
    return lines


def probe(library: Path | None) -> LibraryInfo:
    """Load a library, or the installed one, in another process. Raises BuildFailed."""
    environment = {name: value for name, value in os.environ.items() if name != LIBRARY_VARIABLE}
    environment |= {LIBRARY_VARIABLE: str(library)} if library else {}
    command = [sys.executable, "-m", "rekindle.runtime.probe"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        reason = done.stderr.strip() or f"its process ended with status {done.returncode}"
        raise BuildFailed(f"the library {library or ''} cannot be used: {reason}")
    [info] = msgspec.json.decode(done.stdout, type=list[LibraryInfo])
    return info


def _settings_file() -> Path:
    """The user's own settings file."""
    return default_files()[-1]


def remember(library: Path, console: Console) -> None:
    """Write the library into the user's settings. All other lines stay as they are."""
    file = _settings_file()
    line = f"{SETTING}: {yaml.safe_dump(str(library), default_flow_style=True).splitlines()[0]}"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    kept = [each for each in text.splitlines() if not re.match(r"llama[_-]lib\s*:", each)]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([*kept, line, ""]), encoding="utf-8")
    _say(console, f"`rekindle serve` uses it from now on: {file} says `{line}`.")
    named = os.environ.get("REKINDLE_CONFIG")
    read = Path(named) if named else next(each for each in default_files() if each.exists())
    if read != file:
        _say(console, f"{read} is read instead of that file: add the line there, too.")
