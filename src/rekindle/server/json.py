"""JSON in and out through orjson: fast, strict, and bounded in depth."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


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
