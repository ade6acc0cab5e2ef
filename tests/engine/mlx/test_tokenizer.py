"""The tokenizer of a folder agrees with llama.cpp on the same vocabulary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rekindle.chat.detokenize import Detokenizer
from rekindle.engine.llamacpp.tokenizer import LlamaTokenizer
from rekindle.engine.mlx.tokenizer import FolderTokenizer, load_tokenizer
from rekindle.errors import BadRequest, ModelError
from tests.support.gguf_vocabulary import (
    llama_tokenizer,
    read_metadata,
    write_folder_vocabulary,
)
from tests.support.rounds import rounds
from tests.support.tiny import CONTROL, TEMPLATE, VOCABULARY, write_llama
from tests.support.tiny_mlx import added_token, write_tokenizer
from tests.support.tiny_sentencepiece import (
    write_sentencepiece_folder,
    write_sentencepiece_gguf,
)

EXAMPLES = settings(max_examples=rounds(100, 5_000), derandomize=True, database=None, deadline=None)
PARTS = [
    *("<|im_start|>", "<|im_end|>", "<|end|>", "<|turn|>", "<s>", "</s>", "<unk>", "<0x41>"),
    *("<|", "|>", "<", "im_end", "\N{LOWER ONE EIGHTH BLOCK}", "Ġ"),
    *("Hello", " the", "hello", " don't", "I'LL", "1234567", " 3.14", "th", ".\n", "\n\n", "\r\n"),
    *(" ", "  ", "    ", "\t", "\xa0", "\u3000", "\u2028", "\0", "\x7f"),
    *("é", "e\u0301", "日本語", "क्षि", "😀", "🏳️\u200d🌈", "\ufffd", "\ufeff", "ß", "İ", "٣"),
]
#: Without code points that have no character: llama.cpp takes each of them alone, others do not.
assigned = st.text(st.characters(exclude_categories=("Cn", "Co", "Cs")), max_size=4)
texts = st.lists(st.one_of(st.sampled_from(PARTS), assigned), max_size=10).map("".join)


KINDS = ["tiny", "smollm2", "sentencepiece", "spaced"]


class Pair(NamedTuple):
    """One vocabulary in both formats."""

    folder: FolderTokenizer
    llama: LlamaTokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tokenizer(folder)
    with llama_tokenizer(write_llama(folder / "tiny.gguf")) as llama:
        yield Pair(load_tokenizer(folder, VOCABULARY), llama)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("smollm2")
    write_folder_vocabulary(read_metadata(smollm2_path), folder)
    with llama_tokenizer(smollm2_path) as llama:
        yield Pair(load_tokenizer(folder), llama)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with sentencepiece_pair(tmp_path_factory.mktemp("plain"), space_in_front=False) as pair:
        yield pair


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with sentencepiece_pair(tmp_path_factory.mktemp("spaced"), space_in_front=True) as pair:
        yield pair


@contextmanager
def sentencepiece_pair(folder: Path, *, space_in_front: bool) -> Iterator[Pair]:
    write_sentencepiece_folder(folder, space_in_front=space_in_front)
    path = write_sentencepiece_gguf(folder / "tiny.gguf", space_in_front=space_in_front)
    with llama_tokenizer(path) as llama:
        yield Pair(load_tokenizer(folder), llama)


def assert_agree(pair: Pair, text: str, *, special: bool) -> None:
    tokens = pair.folder.encode(text, special=special)
    assert tokens == pair.llama.encode(text, special=special)
    if not special:
        assert not {*tokens} & {*pair.folder.control_texts.values()}


@pytest.mark.long
@EXAMPLES
@given(texts, st.booleans())
def test_tiny_vocabularies_agree_on_any_text(tiny: Pair, text: str, special: bool) -> None:
    assert_agree(tiny, text, special=special)


@pytest.mark.long
@EXAMPLES
@given(texts, st.booleans())
def test_the_real_vocabulary_agrees_on_any_text(smollm2: Pair, text: str, special: bool) -> None:
    """Except for bytes without a token, around which others merge."""
    tokens = smollm2.folder.encode(text, special=special)
    spelled = b"".join(smollm2.folder.piece(token, special=True) for token in tokens)
    assume(spelled == text.encode())
    assert_agree(smollm2, text, special=special)


@pytest.mark.long
@EXAMPLES
@given(texts)
def test_sentencepiece_vocabularies_agree_on_text(
    sentencepiece: Pair, spaced: Pair, text: str
) -> None:
    """Except for control tokens: llama.cpp drops or adds spaces around them."""
    assert_agree(sentencepiece, text, special=False)
    assert_agree(spaced, text, special=False)


@pytest.mark.parametrize("name", KINDS)
def test_both_know_the_same_tokens(name: str, request: pytest.FixtureRequest) -> None:
    folder, llama = request.getfixturevalue(name)
    for known in ("size", "bos", "eos", "add_bos", "longest_bytes"):
        assert getattr(folder, known) == getattr(llama, known), known
    assert dict(folder.control_texts) == llama.control_texts
    assert folder.eos in folder.end_tokens <= llama.end_tokens
    for token in range(folder.size):
        assert folder.text(token) == llama.text(token)
        for special in (False, True):
            assert folder.piece(token, special=special) == llama.piece(token, special=special)


@pytest.mark.parametrize("name", KINDS)
def test_streamed_pieces_give_the_original_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name).folder
    text = "hello the é日本語😀\n  a"
    stream = Detokenizer(tokenizer, ())
    tokens = tokenizer.encode(text, special=False)
    shown = [*map(stream.push, tokens), stream.finish()]
    assert "".join(shown).removeprefix(" ") == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    assert len(tokens) * tokenizer.longest_bytes >= len(text.encode())


# -- what a folder may say -----------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path


def change(path: Path, **changes: Any) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | changes))


def change_model(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    change(folder / "tokenizer.json", model=raw["model"] | changes)


def test_encoding_never_truncates_pads_or_drops_out(folder: Path) -> None:
    text = "then " * 20
    before = load_tokenizer(folder).encode(text, special=False)
    cut: dict[str, Any] = {
        "direction": "Right",
        "max_length": 3,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    fill: dict[str, Any] = {
        "strategy": {"Fixed": 200},
        "direction": "Left",
        "pad_to_multiple_of": None,
    }
    fill |= {"pad_id": 2, "pad_type_id": 0, "pad_token": CONTROL[2]}
    change(folder / "tokenizer.json", truncation=cut, padding=fill)
    change_model(folder, dropout=0.9)
    assert load_tokenizer(folder).encode(text, special=False) == before


def test_a_vocabulary_cannot_spell_a_control_token_out_of_a_clients_text(folder: Path) -> None:
    """Pre-tokens that are looked up whole, as in Llama 3, may contain the text of a control
    token."""
    change_model(folder, ignore_merges=True)
    change(folder / "tokenizer.json", pre_tokenizer=None, post_processor=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(CONTROL[0], special=True) == [0]
    spelled = tokenizer.encode(CONTROL[0] * 3 + "a" + CONTROL[1], special=False)
    assert not {*spelled} & {0, 1, 2}
    text = b"".join(tokenizer.piece(token, special=False) for token in spelled)
    assert text.decode() == CONTROL[0] * 3 + "a" + CONTROL[1]
    assert not {*tokenizer.encode(CONTROL[0], special=False)} & {0, 1, 2}


def test_a_character_that_is_only_a_control_token_is_refused(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    change(folder / "tokenizer.json", added_tokens=[*raw["added_tokens"], added_token(100, "a")])
    with pytest.raises(BadRequest, match="has no tokens for 'a'"):
        load_tokenizer(folder).encode("a", special=False)


def test_added_text_tokens_are_not_control_tokens(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    call = added_token(VOCABULARY, "<tool_call>", special=False)
    change(folder / "tokenizer.json", added_tokens=[*raw["added_tokens"], call])
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<tool_call>", special=False) == [VOCABULARY]
    assert tokenizer.piece(VOCABULARY, special=False) == b"<tool_call>"
    assert "<tool_call>" not in tokenizer.control_texts


def test_ids_without_a_token_stand_for_nothing(folder: Path) -> None:
    """Models have more rows than tokens, so that matrices have round sizes."""
    tokenizer = load_tokenizer(folder, VOCABULARY + 4)
    assert tokenizer.size == VOCABULARY + 4
    assert tokenizer.piece(VOCABULARY + 3, special=True) == b""
    assert tokenizer.text(VOCABULARY + 3) == ""


def test_an_added_token_that_the_model_does_not_know_is_left_out(folder: Path) -> None:
    raw = json.loads((folder / "tokenizer.json").read_text())
    pad = added_token(VOCABULARY, "[PAD]")
    change(folder / "tokenizer.json", added_tokens=[*raw["added_tokens"], pad])
    tokenizer = load_tokenizer(folder, VOCABULARY)
    assert tokenizer.size == VOCABULARY
    assert max(tokenizer.encode("[PAD]", special=True)) < VOCABULARY


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({}, {}, {0}),
        ({"eos_token_id": 1}, {}, {0, 1}),
        ({"eos_token_id": [1, 5]}, {"eos_token_id": 2}, {0, 1, 2, 5}),
        ({"text_config": {"eos_token_id": 7}}, {}, {0, 7}),
        ({"eos_token_id": 1 << 40}, {"eos_token_id": ["x", None, True]}, {0}),
    ],
)
def test_end_tokens_of_all_files_count(
    folder: Path, config: dict[str, Any], generation: dict[str, Any], ends: set[int]
) -> None:
    change(folder / "config.json", **config)
    change(folder / "generation_config.json", **generation)
    assert load_tokenizer(folder).end_tokens == ends


def test_bos_and_eos_may_be_given_by_id(folder: Path) -> None:
    (folder / "tokenizer_config.json").unlink()
    change(folder / "config.json", bos_token_id=1, eos_token_id=0)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos, tokenizer.eos, tokenizer.add_bos) == (1, 0, False)
    assert tokenizer.chat_template is None


def test_the_chat_template_of_the_folder_is_read(folder: Path) -> None:
    assert load_tokenizer(folder).chat_template == TEMPLATE


@pytest.mark.parametrize(
    "damage",
    [
        {"model": None},
        {"model": {"type": "Quartz"}},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        {"added_tokens": [{"content": "a"}]},
        {"added_tokens": [{"id": "x", "content": "a", "special": True}]},
        {"added_tokens": 3},
        {"pre_tokenizer": {"type": "Quartz"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}},
    ],
)
def test_a_damaged_tokenizer_is_refused(folder: Path, damage: dict[str, Any]) -> None:
    change(folder / "tokenizer.json", **damage)
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing or damaged"):
        load_tokenizer(folder, VOCABULARY)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=f"{VOCABULARY} tokens, and the model knows 100"):
        load_tokenizer(folder, 100)
