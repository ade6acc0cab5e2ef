"""Exact answers at each precision are bit-identical to cold ones, whatever was computed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rekindle.chat.prompt import Prompt
from rekindle.tokens import Tokens
from tests.contract.engines import write_wide_llama
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.talk import Answered, Talker
from tests.support.tiny import write_gemma3, write_lfm2

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": write_wide_llama,
    "gemma3": partial(write_gemma3, head_width=32),
    "lfm2": partial(write_lfm2, head_width=32),
    "numpy": write_numpy,
}
PROMPT = [3 + (7 * n) % 200 for n in range(230)]


@pytest.fixture(scope="module", params=MODELS)
def talker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Talker]:
    path = MODELS[request.param](tmp_path_factory.mktemp("model") / "tiny.gguf")
    is_numpy = request.param == "numpy"
    built = Talker(path, NumpyEngine, context=1024) if is_numpy else Talker(path, context=1024)
    yield built
    built.close()


def answer(talker: Talker, tokens: list[int], **asked: Any) -> Answered:
    return talker.answer(Prompt(Tokens.of(tokens)), max_tokens=5, **asked)


@pytest.mark.parametrize("start", [0, 64, 100])
@pytest.mark.parametrize("kv_bits", [8, 4])
def test_warm_equals_cold_bit_by_bit_and_after_a_restart(
    talker: Talker, tmp_path: Path, kv_bits: int, start: int
) -> None:
    known = {layout.bits for layout in talker.engine.capabilities.kv.values()}
    kv_bits = kv_bits if kv_bits in known else 8
    asked: dict[str, Any] = {"kv_bits": kv_bits, "kv_quantization_start": start, "exact": True}
    talker.forget()
    cold = answer(talker, PROMPT, **asked)
    talker.forget(folder=tmp_path)
    answer(talker, PROMPT[:200], exact=True)  # store state of other precisions first
    answer(talker, PROMPT[:150], kv_bits=kv_bits)
    answer(talker, PROMPT[:140], **asked)
    warm = answer(talker, PROMPT, **asked)
    again = answer(talker, PROMPT, **asked)
    talker.harness.close()
    talker.forget(folder=tmp_path)
    restarted = answer(talker, PROMPT, **asked)
    talker.harness.close()
    for each in (warm, again, restarted):
        assert each.same_bits(cold)
    assert warm.reply.reused >= 128
    assert restarted.reply.reused >= 192


def test_precisions_give_different_bits(talker: Talker) -> None:
    """Otherwise the test above would prove nothing."""
    talker.forget()
    default = answer(talker, PROMPT, exact=True)
    early = answer(talker, PROMPT, exact=True, kv_bits=8)
    late = answer(talker, PROMPT, exact=True, kv_bits=8, kv_quantization_start=128)
    assert not early.same_bits(default)
    assert not late.same_bits(early)
