"""The check of the catalogue finds every name, and every name that leads nowhere."""

from __future__ import annotations

import pytest

from rekindle.models.families import repositories
from tests.models.conftest import hub
from tests.models.fake_hub import FakeHub
from tools.check_families import check

__all__ = ["hub"]


@pytest.fixture
def full(hub: FakeHub) -> FakeHub:
    """A hub that has everything."""
    folder = {"config.json": b"{}", "model.safetensors": b"weights"}
    files = {"m-Q4_K_M.gguf": b"weights", "mmproj-F16.gguf": b"eyes"}
    for name, repo in repositories():
        hub.repos[repo] = dict(folder if name.endswith("-mlx") else files)
    hub.licence = "mit"
    return hub


def test_a_hub_that_has_everything_passes(
    full: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(repositories()))
    assert lines[0].startswith("qwen3:0.6b: unsloth/Qwen3-0.6B-GGUF, m-Q4_K_M.gguf, 7 bytes")
    assert all(line.endswith("licence mit") for line in lines)
    assert not full.downloads


def test_a_missing_repository_model_or_projector_fails(
    full: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    del full.repos["unsloth/Qwen3-4B-GGUF"]
    full.repos["unsloth/phi-4-GGUF"] = {"README.md": b""}
    del full.repos["unsloth/Qwen3-VL-4B-Instruct-GGUF"]["mmproj-F16.gguf"]
    full.repos["mlx-community/phi-4-4bit"] = {"README.md": b""}
    assert check([]) == 3
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILED")]
    assert [line.split()[1] for line in failed] == ["qwen3:4b:", "phi4:14b-mlx:", "qwen3-vl:4b:"]


def test_an_unknown_name_fails(full: FakeHub) -> None:
    assert check(["qwen3:4b", "qwen3:5b"]) == 1
