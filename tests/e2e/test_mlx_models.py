"""One server runs models of both formats and an adapter, and both engines agree on SmolLM2."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from rekindle.engine.base import EngineOptions, Row, Work, run_step
from rekindle.engine.registry import load_engine
from rekindle.protocol.requests import SamplingParams
from tests.support.gguf_float import write_gguf_as_float
from tests.support.gguf_folder import write_gguf_as_folder
from tests.support.rounds import rounds
from tests.support.server import Server, running
from tests.support.talk import ObservedEngine
from tests.support.tiny import write_llama
from tests.support.tiny_mlx import write_tiny_adapter, write_tiny_mlx

LONG = "The sea has many ships, and every ship has a name that nobody remembers twice. " * 2
ALIKE_TOKENS = 8  # compared tokens of each answer
#: llama.cpp rounds activations to 8 bits before it multiplies them with quantised weights. MLX does
#: not. The logits of likely tokens therefore differ by up to 0.95 on these questions. The engines
#: choose differently only where two candidates are closer than that. Measured: eight of ten equal.
CLOSE_CALL = 1.0
#: With the same weights as floats, llama.cpp rounds nothing. Then ten of ten answers are equal, and
#: no logit of the vocabulary differs by more than 0.037 (1.44 with rounding).
LAST_BITS = 0.2
QUESTIONS = [
    "Say hello.",
    "What is the capital of France?",
    "What colour is the sky?",
    "How many legs has a spider?",
    "Name a fruit.",
    "What is two plus two?",
    "Who wrote Hamlet?",
    "What do bees make?",
    "Is water wet?",
    "What is the opposite of hot?",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a tiny GGUF file and a tiny MLX folder."""
    folder = tmp_path_factory.mktemp("both")
    file, model = write_llama(folder / "tiny-gguf.gguf"), write_tiny_mlx(folder / "tiny-mlx")
    with running(file, folder, "--model", str(model)) as started:
        yield started


def chat(server: Server, model: str, *turns: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == httpx.codes.OK, answer.text
    found: dict[str, Any] = answer.json()
    return found


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_one_server_runs_models_of_both_formats(server: Server) -> None:
    listed = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny-gguf", "tiny-mlx"]
    assert content(chat(server, "tiny-gguf", LONG)) != content(chat(server, "tiny-mlx", LONG))


@pytest.mark.parametrize("model", ["tiny-gguf", "tiny-mlx"])
def test_each_model_reuses_the_first_turn_in_the_second(server: Server, model: str) -> None:
    question = f"{model}, {LONG}"
    first = chat(server, model, question)
    assert cached(first) < 16  # the common start of every conversation
    asked = (question, content(first), "And then?")
    second = chat(server, model, *asked)
    assert cached(second) >= first["usage"]["prompt_tokens"]
    cold = chat(server, model, *asked, use_kv_cache=False)
    assert content(second) == content(cold)


def test_an_adapter_changes_the_answer_and_shares_no_state(server: Server, tmp_path: Path) -> None:
    """Both servers use the same cache folder."""
    model = write_tiny_mlx(tmp_path / "tiny-mlx")
    adapter = write_tiny_adapter(tmp_path / "lora", model)
    plain = chat(server, "tiny-mlx", LONG)
    state = ("--cache-dir", str(server.log.parent / "kv"))
    with running(model, tmp_path, "--adapter", str(adapter), *state) as other:
        adapted = chat(other, "tiny-mlx", LONG)
        again = chat(other, "tiny-mlx", LONG)
    assert cached(adapted) == 0 < cached(again)
    assert content(adapted) == content(again) != content(plain)


def test_folders_that_differ_only_in_their_template_both_keep_state(tmp_path: Path) -> None:
    """Their state is interchangeable, but each process needs a cache folder of its own."""
    plain, other = write_tiny_mlx(tmp_path / "plain"), write_tiny_mlx(tmp_path / "other")
    about = json.loads((other / "tokenizer_config.json").read_text())
    about["chat_template"] = "Another template. " + about["chat_template"]
    (other / "tokenizer_config.json").write_text(json.dumps(about))
    flags = ("--model", str(other))
    with running(plain, tmp_path, *flags) as server:
        first = {model: chat(server, model, LONG) for model in ("plain", "other")}
    assert "is using the cache folder" not in server.log.read_text()
    with running(plain, tmp_path, *flags) as server:
        for model, cold in first.items():
            again = chat(server, model, LONG)
            assert content(again) == content(cold)
            assert cached(again) == cold["usage"]["prompt_tokens"] - 1


def test_a_picture_for_a_text_only_folder_is_refused_with_a_remedy(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    body = {"model": "tiny-mlx", "messages": [{"role": "user", "content": [part]}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == httpx.codes.BAD_REQUEST
    assert "--mmproj" in answer.json()["error"]["message"]


def rows(engine: ObservedEngine, question: str, answer: Sequence[int] = ()) -> list[Row]:
    """The logits after each token of the greedy answer, or of a given one."""
    asked = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    tokens = engine.tokenizer.encode(asked, special=True)
    sequence = engine.sequences.open(exact=False)
    sampler = engine.sampler(SamplingParams(temperature=0), tokens)
    found: list[Row] = []
    engine.observe = lambda _sequence, row: found.append(row.copy())
    for place in range(ALIKE_TOKENS):
        [sampled] = run_step(engine, [Work(sequence, tokens, sampler)])
        assert sampled
        tokens = [answer[place] if answer else sampled.token]
    engine.sequences.close(sequence)
    return found


def chosen(found: list[Row]) -> list[int]:
    return [int(row.argmax()) for row in found]


def observed(path: Path) -> ObservedEngine:
    options = EngineOptions(path=path, parallel=1, threads=1, context_tokens=512)
    return cast(ObservedEngine, load_engine(options))


@pytest.mark.long
def test_a_real_model_gives_the_same_answers_with_both_engines(
    smollm2_path: Path, tmp_path: Path
) -> None:
    """Where they choose different tokens, both engines rate the two almost equal.

    The only difference between the engines is llama.cpp's rounding.
    """
    folder = write_gguf_as_folder(smollm2_path, tmp_path / "smollm2")
    floats = write_gguf_as_float(smollm2_path, tmp_path / "smollm2.f32.gguf")
    llama, unrounded, mlx = (observed(path) for path in (smollm2_path, floats, folder))
    questions = QUESTIONS[: rounds(1, len(QUESTIONS))]
    alike = 0
    for question in questions:
        expected = rows(llama, question)
        answer = chosen(expected)
        found = rows(mlx, question, answer)
        alike += chosen(found) == answer
        for theirs, ours in zip(expected, found, strict=True):
            one, other = theirs.argmax(), ours.argmax()
            assert abs(theirs[one] - theirs[other]) < CLOSE_CALL, question
            assert abs(ours[one] - ours[other]) < CLOSE_CALL, question
        for theirs, ours in zip(rows(unrounded, question, answer), found, strict=True):
            assert abs(theirs - ours).max() < LAST_BITS, question
    for engine in (llama, unrounded, mlx):
        engine.close()
    assert alike > len(questions) // 2
