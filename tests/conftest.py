"""What every part of the suite may ask for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from rich.console import Console

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


def _pulled(name: str) -> Path:
    folder = os.environ.get("REKINDLE_MODELS_DIR", "~/.cache/rekindle/models")
    return pull(
        name, models_dir=Path(folder).expanduser(), progress=LineProgress(Console(quiet=True))
    )
