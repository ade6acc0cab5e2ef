"""JSON in and out through orjson, and errors in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from rekindle.errors import ServerError

RETRY_SOON = {"retry-after": "1"}
ERROR_HEADERS = {
    401: {"www-authenticate": "Bearer"},
    408: {"connection": "close"},
    429: RETRY_SOON,
    503: RETRY_SOON,
}


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class ErrorDetails(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error, for the OpenAPI page."""

    error: ErrorDetails


class ErrorResponse(JsonResponse):
    def __init__(self, error: ServerError) -> None:
        headers = ERROR_HEADERS.get(error.status)
        super().__init__(error.body(), status_code=error.status, headers=headers)


class _OrjsonRequest(Request):
    async def json(self) -> Any:
        return orjson.loads(await self.body())  # its error is a json.JSONDecodeError


class OrjsonRoute(APIRoute):
    """A route whose body is read by orjson, which refuses NaN and absurd nesting."""

    def get_route_handler(self) -> Any:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            request = _OrjsonRequest(request.scope, request.receive)
            await request.body()  # here its errors keep their status; FastAPI makes them all 400
            response: Response = await handler(request)
            return response

        return handle
