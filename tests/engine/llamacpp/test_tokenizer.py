"""A large text is tokenized like a small one, in time that grows with its length only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.engine.llamacpp import tokenizer as module
from rekindle.engine.llamacpp.tokenizer import LARGE_CHARACTERS, LlamaTokenizer
from rekindle.errors import BadRequest
from tests.support.gguf_vocabulary import llama_tokenizer
from tests.support.rounds import rounds
from tests.support.tiny import write_llama
from tests.support.tiny_sentencepiece import write_sentencepiece_gguf

EXAMPLES = settings(max_examples=rounds(100, 5_000), derandomize=True, database=None, deadline=None)
PARTS = [
    *("<|im_start|>", "<|endoftext|>", "<|end|>", "<|turn|>", "<s>", "</s>", "<unk>", "<tool>"),
    *("\n", "\n\n", "\n\n\n\n\n", " ", "   ", "\t", "\f", "<", "<|", "|>", "<tool", "th", "hello"),
    *(" the", "1234", "é", "日本", "\N{GRINNING FACE}", "\ufffd", "\0", "\N{NO-BREAK SPACE}"),
]
texts = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=16).map("".join)


@pytest.fixture(scope="module")
def vocabularies(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path
) -> Iterator[list[LlamaTokenizer]]:
    """Of both kinds, with tokens of every kind. In a Phi-3 some remove the blanks after them."""
    folder = tmp_path_factory.mktemp("vocabularies")
    own = ("<tool>", "<|endoftext|>", "\n", "\n\n", "\n\n\n")
    files = [
        write_llama(folder / "bytes.gguf"),
        write_sentencepiece_gguf(folder / "plain.gguf", space_in_front=False, user_defined=own),
        write_sentencepiece_gguf(folder / "spaced.gguf", space_in_front=True, user_defined=own),
        write_sentencepiece_gguf(
            folder / "phi.gguf", space_in_front=True, name="phi-3", user_defined=own[:2]
        ),
    ]
    with (
        llama_tokenizer(smollm2_path) as real,
        llama_tokenizer(files[0]) as first,
        llama_tokenizer(files[1]) as second,
        llama_tokenizer(files[2]) as third,
        llama_tokenizer(files[3]) as fourth,
    ):
        yield [real, first, second, third, fourth]


@EXAMPLES
@given(text=texts, special=st.booleans(), add_special=st.booleans())
def test_a_large_text_has_the_tokens_that_llama_cpp_gives_it(
    vocabularies: list[LlamaTokenizer], text: str, special: bool, add_special: bool
) -> None:
    """Every text counts as large here, so that llama.cpp can tokenize it whole for comparison."""
    for each in vocabularies:
        whole = each.encode(text, special=special, add_special=add_special)
        with patch.object(module, "LARGE_CHARACTERS", -1):
            assert each.encode(text, special=special, add_special=add_special) == whole


@pytest.mark.parametrize("between", ["", "x", "\n "])
@pytest.mark.parametrize("special", [True, False])
def test_llama_cpp_never_splits_a_large_text_at_special_tokens(
    vocabularies: list[LlamaTokenizer],
    monkeypatch: pytest.MonkeyPatch,
    between: str,
    special: bool,
) -> None:
    """The time for that grows with the square of their number."""
    spaced, marker = vocabularies[3], "<|turn|>" if special else "<tool>"
    [marked] = spaced.encode(marker, special=special)
    passed: list[str] = []
    encode = LlamaTokenizer._encode

    def recorded(self: LlamaTokenizer, text: str, **options: bool) -> list[int]:
        passed.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(LlamaTokenizer, "_encode", recorded)
    text = f"{between}{marker}" * (LARGE_CHARACTERS // len(marker) + 1)
    ids = spaced.encode(text, special=special)
    assert ids.count(marked) == text.count(marker)
    assert not any(marker in part for part in passed)


def test_a_text_with_too_many_special_tokens_is_refused(
    vocabularies: list[LlamaTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SPECIAL_TOKENS", 5_000)
    text = "<s>" * 5_000 + "x" * LARGE_CHARACTERS
    for each in vocabularies[2:]:
        assert each.encode(text, special=True).count(each.control_texts["<s>"]) == 5_000
        with pytest.raises(BadRequest, match="more than 5000 special tokens: send it in parts"):
            each.encode(f"<s>{text}", special=True)
        assert each.encode(f"<s>{text}", special=False)
