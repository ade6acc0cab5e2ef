"""`X-Model-Id`: the loaded models by their number."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.api.base.specs import served_embedders
from rekindle.config import Config, load_config
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


NAMED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/responses", {"input": "hello", "store": False}),
    ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}),
    ("/v1/cache/prepare", {"messages": [{"role": "user", "content": "hello"}]}),
    ("/tokenize", {"content": "hello"}),
]


@pytest.mark.parametrize(("path", "body"), NAMED)
def test_a_name_that_contradicts_a_number_is_refused_with_both(
    path: str, body: dict[str, Any]
) -> None:
    front = models()
    for value, name, other in (("1", "first", "second"), ("0", "second", "first")):
        answer = front.post(path, {**body, "model": name}, headers=number(value))
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert f"`model` is '{name}', but `X-Model-Id: {value}` is '{other}'" in message
    assert all(not runtime.requests and not runtime.admin_requests for runtime in front.runtimes)


def test_a_name_and_a_number_of_the_same_model_agree() -> None:
    for value, name in (("0", "first"), ("1", "second")):
        assert models().chat(model=name, headers=number(value)).json()["model"] == name
    assert models().chat(model="third", headers=number("1")).status_code == 404


def test_an_embedding_model_contradicts_any_number() -> None:
    front = Front(ScriptedRuntime(name="first"), embedders=[ScriptedRuntime(name="vectors")])
    body = {"content": "hello", "model": "vectors"}
    answer = front.post("/tokenize", body, headers=number("0"))
    assert "`model` is 'vectors', but `X-Model-Id: 0` is 'first'" in error(answer)["message"]


@pytest.mark.parametrize("value", ["2", "-1", "", "x", "1.0", "01", "\xb2", "9" * 5000])
@pytest.mark.parametrize("model", [None, "first"])
def test_an_unknown_number_says_which_are_loaded(value: str, model: str | None) -> None:
    answer = models().chat(model=model, headers={"X-Model-Id": value.encode("latin-1")})
    assert answer.status_code == 400
    assert error(answer) == {
        "message": "`X-Model-Id` takes the number of a model: 0 (first), 1 (second).",
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


def demo(**settings: Any) -> Front:
    """The demo model of the catalogue and a model that the catalogue does not have."""
    names = ("smollm2", "org/repo")
    front = Front(*(ScriptedRuntime(name=name) for name in names))
    front.config = load_config({**settings, "model": names}, {}, Path("/dev/null"))
    return front


TURN = {"messages": [{"role": "user", "content": "hello"}]}
LIMITED: list[tuple[str, str, dict[str, Any]]] = [
    ("/v1/chat/completions", "max_tokens", TURN),
    ("/v1/responses", "max_output_tokens", {"input": "hello", "store": False}),
    ("/api/chat", "options.num_predict", {**TURN, "stream": False}),
]


@pytest.mark.parametrize(("path", "field", "body"), LIMITED)
def test_a_request_then_a_setting_then_the_catalogue_limits_a_reply(
    path: str, field: str, body: dict[str, Any]
) -> None:
    outer, _, inner = field.partition(".")
    own = {outer: {inner: 7} if inner else 7}

    def limit(front: Front, **fields: Any) -> int | None:
        assert front.post(path, {**body, **fields}).status_code == 200
        runtime = front.runtimes[fields.get("model") == "org/repo"]
        return runtime.requests[-1].max_tokens

    assert limit(demo()) == 1000
    assert limit(demo(), model="org/repo") is None, "others run until they stop"
    assert limit(demo(), **own) == 7
    assert limit(demo(max_tokens=50)) == 50
    assert limit(demo(max_tokens=50), **own) == 7


def test_null_in_the_settings_lifts_the_limit_of_the_catalogue() -> None:
    front = demo()
    front.config = load_config({"model": ["smollm2"]}, {"REKINDLE_MAX_TOKENS": "null"}, None)
    front.chat()
    front.chat(max_tokens=9)
    assert [request.max_tokens for request in front.runtime.requests] == [None, 9]
    unlimited = demo()
    unlimited.chat(max_tokens=-1)
    assert unlimited.runtime.requests[-1].max_tokens is None


def test_completions_keep_their_own_limit_and_props_show_the_models() -> None:
    front = demo()
    front.complete()
    assert front.runtime.requests[-1].max_tokens == 100
    for model, limit in (("smollm2", 1000), ("org/repo", -1)):
        shown = front.get(f"/props?model={model}").json()["default_generation_settings"]["params"]
        assert shown["n_predict"] == limit
