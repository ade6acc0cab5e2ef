"""An OpenAI-compatible server that counts words as tokens and remembers every prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

import orjson
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

TEMPLATE_TOKENS = 4
MOST_REPLY_TOKENS = 5  # unless ignore_eos is set


@dataclass(slots=True)
class FakeOpenAI:
    """Behaves well by default. `bodies` has all requests."""

    takes_ignore_eos: bool = True
    reports_cached_tokens: bool = True
    reports_stages: bool = True
    use_kv_cache: Literal["honoured", "ignored", "refused"] = "honoured"
    has_prepare: bool = True
    failure: str | None = None
    reply_word: str = "word"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    prepared: list[dict[str, Any]] = field(default_factory=list)
    _seen: list[list[str]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self._models)
        app.post("/v1/chat/completions")(self._chat)
        if self.has_prepare:
            app.post("/v1/cache/prepare")(self._prepare)
        return app

    async def _prepare(self, request: Request) -> dict[str, Any]:
        body = orjson.loads(await request.body())
        self.prepared.append(body)
        self._seen.append(_prompt(body))
        return {"cache_key": "key"}

    async def _models(self) -> dict[str, Any]:
        return {"data": [{"id": "fake-model"}, {"id": "other-model"}]}

    async def _chat(self, request: Request) -> Response:
        body = orjson.loads(await request.body())
        self.bodies.append(body)
        if "ignore_eos" in body and not self.takes_ignore_eos:
            return _error(400, "unknown field ignore_eos")
        if "use_kv_cache" in body and self.use_kv_cache == "refused":
            return _error(400, "unknown field use_kv_cache")
        if self.failure and len(self.bodies) > 3:  # only after the calibration
            return _error(503, self.failure)
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    def _events(self, body: dict[str, Any]) -> Iterator[bytes]:
        words = _prompt(body)
        opts_out = body.get("use_kv_cache") is False and self.use_kv_cache == "honoured"
        cached = 0 if opts_out else max((_shared(old, words) for old in self._seen), default=0)
        if not opts_out:
            self._seen.append(words)
        most = body["max_tokens"] if "ignore_eos" in body else MOST_REPLY_TOKENS
        tokens = min(most, body["max_tokens"])
        yield _event({"choices": [{"delta": {"role": "assistant", "content": None}}]})
        for number in range(tokens):
            yield _event({"choices": [{"delta": {"content": f"{self.reply_word}{number} "}}]})
        usage = self._usage(len(words) + TEMPLATE_TOKENS, tokens, cached)
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _usage(self, prompt_tokens: int, tokens: int, cached: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        if self.reports_cached_tokens:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        if self.reports_stages:
            usage["first_token_time"] = {"encode": 0.0001, "compute": 0.0002}
        return usage


def _prompt(body: dict[str, Any]) -> list[str]:
    return [word for message in body["messages"] for word in _words(message["content"])]


def _shared(old: list[str], new: list[str]) -> int:
    pairs = zip(old, new, strict=False)  # one may be a prefix of the other
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _words(content: str | list[dict[str, Any]]) -> list[str]:
    """The words of a message. A picture is one word, its URL."""
    if isinstance(content, str):
        return content.split()
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    texts = [part["text"] for part in content if part["type"] == "text"]
    return [*urls, *(word for text in texts for word in text.split())]


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(content) + b"\n\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=status)
