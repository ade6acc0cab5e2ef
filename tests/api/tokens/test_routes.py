"""GET /props."""

from __future__ import annotations

from tests.api.scripted import Front, ScriptedRuntime, error


def test_props_show_context_template_and_modalities() -> None:
    front = Front(ScriptedRuntime(name="tiny"), ScriptedRuntime(name="seeing", sees=True))
    found = front.get("/props").json()
    assert found["default_generation_settings"]["n_ctx"] == 4096
    assert found["model_alias"] == "tiny"
    assert found["chat_template"] == "{{ x }}"
    assert found["modalities"] == {"vision": False, "audio": False}
    assert found["total_slots"] >= 1
    assert front.get("/props?model=seeing").json()["modalities"]["vision"] is True
    assert front.get("/props", headers={"x-model-id": "1"}).json()["model_alias"] == "seeing"


def test_a_model_that_is_away_is_unavailable() -> None:
    front = Front()
    front.runtimes[0].supervisor.ready = None
    answer = front.get("/props")
    assert answer.status_code == 503
    assert "loading" in error(answer)["message"]
