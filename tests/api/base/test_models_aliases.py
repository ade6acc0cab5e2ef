"""Models under other names: aliases, patterns, and any name at all."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from rekindle.config import Config
from rekindle.errors import ConfigError
from rekindle.front.launch import check_settings
from rekindle.protocol.events import Embedded
from rekindle.protocol.frames import Ready
from tests.api.scripted import Front, ScriptedRuntime, error

MODELS = ("tiny", "other")
ALIASES = {"gpt-5": "other", "gpt-*": "tiny", "claude-opus-*": "other"}
MESSAGE = {"max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}


def two(**settings: Any) -> Front:
    return Front(*(ScriptedRuntime(name=name) for name in MODELS), model=MODELS, **settings)


@pytest.mark.parametrize(
    ("name", "model"),
    [("gpt-5", "other"), ("gpt-4o", "tiny"), ("tiny", "tiny"), (None, "tiny"), ("", "tiny")],
)
def test_an_alias_stands_for_a_model_and_an_exact_one_wins(name: str | None, model: str) -> None:
    answer = two(aliases=ALIASES).chat(model=name)
    assert answer.json()["model"] == model, "the answer names the model that wrote it"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x", "store": False}),
        ("/v1/messages", MESSAGE),
        ("/completion", {"prompt": "x"}),
        ("/api/chat", {"messages": MESSAGE["messages"], "stream": False}),
    ],
)
def test_an_alias_holds_in_every_dialect(path: str, body: dict[str, Any]) -> None:
    front = two(aliases={"mine": "other"})
    assert front.post(path, {**body, "model": "mine"}).status_code == 200
    assert [len(runtime.requests) for runtime in front.runtimes] == [0, 1]


def test_an_alias_comes_before_the_default_for_names_of_claude() -> None:
    front = two(aliases=ALIASES)
    assert (
        front.post("/v1/messages", {**MESSAGE, "model": "claude-opus-9"}).json()["model"] == "other"
    )
    assert (
        front.post("/v1/messages", {**MESSAGE, "model": "claude-haiku-9"}).json()["model"] == "tiny"
    )


def test_an_unknown_name_is_still_refused_with_the_names_that_are_served() -> None:
    told = error(two(aliases=ALIASES).chat(model="llama"))
    assert told["code"] == "model_not_found"
    assert "tiny, other" in told["message"]
    assert Front().chat(model="llama").status_code == 404


def test_the_list_of_models_shows_aliases_that_are_names() -> None:
    listed = two(aliases=ALIASES).get("/v1/models").json()["data"]
    assert {each["id"]: each["aliases"] for each in listed} == {"tiny": [], "other": ["gpt-5"]}


def test_any_name_means_the_single_model() -> None:
    front = Front(any_model_name=True)
    assert front.chat(model="gpt-4o").json()["model"] == "tiny"
    assert front.post("/v1/tokenize", {"content": "x", "model": "gpt-4o"}).status_code == 404, (
        "no key"
    )


def test_any_name_means_the_single_model_for_embeddings() -> None:
    vectors = Embedded(0, struct.pack("<2f", 1, 0), 2, 5, 2)
    embedder = ScriptedRuntime([vectors], name="minilm")
    embedder.supervisor.ready = Ready(context_tokens=512, pool_tokens=0, dimensions=2)
    body = {"input": "a", "model": "text-embedding-3-small"}
    front = Front(embedders=[embedder], any_model_name=True)
    assert front.post("/v1/embeddings", body).json()["model"] == "minilm"
    assert Front(embedders=[embedder]).post("/v1/embeddings", body).status_code == 404


def test_any_name_needs_a_single_model() -> None:
    with pytest.raises(ConfigError, match="one model"):
        check_settings(Config(model=MODELS, any_model_name=True))


def test_an_alias_of_a_model_that_is_not_served_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="alias mine stands for the model absent"):
        check_settings(Config(model=MODELS, aliases={"mine": "absent"}))
