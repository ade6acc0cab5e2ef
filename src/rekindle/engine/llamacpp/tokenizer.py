"""Converts text to tokens and back, through llama.cpp."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unicodedata import is_normalized, normalize

from rekindle.engine.llamacpp import bindings
from rekindle.errors import BadRequest
from rekindle.models.vocabulary import NORMALIZER_FIELD, SPACE, SPACE_PREFIX_FIELD
from rekindle.tokens import FimTokens, any_of

NO_TOKEN = -1
LARGE_CHARACTERS = 16 << 10  # a text that llama.cpp splits at special tokens within 0.1 s
MAX_SPECIAL_TOKENS = 500_000  # in a text; the text between two of them takes up to 0.1 ms
BLANKS = " \t\n\v\f\r"  # what C's `isspace` accepts


@dataclass(frozen=True, slots=True)
class _SpecialTokens:
    """The tokens at whose texts a text is split before it is tokenized.

    llama.cpp splits a text too, but the time grows with the square of the number of special tokens:
    two million characters of them take minutes, and nothing can interrupt it. Where two of their
    texts overlap, this takes the first one, llama.cpp the longer one.
    """

    pattern: re.Pattern[str]
    ids: Mapping[str, int]
    strip_before: frozenset[int]  # special tokens that remove the blanks before them
    strip_after: frozenset[int]

    @classmethod
    def of(cls, attributes: Mapping[int, int], texts: Mapping[int, str]) -> _SpecialTokens:
        """`attributes` are llama.cpp's, by token."""

        def having(flag: int) -> frozenset[int]:
            return frozenset(token for token in texts if attributes[token] & flag)

        return cls(
            pattern=re.compile(any_of(texts.values())),
            ids={text: token for token, text in texts.items()},
            strip_before=having(bindings.TOKEN_STRIPS_BEFORE),
            strip_after=having(bindings.TOKEN_STRIPS_AFTER),
        )

    def split(self, text: str) -> Iterator[str | int]:
        """The special tokens in a text, and the text between them."""
        at, last = 0, NO_TOKEN
        for match in self.pattern.finditer(text):
            token = self.ids[match[0]]
            between = text[at : match.start()]
            between = between.lstrip(BLANKS) if last in self.strip_after else between
            yield between.rstrip(BLANKS) if token in self.strip_before else between
            yield token
            at, last = match.end(), token
        yield text[at:].lstrip(BLANKS) if last in self.strip_after else text[at:]


class LlamaTokenizer:
    """Implements `tokens.Tokenizer`. The native tokenizer keeps no state, so it is thread-safe."""

    def __init__(self, library: Any, model: int) -> None:
        self._library = library
        self._vocab = library.llama_model_get_vocab(model)
        self.size = int(library.llama_vocab_n_tokens(self._vocab))
        bos = int(library.llama_vocab_bos(self._vocab))
        self.bos: int | None = None if bos == NO_TOKEN else bos
        eos = int(library.llama_vocab_eos(self._vocab))
        self.eos: int | None = None if eos == NO_TOKEN else eos
        self.add_bos = bool(library.llama_vocab_get_add_bos(self._vocab)) and bos != NO_TOKEN
        self._has_text = library.llama_vocab_type(self._vocab) != 0  # LLAMA_VOCAB_TYPE_NONE
        self._pieces: dict[tuple[int, bool], bytes] = {}
        # Steps that llama.cpp does not have. Only files that we have converted name them.
        self._composes = bindings.metadata(library, model, NORMALIZER_FIELD) == "nfc"
        self._space_prefix = bindings.metadata(library, model, SPACE_PREFIX_FIELD)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        if not self._has_text:
            return frozenset()
        is_end = self._library.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if is_end(self._vocab, token))

    @cached_property
    def control_texts(self) -> dict[str, int]:
        if not self._has_text:
            return {}
        attribute = self._library.llama_vocab_get_attr
        control = (
            t for t in range(self.size) if attribute(self._vocab, t) & bindings.TOKEN_CONTROL
        )
        return {self.text(t): t for t in control if self.text(t)}

    @cached_property
    def fim(self) -> FimTokens | None:
        library = self._library
        prefix, suffix, middle, repository, file = (
            int(find(self._vocab))
            for find in (
                library.llama_vocab_fim_pre,
                library.llama_vocab_fim_suf,
                library.llama_vocab_fim_mid,
                library.llama_vocab_fim_rep,
                library.llama_vocab_fim_sep,
            )
        )
        if NO_TOKEN in (prefix, suffix, middle):
            return None
        return FimTokens(
            prefix=prefix,
            suffix=suffix,
            middle=middle,
            repository=None if repository == NO_TOKEN else repository,
            file=None if file == NO_TOKEN else file,
        )

    @cached_property
    def longest_bytes(self) -> int:
        return max((len(self.text(token).encode()) for token in range(self.size)), default=1) or 1

    def text(self, token: int | None) -> str:
        if token is None or not self._has_text:
            return ""
        raw: bytes = self._library.llama_vocab_get_text(self._vocab, token)
        return raw.decode(errors="replace")

    @cached_property
    def _special_tokens(self) -> tuple[_SpecialTokens, _SpecialTokens]:
        """The special tokens of any text, and those of a text whose author may write control
        tokens."""
        read = self._library.llama_vocab_get_attr
        attributes = {token: int(read(self._vocab, token)) for token in range(self.size)}

        control = bindings.TOKEN_CONTROL | bindings.TOKEN_UNKNOWN
        found = {
            token: text
            for token, attribute in attributes.items()
            if attribute & (control | bindings.TOKEN_USER_DEFINED)
            # A replacement character stands for bytes that no text has.
            if (text := self.text(token)) and "\ufffd" not in text
        }
        plain = {token: text for token, text in found.items() if not attributes[token] & control}
        return _SpecialTokens.of(attributes, plain), _SpecialTokens.of(attributes, found)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the model wants before and after a text."""
        text, whole = self._encode("a", special=False), self._encode("a", add_special=True)
        at = next(at for at in range(len(whole)) if whole[at : at + len(text)] == text)
        return whole[:at], whole[at + len(text) :]

    def encode(self, text: str, *, special: bool, add_special: bool = False) -> list[int]:
        """Tokenize a text. `add_special` adds the tokens that the model wants around it."""
        if not self._has_text:
            raise BadRequest("this model has no tokenizer; send token ids", param="prompt")
        if self._space_prefix == "first" and not self._special_tokens[special].pattern.match(text):
            text = _with_space(text)
        if len(text) <= LARGE_CHARACTERS and not self._changes_parts(text):
            return self._encode(text, special=special, add_special=add_special)
        before, after = self._around if add_special else ([], [])
        ids = list(before)
        for number, part in enumerate(self._special_tokens[special].split(text)):
            if number > 2 * MAX_SPECIAL_TOKENS:
                raise BadRequest(
                    f"the text has more than {MAX_SPECIAL_TOKENS} special tokens: send it in parts"
                )
            ids += [part] if isinstance(part, int) else self._encode(self._changed(part))
        return [*ids, *after]

    def _changes_parts(self, text: str) -> bool:
        return self._space_prefix == "always" or (
            self._composes and not text.isascii() and not is_normalized("NFC", text)
        )

    def _changed(self, part: str) -> str:
        """Normalise the text between two special tokens as the model's own tokenizer does."""
        part = normalize("NFC", part) if self._composes else part
        return _with_space(part) if self._space_prefix == "always" else part

    def _encode(self, text: str, *, special: bool = False, add_special: bool = False) -> list[int]:
        raw = text.encode("utf-8", errors="replace")  # a lone surrogate has no UTF-8 form
        room = len(raw) + 8  # at most one token per byte, plus added ones
        tokens = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(
            self._vocab, raw, len(raw), tokens, room, add_special, special
        )
        if count < 0:
            raise BadRequest("the tokenizer cannot encode this text", param="messages")
        ids: list[int] = tokens[:count]
        return ids

    def pair(self, query: str, document: str) -> list[int]:
        library, vocab = self._library, self._vocab
        separator = [int(library.llama_vocab_sep(vocab))]
        if separator == [NO_TOKEN] or not library.llama_vocab_get_add_sep(vocab):
            separator = []
        end = [self.eos] if self.eos is not None and library.llama_vocab_get_add_eos(vocab) else []
        start = [self.bos] if self.bos is not None and self.add_bos else []
        first, second = (self.encode(text, special=False) for text in (query, document))
        return [*start, *first, *end, *separator, *second, *(end or separator)]

    def piece(self, token: int, *, special: bool) -> bytes:
        known = self._pieces.get((token, special))
        if known is None:
            known = self._pieces[token, special] = self._read_piece(token, special)
        return known

    def _read_piece(self, token: int, special: bool) -> bytes:
        if not self._has_text:
            return b""
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            size = self._library.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if size >= 0:
                return buffer.raw[:size]
            room = -size


def _with_space(text: str) -> str:
    return text if not text or text.startswith((" ", SPACE)) else f" {text}"
