"""Conversation objects, with OpenAI's client on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from rekindle.api.base import documents as stored
from rekindle.protocol.admin import AdminOp, AdminResult, GetDocument
from tests.api.live import live
from tests.api.responses.asking import Documents, StoppedRuntime, front_of
from tests.api.scripted import Front, Script, ScriptedRuntime, error, reply

HELLO: Any = {"role": "user", "content": "hello"}


@contextmanager
def client_of(
    *scripts: Script, documents: Documents | None = None
) -> Iterator[tuple[openai.OpenAI, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts, answers=(documents or Documents()).answer)
    with (
        live(Front(runtime)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        yield client, runtime


def test_a_conversation_is_made_looked_at_changed_and_deleted() -> None:
    with client_of() as (client, _):
        made = client.conversations.create(metadata={"a": "b"}, items=[HELLO])
        assert made.id.startswith("conv_")
        assert client.conversations.retrieve(made.id) == made
        changed = client.conversations.update(made.id, metadata={"c": "d"})
        assert changed.metadata == {"c": "d"}
        assert client.conversations.retrieve(made.id) == changed
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(made.id)


def test_items_are_added_listed_and_taken_out() -> None:
    with client_of() as (client, _):
        made = client.conversations.create()
        words = [{"role": "user", "content": str(number)} for number in range(5)]
        added = client.conversations.items.create(made.id, items=words)  # type: ignore[arg-type]
        assert added.first_id == added.data[0].id
        everything = list(client.conversations.items.list(made.id, limit=2, order="asc"))
        assert [item.id for item in everything] == [item.id for item in added.data]
        newest = client.conversations.items.list(made.id, limit=1)
        assert newest.data == [everything[-1]]
        assert client.conversations.items.retrieve(everything[1].id or "", conversation_id=made.id)
        client.conversations.items.delete(everything[1].id or "", conversation_id=made.id)
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.retrieve(everything[1].id or "", conversation_id=made.id)
        rest = list(client.conversations.items.list(made.id, order="asc"))
        assert rest == [everything[0], *everything[2:]]


def test_no_two_items_have_the_same_id() -> None:
    """Or paging would never end."""
    twice: Any = [{**HELLO, "id": "msg_a"}, {**HELLO, "id": "msg_a"}]
    with client_of() as (client, _):
        made = client.conversations.create(items=twice)
        added = client.conversations.items.create(made.id, items=twice)
        client.responses.create(model="tiny", input=twice, conversation=made.id)
        first = client.responses.create(model="tiny", input=twice)
        second = client.responses.create(model="tiny", input=twice, previous_response_id=first.id)
        kept = list(client.conversations.items.list(made.id, limit=1, order="asc"))
        shown = list(client.responses.input_items.list(second.id, limit=1, order="asc"))
    assert (len(kept), len(shown)) == (7, 5)
    for items in (kept, shown):
        assert len({item.id for item in items}) == len(items)
        assert items[0].id == "msg_a"
    assert [item.id for item in added.data] == [item.id for item in kept[2:4]]


def test_a_response_continues_its_conversation_and_adds_to_it() -> None:
    with client_of(reply("Hel", "lo"), reply("Fine.")) as (client, runtime):
        made = client.conversations.create(items=[HELLO])
        first = client.responses.create(model="tiny", input="How are you?", conversation=made.id)
        assert first.conversation is not None
        assert first.conversation.id == made.id
        with client.responses.stream(
            model="tiny", input="And now?", conversation=made.id, store=False
        ) as stream:
            stream.get_final_response()
        listed = list(client.conversations.items.list(made.id, order="asc"))
    assert [getattr(item, "role", None) for item in listed] == [
        *("user", "user", "assistant", "user", "assistant")
    ]
    assert runtime.requests[1].messages == [
        HELLO,
        {"role": "user", "content": "How are you?"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And now?"},
    ]
    names = runtime.requests[1].names
    assert names is not None
    assert names.session_id == made.id
    assert names.entry_key is None


def test_concurrent_responses_all_add_to_their_conversation() -> None:
    async def ask_all(url: str, conversation: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            await asyncio.gather(
                *(
                    client.responses.create(
                        model="tiny", input=str(number), conversation=conversation
                    )
                    for number in range(8)
                )
            )

    with client_of(reply("x")) as (client, _):
        made = client.conversations.create()
        asyncio.run(ask_all(str(client.base_url), made.id))
        listed = list(client.conversations.items.list(made.id, limit=100, order="asc"))
    texts = [item.content[0].text for item in listed if item.type == "message"]  # type: ignore[union-attr]
    assert texts[1::2] == ["x"] * 8
    assert sorted(texts[::2]) == [str(number) for number in range(8)]


def test_a_conversation_for_which_there_is_no_room_is_a_507() -> None:
    full = Documents(has_room=False)
    with client_of(documents=full) as (client, _), pytest.raises(openai.APIStatusError) as caught:
        client.conversations.create(items=[HELLO])
    assert caught.value.status_code == 507


def test_a_conversation_that_the_runtime_does_not_confirm_is_a_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stored, "SAVE_TIMEOUT_S", 0.01)
    documents = Documents()
    documents.kept["conv_a"] = b'{"id": "conv_a", "object": "conversation", "metadata": {}}'
    front = Front(StoppedRuntime(answers=documents.answer))
    for path, body in (
        ("/v1/conversations", {"items": [HELLO]}),
        ("/v1/conversations/conv_a", {"metadata": {"a": "b"}}),
        ("/v1/conversations/conv_a/items", {"items": [HELLO]}),
    ):
        response = front.post(path, body)
        assert response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        assert error(response)["code"] == "not_stored"
        assert "try again" in error(response)["message"]
    response = front.post("/v1/responses", {"input": "x", "conversation": "conv_a"})
    assert (response.json()["store"], response.json()["conversation"]) == (False, None)


def test_a_change_that_is_in_memory_only_says_so() -> None:
    front = Front(ScriptedRuntime(answers=Documents(durable=False).answer))
    made = front.post("/v1/conversations", {"items": [HELLO]}).json()
    path = f"/v1/conversations/{made['id']}"
    added = front.post(f"{path}/items", {"items": [HELLO]}).json()
    item = f"{path}/items/{added['last_id']}"
    answers = [
        made,
        added,
        front.post(path, {"metadata": {}}).json(),
        front.post(
            "/v1/responses", {"input": "x", "conversation": made["id"], "store": False}
        ).json(),
        front.request("DELETE", item).json(),
        front.request("DELETE", path).json(),
    ]
    assert [each.get("durable") for each in answers] == [False] * len(answers)
    assert "durable" not in front_of().post("/v1/conversations", {}).json()


def test_a_deleted_response_that_may_come_back_says_so() -> None:
    front = Front(ScriptedRuntime(answers=Documents(durable=False).answer))
    made = front.post("/v1/responses", {"input": "x"}).json()
    deleted = front.request("DELETE", f"/v1/responses/{made['id']}").json()
    assert (deleted["deleted"], deleted["durable"]) == (True, False)


def test_a_response_whose_conversation_is_gone_when_it_ends_says_so() -> None:
    class Forgetful(Documents):
        def answer(self, op: AdminOp) -> AdminResult:
            found = super().answer(op)
            if isinstance(op, GetDocument):  # deleted by somebody else as soon as it was read
                self.kept.clear()
            return found

    with client_of(documents=Forgetful()) as (client, _):
        made = client.conversations.create(items=[HELLO])
        response = client.responses.create(model="tiny", input="x", conversation=made.id)
    assert response.output_text == "Hello"
    assert response.conversation is None


@pytest.mark.parametrize(
    ("body", "about"),
    [
        ({"items": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"items": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"items": "x"}, "items"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "16"),
    ],
)
def test_an_item_that_cannot_be_kept_is_refused(body: Any, about: str) -> None:
    response = front_of().post("/v1/conversations", body)
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert about in error(response)["message"]


def test_unknown_conversations_are_404s_with_a_remedy() -> None:
    front = front_of()
    for response in (
        front.get("/v1/conversations/conv_x"),
        front.get("/v1/conversations/resp_x/items"),
        front.request("DELETE", "/conversations/conv_x"),
        front.post("/v1/conversations/conv_x/items", {"items": []}),
        front.post("/v1/responses", {"input": "x", "conversation": {"id": "conv_x"}}),
    ):
        assert response.status_code == httpx.codes.NOT_FOUND
        assert "POST /v1/conversations" in error(response)["message"]
