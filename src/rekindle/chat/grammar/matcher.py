"""Determines which tokens may come next in a reply that has to follow a grammar."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Lock
from typing import Any, Protocol

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.trial import PARSER_LIMITS, first_line
from rekindle.errors import BadRequest, Unsupported

_CONTROL_MARK = b"\xff"  # llguidance marks control tokens with this byte, which UTF-8 never uses
_FORBIDDEN = np.float32(-np.inf)


class TokenMatcher:
    """Follows one reply. Once the reply is complete, only end tokens may come.

    A grammar that turns out to be too costly does not stop the engine. It then allows only end
    tokens, and `trouble` is set.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._beginning = matcher
        self._matcher = matcher.deep_copy()  # a matcher never recovers from an error

    def copy(self) -> TokenMatcher:
        """A matcher for another reply to the same request, at its beginning."""
        return TokenMatcher(self._beginning.deep_copy())

    @property
    def trouble(self) -> str | None:
        """Why this reply cannot be continued."""
        return first_line(self._matcher.get_error()) or None

    @property
    def done(self) -> bool:
        """Whether only an end token may come."""
        return self._matcher.is_stopped()

    def mask(self, logits: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        """Sets the logits of forbidden tokens to minus infinity, in place."""
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        covered = logits[: allowed.size * 8]
        forbidden = np.unpackbits(~allowed, count=covered.size, bitorder="little").view(np.bool_)
        np.copyto(covered, _FORBIDDEN, where=forbidden)
        logits[covered.size :] = _FORBIDDEN

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    def replay(self, tokens: Sequence[int]) -> None:
        """Starts over with the tokens of a reply so far."""
        self._matcher = self._beginning.deep_copy()
        self._matcher.consume_tokens(list(tokens))


class GrammarVocabulary(Protocol):
    """The part of a tokenizer that constrains replies."""

    @property
    def bos(self) -> int | None: ...

    @property
    def control_texts(self) -> Mapping[str, int]: ...

    def encode(self, text: str, *, special: bool) -> list[int]: ...

    def piece(self, token: int, *, special: bool) -> bytes: ...


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Thread-safe."""

    def __init__(
        self, tokenizer: GrammarVocabulary, *, vocabulary_size: int, end_tokens: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._size = vocabulary_size
        self._ends = sorted(end_tokens)
        self._lock = Lock()
        self._native: LLTokenizer | None = None

    def compile(self, grammar: Grammar) -> TokenMatcher:
        """Raises BadRequest for a grammar that cannot be built, or only at too high a cost."""
        matcher = LLMatcher(self._vocabulary(), grammar.lark, log_level=0, limits=PARSER_LIMITS)
        if problem := first_line(matcher.get_error()):
            raise BadRequest(f"The schema cannot be enforced: {problem}.", param=grammar.param)
        return TokenMatcher(matcher)

    def _vocabulary(self) -> LLTokenizer:
        """Built on first use, because it takes a second and most servers never need it."""
        if not self._ends:
            raise Unsupported("This model has no end token, so its replies cannot be constrained.")
        with self._lock:
            if self._native is None:
                pieces = _Pieces(self._tokenizer, self._size, self._ends[0])
                self._native = LLTokenizer(
                    TokenizerWrapper(pieces), n_vocab=self._size, eos_token=self._ends
                )
            return self._native


class _Pieces:
    def __init__(self, tokenizer: GrammarVocabulary, size: int, end_token: int) -> None:
        self._encode = tokenizer.encode
        control = {token for token in tokenizer.control_texts.values() if token < size}
        self.eos_token_id = end_token
        self.bos_token_id = tokenizer.bos
        self.special_token_ids = sorted(control)
        self.tokens = [_piece(tokenizer, token, token in control) for token in range(size)]

    def __call__(self, text: bytes) -> list[int]:
        """Tokenises a text. llguidance calls this only to force tokens, which grammars forbid."""
        return self._encode(text.decode(errors="replace"), special=False)


def _piece(tokenizer: GrammarVocabulary, token: int, is_control: bool) -> bytes:
    piece = tokenizer.piece(token, special=is_control)
    return b"" if piece.startswith(_CONTROL_MARK) and not is_control else piece
