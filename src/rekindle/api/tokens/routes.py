"""POST /v1/tokenize, /v1/detokenize, /v1/apply-template and /v1/internal/token-count."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from rekindle.api.base.admin import AdminClient
from rekindle.api.base.fields import NO_LIMIT, FreeObject, Tokens, bounded_text
from rekindle.api.base.messages import MOST_MESSAGES, Message, Messages, rendered
from rekindle.api.base.models import ModelNumber, models_of
from rekindle.api.base.tools import Tools, described
from rekindle.config import Config
from rekindle.errors import BadRequest, Unsupported
from rekindle.http.body import JsonRoute, run_off_loop
from rekindle.http.responses import JsonResponse
from rekindle.protocol.admin import Detokenize, Detokenized, Tokenize, Tokenized
from rekindle.protocol.media import IMAGE
from rekindle.version import __version__
from rekindle.worker.client import RuntimeClient

# ----------------------------------------------------------------------
# Requests about tokens, in the shapes of llama.cpp's server and of vLLM's.

Text = Annotated[str, BeforeValidator(bounded_text)]
SOURCES = ("content", "prompt", "messages")


class ConversationBase(BaseModel):
    """What says how a conversation is rendered."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tools: Tools | None = None
    chat_template_kwargs: FreeObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def conversation(self, messages: list[Message], *, normalise: bool) -> Tokenize:
        """What a runtime is asked; `normalise`: as chat normalises conversations."""
        if any(message.media for message in messages):
            raise Unsupported(
                "pictures have no tokens before the model has seen them: send text alone",
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
    messages: Messages = Field(min_length=1, max_length=MOST_MESSAGES)

    def asked(self, *, normalise: bool) -> Tokenize:
        return self.conversation(self.messages, normalise=normalise)


class TokenizeRequest(ConversationBase):
    """One of `content` (llama.cpp), `prompt` (vLLM) and `messages`."""

    content: Text | None = None
    prompt: Text | None = None
    messages: Messages | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    add_special: bool | None = Field(
        None, description="What the model wants around a text; by default with `prompt` alone"
    )
    add_special_tokens: bool | None = Field(None, description="vLLM's name of `add_special`")
    parse_special: bool = Field(True, description="A control token's text in a text is that token")
    with_pieces: bool = Field(False, description="llama.cpp's form: each token with its text")
    return_token_strs: bool = Field(False, description="vLLM's form: `token_strs` beside `tokens`")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        given = [name for name in SOURCES if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadRequest(
                "Send one of `content`, `prompt` and `messages`.", param=given[1] if given else None
            )
        return self

    def asked(self, *, normalise: bool) -> Tokenize:
        asked = (
            Tokenize(
                text=self.prompt if self.content is None else self.content,
                add_special=self._adds_special(),
                parse_special=self.parse_special,
            )
            if self.messages is None
            else self.conversation(self.messages, normalise=normalise)
        )
        asked.with_pieces = self.with_pieces or self.return_token_strs
        return asked

    def _adds_special(self) -> bool:
        given = self.add_special if self.add_special is not None else self.add_special_tokens
        return self.prompt is not None if given is None else given


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    tokens: Tokens


class TokenCountRequest(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: str | None = None
    text: Text


class TokenCountBody(BaseModel):
    length: int


router = APIRouter(route_class=JsonRoute, tags=["tokens"])


@router.post("/v1/tokenize")
async def tokenize(body: TokenizeRequest, request: Request, number: ModelNumber = None) -> Response:
    """The tokens of a text, or of a conversation as the model would read it."""
    models = models_of(request)
    asked = await run_off_loop(request, body.asked, normalise=models.config.normalise)
    runtime = models.any(body.model, number)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return await run_off_loop(request, _answer, found, body)


@router.post("/v1/detokenize")
async def detokenize(
    body: DetokenizeRequest, request: Request, number: ModelNumber = None
) -> Response:
    """The text of tokens, control tokens included."""
    runtime = models_of(request).any(body.model, number)
    asked = Detokenize(body.tokens)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Detokenized)
    return JsonResponse({"content": found.text, "prompt": found.text})


@router.post("/v1/apply-template")
async def apply_template(
    body: TemplateRequest, request: Request, number: ModelNumber = None
) -> Response:
    """A conversation as the text that the model would read."""
    models = models_of(request)
    asked = await run_off_loop(request, body.asked, normalise=models.config.normalise)
    runtime = models.runtime(body.model, number)
    client = AdminClient.of_tenant(request)
    tokens = (await client.request(runtime, asked, Tokenized)).tokens
    found = await client.request(runtime, Detokenize(tokens), Detokenized)
    return JsonResponse({"prompt": found.text})


@router.post("/v1/internal/token-count")
async def count_tokens(
    body: TokenCountRequest, request: Request, number: ModelNumber = None
) -> TokenCountBody:
    """How many tokens a text has, with what the model wants around it."""
    runtime = models_of(request).any(body.model, number)
    asked = Tokenize(text=body.text, add_special=True, with_tokens=False)
    found = await AdminClient.of_tenant(request).request(runtime, asked, Tokenized)
    return TokenCountBody(length=found.count)


def _answer(found: Tokenized, body: TokenizeRequest) -> Response:
    tokens: list[Any] = found.tokens
    if body.with_pieces:
        pairs = zip(found.tokens, found.pieces, strict=True)
        tokens = [{"id": token, "piece": _piece(piece)} for token, piece in pairs]
    answer: dict[str, Any] = {
        "tokens": tokens,
        "count": found.count,
        "max_model_len": found.context_tokens,
    }
    if body.return_token_strs:
        answer["token_strs"] = [piece.decode(errors="replace") for piece in found.pieces]
    return JsonResponse(answer)


def _piece(piece: bytes) -> str | list[int]:
    """Text; bytes where a character goes on in the next token."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


# ----------------------------------------------------------------------
# GET /props, by which tools of llama.cpp's server learn what the model is like.

props_router = APIRouter(tags=["llama.cpp"])


@props_router.get("/props")
async def props(request: Request, model: str | None = None, number: ModelNumber = None) -> Response:
    """What the model is like: its context, its chat template, what it can see."""
    models = models_of(request)
    return JsonResponse(_props(models.runtime(model, number), models.config))


def _props(runtime: RuntimeClient, config: Config) -> dict[str, Any]:
    ready = runtime.loaded
    return {
        "default_generation_settings": {
            "n_ctx": ready.context_tokens,
            "params": {
                "temperature": config.temperature,
                "top_p": config.top_p,
                "repeat_penalty": config.repetition_penalty,
                "repeat_last_n": config.repetition_context_size,
                "n_predict": NO_LIMIT if config.max_tokens is None else config.max_tokens,
            },
        },
        "total_slots": config.parallel,
        "model_alias": runtime.name,
        "modalities": {"vision": IMAGE in ready.modalities, "audio": False},
        "chat_template": ready.chat_template or "",
        "bos_token": ready.bos,
        "eos_token": ready.eos,
        "build_info": f"rekindle-{__version__}",
    }
