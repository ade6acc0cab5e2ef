"""Chat completions with `store: true` can be listed, shown, changed and deleted by their id."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import orjson
import pytest

from tests.api.live import live
from tests.api.responses.asking import Documents, StoppedRuntime
from tests.api.scripted import Front, ScriptedRuntime, calling, error, reply

PATH = "/v1/chat/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    "store": True,
}
PARTS: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": "a part"}]}


def front_of(*texts: str, documents: Documents | None = None) -> Front:
    scripts = [reply(text) for text in texts]
    return Front(ScriptedRuntime(*scripts, answers=(documents or Documents()).answer))


def created(front: Front, **fields: Any) -> dict[str, Any]:
    """The completion as its client sees it, whole or put together from the stream's chunks."""
    response = front.post(PATH, {**HELLO, **fields})
    assert response.status_code == httpx.codes.OK, response.text
    if not fields.get("stream"):
        return dict(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return dict(orjson.loads(lines[0]))


def got(front: Front, path: str = "", **parameters: Any) -> dict[str, Any]:
    response = front.get(f"{PATH}{path}", params=parameters)
    assert response.status_code == httpx.codes.OK, response.text
    return dict(response.json())


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_completion_is_shown_as_it_was_answered(stream: bool) -> None:
    front = front_of("Hi.")
    made = created(front, stream=stream, metadata={"topic": "test"}, temperature=0.5, seed=7)
    shown = got(front, f"/{made['id']}")
    assert shown["choices"][0]["message"]["content"] == "Hi."
    assert shown["choices"][0]["finish_reason"] == "stop"
    assert shown["object"] == "chat.completion"
    assert shown["metadata"] == {"topic": "test"}
    assert (shown["temperature"], shown["seed"], shown["tools"]) == (0.5, 7, None)
    assert shown["usage"]["total_tokens"] > 0
    assert made["model"] == shown["model"]


def test_an_answer_says_that_it_is_stored_only_if_it_was_asked_for() -> None:
    front = front_of("Hi.", "Hi.")
    assert created(front)["store"] is True
    unstored = created(front, store=False)
    assert "store" not in unstored
    response = front.get(f"{PATH}/{unstored['id']}")
    assert response.status_code == httpx.codes.NOT_FOUND
    assert error(response)["code"] == "completion_not_found"


def test_the_messages_of_a_completion_have_ids_and_come_in_order() -> None:
    front = front_of("Hi.")
    made = created(front, messages=[*HELLO["messages"], PARTS])
    listed = got(front, f"/{made['id']}/messages")
    assert [each["role"] for each in listed["data"]] == ["system", "user", "user"]
    assert [each["content"] for each in listed["data"]] == ["Be brief.", "hello", None]
    assert listed["data"][2]["content_parts"] == PARTS["content"]
    ids = [each["id"] for each in listed["data"]]
    assert len(set(ids)) == len(ids)
    rest = got(front, f"/{made['id']}/messages", after=ids[1], limit=1)
    assert [each["id"] for each in rest["data"]] == ids[2:]
    newest = got(front, f"/{made['id']}/messages", order="desc")
    assert [each["id"] for each in newest["data"]] == ids[::-1]


def test_completions_are_listed_newest_first_page_by_page() -> None:
    front = front_of("1", "2", "3")
    ids = [created(front)["id"] for _ in range(3)]
    first = got(front, limit=2)
    assert [each["id"] for each in first["data"]] == ids[:0:-1]
    assert (first["has_more"], first["last_id"]) == (True, ids[1])
    last = got(front, limit=2, after=first["last_id"])
    assert [each["id"] for each in last["data"]] == ids[:1]
    assert last["has_more"] is False
    assert [each["id"] for each in got(front, order="asc")["data"]] == ids
    unknown = front.get(PATH, params={"after": "chatcmpl-x"})
    assert unknown.status_code == httpx.codes.BAD_REQUEST
    assert error(unknown)["param"] == "after"


def test_a_list_is_narrowed_by_metadata_and_model() -> None:
    front = front_of("1", "2", "3")
    wanted = created(front, metadata={"topic": "a", "by": "me"})["id"]
    created(front, metadata={"topic": "b"})
    made = created(front)
    by_topic = got(front, **{"metadata[topic]": "a", "metadata[by]": "me"})
    assert [each["id"] for each in by_topic["data"]] == [wanted]
    assert len(got(front, model=made["model"])["data"]) == 3
    assert got(front, model="another")["data"] == []


def test_only_the_metadata_of_a_completion_can_change() -> None:
    front = front_of("Hi.")
    made = created(front, metadata={"topic": "a"})
    changed = front.post(f"{PATH}/{made['id']}", {"metadata": {"topic": "b"}})
    assert changed.json()["metadata"] == {"topic": "b"}
    assert got(front, f"/{made['id']}")["metadata"] == {"topic": "b"}
    assert got(front, f"/{made['id']}/messages")["data"][1]["content"] == "hello"
    nothing = front.post(f"{PATH}/{made['id']}", {})
    assert nothing.status_code == httpx.codes.BAD_REQUEST
    assert error(nothing)["param"] == "metadata"


def test_a_deleted_completion_is_gone() -> None:
    front = front_of("Hi.")
    made = created(front)
    deleted = front.request("DELETE", f"{PATH}/{made['id']}").json()
    assert deleted == {"id": made["id"], "object": "chat.completion.deleted", "deleted": True}
    assert front.get(f"{PATH}/{made['id']}").status_code == httpx.codes.NOT_FOUND
    assert got(front)["data"] == []


def test_a_completion_for_which_there_is_no_room_is_answered_and_says_so() -> None:
    documents = Documents(has_room=False)
    assert created(front_of("Hi.", documents=documents))["store"] is False
    response = front_of("Hi.", documents=documents).post(PATH, {**HELLO, "stream": True})
    chunks = [line for line in response.text.splitlines() if '"store":false' in line]
    assert len(chunks) == 1
    assert response.text.rstrip().endswith("[DONE]")


def test_a_completion_in_memory_only_says_that_it_is_not_durable() -> None:
    made = created(front_of("Hi.", documents=Documents(durable=False)))
    assert (made["store"], made["durable"]) == (True, False)


def test_a_model_that_does_not_confirm_costs_the_client_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.api.base.documents.SAVE_TIMEOUT_S", 0.01)
    front = Front(StoppedRuntime(reply("Hi."), answers=Documents().answer))
    made = created(front)
    assert made["store"] is False
    assert made["choices"][0]["message"]["content"] == "Hi."


def test_a_stored_call_keeps_its_arguments() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    script = calling(("look", '{"at":"sky"}'))
    for stream in (False, True):
        front = Front(ScriptedRuntime(script, answers=Documents().answer))
        made = created(front, tools=[tool], stream=stream)
        shown = got(front, f"/{made['id']}")
        [call] = shown["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "look", "arguments": '{"at":"sky"}'}
        assert shown["tools"][0]["function"]["name"] == "look"


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a" * 65: "b"}, "a", {"a": "b" * 513}])
def test_metadata_are_a_few_short_texts(metadata: Any) -> None:
    response = front_of().post(PATH, {**HELLO, "metadata": metadata})
    assert response.status_code == httpx.codes.BAD_REQUEST
    assert error(response)["param"] == "metadata"


def test_openais_client_reads_stored_completions() -> None:
    with live(front_of("One.", "Two.")) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        talk: list[Any] = HELLO["messages"]
        for topic in ("a", "b"):
            client.chat.completions.create(
                model="default", messages=talk, store=True, metadata={"topic": topic}
            )
        [found] = client.chat.completions.list(metadata={"topic": "a"}).data
        assert found.choices[0].message.content == "One."
        assert client.chat.completions.retrieve(found.id).metadata == {"topic": "a"}
        messages = client.chat.completions.messages.list(found.id).data
        assert [each.content for each in messages] == ["Be brief.", "hello"]
        assert client.chat.completions.update(found.id, metadata={"topic": "c"}).id == found.id
        assert client.chat.completions.delete(found.id).deleted
        assert [each.metadata for each in client.chat.completions.list(limit=1)] == [{"topic": "b"}]
