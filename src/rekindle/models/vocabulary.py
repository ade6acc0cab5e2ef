"""Turns the tokenizer of a model folder into fields of a GGUF file.

llama.cpp implements some kinds of tokenizers. One that it would not reproduce token by token is
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import ModelError
from rekindle.models.folder import (
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    read_chat_template,
    read_json,
)
from rekindle.models.gguf_writer import Field

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # token types
SPACE = "\u2581"  # stands for a space in SentencePiece vocabularies

#: Our own fields, for steps that llama.cpp does not have. Our tokenizer takes them before it.
NORMALIZER_FIELD = "rekindle.tokenizer.normalizer"
SPACE_PREFIX_FIELD = "rekindle.tokenizer.space_prefix"

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names for the patterns that cut a text into words: without `ignore_merges`, and with.
PATTERNS = {
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}{{1,3}}|{_REST}": ("smaug-bpe", "llama-bpe"),
    f"{_CONTRACTIONS}|{_WORD}|\\p{{N}}|{_REST}": ("qwen2", None),
}
#: A step of Gemma.
SPLIT_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
#: llama.cpp ends a turn at tokens with these texts, whatever the file says.
KNOWN_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "</s>", "<eos>", "<end_of_utterance>",
}  # fmt: skip
#: Control characters, and bytes that no assigned character has. A vocabulary may lack them, as
#: SmolLM's does: both libraries then leave them out. Only `tokenizers` merges across the gap.
RARE_BYTES = {*range(9), 11, 12, *range(14, 32), 127, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
#: Tokens of Phi-3 after which llama.cpp keeps spaces. It removes them after all other ones.
PHI3_KEEPS_SPACES = {"<unk>", "<s>", "<|endoftext|>"}


def vocabulary_fields(folder: Path, size: int, name: str) -> dict[str, Field]:
    """Return the fields of the tokenizer for `size` embeddings, and the model's name, by which
    llama.cpp recognises Phi-3's tokenizer. Raises ModelError."""
    if not (folder / TOKENIZER).is_file():
        raise ModelError(
            f"{folder} has no {TOKENIZER}, from which the vocabulary is read; a tokenizer.model "
            "alone is not enough. Fetch it from the model's repository, or give a GGUF file."
        )
    raw = read_json(folder / TOKENIZER)
    try:
        vocabulary = _Vocabulary(folder, raw, size)
        return {"general.name": vocabulary.distinct(name), **vocabulary.fields()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{folder / TOKENIZER} is damaged ({error!r:.200}). Fetch the model again, into an "
            "empty folder."
        ) from error


@dataclass(frozen=True, slots=True)
class _Kind:
    """How llama.cpp reproduces a tokenizer."""

    model: str  # "gpt2" for byte-level, "llama" for SentencePiece
    fields: dict[str, Field]


class _Vocabulary:
    def __init__(self, folder: Path, raw: dict[str, Any], size: int) -> None:
        self._folder = folder
        self._raw = raw
        self._model: dict[str, Any] = raw["model"]
        self._size = size
        self._ids: dict[str, int] = self._model["vocab"]
        self._added = [each for each in raw.get("added_tokens") or [] if each["id"] < size]
        self._about, config, generation = (
            read_json(folder / name) if (folder / name).is_file() else {}
            for name in (TOKENIZER_CONFIG, CONFIG, GENERATION_CONFIG)
        )
        texts = config.get("text_config")
        self._configs = [config, generation, *([texts] if isinstance(texts, dict) else [])]

    def fields(self) -> dict[str, Field]:
        self._check_model()
        kind = self._kind()
        texts, types = self._tokens(kind)
        found: dict[str, Field] = {
            "tokenizer.ggml.model": kind.model,
            **kind.fields,
            "tokenizer.ggml.tokens": texts,
            "tokenizer.ggml.token_type": types,
        }
        if kind.model == "llama":
            found["tokenizer.ggml.scores"] = self._scores(texts, types)
        else:
            found["tokenizer.ggml.merges"] = [" ".join(pair) for pair in self._merges()]
        found |= self._special_fields(texts)
        if template := read_chat_template(self._folder):
            found["tokenizer.chat_template"] = template
        return found

    def _unknown(self, what: str) -> ModelError:
        return ModelError(
            f"{self._folder / TOKENIZER} has {what}, which llama.cpp does not reproduce. Give a "
            "GGUF file of this model, or serve the folder with MLX (pip install 'rekindle[mlx]')."
        )

    def _check_model(self) -> None:
        model = self._model
        if model.get("type", "BPE") != "BPE" or "merges" not in model:
            raise self._unknown(f"a tokenizer of the type {str(model.get('type'))[:40]}")
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(name):
                raise self._unknown(f"a {name}")
        if any(token >= self._size or token < 0 for token in self._ids.values()):
            raise ModelError(
                f"{self._folder} has more tokens than embeddings ({self._size}): {TOKENIZER} and "
                "the weights belong to different models. Fetch the model again."
            )
        for each in self._added:
            if each.get("single_word") or each.get("lstrip"):
                raise self._unknown(f"the token {each['content']!r:.60} with rules about its place")

    def _merges(self) -> list[tuple[str, str]]:
        pairs = (
            tuple(each.split(" ")) if isinstance(each, str) else tuple(each)
            for each in self._model["merges"]
        )
        found = []
        for left, right in pairs:
            if left + right not in self._ids or left not in self._ids or right not in self._ids:
                raise ValueError(f"the merge of {left!r:.40} and {right!r:.40} gives no token")
            found.append((left, right))
        return found

    def _kind(self) -> _Kind:
        steps = list(_flat(self._raw.get("pre_tokenizer"), "pretokenizers"))
        if any(step["type"] == "ByteLevel" for step in steps):
            return self._byte_level(steps)
        if self._model.get("byte_fallback"):
            return self._sentencepiece(steps)
        raise self._unknown("neither a byte-level nor a SentencePiece vocabulary")

    def _byte_level(self, steps: list[dict[str, Any]]) -> _Kind:
        fields: dict[str, Field] = {"tokenizer.ggml.pre": self._pre_tokenizer(steps)}
        normalizers = [each["type"] for each in _flat(self._raw.get("normalizer"), "normalizers")]
        if normalizers == ["NFC"]:
            fields[NORMALIZER_FIELD] = "nfc"
        elif normalizers:
            raise self._unknown(f"the normalizer {', '.join(normalizers)[:60]}")
        letters = byte_letters()
        missing = [byte for byte in range(256) if letters[byte] not in self._ids]
        if set(missing) - RARE_BYTES or self._model.get("byte_fallback"):
            raise self._unknown(f"no tokens for {len(missing)} of the 256 bytes")
        if not self._model["merges"]:
            raise self._unknown("no merges")
        return _Kind("gpt2", fields)

    def _pre_tokenizer(self, steps: list[dict[str, Any]]) -> str:
        *before, last = steps
        ignores_merges = bool(self._model.get("ignore_merges"))
        if last["type"] == "ByteLevel" and not last.get("add_prefix_space", True):
            uses_regex = last.get("use_regex", True)
            match before:
                case [] if uses_regex and not ignores_merges:
                    return "gpt-2"
                case [{"type": "Digits", "individual_digits": True}] if (
                    uses_regex and not ignores_merges
                ):
                    return "smollm"
                case [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}] if (
                    not uses_regex and not before[0].get("invert") and pattern in PATTERNS
                ):
                    if name := PATTERNS[pattern][ignores_merges]:
                        return name
        shown = [step.get("pattern", step["type"]) for step in steps]
        raise self._unknown(f"an unknown pre-tokenizer ({str(shown)[:300]})")

    def _sentencepiece(self, steps: list[dict[str, Any]]) -> _Kind:
        normalizers = list(_flat(self._raw.get("normalizer"), "normalizers"))
        prefix = self._space_prefix(normalizers, steps)
        if prefix is None:
            shown = [each["type"] for each in (*normalizers, *steps)]
            raise self._unknown(f"an unknown normalizer or pre-tokenizer ({str(shown)[:200]})")
        if self._model.get("ignore_merges"):
            raise self._unknown("ignore_merges in a SentencePiece vocabulary")
        if any(f"<0x{byte:02X}>" not in self._ids for byte in range(256)):
            raise self._unknown("no tokens for some of the 256 bytes")
        fields: dict[str, Field] = {
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.add_space_prefix": prefix == "llama.cpp",
        }
        if prefix in ("first", "always"):
            fields[SPACE_PREFIX_FIELD] = prefix
        return _Kind("llama", fields)

    def _space_prefix(
        self, normalizers: list[dict[str, Any]], steps: list[dict[str, Any]]
    ) -> str | None:
        """Return who puts a space before a text: "llama.cpp", our tokenizer ("first": once,
        "always": also after special tokens) or "never" anybody. None if unknown."""
        replaced = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        prepended = {"type": "Prepend", "prepend": SPACE}
        splits = [step for step in steps if step != SPLIT_AT_SPACES]  # no space is left to split at
        if normalizers == [prepended, replaced] and not splits:
            return "llama.cpp"
        if normalizers == [replaced] and not splits:
            return "never"
        return _metaspace(splits) if normalizers in ([], [replaced]) else None

    def _tokens(self, kind: _Kind) -> tuple[list[str], list[int]]:
        texts = [f"[PAD{token}]" for token in range(self._size)]
        types = [UNUSED] * self._size
        unknown = self._model.get("unk_token")
        for text, token in self._ids.items():
            texts[token], types[token] = text, NORMAL
            if kind.model == "llama" and _is_byte(text):
                types[token] = BYTE
        results = {left + right for left, right in self._merges()} if kind.model == "llama" else {}
        for each in self._added:
            text, token = each["content"], each["id"]
            texts[token] = text
            if kind.model == "llama" and SPACE in text and not each["special"]:
                if not each.get("normalized") and text in results:
                    continue  # a run of spaces, which only the merges find in a text
                if each.get("normalized"):  # found in the text before its spaces are replaced
                    texts[token] = text.replace(SPACE, " ")
            types[token] = CONTROL if each["special"] else USER_DEFINED
        if kind.model == "llama" and unknown in self._ids:
            types[self._ids[unknown]] = UNKNOWN
        if len(set(texts)) != self._size or "" in texts:  # llama.cpp would end the process
            raise ValueError("two tokens have the same text, or one has none")
        return texts, types

    def _scores(self, texts: list[str], types: list[int]) -> list[float]:
        """Return scores that make llama.cpp merge in the order of the merges.

        It merges any two neighbours that spell a token, the highest score first. That is the same
        only if the merges have every way to spell a token, one token after the other.
        """
        merges = self._merges()
        ranks: dict[str, list[int]] = {}
        for rank, (left, right) in enumerate(merges):
            ranks.setdefault(left + right, []).append(rank)
        added = {each["content"] for each in self._added}
        scores = [-float(len(merges) + 1)] * len(texts)
        for text, token in self._ids.items():
            found = ranks.get(text, [])
            if found:
                scores[token] = -float(found[0])
            if text in added or types[token] != NORMAL:
                continue
            cuts = range(1, len(text))
            ways = sum(text[:at] in self._ids and text[at:] in self._ids for at in cuts)
            if ways != len(found) or (found and not _follow_each_other(found, merges)):
                raise self._unknown(
                    f"merges that do not come from SentencePiece scores (of {text!r:.40})"
                )
        return scores

    def _special_fields(self, texts: Sequence[str]) -> dict[str, Field]:
        ids = {text: token for token, text in enumerate(texts)}
        bos, eos, pad, unknown = (
            self._named(f"{name}_token", ids) for name in ("bos", "eos", "pad", "unk")
        )
        ends = [token for token in self._listed_ids("eos_token_id") if token < self._size]
        eos = eos if eos is not None else next(iter(ends), None)
        if eos is None:
            raise ModelError(
                f"{self._folder} names no token that ends a reply: add eos_token to "
                f"{TOKENIZER_CONFIG}, or give a GGUF file."
            )
        adds_bos, adds_eos = self._added_around(bos, eos, ids)
        found: dict[str, Field] = {
            # Without one, llama.cpp would take any token.
            "tokenizer.ggml.bos_token_id": eos if bos is None else bos,
            "tokenizer.ggml.eos_token_id": eos,
            "tokenizer.ggml.add_bos_token": adds_bos,
            "tokenizer.ggml.add_eos_token": adds_eos,
        }
        more = [end for end in dict.fromkeys(ends) if end != eos and texts[end] not in KNOWN_ENDS]
        if len(more) > 2:
            raise self._unknown(f"{len(more) + 1} tokens that end a reply")
        for name, token in zip(("eot", "eom"), more, strict=False):
            found[f"tokenizer.ggml.{name}_token_id"] = token
        for name, optional in (("padding", pad), ("unknown", unknown)):
            if optional is not None:
                found[f"tokenizer.ggml.{name}_token_id"] = optional
        return found

    def _named(self, name: str, ids: dict[str, int]) -> int | None:
        """Return the token with this role, by its text or else by its id."""
        given = self._about.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        if isinstance(text, str) and text in ids:
            return ids[text]
        return next((each for each in self._listed_ids(f"{name}_id") if each < self._size), None)

    def _listed_ids(self, name: str) -> list[int]:
        given = (config.get(name) for config in self._configs)
        lists = (each if isinstance(each, list) else [each] for each in given)
        return [each for ids in lists for each in ids if type(each) is int and each >= 0]

    def _added_around(self, bos: int | None, eos: int, ids: dict[str, int]) -> tuple[bool, bool]:
        """Return whether the tokenizer puts BOS before and EOS after a text."""
        around: list[Any] = ["text"]
        for step in _flat(self._raw.get("post_processor"), "processors"):
            if step["type"] == "TemplateProcessing":
                parts = (each.get("SpecialToken") for each in step["single"])
                around = [ids[part["id"]] if part else "text" for part in parts]
            elif step["type"] != "ByteLevel":
                raise self._unknown(f"the post-processor {step['type']!r:.40}")
        at = around.index("text")
        if around[:at] not in ([], [bos]) or around[at + 1 :] not in ([], [eos]):
            raise self._unknown("other tokens around a text than BOS and EOS")
        said = self._about.get("add_bos_token")
        adds_bos = said if isinstance(said, bool) else at > 0
        return adds_bos and bos is not None, len(around) > at + 1

    def distinct(self, name: str) -> str:
        """Return a name that has "phi-3" in it only if the tokenizer works like that of Phi-3."""
        for word in ("phi-3", "phi3", "modern-bert"):
            name = re.sub(word, "model", name, flags=re.IGNORECASE)
        return f"phi-3 {name}" if self._strips_spaces() else name

    def _strips_spaces(self) -> bool:
        """Return whether special tokens remove the spaces after them, in the way of Phi-3."""
        strips = {each["content"]: bool(each.get("rstrip")) for each in self._added}
        if not any(strips.values()):
            return False
        wanted = {text: text not in PHI3_KEEPS_SPACES for text in strips}
        if strips != wanted or "</s>" not in strips or not strips.keys() >= PHI3_KEEPS_SPACES:
            raise self._unknown("tokens that remove the spaces after them")
        return True


def _flat(step: Any, inside: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a sequence, which may be nested."""
    if step is None:
        return
    if step["type"] == "Sequence":
        for each in step[inside]:
            yield from _flat(each, inside)
    else:
        yield step


def _follow_each_other(ranks: list[int], merges: list[tuple[str, str]]) -> bool:
    """Return whether the merges of a token are neighbours. Runs of one character have equal scores
    in SentencePiece, so that their merges are mixed: the longest ones first."""
    if ranks[-1] - ranks[0] == len(ranks) - 1:
        return True
    between = merges[ranks[0] : ranks[-1] + 1]
    return all(len(set(left + right)) == 1 for left, right in between)


def _metaspace(steps: list[dict[str, Any]]) -> str | None:
    match steps:
        case [{"type": "Metaspace", "replacement": "\u2581", "split": False} as step]:
            scheme = step.get("prepend_scheme", "always")
            return scheme if scheme in ("first", "always", "never") else None
    return None


def _is_byte(text: str) -> bool:
    return len(text) == 6 and text.startswith("<0x") and text.endswith(">")


def byte_letters() -> list[str]:
    """Return GPT-2's printable letter of each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
