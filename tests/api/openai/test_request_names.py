"""The names of a request, and which of them reach the runtime."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.requests import GenerateRequest, Names
from tests.api.scripted import Front, error

USER = {"role": "user", "content": "hello"}


def requested(settings: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    front = Front(**(settings or {}))
    answer = front.chat(**fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requested


def completed(**fields: Any) -> list[GenerateRequest]:
    front = Front()
    answer = front.complete(**fields)
    assert answer.status_code == 200, answer.text
    return front.runtime.requests


NAMED = [
    ({"cache_key": "abc123"}, Names(cache_key="abc123")),
    ({"return_cache_key": True}, Names(return_cache_key=True)),
    ({"session_id": "chat-123"}, Names(session_id="chat-123")),
    ({"kv_cache_session_id": 0}, Names(session_number=0)),
    ({"kv_cache_session_id": 1 - 2**63}, Names(session_number=1 - 2**63)),
    ({"prompt_cache_key": "team-a"}, Names(prompt_cache_key="team-a")),
    ({"prompt_cache_retention": "24h"}, Names(ttl_s=86_400.0)),
    ({"prompt_cache_retention": "in_memory"}, Names(in_memory=True)),
    ({"prompt_cache_retention": "in-memory"}, Names(in_memory=True)),
]


@pytest.mark.parametrize(("fields", "naming"), NAMED, ids=lambda value: str(value)[:40])
def test_a_name_reaches_the_runtime_of_a_chat_and_of_a_completion(
    fields: dict[str, Any], naming: Names
) -> None:
    assert requested(**fields).names == naming
    assert [request.names for request in completed(**fields)] == [naming]


def test_a_request_that_names_nothing_has_no_naming() -> None:
    assert requested().names is None
    assert requested(return_cache_key=False, cache_exact=True).names is None
    assert completed(use_kv_cache=True)[0].names is None


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "a\x00b\n\u202e", "\uff0e\uff0e\uff0f", "x" * 256, " "]
)
def test_a_name_is_any_string(name: str) -> None:
    naming = requested(session_id=name, use_kv_cache=True, messages=[{**USER, "message_id": name}])
    assert naming.names == Names(session_id=name, message_ids=[name], wants_message_id=True)


def test_message_ids_are_sent_newest_first_and_hidden_from_the_template() -> None:
    messages = [
        {**USER, "message_id": "msg_1"},
        {"role": "assistant", "content": "Hi", "message_id": "msg_2"},
        {**USER, "name": "Ada"},
        {**USER, "message_id": None},
    ]
    request = requested(messages=messages, use_kv_cache=True)
    assert request.names == Names(message_ids=["msg_2", "msg_1"], wants_message_id=True)
    assert request.messages == [
        USER,
        {"role": "assistant", "content": "Hi"},
        {**USER, "name": "Ada"},
        USER,
    ]


@pytest.mark.parametrize("use_kv_cache", [None, False])
def test_message_ids_are_not_looked_for_unasked(use_kv_cache: bool | None) -> None:
    request = requested(messages=[{**USER, "message_id": "msg_1"}], use_kv_cache=use_kv_cache)
    assert request.names is None
    assert request.messages == [USER]


def test_other_choices_bear_no_name_but_have_ids_and_are_kept_alike() -> None:
    front = Front()
    front.chat(n=3, session_id="s", use_kv_cache=True, prompt_cache_retention="in_memory")
    first, *others = (request.names for request in front.runtime.requests)
    plain = Names(wants_message_id=True, in_memory=True)
    assert first == Names(session_id="s", wants_message_id=True, in_memory=True)
    assert others == [plain, plain]


def test_a_name_alone_leaves_other_choices_without_naming() -> None:
    front = Front()
    front.chat(n=2, cache_key="k", return_cache_key=True)
    first, second = (request.names for request in front.runtime.requests)
    assert first == Names(cache_key="k", return_cache_key=True)
    assert second is None


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_key": "k"},
        {"session_id": "s"},
        {"kv_cache_session_id": 0},
        {"use_kv_cache": True, "messages": [{**USER, "message_id": "m"}]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_fingerprint_is_for_conversations_without_a_name(fields: dict[str, Any]) -> None:
    forced = {"force_cache": True}
    assert requested(forced).names == Names(by_fingerprint=True)
    named = requested(forced, **fields).names
    assert named is not None
    assert not named.by_fingerprint
    assert requested(**fields).names == named


def test_the_session_header_does_not_name_several_prompts() -> None:
    request = requested({"force_cache": True}, prompt_cache_key="team-a", return_cache_key=True)
    assert request.names == Names(
        prompt_cache_key="team-a", return_cache_key=True, by_fingerprint=True
    )


def test_a_text_completion_gets_no_fingerprint_session() -> None:
    front = Front(force_cache=True)
    front.complete()
    assert front.runtime.requested.names is None


def test_a_request_that_opts_out_has_no_names() -> None:
    fields = {"session_id": "s", "return_cache_key": True}
    opted_out = requested({"force_cache": True}, use_kv_cache=False, **fields)
    assert (opted_out.reuse, opted_out.names) == (False, None)


def test_a_server_without_a_context_cache_reuses_for_nobody() -> None:
    request = requested(
        {"context_cache": False, "force_cache": True}, session_id="s", use_kv_cache=True
    )
    assert (request.reuse, request.names) == (False, None)


@pytest.mark.parametrize("field", ["cache_key", "session_id", "prompt_cache_key"])
@pytest.mark.parametrize("value", ["", "x" * 257, 3, ["a"], True])
def test_a_name_is_bounded_and_says_so(field: str, value: Any) -> None:
    for answer in (Front().chat(**{field: value}), Front().complete(**{field: value})):
        assert answer.status_code == 400
        assert error(answer)["param"] == field
        assert error(answer)["message"] == f"`{field}` takes a string of 1 to 256 characters."


@pytest.mark.parametrize("value", ["", "x" * 257, 3, {}])
def test_a_message_id_is_bounded_and_says_so(value: Any) -> None:
    answer = Front().chat(messages=[{**USER, "message_id": value}])
    assert answer.status_code == 400
    assert error(answer)["message"] == (
        "`messages.0.message_id` takes a string of 1 to 256 characters."
    )
    assert error(answer)["param"] == "messages"


@pytest.mark.parametrize("value", ["7", 1.5, True, 2**63, -(2**63), 2**70, []])
def test_a_numbered_session_is_a_number(value: Any) -> None:
    answer = Front().chat(kv_cache_session_id=value)
    assert answer.status_code == 400
    assert error(answer)["param"] == "kv_cache_session_id"
    assert "takes a " in error(answer)["message"]


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("return_cache_key", "yes", "`return_cache_key` takes true or false, not a string."),
        (
            "prompt_cache_retention",
            "48h",
            "`prompt_cache_retention` takes 'in_memory', 'in-memory' or '24h'.",
        ),
    ],
)
def test_other_cache_fields_are_refused_with_the_values_they_take(
    field: str, value: Any, sentence: str
) -> None:
    answer = Front().chat(**{field: value})
    assert answer.status_code == 400
    assert error(answer)["message"] == sentence


@pytest.mark.parametrize("field", ["session_id", "cache_key", "prompt_cache_key"])
def test_an_id_with_a_lone_surrogate_is_unknown(field: str) -> None:
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "{field}": "\\ud800"}}'
    headers = {"content-type": "application/json"}
    answer = Front().request("POST", "/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert error(answer)["message"].startswith("The body is not valid JSON")


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_key": "k"},
        {"return_cache_key": True},
        {"session_id": "s"},
        {"kv_cache_session_id": 0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_name_belongs_to_one_prompt(fields: dict[str, Any]) -> None:
    answer = Front().complete(prompt=["a", "b"], **fields)
    assert answer.status_code == 400
    assert error(answer)["param"] == next(iter(fields))
    assert "a name belongs to one prompt" in error(answer)["message"]
    assert len(completed(prompt=["a"], **fields)) == 1
    assert len(completed(prompt=[1, 2], **fields)) == 1


def test_several_prompts_may_be_kept_alike() -> None:
    requests = completed(prompt=["a", "b"], return_cache_key=False, prompt_cache_key="group")
    assert [request.names for request in requests] == [Names(prompt_cache_key="group")] * 2


# The requests of the servers that Rekindle answers like, as their documents have them.

REFERENCE = [
    {
        "messages": [
            {"role": "user", "content": "Hello! I read a book today.", "message_id": "msg_1_uuid"},
            {"role": "assistant", "content": "Was it fun?", "message_id": "msg_2_uuid"},
            {"role": "user", "content": "Which one?", "message_id": "msg_3_uuid"},
        ],
        "use_kv_cache": True,
        "temperature": 0.7,
    },
    {"messages": [USER], "kv_cache_session_id": 12},
    {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": "You are a financial analyst..."},
            {"role": "user", "content": "What are our top risks?"},
        ],
        "cache_key": "704e05061389",
        "return_cache_key": True,
        "stream": True,
    },
    {"model": "default", "messages": [USER], "session_id": "chat-123"},
    {"model": "default", "messages": [USER]},
]


@pytest.mark.parametrize("body", REFERENCE, ids=range(len(REFERENCE)))
def test_the_documented_requests_are_taken_as_they_are(body: dict[str, Any]) -> None:
    front = Front(force_cache=True)
    answer = front.post("/v1/chat/completions", body, headers={"X-Model-Id": "0"})
    assert answer.status_code == 200, answer.text
    assert front.runtime.requested.names is not None
