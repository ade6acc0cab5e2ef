"""`truncation: auto`: where a conversation is cut, and how many questions that takes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rekindle.api.responses import truncation
from rekindle.api.responses.request import Conversation
from rekindle.http.body import VALIDATORS
from rekindle.protocol.admin import AdminOp, AdminResult, Tokenize, Tokenized
from tests.api.responses.asking import Documents, answered
from tests.api.scripted import Front, ScriptedRuntime

DEVELOPER = {"role": "developer", "content": "Be brief."}
CALL = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "seen" * 100}


def counting(op: AdminOp) -> AdminResult:
    """A token for each character, of 4096."""
    assert isinstance(op, Tokenize)
    texts = (message.get("content") or "" for message in op.messages or ())
    return Tokenized(sum(len(text) for text in texts), 4096)


class Counting(Documents):
    def __init__(self) -> None:
        super().__init__()
        self.questions = 0

    def answer(self, op: AdminOp) -> AdminResult:
        if not isinstance(op, Tokenize):
            return super().answer(op)
        self.questions += 1
        return counting(op)


def turn(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number:03}" * 100}, CALL, OUTPUT]


def sent(items: list[Any], **fields: Any) -> tuple[list[dict[str, Any]], int]:
    """The messages of a request, and how often tokens were counted for it."""
    documents = Counting()
    front = Front(ScriptedRuntime(answers=documents.answer))
    answered(front, input=items, **fields)
    messages = front.runtime.requested.messages
    assert messages is not None
    return messages, documents.questions


def turns(count: int) -> list[dict[str, Any]]:
    return [DEVELOPER, *(item for number in range(count) for item in turn(number))]


def test_a_conversation_that_fits_is_sent_whole() -> None:
    messages, questions = sent(turns(4), truncation="auto")
    assert len(messages) == 13
    assert questions == 1


@pytest.mark.parametrize("fields", [{}, {"truncation": "disabled"}])
def test_nothing_is_cut_unasked(fields: Any) -> None:
    messages, questions = sent(turns(40), **fields)
    assert len(messages) == 121
    assert questions == 0


def test_the_beginning_is_cut_before_a_users_message_and_behind_the_instructions() -> None:
    messages, questions = sent(turns(40), truncation="auto")
    assert messages[0]["role"] == "developer"
    assert messages[1]["role"] == "user"
    assert messages[-2]["tool_calls"]
    assert sum(len(message.get("content") or "") for message in messages) <= 4096
    assert questions <= 6


def test_the_cut_stays_where_it_is_while_the_conversation_grows() -> None:
    begins = [sent(turns(count), truncation="auto")[0][1]["content"][:3] for count in range(10, 40)]
    assert len(set(begins)) <= 11
    assert begins == sorted(begins)


def test_a_message_that_does_not_fit_alone_is_left_to_be_refused() -> None:
    messages, _ = sent([{"role": "user", "content": "x" * 9000}], truncation="auto")
    assert len(messages[0]["content"]) == 9000
    messages, _ = sent([*turns(3), {"role": "user", "content": "x" * 9000}], truncation="auto")
    assert [message["role"] for message in messages] == ["developer", "user"]


def test_a_long_conversation_is_cut_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = dict[str, set[str]]()

    def watched(owner: Any, name: str) -> None:
        work = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            threads.setdefault(name, set()).add(threading.current_thread().name.split("_")[0])
            return work(*args, **options)

        monkeypatch.setattr(owner, name, called)

    watched(truncation, "_without_media")
    watched(truncation, "_cuts")
    watched(Conversation, "cut")
    documents = Counting()
    front = Front(ScriptedRuntime(answers=documents.answer))
    first = answered(front, input=turns(100))["id"]
    answered(front, input="x", previous_response_id=first, truncation="auto")
    assert documents.questions > 1
    assert threads == {name: {VALIDATORS} for name in ("_without_media", "_cuts", "cut")}
