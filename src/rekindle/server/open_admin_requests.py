"""Admin requests that a runtime has not answered: whose they are, and who waits."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from rekindle.errors import ReportedError, ServerError, TooManyRequests
from rekindle.protocol.admin import AdminReply, AdminResult

MOST_OPEN = 64  # of one tenant at a time


class _Open(NamedTuple):
    tenant: bytes
    result: asyncio.Future[AdminResult]


class OpenAdminRequests:
    """A tenant may wait for a bounded number of answers."""

    def __init__(self) -> None:
        self._requests: dict[int, _Open] = {}

    def check_room(self, tenant: bytes) -> None:
        """Raises TooManyRequests."""
        if sum(each.tenant == tenant for each in self._requests.values()) >= MOST_OPEN:
            raise TooManyRequests(
                f"{MOST_OPEN} requests about cache or tokens were not answered yet; try again later"
            )

    def add(self, number: int, tenant: bytes) -> asyncio.Future[AdminResult]:
        """What a request that was sent will be answered with."""
        result: asyncio.Future[AdminResult] = asyncio.get_running_loop().create_future()
        self._requests[number] = _Open(tenant, result)
        return result

    def resolve(self, reply: AdminReply) -> None:
        request = self._requests.pop(reply.id, None)
        if request is None or request.result.done():
            return  # whoever asked does not wait any more
        if reply.result is not None:
            request.result.set_result(reply.result)
        else:
            assert reply.error is not None, "a reply has a result or an error"
            request.result.set_exception(ReportedError(reply.error))

    def fail_all(self, error: ServerError) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            if not request.result.done():
                request.result.set_exception(error)
