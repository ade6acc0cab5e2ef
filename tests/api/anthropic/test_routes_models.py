"""The list of models in Anthropic's form, and /api/hello."""

from __future__ import annotations

from tests.api.scripted import Front, ScriptedRuntime

VERSION = {"anthropic-version": "2023-06-01"}


def test_models_are_listed_in_this_shape_when_a_version_is_sent() -> None:
    front = Front(ScriptedRuntime(name="one"), ScriptedRuntime(name="two"))
    listed = front.get("/v1/models?limit=1000", headers=VERSION).json()
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, "one", "two")
    assert [each["type"] for each in listed["data"]] == ["model", "model"]
    assert listed["data"][0]["display_name"] == "one"
    assert listed["data"][0]["created_at"].endswith("+00:00")
    assert front.get("/v1/models/two", headers=VERSION).json()["id"] == "two"
    again = front.get("/v1/models/", headers=VERSION).json()
    assert [each["id"] for each in again["data"]] == ["one", "two"]


def test_the_list_of_models_shows_the_context_size() -> None:
    """unsloth PR 9940: clients take 200k of context for granted."""
    [model] = Front().get("/v1/models", headers=VERSION).json()["data"]
    assert model["max_input_tokens"] == 4096


def test_without_a_version_the_list_is_openais() -> None:
    assert Front().get("/v1/models").json()["object"] == "list"


def test_a_hello_is_answered() -> None:
    """Claude Code sends one of these before anything else."""
    assert Front().request("HEAD", "/api/hello").status_code == 200
    assert Front().request("HEAD", "/").status_code == 200
