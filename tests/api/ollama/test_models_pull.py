"""POST /api/pull."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.api.ollama.models import Download
from rekindle.errors import ModelError
from rekindle.models.progress import Progress, task
from tests.api.scripted import Front


def fetched(name: str, *, models_dir: Path, progress: Progress) -> Path:
    if name == "none":
        raise ModelError("there is no model called none")
    progress.say(f"{name} has 200 bytes")
    with task(progress, 200, f"pulling {name}") as advance:
        for _ in range(200):
            advance(1)
    return models_dir / name


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Front:
    monkeypatch.setattr("rekindle.api.ollama.models.pull", fetched)
    return Front(api_key=("user",), admin_key=("admin",))


def pull(front: Front, key: str = "admin", **fields: Any) -> list[dict[str, Any]]:
    headers = {"authorization": f"Bearer {key}"}
    answer = front.post("/api/pull", fields, headers=headers)
    return [json.loads(each) for each in answer.text.splitlines()]


def test_a_served_model_is_there_already(front: Front) -> None:
    assert pull(front, "user", model="tiny:latest")[-1] == {"status": "success"}
    assert pull(front, "user", name="tiny", stream=False) == [{"status": "success"}]


def test_another_is_fetched_with_a_line_for_each_percent(front: Front) -> None:
    first, what, *progress, note, last = pull(front, model="smollm2")
    assert first == {"status": "pulling manifest"}
    assert what == {"status": "smollm2 has 200 bytes"}
    assert [each["completed"] for each in progress] == list(range(0, 201, 2))
    assert {each["total"] for each in progress} == {200}
    assert "--model smollm2" in note["status"]
    assert last == {"status": "success"}


def test_a_model_that_cannot_be_pulled_is_an_error(front: Front) -> None:
    assert pull(front, model="none")[-1] == {"error": "there is no model called none"}
    assert pull(front, model="none", stream=False) == [{"error": "there is no model called none"}]
    assert "`model` is missing" in pull(front)[0]["error"]


def test_only_admins_pull_models(front: Front) -> None:
    assert "admin key" in pull(front, "user", model="smollm2")[0]["error"]


def test_one_model_is_pulled_at_a_time(front: Front) -> None:
    with Download._busy:
        assert "another model is being pulled" in pull(front, model="smollm2")[-1]["error"]
    assert pull(front, model="smollm2")[-1] == {"status": "success"}
