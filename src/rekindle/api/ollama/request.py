"""Builds the turn of an Ollama request, and keeps its `context`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

from pydantic import ValidationError

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import explain, stop_list
from rekindle.api.base.messages import Message, plain_message, rendered
from rekindle.api.base.request import RequestBuilder
from rekindle.api.ollama.schema import OllamaGenerateRequest, OllamaMessage, RequestBase, ToolCall
from rekindle.errors import BadRequest, TooManyRequests, Unavailable
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient


def generate_request(
    body: RequestBase, builder: RequestBuilder, prompt: dict[str, Any]
) -> GenerateRequest:
    """`prompt` has the fields of the request that make up the prompt."""
    options, limit = body.chosen, builder.config.max_tokens
    if options.num_predict is not None:  # 0 and less: until the model stops
        limit = options.num_predict if options.num_predict > 0 else None
    return builder.build(
        **prompt,
        template_kwargs=body.template_kwargs,
        structured_output=body.structure,
        sampling=options.sampling_params(
            builder.config, (body.top_logprobs or 0) if body.logprobs else None
        ),
        max_tokens=limit,
        stop=stop_list(options.stop),
    )


def messages_of(sent: Sequence[OllamaMessage]) -> list[Message]:
    """Convert messages. Calls get consecutive numbers as their ids: most clients send none, and a
    number is the same in every later turn."""
    calls = _Calls()
    try:
        return [_message(each, calls) for each in sent]
    except ValidationError as error:
        raise explain(error.errors()) from None


class _Calls:
    """Numbers the calls of a conversation, and finds the call that a result belongs to."""

    def __init__(self) -> None:
        self._numbers = count()
        self._unanswered: list[tuple[str, ToolCall]] = []  # of the last message, with numbers

    def begin(self, calls: Sequence[ToolCall]) -> list[str]:
        """Number the calls of a message. The results after it belong to them."""
        numbers = [self._next() for _ in calls]
        self._unanswered = list(zip(numbers, calls, strict=True))
        return numbers

    def _next(self) -> str:
        """Nine digits: Mistral's templates refuse an id of any other length."""
        return f"{next(self._numbers):09d}"

    def answer(self, result: OllamaMessage) -> str:
        """The number of the call with the result's id, else with its name, else the first one."""
        waiting = self._unanswered
        sent = result.tool_call_id
        by_id = (each for each in waiting if sent is not None and each[1].id == sent)
        by_name = (each for each in waiting if each[1].function.name == result.tool_name)
        found = next(chain(by_id, by_name, waiting), None)
        if found is None:
            return self._next()
        waiting.remove(found)
        return found[0]


def _message(sent: OllamaMessage, calls: _Calls) -> Message:
    fields: dict[str, Any] = {"role": sent.role, "content": _content(sent)}
    if sent.thinking:
        fields["reasoning_content"] = sent.thinking
    if sent.tool_calls:
        fields["tool_calls"] = [
            {"id": number, "type": "function", "function": call.function.model_dump()}
            for number, call in zip(calls.begin(sent.tool_calls), sent.tool_calls, strict=True)
        ]
    if sent.role == "tool":
        fields["tool_call_id"] = calls.answer(sent)
        if sent.tool_name:
            fields["name"] = sent.tool_name
    return Message.model_validate(fields)


def _content(sent: OllamaMessage) -> str | list[dict[str, Any]]:
    """Images come before the text, as in Ollama's own prompts."""
    if not sent.images:
        return sent.content
    pictures = [{"type": "image_url", "image_url": _url(image)} for image in sent.images]
    return [*pictures, {"type": "text", "text": sent.content}]


def _url(image: str) -> str:
    """Ollama sends Base64 without a type. The decoder ignores the type anyway."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"


# Any conversation. A message adds the same tokens to it as to every other conversation.
EARLIER = [plain_message("user", content="a"), plain_message("assistant", content="b")]


class Context:
    """`context` of /api/generate: the tokens of the conversation so far."""

    def __init__(
        self,
        client: AdminClient,
        runtime: RuntimeClient,
        body: OllamaGenerateRequest,
        *,
        normalise: bool,
    ) -> None:
        self._client = client
        self._runtime = runtime
        self._form: dict[str, Any] = {
            "template_kwargs": body.template_kwargs,
            "normalise": normalise,
        }
        self._is_known = not (body.raw or body.images or body.suffix)  # images have no tokens
        self._before = body.context or []
        system = [plain_message("system", content=body.system)] if body.system else []
        user = OllamaMessage(role="user", content=body.prompt, images=body.images)
        self.messages = [*system, *messages_of([user])]
        self._prompt: list[int] = []

    async def prompt(self) -> list[int]:
        """The prompt that continues the client's context."""
        ready = self._runtime.ready
        if ready and not all(0 <= token < ready.vocabulary for token in self._before):
            raise BadRequest(
                f"`context` takes the tokens of an earlier answer, from 0 to "
                f"{ready.vocabulary - 1}.",
                param="context",
            )
        whole = await self._tokens([*EARLIER, *self.messages])
        ended = await self._tokens(EARLIER, add_generation_prompt=False)
        self._prompt = [*self._before, *_more(whole, ended)]
        return self._prompt

    async def after(self, reply: str) -> dict[str, Any]:
        """The context after the reply. It is left out if the runtime does not answer, because the
        reply itself must not be lost."""
        try:
            return {"context": await self._after(reply)} if self._is_known else {}
        except (TooManyRequests, Unavailable):
            return {}

    async def _after(self, reply: str) -> list[int]:
        if not self._before:
            conversation = [*self.messages, plain_message("assistant", content=reply)]
            return await self._tokens(conversation, add_generation_prompt=False)
        written = await self._ask(Tokenize(text=reply, parse_special=False))
        ended = await self._tokens(EARLIER, add_generation_prompt=False)
        open_ended = await self._tokens(
            EARLIER, add_generation_prompt=False, continue_final_message=True
        )
        return [*self._prompt, *written, *_more(ended, open_ended)]

    async def _tokens(self, messages: Sequence[Message], **end: Any) -> list[int]:
        return await self._ask(Tokenize(messages=rendered(messages), **self._form, **end))

    async def _ask(self, question: Tokenize) -> list[int]:
        return list((await self._client.request(self._runtime, question, Tokenized)).ids)


def _more(longer: Sequence[int], shorter: Sequence[int]) -> Sequence[int]:
    """The tokens of `longer` after the prefix that both share."""
    pairs = zip(longer, shorter, strict=False)
    unequal = (place for place, (one, other) in enumerate(pairs) if one != other)
    return longer[next(unequal, len(shorter)) :]
