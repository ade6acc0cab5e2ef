"""POST /api/chat and /api/generate."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama

from rekindle.errors import TooManyRequests
from rekindle.protocol.admin import AdminOp, AdminResult, Tokenize, Tokenized, pack_ids
from rekindle.protocol.events import Started, TokenLogprob
from rekindle.protocol.requests import Infill
from tests.api.live import live
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

HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ"
    "AAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
END = {"total_duration", "load_duration", "prompt_eval_duration", "eval_duration", "created_at"}


def lines(answer: httpx.Response) -> list[dict[str, Any]]:
    """A stream's lines, held to their grammar: exactly one is the end, and it is the last."""
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(each) for each in answer.text.splitlines()]
    assert [each["done"] for each in found] == [False] * (len(found) - 1) + [True]
    assert {each["model"] for each in found} == {"tiny"}
    assert all(each["created_at"].endswith("Z") for each in found)
    return found


def chat(front: Front, **fields: Any) -> httpx.Response:
    return front.post("/api/chat", {**HELLO, **fields})


def generate(front: Front, **fields: Any) -> httpx.Response:
    return front.post("/api/generate", {"model": "tiny", "prompt": "hello", **fields})


def test_a_reply_is_streamed_by_the_line_unless_asked_otherwise() -> None:
    end = finished(prompt_tokens=12, completion_tokens=2, cache=hit(7), prompt_eval_s=0.5)
    front = Front(ScriptedRuntime(reply("Hel", "lo", end=end)))
    first, second, last = lines(chat(front))
    assert first["message"] == {"role": "assistant", "content": "Hel"}
    assert second["message"] == {"role": "assistant", "content": "lo"}
    assert last["done_reason"] == "stop"
    assert last["prompt_eval_count"] == 12
    assert last["prompt_eval_duration"] == 500_000_000
    assert last["eval_count"] == 2
    assert last["x_cache"]["reused_tokens"] == 7
    whole = chat(front, stream=False).json()
    assert whole["message"] == {"role": "assistant", "content": "Hello"}
    assert set(whole) - END == set(last) - END


def test_a_reply_to_a_prompt_is_streamed_likewise() -> None:
    front = Front(
        ScriptedRuntime(reply("Hel", "lo"), answers=lambda _op: Tokenized(2, 9, pack_ids([3, 4])))
    )
    first, second, last = lines(generate(front))
    assert (first["response"], second["response"]) == ("Hel", "lo")
    assert last["context"] == [3, 4]
    assert generate(front, stream=False).json()["response"] == "Hello"


def test_thinking_has_a_field_of_its_own() -> None:
    script = [*reply()[:1], reasoning("Hm."), *reply("Hi")[1:]]
    front = Front(ScriptedRuntime(script))
    first, second, _ = lines(chat(front))
    assert first["message"] == {"role": "assistant", "content": "", "thinking": "Hm."}
    assert second["message"]["content"] == "Hi"
    whole = chat(front, stream=False).json()["message"]
    assert (whole["thinking"], whole["content"]) == ("Hm.", "Hi")


def test_tool_call_deltas_carry_their_index_and_whole_arguments() -> None:
    """zed #38412."""
    calls = (("weather", '{"city": "Rome"}'), ("time", "{}"))
    front = Front(ScriptedRuntime(calling(*calls)))
    expected = [
        {"function": {"index": 0, "name": "weather", "arguments": {"city": "Rome"}}},
        {"function": {"index": 1, "name": "time", "arguments": {}}},
    ]
    found = lines(chat(front))
    sent = [call for each in found for call in each["message"].get("tool_calls", ())]
    assert sent == expected
    assert found[-1]["done_reason"] == "stop"
    assert chat(front, stream=False).json()["message"]["tool_calls"] == expected


@pytest.mark.parametrize("arguments", ["", '{"city": "Ro'])
def test_a_call_that_was_cut_off_is_left_out(arguments: str) -> None:
    calls = calling(("time", "{}"), ("weather", arguments))
    front = Front(ScriptedRuntime([*calls[:-1], finished("length")]))
    expected = [{"function": {"index": 0, "name": "time", "arguments": {}}}]
    found = lines(chat(front))
    assert [call for each in found for call in each["message"].get("tool_calls", ())] == expected
    assert found[-1]["done_reason"] == "length"
    whole = chat(front, stream=False).json()
    assert (whole["message"]["tool_calls"], whole["done_reason"]) == (expected, "length")


def test_a_stream_is_not_silent_while_arguments_are_generated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.api.ollama.reply.OllamaReply.max_silence_s", -1.0)
    front = Front(ScriptedRuntime(calling(("weather", '{"city": "Rome"}'))))
    signs = [each for each in lines(chat(front)) if "tool_calls" not in each["message"]]
    assert len(signs) > 2
    assert {each["message"]["content"] for each in signs} == {""}


def test_options_are_the_sampling_of_the_turn() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.4, "top_k": 30, "min_p": 0.1, "seed": 7, "stop": ["x"],
        "repeat_penalty": 1.2, "repeat_last_n": 64, "num_predict": 5, "num_ctx": 4096,
        "presence_penalty": 0.3, "frequency_penalty": 0.2,
    }  # fmt: skip
    front = Front()
    chat(front, options=options, think="high", format="json")
    asked = front.runtime.requested
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.4, 30)
    assert (sampling.min_p, sampling.seed) == (0.1, 7)
    assert (sampling.repetition_penalty, sampling.repetition_context_size) == (1.2, 64)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.2)
    assert (asked.max_tokens, asked.stop) == (5, ["x"])
    assert asked.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert asked.structured_output is not None


@pytest.mark.parametrize(("num_predict", "limit"), [(-1, None), (-2, None), (9, 9)])
def test_num_predict_may_be_without_a_limit(num_predict: int, limit: int | None) -> None:
    front = Front(max_tokens=3)
    chat(front, options={"num_predict": num_predict})
    assert front.runtime.requested.max_tokens == limit


def test_a_schema_constrains_the_reply() -> None:
    front = Front()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    chat(front, format=schema)
    output = front.runtime.requested.structured_output
    assert output is not None
    assert output.schema == schema


def test_calls_and_results_get_the_same_ids_in_every_turn() -> None:
    front = Front()
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    messages = [
        {"role": "user", "content": "hot?"},
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "31", "tool_name": "weather"},
        {"role": "tool", "content": "32", "tool_name": "weather"},
    ]
    chat(front, messages=messages)
    asked = front.runtime.requested.messages
    assert asked is not None
    ids = [each["id"] for each in asked[1]["tool_calls"]]
    assert ids == ["000000000", "000000001"]
    assert [each["tool_call_id"] for each in asked[2:]] == ids


@pytest.mark.parametrize("by", ["tool_call_id", "tool_name"])
def test_results_in_another_order_belong_to_their_calls(by: str) -> None:
    """LangChain sends ids, and Ollama's own client sends names."""
    front = Front()
    calls = [{"id": f"id-{name}", "function": {"name": name}} for name in ("rain", "time", "wind")]
    results = {"tool_call_id": "id-{}", "tool_name": "{}"}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *(
            {"role": "tool", "content": name, by: results[by].format(name)}
            for name in ("wind", "rain", "time")
        ),
    ]
    chat(front, messages=messages)
    asked = front.runtime.requested.messages or []
    ids = {each["function"]["name"]: each["id"] for each in asked[1]["tool_calls"]}
    assert [ids[each["content"]] for each in asked[2:]] == [
        each["tool_call_id"] for each in asked[2:]
    ]


def test_langchain_calls_tools_and_reads_log_probabilities() -> None:
    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return f"sun in {city}"

    called = calling(("weather", '{"city": "Rome"}'), before=[delta("Well.")])
    logged = reply("Sunny.", logs=[[TokenLogprob(b"Sunny.", -0.5, [(b"Rainy.", -1.0)])]])
    runtime = ScriptedRuntime(called, logged, called)
    with live(Front(runtime)) as server:
        model = ChatOllama(model="tiny", base_url=server.url, logprobs=True, top_logprobs=1)
        with_tools = model.bind_tools([weather])
        first = with_tools.invoke("How is Rome?")
        [call] = first.tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
        last = with_tools.invoke([HumanMessage("How is Rome?"), first, weather.invoke(call)])
        [chunk] = [each for each in with_tools.stream("?") if each.tool_calls]
        assert chunk.tool_calls[0]["args"] == {"city": "Rome"}
        client: Any = model._client
        client.close()  # LangChain leaves its connection open
    assert last.content == "Sunny."
    [logprob] = last.response_metadata["logprobs"]
    assert (logprob["token"], logprob["logprob"]) == ("Sunny.", -0.5)
    sent = runtime.requests[1].messages or []
    assert sent[1]["tool_calls"][0]["id"] == sent[2]["tool_call_id"]
    assert sent[2]["content"] == "sun in Rome"


def test_a_name_may_have_the_tag_latest() -> None:
    front = Front()
    answer = front.post("/api/chat", {**HELLO, "model": "tiny:latest", "stream": False})
    assert answer.json()["model"] == "tiny:latest"
    missing = front.post("/api/chat", {**HELLO, "model": "none"})
    assert missing.status_code == 404
    assert "none" in missing.json()["error"]


@pytest.mark.parametrize(
    ("keep_alive", "reason"), [(None, "load"), ("5m", "load"), (0, "unload"), ("0", "unload")]
)
def test_without_a_prompt_a_client_asks_whether_the_model_is_there(
    keep_alive: Any, reason: str
) -> None:
    front = Front()
    for path in ("/api/chat", "/api/generate"):
        body = {"model": "tiny", "keep_alive": keep_alive, "stream": False}
        answer = front.post(path, body).json()
        assert (answer["done"], answer["done_reason"]) == (True, reason)
        assert front.post(path, {**body, "stream": True}).text.endswith("\n")
    assert front.runtime.requests == []


def test_a_failure_is_a_status_before_the_stream_and_a_line_within_it() -> None:
    trouble = failed(400, "invalid_request_error", None, "too long")
    answer = chat(Front(ScriptedRuntime([trouble])))
    assert (answer.status_code, answer.json()) == (400, {"error": "too long"})
    within = chat(Front(ScriptedRuntime(reply("Hel", end=trouble))))
    assert within.status_code == 200
    assert json.loads(within.text.splitlines()[-1]) == {"error": "too long"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"temperature": -1}}, "temperature"),
        ({"options": 3}, "options"),
        ({"format": "xml"}, '"json", or a JSON schema'),
        ({"think": "often"}, '"low", "medium" or "high"'),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, "reads only text"),
        ({"messages": [{"role": "assistant", "images": ["aa"]}]}, "leave out `images`"),
    ],
)
def test_a_wrong_field_is_named_in_ollamas_error_format(fields: Any, message: str) -> None:
    answer = chat(Front(), **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"suffix": "x", "context": [1]}, "`suffix` asks for the text of a gap"),
        ({"template": "x"}, "the model's own chat template is always used"),
        ({"raw": True, "images": [b64encode(b"x").decode()]}, "use /api/chat"),
        ({"context": [-1]}, "`context` takes"),
        ({"context": ["a"]}, "context"),
    ],
)
def test_a_wrong_field_of_a_prompt_is_named(fields: Any, message: str) -> None:
    runtime = ScriptedRuntime()
    assert runtime.ready is not None
    runtime.ready.vocabulary = 100
    answer = generate(Front(runtime), **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]


def test_a_reply_about_an_image_has_no_context() -> None:
    front = Front(ScriptedRuntime(reply("red"), sees=True))
    answer = generate(front, images=[PIXEL], stream=False)
    assert answer.json()["response"] == "red"
    assert "context" not in answer.json()


def test_a_reply_has_no_context_if_the_runtime_does_not_answer() -> None:
    def busy(_op: AdminOp) -> AdminResult:
        raise TooManyRequests("busy")

    answer = generate(Front(ScriptedRuntime(reply("Hi"), answers=busy)), stream=False)
    assert (answer.json()["response"], "context" in answer.json()) == ("Hi", False)


def test_a_raw_prompt_is_not_rendered() -> None:
    front = Front()
    answer = generate(front, raw=True, stream=False).json()
    assert front.runtime.requested.prompt == "hello"
    assert "context" not in answer


def test_a_prompt_continues_the_context_of_an_earlier_answer() -> None:
    def tokens(op: AdminOp) -> AdminResult:
        """A model whose turn is `1 … 2`, whose reply begins with 3 and whose words are 9."""
        assert isinstance(op, Tokenize)
        if op.messages is None:
            return Tokenized(1, 99, pack_ids([9]))
        ids = [token for _ in op.messages for token in (1, 9, 2)]
        if op.continue_final_message:
            return Tokenized(0, 99, pack_ids(ids[:-1]))
        return Tokenized(0, 99, pack_ids([*ids, 3] if op.add_generation_prompt else ids))

    runtime = ScriptedRuntime(reply("Hi"), answers=tokens)
    assert runtime.ready is not None
    runtime.ready.vocabulary = 100
    front = Front(runtime)
    answer = generate(front, context=[1, 8, 2], stream=False).json()
    assert runtime.requested.prompt == [1, 8, 2, 1, 9, 2, 3]
    assert answer["context"] == [1, 8, 2, 1, 9, 2, 3, 9, 2]


LOGS = [TokenLogprob(b"Hi", -0.5, [(b"Hi", -0.5), (b"Ho", -1.5)])]
SHOWN = [
    {
        "token": "Hi",
        "logprob": -0.5,
        "bytes": [72, 105],
        "top_logprobs": [
            {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
            {"token": "Ho", "logprob": -1.5, "bytes": [72, 111]},
        ],
    }
]


@pytest.mark.parametrize("ask", [chat, generate])
def test_log_probabilities_come_with_their_text(ask: Any) -> None:
    script: Script = [Started(0, 9, 0), delta("Hi", LOGS), finished()]
    front = Front(ScriptedRuntime(script, answers=lambda _op: Tokenized(1, 9, pack_ids([3]))))
    first, last = lines(ask(front, logprobs=True, top_logprobs=2))
    assert front.runtime.requested.sampling.top_logprobs == 2
    assert first["logprobs"] == SHOWN
    assert "logprobs" not in last
    assert ask(front, logprobs=True, stream=False).json()["logprobs"] == SHOWN
    assert front.runtime.requests[-1].sampling.top_logprobs == 0


@pytest.mark.parametrize("fields", [{}, {"logprobs": False}, {"top_logprobs": 0}])
def test_without_the_switch_there_are_no_log_probabilities(fields: dict[str, Any]) -> None:
    front = Front()
    assert "logprobs" not in chat(front, stream=False, **fields).json()
    assert front.runtime.requested.sampling.top_logprobs is None


def test_alternatives_need_log_probabilities() -> None:
    answer = chat(Front(), top_logprobs=2)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "`top_logprobs` needs `logprobs: true`" in answer.json()["error"]


def test_typical_p_is_an_option() -> None:
    front = Front()
    chat(front, options={"typical_p": 0.7})
    assert front.runtime.requested.sampling.typical_p == 0.7


def test_a_suffix_asks_for_the_text_of_a_gap() -> None:
    runtime = ScriptedRuntime()
    answer = Front(runtime).post("/api/generate", {"prompt": "def f(", "suffix": "return 1"})
    assert answer.status_code == 200, answer.text
    assert runtime.requested.infill == Infill(prefix="def f(", suffix="return 1")
    assert "context" not in json.loads(answer.text.splitlines()[-1])
