"""Formats replies as OpenAI's chat and text completions, whole or in chunks."""

from __future__ import annotations

import codecs
import secrets
import time
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

from msgspec import structs
from starlette.requests import Request

from rekindle.api.base.completions import CompletionsBase
from rekindle.api.base.custom_tools import CustomInput
from rekindle.api.base.known_fields import IGNORED_FIELDS_HEADER
from rekindle.api.base.llama_result import (
    final_object,
    generation_settings,
    prompt_progress,
    prompt_timings,
    timings,
)
from rekindle.api.base.reply import (
    UNENFORCED_HEADER,
    Reply,
    ignored_headers,
    token_logprobs,
    x_cache,
)
from rekindle.api.openai import stored
from rekindle.api.openai.schema import ChatRequest, CompletionRequest
from rekindle.http.middleware import received_s
from rekindle.http.responses import SSE_DONE, EventTemplate, sse_comment, sse_data, sse_event
from rekindle.protocol.events import (
    ArgumentsDelta,
    AssistantMessage,
    Delta,
    Event,
    Finished,
    Part,
    Prefill,
    ReasoningDelta,
    Started,
    TextDelta,
    TokenLogprob,
    ToolCall,
    ToolCallStart,
)
from rekindle.protocol.requests import GenerateRequest
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient


class CompletionsReply(Reply):
    """What chat and text completions have in common. The subclasses format a choice."""

    id_prefix: str
    whole_object: str  # `object` of a whole answer
    chunk_object: str  # `object` of a streamed chunk

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        body: CompletionsBase,
        *,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        unenforced = [name for name, tool in body.custom_tools.items() if not tool.is_enforced]
        headers = ignored_headers(
            {IGNORED_FIELDS_HEADER: body.ignored_fields, UNENFORCED_HEADER: unenforced}
        )
        super().__init__(http, runtime, requests, headers=headers, others=others)
        self._body = body
        self._choices = body.choices  # per prompt
        self._messages = [AssistantMessage() for request in requests for _ in request.turns]
        self._prompts: dict[int, Started] = {}  # by choice
        self._first_byte_at_s: float | None = None  # of a stream
        self._opened: set[int] = set()  # choices of a stream that have begun
        self._text_chunks: dict[int, EventTemplate] = {}  # by choice
        self._common_fields = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": runtime.name,
            "system_fingerprint": f"rekindle-{__version__}",
        }
        self._chunk_fields = {**self._common_fields, "object": self.chunk_object}

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        """What a stream sends of a choice before its first part. `calls`: that part is a call."""
        return None

    @abstractmethod
    def delta(self, index: int, part: Part) -> dict[str, Any]: ...

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """A choice without text, for chunks that only report. Clients read `chunk.choices[0]`."""

    @abstractmethod
    def closing(self, index: int, finished: Finished) -> dict[str, Any]: ...

    @abstractmethod
    def choice(self, index: int, message: AssistantMessage, finished: Finished) -> dict[str, Any]:
        """A choice of a whole answer."""

    def shown(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The choices that the client gets in a whole answer."""
        return choices

    def add(self, index: int, part: Part) -> None:
        self._messages[index].add(part)

    def _record(self, index: int, event: Event) -> None:
        if isinstance(event, Started):
            self._prompts[index] = event
        super()._record(index, event)

    async def body(self) -> dict[str, Any]:
        finished = self.finished
        pairs = zip(self._messages, finished, strict=True)
        return {
            **self._common_fields,
            "object": self.whole_object,
            "choices": self.shown([self.choice(index, *each) for index, each in enumerate(pairs)]),
            "usage": usage(finished, self._choices),
            "x_cache": x_cache(finished, self._choices),
            "timings": timings(finished, self._choices),
            **self._verbose(finished),
        }

    def _verbose(self, finished: Sequence[Finished]) -> dict[str, Any]:
        """What llama.cpp's server shows of the first choice for `verbose: true`."""
        if not self._body.verbose:
            return {}
        settings = generation_settings(
            self._requests[0], self._runtime, stream=bool(self._body.stream)
        )
        message, started = self._messages[0], self._prompts.get(0)
        prompt = started.prompt if started else None
        shown = final_object(0, message, finished[0], settings, self._runtime, prompt)
        return {"__verbose": shown}

    def chunks(self, index: int, event: Event) -> list[bytes]:
        if isinstance(event, Delta):
            return self._delta_chunks(index, event.part)
        if isinstance(event, Finished):
            closing = self.closing(index, event)
            return [*self._opening(index), self._chunk([closing], timings=timings([event], 1))]
        if isinstance(event, Started | Prefill) and self._body.progress:
            return [self._progress(index, event)]
        return []

    def _delta_chunks(self, index: int, part: Part) -> list[bytes]:
        if isinstance(part, TextDelta) and part.logprobs is None:
            # All chunks of text are alike, so that the JSON around the text is written once.
            if index not in self._text_chunks:
                self._text_chunks[index] = EventTemplate(
                    lambda text: self._chunk([self.delta(index, TextDelta(text))])
                )
            chunk = self._text_chunks[index].event(part.text)
        else:
            chunk = self._chunk([self.delta(index, part)])
        if index in self._opened:
            return [chunk]
        self._first_byte_at_s = self._first_byte_at_s or time.monotonic()
        return [*self._opening(index, calls=isinstance(part, ToolCallStart)), chunk]

    def _opening(self, index: int, *, calls: bool = False) -> list[bytes]:
        if index in self._opened:
            return []
        self._opened.add(index)
        opening = self.opening(index, calls=calls)
        return [self._chunk([opening])] if opening else []

    def _progress(self, index: int, event: Started | Prefill) -> bytes:
        started = self._prompts[index]
        done = started.reused_tokens if isinstance(event, Started) else event.done_tokens
        if self._body.progress == "comments":
            return sse_comment(f"prefill {done}/{event.prompt_tokens}")
        if self._body.progress == "llama.cpp":
            elapsed_s = time.monotonic() - received_s(self._http)
            total, reused = event.prompt_tokens, started.reused_tokens
            more: dict[str, Any] = {}
            more["prompt_progress"] = prompt_progress(total, reused, done, elapsed_s)
            if self._body.timings_per_token:
                more["timings"] = prompt_timings(reused, done, elapsed_s)
            return self._chunk([self.empty(0)], **more)
        progress = {"done_tokens": done, "prompt_tokens": event.prompt_tokens}
        return self._chunk([self.empty(0)], prefill_progress=progress)

    async def end(self) -> bytes:
        chunks, cost = [], {}
        if self._body.includes_usage:
            cost = {"usage": usage(self.finished, self._choices, self._first_byte_at_s)}
            chunks.append(self._chunk([], **cost))  # without choices, as OpenAI sends it
        if self._body.reports_cache:
            # The event has the fields of a chunk, because OpenAI's Python client yields named
            # events as chunks, and its stream helper takes the usage from the last one.
            chunk = {**self._chunk_fields, "choices": [self.empty(0)], **cost}
            report = {**chunk, **x_cache(self.finished, self._choices)}
            chunks.append(sse_event("x_cache", report))
        return b"".join([*chunks, SSE_DONE])

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._body.includes_usage else {}
        return sse_data({**self._chunk_fields, "choices": choices, **usage, **more})


class ChatReply(CompletionsReply):
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        body: ChatRequest,
        *,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        super().__init__(http, runtime, requests, body, others=others)
        self._chat_body = body
        self._custom_tools = body.custom_tools
        self._inputs: dict[tuple[int, int], CustomInput] = {}  # by choice and place of the call

    async def body(self) -> dict[str, Any]:
        completion = await super().body()
        if self._chat_body.store:
            completion |= await self._kept(completion)
        return completion

    async def end(self) -> bytes:
        """Store the completion before the client can ask for it."""
        if not self._chat_body.store:
            return await super().end()
        report = await self._kept(await super().body())
        failed = report != {"store": True}
        told = self._chunk([self.empty(0)], **report) if failed else b""
        return told + await super().end()

    async def _kept(self, completion: dict[str, Any]) -> dict[str, Any]:
        body = self._chat_body
        asked = body.model_dump(include={*stored.SHOWN, "metadata"}, exclude_unset=True)
        return await stored.keep(self._http, self._runtime, body.messages, completion, asked)

    def chunks(self, index: int, event: Event) -> list[bytes]:
        if self._chat_body.store and isinstance(event, Delta):
            self.add(index, event.part)
        match event:
            case Delta(_, ArgumentsDelta(place, text)) if (index, place) in self._inputs:
                return self._input_chunks(index, place, self._inputs[index, place].add(text))
            case Finished():
                ends = [(place, each) for (of, place), each in self._inputs.items() if of == index]
                rest = [self._input_chunks(index, place, each.end()) for place, each in ends]
                return [*chain(*rest), *super().chunks(index, event)]
        return super().chunks(index, event)

    def _input_chunks(self, index: int, place: int, text: str) -> list[bytes]:
        call = {"index": place, "custom": {"input": text}}
        return [self._chunk([_chat_delta(index, {"tool_calls": [call]})])] if text else []

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        content = None if calls else ""
        return _chat_delta(index, {"role": "assistant", "content": content, "refusal": None})

    def delta(self, index: int, part: Part) -> dict[str, Any]:
        match part:
            case TextDelta(text, logprobs):
                shown = None if logprobs is None else _chat_logprobs(logprobs)
                return {**_chat_delta(index, {"content": text}), "logprobs": shown}
            case ReasoningDelta(text):
                return _chat_delta(index, {"reasoning_content": text})
            case ToolCallStart() | ArgumentsDelta() if self._body.calls_functions:
                return _chat_delta(index, {"function_call": _function_delta(part)})
            case ToolCallStart() if part.name in self._custom_tools:
                self._inputs[index, part.index] = CustomInput()
                call = {"index": part.index, **_custom_call(part.id, part.name, "")}
            case ToolCallStart():
                call = {"index": part.index, **ToolCall(part.id, part.name).as_dict()}
            case ArgumentsDelta():
                call = {"index": part.index, "function": {"arguments": part.text}}
        return _chat_delta(index, {"tool_calls": [call]})

    def empty(self, index: int) -> dict[str, Any]:
        return _chat_delta(index, {})

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return {
            **_chat_delta(index, _message_id(finished)),
            "finish_reason": self._finish_reason(finished),
        }

    def _finish_reason(self, finished: Finished) -> str:
        is_old = self._body.calls_functions and finished.reason == "tool_calls"
        return "function_call" if is_old else finished.reason

    def choice(self, index: int, message: AssistantMessage, finished: Finished) -> dict[str, Any]:
        return {
            "index": index,
            "message": {**self._shown_message(message), "refusal": None, **_message_id(finished)},
            "logprobs": _chat_logprobs(message.logprobs) if message.logprobs else None,
            "finish_reason": self._finish_reason(finished),
        }

    def _shown_message(self, message: AssistantMessage) -> dict[str, Any]:
        shown = message.as_dict()
        if self._body.calls_functions and (calls := shown.pop("tool_calls", None)):
            shown["function_call"] = calls[0]["function"]
        elif self._custom_tools and message.tool_calls:
            shown["tool_calls"] = [self._shown_call(call) for call in message.tool_calls]
        return shown

    def _shown_call(self, call: ToolCall) -> dict[str, Any]:
        if call.name not in self._custom_tools:
            return call.as_dict()
        custom = CustomInput()
        return _custom_call(call.id, call.name, custom.add(call.arguments) + custom.end())


def _custom_call(call_id: str, name: str, text: str) -> dict[str, Any]:
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": text}}


def _function_delta(part: ToolCallStart | ArgumentsDelta) -> dict[str, str]:
    if isinstance(part, ToolCallStart):
        return {"name": part.name, "arguments": ""}
    return {"arguments": part.text}


def _message_id(finished: Finished) -> dict[str, str]:
    return {} if finished.message_id is None else {"message_id": finished.message_id}


def _chat_delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _chat_logprobs(logprobs: list[TokenLogprob]) -> dict[str, Any]:
    return {"content": token_logprobs(logprobs), "refusal": None}


class TextReply(CompletionsReply):
    id_prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        http: Request,
        runtime: RuntimeClient,
        requests: list[GenerateRequest],
        body: CompletionRequest,
        *,
        others: Sequence[RuntimeClient] = (),
    ) -> None:
        super().__init__(http, runtime, requests, body, others=others)
        self._text_body = body
        self._offsets: dict[int, TextOffset] = defaultdict(TextOffset)

    def opening(self, index: int, *, calls: bool) -> dict[str, Any] | None:
        echoed = self._echoed(index)
        return self._choice(index, echoed, None, None) if echoed else None

    def _echoed(self, index: int) -> str:
        """The prompt as the client wrote it, or the text of its tokens."""
        if not self._text_body.echo:
            return ""
        prompt = self._text_body.prompts[index // self._choices]
        return prompt if isinstance(prompt, str) else self._prompts[index].prompt or ""

    def shown(self, choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The likeliest `n` of each prompt's answers, by their mean log probability."""
        wanted = self._text_body.n or 1
        if wanted == self._choices:
            return choices
        best: list[dict[str, Any]] = []
        for start in range(0, len(choices), self._choices):
            group = range(start, start + self._choices)
            ranked = sorted(group, key=self._mean_logprob, reverse=True)
            best += [choices[each] for each in ranked[:wanted]]
        hidden = {} if self._text_body.logprobs is not None else {"logprobs": None}
        return [{**choice, "index": index, **hidden} for index, choice in enumerate(best)]

    def _mean_logprob(self, index: int) -> float:
        found = [each.logprob for each in self._messages[index].logprobs]
        return sum(found) / len(found) if found else 0.0

    def delta(self, index: int, part: Part) -> dict[str, Any]:
        assert isinstance(part, TextDelta), "a text completion has no other parts"
        return self._choice(index, part.text, part.logprobs, None)

    def empty(self, index: int) -> dict[str, Any]:
        return self._choice(index, "", None, None)

    def closing(self, index: int, finished: Finished) -> dict[str, Any]:
        return self._choice(index, "", None, finished.reason)

    def choice(self, index: int, message: AssistantMessage, finished: Finished) -> dict[str, Any]:
        text = self._echoed(index) + message.text
        return self._choice(index, text, message.logprobs, finished.reason)

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprob] | None, reason: str | None
    ) -> dict[str, Any]:
        shown = _text_logprobs(logprobs, self._offsets[index]) if logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}


class TextOffset:
    """Where in the text the next token begins. A character split over tokens counts at its end."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._characters = 0

    def advance(self, piece: bytes) -> int:
        start = self._characters
        self._characters += len(self._decoder.decode(piece))
        return start


def _text_logprobs(logprobs: list[TokenLogprob], offset: TextOffset) -> dict[str, Any]:
    tokens = token_logprobs(logprobs)
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in tokens
        ],
        "text_offset": [offset.advance(token.piece) for token in logprobs],
    }


def usage(
    turns: Sequence[Finished], choices: int, first_byte_at_s: float | None = None
) -> dict[str, Any]:
    """OpenAI's `usage`. A prompt with several choices counts once.

    `first_token_time` has the seconds of each stage up to the first token, and in a stream up to
    its first byte.
    """
    prompts, first = turns[::choices], turns[0]
    prompt_tokens = sum(turn.prompt_tokens for turn in prompts)
    completion_tokens = sum(turn.completion_tokens for turn in turns)
    fields: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(turn.cache.reused_tokens for turn in prompts)
        },
        "completion_tokens_details": {
            "reasoning_tokens": sum(turn.reasoning_tokens for turn in turns)
        },
        "prompt_eval_time": round(sum(turn.prompt_eval_s for turn in prompts), 6),
    }
    if first.stages is not None:
        stages = structs.asdict(first.stages)
        if first_byte_at_s is not None and first.first_token_at_s is not None:
            stages["first_byte"] = first_byte_at_s - first.first_token_at_s
        fields["first_token_time"] = {stage: round(spent, 6) for stage, spent in stages.items()}
    return fields
