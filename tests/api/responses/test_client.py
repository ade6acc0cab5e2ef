"""OpenAI's own Python client and the Responses API, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from openai.lib.streaming.responses import ResponseTextDeltaEvent
from pydantic import BaseModel, SecretStr

from rekindle.api.base.documents import MAX_CONCURRENT
from rekindle.protocol.admin import AdminOp, AdminResult
from rekindle.protocol.events import Started
from tests.api.live import live
from tests.api.responses.asking import TOOL, Documents
from tests.api.scripted import (
    Front,
    Script,
    ScriptedRuntime,
    calling,
    delta,
    failed,
    finished,
    hit,
    reasoning,
    reply,
)

ASK: dict[str, Any] = {"model": "tiny", "input": "hello"}
PARIS = '{"city": "Paris", "days": 2}'
CACHED: Script = [Started(0, 10, 7, hit(7)), delta("Hel"), delta("lo"), finished(cache=hit(7))]
REASONED: Script = [Started(0, 10, 0), reasoning("Hm, "), reasoning("two."), delta("2"), finished()]


class Weather(BaseModel):
    city: str
    days: int


@contextmanager
def client_of(*scripts: Script) -> Iterator[tuple[openai.OpenAI, ScriptedRuntime]]:
    runtime = ScriptedRuntime(*scripts, answers=Documents().answer)
    with (
        live(Front(runtime, api_key=["secret"])) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        yield client, runtime


def test_a_whole_response_reports_the_tokens_read_from_the_cache() -> None:
    with client_of(CACHED) as (client, _):
        response = client.responses.create(**ASK)
    assert response.output_text == "Hello"
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 7


def test_the_stream_helper_puts_the_same_response_together() -> None:
    with client_of(CACHED) as (client, _), client.responses.stream(**ASK) as stream:
        texts = [each.delta for each in stream if isinstance(each, ResponseTextDeltaEvent)]
        response = stream.get_final_response()
    assert texts == ["Hel", "lo"]
    assert response.output_text == "Hello"
    assert response.usage is not None
    assert response.usage.output_tokens == 2


@pytest.mark.parametrize("streams", [False, True])
def test_a_call_can_be_answered(streams: bool) -> None:
    asked = {**ASK, "tools": [{**TOOL, "strict": False}]}
    with client_of(calling(("look", PARIS)), reply("Sunny.")) as (client, runtime):
        if streams:
            with client.responses.stream(**asked) as stream:
                response: Any = stream.get_final_response()
        else:
            response = client.responses.create(**asked)
        [call] = response.output
        assert call.type == "function_call"
        assert call.arguments == PARIS
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
        client.responses.create(**{**asked, "input": [output], "previous_response_id": response.id})
    sent = runtime.requests[1].messages
    assert sent is not None
    assert [each["role"] for each in sent] == ["user", "assistant", "tool"]
    assert sent[1]["tool_calls"][0]["id"] == call.call_id == sent[2]["tool_call_id"]


def test_reasoning_is_replayed_by_a_client_that_stores_nothing_here() -> None:
    asked = {**ASK, "store": False, "include": ["reasoning.encrypted_content"]}
    with client_of(REASONED, reply("Yes.")) as (client, runtime):
        response = client.responses.create(**asked)
        history: list[Any] = [{"role": "user", "content": "hello"}]
        for item in response.output:
            sent_back = item.model_dump(exclude_none=True)
            if sent_back["type"] == "reasoning":
                del sent_back["content"]  # some clients keep what is packed alone
            history.append(sent_back)
        question = {"role": "user", "content": "Sure?"}
        client.responses.create(**{**asked, "input": [*history, question]})
    sent = runtime.requests[1].messages
    assert sent is not None
    assert sent[1] == {"role": "assistant", "content": "2", "reasoning_content": "Hm, two."}


def test_a_form_is_parsed_into_its_model() -> None:
    script = reply('{"city": ', '"Paris", ', '"days": 2}')
    with client_of(script) as (client, runtime):
        response = client.responses.parse(**ASK, text_format=Weather)
    assert response.output_parsed == Weather(city="Paris", days=2)
    structure = runtime.requested.structured_output
    assert structure is not None
    assert isinstance(structure.schema, dict)
    assert set(structure.schema["properties"]) == {"city", "days"}


def test_a_stored_response_is_retrieved_listed_gone_on_from_and_deleted() -> None:
    with client_of() as (client, runtime):
        first = client.responses.create(**ASK, instructions="Be brief.")
        second = client.responses.create(
            model="tiny", input="and now?", previous_response_id=first.id
        )
        assert client.responses.retrieve(second.id) == second
        listed = client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in listed] == ["message"] * 3
        newest = client.responses.input_items.list(second.id, limit=1)
        assert newest.has_more
        assert len(list(newest)) == 3  # it asks for the next pages by itself
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(**ASK, previous_response_id=first.id)
        client.responses.create(**ASK, previous_response_id=second.id)
    sent = runtime.requests[1].messages
    assert sent == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "and now?"},
    ]


def test_tokens_are_counted() -> None:
    with client_of() as (client, _):
        counted = client.responses.input_tokens.count(
            model="tiny", input="hello", instructions="Be brief."
        )
    assert counted.input_tokens == 42


def test_errors_are_the_clients_own() -> None:
    with client_of([failed(503, "server_error", None, "died")]) as (client, _):
        with pytest.raises(openai.InternalServerError, match="died"):
            client.responses.create(**ASK)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(**{**ASK, "model": "gpt-7"})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").responses.create(**ASK)
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.responses.create(**ASK, prompt={"id": "p"})


def test_a_failed_stream_ends_with_an_error() -> None:
    died = failed(503, "server_error", None, "died")
    with client_of([Started(0, 10, 0), delta("x"), died]) as (client, _):
        told = list(client.responses.create(**ASK, stream=True))
    assert told[-1].type == "response.failed"
    assert told[-1].response.error is not None
    assert told[-1].response.error.message == "died"


def test_langchain_continues_the_previous_response() -> None:
    with client_of(reply("Hel", "lo"), reply("Fine.")) as (client, runtime):
        model = ChatOpenAI(
            model="tiny",
            base_url=str(client.base_url),
            api_key=SecretStr("secret"),
            use_responses_api=True,
            use_previous_response_id=True,
        )
        first = model.invoke("hello")
        second = model.invoke([HumanMessage("hello"), first, HumanMessage("How are you?")])
    assert second.text == "Fine."
    sent = runtime.requests[1]
    assert sent.names is not None
    assert sent.names.cache_key == first.response_metadata["id"]
    assert [each["content"] for each in sent.messages or ()] == ["hello", "Hello", "How are you?"]


class Counting(ScriptedRuntime):
    """Knows how many questions it was asked at a time."""

    open_questions = most_questions = 0

    async def admin(
        self, op: AdminOp, *, salt: bytes, admin: bool = False, groups: object = ()
    ) -> AdminResult:
        self.open_questions += 1
        self.most_questions = max(self.most_questions, self.open_questions)
        await asyncio.sleep(0.01)
        try:
            return await super().admin(op, salt=salt, admin=admin)
        finally:
            self.open_questions -= 1


def test_many_concurrent_responses_wait_for_a_slot() -> None:
    """A runtime takes 64 questions of a tenant at a time, and refuses more."""

    async def ask_all(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            first = await client.responses.create(**ASK)
            asked = {**ASK, "previous_response_id": first.id}
            return await asyncio.gather(*(client.responses.create(**asked) for _ in range(80)))

    runtime = Counting(answers=Documents().answer)
    with live(Front(runtime)) as server:
        found = asyncio.run(ask_all(f"{server.url}/v1"))
    assert {each.output_text for each in found} == {"Hello"}
    assert runtime.most_questions <= MAX_CONCURRENT
