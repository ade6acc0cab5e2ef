"""Implements `rekindle doctor`: checks whether `rekindle serve` would work here, and how well.

It takes the flags of `serve` and changes nothing. A check that fails means that the server would
not start or could not answer. A warning means that it would serve slowly, or forget.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from rekindle.cli.build_gpu import BuildFailed, probe
from rekindle.config import Config
from rekindle.errors import RekindleError
from rekindle.front.gpus import machine_gpus
from rekindle.front.launch import bind, check_settings, named_models
from rekindle.front.traces import open_tracer
from rekindle.http.key_file import KeyFile
from rekindle.kvcache.disk.check import check as check_cache
from rekindle.kvcache.disk.folder import used_bytes
from rekindle.kvcache.disk.secret import read_secret_file
from rekindle.memory import host_free_bytes
from rekindle.models.catalogue import HubModel, PackagedModel, locate
from rekindle.models.pull import check_whole
from rekindle.protocol.frames import LibraryInfo
from rekindle.protocol.settings import GB, GIB, MB, format_size, usable_cores
from rekindle.version import __version__

Status = Literal["ok", "warning", "failed"]

FEW_FILES, MANY_FILES = 256, 4096  # open files
SLOW_DISK_MB_S = 100
SAMPLE_BYTES = 64 * MB  # what the test of the disk writes and reads
CHECKED_BYTES = 2 * GB  # a larger cache takes too long to verify here
COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What one check found, and what to do about it."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the checks ask of this machine. Tests replace parts of it."""

    free_memory: Callable[[], int] = host_free_bytes
    free_disk: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    gpus: Callable[[], list[str]] = machine_gpus
    library: Callable[[Path | None], LibraryInfo] = probe
    limits: Callable[[], tuple[int, int]] = field(default=lambda: _limits())


def _limits() -> tuple[int, int]:
    """The hard limits of open files and of locked memory in bytes. -1: unlimited."""
    try:
        import resource
    except ImportError:  # Windows
        return -1, -1
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] if _has_memlock(resource) else -1
    return files, locked


def _has_memlock(module: object) -> bool:
    return hasattr(module, "RLIMIT_MEMLOCK")


def examine(config: Config, machine: Surroundings | None = None) -> Iterator[Diagnosis]:
    """Run all checks, the quick ones first. A check that breaks is a finding, too."""
    doctor = Doctor(config, machine or Surroundings())
    for name, run in doctor.checks():
        try:
            yield from run()
        except (RekindleError, OSError) as error:
            yield _failed(name, str(error))


def report(findings: Sequence[Diagnosis], console: Console) -> None:
    """Print one line per finding, and a verdict."""
    width = max((len(each.name) for each in findings), default=0)
    for each in findings:
        mark = f"[{COLOURS[each.status]}]{each.status:<7}[/]"
        remedy = f" -> {each.remedy}" if each.remedy else ""
        line = f"{mark} {each.name:<{width}}  {escape(each.detail + remedy)}"
        console.print(line, highlight=False, soft_wrap=True)
    if works(findings):
        verdict = "[green]`rekindle serve` would work here.[/]"
    else:
        verdict = "[bold red]`rekindle serve` would not work here.[/] See what failed above."
    console.print(verdict, highlight=False, soft_wrap=True)


def works(findings: Sequence[Diagnosis]) -> bool:
    return all(each.status != "failed" for each in findings)


def _ok(name: str, detail: str) -> Diagnosis:
    return Diagnosis(name, "ok", detail)


def _warning(name: str, detail: str, remedy: str) -> Diagnosis:
    return Diagnosis(name, "warning", detail, remedy)


def _failed(name: str, detail: str, remedy: str = "") -> Diagnosis:
    """The errors of other modules say what to do themselves."""
    return Diagnosis(name, "failed", detail, remedy)


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.1f} GB"


class Doctor:
    """The checks of one configuration on one machine."""

    def __init__(self, config: Config, machine: Surroundings) -> None:
        self._config = config
        self._machine = machine
        self._library: LibraryInfo | None = None

    def checks(self) -> list[tuple[str, Callable[[], Iterator[Diagnosis]]]]:
        return [
            ("settings", self._settings),
            ("keys", self._keys),
            ("port", self._ports),
            ("log", self._log),
            ("open files", self._open_files),
            ("library", self._native_library),
            ("cpu", self._cpu),
            ("gpu", self._gpu),
            ("models", self._models),
            ("memory", self._memory),
            ("page-locking", self._page_locking),
            ("disk", self._disk),
            ("cache", self._cache),
        ]

    # -- the configuration ---------------------------------------------------------------------

    def _settings(self) -> Iterator[Diagnosis]:
        check_settings(self._config)
        file = self._config.settings_file
        if file is None:
            yield _ok("settings", "no settings file; flags, variables and defaults are valid")
            return
        secrets = {"api_key", "admin_key"} & {
            name for name, where in self._config.given.items() if where == str(file)
        }
        if secrets and _others_can_read(file):
            yield _warning(
                "settings", f"other users can read {file}, which has API keys", f"chmod 600 {file}"
            )
        else:
            yield _ok("settings", f"{file} is valid")

    def _keys(self) -> Iterator[Diagnosis]:
        config, file = self._config, self._config.api_keys_file
        if config.cache_secret_file is not None:
            read_secret_file(config.cache_secret_file)
        if file is None:
            count = len(config.api_key) + len(config.admin_key)
            yield _ok("keys", f"{count} keys" if count else "no keys: everybody here is an admin")
            return
        count = len(KeyFile(file, warns=False).keys())
        if _others_can_read(file):
            yield _warning("keys", f"other users can read {file}", f"chmod 600 {file}")
        elif not count and not config.api_key and not config.admin_key:
            remedy = f"rekindle key NAME --file {file}"
            yield _failed("keys", f"{file} has no key, so nobody could use the server", remedy)
        else:
            yield _ok("keys", f"{count} keys in {file}")

    def _ports(self) -> Iterator[Diagnosis]:
        ports = [self._config.port, self._config.ollama_port]
        for port in [each for each in ports if each is not None]:
            bind(self._config, port).close()
        shown = " and ".join(str(port) for port in ports if port is not None)
        yield _ok("port", f"{self._config.host} port {shown} is free")

    def _log(self) -> Iterator[Diagnosis]:
        if (tracer := open_tracer(self._config)) is not None:
            tracer.close()
        file = self._config.log_file
        if file is None:
            yield _ok("log", "to standard error")
            return
        problem = _unwritable(file.parent)
        if problem is None and file.is_dir():
            problem = "it is a folder"
        if problem is not None:
            yield _failed("log", f"cannot write {file}: {problem}", "choose another --log-file")
        else:
            yield _ok("log", f"to {file}")

    # -- the machine ---------------------------------------------------------------------------

    def _open_files(self) -> Iterator[Diagnosis]:
        limit, _ = self._machine.limits()
        shown = "unlimited" if limit < 0 else str(limit)
        remedy = "raise `ulimit -n`, or LimitNOFILE= of the systemd unit"
        if 0 <= limit < FEW_FILES:
            yield _failed("open files", f"at most {shown} open files", remedy)
        elif 0 <= limit < MANY_FILES:
            yield _warning("open files", f"at most {shown} open files, one per client", remedy)
        else:
            yield _ok("open files", shown)

    def _native_library(self) -> Iterator[Diagnosis]:
        try:
            self._library = self._machine.library(self._config.llama_lib)
        except BuildFailed as error:
            remedy = "rekindle build-gpu" if self._config.llama_lib else "install rekindle again"
            yield _failed("library", str(error), remedy)
            return
        info = self._library
        yield _ok("library", f"rekindle {__version__}, {info.engine} of {info.source}")

    def _cpu(self) -> Iterator[Diagnosis]:
        cores = usable_cores()
        found = self._library.features if self._library else ""
        names = re.findall(r"(\w+) = 1", found)
        detail = f"{cores} core{'s' if cores > 1 else ''}, {platform.machine()}"
        detail += f" with {', '.join(names)}" if names else ""
        is_x86 = platform.machine().lower() in ("x86_64", "amd64")
        if self._library and is_x86 and "AVX2" not in names and not self._library.gpus:
            yield _warning("cpu", f"{detail}: without AVX2 it computes slowly", "use a newer CPU")
        elif cores < 2:
            yield _warning("cpu", detail, "give the server two cores or more")
        else:
            yield _ok("cpu", detail)

    def _gpu(self) -> Iterator[Diagnosis]:
        there, library = self._machine.gpus(), self._library
        usable = library.gpus if library else ()
        if usable and (wrong := [n for n in self._config.gpu if n >= len(usable)]):
            yield _failed(
                "gpu", f"--gpu {wrong[0]}, but there are {len(usable)}", "count the GPUs from 0"
            )
        elif usable:
            names = ", ".join(f"{gpu.name} with {_gb(gpu.memory_bytes)}" for gpu in usable)
            yield _ok("gpu", f"{names}{_driver()}")
        elif self._config.gpu_layers or self._config.gpu or self._config.tensor_split:
            yield _failed(
                "gpu",
                "the settings ask for a GPU, but the library finds no GPU",
                "rekindle build-gpu, or leave --gpu-layers, --gpu and --tensor-split out",
            )
        elif there:
            found = " and ".join(dict.fromkeys(there))
            yield _warning("gpu", f"{found}{_driver()} is not used", "rekindle build-gpu")
        else:
            yield _ok("gpu", "none; the CPU computes")

    def _memory(self) -> Iterator[Diagnosis]:
        free = self._machine.free_memory()
        weights = sum(_size_of(path) for path in self._model_paths())
        on_gpu = bool(self._library and self._library.gpus) and self._config.gpu_layers != 0
        detail = f"{_gb(free)} free, models of {_gb(weights)}"
        wanted = self._config.ram_cache or 0
        if weights > free and not on_gpu:
            yield _failed("memory", detail, "choose a smaller model or quantisation")
        elif weights * (not on_gpu) + wanted > free:
            shown = f"{detail}, --ram-cache {format_size(wanted)}"
            yield _warning("memory", f"{shown}: too much together", "lower --ram-cache")
        elif free < GIB:
            yield _warning("memory", detail, "stop other programs")
        else:
            yield _ok("memory", detail)

    def _page_locking(self) -> Iterator[Diagnosis]:
        _, limit = self._machine.limits()
        if not (self._library and self._library.gpus):
            yield _ok("page-locking", "not needed without a GPU")
            return
        wanted = self._config.ram_cache or self._machine.free_memory() // 4
        if 0 <= limit < wanted:
            yield _warning(
                "page-locking",
                f"{_gb(limit)} may be locked of a RAM cache of {_gb(wanted)}: the rest is restored "
                "slowly",
                "raise `ulimit -l`, or LimitMEMLOCK= of the systemd unit",
            )
        else:
            yield _ok("page-locking", "unlimited" if limit < 0 else _gb(limit))

    # -- the files -----------------------------------------------------------------------------

    def _model_paths(self) -> Iterator[Path]:
        for name in named_models(self._config):
            with suppress(RekindleError):
                path = _path_of(name, self._config.models_dir)
                if path is not None:
                    yield path

    def _models(self) -> Iterator[Diagnosis]:
        for name in named_models(self._config):
            try:
                path = _path_of(name, self._config.models_dir)
                if path is not None:
                    check_whole(path)
            except RekindleError as error:
                yield _failed("models", str(error))
                continue
            if path is not None:
                yield _ok("models", f"{name}: {path}, {_gb(_size_of(path))}")
                continue
            problem = _unwritable(self._config.models_dir)
            if problem is None:
                yield _warning("models", f"{name} will be downloaded", f"rekindle pull {name}")
            else:
                where = f"{name} cannot be downloaded to {self._config.models_dir}: {problem}"
                yield _failed("models", where, "set REKINDLE_MODELS_DIR")

    def _disk(self) -> Iterator[Diagnosis]:
        config = self._config
        if config.disk_cache == 0:
            yield _ok("disk", "no disk cache")
            return
        remedy = "choose another --cache-dir: without it, conversations are lost at a restart"
        if (problem := _unwritable(config.cache_dir)) is not None:
            yield _warning("disk", f"cannot write {config.cache_dir}: {problem}", remedy)
            return
        place = _existing(config.cache_dir)
        free = self._machine.free_disk(place)
        if free < config.disk_floor + SAMPLE_BYTES:
            floor = format_size(config.disk_floor)
            detail = f"{_gb(free)} free in {place}; --disk-floor leaves {floor} free"
            yield _warning("disk", detail, "free some space, or choose another --cache-dir")
            return
        write_mb_s, read_mb_s = disk_speed(place)
        detail = f"{_gb(free)} free, writes {write_mb_s:.0f} MB/s, reads {read_mb_s:.0f} MB/s"
        if min(write_mb_s, read_mb_s) < SLOW_DISK_MB_S:
            yield _warning("disk", detail, "put --cache-dir on a faster disk")
        else:
            yield _ok("disk", detail)

    def _cache(self) -> Iterator[Diagnosis]:
        folder = self._config.cache_dir
        if self._config.disk_cache == 0 or not folder.is_dir():
            yield _ok("cache", "no folder yet")
            return
        if _others_can_read(folder):
            yield _warning("cache", f"other users can enter {folder}", f"chmod 700 {folder}")
        if used_bytes(folder) > CHECKED_BYTES:
            size = _gb(used_bytes(folder))
            yield _ok("cache", f"{size} in {folder}; `rekindle cache check` verifies all of it")
            return
        secret_file = self._config.cache_secret_file
        secret = read_secret_file(secret_file) if secret_file else None
        reports = check_cache(folder, repair=False, secret=secret)
        findings = [finding for each in reports for finding in each.findings]
        if findings:
            found = f"{len(findings)} problems in {folder}, the first: {findings[0].sentence}"
            yield _warning("cache", found, "rekindle cache check --repair")
        elif any(each.in_use for each in reports):
            remedy = "stop it first, or choose another --cache-dir"
            yield _warning("cache", f"another server uses {folder}", remedy)
        else:
            blocks = sum(each.blocks for each in reports)
            yield _ok("cache", f"{blocks} blocks in {folder}, all of them whole")


def _others_can_read(path: Path) -> bool:
    return os.name == "posix" and bool(path.stat().st_mode & 0o077)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    place = folder.absolute()
    return next(path for path in (place, *place.parents) if path.exists())


def _unwritable(folder: Path) -> str | None:
    """Why files cannot be written into a folder, which may not exist yet. None: they can."""
    try:
        place = _existing(folder)
        if not place.is_dir():
            return f"{place} is not a folder"
    except OSError as error:
        return os.strerror(error.errno or errno.EIO)
    return None if os.access(place, os.W_OK | os.X_OK) else f"this user may not write to {place}"


def _path_of(name: str, models_dir: Path) -> Path | None:
    """The file or folder of a model. None if it has to be downloaded. Raises ModelError."""
    match locate(name, models_dir):
        case Path() as path:
            return path
        case PackagedModel(path=path):
            return path if path.is_file() else None
        case HubModel() as source:
            from rekindle.models import hub  # slow to import, and rarely needed

            return hub.find_pulled(source)


def _size_of(path: Path) -> int:
    return used_bytes(path) if path.is_dir() else path.stat().st_size


def _driver() -> str:
    """The version of NVIDIA's driver, if there is one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        if lines := asked.stdout.split():
            return f", driver {lines[0]}"
    return ""


def disk_speed(folder: Path, size_bytes: int = SAMPLE_BYTES) -> tuple[float, float]:
    """MB per second that are written to the disk and read from it, measured with a file."""
    path = folder / f".rekindle-doctor-{os.getpid()}"
    piece = os.urandom(MB)  # some disks compress
    try:
        begun_s = time.perf_counter()
        with path.open("xb") as file:
            for _ in range(size_bytes // MB):
                file.write(piece)
            os.fsync(file.fileno())
            write_s = time.perf_counter() - begun_s
            if hasattr(os, "posix_fadvise"):  # otherwise it is read from memory
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        begun_s = time.perf_counter()
        with path.open("rb", buffering=0) as file:
            while file.read(MB):
                pass
        read_s = time.perf_counter() - begun_s
    finally:
        path.unlink(missing_ok=True)
    megabytes = size_bytes / MB
    return megabytes / max(write_s, 1e-9), megabytes / max(read_s, 1e-9)
