"""Presets are prepared at startup."""

from __future__ import annotations

import asyncio
import io
import logging
from typing import Any

import pytest
from rich.console import Console

from rekindle.api.base.models import ServedModels
from rekindle.config import Config, Preset
from rekindle.errors import Unavailable
from rekindle.front.warmup import warm
from rekindle.protocol.admin import AdminOp, AdminResult, EntryInfo, Flush
from rekindle.protocol.events import CacheReport, Finished, Prefill, Reason, Started
from rekindle.protocol.requests import Prepare
from tests.api.scripted import ScriptedRuntime, Step, failed

PROJECT = {
    "system_prompt": "You are an analyst.",
    "tools": ["get_portfolio"],
    "shared": True,
    "cache": {"warm_on_startup": True, "pinned": True, "ttl": None},
}
REPORT = CacheReport("miss", Reason.NOT_CACHED, 0, 20, None, new_cache_key="abc")
READY: list[Step] = [Started(0, 20, 0), Prefill(0, 20, 20), Finished(0, "stop", 20, 0, 0.1, REPORT)]
ENTRY = EntryInfo(
    cache_key="abc", segments=[], token_count=20, tier="ram", size_bytes=1, held_tokens=20,
    stored_tokens=20,
    hit_count=0, pinned=True, ttl=None, created_at=0, last_used=0, expires_at=None, names=[],
    tenant="",
)  # fmt: skip


def flushed(op: AdminOp) -> AdminResult:
    assert op == Flush("abc")
    return ENTRY


def warm_up(runtime: ScriptedRuntime, projects: dict[str, Any], **settings: Any) -> None:
    presets = {name: Preset.model_validate(project) for name, project in projects.items()}
    config = Config(model=(runtime.name,), projects=presets, **settings)
    models = ServedModels(config, [runtime], [])
    asyncio.run(warm(config, models, Console(file=io.StringIO())))


def prepare(runtime: ScriptedRuntime, *names: str) -> None:
    warm_up(runtime, dict.fromkeys(names, PROJECT))


def test_a_project_is_computed_and_stored() -> None:
    runtime = ScriptedRuntime(READY, answers=flushed)
    prepare(runtime, "a")
    ask = runtime.requested
    assert ask.messages == [{"role": "system", "content": "You are an analyst."}]
    assert ask.tools == [
        {"type": "function", "function": {"name": "get_portfolio", "parameters": {}}}
    ]
    assert ask.prepare == Prepare(pinned=True, ttl_s=None, shared=True, project="a")
    assert ask.salt == b""
    [question] = runtime.admin_requests
    assert question.op == Flush("abc")
    assert question.admin  # a shared entry belongs to no tenant


@pytest.mark.parametrize("normalise", [True, False])
def test_a_project_is_prepared_with_the_settings_of_chats(normalise: bool) -> None:
    runtime = ScriptedRuntime(READY, answers=flushed)
    warm_up(runtime, {"a": PROJECT}, exact=True, normalise=normalise)
    assert (runtime.requested.exact, runtime.requested.normalise) == (True, normalise)


def test_a_project_without_warm_on_startup_is_skipped() -> None:
    runtime = ScriptedRuntime(READY, answers=flushed)
    warm_up(runtime, {"a": {"system_prompt": "x"}})
    assert runtime.requests == []


@pytest.mark.parametrize(
    "script",
    [
        [Unavailable("no room at all")],
        [Started(0, 20, 0), failed(507, "x", None, "no room at all")],
    ],
)
def test_a_failure_is_logged_with_the_project_name(
    caplog: pytest.LogCaptureFixture, script: list[Step]
) -> None:
    caplog.set_level(logging.INFO, "rekindle")
    runtime = ScriptedRuntime(script, READY, answers=flushed)
    prepare(runtime, "first", "second")
    warning, success = [record.getMessage() for record in caplog.records]
    assert "first" in warning
    assert "no room at all" in warning
    assert "second is prepared: 20 tokens, cache key abc" in success


def test_state_that_was_not_kept_is_no_prepared_project(caplog: pytest.LogCaptureFixture) -> None:
    unkept = CacheReport("miss", Reason.NOT_CACHED, 0, 20, None)
    prepare(ScriptedRuntime([Started(0, 20, 0), Finished(0, "stop", 20, 0, 0.1, unkept)]), "a")
    assert "project a could not be prepared: its state was not kept" in caplog.text


def test_a_failure_to_store_a_project_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare(ScriptedRuntime(READY), "a")
    assert "project a could not be prepared" in caplog.text
