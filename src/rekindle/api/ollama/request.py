"""From a request of Ollama's API to the turn that a runtime computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import explain
from rekindle.api.base.images import Illustrated
from rekindle.api.base.messages import Message, rendered
from rekindle.api.ollama.schema import OllamaGenerateRequest, OllamaMessage, RequestBase
from rekindle.config import Config
from rekindle.errors import BadRequest, TooManyRequests, Unavailable
from rekindle.protocol.admin import Tokenize, Tokenized
from rekindle.protocol.requests import GenerateRequest, SamplingParams
from rekindle.worker.client import RuntimeClient

WHOLE_CONTEXT = -1  # as `repeat_last_n`


def conversation(messages: Sequence[Message], illustrated: Illustrated | None) -> dict[str, Any]:
    """The fields of a request that are its messages; `illustrated`: with pictures."""
    if illustrated is not None:
        return {"messages": illustrated.messages, "pictures": illustrated.pictures}
    return {"messages": rendered(list(messages))}


def generate_request(
    body: RequestBase, config: Config, salt: bytes, prompt: dict[str, Any]
) -> GenerateRequest:
    """`prompt`: the fields that say what the model reads."""
    return GenerateRequest(
        turn=0,
        **prompt,
        template_kwargs=body.template_kwargs,
        structured_output=body.structure,
        sampling=_sampling(body, config),
        max_tokens=_limit(body.chosen.num_predict, config),
        stop=body.chosen.stops,
        normalise=config.normalise,
        reuse=config.context_cache,
        exact=config.exact,
        kv_bits=config.kv_bits,
        kv_quantization_start=config.kv_quantization_start,
        salt=salt,
    )


def _sampling(body: RequestBase, config: Config) -> SamplingParams:
    options = body.chosen
    window = _or(options.repeat_last_n, config.repetition_context_size)
    return SamplingParams(
        temperature=_or(options.temperature, config.temperature),
        top_p=_or(options.top_p, config.top_p),
        top_k=max(options.top_k or 0, 0),
        min_p=options.min_p or 0.0,
        repetition_penalty=_or(options.repeat_penalty, config.repetition_penalty),
        repetition_context_size=1 << 20 if window == WHOLE_CONTEXT else window,
        presence_penalty=options.presence_penalty or 0.0,
        frequency_penalty=options.frequency_penalty or 0.0,
        seed=options.seed,
    )


def _limit(num_predict: int | None, config: Config) -> int | None:
    """None: until the model stops or the context ends."""
    if num_predict is None:
        return config.max_tokens
    return num_predict if num_predict > 0 else None


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


# ----------------------------------------------------------------------
# Messages of Ollama's API as those that templates read.

CALL_ID_DIGITS = 9  # Mistral's templates refuse any other length


def messages_of(sent: Sequence[OllamaMessage]) -> list[Message]:
    """Ollama's calls have no ids, and results follow in the order of the calls: so each gets its
    number, which is the same in every later turn."""
    called = _ids()
    answered = _ids()
    try:
        return [_message(each, called, answered) for each in sent]
    except ValidationError as error:  # of what our own messages cannot be
        raise explain(error.errors()) from None


def prompt_messages(body: OllamaGenerateRequest) -> list[Message]:
    """The conversation that a prompt of /api/generate begins."""
    system = [_plain("system", body.system)] if body.system else []
    user = OllamaMessage(role="user", content=body.prompt, images=body.images)
    return [*system, *messages_of([user])]


def user_message(text: str) -> Message:
    return _plain("user", text)


def reply_message(text: str) -> Message:
    return _plain("assistant", text)


def _plain(role: str, text: str) -> Message:
    return Message.model_validate({"role": role, "content": text})


def _ids() -> Iterator[str]:
    return (f"{number:0{CALL_ID_DIGITS}d}" for number in range(10**CALL_ID_DIGITS))


def _message(sent: OllamaMessage, called: Iterator[str], answered: Iterator[str]) -> Message:
    fields: dict[str, Any] = {"role": sent.role, "content": _content(sent)}
    if sent.thinking:
        fields["reasoning_content"] = sent.thinking
    if sent.tool_calls:
        fields["tool_calls"] = [
            {"id": next(called), "type": "function", "function": call.function.model_dump()}
            for call in sent.tool_calls
        ]
    if sent.role == "tool":
        fields["tool_call_id"] = next(answered)
        if sent.tool_name:
            fields["name"] = sent.tool_name
    return Message.model_validate(fields)


def _content(sent: OllamaMessage) -> str | list[dict[str, Any]]:
    """Pictures come before the text, as Ollama shows them to a model."""
    if not sent.images:
        return sent.content
    pictures = [{"type": "image_url", "image_url": _url(image)} for image in sent.images]
    return [*pictures, {"type": "text", "text": sent.content}]


def _url(image: str) -> str:
    """Ollama sends the Base64 alone; which kind of picture it is, its bytes tell."""
    return image if image.startswith("data:") else f"data:image/png;base64,{image}"


# ----------------------------------------------------------------------
# `context` of /api/generate: a conversation as the tokens that the model has read and written.

# A conversation: what another message adds to it, it adds to any.
EARLIER = [user_message("a"), reply_message("b")]


class Context:
    """The tokens before a prompt, and those after its reply."""

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
        self._is_told = not (body.raw or body.images)  # pictures are no tokens of the vocabulary
        self._before = body.context or []
        self._messages = prompt_messages(body) if not body.raw else []
        self._prompt: list[int] = []

    async def prompt(self) -> dict[str, Any]:
        """The fields of a request that goes on from the context; none without one."""
        if not self._before:
            return {}
        ready = self._runtime.ready
        if ready and not all(0 <= token < ready.vocabulary for token in self._before):
            raise BadRequest(
                f"`context` takes the tokens of an earlier answer, from 0 to "
                f"{ready.vocabulary - 1}.",
                param="context",
            )
        whole = await self._tokens([*EARLIER, *self._messages])
        ended = await self._tokens(EARLIER, add_generation_prompt=False)
        self._prompt = [*self._before, *_more(whole, ended)]
        return {"prompt": self._prompt}

    async def after(self, reply: str) -> dict[str, Any]:
        """The fields of an answer that say where to go on from; none where there is no telling. A
        reply that was computed is not lost for it."""
        try:
            return {"context": await self._after(reply)} if self._is_told else {}
        except (TooManyRequests, Unavailable):
            return {}

    async def _after(self, reply: str) -> list[int]:
        if not self._before:
            conversation = [*self._messages, reply_message(reply)]
            return await self._tokens(conversation, add_generation_prompt=False)
        written = await self._ask(Tokenize(text=reply, parse_special=False))
        ended = await self._tokens(EARLIER, add_generation_prompt=False)
        open_ended = await self._tokens(
            EARLIER, add_generation_prompt=False, continue_final_message=True
        )
        return [*self._prompt, *written, *_more(ended, open_ended)]

    async def _tokens(self, messages: Sequence[Message], **end: Any) -> list[int]:
        return await self._ask(Tokenize(messages=rendered(list(messages)), **self._form, **end))

    async def _ask(self, question: Tokenize) -> list[int]:
        return (await self._client.request(self._runtime, question, Tokenized)).tokens


def _more(longer: Sequence[int], shorter: Sequence[int]) -> Sequence[int]:
    """What the first goes on with where the second ends."""
    pairs = zip(longer, shorter, strict=False)
    unequal = (place for place, (one, other) in enumerate(pairs) if one != other)
    return longer[next(unequal, len(shorter)) :]
