from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import huggingface_hub.file_download
import pytest

from .fake_hub import FakeHub, running_hub
from .tiny import RecordedProgress


@pytest.fixture
def progress() -> RecordedProgress:
    return RecordedProgress()


@pytest.fixture
def models_dir(tmp_path: Path) -> Path:
    return tmp_path / "models"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A local hub. Nothing else can be reached."""
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        monkeypatch.delenv("HF_TOKEN", raising=False)
        # Describing the caller in the user agent would ask the public hub first.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_TELEMETRY", True)
        # Bytes count once a chunk is full, and a retry waits for a second: both too much here.
        monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 500)
        monkeypatch.setattr(huggingface_hub.file_download, "time", SimpleNamespace(sleep=int))
        huggingface_hub.close_session()  # the session keeps the proxies it was made with
        yield hub
        huggingface_hub.close_session()
