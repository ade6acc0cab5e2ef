"""Runs the tests of files and memory with every other supported Python that this machine has.

These tests depend on when Python frees memory and closes files, which differs between versions.
Each Python gets its own environment in `build/pythons`, installed from requirements-dev.lock.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ("3.11", "3.12", "3.13")  # `requires-python` in pyproject.toml
TESTS = ("tests/kvcache", "tests/test_memory.py", "tests/test_lru.py")
UV = str(Path(sys.executable).with_name("uv"))


def candidates(version: str) -> Iterator[str]:
    """Yield the interpreters of a version in all folders of the path and in pyenv's folder.

    The first one on the path may be a shim of pyenv, which runs nothing, before one that works.
    """
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    yield from (str(Path(folder, f"python{version}")) for folder in folders if folder)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))


def works(python: str, version: str) -> bool:
    """Whether an interpreter is there, runs and has this version."""
    code = "import sys, venv; print('%d.%d' % sys.version_info[:2])"
    try:
        answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    except OSError:  # it is missing, or no program of this machine
        return False
    return answer.returncode == 0 and answer.stdout.strip() == version


def run_tests(python: str, version: str) -> bool:
    environment = ROOT / "build" / "pythons" / version
    in_it = str(environment / "bin" / "python")
    install = [UV, "pip", "install", "--quiet", "--python", in_it, "--require-hashes"]
    subprocess.run(
        [UV, "venv", "--quiet", "--clear", "--python", python, str(environment)], check=True
    )
    subprocess.run([*install, "-r", str(ROOT / "requirements-dev.lock")], check=True)
    tests = [in_it, "-m", "pytest", "-p", "no:cacheprovider", *TESTS]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(tests, cwd=ROOT, env=environ, check=False).returncode == 0


def main() -> None:
    current = f"{sys.version_info.major}.{sys.version_info.minor}"
    failed = []
    for version in SUPPORTED:
        if version == current:
            continue
        python = next((each for each in candidates(version) if works(each, version)), None)
        if python is None:
            print(f"Python {version}: not found on this machine, so it was not tested")
            continue
        print(f"Python {version}: {python}", flush=True)
        if not run_tests(python, version):
            failed.append(version)
    if failed:
        sys.exit(f"the tests fail with Python {', '.join(failed)}")


if __name__ == "__main__":
    main()
