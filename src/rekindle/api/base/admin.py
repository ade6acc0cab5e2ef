"""Requests about the cache, sent to the runtimes on behalf of a caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from rekindle.errors import CacheKeyNotFound, ServerError, Unavailable
from rekindle.http.auth import caller_of
from rekindle.protocol.admin import AdminOp, AdminResult, EntryInfo, ShowEntry
from rekindle.protocol.events import Finished, Reason
from rekindle.protocol.requests import GenerateRequest
from rekindle.worker.client import RuntimeClient

T = TypeVar("T", bound=AdminResult)


class AdminClient:
    """Acts for a tenant, who sees its own state, or for the admin, who sees everybody's."""

    def __init__(self, salt: bytes, *, admin: bool = False) -> None:
        self.salt = salt
        self.is_admin = admin

    @classmethod
    def of(cls, request: Request) -> AdminClient:
        caller = caller_of(request)
        return cls(caller.salt, admin=caller.admin)

    @classmethod
    def of_tenant(cls, request: Request) -> AdminClient:
        """Without an admin's rights: for what concerns the caller's own turns alone."""
        return cls(caller_of(request).salt)

    async def request(self, runtime: RuntimeClient, op: AdminOp, result: type[T]) -> T:
        """One runtime's result; an error that it reports is raised."""
        found = await runtime.admin(op, salt=self.salt, admin=self.is_admin)
        assert isinstance(found, result), f"{type(op).__name__} was answered by {found}"
        return found

    async def find(
        self, runtimes: Sequence[RuntimeClient], op: AdminOp, result: type[T]
    ) -> tuple[RuntimeClient, T]:
        """The result of the runtime that has the key; raises CacheKeyNotFound when none has."""
        absent: ServerError = CacheKeyNotFound()
        for runtime in runtimes:
            try:
                return runtime, await self.request(runtime, op, result)
            except Unavailable as error:  # it may be the one that has it
                absent = error
            except ServerError as error:
                if error.code != CacheKeyNotFound.code:
                    raise
        raise absent

    async def knows(self, runtimes: Sequence[RuntimeClient], cache_key: str) -> bool:
        """Whether one of these has the key; one that does not answer has not."""
        try:
            await self.find(runtimes, ShowEntry(cache_key), EntryInfo)
        except ServerError:
            return False
        return True


async def refine_reason(
    reason: Reason, cache_key: str, others: Sequence[RuntimeClient], salt: bytes
) -> Reason:
    """MODEL_MISMATCH instead of CACHE_KEY_NOT_FOUND where another loaded model has the key."""
    if reason is Reason.CACHE_KEY_NOT_FOUND and await AdminClient(salt).knows(others, cache_key):
        return Reason.MODEL_MISMATCH
    return reason


async def refine_report(
    turns: Sequence[Finished], request: GenerateRequest, others: Sequence[RuntimeClient]
) -> None:
    """Correct the reason in the first turn's report: it is the turn that has the names."""
    if request.names is None or request.names.cache_key is None:
        return
    report = turns[0].cache
    report.reason = await refine_reason(
        report.reason, request.names.cache_key, others, request.salt
    )
