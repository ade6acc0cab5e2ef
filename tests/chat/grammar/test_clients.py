"""What a tenant's grammars cost is bounded, and no tenant learns of another's grammars."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from rekindle.chat.grammar import clients
from rekindle.chat.grammar.clients import ClientGrammars, GrammarQuota
from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import TokenMatcher
from rekindle.chat.grammar.process import GrammarLimits, GrammarProcess, GrammarRequest
from rekindle.errors import BadRequest, CompileTimeSpent, ServerError
from rekindle.protocol.requests import StructuredOutput
from tests.chat.grammar.costly import HANGS
from tests.chat.grammar.test_process import SETUP, VOCABULARY
from tests.support.clock import FakeClock

A, B = b"a", b"b"
CPU_S = 0.3


class CountedProcess(GrammarProcess):
    """Counts the requests that reach a grammar process, and the processes."""

    answered: int
    started: list[GrammarProcess]

    def answer(self, request: bytes) -> Any:
        CountedProcess.answered += 1
        return super().answer(request)

    def _start(self) -> None:
        CountedProcess.started.append(self)
        super()._start()


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> type[CountedProcess]:
    CountedProcess.answered, CountedProcess.started = 0, []
    monkeypatch.setattr(clients, "GrammarProcess", CountedProcess)
    return CountedProcess


class Harness:
    """Grammars of several tenants, and how often one was compiled for the model."""

    def __init__(self, quota: GrammarQuota) -> None:
        self.clock = FakeClock()
        self.compiled = 0
        setup = msgspec.structs.replace(SETUP, limits=GrammarLimits(cpu_s=CPU_S))
        self._compile = VOCABULARY.compiler().compile
        self.grammars = ClientGrammars(setup, self.compile, quota, self.clock.steady_s)

    def compile(self, grammar: Grammar) -> TokenMatcher:
        self.compiled += 1
        return self._compile(grammar)

    def ask(self, request: GrammarRequest, tenant: bytes) -> TokenMatcher | None:
        return self.grammars.matcher(request, tenant)

    def refusal(self, request: GrammarRequest, tenant: bytes) -> ServerError:
        with pytest.raises(ServerError) as refused:
            self.ask(request, tenant)
        return refused.value

    @property
    def work(self) -> tuple[int, int]:
        """The number of trials and of compilations so far."""
        return CountedProcess.answered, self.compiled


@contextmanager
def opened(**quota: Any) -> Iterator[Harness]:
    harness = Harness(GrammarQuota(**quota))
    try:
        yield harness
    finally:
        harness.grammars.close()


def regex(pattern: str) -> GrammarRequest:
    return GrammarRequest(output=StructuredOutput(regex=pattern, param="regex"))


def hanging(number: int) -> GrammarRequest:
    return GrammarRequest(output=StructuredOutput(grammar=f"{HANGS}\n// {number}"))


def test_a_grammar_is_compiled_once_for_each_tenant() -> None:
    with opened() as harness:
        for tenant, times in ((A, 1), (A, 1), (B, 2), (B, 2), (A, 2)):
            assert harness.ask(regex("[a-z]+"), tenant) is not None
            assert harness.work == (times, times)


def test_a_refusal_is_remembered_with_its_words_for_its_tenant() -> None:
    with opened() as harness:
        for request in (regex("("), hanging(0)):
            before, _ = harness.work
            refusals = [harness.refusal(request, tenant) for tenant in (A, A, B)]
            assert refusals[0].info == refusals[1].info == refusals[2].info
            assert refusals[0].status == 400
            assert harness.work == (before + 2, 0)
        assert "compiling it takes too much time or memory" in str(refusals[0])


def test_a_grammar_that_the_model_does_not_take_is_refused_and_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_grammar: Grammar) -> TokenMatcher:
        raise BadRequest("not with this vocabulary", param="regex")

    with opened() as harness:
        monkeypatch.setattr(harness, "_compile", refuse)
        assert str(harness.refusal(regex("a"), A)) == "not with this vocabulary"
        assert str(harness.refusal(regex("a"), A)) == "not with this vocabulary"
        assert harness.work == (1, 1)


def test_each_reply_begins_at_the_beginning_of_a_remembered_grammar() -> None:
    row = np.zeros(VOCABULARY.size, np.float32)
    with opened() as harness:
        for _ in range(2):
            matcher = harness.ask(regex("ab"), A)
            assert matcher is not None
            matcher.accept(ord("a"))
            matcher.mask(row)
            assert matcher.trouble is None
            assert set(np.flatnonzero(np.isfinite(row)).tolist()) == {ord("b")}
            row[:] = 0


def test_a_tenant_that_has_used_up_its_compile_time_waits_alone() -> None:
    with opened(compile_s=2 * CPU_S - 0.1, period_s=60.0) as harness:
        for number in range(2):
            assert harness.refusal(hanging(number), A).status == 400
        late = harness.refusal(regex("a"), A)
        assert isinstance(late, CompileTimeSpent)
        assert "have taken 0.5 s of compile time within 60 s. Try again in 1" in str(late)
        assert harness.refusal(hanging(0), A).status == 400  # it is remembered and costs nothing
        assert harness.work == (2, 0)
        assert harness.ask(regex("a"), B) is not None
        harness.clock.pass_by(13.5)
        assert harness.ask(regex("a"), A) is not None


def test_compiling_for_the_model_is_charged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter((0.0, 5.0, 5.0, 5.0))
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    with opened(compile_s=4.0) as harness:
        assert harness.ask(regex("a"), A) is not None
        assert harness.refusal(regex("b"), A).status == 429
        assert harness.ask(regex("a"), A) is not None
        assert harness.ask(regex("b"), B) is not None


def test_what_is_remembered_is_bounded_for_each_tenant_and_in_all() -> None:
    each = clients.OBJECTS_BYTES + clients.BYTES_PER_CHARACTER * 1_700
    with opened(remembered_bytes=2 * each, all_remembered_bytes=3 * each) as harness:

        def trials(tenant: bytes, *numbers: int) -> int:
            before, _ = harness.work
            for number in numbers:
                harness.ask(regex(f"{number}" * 1_500), tenant)
            return harness.work[0] - before

        assert trials(A, 0, 1, 1, 0) == 2
        assert trials(A, 2, 0, 1) == 2  # the tenant's own least recent one makes room
        assert trials(B, 0, 1) == 2
        assert trials(B, 0, 1) == 0
        assert trials(A, 0) == 1  # the other tenant was forgotten, since all were too much


def test_the_number_of_known_tenants_is_bounded() -> None:
    with opened(tenants=2) as harness:
        for tenant in (b"1", b"2", b"3", b"3", b"1"):
            harness.ask(regex("a"), tenant)
        assert harness.work == (4, 4)


def test_no_process_runs_before_it_is_needed_or_after_closing(
    counted: type[CountedProcess],
) -> None:
    with opened() as harness:
        assert not counted.started
        for pattern in ("a", "b"):
            harness.ask(regex(pattern), A)
        [process] = counted.started
    assert process._process.returncode is not None
