"""DRY penalises as llama.cpp does, and bans hold exactly as long as they should."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf, log
from typing import Any

import numpy as np
import pytest

from rekindle.engine.sampling.penalties import DryPenalty
from rekindle.engine.sampling.sampler import TokenSampler
from rekindle.protocol.requests import SamplingParams
from tests.support.rounds import rounds

pytestmark = pytest.mark.usefixtures("compiled")

SIZE = 8  # tokens of the vocabulary


def defined(tokens: Sequence[int], sampling: SamplingParams) -> dict[int, float]:
    """DRY in the plainest way: compare the end with every earlier place."""
    window = sampling.dry_penalty_last_n
    seen = list(tokens if window < 0 else tokens[max(len(tokens) - window, 0) :])
    allowed = sampling.dry_allowed_length
    limit = _after_the_last_breaker(seen, sampling.dry_breakers)
    if len(seen) <= allowed or limit < allowed:
        return {}
    longest: dict[int, int] = {}
    for end in range(len(seen) - 1):
        length = 0
        while length <= end and seen[end - length] == seen[-1 - length]:
            length += 1
        length = min(length, limit)
        if length >= allowed:
            longest[seen[end + 1]] = max(longest.get(seen[end + 1], 0), length)
    most = int(88.7228391 / log(sampling.dry_base)) if sampling.dry_base > 1.000001 else 1 << 30
    return {
        token: sampling.dry_multiplier * sampling.dry_base ** min(length - allowed, most)
        for token, length in longest.items()
        if [token] not in sampling.dry_breakers
    }


def _after_the_last_breaker(seen: list[int], breakers: Sequence[Sequence[int]]) -> int:
    for head in reversed(range(len(seen))):
        found = [each for each in breakers if seen[head : head + len(each)] == list(each)]
        if found:
            return len(seen) - head - max(map(len, found))
    return len(seen)


def penalties(penalty: DryPenalty) -> dict[int, float]:
    row = np.zeros(SIZE, np.float32)
    penalty.apply(row)
    return {token: -float(row[token]) for token in np.flatnonzero(row).tolist()}


def random_sampling(rng: random.Random) -> SamplingParams:
    breakers = [
        [rng.randrange(SIZE) for _ in range(rng.randint(1, 3))] for _ in range(rng.randrange(3))
    ]
    return SamplingParams(
        dry_multiplier=0.8,
        dry_base=rng.choice([1.0, 1.1, 1.75, 3]),
        dry_allowed_length=rng.randrange(4),
        dry_penalty_last_n=rng.choice([-1, 1, 7, 30]),
        dry_breakers=breakers,
    )


@pytest.mark.long
def test_dry_penalties_are_those_of_the_definition() -> None:
    rng = random.Random(1)
    for _ in range(rounds(200, 20_000)):
        sampling = random_sampling(rng)
        words = rng.choice([2, 3, SIZE])
        prompt = [rng.randrange(words) for _ in range(rng.randrange(40))]
        penalty = DryPenalty(sampling, prompt)
        text = list(prompt)
        for _ in range(rng.randrange(100)):
            text.append(rng.randrange(words))
            penalty.accept(text[-1])
        assert penalties(penalty) == pytest.approx(defined(text, sampling))


def test_a_long_repetition_stays_within_the_range_of_a_float() -> None:
    penalty = DryPenalty(SamplingParams(dry_multiplier=1, dry_base=1.75), [1] * 5000)
    [(token, cost)] = penalties(penalty).items()
    assert token == 1
    assert cost == pytest.approx(1.75 ** int(88.7228391 / log(1.75)), rel=1e-5)


def chosen(sampler: TokenSampler, row: Sequence[float]) -> int:
    return sampler.sample(np.array(row, np.float32)).token


ROW = [0.0, 3.0, 2.0, 1.0]


def test_a_reply_that_repeats_the_prompt_is_penalised() -> None:
    sampling = SamplingParams(temperature=0, dry_multiplier=9)
    assert chosen(TokenSampler(sampling, [3, 2, 1, 3, 0, 0, 2]), ROW) == 1  # a run of one token
    assert chosen(TokenSampler(sampling, [3, 0, 2, 1, 3, 0, 2]), ROW) == 2  # of three
    broken = SamplingParams(temperature=0, dry_multiplier=9, dry_breakers=[[0]])
    assert chosen(TokenSampler(broken, [3, 0, 2, 1, 3, 0, 2]), ROW) == 1


def banning(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, **fields)


def test_a_bad_word_of_one_token_is_never_chosen() -> None:
    sampler = TokenSampler(banning(bad_words_tokens=[[1]]), [])
    assert [chosen(sampler, ROW) for _ in range(3)] == [2, 2, 2]


def test_a_bad_word_is_banned_at_its_last_token_and_only_in_the_reply() -> None:
    sampler = TokenSampler(banning(bad_words_tokens=[[1, 1, 1], [2, 1]]), [1, 1, 2])
    assert [chosen(sampler, ROW) for _ in range(6)] == [1, 1, 2, 2, 2, 2]


def test_no_end_token_is_chosen_before_the_minimum() -> None:
    sampler = TokenSampler(banning(min_tokens=2, end_tokens=[1, 2]), [])
    assert [chosen(sampler, ROW) for _ in range(3)] == [3, 3, 1]


def test_a_bias_does_not_lift_a_ban() -> None:
    sampling = banning(min_tokens=1, end_tokens=[1], logit_bias={1: 100.0})
    assert chosen(TokenSampler(sampling, []), ROW) == 2


def test_a_replayed_reply_has_the_bans_that_it_had() -> None:
    sampling = banning(min_tokens=2, end_tokens=[1], bad_words_tokens=[[2, 2]])
    sampler = TokenSampler(sampling, [])
    expected = [chosen(sampler, ROW) for _ in range(4)]
    assert expected == [2, 3, 1, 1]
    for count in range(4):
        sampler.replay(expected[:count])
        assert [chosen(sampler, ROW) for _ in range(4 - count)] == expected[count:]


class Allowing:
    trouble = None

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def mask(self, logits: Any) -> None:
        kept = logits[self.tokens]
        logits[:] = -inf
        logits[self.tokens] = kept

    def accept(self, token: int) -> None: ...

    def replay(self, tokens: Sequence[int]) -> None: ...


def test_a_grammar_that_leaves_nothing_else_wins_over_a_ban() -> None:
    sampling = banning(min_tokens=9, end_tokens=[0], bad_words_tokens=[[1]])
    assert chosen(TokenSampler(sampling, [], Allowing([0])), ROW) == 0
    assert chosen(TokenSampler(sampling, [], Allowing([0, 3])), ROW) == 3
    assert chosen(TokenSampler(sampling, [], Allowing([1])), ROW) == 1
