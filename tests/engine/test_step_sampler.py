"""A step's tokens are those that each row would have had alone, whatever computes them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rekindle.engine import step_sampler
from rekindle.engine.base import Matrix, Sampled
from rekindle.engine.compiled_rows import CompiledRows
from rekindle.engine.sampling import TokenSampler, build_sampler
from rekindle.engine.step_sampler import Sharing, StepSampler, build_step_sampler
from rekindle.protocol.requests import SamplingParams

pytestmark = pytest.mark.usefixtures("compiled")

WAYS = [
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, top_p=0.95),
    SamplingParams(temperature=0.3, top_p=0.5),
    SamplingParams(temperature=0.8, top_p=1),
    SamplingParams(temperature=2, top_p=0.9),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.8, top_p=0.9, min_p=0.1),
    SamplingParams(temperature=0.8, logit_bias={3: 2.0}, presence_penalty=1.0, top_logprobs=2),
    SamplingParams(temperature=0, repetition_penalty=1.3, top_logprobs=0),
]
ROWS = 24
STEPS = 6


def make_samplers(ways: list[SamplingParams]) -> list[TokenSampler]:
    seeded = [replace(ways[row % len(ways)], seed=row) for row in range(ROWS)]
    return [build_sampler(each, (1, 2, 3)) for each in seeded]


def make_logits(step: int, size: int) -> Matrix:
    """Flat rows, peaked rows, rows with ties, and some that make no sense."""
    chance = np.random.default_rng(step)
    rows = chance.normal(0, 1, (ROWS, size)).astype(np.float32)
    rows[1::3] *= 6
    rows[2::3] = rows[2::3].round(1)
    rows[5] = -np.inf
    rows[6, 7] = np.nan
    rows[10] += 200
    rows[11, 8] = np.inf
    return rows


def alone(ways: list[SamplingParams], size: int) -> list[list[Sampled]]:
    samplers = make_samplers(ways)
    return [
        [
            sampler.sample(row)
            for sampler, row in zip(samplers, make_logits(step, size), strict=True)
        ]
        for step in range(STEPS)
    ]


@pytest.fixture(params=[1, 2, 8])
def step(request: pytest.FixtureRequest, compiled: CompiledRows | None) -> Iterator[StepSampler]:
    made = StepSampler(request.param, compiled)
    yield made
    made.close()


@pytest.mark.parametrize("ways", [WAYS, WAYS[:1], WAYS[1:2]], ids=["mixed", "plain", "greedy"])
@pytest.mark.parametrize(("size", "group"), [(12, 40), (1003, 3000), (1003, 40_000), (4096, 9000)])
def test_a_row_gives_the_same_token_alone_and_in_any_company(
    step: StepSampler,
    ways: list[SamplingParams],
    size: int,
    group: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step, "_sharing", Sharing(8, 1, group, 70, 70))
    monkeypatch.setattr(step_sampler, "LEAST_WORK", 1)
    monkeypatch.setattr("rekindle.engine.team.LEAST_WORK", 1)
    samplers = make_samplers(ways)
    together = [step.sample(samplers, make_logits(number, size)) for number in range(STEPS)]
    assert together == alone(ways, size)


def test_rows_of_a_large_step_are_shared_by_threads_and_those_of_a_small_one_are_not(
    compiled: CompiledRows | None,
) -> None:
    seen: set[str] = set()

    class Watched(TokenSampler):
        def accept(self, token: int) -> Sampled:
            seen.add(threading.current_thread().name)
            return Sampled(token)

    step = StepSampler(4, compiled)
    hot = SamplingParams(temperature=2)
    try:
        step.sample([Watched(hot, (), None)], np.zeros((1, 50_000), np.float32))
        assert seen == {threading.current_thread().name}
        many = [Watched(hot, (), None) for _ in range(32)]
        step.sample(many, np.zeros((32, 50_000), np.float32))
        assert "sampler" in seen
    finally:
        step.close()


def test_a_failure_in_one_row_is_raised(compiled: CompiledRows | None) -> None:
    class Broken(TokenSampler):
        def accept(self, token: int) -> Sampled:
            raise MemoryError

    step = StepSampler(4, compiled)
    samplers = [Broken(SamplingParams(temperature=2), (), None) for _ in range(64)]
    with pytest.raises(MemoryError):
        step.sample(samplers, np.zeros((64, 50_000), np.float32))
    step.close()


@pytest.mark.parametrize(
    ("cores", "busy", "threads"),
    [(1, 0, 1), (2, 0, 1), (4, 0, 2), (8, 8, 1), (32, 24, 4)],
)
def test_threads_go_by_the_cores_that_are_left(
    cores: int, busy: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampler, "usable_cores", lambda: cores)
    assert build_step_sampler(busy).threads == threads


def test_more_threads_choose_where_they_do_not_wait_for_the_interpreter(
    compiled: CompiledRows | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_sampler, "usable_cores", lambda: 64)
    assert build_step_sampler(0).threads == (8 if compiled else 4)


def test_compiled_code_is_missed_aloud_and_used_in_silence(
    compiled: CompiledRows | None, caplog: pytest.LogCaptureFixture
) -> None:
    build_step_sampler(0)
    said = [record.getMessage() for record in caplog.records]
    assert ["no C compiler was found" in line for line in said] == ([] if compiled else [True])
