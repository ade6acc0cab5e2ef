"""A request's body as it arrives: bounded in size and in time."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from rekindle.errors import BadRequest

MOST_BODY_BYTES = 64 << 20
BODY_S = 120.0  # a whole body's time; a large one on a slow line needs most of it


class BodyTooLarge(BadRequest):
    status, code = 413, "body_too_large"

    def __init__(self) -> None:
        super().__init__(f"A request may have at most {MOST_BODY_BYTES} bytes.")


class BodyTooSlow(BadRequest):
    status, code = 408, "body_too_slow"

    def __init__(self) -> None:
        super().__init__(f"The request's body did not arrive within {BODY_S:g} seconds.")


class Body:
    """Stands in for `receive`; after the body it only passes on."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._seen_bytes = 0
        self._whole = False
        self._deadline: float | None = None

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        message = await self._in_time()
        self._seen_bytes += len(message.get("body", b""))
        if self._seen_bytes > MOST_BODY_BYTES:
            raise BodyTooLarge
        self._whole = not message.get("more_body", False)
        return message

    async def _in_time(self) -> Message:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + BODY_S
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._receive()
        except TimeoutError:
            raise BodyTooSlow from None
