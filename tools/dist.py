"""Builds what is published into `dist/`: wheels, the source archive and their checksums.

There are two wheels. One is for this platform and has the compiled sampler. The other is for all
platforms, and NumPy samples. pip and uv choose the first one where it fits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from hashlib import file_digest, sha256
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
CHECKSUMS = "SHA256SUMS"


def build(source: Path, folder: Path) -> list[Path]:
    """Build all files into `folder`, which is replaced once they are complete."""
    (source / "build").mkdir(exist_ok=True)
    with TemporaryDirectory(dir=source / "build") as scratch:
        built = Path(scratch)
        _hatchling(source, built, "-t", "sdist", "-t", "wheel")
        if any(built.glob("*-none-any.whl")):
            sys.exit("dist: the sampler was not compiled. Install a C compiler (cc) and try again.")
        _hatchling(source, built, "-t", "wheel", pure=True)
        files = sorted(each for each in built.iterdir() if each.is_file())
        lines = [f"{_digest(file)}  {file.name}\n" for file in files]
        (built / CHECKSUMS).write_text("".join(lines))
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in (*files, built / CHECKSUMS):
            shutil.move(file, folder)
    return sorted(folder.iterdir())


def _hatchling(source: Path, folder: Path, *options: str, pure: bool = False) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *options]
    environment = os.environ | ({"REKINDLE_PURE_WHEEL": "1"} if pure else {})
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"dist: {' '.join(options)} could not be built:\n{done.stderr}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, sha256).hexdigest()


if __name__ == "__main__":
    for path in build(ROOT, ROOT / "dist"):
        print(f"{path.stat().st_size / 1e6:8.2f} MB  {path.relative_to(ROOT)}")
