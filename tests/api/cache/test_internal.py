"""/v1/internal/model/kv_cache: sessions by id."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.errors import ReportedError
from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    EntryList,
    EntryName,
    ListEntries,
    Removed,
    RemoveOld,
    RemoveSession,
)
from tests.api.cache.entries import answering, entry, holding
from tests.api.scripted import Answers, Front, ScriptedRuntime, error, reported

ROOM = "/v1/internal/model/kv_cache"


def front_of(answers: Answers, **settings: Any) -> Front:
    return Front(ScriptedRuntime(answers=answers), **settings)


def test_sessions_are_listed_by_id_with_their_size() -> None:
    numbered = [EntryName("kv_cache_session_id", "-7"), EntryName("message_id", "msg_1")]
    front = front_of(
        holding(
            entry("a", names=numbered, size_bytes=100, last_used=5.0),
            entry("b", names=[EntryName("session_id", "12")], size_bytes=30, last_used=6.0),
            entry("c", names=[EntryName("prompt_cache_key", "team")], size_bytes=1),
            entry("d", names=[], size_bytes=1),
            entry("e", names=[EntryName("session_id", "conv_1")], has_document=True),
        )
    )
    assert front.get(f"{ROOM}/info").json() == {
        "model": "tiny",
        "caches": [
            {
                "session_id": -7,
                "kind": "kv_cache_session_id",
                "size_bytes": 100,
                "last_used": 5.0,
            },
            {"session_id": "msg_1", "kind": "message_id", "size_bytes": 100, "last_used": 5.0},
            {"session_id": "12", "kind": "session_id", "size_bytes": 30, "last_used": 6.0},
        ],
        "count": 3,
        "total_size_bytes": 130,
    }


@pytest.mark.parametrize("session_id", [7, 0, -1, 2**63 - 1, "chat-123", "7", "../x", "x" * 256])
def test_a_session_is_removed_by_its_id(session_id: int | str) -> None:
    front = front_of(answering(Removed(1, 100)))
    answer = front.post(f"{ROOM}/remove_cache", {"session_id": session_id})
    assert answer.json() == {
        "status": "ok",
        "session_id": session_id,
        "removed": 1,
        "freed_bytes": 100,
    }
    received = front.runtime.admin_request.op
    assert received == RemoveSession(session_id)
    assert isinstance(received, RemoveSession)
    assert type(received.session_id) is type(session_id)


@pytest.mark.parametrize(
    "answer",
    [Removed(0, 0), reported(404, "invalid_request_error", "not_found", "no")],
)
def test_an_unknown_id_is_not_found(answer: AdminResult | ReportedError) -> None:
    found = front_of(answering(answer)).post(f"{ROOM}/remove_cache", {"session_id": 9})
    assert found.status_code == 404
    assert error(found)["code"] == "not_found"


@pytest.mark.parametrize("session_id", ["", "x" * 257, 1.5, True, None, 2**63, 2**70, [1]])
def test_an_id_is_a_number_or_a_string(session_id: Any) -> None:
    answer = front_of(answering(Removed(1, 1))).post(
        f"{ROOM}/remove_cache", {"session_id": session_id}
    )
    assert answer.status_code == 400
    assert error(answer)["message"] == (
        "`session_id` takes a whole number, or a string of 1 to 256 characters."
    )


@pytest.mark.parametrize("seconds", [0, 0.5, 3600, 1e300])
def test_unused_state_is_removed(seconds: float) -> None:
    front = front_of(answering(Removed(4, 400)))
    answer = front.post(f"{ROOM}/remove_old_caches", {"seconds": seconds})
    assert answer.json() == {"status": "ok", "removed": 4, "freed_bytes": 400}
    assert front.runtime.admin_request.op == RemoveOld(seconds)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"seconds": -1}, "`seconds` takes a number from 0 up."),
        ({"seconds": "60"}, "`seconds` takes a number, not a string."),
        ({}, "`seconds` is missing."),
    ],
)
def test_an_age_is_a_number_from_zero_up(body: Any, sentence: str) -> None:
    answer = front_of(answering(Removed(0, 0))).post(f"{ROOM}/remove_old_caches", body)
    assert answer.status_code == 400
    assert error(answer)["message"] == sentence
    assert error(answer)["param"] == "seconds"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "info", None),
        ("POST", "remove_cache", {"session_id": 7}),
        ("POST", "remove_old_caches", {"seconds": 0}),
    ],
)
def test_an_id_is_of_the_callers_own_even_the_admins(method: str, path: str, body: Any) -> None:
    def answers(op: AdminOp) -> AdminResult:
        return EntryList([]) if isinstance(op, ListEntries) else Removed(1, 1)

    front = front_of(answers, api_key=["alpha"], admin_key=["root"])
    for key in ("alpha", "root"):
        headers = {"Authorization": f"Bearer {key}"}
        answer = front.request(method, f"{ROOM}/{path}", json=body, headers=headers)
        assert answer.status_code == 200
    tenant, admin = front.runtime.admin_requests
    assert (tenant.admin, admin.admin) == (False, False)
    assert tenant.salt != admin.salt
