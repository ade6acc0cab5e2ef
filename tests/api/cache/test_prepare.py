"""POST /v1/cache/prepare."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.errors import TooManyRequests
from rekindle.protocol.admin import Flush, IndexPrompt, Validate, Validation
from rekindle.protocol.events import CacheReport, Prefill, Reason, Started
from rekindle.protocol.requests import GenerateRequest, Prepare, SamplingParams
from tests.api.cache.entries import ENTRY, answering, holding
from tests.api.live import live, soon
from tests.api.scripted import Front, Pause, ScriptedRuntime, Step, error, failed, finished

PATH = "/v1/cache/prepare"
SYSTEM = {"role": "system", "content": "You are a financial analyst..."}
TOOLS = [{"type": "function", "function": {"name": "get_price", "parameters": {}}}]
KEPT = finished(cache=CacheReport("miss", Reason.NOT_CACHED, 0, 1730, None, new_cache_key="key-1"))
PREPARED = {
    "cache_key": "key-1",
    "model": "tiny",
    "token_count": 1730,
    "size_bytes": 255_120_384,
    "segments": [{"type": "system", "hash": "a1b2c3d4"}, {"type": "turn", "hash": "00ff00ff"}],
}


def ready(*script: Step, **settings: Any) -> Front:
    script = script or (Started(0, 10, 0), Prefill(0, 5, 10), KEPT)
    return Front(ScriptedRuntime(script, answers=holding(ENTRY)), **settings)


def prepare(front: Front, **fields: Any) -> httpx.Response:
    return front.post(PATH, {"model": "tiny", "messages": [SYSTEM], **fields})


def test_the_documented_request_is_computed_kept_and_reported() -> None:
    front = ready()
    answer = prepare(front, tools=TOOLS, warm=True, pinned=True, ttl=3600)
    assert (answer.status_code, answer.json()) == (200, PREPARED)
    assert front.runtime.requested == GenerateRequest(
        turn=0,
        messages=[SYSTEM],
        tools=TOOLS,
        prepare=Prepare(pinned=True, ttl_s=3600.0),
        sampling=SamplingParams(),
        max_tokens=1,
    )
    assert front.runtime.admin_request.op == Flush("key-1")


def test_a_request_that_says_little_gets_the_documented_defaults() -> None:
    front = ready()
    assert front.post(PATH, {"messages": [SYSTEM]}).json() == PREPARED
    assert front.runtime.requested.prepare == Prepare(pinned=False, ttl_s=1800.0)
    assert front.runtime.requested.tools is None


def test_prepared_state_belongs_to_the_tenant() -> None:
    front = ready(api_key=["alpha"], admin_key=["root"])
    headers = {"Authorization": "Bearer root"}
    front.post(PATH, {"messages": [SYSTEM]}, headers=headers)
    assert front.runtime.requested.salt == front.runtime.admin_request.salt != b""
    assert not front.runtime.admin_request.admin


def test_an_exact_server_prepares_state_for_exact_turns() -> None:
    front = ready(exact=True)
    prepare(front)
    assert front.runtime.requested.exact


def test_a_server_that_does_not_normalise_prepares_prompts_as_sent() -> None:
    front = ready(normalise=False)
    prepare(front)
    assert not front.runtime.requested.normalise


def test_without_warmth_the_prompt_is_only_indexed() -> None:
    front = Front(ScriptedRuntime(answers=answering(ENTRY)))
    assert prepare(front, warm=False, tools=TOOLS, pinned=True, ttl=None).json() == PREPARED
    assert front.runtime.requests == []
    assert front.runtime.admin_request.op == IndexPrompt(
        messages=[SYSTEM], tools=TOOLS, prepare=Prepare(pinned=True, ttl_s=None)
    )


def test_an_id_of_a_message_is_kept_from_the_template() -> None:
    front = ready()
    prepare(front, messages=[{**SYSTEM, "message_id": "m"}], tools=[])
    assert front.runtime.requested.messages == [SYSTEM]
    assert front.runtime.requested.tools is None


def test_a_warming_that_fails_is_that_failure() -> None:
    failure = failed(400, "invalid_request_error", "context_length_exceeded", "too long")
    front = ready(Started(0, 10, 0), failure)
    answer = prepare(front)
    assert answer.status_code == 400
    assert error(answer)["code"] == "context_length_exceeded"
    assert front.runtime.admin_requests == []
    assert prepare(Front(ScriptedRuntime([TooManyRequests("full")]))).status_code == 429


def test_state_that_is_lost_right_away_is_a_failure() -> None:
    assert prepare(ready(finished())).status_code == 500
    front = Front(ScriptedRuntime([KEPT], answers=holding()))
    answer = prepare(front)
    assert (answer.status_code, error(answer)["code"]) == (409, "removed_meanwhile")


def test_a_server_that_reuses_nothing_prepares_nothing() -> None:
    front = ready(context_cache=False)
    answer = prepare(front)
    assert answer.status_code == 400
    assert error(answer)["code"] == "unsupported_parameter"
    assert front.runtime.requests == []


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("messages", [], "`messages` takes at least 1 item."),
        ("messages", [SYSTEM] * 201, "`messages` takes at most 200 items."),
        ("messages", [{"role": "robot"}], "`messages.0.role` takes 'system', "),
        ("tools", [{}] * 129, "`tools` takes at most 128 items."),
        ("tools", {}, "`tools` takes a list, not an object."),
        ("tools", [3], "`tools.0` takes an object, not a number."),
        ("tools", [{"type": "function", "function": {}}], "`tools.0.function.name` is missing."),
        ("tools", TOOLS * 2, "`tools` has more than one function called 'get_price'."),
        ("warm", "yes", "`warm` takes true or false, not a string."),
        ("pinned", 1, "`pinned` takes true or false, not a number."),
        ("ttl", 0, "`ttl` takes a number above 0."),
        ("ttl", -1, "`ttl` takes a number above 0."),
        ("ttl", 10**9, "`ttl` takes a number up to 315360000."),
        ("ttl", "60", "`ttl` takes a number, not a string."),
        ("ttl", None, "`ttl` takes a number of seconds. Null, which means never, needs `pinned: "),
    ],
)
def test_a_bad_value_is_refused_with_the_values_it_takes(
    field: str, value: Any, sentence: str
) -> None:
    front = ready()
    answer = prepare(front, **{field: value})
    assert answer.status_code == 400
    assert error(answer)["message"].startswith(sentence)
    assert error(answer)["param"] == field
    assert front.runtime.requests == []


@pytest.mark.parametrize(
    ("sent", "ttl_s"), [({}, None), ({"ttl": None}, None), ({"ttl": 60}, 60.0)]
)
def test_a_pin_lasts_for_its_ttl_or_for_ever(sent: dict[str, Any], ttl_s: float | None) -> None:
    front = ready()
    assert prepare(front, pinned=True, **sent).status_code == 200
    assert front.runtime.requested.prepare == Prepare(pinned=True, ttl_s=ttl_s)


def test_text_is_bounded_wherever_it_is() -> None:
    half = "x" * 100_000
    tools = [{"type": "function", "function": {"name": "f", "description": half}}]
    fits = {"role": "system", "content": "x" * 99_000}
    assert prepare(ready(), messages=[fits], tools=tools).status_code == 200
    for messages in (
        [{"role": "system", "content": half}],
        [{"role": "user", "content": [{"type": "text", "text": half}]}],
        [{"role": "user", "content": "", "name": half}],
    ):
        answer = prepare(ready(), messages=messages, tools=tools)
        assert answer.status_code == 400
        assert "200000 characters" in error(answer)["message"]


def test_tools_are_bounded_in_depth() -> None:
    nested: Any = {}
    for _ in range(100):
        nested = {"inside": nested}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    answer = prepare(ready(), tools=[tool])
    assert answer.status_code == 400
    assert "nested at most" in error(answer)["message"]


def test_a_client_that_leaves_ends_the_warming() -> None:
    front = ready(Started(0, 10, 0), Pause())
    body = b'{"messages": [{"role": "system", "content": "x"}]}'
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with live(front) as server:
        sock = server.raw(head.encode() + body)
        soon(lambda: server.runtime.open_turns == 1)
        sock.close()
        soon(server.is_idle)
    assert server.runtime.cancelled_turns == 1


def test_a_server_that_normalises_nothing_is_asked_about_prompts_as_they_are() -> None:
    front = Front(ScriptedRuntime(answers=answering(ENTRY)), normalise=False)
    prepare(front, warm=False)
    assert front.runtime.admin_request.op == IndexPrompt(
        messages=[SYSTEM], prepare=Prepare(), normalise=False
    )
    validity = Validation(
        status="miss", reusable_tokens=0, invalidated_at=None, reason=Reason.EXPIRED
    )
    front = Front(ScriptedRuntime(answers=answering(validity)), normalise=False)
    front.post("/v1/cache/validate", {"cache_key": "k", "messages": [SYSTEM]})
    assert front.runtime.admin_request.op == Validate(
        cache_key="k", messages=[SYSTEM], normalise=False
    )
