"""Compiles the grammars that clients ask for, and limits what each tenant's grammars may cost.

A new grammar is written, checked and tried in a grammar process. The result is remembered for its
tenant only. If tenants shared it, a fast answer would tell one which grammars another one uses.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256
from threading import Lock
from typing import NamedTuple

import msgspec

from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import TokenMatcher
from rekindle.chat.grammar.process import (
    GrammarAnswer,
    GrammarProcess,
    GrammarRequest,
    GrammarTooCostly,
    ReplyFormatSetup,
)
from rekindle.errors import BadRequest, CompileTimeSpent, ReportedError
from rekindle.lru import ByteLru
from rekindle.protocol.events import ErrorInfo

OBJECTS_BYTES = 64 << 10  # of a compiled grammar, without the part that grows with its text
BYTES_PER_CHARACTER = 50  # of a compiled grammar. Measured: 27 for an enum, 100 for Unicode classes


class GrammarQuota(msgspec.Struct, frozen=True, kw_only=True):
    """What the grammars of one tenant may cost, and what is remembered of them."""

    compile_s: float = 20.0  # CPU time in each period
    period_s: float = 60.0
    remembered_bytes: int = 32 << 20
    all_remembered_bytes: int = 128 << 20  # of all tenants
    tenants: int = 10_000


DEFAULT_QUOTA = GrammarQuota()


class _Outcome(NamedTuple):
    """A compiled grammar, None for a reply without constraints, or an error."""

    matcher: TokenMatcher | None
    error: ErrorInfo | None
    size_bytes: int


class _Tenant:
    """The compile time that one tenant has used, and the outcomes of its requests."""

    def __init__(self, quota: GrammarQuota, now_s: float) -> None:
        self._quota = quota
        self._used_s = 0.0  # at the time of the last charge. It falls by compile_s in each period
        self._charged_s = now_s
        self.outcomes: ByteLru[bytes, _Outcome] = ByteLru(
            quota.remembered_bytes, lambda _key, outcome: outcome.size_bytes
        )

    def wait_s(self, now_s: float) -> float:
        """How long the tenant has to wait before it may compile again."""
        over_s = self._still_used_s(now_s) - self._quota.compile_s
        return max(over_s, 0.0) * self._quota.period_s / self._quota.compile_s

    def charge(self, cpu_s: float, now_s: float) -> None:
        self._used_s = self._still_used_s(now_s) + cpu_s
        self._charged_s = now_s

    def _still_used_s(self, now_s: float) -> float:
        fallen = (now_s - self._charged_s) / self._quota.period_s * self._quota.compile_s
        return max(self._used_s - fallen, 0.0)


class ClientGrammars:
    """Thread-safe. Uses one grammar process for each thread that needs one at the same time."""

    def __init__(
        self,
        setup: ReplyFormatSetup,
        compile: Callable[[Grammar], TokenMatcher],
        quota: GrammarQuota = DEFAULT_QUOTA,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compile` compiles a grammar for the model's vocabulary."""
        self._setup = setup
        self._compile = compile
        self._quota = quota
        self._clock = clock
        self._lock = Lock()
        self._idle: list[GrammarProcess] = []
        self._is_closed = False
        self._tenants: OrderedDict[bytes, _Tenant] = OrderedDict()  # least recently used first
        self._remembered_bytes = 0  # of all tenants

    def matcher(self, request: GrammarRequest, tenant: bytes) -> TokenMatcher | None:
        """The compiled grammar of a reply, or None for a reply without constraints.

        Raises BadRequest for a request that cannot be enforced, or only at too high a cost, and
        CompileTimeSpent for a new grammar of a tenant that has used up its compile time.
        """
        encoded = msgspec.msgpack.encode(request)
        key = sha256(encoded).digest()
        with self._lock:
            outcome = self._tenant(tenant).outcomes.get(key)
        if outcome is None:
            outcome = self._compiled(request, encoded, tenant)
            with self._lock:
                self._remember(tenant, key, outcome)
        if outcome.error is not None:
            raise ReportedError(outcome.error)
        return outcome.matcher.copy() if outcome.matcher else None

    def forget_tenant(self, tenant: bytes) -> None:
        """Forget the outcomes of a tenant. The compile time that it has used still counts."""
        with self._lock:
            if known := self._tenants.get(tenant):
                self._remembered_bytes -= known.outcomes.used_bytes
                for key in list(known.outcomes):
                    known.outcomes.remove(key)

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        for process in idle:
            process.close()

    def _compiled(self, request: GrammarRequest, encoded: bytes, tenant: bytes) -> _Outcome:
        """Try the grammar in a grammar process, and compile it here if it passes."""
        with self._lock:
            self._check_quota(tenant)
        answer = self._tried(request, encoded)
        started_s = time.thread_time()
        matcher, error, lark = None, answer.error, ""
        if answer.grammar is not None:
            lark = answer.grammar.lark
            try:
                matcher = self._compile(answer.grammar)
            except BadRequest as refused:
                error = refused.info
        cpu_s = answer.cpu_s + time.thread_time() - started_s
        with self._lock:
            self._tenant(tenant).charge(cpu_s, self._clock())
        return _Outcome(matcher, error, OBJECTS_BYTES + BYTES_PER_CHARACTER * len(lark))

    def _tried(self, request: GrammarRequest, encoded: bytes) -> GrammarAnswer:
        with self._lock:
            process = self._idle.pop() if self._idle else None
        process = process or GrammarProcess(self._setup)
        try:
            answer = process.answer(encoded)
        except GrammarTooCostly:
            cpu_s = self._setup.limits.cpu_s
            answer = GrammarAnswer(error=request.too_costly().info, cpu_s=cpu_s)
        except BaseException:
            process.close()
            raise
        with self._lock:
            is_closed = self._is_closed
            self._idle += [] if is_closed else [process]
        if is_closed:
            process.close()
        return answer

    def _check_quota(self, tenant: bytes) -> None:
        if wait_s := self._tenant(tenant).wait_s(self._clock()):
            raise CompileTimeSpent(self._quota.compile_s, self._quota.period_s, wait_s)

    def _tenant(self, tenant: bytes) -> _Tenant:
        if tenant not in self._tenants:
            self._tenants[tenant] = _Tenant(self._quota, self._clock())
        self._tenants.move_to_end(tenant)
        while len(self._tenants) > self._quota.tenants:
            self._forget_oldest()
        return self._tenants[tenant]

    def _remember(self, tenant: bytes, key: bytes, outcome: _Outcome) -> None:
        outcomes = self._tenant(tenant).outcomes
        self._remembered_bytes -= outcomes.used_bytes
        outcomes.put(key, outcome)
        self._remembered_bytes += outcomes.used_bytes
        while self._remembered_bytes > self._quota.all_remembered_bytes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Forget the outcomes and the compile time of the tenant that was idle for longest."""
        _, oldest = self._tenants.popitem(last=False)
        self._remembered_bytes -= oldest.outcomes.used_bytes
