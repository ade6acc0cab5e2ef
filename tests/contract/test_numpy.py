"""What the tests' own engine promises beyond the contract: the same bits whatever the step, and
choices as the parameters of sampling have them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rekindle.engine.base import EngineOptions, Work
from rekindle.errors import ModelError
from rekindle.protocol.requests import SamplingParams
from tests.contract.actions import PROMPT, cold
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.numpy_engine.sampler import NumpySampler

ROW = np.array([0.0, 3.0, 2.0, 1.0, -1.0], np.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NumpyEngine:
    path = write_numpy(tmp_path_factory.mktemp("model") / f"tiny{SUFFIX}", context=512)
    return NumpyEngine(EngineOptions(path=path, parallel=4))


def choices(params: SamplingParams, *, prompt: tuple[int, ...] = (), count: int = 200) -> set[int]:
    sampler = NumpySampler(params, prompt, None)
    return {sampler.sample(ROW).token for _ in range(count)}


@pytest.mark.parametrize("step", [1, 7, 63, 64, 150])
def test_state_does_not_depend_on_how_a_prompt_is_divided(engine: NumpyEngine, step: int) -> None:
    whole, divided = engine.open(exact=False), engine.open(exact=False)
    engine.step([Work(whole, PROMPT, None)])
    for start in range(0, len(PROMPT), step):
        engine.step([Work(divided, PROMPT[start : start + step], None)])
    stop = len(PROMPT)
    assert engine.export(divided, 0, stop) == engine.export(whole, 0, stop)
    engine.close_sequence(whole)
    engine.close_sequence(divided)


def test_answers_depend_on_early_tokens_too(engine: NumpyEngine) -> None:
    assert cold(engine, PROMPT) != cold(engine, [99, *PROMPT[1:]])


def test_temperature_follows_its_seed() -> None:
    params = SamplingParams(temperature=1, top_p=1, seed=7)
    one, other = (NumpySampler(params, (), None) for _ in range(2))
    rows = [one.sample(ROW).token for _ in range(50)]
    assert rows == [other.sample(ROW).token for _ in range(50)]
    assert len(set(rows)) > 2


@pytest.mark.parametrize(
    ("params", "left"),
    [
        (SamplingParams(temperature=0), {1}),
        (SamplingParams(temperature=0, logit_bias={4: 10.0}), {4}),
        (SamplingParams(temperature=1, seed=1, top_p=1, top_k=2), {1, 2}),
        (SamplingParams(temperature=1, seed=1, top_p=0.7), {1, 2}),
        (SamplingParams(temperature=1, seed=1, top_p=1, min_p=0.1), {1, 2, 3}),
        (SamplingParams(temperature=9, seed=1, top_p=1), {0, 1, 2, 3, 4}),
    ],
    ids=["greedy", "bias", "top k", "top p", "min p", "hot"],
)
def test_parameters_leave_the_tokens_they_should(params: SamplingParams, left: set[int]) -> None:
    assert choices(params) == left


def test_penalties_move_on_from_what_was_said() -> None:
    presence = SamplingParams(temperature=0, presence_penalty=1.5)
    assert choices(presence, count=3) == {1, 2}
    frequency = SamplingParams(temperature=0, frequency_penalty=2.0)
    assert choices(frequency, count=6) == {0, 1, 2, 3}
    repetition = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert choices(repetition, prompt=(1,), count=1) == {2}


def test_logprobs_are_the_models_own() -> None:
    biased = SamplingParams(temperature=0, logit_bias={4: 10.0}, top_logprobs=2)
    sampled = NumpySampler(biased, (), None).sample(ROW)
    expected = ROW - np.log(np.exp(ROW).sum())
    assert sampled.token == 4
    assert sampled.logprob == pytest.approx(expected[4], abs=1e-6)
    assert [token for token, _ in sampled.top] == [1, 2]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}', '{"format": "tinynp 1"}'])
def test_a_damaged_file_is_a_model_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"bad{SUFFIX}"
    path.write_text(text)
    with pytest.raises(ModelError, match="bad"):
        NumpyEngine(EngineOptions(path=path))
