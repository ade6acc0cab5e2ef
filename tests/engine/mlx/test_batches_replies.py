"""Replies do not change when others join, pause or leave their batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from rekindle.engine.base import EngineOptions, KvType, Sequence, Work, run_step
from rekindle.engine.mlx import batches
from rekindle.engine.mlx.engine import MlxEngine
from rekindle.errors import EngineBroken
from tests.contract.actions import GREEDY, PROMPT, cold, decode, prefill
from tests.support.tiny_mlx import WINDOW, write_tiny_mlx

LENGTHS = (5, WINDOW + 10, 30, WINDOW - 1)  # of prompts: before, at and behind the window's end
REPLY_TOKENS = 12


@pytest.fixture(scope="module", params=["llama-wide", "gemma3", "mamba", "falcon_h1"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MlxEngine]:
    path = write_tiny_mlx(tmp_path_factory.mktemp("model") / "tiny", request.param)
    built = MlxEngine(EngineOptions(path=path, parallel=4, context_tokens=512))
    yield built
    built.close()


@pytest.fixture(autouse=True)
def empty(engine: MlxEngine) -> None:
    engine.sequences.reset()


def prompt(number: int) -> list[int]:
    return [3 + (7 * n + 31 * number) % 200 for n in range(LENGTHS[number])]


def types(engine: MlxEngine) -> list[KvType]:
    """The default type, and the smallest one if there are more."""
    return list(dict.fromkeys([engine.capabilities.kv_type, list(engine.capabilities.kv)[-1]]))


def step(engine: MlxEngine, replies: dict[Sequence, list[int]]) -> None:
    """Return the next token of each reply."""
    work = [Work(each, said[-1:], engine.sampler(GREEDY, [])) for each, said in replies.items()]
    for said, sampled in zip(replies.values(), run_step(engine, work), strict=True):
        assert sampled is not None
        said.append(sampled.token)


def check_replies(engine: MlxEngine, kv_type: KvType) -> None:
    """Replies join one after the other, pause, and leave at different times. Each equals the reply
    of a sequence that decodes alone."""
    numbers = range(len(LENGTHS))
    alone = [cold(engine, prompt(n), exact=False, kv_type=kv_type) for n in numbers]
    sequences = [engine.sequences.open(exact=False, kv_type=kv_type) for _ in numbers]
    replies: dict[Sequence, list[int]] = {}
    for turn in range(2 * REPLY_TOKENS + len(sequences)):
        if turn < len(sequences):
            replies[sequences[turn]] = [prefill(engine, sequences[turn], prompt(turn))]
        running = {
            each: said
            for n, (each, said) in enumerate(replies.items())
            if turn % 5 != n and len(said) <= REPLY_TOKENS
        }
        if running:
            step(engine, running)
    assert list(replies.values()) == alone


def test_each_reply_is_what_it_would_be_alone(engine: MlxEngine) -> None:
    for kv_type in types(engine):
        check_replies(engine, kv_type)


def test_replies_do_not_depend_on_the_composition_of_batches(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows move between batches at every step, which lengths rarely cause."""
    chosen = random.Random(0)

    def divide(lengths: Mapping[Sequence, int], *_limits: int) -> list[list[Sequence]]:
        rows = list(lengths)
        chosen.shuffle(rows)
        cut = chosen.randint(0, len(rows))
        return [group for group in (rows[:cut], rows[cut:]) if group]

    monkeypatch.setattr(batches, "by_length", divide)
    for kv_type in types(engine):
        check_replies(engine, kv_type)


def test_a_row_can_be_exported_and_shared_while_its_batch_decodes(engine: MlxEngine) -> None:
    alone = [cold(engine, prompt(n), exact=False) for n in (0, 1)]
    one, two = (engine.sequences.open(exact=False) for _ in range(2))
    replies: dict[Sequence, list[int]] = {
        each: [prefill(engine, each, prompt(n))] for n, each in enumerate((one, two))
    }
    for _ in range(3):
        step(engine, replies)
    resumable = not engine.capabilities.can_truncate
    blob = engine.sequences.export(one, 0, one.length, resumable=resumable)
    restored, shared = (engine.sequences.open(exact=False) for _ in range(2))
    engine.sequences.restore(restored, blob, one.length, resumable=resumable)
    engine.sequences.share(two, two.length, shared)
    rest = REPLY_TOKENS - 3
    said = [*replies[one][:-1], *decode(engine, restored, replies[one][-1], rest)]
    other = [*replies[two][:-1], *decode(engine, shared, replies[two][-1], rest)]
    for _ in range(rest):
        step(engine, replies)
    assert [said, other] == alone == list(replies.values())


def test_a_row_leaves_when_its_sequence_is_closed(engine: MlxEngine) -> None:
    expected = cold(engine, prompt(0), exact=False)
    sequences = [engine.sequences.open(exact=False) for _ in range(3)]
    replies: dict[Sequence, list[int]] = {
        each: [prefill(engine, each, prompt(n))] for n, each in enumerate(sequences)
    }
    step(engine, replies)
    for gone in sequences[1:]:
        engine.sequences.close(gone)
        del replies[gone]
        step(engine, replies)
    for _ in range(REPLY_TOKENS - 3):
        step(engine, replies)
    assert replies[sequences[0]] == expected
    engine.sequences.close(sequences[0])
    assert engine.sequences.free_tokens() == engine.capabilities.pool_tokens


def test_after_a_failed_step_the_engine_is_empty_and_works(
    engine: MlxEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cold(engine, PROMPT, exact=False)
    sequences = [engine.sequences.open(exact=False) for _ in range(2)]
    replies: dict[Sequence, list[int]] = {
        each: [prefill(engine, each, PROMPT[:20])] for each in sequences
    }

    def fail(*_arguments: Any, **_options: Any) -> None:
        raise RuntimeError("[malloc] Unable to allocate 1 bytes.")

    with monkeypatch.context() as patch:
        patch.setattr(type(engine._model), "__call__", fail)
        with pytest.raises(EngineBroken, match="allocate"):
            step(engine, replies)
    assert engine.sequences.free_tokens() == engine.capabilities.pool_tokens
    assert cold(engine, PROMPT, exact=False) == expected


def test_closed_sequences_leave_no_memory_behind(tmp_path: Path) -> None:
    path = write_tiny_mlx(tmp_path / "tiny")
    built = MlxEngine(EngineOptions(path=path, parallel=4, context_tokens=512))
    held = set()
    for _ in range(3):
        sequences = [built.sequences.open(exact=False) for _ in range(3)]
        replies: dict[Sequence, list[int]] = {
            each: [prefill(built, each, PROMPT)] for each in sequences
        }
        for _ in range(4):
            step(built, replies)
        for each in sequences:
            built.sequences.close(each)
        built.sequences.release_idle()
        held.add(mx.get_active_memory())
    assert len(held) == 1
    built.close()
