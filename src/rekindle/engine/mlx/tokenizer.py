"""Converts text to tokens and back with the tokenizer.json of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer

from rekindle.errors import BadRequest, ModelError
from rekindle.models.folder import CONFIG, TOKENIZER, read_chat_template, read_json
from rekindle.tokens import FimTokens

Spelled = Callable[[str], bytes]  # from the spelling of a token in the vocabulary
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_spellings() -> dict[str, int]:
    """Return the inverse of GPT-2's table of printable characters for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_spellings()


def piece_decoder(decoder: Any) -> Spelled:
    """Build the decoder of a token; raises ModelError if bytes depend on neighbours."""
    steps = list(_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _from_byte_level
    if [step["type"] for step in steps] == ["WordPiece"]:
        return partial(_from_word_piece, str(steps[0].get("prefix")))
    replaced = [pair for step in steps if (pair := _replacement(step))]
    has_bytes = any(step["type"] == "ByteFallback" for step in steps)

    def spelled(text: str) -> bytes:
        if has_bytes and (byte := _BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1])
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return spelled


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in text)
    except KeyError:
        return text.encode()  # an added token


def _from_word_piece(prefix: str, text: str) -> bytes:
    """A piece with the prefix continues a word. Any other one starts a word."""
    joined = text.removeprefix(prefix)
    return joined.encode() if joined != text else f" {text}".encode()


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if not isinstance(decoder, dict):
        raise _unknown(decoder)
    if decoder.get("type") == "Sequence":
        for each in decoder.get("decoders", ()):
            yield from _steps(each)
    else:
        yield {"type": None} | decoder


def _replacement(step: dict[str, Any]) -> tuple[str, str] | None:
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)} if old:
            return old, " "
        case {"type": "ByteFallback" | "Fuse" | "Strip"}:  # Fuse and Strip apply to whole texts
            return None
    raise _unknown(step["type"])


def _unknown(kind: object) -> ModelError:
    return ModelError(
        f"The tokenizer's decoder {str(kind)[:100]!r} is not supported: use a model with a "
        "byte-level or SentencePiece vocabulary."
    )


#: Control tokens that always end a turn, as in llama.cpp.
END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "</s>",
}  # fmt: skip


def load_tokenizer(folder: Path, vocabulary_size: int | None = None) -> FolderTokenizer:
    """Load a tokenizer for `vocabulary_size` logits (None: one per token). Raises ModelError."""
    raw, about, config, generation = (
        read_json(folder / name) if (folder / name).is_file() else {}
        for name in (TOKENIZER, "tokenizer_config.json", CONFIG, "generation_config.json")
    )
    template = read_chat_template(folder)
    try:
        return FolderTokenizer(raw, about, (config, generation), vocabulary_size, template)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{folder / TOKENIZER} is missing or damaged ({error!r:.200}). Pull the model again."
        ) from error


class FolderTokenizer:
    """Implements `tokens.Tokenizer`. The native tokenizers never change, so it is thread-safe."""

    def __init__(
        self,
        raw: dict[str, Any],
        about: dict[str, Any],
        configs: Iterable[dict[str, Any]],
        vocabulary_size: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`raw` is tokenizer.json, `about` is tokenizer_config.json, `configs` name end tokens."""
        self.chat_template = chat_template
        added = _usable_tokens(raw, vocabulary_size)
        raw = raw | {"added_tokens": added, "truncation": None, "padding": None}
        raw["model"] = raw["model"] | {"dropout": None}  # encoding has to be deterministic
        self._special, self._plain = _native(raw), _native(raw)
        self._plain.encode_special_tokens = True  # as text
        texts: dict[str, int] = self._special.get_vocab()
        self.size = max(vocabulary_size or 0, *(token + 1 for token in texts.values()))
        if vocabulary_size and self.size > vocabulary_size:
            raise ValueError(f"{self.size} tokens, and the model knows {vocabulary_size}")
        self._texts = {token: text for text, token in texts.items()}
        self._as_they_are = {each["id"] for each in added}
        self._hidden = {each["id"] for each in added if each["special"]}
        unknown = _unknown_text(raw["model"])
        self.control_texts = {
            each["content"]: each["id"]
            for each in added
            if each["special"] and each["content"] != unknown
        }
        self._control = frozenset(self.control_texts.values())
        self._spelled = piece_decoder(raw.get("decoder"))
        self.bos = self._named(about, "bos_token", configs)
        self.eos = self._named(about, "eos_token", configs)
        self.add_bos = self._adds_bos(about)
        self._add_eos = about.get("add_eos_token") is True
        self.end_tokens = self._ends(configs)

    def _named(
        self, about: dict[str, Any], name: str, configs: Iterable[dict[str, Any]]
    ) -> int | None:
        """Return the token with this role, by its text or else by its id."""
        given = about.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        token = self._special.token_to_id(text) if isinstance(text, str) else None
        ids = [token] if token is not None else _ids(configs, f"{name}_id")
        return next((each for each in ids if each in self._texts), None)

    def _adds_bos(self, about: dict[str, Any]) -> bool:
        if self.bos is None:
            return False
        said = about.get("add_bos_token")
        return said if isinstance(said, bool) else self._special.encode("a").ids[:1] == [self.bos]

    def _ends(self, configs: Iterable[dict[str, Any]]) -> frozenset[int]:
        named = {token for text, token in self.control_texts.items() if text in END_TEXTS}
        ids = [*_ids(configs, "eos_token_id"), *named, self.eos]
        return frozenset(token for token in ids if token is not None and token in self._texts)

    @cached_property
    def fim(self) -> FimTokens | None:
        return FimTokens.named(self.control_texts)

    @cached_property
    def longest_bytes(self) -> int:
        return max((len(text.encode()) for text in self._texts.values()), default=1) or 1

    def text(self, token: int | None) -> str:
        return "" if token is None else self._texts.get(token, "")

    def encode(self, text: str, *, special: bool) -> list[int]:
        text = text.encode("utf-8", errors="replace").decode()  # a lone surrogate has no UTF-8 form
        if not special:
            return self._encode_plain(text)
        ids: list[int] = self._special.encode(text, add_special_tokens=False).ids
        return ids

    def encode_input(self, *texts: str, special: bool = False) -> list[int]:
        """Tokenize a text or a pair of texts, with the tokens that the model wants around them."""
        first, *rest = self.tokens_around(len(texts))
        ids = list(first)
        for text, after in zip(texts, rest, strict=True):
            ids += [*self.encode(text, special=special), *after]
        return ids

    def tokens_around(self, texts: int) -> list[list[int]]:
        """The tokens before, between and after one or two texts."""
        found = self._plain.encode(*"ab"[:texts])
        around: list[list[int]] = [[] for _ in range(texts + 1)]
        place = 0
        for token, text in zip(found.ids, found.sequence_ids, strict=True):
            if text is None:
                around[place].append(token)
            else:
                place = text + 1
        if self._add_eos and self.eos is not None and self.eos not in around[-1]:
            around[-1].append(self.eos)
        return around

    @cached_property
    def second_segment_after(self) -> int | None:
        """The token after which the second text of a pair begins, if the model tells the segments
        apart."""
        found = self._plain.encode("a", "b")
        if len(set(found.type_ids)) == 1:
            return None
        return int(found.ids[found.type_ids.index(1) - 1])

    def _encode_plain(self, text: str) -> list[int]:
        """Tokenize as text. If ordinary merges spell a control token, split the text there."""
        found = self._plain.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        if self._control.isdisjoint(ids):
            return ids
        placed = zip(ids, found.offsets, strict=True)
        spans = (span for token, span in placed if token in self._control)
        cuts = sorted({start + 1 for start, stop in spans if stop - start > 1})
        if not cuts:
            raise BadRequest(f"this model's tokenizer has no tokens for {text[:50]!r}")
        parts = pairwise([0, *cuts, len(text)])
        return [token for start, stop in parts for token in self._encode_plain(text[start:stop])]

    def piece(self, token: int, *, special: bool) -> bytes:
        if token in self._hidden and not special:
            return b""
        text = self.text(token)
        return text.encode() if token in self._as_they_are else self._spelled(text)


def _usable_tokens(raw: dict[str, Any], vocabulary_size: int | None) -> list[dict[str, Any]]:
    """Return the added tokens that have a logit. Some vocabularies add an unused padding token."""
    added: list[dict[str, Any]] = raw.get("added_tokens") or []
    return [each for each in added if vocabulary_size is None or each["id"] < vocabulary_size]


def _unknown_text(model: dict[str, Any]) -> str | None:
    """The text of the token for characters that are not in the vocabulary."""
    place = model.get("unk_id")  # of a Unigram vocabulary, which is a list
    if type(place) is int and isinstance(model.get("vocab"), list):
        return str(model["vocab"][place][0])
    return model.get("unk_token")


def _native(raw: dict[str, Any]) -> Any:
    try:
        return NativeTokenizer.from_str(json.dumps(raw))
    except BaseException as error:
        # The library raises plain Exception, and a PanicException (a BaseException) for bugs.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


def _ids(configs: Iterable[dict[str, Any]], name: str) -> list[int]:
    """Return every id that the settings give under a name, as a number or a list."""
    texts = (config.get("text_config") for config in configs)
    places = [*configs, *(each for each in texts if isinstance(each, dict))]
    given = (place.get(name) for place in places)
    lists = (each if isinstance(each, list) else [each] for each in given)
    return [each for ids in lists for each in ids if type(each) is int]
