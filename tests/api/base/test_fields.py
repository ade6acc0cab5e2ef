"""Bad requests: one sentence that names the field and the values it takes."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from rekindle.api.openai.schema import ChatRequest
from tests.api.scripted import HELLO, Front, ScriptedRuntime, error

TOKEN_LIMIT = "takes a number from 1 up, or -1 for no limit"
NORMALISE = (
    "`normalise` takes true, false or a list of claude-code-billing-header, "
    "home-assistant-seconds, goose-minutes, tools, session-paths, dates."
)
PRIORITY = (
    "`priority` takes a whole number from -10 to 10, where higher goes first, "
    'or "low", "normal" or "high".'
)
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(answer: httpx.Response, code: str = "invalid_value") -> dict[str, Any]:
    assert answer.status_code == 400, answer.text
    found = error(answer)
    assert found["type"] == "invalid_request_error"
    assert found["code"] == code
    assert "\n" not in found["message"]
    return found


JSON = {"content-type": "application/json"}


def sent(content: bytes | str) -> httpx.Response:
    return Front().request("POST", CHAT, content=content, headers=JSON)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "",
        "nonsense",
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": NaN}',
        '{"messages": [{"role": "user", "content": "hi"}], "temperature": Infinity}',
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": "\xff"}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"messages": [{"role": "user", "content": "hi"}], "x": ' + "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda content: str(content[:24]),
)
def test_invalid_json_is_refused(content: bytes | str) -> None:
    found = refused(sent(content))
    assert found["param"] is None
    assert "body" in found["message"]


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null", "true"])
def test_a_body_is_an_object(content: str) -> None:
    assert refused(sent(content))["message"].startswith("The body ")


TWICE = '"content": "first", "role": "system", "role": "user", "content": "last"'
EQUAL_KEYS = [
    (CHAT, f'"messages": 3, "max_tokens": 3, "messages": [{{{TWICE}}}], "max_tokens": 5'),
    (TEXT, '"prompt": "first", "max_tokens": 3, "prompt": "last", "max_tokens": 5'),
    (
        "/v1/responses",
        f'"input": "x", "max_output_tokens": 3, "input": [{{{TWICE}}}], "max_output_tokens": 5',
    ),
    (
        "/v1/messages",
        f'"max_tokens": 3, "messages": [], "messages": [{{{TWICE}}}], "max_tokens": 5',
    ),
    (
        "/api/chat",
        f'"options": {{"num_predict": 3}}, "messages": [{{{TWICE}}}], '
        '"options": {"num_predict": 4, "num_predict": 5}',
    ),
    ("/api/generate", '"prompt": "first", "prompt": "last", "options": {"num_predict": 5}'),
]


@pytest.mark.parametrize(("path", "fields"), EQUAL_KEYS)
def test_the_last_of_two_equal_keys_counts(path: str, fields: str) -> None:
    front = Front(ScriptedRuntime(name="first"), ScriptedRuntime(name="last"))
    content = f'{{"model": "first", {fields}, "model": "last", "store": false}}'
    answer = front.request("POST", path, content=content, headers=JSON)
    assert answer.status_code == 200, answer.text
    assert front.runtimes[0].requests == []
    [asked] = front.runtimes[1].requests
    assert asked.max_tokens == 5
    said = [(each["role"], each["content"]) for each in asked.messages or ()]
    assert asked.prompt == "last" or said == [("user", "last")]


@pytest.mark.parametrize("path", [CHAT, TEXT, "/v1/responses", "/v1/messages", "/api/chat"])
def test_a_wrong_value_is_refused_when_its_key_comes_last(path: str) -> None:
    content = '{"model": "tiny", "model": 3}'
    answer = Front().request("POST", path, content=content, headers=JSON)
    assert answer.status_code == 400
    assert "model" in answer.text


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("temperature", "0.7", "`temperature` takes a number, not a string."),
        ("temperature", True, "`temperature` takes a number, not a boolean."),
        ("temperature", -0.1, "`temperature` takes a number from 0 up."),
        ("temperature", 101, "`temperature` takes a number up to 100."),
        ("top_p", 0, "`top_p` takes a number above 0."),
        ("top_p", 1.01, "`top_p` takes a number up to 1."),
        ("top_k", 2.5, "`top_k` takes a whole number, not a decimal number."),
        ("top_k", -2, "`top_k` takes a number from -1 up."),
        ("min_p", -1, "`min_p` takes a number from 0 up."),
        ("repetition_penalty", 0, "`repetition_penalty` takes a number above 0."),
        ("repetition_context_size", -1, "`repetition_context_size` takes a number from 0 up."),
        ("presence_penalty", 3, "`presence_penalty` takes a number up to 2."),
        ("frequency_penalty", -3, "`frequency_penalty` takes a number from -2 up."),
        ("max_tokens", 0, f"`max_tokens` {TOKEN_LIMIT}."),
        ("max_tokens", -5, f"`max_tokens` {TOKEN_LIMIT}."),
        ("max_tokens", 8.5, "`max_tokens` takes a whole number, not a decimal number."),
        ("max_tokens", True, "`max_tokens` takes a whole number, not a boolean."),
        ("max_tokens", 2**63, "`max_tokens` takes a number up to 10000000."),
        ("max_tokens", 2**70, "`max_tokens` takes a number up to 10000000."),
        ("max_tokens", 1e300, "`max_tokens` takes a number up to 10000000."),
        ("max_tokens", "100", "`max_tokens` takes a whole number, not a string."),
        ("max_completion_tokens", 0, f"`max_completion_tokens` {TOKEN_LIMIT}."),
        (
            "max_completion_tokens",
            1.5,
            "`max_completion_tokens` takes a whole number, not a decimal number.",
        ),
        ("n", 0, "`n` takes a number from 1 up."),
        ("n", 10**9, "`n` takes a number up to 32."),
        ("seed", 2**63, "`seed` takes a number below 9223372036854775808."),
        ("seed", 1.5, "`seed` takes a whole number, not a decimal number."),
        ("stream", "yes", "`stream` takes true or false, not a string."),
        ("stream", 1, "`stream` takes true or false, not a number."),
        ("stream_options", [], "`stream_options` takes an object, not a list."),
        (
            "stream_options",
            {"include_usage": 1},
            "`stream_options.include_usage` takes true or false, not a number.",
        ),
        ("model", 3, "`model` takes a string, not a number."),
        ("user", 3, "`user` takes a string, not a number."),
        ("ignore_eos", "no", "`ignore_eos` takes true or false, not a string."),
        ("use_kv_cache", "on", "`use_kv_cache` takes true or false, not a string."),
        ("cache_exact", 1, "`cache_exact` takes true or false, not a number."),
        ("logprobs", 3, "`logprobs` takes true or false, not a number."),
        ("top_logprobs", 21, "`top_logprobs` takes a number up to 20."),
        ("top_logprobs", -1, "`top_logprobs` takes a number from 0 up."),
        ("reasoning_effort", "x" * 33, "`reasoning_effort` takes at most 32 characters."),
        ("chat_template_kwargs", [], "`chat_template_kwargs` takes an object, not a list."),
        ("logit_bias", [], "`logit_bias` takes an object, not a list."),
        ("logit_bias", {"5": "high"}, "`logit_bias.5` takes a number, not a string."),
        ("logit_bias", {"five": 1}, "`logit_bias` takes token ids as keys, not 'five'."),
        ("logit_bias", {"-1": 1}, "`logit_bias` takes token ids as keys, not '-1'."),
        ("logit_bias", {"5": 101}, "`logit_bias` takes biases from -100 to 100."),
        ("priority", 11, PRIORITY),
        ("priority", -11, PRIORITY),
        ("priority", 0.5, PRIORITY),
        ("priority", True, PRIORITY),
        ("priority", "urgent", PRIORITY),
        ("normalise", "no", NORMALISE),
        ("normalise", ["headers"], NORMALISE),
        ("normalise", ["tools"] * 100, NORMALISE),
        ("prefill_progress", "chunks", '`prefill_progress` takes true, false or "comments".'),
        ("prefill_progress", 1, '`prefill_progress` takes true, false or "comments".'),
        ("parallel_tool_calls", 1, "`parallel_tool_calls` takes true or false, not a number."),
        ("messages", "hello", "`messages` takes a list, not a string."),
        ("messages", [], "`messages` takes at least 1 item."),
        ("messages", ["hello"], "`messages.0` takes an object, not a string."),
        ("messages", [{"content": "hi"}], "`messages.0.role` is missing."),
        (
            "messages",
            [{"role": "robot", "content": "hi"}],
            "`messages.0.role` takes 'system', 'developer', 'user', 'assistant' or 'tool'.",
        ),
        (
            "messages",
            [{"role": "user"}],
            "`messages.0` needs `content`, as every user message does.",
        ),
    ],
)
def test_a_known_field_with_a_bad_value_is_refused_with_the_values_it_takes(
    field: str, value: Any, sentence: str
) -> None:
    front = Front()
    found = refused(front.chat(**{field: value}))
    assert found["message"] == sentence
    assert found["param"] == field
    assert front.runtime.requests == []


@pytest.mark.parametrize(
    "content", [3, {"text": "hi"}, ["hi"], [{"type": "text"}], [{"type": "poem", "text": "hi"}]]
)
def test_content_has_one_sentence_for_all_it_may_be(content: Any) -> None:
    found = refused(Front().chat(messages=[{"role": "user", "content": content}]))
    assert found["message"] == (
        '`messages.0.content` takes a string, or a list of parts: `"type": "text"` with a `text`, '
        '`"type": "image_url"`, `"type": "video_url"` or `"type": "file"`.'
    )
    assert found["param"] == "messages"


@pytest.mark.parametrize("stop", [3, "", [""], ["a", 3], {"a": 1}, ["x"] * 17, "x" * 1025])
def test_stop_has_one_sentence_for_all_it_may_be(stop: Any) -> None:
    found = refused(Front().chat(stop=stop))
    assert found["message"] == (
        "`stop` takes a string of 1 to 1024 characters, or a list of at most 16 such strings."
    )
    assert found["param"] == "stop"


@pytest.mark.parametrize("prompt", [3, {"a": 1}, ["a", 3], [3, "a"], [[3], "a"], [3.5], [True]])
def test_prompt_has_one_sentence_for_all_it_may_be(prompt: Any) -> None:
    found = refused(Front().complete(prompt=prompt))
    assert found["message"] == (
        "`prompt` takes a string, a list of strings, a list of token ids, or a list of such lists."
    )
    assert found["param"] == "prompt"


def test_a_missing_field_is_named() -> None:
    assert refused(Front().post(CHAT, {}))["message"] == "`messages` is missing."
    assert refused(Front().post(TEXT, {}))["message"] == "`prompt` is missing."


@pytest.mark.parametrize("prompt", [[], [[]], [[1], []]])
def test_a_prompt_of_tokens_has_at_least_one(prompt: Any) -> None:
    assert "at least one" in refused(Front().complete(prompt=prompt))["message"]


def test_a_request_asks_for_a_bounded_number_of_answers() -> None:
    found = refused(Front().complete(prompt=["x"] * 33, n=4), "unsupported_parameter")
    assert "at most 128" in found["message"]
    assert refused(Front().complete(prompt=["x"] * 129), "unsupported_parameter")


def test_completion_logprobs_are_bounded() -> None:
    assert refused(Front().complete(logprobs=21))["param"] == "logprobs"
    assert refused(Front().complete(logprobs=True))["param"] == "logprobs"


def test_top_logprobs_need_logprobs() -> None:
    found = refused(Front().chat(top_logprobs=3), "unsupported_parameter")
    assert found["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("audio", {"voice": "x"}),
        ("chat_template", "{{ ''.__class__ }}"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(field: str, value: Any) -> None:
    found = refused(Front().chat(**{field: value}), "unsupported_parameter")
    assert found["param"] == field
    assert f"`{field}`" in found["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
    ],
)
def test_a_text_completion_takes_nothing_of_a_chat(field: str, value: Any) -> None:
    found = refused(Front().complete(**{field: value}), "unsupported_parameter")
    assert found["param"] == field
    assert "/v1/chat/completions" in found["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("response_format", {"type": "text"}),
        ("return_cache_key", False),
        ("parallel_tool_calls", True),
    ],
)
def test_a_value_that_changes_nothing_is_accepted(field: str, value: Any) -> None:
    assert Front().chat(**{field: value}).status_code == 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "input_audio", "input_audio": {}},
        {"type": "input_image", "image_url": "http://example.com/a.png"},
    ],
)
def test_sounds_and_parts_of_other_dialects_are_refused_by_name(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    found = refused(
        Front().chat(messages=[{"role": "user", "content": content}]), "unsupported_parameter"
    )
    assert found["param"] == "messages"
    assert part["type"] in found["message"]


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "video", "video_url": "x", "fps": 0}, "`fps` takes a number above 0"),
        ({"type": "video", "video_url": "x", "fps": 31}, "`fps` takes a number up to 30"),
        (
            {"type": "video", "video_url": "x", "max_frames": 65},
            "`max_frames` takes a number up to 64",
        ),
        ({"type": "video_url"}, "`video_url` is missing"),
        (
            {"type": "image", "image_url": 3},
            "`image_url` takes a URL, or an object with a `url` and a `detail`: auto, low or high",
        ),
        (
            {"type": "image", "image_url": "x", "detail": "most"},
            "`detail` takes 'auto', 'low' or 'high'",
        ),
    ],
)
def test_a_wrong_field_of_a_picture_or_video_is_named(part: dict[str, Any], sentence: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, part]
    found = refused(Front().chat(messages=[{"role": "user", "content": content}]))
    assert found["message"] == f"`messages.0.content` part 1: {sentence}."


@pytest.mark.parametrize("resize", [[], [0], [2049], [1, 2, 3], 224, ["224"], [224, 2.5]])
def test_resize_takes_one_side_or_two(resize: Any) -> None:
    found = refused(Front().chat(resize=resize))
    assert found["message"] == (
        "`resize` takes one side or [width, height] in pixels, each from 1 to 2048."
    )


def test_resize_is_not_for_texts() -> None:
    assert refused(Front().complete(resize=[224]), "unsupported_parameter")["param"] == "resize"


def test_unknown_fields_are_ignored() -> None:
    assert Front().chat(frobnicate=True, metadata={"a": "b"}, store=False).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"deep": None}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": None}}}]},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"x": None}},
            }
        },
    ],
)
def test_json_of_the_clients_own_is_bounded_in_depth(fields: dict[str, Any]) -> None:
    def deep(levels: int) -> httpx.Response:
        nested = "[" * levels + "]" * levels
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields})
        return sent(body.replace("null", nested))

    assert deep(50).is_success
    assert "nested at most" in refused(deep(900))["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {str(token): "x" for token in range(100_000)}},
        {"logit_bias": {"9" * 5000: 1}},
        {"stop": ["x"] * 100_000},
        {"stop": [3] * 100_000},
        {"messages": [{"role": "user", "content": "x"}] * 20_001},
        {"messages": [3] * 100_000},
        {"messages": [{"role": "user", "content": [3] * 300_000}]},
        {"chat_template_kwargs": {str(n): n for n in range(100_000)}},
        {"messages": [{"role": "assistant", "tool_calls": [3] * 300_000}]},
        {"tools": [3] * 300_000},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 129},
    ],
    ids=[
        "biases",
        "digits",
        "stops",
        "bad stops",
        "messages",
        "bad messages",
        "parts",
        "kwargs",
        "bad calls",
        "bad tools",
        "tools",
    ],
)
def test_a_flood_of_faults_is_one_fault(fields: dict[str, Any]) -> None:
    """Checking ends at the first: collecting a million faults would take seconds."""
    refused(Front().chat(**fields))
    with pytest.raises(ValidationError) as fault:
        ChatRequest.model_validate({**HELLO, **fields})
    assert fault.value.error_count() == 1


def test_a_flood_of_prompts_is_refused() -> None:
    refused(Front().complete(prompt=[5] * 300_000 + ["x"]))
    refused(Front().complete(prompt=["x"] * 300_000 + [5]))
    refused(Front().complete(prompt=[[5]] * 100_000), "unsupported_parameter")


def test_an_unknown_model_says_which_are_served() -> None:
    for answer in (Front().chat(model="gpt-5"), Front().complete(model="gpt-5")):
        assert answer.status_code == 404
        found = error(answer)
        assert found["code"] == "model_not_found"
        assert found["param"] == "model"
        assert "tiny" in found["message"]
