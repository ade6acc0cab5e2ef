"""Which request fields and settings reach the runtime."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from pydantic import BaseModel

from rekindle.api.openai.known_fields import CHAT_FIELDS
from rekindle.api.openai.schema import ChatRequest, CompletionRequest
from rekindle.protocol.frames import frame
from rekindle.protocol.requests import GenerateRequest, ToolUse
from tests.api.scripted import Front, ScriptedRuntime, error

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}


def requested(settings: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    front = Front(**(settings or {}))
    assert front.chat(**fields).status_code == 200
    return front.runtime.requested


def test_a_request_that_says_nothing_gets_the_documented_defaults() -> None:
    request = requested()
    assert request.max_tokens is None
    assert asdict(request.sampling) == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "repetition_context_size": 20,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "dry_multiplier": 0.0,
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ("\n", ":", '"', "*"),
        "logit_bias": {},
        "text_bias": (),
        "bad_words": (),
        "min_tokens": 0,
        "seed": None,
        "top_logprobs": None,
        "dry_breakers": (),
        "bad_words_tokens": (),
        "end_tokens": (),
    }
    assert (request.stop, request.ignore_eos, request.reuse, request.exact) == (
        [],
        False,
        True,
        False,
    )
    assert (request.tools, request.tool_use, request.structured_output) == (None, ToolUse(), None)
    assert (request.priority, request.normalise) == (0, True)
    assert request.messages == [{"role": "user", "content": "hello"}]


def test_settings_change_the_defaults() -> None:
    request = requested(
        {
            "max_tokens": 7,
            "temperature": 0.1,
            "top_p": 0.2,
            "repetition_penalty": 1.3,
            "repetition_context_size": 64,
            "exact": True,
        }
    )
    assert request.max_tokens == 7
    assert (request.sampling.temperature, request.sampling.top_p) == (0.1, 0.2)
    assert (request.sampling.repetition_penalty, request.sampling.repetition_context_size) == (
        1.3,
        64,
    )
    assert request.exact


def test_a_request_wins_over_the_settings() -> None:
    fields = {
        "temperature": 0,
        "top_p": 1,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "repetition_context_size": 0,
        "presence_penalty": -1.5,
        "frequency_penalty": 2,
    }
    request = requested(
        {"temperature": 0.5, "max_tokens": None}, **fields, max_tokens=3, cache_exact=False
    )
    sampling = asdict(request.sampling)
    assert {name: sampling[name] for name in fields} == fields
    assert request.max_tokens == 3


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}, {"max_tokens": -1}])
def test_a_chat_without_a_limit_ends_when_the_model_stops(limit: dict[str, Any]) -> None:
    assert requested(**limit).max_tokens is None
    assert requested(max_completion_tokens=limit.get("max_tokens")).max_tokens is None


def test_no_limit_can_be_asked_for_where_the_server_has_one() -> None:
    assert requested({"max_tokens": 7}, max_tokens=-1).max_tokens is None
    assert requested({"max_tokens": 7}, max_completion_tokens=-1, max_tokens=5).max_tokens is None


def test_a_number_may_be_written_with_a_decimal_point() -> None:
    request = requested(max_tokens=8.0, top_k=3.0, seed=5.0)
    assert (request.max_tokens, request.sampling.top_k, request.sampling.seed) == (8, 3, 5)
    assert requested(max_completion_tokens=9.0).max_tokens == 9


def test_a_null_stands_for_the_servers_default() -> None:
    fields = set(ChatRequest.model_fields) - {"messages"} | set(CHAT_FIELDS)
    assert requested(**dict.fromkeys(fields)) == requested()


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert requested(max_tokens=5, max_completion_tokens=9).max_tokens == 9
    assert requested(max_completion_tokens=9).max_tokens == 9


@pytest.mark.parametrize(
    ("stop", "stops"), [("END", ["END"]), (["a", "b"], ["a", "b"]), ([], []), (None, [])]
)
def test_a_stop_is_a_string_or_a_list(stop: Any, stops: list[str]) -> None:
    assert requested(stop=stop).stop == stops


def test_choices_of_one_seed_have_seeds_of_their_own() -> None:
    front = Front()
    front.chat(n=3, seed=41)
    assert [request.sampling.seed for request in front.runtime.requests] == [41, 42, 43]


def test_the_choices_of_a_request_are_sent_once() -> None:
    front = Front()
    text = "x" * 100_000
    answer = front.chat(n=32, seed=1, messages=[{"role": "user", "content": text}])
    assert len(answer.json()["choices"]) == 32
    [sent] = front.runtime.frames
    assert len(frame(sent)) < len(text) + 10_000


def test_each_prompt_of_a_completion_is_sent_once() -> None:
    front = Front()
    answer = front.complete(prompt=["one", "two"], n=3)
    assert [choice["index"] for choice in answer.json()["choices"]] == list(range(6))
    assert [sent.prompt for sent in front.runtime.frames] == ["one", "two"]
    assert [each.prompt for each in front.runtime.requests] == ["one"] * 3 + ["two"] * 3


def test_choices_without_a_seed_are_left_to_chance() -> None:
    front = Front()
    front.chat(n=2)
    assert [request.sampling.seed for request in front.runtime.requests] == [None, None]


def test_the_highest_seed_still_has_neighbours() -> None:
    front = Front()
    assert front.chat(n=2, seed=2**63 - 1).status_code == 200
    assert len({request.sampling.seed for request in front.runtime.requests}) == 2


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_chat_logprobs_are_a_switch_and_a_number(
    fields: dict[str, Any], top_logprobs: int | None
) -> None:
    assert requested(**fields).sampling.top_logprobs == top_logprobs


@pytest.mark.parametrize("logprobs", [None, 0, 5])
def test_completion_logprobs_are_a_number(logprobs: int | None) -> None:
    front = Front()
    front.complete(logprobs=logprobs)
    assert front.runtime.requested.sampling.top_logprobs == logprobs


def test_biases_are_keyed_by_token_id() -> None:
    request = requested(logit_bias={"50256": -100, "7": 2.5})
    assert request.sampling.logit_bias == {50256: -100.0, 7: 2.5}


def test_opting_out_of_the_cache_reaches_the_runtime() -> None:
    assert requested(use_kv_cache=False).reuse is False
    assert requested(use_kv_cache=True).reuse is True
    assert requested(cache_exact=True).exact is True


@pytest.mark.parametrize(
    ("sent", "priority"),
    [(-10, -10), (0, 0), (10, 10), ("low", -5), ("normal", 0), ("high", 5)],
)
def test_a_priority_is_a_number_or_a_word(sent: int | str, priority: int) -> None:
    assert requested(priority=sent).priority == priority
    front = Front()
    front.complete(priority=sent)
    assert front.runtime.requested.priority == priority


@pytest.mark.parametrize(
    ("setting", "sent", "normalise"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_prompts_are_normalised_unless_the_server_or_the_request_says_no(
    setting: bool, sent: bool | None, normalise: bool
) -> None:
    assert requested({"normalise": setting}, normalise=sent).normalise is normalise


def test_a_request_may_name_the_normalisers() -> None:
    names = ["dates", "tools"]
    assert requested({"normalise": False}, normalise=names).normalise == names


def test_messages_are_passed_on_as_they_were_sent() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}], "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "4", "tool_call_id": "1"},
        {"role": "assistant"},
    ]
    assert requested(messages=messages).messages == messages


def test_template_arguments_are_passed_on() -> None:
    request = requested(chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert request.template_kwargs == {"enable_thinking": False, "reasoning_effort": "low"}


def test_a_name_picks_a_model_and_no_name_the_first() -> None:
    def names(model: str | None) -> list[int]:
        runtimes = [ScriptedRuntime(name="first"), ScriptedRuntime(name="org/second:q4")]
        answer = Front(*runtimes).chat(model=model)
        assert answer.json()["model"] in ("first", "org/second:q4")
        return [len(runtime.requests) for runtime in runtimes]

    assert names(None) == names("default") == names("") == names("first") == [1, 0]
    assert names("org/second:q4") == [0, 1]


def test_each_key_has_a_salt_of_its_own() -> None:
    front = Front(api_key=["alpha", "beta"])
    for key in ("alpha", "beta", "alpha"):
        front.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "hi"}]},
            headers={"Authorization": f"Bearer {key}"},
        )
    first, second, third = (request.salt for request in front.runtime.requests)
    assert first == third != second
    assert requested().salt == b""


REPLY = {"role": "assistant", "content": "Once upon"}
BEGUN = [{"role": "user", "content": "Tell me"}, REPLY]


def prompt_end(settings: dict[str, Any] | None = None, **fields: Any) -> tuple[bool, bool]:
    request = requested(settings, **{"messages": BEGUN, **fields})
    return request.continue_final_message, request.add_generation_prompt


def test_a_final_message_is_continued_when_that_is_asked_for() -> None:
    assert prompt_end() == (False, True)
    assert prompt_end(continue_final_message=True) == (True, False)
    assert prompt_end(continue_final_message=True, add_generation_prompt=False) == (True, False)
    assert prompt_end(add_generation_prompt=False) == (False, False)


def test_a_server_may_be_set_to_continue_as_llama_cpp_does() -> None:
    prefill = {"prefill_assistant": True}
    assert prompt_end(prefill) == (True, False)
    assert prompt_end(prefill, messages=BEGUN[:1]) == (False, True)
    assert prompt_end(prefill, messages=[*BEGUN, {**REPLY, "tool_calls": [CALL]}]) == (False, True)
    assert prompt_end(prefill, continue_final_message=False) == (False, True)
    assert prompt_end(prefill, add_generation_prompt=True) == (False, True)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"add_generation_prompt": True}, "cannot both be true"),
        ({"messages": BEGUN[:1]}, "needs a last message of the assistant"),
        ({"messages": [{**REPLY, "content": None, "tool_calls": [CALL]}]}, "no tool calls"),
        ({"messages": [{**REPLY, "tool_calls": [CALL]}]}, "no tool calls"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(
    fields: dict[str, Any], sentence: str
) -> None:
    answer = Front().chat(**{"messages": BEGUN, "continue_final_message": True, **fields})
    assert answer.status_code == 400
    assert error(answer)["param"] == "continue_final_message"
    assert sentence in error(answer)["message"]


@pytest.mark.parametrize("model", [ChatRequest, CompletionRequest])
def test_the_bounds_of_numbers_are_documented(model: type[BaseModel]) -> None:
    fields = model.model_json_schema()["properties"]
    for name in {"max_tokens", "top_k", "n", "seed", "temperature", "top_logprobs"} & fields.keys():
        number = fields[name]["anyOf"][0]
        assert {"minimum", "maximum", "exclusiveMaximum"} & number.keys(), name
        assert not {"ge", "le", "gt", "lt"} & number.keys(), name
