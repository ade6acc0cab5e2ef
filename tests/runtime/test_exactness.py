"""An answer with reuse equals the answer without. These tests must never fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from rekindle.chat.prompt import Prompt
from rekindle.engine.base import EngineOptions
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.tokens import Tokens
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy
from tests.support.rounds import rounds
from tests.support.talk import Answered, ObservedEngine, Talker
from tests.support.tiny import write_gemma3, write_lfm2, write_llama, write_mamba
from tests.support.tiny_mlx import write_tiny_mlx

WORDS = [
    "the",
    "sea",
    "has",
    "many",
    "ships",
    "and",
    "every",
    "ship",
    "a",
    "name",
    "that",
    "nobody",
    "remembers",
    "twice",
]
CONVERSATIONS = 16


Model = tuple[Callable[[Path], Path], Callable[[EngineOptions], ObservedEngine]]


def _mlx(family: str) -> Model:
    return partial(write_tiny_mlx, family=family), MlxEngine


MODELS: dict[str, Model] = {  # full attention, sliding window, recurrent, hybrid, on each engine
    "llama": (write_llama, LlamaCppEngine),
    "gemma3": (write_gemma3, LlamaCppEngine),
    "mamba": (write_mamba, LlamaCppEngine),
    "lfm2": (write_lfm2, LlamaCppEngine),
    "numpy": (write_numpy, NumpyEngine),
    "mlx-llama": _mlx("llama"),
    "mlx-gemma3": _mlx("gemma3"),
    "mlx-mamba": _mlx("mamba"),
    "mlx-falcon_h1": _mlx("falcon_h1"),
}


def conversations(seeds: range) -> pytest.MarkDecorator:
    """Parametrise with each model. MLX gets fewer cases, because its steps take milliseconds."""
    some = seeds[: rounds(max(len(seeds) // 8, 1), len(seeds))]
    pairs = [
        (model, seed) for model in MODELS for seed in (some if model.startswith("mlx-") else seeds)
    ]
    return pytest.mark.parametrize(("talker", "seed"), pairs, indirect=["talker"])


@pytest.fixture(scope="module", params=MODELS)
def talker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Talker]:
    write, load = MODELS[request.param]
    built = Talker(write(tmp_path_factory.mktemp("model") / "tiny.gguf"), load, context=4096)
    yield built
    built.close()


def sentence(choose: random.Random, words: int) -> str:
    return " ".join(choose.choice(WORDS) for _ in range(words))


def conversation(seed: int) -> list[list[dict[str, str]]]:
    """The tokens added before each of 2 to 5 turns. Every second seed shares a system prompt."""
    choose = random.Random(seed)
    system = sentence(random.Random(seed % 2), 20 + 30 * (seed % 2))
    users = [
        {"role": "user", "content": sentence(choose, choose.randint(1, 25))}
        for _ in range(choose.randint(2, 5))
    ]
    return [[{"role": "system", "content": system}, users[0]], *([user] for user in users[1:])]


def play(talker: Talker, seed: int, *, disturb: bool, **ask: bool) -> list[tuple[Prompt, Answered]]:
    """Run a conversation on a warm server, with disturbances between its turns."""
    choose = random.Random(seed * 7 + 1)
    messages: list[dict[str, str]] = []
    said = []
    for turn in conversation(seed):
        messages += turn
        prompt = talker.prompt(messages)
        answered = talker.answer(prompt, max_tokens=choose.randint(3, 20), **ask)
        said.append((prompt, answered))
        messages.append({"role": "assistant", "content": answered.reply.text})
        if disturb:
            happen(talker, choose, messages)
    return said


def happen(talker: Talker, choose: random.Random, messages: list[dict[str, str]]) -> None:
    """Move state by eviction, sharing, truncation, idling or cancelling."""
    harness = talker.harness
    match choose.randrange(5):
        case 0:
            harness.offload()
            harness.kv.make_room(talker.engine.capabilities.pool_tokens)
        case 1:
            side = [*messages, {"role": "user", "content": "another branch"}]
            harness.ask(talker.prompt(side), max_tokens=4, exact=choose.random() < 0.5)
        case 2:
            harness.ask(talker.prompt(messages[:1] + messages[2:]), max_tokens=2)
        case 3:
            gone = harness.submit(talker.prompt([*messages, *messages]), exact=True)
            harness.scheduler.step()
            harness.cancel(gone)
        case 4:
            harness.offload()


def replay_cold(talker: Talker, prompt: Prompt, warm: Answered, **ask: bool) -> Answered:
    talker.forget()
    return talker.answer(prompt, max_tokens=len(warm.reply.tokens) or 1, reuse=False, **ask)


@pytest.mark.long
@conversations(range(CONVERSATIONS))
def test_exact_answers_are_bit_identical_to_cold_ones(talker: Talker, seed: int) -> None:
    """Compares logits and tokens of every turn after evictions, sharing and truncation."""
    talker.forget(ram_bytes=1 << 30 if seed % 3 else 300_000)
    played = play(talker, seed, disturb=True, exact=True)
    if seed % 3 and len(played[-1][0].tokens) > 2 * talker.engine.capabilities.step_tokens:
        assert any(answered.reply.reused for _, answered in played)
    for prompt, warm in played:
        cold = replay_cold(talker, prompt, warm, exact=True)
        assert cold.reply.reused == 0
        assert cold.logits[0].shape == warm.logits[0].shape
        compared = len(warm.reply.tokens)
        assert cold.reply.tokens[:compared] == warm.reply.tokens
        for mine, theirs in zip(warm.logits, cold.logits, strict=False):
            assert (mine == theirs).all()


@pytest.mark.long
@conversations(range(CONVERSATIONS))
def test_default_answers_equal_the_cold_greedy_text(talker: Talker, seed: int) -> None:
    """With small float weights, the best tokens differ by far more than rounding errors."""
    talker.forget()
    for prompt, warm in play(talker, seed, disturb=True):
        cold = replay_cold(talker, prompt, warm)
        assert cold.reply.tokens[: len(warm.reply.tokens)] == warm.reply.tokens


@pytest.mark.long
@pytest.mark.parametrize("tier", ["ram", "disk", "restart"])
@conversations(range(0, CONVERSATIONS, 4))
def test_exact_answers_are_bit_identical_through_every_tier(
    talker: Talker, seed: int, tier: str, tmp_path: Path
) -> None:
    """The state of the conversation is in RAM, on disk, or from before a restart."""
    small = {"ram_bytes": 60_000} if tier == "disk" else {}
    talker.forget(folder=tmp_path, idle_tokens=0, **small)
    played = play(talker, seed, disturb=False, exact=True)
    prompt, last = played[-1]
    if tier == "disk":
        talker.harness.ask([9] * 200, exact=True)  # evicts the conversation
        talker.harness.store.write_back.write_everything()
        talker.harness.flush()
    if tier == "restart":
        talker.harness.close()
        talker.forget(folder=tmp_path, idle_tokens=0)
    warm = talker.answer(prompt, max_tokens=len(last.reply.tokens) or 1, exact=True)
    if warm.reply.reused:
        assert warm.reply.finished.cache.tier == ("ram" if tier == "ram" else "disk")
    talker.harness.close()
    cold = replay_cold(talker, prompt, last, exact=True)
    assert warm.reply.reused == (len(prompt.tokens) - 1) // 64 * 64
    assert cold.reply.reused == 0
    assert warm.same_bits(cold)


def test_exact_answers_do_not_depend_on_concurrent_turns(talker: Talker) -> None:
    messages = [{"role": "user", "content": sentence(random.Random(5), 40)}]
    prompt = talker.prompt(messages)
    talker.forget()
    alone = talker.answer(prompt, exact=True, max_tokens=20)
    talker.forget()
    for number in range(3):
        talker.harness.submit([10 + number] * 90, max_tokens=30)
    crowded = talker.harness.submit(prompt, exact=True, max_tokens=20)
    talker.harness.run()
    assert crowded.tokens == alone.reply.tokens


@pytest.mark.parametrize("offset", [-1, 0, 1])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_prompts_around_a_block_boundary_are_exact(
    talker: Talker, blocks: int, offset: int
) -> None:
    size = talker.engine.capabilities.block_tokens
    tokens = tuple(random.Random(blocks).choices(range(3, 259), k=blocks * size + offset))
    prompt = Prompt(Tokens.of(tokens))
    talker.forget()
    first = talker.answer(prompt, exact=True)
    talker.harness.offload()
    second = talker.answer(prompt, exact=True)
    assert second.reply.reused == (len(tokens) - 1) // size * size
    assert first.same_bits(second)


@pytest.mark.parametrize("exact", [False, True])
def test_a_prompt_of_one_token_is_answered(talker: Talker, exact: bool) -> None:
    talker.forget()
    prompt = Prompt(Tokens.of([77]))
    first = talker.answer(prompt, exact=exact)
    assert talker.answer(prompt, exact=exact).reply.tokens == first.reply.tokens
