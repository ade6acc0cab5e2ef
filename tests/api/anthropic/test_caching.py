"""Diagnostics: why the state of a named message was not reused."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.api.anthropic.caching import diagnostics, new_message_id
from rekindle.protocol.events import CacheReport, Reason, Started
from tests.api.anthropic.asking import streamed, whole
from tests.api.scripted import delta, finished


def report(reason: Reason, key: str | None = "abc", reused: int = 4) -> CacheReport:
    return CacheReport("partial_hit", reason, reused, 12, "ram", cache_key=key)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.SYSTEM_CHANGED, "system_changed"),
        (Reason.TOOLS_CHANGED, "tools_changed"),
        (Reason.TURN_CHANGED, "messages_changed"),
        (Reason.REQUEST_SHORTER, "messages_changed"),
    ],
)
def test_each_change_is_reported_with_its_missed_tokens(reason: Reason, told: str) -> None:
    found = diagnostics(new_message_id("tiny"), "tiny", 10, report(reason))
    assert found == {"cache_miss_reason": {"type": told, "cache_missed_input_tokens": 6}}


def test_a_request_that_only_grew_has_nothing_to_tell() -> None:
    previous = new_message_id("tiny")
    assert diagnostics(previous, "tiny", 10, report(Reason.FULL_MATCH)) is None
    assert diagnostics(None, "tiny", 10, report(Reason.NOT_CACHED, key=None)) is None


def test_an_unknown_previous_message_is_reported() -> None:
    def kind(previous: str, cache: CacheReport) -> Any:
        found = diagnostics(previous, "tiny", 10, cache)
        assert found is not None
        return found["cache_miss_reason"]["type"]

    unknown = report(Reason.NOT_CACHED, key=None)
    assert kind("msg_of_another_server", unknown) == "previous_message_not_found"
    assert kind(new_message_id("tiny"), unknown) == "previous_message_not_found"
    assert kind(new_message_id("other"), unknown) == "model_changed"
    assert kind(new_message_id("tiny"), report(Reason.EVICTED)) == "unavailable"


def test_it_is_in_the_message_and_in_the_first_event_of_a_stream() -> None:
    cache = report(Reason.SYSTEM_CHANGED)
    script = [Started(0, 10, 4, cache), delta("x"), finished(cache=cache)]
    asked = {"diagnostics": {"previous_message_id": new_message_id("tiny")}}
    for message in (whole(*script, **asked), streamed(*script, **asked)):
        assert message["diagnostics"]["cache_miss_reason"]["type"] == "system_changed"
    assert whole(*script)["diagnostics"] is None
