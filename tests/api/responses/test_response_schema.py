"""Every response and event has the published keys and types, in each state of a response."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.protocol.events import Started, TokenLogprob
from tests.api.responses.asking import TOOL, answered, ask, front_of
from tests.api.responses.published import RESPONSE_KEYS, check_event, check_response
from tests.api.responses.stream_grammar import events_of
from tests.api.scripted import Script, calling, delta, error, failed, finished, reasoning, reply

REASONED: Script = [Started(0, 10, 0), reasoning("Hm."), delta("two"), finished()]
CUT: Script = [Started(0, 10, 0), delta("Hel"), finished("length")]
DIED: Script = [Started(0, 10, 0), delta("x"), failed(503, "server_error", "server_error", "died")]
LOGGED: Script = reply("Hi", logs=[[TokenLogprob(b"Hi", -0.5, [(b"Ho", -1.0)])]])
BARE_TOOL = {"type": "function", "name": "look"}
CUSTOM = {"type": "custom", "name": "note"}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
CASES: dict[str, tuple[Script, dict[str, Any]]] = {
    "text": (reply("Hel", "lo"), {}),
    "reasoning": (REASONED, {"reasoning": {"effort": "low"}}),
    "sealed": (REASONED, {"include": ["reasoning.encrypted_content"]}),
    "call": (calling(("look", "{}")), {"tools": [BARE_TOOL]}),
    "described": (calling(("look", "{}")), {"tools": [{**TOOL, "strict": True}]}),
    "custom": (calling(("note", '{"input": "x"}')), {"tools": [CUSTOM]}),
    "choice": (calling(("look", "{}")), {"tools": [TOOL], "tool_choice": BARE_TOOL}),
    "schema": (reply("{}"), {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    "object": (reply("{}"), {"text": {"format": {"type": "json_object"}, "verbosity": "low"}}),
    "logprobs": (LOGGED, {"top_logprobs": 1}),
    "incomplete": (CUT, {"max_output_tokens": 1, "max_tool_calls": 2}),
    "cached": (reply("x"), {"prompt_cache_options": {"ttl": "30m"}, "metadata": {"a": "b"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_whole_response_has_the_published_shape(case: str) -> None:
    script, fields = CASES[case]
    front = front_of(script)
    response = answered(front, **fields)
    check_response(response)
    check_response(front.get(f"/v1/responses/{response['id']}").json())


@pytest.mark.parametrize("case", [*CASES, "failed"])
def test_every_event_has_the_published_shape(case: str) -> None:
    script, fields = CASES.get(case, (DIED, {}))
    told = [each.json for each in events_of(ask(front_of(script), **fields, stream=True))]
    for event in told:
        check_event(event)
    assert len({event["sequence_number"] for event in told}) == len(told)


def test_the_shape_is_really_checked() -> None:
    response = answered(front_of())
    for key in RESPONSE_KEYS:
        with pytest.raises(AssertionError):
            check_response({name: value for name, value in response.items() if name != key})


def test_penalties_are_used_and_shown() -> None:
    front = front_of()
    response = answered(front, presence_penalty=0.5, frequency_penalty=-1)
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, -1.0)
    sampling = front.runtime.requested.sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert "`presence_penalty`" in error(ask(front, presence_penalty=3))["message"]
