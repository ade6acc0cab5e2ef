"""Serves /v1/tokenize, /v1/detokenize, /v1/apply-template, /v1/internal/token-count and
/v1/chat/completions/input_tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import MAX_ITEMS, FreeObject, StrictModel, Text, Tokens
from rekindle.api.base.loading import loaded
from rekindle.api.base.messages import Message, Messages, rendered
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.request import or_default, with_system
from rekindle.api.base.tools import ChatTools, described
from rekindle.errors import BadRequest, Unsupported
from rekindle.http.body import JsonRoute, body_of, run_off_loop
from rekindle.http.responses import JsonResponse
from rekindle.protocol.admin import Detokenize, Detokenized, Tokenize, Tokenized
from rekindle.worker.client import RuntimeClient

router = APIRouter(route_class=JsonRoute, tags=["tokens"])

PART_TOKENS = 8192  # of an answer that are serialised at a time
MAX_TEXT_BYTES = 16 << 20  # tokenising takes about 75 bytes of memory for each byte


def _limit_bytes(text: str) -> str:
    is_short = len(text) * 4 <= MAX_TEXT_BYTES  # a character has up to 4 bytes
    if not is_short and len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise ValueError(f"may have at most {MAX_TEXT_BYTES} bytes in UTF-8: send it in parts")
    return text


TextToTokenise = Annotated[Text, AfterValidator(_limit_bytes)]


class ConversationBase(StrictModel):
    """The fields that decide how a conversation is rendered."""

    model: str | None = None
    tools: ChatTools | None = None
    chat_template_kwargs: FreeObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(
        self, messages: Sequence[Message], *, normalise: bool, system: str | None
    ) -> Tokenize:
        """Ask for the tokens of a conversation. `normalise` is the server's setting for chats, and
        `system` the model's own system prompt."""
        messages = with_system(messages, system)
        if any(message.media for message in messages):
            raise Unsupported(
                "images and files have no tokens before they are read: send only text",
                param="messages",
            )
        return Tokenize(
            messages=rendered(messages),
            tools=described(self.tools),
            template_kwargs=self.chat_template_kwargs or {},
            add_generation_prompt=self.add_generation_prompt and not self.continue_final_message,
            continue_final_message=self.continue_final_message,
            normalise=normalise,
        )


class TemplateRequest(ConversationBase):
    messages: Messages = Field(min_length=1, max_length=MAX_ITEMS)


class TokenizeRequest(ConversationBase):
    """Takes one of `content` (llama.cpp), `prompt` (vLLM) and `messages`."""

    content: TextToTokenise | None = None
    prompt: TextToTokenise | None = None
    messages: Messages | None = Field(None, min_length=1, max_length=MAX_ITEMS)
    add_special: bool | None = Field(
        None, description="Add the model's special tokens; by default only to `prompt`"
    )
    add_special_tokens: bool | None = Field(None, description="vLLM's name for `add_special`")
    parse_special: bool = Field(True, description="Recognise control tokens in the text")
    with_pieces: bool = Field(False, description="llama.cpp: return each token with its text")
    return_token_strs: bool = Field(False, description="vLLM: return `token_strs` too")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        sources = ("content", "prompt", "messages")
        given = [name for name in sources if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(
                "Send one of `content`, `prompt` and `messages`.", param=given[1] if given else None
            )
        return self

    def op(self, *, normalise: bool, system: str | None) -> Tokenize:
        if self.messages is None:
            by_default = or_default(self.add_special_tokens, self.prompt is not None)
            op = Tokenize(
                text=or_default(self.content, self.prompt),
                add_special=or_default(self.add_special, by_default),
                parse_special=self.parse_special,
            )
        else:
            op = self.conversation(self.messages, normalise=normalise, system=system)
        op.with_pieces = self.with_pieces or self.return_token_strs
        return op


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Tokens


class TokenCountRequest(StrictModel):
    model: str | None = None
    text: TextToTokenise


class TokenCountBody(BaseModel):
    length: int


@router.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, number: ModelNumber = None) -> Response:
    """Tokenise a text, or a conversation as the model would read it."""
    models = models_of(request)
    runtime = models.any(body.model, number)
    system, normalise = models.system_of(runtime), models.config.normalise
    op = await run_off_loop(request, body.op, normalise=normalise, system=system)
    await loaded(request, runtime)
    found = await AdminClient.of_tenant(request).request(runtime, op, Tokenized)
    body_of(request).hold(len(found.packed))
    parts = _parts(found, body)
    if found.count <= PART_TOKENS:
        return Response(b"".join(parts), media_type=JsonResponse.media_type)
    # The whole JSON would take about 30 bytes for each token. Starlette makes the parts in threads.
    return StreamingResponse(parts, media_type=JsonResponse.media_type)


@router.post("/v1/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Convert tokens to text, including control tokens."""
    runtime = await loaded(request, models_of(request).any(body.model, number))
    client = AdminClient.of_tenant(request)
    found = await client.request(runtime, Detokenize(body.tokens), Detokenized)
    return JsonResponse({"content": found.text, "prompt": found.text})


@router.post("/v1/apply-template")
async def apply_template(
    body: TemplateRequest, request: Request, number: ModelNumber = None
) -> Response:
    """Render a conversation as the text that the model would read."""
    runtime = await loaded(request, models_of(request).runtime(body.model, number))
    found = await _tokenized(body, request, runtime, with_text=True)
    body_of(request).hold(len(found.text))
    return JsonResponse({"prompt": found.text})


async def _tokenized(
    body: TemplateRequest, request: Request, runtime: RuntimeClient, *, with_text: bool = False
) -> Tokenized:
    models = models_of(request)
    system, normalise = models.system_of(runtime), models.config.normalise
    op = await run_off_loop(
        request, body.conversation, body.messages, normalise=normalise, system=system
    )
    op.with_tokens, op.with_text = False, with_text
    return await AdminClient.of_tenant(request).request(runtime, op, Tokenized)


@router.post("/v1/internal/token-count")
async def count_tokens(
    body: TokenCountRequest, request: Request, number: ModelNumber = None
) -> TokenCountBody:
    """Count the tokens of a text, including the model's special tokens."""
    runtime = await loaded(request, models_of(request).any(body.model, number))
    op = Tokenize(text=body.text, add_special=True, with_tokens=False)
    found = await AdminClient.of_tenant(request).request(runtime, op, Tokenized)
    return TokenCountBody(length=found.count)


class InputTokensBody(BaseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


@router.post("/v1/chat/completions/input_tokens")
async def count_chat_tokens(
    body: TemplateRequest, request: Request, number: ModelNumber = None
) -> InputTokensBody:
    """Count the tokens of a conversation as the model would read it."""
    runtime = await loaded(request, models_of(request).runtime(body.model, number))
    found = await _tokenized(body, request, runtime)
    return InputTokensBody(input_tokens=found.count)


def _parts(found: Tokenized, body: TokenizeRequest) -> Iterator[bytes]:
    """Make the JSON of an answer, a few thousand tokens at a time."""
    yield b'{"tokens":['
    if body.with_pieces:
        pieces = found.pieces.items()
        pairs = {id: orjson.dumps({"id": id, "piece": _piece(piece)}) for id, piece in pieces}
        yield from _joined(found.ids, pairs.__getitem__)
    else:
        yield from _joined(found.ids, b"%d".__mod__)
    yield b'],"count":%d,"max_model_len":%d' % (found.count, found.context_tokens)
    if body.return_token_strs:
        texts = {
            id: orjson.dumps(piece.decode(errors="replace")) for id, piece in found.pieces.items()
        }
        yield b',"token_strs":['
        yield from _joined(found.ids, texts.__getitem__)
        yield b"]"
    yield b"}"


def _joined(ids: Sequence[int], shown: Callable[[int], bytes]) -> Iterator[bytes]:
    for start in range(0, len(ids), PART_TOKENS):
        part = b",".join(map(shown, ids[start : start + PART_TOKENS]))
        yield b"," + part if start else part


def _piece(piece: bytes) -> str | list[int]:
    """The token's text, or its bytes if they end inside a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
