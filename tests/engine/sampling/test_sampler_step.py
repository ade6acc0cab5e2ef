"""A row gives the same token in a step as it does by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from ctypes import CDLL
from dataclasses import replace

import numpy as np
import pytest

from rekindle.engine.base import Matrix, Sampled
from rekindle.engine.sampling import sampler as step_module
from rekindle.engine.sampling.sampler import StepSampler, TokenSampler, build_step_sampler
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
    return [TokenSampler(each, (1, 2, 3)) for each in seeded]


def make_logits(step: int, size: int) -> Matrix:
    """Make flat rows, peaked rows, rows with ties, and some with NaN and infinity."""
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
def step(request: pytest.FixtureRequest, compiled: CDLL | None) -> Iterator[StepSampler]:
    made = StepSampler(request.param, compiled)
    yield made
    made.close()


@pytest.mark.parametrize("ways", [WAYS, WAYS[:1], WAYS[1:2]], ids=["mixed", "plain", "greedy"])
@pytest.mark.parametrize("size", [12, 1003, 4096])
def test_a_row_gives_the_same_token_alone_and_in_any_company(
    step: StepSampler, ways: list[SamplingParams], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "MIN_SHARED_LOGITS", 1)
    samplers = make_samplers(ways)
    together = [step.sample(samplers, make_logits(number, size)) for number in range(STEPS)]
    assert together == alone(ways, size)


@pytest.mark.parametrize(
    ("temperature", "rows", "is_shared"),
    [(0, 8, False), (0, 32, True), (1, 2, False), (1, 8, True)],
)
def test_only_large_steps_wake_threads(
    temperature: float, rows: int, is_shared: bool, step: StepSampler, compiled: CDLL | None
) -> None:
    samplers = [TokenSampler(SamplingParams(temperature=temperature), ()) for _ in range(rows)]
    expected = is_shared and compiled is not None and step.threads > 1
    assert step.arm(samplers, 50_000) == expected


def test_parameters_packed_for_other_replies_are_not_used(step: StepSampler) -> None:
    samplers, others = make_samplers(WAYS), make_samplers(WAYS[:1])
    together = []
    for number in range(STEPS):
        step.arm(others if number % 2 else samplers, 50_000)
        together.append(step.sample(samplers, make_logits(number, 1003)))
    assert together == alone(WAYS, 1003)


def test_an_armed_step_may_come_early_late_or_never(step: StepSampler) -> None:
    samplers, rows = make_samplers(WAYS[:1]), make_logits(0, 50_000)
    first = step.sample(make_samplers(WAYS[:1]), rows.copy())
    for wait_s in (0, 0, 0.001, 0.03, 0):
        step.arm(samplers, 50_000)
        step.arm(samplers, 50_000)
        time.sleep(wait_s)
        assert step.sample(make_samplers(WAYS[:1]), rows.copy()) == first
    step.arm(samplers, 50_000)


def test_a_failure_in_one_row_is_raised(compiled: CDLL | None) -> None:
    class Broken(TokenSampler):
        def accept(self, token: int) -> Sampled:
            raise MemoryError

    step = StepSampler(4, compiled)
    samplers = [Broken(SamplingParams(temperature=2), (), None) for _ in range(64)]
    with pytest.raises(MemoryError):
        step.sample(samplers, np.zeros((64, 50_000), np.float32))
    step.close()


def threads_of(busy_cores: int) -> int:
    step = build_step_sampler(busy_cores)
    step.close()
    return step.threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (4, 2), (8, 4), (64, 8)])
def test_half_of_the_cores_sample_beside_a_gpu(
    cores: int, threads: int, compiled: CDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "usable_cores", lambda: cores)
    assert threads_of(0) == (threads if compiled else 1)


@pytest.mark.parametrize(("cores", "busy"), [(8, 8), (32, 24)])
def test_one_thread_samples_beside_a_cpu_engine(
    cores: int, busy: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_module, "usable_cores", lambda: cores)
    assert threads_of(busy) == 1


def test_a_warning_says_that_compiled_code_is_missing(
    compiled: CDLL | None, caplog: pytest.LogCaptureFixture
) -> None:
    threads_of(0)
    lines = [record.getMessage() for record in caplog.records]
    assert ["NumPy samples tokens" in line for line in lines] == ([] if compiled else [True])
