"""Keys have limits. A refused client learns when it may ask again, and then it may."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from rekindle.errors import BadRequest, RateLimited
from rekindle.http.key_file import key_line
from rekindle.http.limits import WINDOW_S, Account, Accounts, KeyLimits, MinuteWindow
from tests.api.live import live
from tests.api.scripted import HELLO, Front, ScriptedRuntime
from tests.support.rounds import rounds


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def account(clock: Clock, **limits: Any) -> Account:
    return Accounts(clock).of(b"bob", "bob", KeyLimits(**limits))


def test_a_window_holds_what_was_added_in_the_last_minute() -> None:
    window = MinuteWindow()
    for at_s in (0.0, 0.5, 30.0):
        window.add(2, at_s)
    assert window.total(30.0) == 6
    assert window.total(WINDOW_S + 1) == 2
    assert window.total(WINDOW_S + 31) == 0


def test_after_the_time_of_a_refusal_the_request_is_accepted_and_not_before(clock: Clock) -> None:
    bob = account(clock, requests_per_minute=3)
    for _ in range(3):
        bob.count_request()
        clock.now_s += 7
    with pytest.raises(RateLimited) as refused:
        bob.count_request()
    wait_s = refused.value.retry_after_s
    assert wait_s is not None
    clock.now_s += wait_s - 1.5
    with pytest.raises(RateLimited):
        bob.count_request()
    clock.now_s += 1.5
    bob.count_request()


def test_tokens_of_a_minute_refuse_the_next_request_and_reused_ones_are_free(clock: Clock) -> None:
    bob = account(clock, tokens_per_minute=100)
    bob.use_prompt(500, reused_tokens=450)
    bob.count_request()
    bob.use_reply(60)
    with pytest.raises(RateLimited, match="100 tokens per minute") as refused:
        bob.count_request()
    clock.now_s += refused.value.retry_after_s or 0
    bob.count_request()


def test_open_turns_are_limited_and_more_choices_than_the_limit_never_fit(clock: Clock) -> None:
    bob = account(clock, concurrent_turns=2)
    bob.check_turns(2)
    bob.begin_turn()
    with pytest.raises(RateLimited):
        bob.check_turns(2)
    bob.end_turn()
    bob.check_turns(2)
    with pytest.raises(BadRequest):
        bob.check_turns(3)


def test_two_keys_of_a_tenant_share_what_they_count(clock: Clock) -> None:
    accounts, limits = Accounts(clock), KeyLimits(requests_per_minute=1)
    accounts.of(b"bob", "bob", limits).count_request()
    with pytest.raises(RateLimited):
        accounts.of(b"bob", "bob", limits).count_request()
    accounts.of(b"anna", "anna", limits).count_request()


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[httpx.Client]:
    """A client of a server with two keys, one of which has limits."""
    path = tmp_path / "keys"
    limits = ("requests_per_minute=2", "tokens_per_minute=50", "models=m0")
    lines = [
        key_line("bob", "bobs", admin=False, options=limits),
        key_line("anna", "annas", admin=False),
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    path.chmod(0o600)
    runtimes = (ScriptedRuntime(name=name) for name in ("m0", "m1"))
    front = Front(*runtimes, api_keys_file=path, model=("m0", "m1"))
    with live(front) as server, server.client() as client:
        yield client


BOB, ANNA = ({"authorization": f"Bearer {key}"} for key in ("bobs", "annas"))

CHAT = "/v1/chat/completions"
#: A request of each dialect, and where its error has the message.
DIALECTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/chat/completions": (HELLO, ["error", "message"]),
    "/v1/messages": ({**HELLO, "max_tokens": 5}, ["error", "message"]),
    "/v1/responses": ({"input": "Hi"}, ["error", "message"]),
    "/api/chat": ({**HELLO, "stream": False}, ["error"]),
    "/completion": ({"prompt": "Hi"}, ["error", "message"]),
}


@pytest.mark.parametrize("path", DIALECTS)
def test_a_refusal_has_the_shape_of_its_dialect_and_says_when_to_ask_again(
    limited: httpx.Client, path: str
) -> None:
    body, place = DIALECTS[path]
    for _ in range(2):
        assert limited.post(CHAT, json=HELLO, headers=BOB).status_code == 200
    refused = limited.post(path, json=body, headers=BOB)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= WINDOW_S + 1
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    message: Any = refused.json()
    for name in place:
        message = message[name]
    assert "2 requests per minute" in message


def test_headers_count_down_and_other_tenants_see_no_limits(
    limited: httpx.Client,
) -> None:
    first = limited.post(CHAT, json=HELLO, headers=BOB)
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert int(first.headers["x-ratelimit-remaining-tokens"]) <= 50
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    for _ in range(5):
        other = limited.post(CHAT, json=HELLO, headers=ANNA)
        assert other.status_code == 200
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]


def test_reading_is_not_limited(limited: httpx.Client) -> None:
    for _ in range(5):
        assert limited.get("/v1/models", headers=BOB).status_code == 200


def test_a_model_that_a_key_may_not_use_looks_like_an_unknown_one(
    limited: httpx.Client,
) -> None:
    answers = [
        limited.post(CHAT, json={**HELLO, "model": model}, headers=BOB) for model in ("m1", "m9")
    ]
    assert [each.status_code for each in answers] == [404, 404]
    bodies = [each.text.replace("m9", "m1") for each in answers]
    assert bodies[0] == bodies[1]
    allowed = limited.post(CHAT, json={**HELLO, "model": "m1"}, headers=ANNA)
    assert allowed.status_code == 200


@pytest.mark.long
@pytest.mark.parametrize("seed", range(rounds(20, 2000)))
def test_no_minute_ever_has_more_requests_than_the_limit(seed: int) -> None:
    clock, chance = Clock(), random.Random(seed)
    limit = chance.randint(1, 20)
    bob, accepted = account(clock, requests_per_minute=limit), list[float]()
    for _ in range(200):
        clock.now_s += chance.expovariate(0.5)
        try:
            bob.count_request()
        except RateLimited:
            continue
        accepted.append(clock.now_s)
    for begin_s in accepted:
        assert sum(begin_s <= at_s < begin_s + WINDOW_S for at_s in accepted) <= limit
