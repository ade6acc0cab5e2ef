"""An answer with reuse equals the answer without, with pictures in the prompt, on real engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.protocol.requests import SamplingParams
from rekindle.runtime.encode.request import EncodedRequest
from tests.support.harness import Reply, RuntimeHarness
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.pictures import drawn
from tests.support.talk import ObservedEngine
from tests.support.tiny import write_gemma3, write_lfm2, write_llama
from tests.support.tiny_projector import (
    write_gemma3_projector,
    write_llava_projector,
    write_qwen2vl_projector,
)
from tests.support.tiny_qwen import write_qwen2vl, write_qwen35
from tests.support.tiny_vision import write_tiny_vision

Write = Callable[[Path], Path]
MODELS: dict[str, tuple[Write, Write | None]] = {  # with projectors
    "llama": (write_llama, write_llava_projector),
    "gemma3": (write_gemma3, write_gemma3_projector),  # a picture is more than a canonical step
    "qwen2vl": (write_qwen2vl, write_qwen2vl_projector),  # a picture's tokens have one position
    "lfm2": (write_lfm2, write_llava_projector),  # state that cannot be truncated
    "qwen35": (write_qwen35, write_qwen2vl_projector),  # both
    "numpy": (write_numpy, None),
}
MLX_FAMILIES = (
    "gemma3",  # state that cannot be truncated, and pictures that are computed whole
    "qwen3_vl",  # a picture's tokens have one position, and vectors for several layers
    "smolvlm",  # several tiles
)
IMAGE = {"type": "image"}
PICTURES = [drawn(0), drawn(1, 160, 96), drawn(2, 96, 160)]


@pytest.fixture(scope="module", params=[*MODELS, *(f"mlx-{each}" for each in MLX_FAMILIES)])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObservedEngine]:
    folder = tmp_path_factory.mktemp("model")
    if request.param.startswith("mlx-"):
        path = write_tiny_vision(folder / "tiny", request.param.removeprefix("mlx-"))
        built: ObservedEngine = MlxEngine(
            EngineOptions(path=path, mmproj=path, parallel=4, context_tokens=2048)
        )
        yield built
        built.close()
        return
    write, write_projector = MODELS[request.param]
    options = EngineOptions(
        path=write(folder / "tiny.gguf"),
        mmproj=write_projector(folder / "mmproj.gguf") if write_projector else None,
        parallel=4,
        threads=1,
        context_tokens=2048,
    )
    built = LlamaCppEngine(options) if write_projector else NumpyEngine(options)
    yield built
    built.close()


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def observed(engine: ObservedEngine, run: Callable[[], Reply]) -> tuple[Reply, list[Any]]:
    rows: list[Any] = []
    engine.observe = lambda _sequence, logits: rows.append(logits.copy())
    reply = run()
    engine.observe = None
    return reply, rows


def talk(harness: RuntimeHarness, engine: ObservedEngine) -> list[tuple[Reply, list[Any]]]:
    """Three turns with a picture each; state leaves the engine's memory between them."""
    messages: list[dict[str, Any]] = []
    answers = []
    for number in range(3):
        text = "what is on this picture, and what was on the others? " * 2
        messages.append(user(text[: 20 + 17 * number], IMAGE, text))
        shown = PICTURES[: number + 1]
        ask = partial(harness.ask_chat, list(messages), shown, exact=True)
        answer = observed(engine, ask)
        answers.append(answer)
        messages.append({"role": "assistant", "content": answer[0].text})
        harness.ask_chat([*messages, user("and now?")], shown)
        harness.offload()
        harness.kv.make_room(harness.capabilities.pool_tokens)
    return answers


def test_penalties_look_back_over_the_text_around_pictures(engine: ObservedEngine) -> None:
    """No vocabulary has the ids of a picture."""
    engine.sequences.reset()
    harness = RuntimeHarness(engine)
    sampling = SamplingParams(temperature=0, repetition_penalty=1.3, repetition_context_size=500)
    messages = [user("a picture:", IMAGE, "what is it?")]
    reply = harness.ask_chat(messages, PICTURES[:1], sampling=sampling)
    assert reply.finished
    harness.close()


def run(harness: RuntimeHarness, encoded: EncodedRequest) -> Reply:
    reply = harness.take(encoded)
    harness.run(reply)
    return reply


def test_exact_answers_about_pictures_are_bit_identical_to_cold_ones(
    engine: ObservedEngine,
) -> None:
    harness = RuntimeHarness(engine)
    answers = talk(harness, engine)
    assert any(reply.reused for reply, _ in answers)
    assert harness.pictures.counts.encoded == len(PICTURES)
    harness.close()
    for warm, rows in answers:
        engine.sequences.reset()
        harness = RuntimeHarness(engine)
        request = structs.replace(warm.turn.request, turn=1, reuse=False)
        encoded = replace(warm.turn.encoded, request=request)

        cold, cold_rows = observed(engine, partial(run, harness, encoded))
        assert cold.tokens == warm.tokens
        assert len(cold_rows) == len(rows)
        assert all(np.array_equal(one, other) for one, other in zip(rows, cold_rows, strict=True))
