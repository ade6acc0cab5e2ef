"""The NumPy engine of the tests computes the same bits for any division into steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.engine.base import EngineOptions, Work, run_step
from rekindle.errors import ModelError
from tests.contract.actions import PROMPT, cold
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> NumpyEngine:
    path = write_numpy(tmp_path_factory.mktemp("model") / f"tiny{SUFFIX}", context=512)
    return NumpyEngine(EngineOptions(path=path, parallel=4))


@pytest.mark.parametrize("step", [1, 7, 63, 64, 150])
def test_state_does_not_depend_on_how_a_prompt_is_divided(engine: NumpyEngine, step: int) -> None:
    whole, divided = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    run_step(engine, [Work(whole, PROMPT, None)])
    for start in range(0, len(PROMPT), step):
        run_step(engine, [Work(divided, PROMPT[start : start + step], None)])
    stop = len(PROMPT)
    assert engine.sequences.export(divided, 0, stop) == engine.sequences.export(whole, 0, stop)
    engine.sequences.close(whole)
    engine.sequences.close(divided)


def test_answers_depend_on_early_tokens_too(engine: NumpyEngine) -> None:
    assert cold(engine, PROMPT) != cold(engine, [99, *PROMPT[1:]])


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other"}', '{"format": "tinynp 1"}'])
def test_a_damaged_file_is_a_model_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / f"bad{SUFFIX}"
    path.write_text(text)
    with pytest.raises(ModelError, match="bad"):
        NumpyEngine(EngineOptions(path=path))
