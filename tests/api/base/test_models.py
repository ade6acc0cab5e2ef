"""`X-Model-Id`: the loaded models by their number."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rekindle.api.base.models import served_embedders
from rekindle.config import Config
from rekindle.errors import ConfigError
from tests.api.cache.entries import ENTRY, STATS, answering, holding
from tests.api.scripted import Answers, Front, ScriptedRuntime, error, refuse


def models(answers: Answers = refuse) -> Front:
    names = ("first", "second")
    return Front(*(ScriptedRuntime(name=name, answers=answers) for name in names))


def number(value: str) -> dict[str, str]:
    return {"X-Model-Id": value}


@pytest.mark.parametrize("path", ["chat", "complete"])
@pytest.mark.parametrize("model", [None, "default", ""])
def test_a_number_picks_the_model_that_no_name_picks(path: str, model: str | None) -> None:
    for value, name in (("0", "first"), ("1", "second")):
        answer = getattr(models(), path)(model=model, headers=number(value))
        assert answer.json()["model"] == name


def test_a_name_wins_over_a_number() -> None:
    assert models().chat(model="first", headers=number("1")).json()["model"] == "first"


@pytest.mark.parametrize("value", ["2", "-1", "", "x", "1.0", "01", "\xb2", "9" * 5000])
@pytest.mark.parametrize("model", [None, "first"])
def test_an_unknown_number_says_which_are_loaded(value: str, model: str | None) -> None:
    answer = models().chat(model=model, headers={"X-Model-Id": value.encode("latin-1")})
    assert answer.status_code == 400
    assert error(answer) == {
        "message": "`X-Model-Id` takes the number of a loaded model: 0 (first), 1 (second).",
        "type": "invalid_request_error",
        "param": "X-Model-Id",
        "code": "invalid_value",
    }


CACHE_REQUESTS: list[tuple[str, str, Any]] = [
    ("GET", "/v1/cache", None),
    ("GET", "/v1/cache/stats", None),
    ("GET", "/v1/cache/key-1", None),
    ("DELETE", "/v1/cache/key-1", None),
    ("POST", "/v1/cache/key-1/pin", {}),
    ("POST", "/v1/cache/key-1/unpin", {}),
    ("POST", "/v1/cache/gc", {}),
    (
        "POST",
        "/v1/cache/validate",
        {"cache_key": "k", "messages": [{"role": "user", "content": ""}]},
    ),
    ("POST", "/v1/cache/prepare", {"messages": [{"role": "user", "content": ""}], "warm": False}),
    ("GET", "/v1/internal/model/kv_cache/info", None),
    ("POST", "/v1/internal/model/kv_cache/remove_cache", {"session_id": 1}),
    ("POST", "/v1/internal/model/kv_cache/remove_old_caches", {"seconds": 1}),
]


@pytest.mark.parametrize(("method", "path", "body"), CACHE_REQUESTS, ids=lambda value: str(value))
def test_a_number_picks_the_model_whose_cache_is_meant(method: str, path: str, body: Any) -> None:
    front = models()
    front.request(method, path, json=body, headers=number("1"))
    first, second = front.runtimes
    assert (len(first.admin_requests), len(second.admin_requests)) == (0, 1)
    assert front.request(method, path, json=body, headers=number("2")).status_code == 400


def test_without_a_number_the_cache_is_that_of_all_models() -> None:
    assert models(holding(ENTRY)).get("/v1/cache").json()["count"] == 2
    assert models(answering(STATS)).get("/v1/cache/stats").json()["total_entries"] == 10


def test_without_a_number_the_first_models_sessions_are_listed() -> None:
    front = models(holding(ENTRY))
    assert front.get("/v1/internal/model/kv_cache/info").json()["model"] == "first"


def test_a_model_for_chat_and_one_for_embeddings_have_names_of_their_own() -> None:
    config = Config(model=("a/x", "a/y"), embedding_model=("b/x", "b/y"))
    assert list(served_embedders(config)) == ["b/x", "b/y"]
    for names in (("a/x",), ("b/x", "a/y")):
        with pytest.raises(ConfigError, match="would both be called a/"):
            served_embedders(replace(config, embedding_model=names))
