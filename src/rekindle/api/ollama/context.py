"""`context` of /api/generate: a conversation as the tokens that the model has read and written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.api.message import Message, rendered
from rekindle.api.ollama.conversation import prompt_messages, reply_message, user_message
from rekindle.api.ollama.schema import OllamaGenerateRequest
from rekindle.errors import BadRequest, TooManyRequests, Unavailable
from rekindle.protocol.tokenisation import Tokenize, Tokenized
from rekindle.server.admin_client import AdminClient
from rekindle.server.runtime_client import RuntimeClient

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
