"""Trains tiny tokenizers of the kinds that models have, and writes them as model folders do."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tests.support.hard_strings import hard_strings
from tests.support.tiny import TEMPLATE

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_PATTERN = LLAMA3_PATTERN.replace(r"\p{N}{1,3}", r"\p{N}")
SPACE = "\u2581"
ENDS = ("<|end|>", "<|turn|>", "<|pad|>")
TRAINING_TEXTS = 3000
FIRST_PIECE = 258  # three control tokens and the bytes come before


def _byte_level(pre: Any, normalizer: Any = None, *, ignore_merges: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=list(ENDS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(hard_strings(TRAINING_TEXTS, seed=1), trainer)
    return tokenizer


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def gpt2() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def smollm() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _byte_level(pre_tokenizers.Sequence([digits, byte_level]))


def llama3() -> Tokenizer:
    tokenizer = _byte_level(_split(LLAMA3_PATTERN), ignore_merges=True)
    begin = processors.TemplateProcessing(
        single="<|turn|> $A", pair="<|turn|> $A <|turn|> $B", special_tokens=[("<|turn|>", 1)]
    )
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), begin]
    )
    return tokenizer


def phi4() -> Tokenizer:
    return _byte_level(_split(LLAMA3_PATTERN))


def qwen2() -> Tokenizer:
    tokenizer = _byte_level(_split(QWEN2_PATTERN), normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def _sentencepiece(
    normalizer: Any, pre: Any, added: tuple[str, ...] = (), runs: tuple[str, ...] = ()
) -> Tokenizer:
    """Train pieces, and write all ways to spell each one, as converters of such models do. `runs`
    are pieces with the highest score."""
    trained = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    trained.normalizer = normalizers.Replace(" ", SPACE)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1800, special_tokens=special, limit_alphabet=300, show_progress=False
    )
    # Nobody trains on the spelling of control tokens: with a piece "s>", any text makes "<s>".
    texts = (text for text in hard_strings(TRAINING_TEXTS, seed=1) if ">" not in text)
    trained.train_from_iterator(texts, trainer)
    raw = json.loads(trained.to_str())
    vocabulary: dict[str, int] = raw["model"]["vocab"]
    for run in runs:
        vocabulary.setdefault(run, len(vocabulary))
    raw["model"]["merges"] = _all_merges(vocabulary, runs)
    raw["added_tokens"] = raw["added_tokens"][:3]  # bytes are no added tokens
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.normalizer = normalizer
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ENDS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def _all_merges(vocabulary: dict[str, int], runs: tuple[str, ...]) -> list[list[str]]:
    """Sort by score, and then by the lengths of both parts."""
    found = [
        (0 if text in runs else token, -at, at - len(text), text[:at], text[at:])
        for text, token in vocabulary.items()
        for at in range(1, len(text))
        if token > FIRST_PIECE and text[:at] in vocabulary and text[at:] in vocabulary
    ]
    return [[left, right] for *_, left, right in sorted(found)]


def llama2() -> Tokenizer:
    steps = [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    return _sentencepiece(normalizers.Sequence(steps), None)


def gemma() -> Tokenizer:
    split = pre_tokenizers.Split(" ", "merged_with_previous")
    runs = tuple(letter * count for letter in (SPACE, "\n") for count in range(2, 32))
    return _sentencepiece(normalizers.Replace(" ", SPACE), split, (*runs, "<table>"), runs)


def mistral() -> Tokenizer:
    """Version 3 of Mistral's SentencePiece vocabulary."""
    metaspace = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    return _sentencepiece(None, metaspace)


def metaspace() -> Tokenizer:
    return _sentencepiece(
        None, pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always", split=False)
    )


KINDS: dict[str, Callable[[], Tokenizer]] = {
    each.__name__: each
    for each in (gpt2, smollm, llama3, phi4, qwen2, llama2, gemma, mistral, metaspace)
}


@cache
def trained(kind: str) -> Any:
    return KINDS[kind]()


def write_trained(folder: Path, kind: str, **about: Any) -> Any:
    """Write the tokenizer into a model folder. Returns it."""
    tokenizer = trained(kind)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    is_byte_level = tokenizer.token_to_id("<s>") is None
    bos, eos = ("<|turn|>", "<|end|>") if is_byte_level else ("<s>", "</s>")
    given = {"bos_token": bos, "eos_token": eos, "chat_template": TEMPLATE, **about}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return tokenizer
