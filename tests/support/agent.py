"""An agent that talks to a scripted model through the real runtime."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from rekindle.protocol.requests import GenerateRequest, SamplingParams
from tests.support.conversations import CHATML_CONTROL, Letters
from tests.support.harness import Reply, RuntimeHarness
from tests.support.scripted import ScriptedEngine

Message = dict[str, Any]
Change = Callable[[Message], Message]


#: The tool of the agent, and how the model writes a call.
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("read", "write")
]


def call(step: int) -> str:
    arguments = f'{{"path":"/room/{step}",  "text": "swept {step}"}}'
    return f'<tool_call>\n{{"name": "write", "arguments": {arguments}}}\n</tool_call>'


def thinking(step: int) -> str:
    return f"<think>\nRoom {step} comes next.\n</think>\n\n" + call(step)


class Agent:
    """Scripts what the model writes, and returns the parsed reply and the computed tokens."""

    def __init__(
        self,
        template: str,
        *,
        control: Sequence[str] = CHATML_CONTROL,
        ends: Sequence[str] = ("<|im_end|>",),
        bos: str = "",
        tools: Sequence[Message] = (),
        can_truncate: bool = True,
    ) -> None:
        """`ends[0]` ends a reply by default."""
        self.letters = Letters(control, ends, bos=bos)
        self.engine = ScriptedEngine(can_truncate=can_truncate, chat_template=template)
        self.engine.tokenizer = self.letters
        self.harness = RuntimeHarness(self.engine)
        self._end = ends[0]
        self._tools = list(tools)
        self._ids = itertools.count(1000)
        self.replies: list[Reply] = []
        self.history: list[Message] = [
            {"role": "system", "content": "You work on files. " * 8},
            {"role": "user", "content": "Tidy the house."},
        ]

    def step(self, raw: str, *, end: str | None = None, **ask: Any) -> Reply:
        """The model writes `raw` and its end. With an empty `end` it continues freely."""
        self.engine.scripts.append(self.letters.sampled(raw + (self._end if end is None else end)))
        request = GenerateRequest(
            turn=next(self._ids),
            messages=json.loads(json.dumps(self.history)),
            sampling=SamplingParams(temperature=0),
            **{"tools": self._tools, "max_tokens": None, **ask},
        )
        reply = self.harness.take_turn(self.harness.encode_one(request))
        self.harness.run(reply)
        self.replies.append(reply)
        return reply

    def go_on(self, reply: Reply, change: Change, *results: str) -> None:
        """Send the reply back in the way of a client, with the results of its calls."""
        message = change(reply.message)
        self.history.append(message)
        for call, result in zip(message["tool_calls"], results, strict=True):
            answer = {"tool_call_id": call["id"], "content": result}
            self.history.append({"role": "tool", **answer})


def as_it_was(message: Message) -> Message:
    return message


def without_reasoning(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}


def with_json_reordered(message: Message) -> Message:
    """Reorder JSON like a client that parses arguments and writes them again."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _reordered(call)}}
        for call in message["tool_calls"]
    ]
    return without_reasoning({**message, "tool_calls": calls})


def _reordered(call: Message) -> str:
    parsed = json.loads(call["function"]["arguments"])
    return json.dumps(dict(reversed(parsed.items())), indent=1)


CHANGES: tuple[Change, ...] = (as_it_was, without_reasoning, with_json_reordered)
