"""Text to tokens and back, by the tokenizer.json of a model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as NativeTokenizer

from rekindle.errors import BadRequest, ModelError
from rekindle.models.folder import CONFIG, TOKENIZER, read_json

# ----------------------------------------------------------------------
# The bytes that a token stands for, by the decoder that tokenizer.json describes.

Spelled = Callable[[str], bytes]  # from a token as the vocabulary spells it
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def byte_spellings() -> dict[str, int]:
    """GPT-2's printable character for each byte, the other way round."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    named = {chr(byte): byte for byte in printable}
    return named | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = byte_spellings()


def piece_decoder(decoder: Any) -> Spelled:
    """How tokens become bytes; raises ModelError where that depends on their neighbours."""
    steps = list(_steps(decoder))
    if any(step["type"] == "ByteLevel" for step in steps):
        return _from_byte_level
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
        return text.encode()  # added to the vocabulary as it is


def _steps(decoder: Any) -> Iterator[dict[str, Any]]:
    """The decoders of a sequence, one after the other."""
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
    """What a decoder puts in place of what."""
    match step:
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if old:
            return old, new
        case {"type": "Metaspace", "replacement": str(old)} if old:
            return old, " "
        case {"type": "ByteFallback" | "Fuse" | "Strip"}:  # the last two are of whole texts
            return None
    raise _unknown(step["type"])


def _unknown(kind: object) -> ModelError:
    return ModelError(
        f"The tokenizer's decoder {str(kind)[:100]!r} is not supported: use a model with a "
        "byte-level or SentencePiece vocabulary."
    )


# ----------------------------------------------------------------------
# The chat template of a model folder, wherever its publisher put it.

MAX_TEMPLATE_BYTES = 1 << 20
PREFERRED = ("default", "tool_use")  # of several templates, by name


def read_chat_template(folder: Path) -> str | None:
    """In the order in which transformers looks; None: the model has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return _bounded(alone)
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = folder / name
        found = _chosen(read_json(path).get("chat_template")) if path.is_file() else None
        if found is not None:
            return found
    return None


def _bounded(path: Path) -> str:
    if path.stat().st_size > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path} is larger than any chat template. Pull the model again.")
    return path.read_text(encoding="utf-8", errors="replace")


def _chosen(template: Any) -> str | None:
    """The template itself, or one of those that have names."""
    if not isinstance(template, list):
        return template if isinstance(template, str) else None
    named = {
        each["name"]: each["template"]
        for each in template
        if isinstance(each, dict) and isinstance(each.get("template"), str) and "name" in each
    }
    chosen = (named[name] for name in (*PREFERRED, *named) if name in named)
    return next(chosen, None)


#: Control tokens that end a turn, whatever the settings say, as in llama.cpp.
END_TEXTS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<turn|>", "<|endoftext|>",
    "<|end_of_text|>", "<end_of_utterance>", "<eos>", "</s>",
}  # fmt: skip


def load_tokenizer(folder: Path, vocabulary_size: int | None = None) -> FolderTokenizer:
    """The tokenizer of a model with so many logits; None: as many as it has tokens. Raises
    ModelError."""
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
    """Thread-safe: what is native is never changed after it has been made."""

    def __init__(
        self,
        raw: dict[str, Any],
        about: dict[str, Any],
        configs: Iterable[dict[str, Any]],
        vocabulary_size: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        """`raw` is tokenizer.json, `about` tokenizer_config.json, and `configs` name end tokens."""
        self.chat_template = chat_template
        added = _usable_tokens(raw, vocabulary_size)
        raw = raw | {"added_tokens": added, "truncation": None, "padding": None}
        raw["model"] = raw["model"] | {"dropout": None}  # chance has no place in a prompt
        self._special, self._plain = _native(raw), _native(raw)
        self._plain.encode_special_tokens = True  # as text
        texts: dict[str, int] = self._special.get_vocab()
        self.size = max(vocabulary_size or 0, *(token + 1 for token in texts.values()))
        if vocabulary_size and self.size > vocabulary_size:
            raise ValueError(f"{self.size} tokens, and the model knows {vocabulary_size}")
        self._texts = {token: text for text, token in texts.items()}
        self._as_they_are = {each["id"] for each in added}
        self._hidden = {each["id"] for each in added if each["special"]}
        unknown = raw["model"].get("unk_token")
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
        self.end_tokens = self._ends(configs)

    def _named(
        self, about: dict[str, Any], name: str, configs: Iterable[dict[str, Any]]
    ) -> int | None:
        """The token that has this part: by its text, or else by its id."""
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
        """Tokens by which the model ends its turn."""
        named = {token for text, token in self.control_texts.items() if text in END_TEXTS}
        ids = [*_ids(configs, "eos_token_id"), *named, self.eos]
        return frozenset(token for token in ids if token is not None and token in self._texts)

    @cached_property
    def longest_bytes(self) -> int:
        """The most bytes of text that one token can stand for."""
        return max((len(text.encode()) for text in self._texts.values()), default=1) or 1

    def text(self, token: int | None) -> str:
        """The token as the vocabulary spells it; empty for none."""
        return "" if token is None else self._texts.get(token, "")

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Tokens without BOS; `special` lets control-token text become control tokens."""
        text = text.encode("utf-8", errors="replace").decode()  # half a character has no UTF-8 form
        if not special:
            return self._encode_plain(text)
        ids: list[int] = self._special.encode(text, add_special_tokens=False).ids
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """A vocabulary may spell a control token out of ordinary text; such text is cut apart."""
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
        """A token's bytes; a control token has none unless `special`."""
        if token in self._hidden and not special:
            return b""
        text = self.text(token)
        return text.encode() if token in self._as_they_are else self._spelled(text)


def _usable_tokens(raw: dict[str, Any], vocabulary_size: int | None) -> list[dict[str, Any]]:
    """The added tokens that the model knows: some have one more for padding, never used."""
    added: list[dict[str, Any]] = raw.get("added_tokens") or []
    return [each for each in added if vocabulary_size is None or each["id"] < vocabulary_size]


def _native(raw: dict[str, Any]) -> Any:
    try:
        return NativeTokenizer.from_str(json.dumps(raw))
    except BaseException as error:
        # The library raises Exception itself, and for its own bugs what is no Exception at all.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from error
        raise


def _ids(configs: Iterable[dict[str, Any]], name: str) -> list[int]:
    """Every id that the settings give under a name: alone, or several in a list."""
    texts = (config.get("text_config") for config in configs)
    places = [*configs, *(each for each in texts if isinstance(each, dict))]
    given = (place.get(name) for place in places)
    lists = (each if isinstance(each, list) else [each] for each in given)
    return [each for ids in lists for each in ids if type(each) is int]
