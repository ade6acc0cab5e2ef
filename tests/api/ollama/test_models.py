"""The list of models in Ollama's form."""

from __future__ import annotations

from tests.api.scripted import Front, ScriptedRuntime


def described() -> ScriptedRuntime:
    runtime = ScriptedRuntime(name="tiny", sees=True)
    ready = runtime.ready
    assert ready is not None
    ready.architecture, ready.parameters, ready.quantization = "llama", 134_515_008, "Q4_1"
    ready.has_reasoning = True
    return runtime


def test_the_version_is_high_enough_for_every_client() -> None:
    version = Front().get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


def test_models_are_listed_with_all_that_clients_look_for() -> None:
    listed = Front(described(), ScriptedRuntime(name="org/repo:q4")).get("/api/tags").json()
    tiny, other = listed["models"]
    assert tiny["name"] == tiny["model"] == "tiny:latest"
    assert other["name"] == "org/repo:q4"
    assert len(tiny["digest"]) == 64
    assert tiny["digest"] != other["digest"]
    assert tiny["size"] > 0
    assert tiny["modified_at"].endswith("Z")
    assert tiny["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.5M",
        "quantization_level": "Q4_1",
    }


def test_all_are_loaded_and_stay_so() -> None:
    [tiny] = Front(described()).get("/api/ps").json()["models"]
    assert tiny["context_length"] == 4096
    assert tiny["expires_at"].startswith("9999")


def test_a_model_shows_its_architecture_context_and_capabilities() -> None:
    front = Front(described())
    for body in ({"model": "tiny"}, {"name": "tiny:latest"}):
        found = front.post("/api/show", body).json()
        assert found["model_info"]["general.architecture"] == "llama"
        assert found["model_info"]["llama.context_length"] == 4096
        assert found["capabilities"] == ["completion", "tools", "vision", "thinking"]
        assert found["template"] == "{{ x }}"
    assert front.post("/api/show", {"model": "none"}).status_code == 404


def test_unknown_paths_under_api_have_ollamas_error_format() -> None:
    answer = Front().post("/api/push", {"model": "tiny"})
    assert answer.status_code == 404
    assert "/api/push is not served here" in answer.json()["error"]
