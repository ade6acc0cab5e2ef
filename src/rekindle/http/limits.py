"""Counts what each tenant uses, and refuses requests that exceed the limits of their API key.

Several keys of one tenant share the counts. Each request is held to the limits of its own key.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from rekindle.errors import BadRequest, RateLimited

T = TypeVar("T")

WINDOW_S = 60
ACCOUNTS = "accounts"  # the Accounts' name in the application's state


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key. None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_turns: int | None = None
    cache_bytes: int | None = None
    models: tuple[str, ...] | None = None


NO_LIMITS = KeyLimits()


class MinuteWindow:
    """A sum over the last minute, in steps of a second."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, int]] = deque()  # (second, amount), oldest first

    def add(self, amount: int, now_s: float) -> None:
        self._expire(now_s)
        second = math.floor(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))

    def total(self, now_s: float) -> int:
        self._expire(now_s)
        return sum(amount for _, amount in self._seconds)

    def wait_s(self, below: int, now_s: float) -> float:
        """Seconds until the sum is below this number, if nothing is added."""
        left, wait_s = self.total(now_s), 0.0
        for second, amount in self._seconds:
            if left < below:
                break
            left -= amount
            wait_s = _expiry_s(second) - now_s
        return wait_s

    def _expire(self, now_s: float) -> None:
        while self._seconds and _expiry_s(self._seconds[0][0]) <= now_s:
            self._seconds.popleft()


def _expiry_s(second: int) -> int:
    return second + 1 + WINDOW_S


@dataclass(slots=True)
class TenantUse:
    """What one tenant uses, and what it has used since the start of the server."""

    name: str
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)
    open_turns: int = 0
    accepted_requests: int = 0
    refused_requests: int = 0
    computed_prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0


class Account:
    """The use of a tenant, and the limits of the key with which it sends a request."""

    def __init__(self, usage: TenantUse, limits: KeyLimits, clock: Callable[[], float]) -> None:
        self.usage = usage
        self.limits = limits
        self._clock = clock

    def count_request(self) -> None:
        """Count a request, or raise RateLimited. A refused request does not count."""
        now_s, usage, limits = self._clock(), self.usage, self.limits
        for window, limit, what in (
            (usage.requests, limits.requests_per_minute, "requests"),
            (usage.tokens, limits.tokens_per_minute, "tokens"),
        ):
            wait_s = 0.0 if limit is None else window.wait_s(limit, now_s)
            if wait_s > 0:
                usage.refused_requests += 1
                raise RateLimited(f"Your key may use {limit} {what} per minute.", wait_s)
        usage.requests.add(1, now_s)
        usage.accepted_requests += 1

    def check_turns(self, count: int) -> None:
        """Raise if the key may not run so many more turns now."""
        limit = self.limits.concurrent_turns
        if limit is not None and count > limit:
            raise BadRequest(f"Your key may run {limit} turns at a time: ask for fewer choices.")
        if limit is not None and self.usage.open_turns + count > limit:
            self.usage.refused_requests += 1
            raise RateLimited(f"Your key may run {limit} turns at a time.", 1.0)

    def begin_turn(self) -> None:
        self.usage.open_turns += 1

    def end_turn(self) -> None:
        self.usage.open_turns -= 1

    def use_prompt(self, prompt_tokens: int, reused_tokens: int) -> None:
        """Count the tokens of a prompt. Those that were reused cost nothing."""
        self.usage.reused_prompt_tokens += reused_tokens
        self.usage.computed_prompt_tokens += prompt_tokens - reused_tokens
        self.usage.tokens.add(prompt_tokens - reused_tokens, self._clock())

    def use_reply(self, tokens: int) -> None:
        self.usage.generated_tokens += tokens
        self.usage.tokens.add(tokens, self._clock())

    def may_use(self, model: str) -> bool:
        return self.limits.models is None or model in self.limits.models

    def headers(self) -> dict[str, str]:
        """What is left of the limits, as OpenAI's API tells it."""
        now_s, usage, found = self._clock(), self.usage, dict[str, str]()
        for window, limit, what in (
            (usage.requests, self.limits.requests_per_minute, "requests"),
            (usage.tokens, self.limits.tokens_per_minute, "tokens"),
        ):
            if limit is not None:
                left = max(limit - window.total(now_s), 0)
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(left)
                found[f"x-ratelimit-reset-{what}"] = f"{math.ceil(window.wait_s(1, now_s))}s"
        return found


class Accounts:
    """The use of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usage: dict[bytes, TenantUse] = {}

    @property
    def used(self) -> dict[bytes, TenantUse]:
        """By the salt of the tenant."""
        return dict(self._usage)

    def of(self, salt: bytes, name: str, limits: KeyLimits) -> Account:
        usage = self._usage.setdefault(salt, TenantUse(name))
        usage.name = name
        return Account(usage, limits, self._clock)

    def forget(self, salt: bytes) -> None:
        """Forget a tenant's totals. Its open turns and its last minute still count."""
        if usage := self._usage.get(salt):
            kept = TenantUse(usage.name, usage.requests, usage.tokens, usage.open_turns)
            self._usage[salt] = kept


def accounts_of(request: Request) -> Accounts:
    accounts: Accounts = getattr(request.state, ACCOUNTS)
    return accounts


_current: ContextVar[Account | None] = ContextVar("account", default=None)


def current_account() -> Account | None:
    """The account of the request that this task works for. None: the server's own work."""
    return _current.get()


def current_tenant() -> str:
    """The name of the tenant whose request this task works for, or an empty text."""
    account = _current.get()
    return account.usage.name if account else ""


@contextlib.contextmanager
def account_context(account: Account) -> Iterator[None]:
    token = _current.set(account)
    try:
        yield
    finally:
        _current.reset(token)


def permitted(models: Mapping[str, T]) -> dict[str, T]:
    """Leave out the models that the key of the current request may not use."""
    account = _current.get()
    return {name: each for name, each in models.items() if not account or account.may_use(name)}
