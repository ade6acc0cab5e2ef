"""Every engine keeps these promises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rekindle.engine.base import Engine, Work, run_step
from rekindle.engine.sampling.sampler import TokenSampler
from rekindle.errors import CorruptBlock, PoolFull
from rekindle.protocol.requests import SamplingParams
from tests.contract.actions import GREEDY, PROMPT, cold, decode, prefill
from tests.contract.engines import every_engine

pytestmark = every_engine


def test_the_same_tokens_give_the_same_answer(engine: Engine) -> None:
    assert cold(engine, PROMPT) == cold(engine, PROMPT)


def test_sharing_into_a_used_sequence_is_refused(engine: Engine) -> None:
    source, into = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    prefill(engine, source, PROMPT[:20])
    prefill(engine, into, PROMPT[:10])
    with pytest.raises(ValueError, match="empty"):
        engine.sequences.share(source, 10, into)


def test_several_sequences_are_computed_in_one_step(engine: Engine) -> None:
    sequences = [engine.sequences.open(exact=False) for _ in range(3)]
    work = [
        Work(sequence, PROMPT[:10], engine.sampler(GREEDY, PROMPT[:10])) for sequence in sequences
    ]
    first, second, third = run_step(engine, work)
    assert first is not None
    assert first == second == third
    assert [sequence.length for sequence in sequences] == [10, 10, 10]


def test_each_item_of_a_step_gets_its_own_token(engine: Engine) -> None:
    """For any lengths of the items, and if some have no sampler."""
    work = [
        Work(engine.sequences.open(exact=False), PROMPT[:length], sampler)
        for length, sampler in (
            (7, engine.sampler(GREEDY, [])),
            (12, None),
            (1, engine.sampler(GREEDY, [])),
        )
    ]
    first, nothing, last = run_step(engine, work)
    assert nothing is None
    for item in work:
        engine.sequences.close(item.sequence)
    for chosen, length in ((first, 7), (last, 1)):
        assert chosen is not None
        assert chosen.token == cold_token(engine, PROMPT[:length])


def cold_token(engine: Engine, tokens: list[int]) -> int:
    sequence = engine.sequences.open(exact=False)
    token = prefill(engine, sequence, tokens)
    engine.sequences.close(sequence)
    return token


def test_the_number_of_open_sequences_is_limited(engine: Engine) -> None:
    """One exact sequence more than may compute can be open, as the target of a requantisation."""
    for exact, most in (
        (False, engine.capabilities.sequences),
        (True, engine.capabilities.exact_sequences + 1),
    ):
        for _ in range(most):
            engine.sequences.open(exact=exact)
        with pytest.raises(PoolFull):
            engine.sequences.open(exact=exact)


def test_a_full_pool_changes_nothing(engine: Engine) -> None:
    capabilities = engine.capabilities
    first = engine.sequences.open(exact=False)
    prefill(engine, first, PROMPT[:20])
    while engine.sequences.free_tokens() >= capabilities.batch_tokens:
        filler = engine.sequences.open(exact=False)
        room = (
            min(engine.sequences.free_tokens(), capabilities.context_tokens)
            // capabilities.batch_tokens
        )
        for _ in range(room):
            run_step(engine, [Work(filler, [5] * capabilities.batch_tokens, None)])
    free = engine.sequences.free_tokens()
    with pytest.raises(PoolFull):
        run_step(engine, [Work(first, [5] * (free + 1), None)])
    assert engine.sequences.free_tokens() == free
    assert first.length == 20
    assert len(decode(engine, first, 5, 3)) == 4


@pytest.mark.parametrize("change", [b"", b"x", None], ids=["empty", "longer", "shorter"])
def test_a_block_of_the_wrong_length_never_reaches_the_engine(
    engine: Engine, change: bytes | None
) -> None:
    size = engine.capabilities.block_tokens
    sequence = engine.sequences.open(exact=False)
    prefill(engine, sequence, PROMPT)
    blob = bytes(engine.sequences.export(sequence, 0, size))
    bad = {b"": b"", b"x": blob + b"x", None: blob[:-1]}[change]
    into = engine.sequences.open(exact=False)
    free = engine.sequences.free_tokens()
    with pytest.raises(CorruptBlock):
        engine.sequences.restore(into, bad, size)
    assert (into.length, engine.sequences.free_tokens()) == (0, free)
    engine.sequences.restore(into, blob, size)


def test_a_reset_engine_starts_empty_and_works(engine: Engine) -> None:
    expected = cold(engine, PROMPT)
    total = engine.sequences.free_tokens()
    prefill(engine, engine.sequences.open(exact=False), PROMPT)
    engine.sequences.open(exact=True)
    engine.sequences.reset()
    assert engine.sequences.free_tokens() == total
    assert cold(engine, PROMPT) == expected


def test_the_kv_type_in_use_has_a_layout(engine: Engine) -> None:
    known = engine.capabilities
    layout = known.kv[known.kv_type]
    assert known.kv_layout is layout
    assert layout.fingerprint
    assert (layout.checkpoint_bytes == 0) == known.can_truncate
    assert known.step_tokens % known.block_tokens == 0
    assert "text" in known.modalities


def test_each_token_of_a_block_adds_the_same_bytes(engine: Engine) -> None:
    sequence = engine.sequences.open(exact=False)
    prefill(engine, sequence, PROMPT[:20])
    sizes = [len(engine.sequences.export(sequence, 0, stop)) for stop in (1, 2, 20)]
    each = engine.capabilities.kv_layout.token_bytes
    assert [size - sizes[0] for size in sizes] == [0, each, 19 * each]


def test_the_tokenizer_knows_every_id_of_the_model(engine: Engine) -> None:
    tokenizer = engine.tokenizer
    assert all(
        len(tokenizer.piece(token, special=True)) <= max(tokenizer.longest_bytes, 4)
        for token in range(tokenizer.size)
    )
    assert all(0 <= token < tokenizer.size for token in tokenizer.end_tokens)
    for text, token in tokenizer.control_texts.items():
        assert tokenizer.encode(text, special=True) == [token]
        assert tokenizer.encode(text, special=False) != [token]
        assert tokenizer.piece(token, special=False) == b""
    assert tokenizer.text(None) == ""


def test_text_comes_back_from_its_tokens(engine: Engine) -> None:
    tokens = engine.tokenizer.encode("12 34 56 ", special=True)
    pieces = (engine.tokenizer.piece(token, special=False) for token in tokens)
    assert b"".join(pieces) == b"12 34 56 "


class OnlyEven:
    """Allows even tokens."""

    trouble: str | None = None

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def replay(self, tokens: Sequence[int]) -> None:
        self.accepted = list(tokens)

    def mask(self, logits: Any) -> None:
        logits[1::2] = -np.inf

    def accept(self, token: int) -> None:
        self.accepted.append(token)


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1, seed=1)], ids=["greedy", "sampled"]
)
def test_a_mask_limits_every_choice_and_is_told_the_token(
    engine: Engine, sampling: SamplingParams
) -> None:
    only_even = OnlyEven()
    sampler = engine.sampler(sampling, PROMPT[:10], only_even)
    sequence = engine.sequences.open(exact=True)
    tokens = list(PROMPT[:10])
    for _ in range(8):
        [sampled] = run_step(engine, [Work(sequence, tokens[sequence.length :], sampler)])
        assert sampled is not None
        tokens.append(sampled.token)
    assert only_even.accepted == tokens[10:]
    assert all(token % 2 == 0 for token in tokens[10:])


@pytest.mark.parametrize(
    "sampling", [GREEDY, SamplingParams(temperature=1, seed=1)], ids=["greedy", "sampled"]
)
def test_bans_and_dry_hold_for_every_choice(engine: Engine, sampling: SamplingParams) -> None:
    if not isinstance(engine.sampler(sampling, []), TokenSampler):
        return  # the fake engine reads no logits

    def reply(**fields: Any) -> list[int]:
        sampler = engine.sampler(replace(sampling, **fields), PROMPT[:10])
        sequence = engine.sequences.open(exact=True)
        tokens = list(PROMPT[:10])
        for _ in range(24):
            [sampled] = run_step(engine, [Work(sequence, tokens[sequence.length :], sampler)])
            assert sampled is not None
            tokens.append(sampled.token)
        engine.sequences.close(sequence)
        return tokens[10:]

    said = reply()
    assert reply(typical_p=1.0, dry_multiplier=0.0) == said
    assert said[0] not in reply(bad_words_tokens=[said[:1]])
    banned = reply(min_tokens=5, end_tokens=said[:5], typical_p=0.9)
    assert not {*said[:5]} & {*banned[:5]}
    dry = reply(dry_multiplier=1e6, dry_allowed_length=1)
    pairs = [*pairwise(dry)]
    assert len({*pairs}) == len(pairs)  # no token follows another one twice


@pytest.mark.parametrize("count", [1, 3])
def test_multi_step_decoding_gives_the_same_replies_as_single_steps(
    engine: Engine, count: int
) -> None:
    prompts = [PROMPT[: 8 + at] for at in range(count)]
    expected = [cold_reply(engine, prompt, 12) for prompt in prompts]
    sequences = [engine.sequences.open(exact=False) for _ in prompts]
    replies = [
        [prefill(engine, sequence, prompt)]
        for sequence, prompt in zip(sequences, prompts, strict=True)
    ]

    samplers = [engine.sampler(GREEDY, prompt) for prompt in prompts]
    work = [
        Work(sequence, [reply[-1]], sampler)
        for sequence, reply, sampler in zip(sequences, replies, samplers, strict=True)
    ]
    pending = engine.launch(work)
    while True:
        results = engine.collect(pending)
        for reply, sampled in zip(replies, results, strict=True):
            assert sampled is not None
            reply.append(sampled.token)
        if len(replies[0]) == 12:
            break
        pending = engine.launch_next(pending, [reply[-1] for reply in replies])
    assert replies == expected
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.length == len(prompt) + 11
        engine.sequences.close(sequence)


def cold_reply(engine: Engine, prompt: list[int], tokens: int) -> list[int]:
    sequence = engine.sequences.open(exact=False)
    reply = [prefill(engine, sequence, prompt)]
    while len(reply) < tokens:
        [sampled] = run_step(engine, [Work(sequence, [reply[-1]], engine.sampler(GREEDY, prompt))])
        assert sampled is not None
        reply.append(sampled.token)
    engine.sequences.close(sequence)
    return reply
