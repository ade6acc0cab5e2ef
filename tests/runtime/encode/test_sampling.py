"""Bad words and sequence breakers become the tokens that vLLM and llama.cpp look for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rekindle.errors import BadRequest
from rekindle.protocol.requests import SamplingParams
from rekindle.runtime.encode.sampling import MAX_TAIL_TOKENS, SamplingEncoder
from rekindle.tokens import Tokenizer
from tests.support.fake import NumberTokenizer

PIECES = ["a", "b", "c", " ", "\n", " a", "ab", "x\n", "\n\n", "bc", "cab", " b", ":", "é"]


class Words(NumberTokenizer):
    """Takes the longest piece at each place."""

    size = len(PIECES)

    def encode(self, text: str, *, special: bool) -> list[int]:
        longest = sorted(PIECES, key=len, reverse=True)
        found = re.findall("|".join(map(re.escape, longest)), text)
        return [PIECES.index(piece) for piece in found]

    def piece(self, token: int, *, special: bool) -> bytes:
        return PIECES[token].encode()


def sequences(tokens: Sequence[Sequence[int]]) -> set[tuple[str, ...]]:
    return {tuple(PIECES[token] for token in each) for each in tokens}


def encode(sampling: SamplingParams, tokenizer: Tokenizer | None = None) -> SamplingParams:
    return SamplingEncoder(tokenizer or Words()).encode(sampling)


def test_the_bias_of_a_text_counts_for_each_of_its_tokens() -> None:
    sampling = SamplingParams(logit_bias={1: 2.0}, text_bias=[("ca", -5.0)])
    assert encode(sampling).logit_bias == {1: 2.0, 2: -5.0, 0: -5.0}


@pytest.mark.parametrize(
    ("word", "banned"),
    [
        ("a", {("a",), (" a",)}),
        (" a", {("a",), (" a",)}),  # a leading space says nothing
        ("ab", {("ab",)}),  # " ab" has one token more
        ("bcb", {("bc", "b")}),
        ("c", {("c",)}),
    ],
)
def test_a_bad_word_is_banned_with_and_without_a_leading_space(
    word: str, banned: set[tuple[str, ...]]
) -> None:
    assert sequences(encode(SamplingParams(bad_words=[word])).bad_words_tokens) == banned


def test_a_bad_word_that_the_vocabulary_cannot_spell_is_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens for 'z'"):
        encode(SamplingParams(bad_words=["a", "z"]))


def breakers(*texts: str) -> set[tuple[str, ...]]:
    sampling = SamplingParams(dry_multiplier=1, dry_sequence_breakers=texts)
    return sequences(encode(sampling).dry_breakers)


def test_every_token_that_contains_a_breaker_breaks() -> None:
    assert breakers("\n") == {("\n",), ("x\n",), ("\n\n",)}
    assert breakers("\n", ":") == {("\n",), ("x\n",), ("\n\n",), (":",)}


def test_a_breaker_may_begin_inside_a_token_and_go_on_in_others() -> None:
    assert breakers("abc") == {("a", "bc"), (" a", "bc"), ("ab", "c"), ("cab", "c")}


def test_the_rest_of_a_breaker_is_limited() -> None:
    longest = max(map(len, breakers("a" + ":" * 39)))
    assert longest == 1 + MAX_TAIL_TOKENS


def test_a_breaker_is_not_divided_inside_a_character() -> None:
    assert breakers("é") == {("é",)}


def test_without_these_fields_the_vocabulary_is_not_read() -> None:
    class Unread(Words):
        def piece(self, token: int, *, special: bool) -> bytes:
            raise AssertionError("the vocabulary is read")

    sampling = SamplingParams(seed=1, temperature=0.5)
    assert encode(sampling, Unread()) is sampling


def test_the_default_breakers_are_looked_up_once() -> None:
    encoder = SamplingEncoder(Words())
    first = encoder.encode(SamplingParams(dry_multiplier=1)).dry_breakers
    sent = replace(SamplingParams(dry_multiplier=2), dry_sequence_breakers=["\n", ":", '"', "*"])
    assert encoder.encode(sent).dry_breakers is first
