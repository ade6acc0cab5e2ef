"""A model whose pictures cannot be served is served for its text, unless pictures are required."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rekindle.errors import ProjectorError
from rekindle.protocol.frames import LogLine, ToFront
from rekindle.protocol.requests import LoadModel
from rekindle.protocol.settings import RuntimeSettings
from rekindle.runtime.loading import load_model
from tests.support.tiny_vision import write_tiny_vision


def test_a_vision_folder_that_cannot_be_used_is_loaded_for_its_text(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "tiny", "gemma3")
    other_size = {"size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(other_size))
    sent: list[ToFront] = []
    settings = RuntimeSettings(max_model_len=512)
    load = LoadModel(path=str(folder), mmproj=str(folder), requires_vision=False, settings=settings)
    engine = load_model(load, 0, sent.append)
    assert engine.capabilities.modalities == {"text"}
    engine.close()
    [warning] = [each.text for each in sent if isinstance(each, LogLine)]
    assert "tiny cannot read pictures: preprocessor_config.json makes pictures of" in warning
    assert warning.endswith("Start with --no-vlm to silence this warning")
    required = LoadModel(path=str(folder), mmproj=str(folder), settings=settings)
    with pytest.raises(ProjectorError, match="cannot read pictures"):
        load_model(required, 0, sent.append)
