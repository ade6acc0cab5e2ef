"""Questions about the cache that a request puts to the runtimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from rekindle.errors import CacheKeyNotFound, ServerError, Unavailable
from rekindle.protocol.admin import AdminOp, AdminResult, EntryInfo, ShowEntry
from rekindle.server.auth import admin_of, salt_of
from rekindle.server.runtime_client import RuntimeClient

T = TypeVar("T", bound=AdminResult)


class Questions:
    """Asked in the name of a tenant, who sees its own state, or the admin, who sees everybody's."""

    def __init__(self, salt: bytes, *, admin: bool = False) -> None:
        self.salt = salt
        self.admin = admin

    @classmethod
    def of(cls, request: Request) -> Questions:
        return cls(salt_of(request), admin=admin_of(request))

    @classmethod
    def of_tenant(cls, request: Request) -> Questions:
        """As of one whose turns meet its own state alone, whatever else it may see."""
        return cls(salt_of(request))

    async def ask(self, runtime: RuntimeClient, op: AdminOp, answer: type[T]) -> T:
        """One runtime's answer; a refusal raises."""
        told = await runtime.query(op, salt=self.salt, admin=self.admin)
        assert isinstance(told, answer), f"{type(op).__name__} was answered by {told}"
        return told

    async def find(
        self, runtimes: Sequence[RuntimeClient], op: AdminOp, answer: type[T]
    ) -> tuple[RuntimeClient, T]:
        """The answer of the runtime that knows the key; raises CacheKeyNotFound when none does."""
        absent: ServerError = CacheKeyNotFound()
        for runtime in runtimes:
            try:
                return runtime, await self.ask(runtime, op, answer)
            except Unavailable as error:  # it may be the one
                absent = error
            except ServerError as error:
                if error.code != CacheKeyNotFound.code:
                    raise
        raise absent

    async def knows(self, runtimes: Sequence[RuntimeClient], cache_key: str) -> bool:
        """Whether one of these has the key; one that cannot tell has not."""
        try:
            await self.find(runtimes, ShowEntry(cache_key), EntryInfo)
        except ServerError:
            return False
        return True
