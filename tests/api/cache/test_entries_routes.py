"""The entries of the cache over HTTP: listed, shown, validated, pinned, evicted, collected."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.http.key_file import key_digest
from rekindle.protocol.admin import CollectExpired, NameTenants, Removed, Validate, Validation
from rekindle.protocol.events import Divergence, Reason
from tests.api.cache.entries import ENTRY, answering, entry, holding
from tests.api.scripted import Answers, Front, ScriptedRuntime, error, reported, unknown_key

ODD_KEYS = ["none", "a/b", "a%2Fb", "..%2f..%2fetc", "%00", "x" * 5000, "%ff%fe", "stats/", " "]
ALPHA = {"Authorization": "Bearer alpha"}
ROOT = {"Authorization": "Bearer root"}
MESSAGES = [{"role": "system", "content": "Be brief."}]


def front_of(*answers: Answers, **settings: Any) -> Front:
    runtimes = [ScriptedRuntime(name=f"m{n}", answers=each) for n, each in enumerate(answers)]
    return Front(*runtimes, **settings)


def keyed(*answers: Answers) -> Front:
    return front_of(*answers, api_key=["alpha"], admin_key=["root"])


def test_an_entry_is_shown_with_all_that_is_known_of_it() -> None:
    answer = keyed(holding(ENTRY)).get("/v1/cache/key-1", headers=ALPHA)
    assert answer.json() == {
        "cache_key": "key-1",
        "model": "m0",
        "segments": [{"type": "system", "hash": "a1b2c3d4"}, {"type": "turn", "hash": "00ff00ff"}],
        "token_count": 1730,
        "stored_tokens": 1728,
        "tier": "disk",
        "size_bytes": 255_120_384,
        "hit_count": 3,
        "pinned": True,
        "ttl": None,
        "created_at": 1000.5,
        "last_used": 2000.25,
        "expires_at": None,
        "names": [{"kind": "session_id", "name": "chat-123"}],
        "preview": "What is the moon made of?",
    }


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/cache"),
        ("GET", "/v1/cache/key-1"),
        ("DELETE", "/v1/cache/key-1"),
        ("POST", "/v1/cache/key-1/pin"),
        ("POST", "/v1/cache/key-1/unpin"),
    ],
)
def test_a_tenant_asks_for_itself_and_the_admin_for_all(method: str, path: str) -> None:
    front = keyed(holding(ENTRY))
    for headers in (ALPHA, ROOT):
        content = {"content-type": "application/json"}
        assert front.request(method, path, headers=headers | content).status_code == 200
    asked = front.runtime.admin_requests
    tenant, admin = (each for each in asked if not isinstance(each.op, NameTenants))
    assert (tenant.admin, admin.admin) == (False, True)
    assert b"" != tenant.salt != admin.salt


def test_only_admins_see_the_tenant_of_an_entry() -> None:
    front = keyed(holding(ENTRY))
    assert front.get("/v1/cache", headers=ROOT).json()["entries"][0]["tenant"] == "7e4a"
    assert "tenant" not in front.get("/v1/cache", headers=ALPHA).json()["entries"][0]
    assert front_of(holding(ENTRY)).get("/v1/cache/key-1").json()["tenant"] == "7e4a"


def test_an_admin_sees_the_names_of_tenants_and_never_their_keys() -> None:
    """A tenant without a key keeps its id."""
    ids = ("tenant-0", "shared", "7e4a")
    front = keyed(holding(*(entry(f"key-{each}", tenant=each) for each in ids)))
    shown = [each["tenant"] for each in front.get("/v1/cache", headers=ROOT).json()["entries"]]
    name = f"key-{key_digest('alpha').hex()[:8]}"
    assert sorted(shown) == sorted([name, "(shared)", "7e4a"])
    assert "alpha" not in front.get("/v1/cache", headers=ROOT).text


def test_an_entry_is_found_whichever_model_has_it() -> None:
    front = front_of(holding(), holding(ENTRY))
    assert front.get("/v1/cache/key-1").json()["model"] == "m1"
    assert front.post("/v1/cache/key-1/unpin", {}).json()["pinned"] is False
    assert front.post("/v1/cache/key-1/pin", {}).json()["pinned"] is True
    evicted = front.request("DELETE", "/v1/cache/key-1")
    assert evicted.json() == {"status": "evicted", "cache_key": "key-1"}


def test_a_change_that_the_disk_refused_is_reported_as_not_durable() -> None:
    entries = front_of(answering(entry("key-1", durable=False)))
    assert entries.post("/v1/cache/key-1/pin", {}).json()["durable"] is False
    assert entries.post("/v1/cache/key-1/unpin", {}).json()["durable"] is False
    removing = front_of(answering(Removed(1, 50, durable=False)), answering(Removed(1, 50)))
    assert removing.request("DELETE", "/v1/cache/key-1").json()["durable"] is False
    assert removing.post("/v1/cache/gc", {}).json()["durable"] is False
    sessions = "/v1/internal/model/kv_cache"
    for path, body in (("remove_cache", {"session_id": 7}), ("remove_old_caches", {"seconds": 0})):
        assert removing.post(f"{sessions}/{path}", body).json()["durable"] is False
    assert "durable" not in front_of(holding(ENTRY)).post("/v1/cache/key-1/pin", {}).json()


@pytest.mark.parametrize("key", ODD_KEYS)
@pytest.mark.parametrize(
    ("method", "after"), [("GET", ""), ("DELETE", ""), ("POST", "/pin"), ("POST", "/unpin")]
)
def test_an_unknown_key_is_not_found_whatever_it_looks_like(
    method: str, after: str, key: str
) -> None:
    options: dict[str, Any] = {"json": {}} if method == "POST" else {}
    answer = front_of(holding(ENTRY), holding()).request(
        method, f"/v1/cache/{key}{after}", **options
    )
    assert answer.status_code == 404
    assert error(answer)["code"] == "cache_key_not_found"


def test_an_unavailable_model_may_have_the_key() -> None:
    front = front_of(holding(), holding(ENTRY))
    front.runtimes[1].supervisor.ready = None
    assert front.get("/v1/cache/key-1").status_code == 503
    assert front.get("/v1/cache").status_code == 503


def test_another_refusal_is_passed_on_unchanged() -> None:
    full = reported(507, "insufficient_storage_error", "pins_exceed_budget", "no room")
    answer = front_of(answering(full), holding(ENTRY)).post("/v1/cache/key-1/pin", {})
    assert answer.status_code == 507
    assert error(answer)["code"] == "pins_exceed_budget"


@pytest.mark.parametrize("content", [b"", b"{}", b"  {}"])
def test_expired_entries_are_collected_from_all_models(content: bytes) -> None:
    front = front_of(answering(Removed(2, 300)), answering(Removed(1, 50)))
    headers = {"content-type": "application/json"}
    answer = front.request("POST", "/v1/cache/gc", content=content, headers=headers)
    assert answer.json() == {"status": "ok", "removed": 3, "freed_bytes": 350}
    assert front.runtime.admin_request.op == CollectExpired()


def validated(*answers: Answers, **fields: Any) -> httpx.Response:
    body = {"cache_key": "k", "model": "m0", "messages": MESSAGES, **fields}
    return front_of(*answers).post("/v1/cache/validate", body)


HIT = Validation(status="hit", reusable_tokens=1730, invalidated_at=None, reason=Reason.FULL_MATCH)
UNKNOWN = Validation(
    status="miss", reusable_tokens=0, invalidated_at=None, reason=Reason.CACHE_KEY_NOT_FOUND
)


def test_a_key_is_validated_against_messages_and_tools() -> None:
    front = keyed(answering(HIT))
    tools = [{"type": "function", "function": {"name": "get_price", "parameters": {}}}]
    messages = [{**MESSAGES[0], "message_id": "m"}]
    body = {"cache_key": "k", "model": "m0", "messages": messages, "tools": tools}
    answer = front.post("/v1/cache/validate", body, headers=ROOT)
    assert answer.json() == {
        "status": "hit",
        "reusable_tokens": 1730,
        "invalidated_at": None,
        "reason": "full_match",
    }
    received = front.runtime.admin_request
    assert received.op == Validate(cache_key="k", messages=MESSAGES, tools=tools)
    assert not received.admin  # it would hit for one who owns it, not for one who may look at it


def test_a_change_is_shown_where_it_is() -> None:
    changed = Validation(
        status="partial_hit",
        reusable_tokens=12,
        invalidated_at="turn 2",
        reason=Reason.TURN_CHANGED,
        diverged_at=Divergence(3, "user", "risks", "chances"),
    )
    result = validated(answering(changed)).json()
    assert result["invalidated_at"] == "turn 2"
    assert result["diverged_at"] == {
        "message": 3,
        "role": "user",
        "stored": "risks",
        "sent": "chances",
    }


def test_an_unknown_key_is_a_miss_and_a_key_of_another_model_a_mismatch() -> None:
    assert validated(answering(UNKNOWN)).json()["reason"] == "cache_key_not_found"
    result = validated(answering(UNKNOWN), answering(unknown_key())).json()
    assert (result["status"], result["reason"]) == ("miss", "cache_key_not_found")
    result = validated(answering(UNKNOWN), holding(entry("k"))).json()
    assert (result["status"], result["reason"]) == ("miss", "model_mismatch")


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("cache_key", "", "`cache_key` takes a string of 1 to 256 characters."),
        ("cache_key", None, "`cache_key` takes a string of 1 to 256 characters."),
        ("messages", [], "`messages` takes at least 1 item."),
        ("messages", "x", "`messages` takes a list, not a string."),
        ("tools", ["f"], "`tools.0` takes an object, not a string."),
        ("tools", [{}] * 129, "`tools` takes at most 128 items."),
        ("model", 3, "`model` takes a string, not a number."),
    ],
)
def test_a_bad_request_is_refused_with_the_values_it_takes(
    field: str, value: Any, sentence: str
) -> None:
    answer = validated(answering(HIT), **{field: value})
    assert answer.status_code == 400
    assert error(answer)["message"] == sentence
    assert error(answer)["param"] == field


def test_a_key_has_to_be_asked_for() -> None:
    answer = front_of(answering(HIT)).post("/v1/cache/validate", {"messages": MESSAGES})
    assert error(answer)["message"] == "`cache_key` is missing."


def test_an_unknown_model_has_no_cache_to_validate() -> None:
    assert validated(answering(HIT), model="gpt-5").status_code == 404
