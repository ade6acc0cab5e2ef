from __future__ import annotations

from random import Random

from rekindle.bench.rig import filler, nonce, prose


def test_the_same_seed_gives_the_same_prose() -> None:
    assert prose(Random("a"), 300) == prose(Random("a"), 300)
    assert prose(Random("a"), 300) != prose(Random("b"), 300)


def test_prose_exceeds_the_requested_words_by_less_than_a_sentence() -> None:
    for words in (1, 17, 300):
        assert words <= len(prose(Random(0), words).split()) < words + 20


def test_filler_has_exactly_the_requested_words() -> None:
    assert len(filler(Random(0), 23).split()) == 23


def test_nonces_do_not_repeat() -> None:
    chance = Random(0)
    assert len({nonce(chance) for _ in range(1000)}) == 1000
