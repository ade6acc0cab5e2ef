"""Sends admin requests to the runtimes on behalf of a caller."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from rekindle.errors import CacheKeyNotFound, ServerError, Unavailable
from rekindle.http.auth import caller_of, keys_of
from rekindle.protocol.admin import (
    AdminOp,
    AdminResult,
    DocumentStored,
    EntryInfo,
    NameTenants,
    Removed,
    ShowEntry,
    TenantIds,
)
from rekindle.protocol.events import Reason
from rekindle.worker.client import RuntimeClient

T = TypeVar("T", bound=AdminResult)


def durability(*results: EntryInfo | Removed | DocumentStored) -> dict[str, Any]:
    """`durable: false` if the disk refused a change, which then lasts until a restart."""
    return {} if all(result.durable for result in results) else {"durable": False}


@dataclass(frozen=True, slots=True)
class AdminClient:
    """Acts for a tenant, who sees its own state, or for an admin, who sees all state."""

    salt: bytes
    is_admin: bool = False
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, request: Request) -> AdminClient:
        caller = caller_of(request)
        return cls(caller.salt, caller.admin, caller.groups)

    @classmethod
    def of_tenant(cls, request: Request) -> AdminClient:
        """Act for the caller as a tenant, even if it is an admin."""
        caller = caller_of(request)
        return cls(caller.salt, groups=caller.groups)

    async def request(self, runtime: RuntimeClient, op: AdminOp, result: type[T]) -> T:
        """Send a request to one runtime. Raises the error that the runtime reports."""
        found = await runtime.admin(op, salt=self.salt, admin=self.is_admin, groups=self.groups)
        assert isinstance(found, result), f"{type(op).__name__} was answered by {found}"
        return found

    async def find(
        self, runtimes: Sequence[RuntimeClient], op: AdminOp, result: type[T]
    ) -> tuple[RuntimeClient, T]:
        """Ask the runtimes until one has the key. Raises CacheKeyNotFound if none has it."""
        absent: ServerError = CacheKeyNotFound()
        for runtime in runtimes:
            try:
                return runtime, await self.request(runtime, op, result)
            except Unavailable as error:  # this runtime may have the key
                absent = error
            except ServerError as error:
                if error.code != CacheKeyNotFound.code:
                    raise
        raise absent


async def tenant_names(request: Request, runtime: RuntimeClient) -> dict[str, str]:
    """The names of the tenants whose keys are known, by the id that this model's entries show. Only
    an admin gets them."""
    keys = keys_of(request)
    if not caller_of(request).admin or keys.is_open:
        return {}
    names = {key.salt: key.name for key in keys.known}
    groups = sorted({group for key in keys.known for group in key.groups})
    op = NameTenants(list(names), groups)
    ids = await AdminClient.of(request).request(runtime, op, TenantIds)
    # A key cannot have a name with parentheses.
    return {
        **dict(zip(ids.tenants, names.values(), strict=True)),
        **{each: f"(group {group})" for each, group in zip(ids.groups, groups, strict=True)},
        ids.shared: "(shared)",
    }


async def refine_reason(
    reason: Reason, cache_key: str, others: Sequence[RuntimeClient], salt: bytes
) -> Reason:
    """Replace CACHE_KEY_NOT_FOUND by MODEL_MISMATCH if another loaded model has the key."""
    if reason is Reason.CACHE_KEY_NOT_FOUND:
        with contextlib.suppress(ServerError):  # a model that does not answer counts as no
            await AdminClient(salt).find(others, ShowEntry(cache_key), EntryInfo)
            return Reason.MODEL_MISMATCH
    return reason
