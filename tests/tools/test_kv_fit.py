"""The table of docs/gpu.md about what fits into a GPU."""

from __future__ import annotations

from pathlib import Path

from rekindle.engine.llamacpp.sizes import PARK_FRACTION
from rekindle.protocol.settings import RuntimeSettings
from tools.kv_fit import GIB, MODELS, Fit, fit, table

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_the_page_has_the_table_that_the_command_prints() -> None:
    lines = table([8, 16, 24, 80], RuntimeSettings().kv_fraction, PARK_FRACTION, 16)
    assert "\n".join(lines) in PAGE.read_text()


def test_pool_and_parking_are_shares_of_the_memory_without_weights() -> None:
    shape = MODELS["Qwen3 8B"]
    assert shape.token_bytes(16) == 147_456
    left_bytes = 24 * GIB - GIB // 2 - shape.weights_bytes
    found = fit(shape, 24 * GIB, 0.4, 0.2, 16)
    assert found == Fit(int(0.4 * left_bytes / 147_456), int(0.2 * left_bytes / 147_456))


def test_a_model_without_memory_to_compute_does_not_fit() -> None:
    assert fit(MODELS["Llama 3.3 70B"], 24 * GIB, 0.3, 0.3, 16) is None
    assert fit(MODELS["Qwen3 8B"], 8 * GIB, 0.5, 0.45, 16) is None


def test_a_quantised_cache_holds_more_tokens() -> None:
    sixteen, eight = (fit(MODELS["Qwen3 4B"], 16 * GIB, 0.3, 0.3, bits) for bits in (16, 8))
    assert sixteen is not None
    assert eight is not None
    assert 1.8 < eight.pool / sixteen.pool < 2
