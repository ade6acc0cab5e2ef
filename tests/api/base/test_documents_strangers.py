"""A tenant that sends the id of another's conversation, response or thread learns nothing from it.

The tests do not measure time. They check that a stolen id and an unknown one get the same answer,
make the same requests to the runtime and run the same lines of code in the same order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

import httpx
import pytest

from rekindle.protocol.admin import AdminOp, AdminResult
from tests.api.responses.asking import Documents
from tests.api.scripted import Front, Received, ScriptedRuntime, reply
from tests.support.traced import lines_of

ANNA, BERT = ({"Authorization": f"Bearer {name}"} for name in ("anna", "bert"))
USER = {"role": "user", "content": "hello"}

Ids = dict[str, str]


class Tenants(ScriptedRuntime):
    """A runtime that keeps the documents of each tenant."""

    def __init__(self) -> None:
        super().__init__(reply("Hel", "lo"))
        self._documents: defaultdict[bytes, Documents] = defaultdict(Documents)

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: object = ()
    ) -> AdminResult:
        self.admin_requests.append(Received(op, salt, admin))
        return self._documents[salt].answer(op)


def stolen(front: Front) -> Ids:
    """The ids of Anna's conversation, of her response, and of an item of each."""
    made = front.post("/v1/conversations", {"items": [USER]}, headers=ANNA).json()
    items = front.get(f"/v1/conversations/{made['id']}/items", headers=ANNA).json()["data"]
    response = front.post("/v1/responses", {"input": "hello"}, headers=ANNA).json()
    thread = {"messages": [USER], "max_tokens": 9, "thread": {"type": "create"}}
    message = front.post("/v1/messages", thread, headers=ANNA).json()
    return {
        "conversation": made["id"],
        "item": items[0]["id"],
        "response": response["id"],
        "output": response["output"][0]["id"],
        "message": message["id"],
    }


def made_up(ids: Ids) -> Ids:
    """Ids of the same form that nobody has."""
    pairs = ((kind, name.partition("_")) for kind, name in ids.items())
    return {kind: f"{prefix}_{number[::-1]}" for kind, (prefix, _, number) in pairs}


CONTINUE = {
    "messages": [USER],
    "max_tokens": 9,
    "thread": {"type": "continue", "previous_message_id": "{message}"},
}
Way = tuple[str, str, Any]  # method, path and body, with places for the ids
WAYS: list[Way] = [
    ("GET", "/v1/conversations/{conversation}", None),
    ("POST", "/v1/conversations/{conversation}", {"metadata": {}}),
    ("DELETE", "/v1/conversations/{conversation}", None),
    ("GET", "/v1/conversations/{conversation}/items", None),
    ("POST", "/v1/conversations/{conversation}/items", {"items": [USER]}),
    ("GET", "/v1/conversations/{conversation}/items/{item}", None),
    ("DELETE", "/v1/conversations/{conversation}/items/{item}", None),
    ("POST", "/v1/responses", {"input": "x", "conversation": "{conversation}"}),
    ("POST", "/v1/responses", {"input": "x", "conversation": {"id": "{conversation}"}}),
    ("POST", "/v1/responses", {"input": "x", "previous_response_id": "{response}"}),
    ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "{output}"}]}),
    ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": "{item}"}]}),
    (
        "POST",
        "/v1/responses/compact",
        {"model": "tiny", "input": "x", "previous_response_id": "{response}"},
    ),
    ("POST", "/v1/responses/input_tokens", {"input": "x", "previous_response_id": "{response}"}),
    ("GET", "/v1/responses/{response}", None),
    ("GET", "/v1/responses/{response}?stream=true", None),
    ("GET", "/v1/responses/{response}/input_items", None),
    ("POST", "/v1/responses/{response}/cancel", None),
    ("DELETE", "/v1/responses/{response}", None),
    ("POST", "/v1/messages", CONTINUE),
]


def filled(value: Any, ids: Ids) -> Any:
    if isinstance(value, dict):
        return {key: filled(each, ids) for key, each in value.items()}
    if isinstance(value, list):
        return [filled(each, ids) for each in value]
    return value.format(**ids) if isinstance(value, str) else value


def without(text: str, ids: Ids) -> str:
    for kind, name in ids.items():
        text = text.replace(name, kind)
    return text


def send(front: Front, way: Way, ids: Ids, headers: dict[str, str]) -> httpx.Response:
    method, path, body = way
    content = {} if body is None else {"json": filled(body, ids)}
    headers = {**headers, "x-request-id": "a"}  # errors of /v1/messages quote it
    return front.request(method, filled(path, ids), headers=headers, **content)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[0]} {way[1]} {way[2]}")
def test_a_stolen_id_gets_the_answer_and_the_work_of_an_unknown_one(way: Way) -> None:
    front = Front(Tenants(), api_key=["anna", "bert"])
    ids = stolen(front)

    def observed(which: Ids) -> Any:
        before = len(front.runtime.admin_requests)
        lines, answer = lines_of(lambda: send(front, way, which, BERT))
        asked = front.runtime.admin_requests[before:]
        work = [re.sub("[0-9a-f]{8,}", "…", repr(each.op)) for each in asked]
        return answer.status_code, without(answer.text, which), work, lines

    unknown = made_up(ids)
    status, *seen, _ = observed(ids)
    assert status in (400, 404), seen
    assert [status, *seen] == list(observed(unknown))[:-1]
    # One-time work and the garbage collector may add lines to some of the requests.
    assert any(observed(ids) == observed(unknown) for _ in range(5))
    assert len(front.runtime.requests) == 2, "Bert's turns never began"


def test_the_owner_gets_another_answer() -> None:
    """This proves that the tests above can see a difference."""
    for way in WAYS:
        front = Front(Tenants(), api_key=["anna", "bert"])
        ids = stolen(front)
        answer = send(front, way, ids, ANNA)
        assert answer.status_code != 404, way
