"""What every part of the suite may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rekindle.models.progress import SilentProgress
from rekindle.models.pull import pull


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model, pulled once and kept for later runs."""
    folder = os.environ.get("REKINDLE_MODELS_DIR", "~/.cache/rekindle/models")
    return pull("smollm2", models_dir=Path(folder).expanduser(), progress=SilentProgress())
