"""KV quantisation on a real model: storage, requantisation, answers and exactness."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rekindle.chat.prompt import Prompt
from tests.contract.engines import write_wide_llama
from tests.support.server import Server, running
from tests.support.talk import Talker
from tests.support.tiny_mlx import write_tiny_mlx

# The next word of this text is never in doubt. The best token leads by at least 2.6 logits at each
# precision, so rounding decides nothing.
NUMBERS = "one two three four five " * 18
START = 64
SHARE = {8: 0.57, 4: 0.32}  # share of the bytes of f16


@pytest.fixture(scope="module")
def talker(smollm2_path: Path) -> Iterator[Talker]:
    built = Talker(smollm2_path, threads=1, context=512)
    yield built
    built.close()


def test_a_quantised_conversation_takes_less_space(talker: Talker) -> None:
    stored = {}
    for kv_bits in (None, 8, 4):
        talker.forget()
        talker.answer(talker.encoder.text(NUMBERS[:300]), max_tokens=1, kv_bits=kv_bits)
        talker.harness.kv.offload_all()
        stored[kv_bits] = talker.harness.store.size_bytes(None)
    for kv_bits, share in SHARE.items():
        assert stored[kv_bits] < share * stored[None]


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_a_requantised_conversation_answers_like_one_computed_at_that_precision(
    talker: Talker, kv_bits: int
) -> None:
    whole = talker.encoder.text(NUMBERS.strip())
    first = Prompt(whole.tokens[:45])
    assert len(first.tokens) < START < len(whole.tokens)
    talker.forget()
    recomputed = talker.answer(whole, max_tokens=12, kv_bits=kv_bits).reply
    talker.forget()
    later: dict[str, Any] = {"kv_bits": kv_bits, "kv_quantization_start": START}
    begun = talker.answer(first, max_tokens=1, **later).reply
    counts = talker.harness.kv.counts
    computed = counts.computed_tokens
    crossed = talker.answer(whole, max_tokens=12, **later).reply
    kv_bits_used = [reply.finished.cache.kv_bits for reply in (begun, crossed)]
    assert kv_bits_used == [16, kv_bits]
    assert crossed.reused == len(first.tokens)
    said = crossed.finished.completion_tokens
    assert counts.computed_tokens - computed <= len(whole.tokens) - crossed.reused + said
    assert counts.requantised_tokens == START
    assert (
        crossed.text
        == recomputed.text
        == " one two three four five one two three four five one two"
    )


@pytest.mark.parametrize("kv_bits", [8, 4])
def test_exact_answers_beyond_the_start_are_bit_identical_to_cold_ones_after_a_restart_too(
    talker: Talker, tmp_path: Path, kv_bits: int
) -> None:
    asked: dict[str, Any] = {"kv_bits": kv_bits, "kv_quantization_start": START, "exact": True}
    prompt = talker.encoder.text(NUMBERS.strip())
    talker.forget(folder=tmp_path)
    cold = talker.answer(prompt, max_tokens=3, **asked)
    warm = talker.answer(prompt, max_tokens=3, **asked)
    talker.harness.close()
    talker.forget(folder=tmp_path)
    restarted = talker.answer(prompt, max_tokens=3, **asked)
    talker.harness.close()
    for again in (warm, restarted):
        assert again.reply.reused == START
        assert again.same_bits(cold)


FLAGS = (
    *("--threads", "1", "--max-model-len", "512"),
    *("--kv-bits", "8", "--kv-quantization-start", "40"),
)
LONG = [3 + (7 * n) % 200 for n in range(100)]
ASKED: list[dict[str, Any]] = [
    {},
    {"prompt": LONG[:30]},
    {"kv_bits": 4, "kv_quantization_start": 0, "kv_group_size": 64},
    {"kv_bits": 4, "quantized_kv_start": 60, "cache_exact": True},
    {"kv_quantization_start": 10_000},
    {"kv_group_size": 32},
]
CELLS = {  # resulting bits and group size; llama.cpp has only one group size
    "llama.cpp": [(8, 32), (16, None), (4, 32), (4, 32), (16, None), (8, 32)],
    "mlx": [(8, 64), (32, None), (4, 64), (4, 64), (32, None), (8, 32)],
}


def complete(server: Server, fields: dict[str, Any]) -> dict[str, Any]:
    body = {"prompt": LONG, "max_tokens": 6, "temperature": 0, **fields}
    with server.client() as client:
        answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("engine", list(CELLS))
def test_a_server_answers_in_several_precisions_concurrently_and_after_a_restart(
    tmp_path: Path, engine: str
) -> None:
    """The server's default is 8 bits after 40 tokens."""
    if engine == "mlx":
        model = write_tiny_mlx(tmp_path / "wide", "llama-wide")
    else:
        model = write_wide_llama(tmp_path / "wide.gguf")
    said = []
    for start in range(2):
        with running(model, tmp_path, *FLAGS) as server, ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda each: complete(server, each), ASKED))
        for expected, answer in zip(CELLS[engine], answers, strict=True):
            report = answer["x_cache"]
            assert (report["kv_bits"], report.get("kv_group_size")) == expected
            assert report["reused_tokens"] >= (29 if start else 0)
        log = server.log.read_text()
        assert "KV cache of turns with more than 40 tokens: 8 bits" in log
        said.append(answers[3]["choices"][0]["text"])  # the exact answer
    assert said[0] == said[1]
