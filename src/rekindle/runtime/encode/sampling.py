"""Turns the sampling parameters that are texts into tokens: bad words and sequence breakers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from rekindle.errors import BadRequest
from rekindle.protocol.requests import SamplingParams
from rekindle.tokens import Tokenizer

MAX_TAIL_TOKENS = 20  # of a sequence breaker, after its first token; as in llama.cpp
DEFAULT_BREAKERS = SamplingParams().dry_sequence_breakers

TokenSequence = tuple[int, ...]


class SamplingEncoder:
    """Looks up texts in one vocabulary. Any thread may call it.

    Only the default breakers are remembered. If those of clients were, the time of a request would
    tell whether another tenant has sent the same ones.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, sampling: SamplingParams) -> SamplingParams:
        """Add the tokens of the texts. Raises BadRequest for a bad word without tokens."""
        if sampling.text_bias:
            biases = dict(sampling.logit_bias)
            for text, bias in sampling.text_bias:
                biases |= dict.fromkeys(self._tokenizer.encode(text, special=False), bias)
            sampling = replace(sampling, logit_bias=biases)
        if sampling.bad_words:
            words = [each for word in sampling.bad_words for each in self._bad_word(word)]
            sampling = replace(sampling, bad_words_tokens=words)
        if sampling.dry_multiplier:
            sampling = replace(sampling, dry_breakers=self._breakers(sampling))
        return sampling

    def _bad_word(self, word: str) -> list[TokenSequence]:
        """Return the tokens of a word at the beginning of a text and, as in vLLM, after a space.

        The second ones count only if the space is part of the first token and adds no token.
        Otherwise the first ones ban the word after a space, too.
        """
        plain = tuple(self._tokenizer.encode(word.lstrip(), special=False))
        spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), special=False))
        if not plain:
            raise BadRequest(
                f"`bad_words`: this model has no tokens for {word[:32]!r}: leave it out.",
                param="bad_words",
            )
        is_other_word = len(spaced) == len(plain) and spaced[0] != plain[0]
        return [plain, spaced] if is_other_word else [plain]

    def _breakers(self, sampling: SamplingParams) -> Sequence[TokenSequence]:
        if tuple(sampling.dry_sequence_breakers) == DEFAULT_BREAKERS:
            return self._default_breakers
        return self._sequences(sampling.dry_sequence_breakers)

    @cached_property
    def _default_breakers(self) -> Sequence[TokenSequence]:
        return self._sequences(DEFAULT_BREAKERS)

    def _sequences(self, breakers: Sequence[str]) -> list[TokenSequence]:
        return list(dict.fromkeys(each for text in breakers for each in self._spellings(text)))

    def _spellings(self, breaker: str) -> Iterator[TokenSequence]:
        """Yield the token sequences that begin within or before a breaker and cover it.

        The first token contains the breaker, or ends with its beginning. The tokens of the rest
        follow. A breaker is not divided inside a character.
        """
        for token in self._pieces.containing(breaker.encode()):
            yield (token,)
        for length in range(1, len(breaker)):
            rest = self._tokenizer.encode(breaker[length:], special=False)
            for token in self._pieces.ending_with(breaker[:length].encode()):
                yield (token, *rest[:MAX_TAIL_TOKENS])

    @cached_property
    def _pieces(self) -> VocabularyText:
        """Built on first use, because most servers never need it."""
        size = self._tokenizer.size
        return VocabularyText([self._tokenizer.piece(token, special=True) for token in range(size)])


class VocabularyText:
    """The bytes of all tokens, one after the other, so that searching them is fast."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._text = b"".join(pieces)
        self._starts = list(accumulate(map(len, pieces), initial=0))

    def containing(self, text: bytes) -> list[int]:
        return [token for token, at in self._found(text) if at + len(text) <= self._end(token)]

    def ending_with(self, text: bytes) -> list[int]:
        return [token for token, at in self._found(text) if at + len(text) == self._end(token)]

    def _end(self, token: int) -> int:
        return self._starts[token + 1]

    def _found(self, text: bytes) -> Iterator[tuple[int, int]]:
        """Yield each token in which the text begins, and where."""
        at = self._text.find(text)
        while at >= 0:
            yield bisect_right(self._starts, at) - 1, at
            at = self._text.find(text, at + 1)
