"""llama.cpp encodes texts with a converted vocabulary as `tokenizers` does with tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rekindle.errors import ModelError
from rekindle.models.conversion import convert
from rekindle.models.vocabulary import byte_letters, vocabulary_fields
from tests.support.gguf_vocabulary import llama_tokenizer, read_metadata
from tests.support.hard_strings import hard_strings, runs_of_spaces
from tests.support.rounds import rounds
from tests.support.tiny_safetensors import write_tiny_folder
from tests.support.tiny_tokenizers import KINDS, SPACE, trained, write_trained

from .tiny import RecordedProgress

COUNT = rounds(400, 10_000)
SPARE_ROWS = 3  # embeddings without a token


def write_folder(folder: Path, kind: str, **about: Any) -> Path:
    size = trained(kind).get_vocab_size() + SPARE_ROWS
    write_tiny_folder(folder, vocab_size=size)
    write_trained(folder, kind, **about)
    return folder


def converted(folder: Path) -> Path:
    models_dir = folder.parent / "models"
    return convert(folder, models_dir=models_dir, progress=RecordedProgress())


@pytest.mark.parametrize("kind", KINDS)
def test_hard_strings_are_encoded_as_by_the_models_own_tokenizer(kind: str, tmp_path: Path) -> None:
    own = trained(kind)
    # Gemma's tokenizer finds two of its characters for spaces in a text, but not two spaces.
    # llama.cpp cannot tell them apart.
    unclear = SPACE * 2 if kind == "gemma" else "\0never"
    texts = [*hard_strings(COUNT, seed=7), *runs_of_spaces(COUNT // 4)]
    with llama_tokenizer(converted(write_folder(tmp_path / kind, kind))) as tokenizer:
        for text in texts:
            if unclear in text:
                continue
            own.encode_special_tokens = True  # as text
            plain = own.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=False) == plain, ascii(text)
            own.encode_special_tokens = False
            special = own.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=True) == special, ascii(text)


def test_control_characters_without_a_token_are_left_out_as_by_the_own_tokenizer(
    tmp_path: Path,
) -> None:
    """SmolLM and SmolLM2 have such a vocabulary."""
    lost = [4, 6, 19, 0xC0, 0xF1, 0xFF]
    folder = write_folder(tmp_path / "smollm", "smollm")
    change(folder, lambda raw: lose_bytes(raw, lost))
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.encode_special_tokens = True
    texts = ["a\x04b", "the \x06\x13 end", "\x04", *hard_strings(COUNT // 4, seed=9)]
    with llama_tokenizer(converted(folder)) as tokenizer:
        for text in texts:
            expected = own.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=False) == expected, ascii(text)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_become_the_same_text(kind: str, tmp_path: Path) -> None:
    own = trained(kind)
    with llama_tokenizer(converted(write_folder(tmp_path / kind, kind))) as tokenizer:
        for text in hard_strings(COUNT // 4, seed=8):
            ids = tokenizer.encode(text, special=True)
            pieces = b"".join(tokenizer.piece(token, special=True) for token in ids)
            expected = own.decode(ids, skip_special_tokens=False)
            assert pieces.decode(errors="replace").lstrip(" ") == expected.lstrip(" "), ascii(text)


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "metaspace", "llama2"])
def test_a_long_text_is_encoded_like_a_short_one(kind: str, tmp_path: Path) -> None:
    own = trained(kind)
    own.encode_special_tokens = False
    text = "Cafe\u0301 und <|turn|> noch <|end|>ein Wort. " * 800
    with llama_tokenizer(converted(write_folder(tmp_path / kind, kind))) as tokenizer:
        expected = own.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, special=True) == expected


@pytest.mark.parametrize(
    ("kind", "adds_bos"), [("gpt2", False), ("qwen2", False), ("llama3", True), ("llama2", True)]
)
def test_roles_of_tokens_come_back(kind: str, adds_bos: bool, tmp_path: Path) -> None:
    own = trained(kind)
    folder = write_folder(tmp_path / kind, kind, pad_token="<|pad|>")
    with llama_tokenizer(converted(folder)) as tokenizer:
        bos, eos = ("<s>", "</s>") if kind == "llama2" else ("<|turn|>", "<|end|>")
        assert (tokenizer.bos, tokenizer.eos) == (own.token_to_id(bos), own.token_to_id(eos))
        assert tokenizer.add_bos is adds_bos
        assert tokenizer.size == own.get_vocab_size() + SPARE_ROWS
        assert own.token_to_id("<|end|>") in tokenizer.end_tokens
        controls = {each["content"]: each["id"] for each in added_tokens(folder) if each["special"]}
        controls.pop("<unk>", None)
        assert tokenizer.control_texts == controls


def added_tokens(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "tokenizer.json").read_text())[
        "added_tokens"
    ]
    return found


def test_the_configuration_decides_whether_bos_is_added(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "llama3", "llama3", add_bos_token=False)
    with llama_tokenizer(converted(folder)) as tokenizer:
        assert tokenizer.add_bos is False


def test_every_end_token_of_the_generation_settings_ends_a_reply(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gpt2", "gpt2", eos_token="<|pad|>")
    ids = [2, 300, 301]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with llama_tokenizer(converted(folder)) as tokenizer:
        assert tokenizer.end_tokens >= set(ids)


def test_the_chat_template_is_in_the_file(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "gpt2", "gpt2")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = read_metadata(converted(folder))
    assert found["tokenizer.chat_template"] == "{{ messages[0].content }}"


@pytest.mark.parametrize("name", ["my-Phi-3-copy", "phi3", "modern-bert"])
def test_a_name_that_llama_cpp_takes_for_another_tokenizer_is_changed(
    name: str, tmp_path: Path
) -> None:
    fields = vocabulary_fields(write_folder(tmp_path / name, "gpt2"), 1600, name)
    assert not {"phi-3", "phi3", "modern-bert"} & set(str(fields["general.name"]).lower().split())
    text = "a<|end|> b"
    expected = trained("gpt2").encode(text).ids
    with llama_tokenizer(converted(tmp_path / name)) as tokenizer:
        assert tokenizer.encode(text, special=True) == expected


def test_spaces_after_the_control_tokens_of_phi3_are_removed(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "phi", "llama2")
    change(folder, phi3_tokens)
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with llama_tokenizer(converted(folder)) as tokenizer:
        for text in ("<|turn|> \n a<|end|>  b", "<s> a</s> b", "a <|turn|> ", "x<|endoftext|> y"):
            expected = own.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, special=True) == expected, text


def phi3_tokens(raw: dict[str, Any]) -> None:
    pad = next(each for each in raw["added_tokens"] if each["content"] == "<|pad|>")
    pad["content"] = "<|endoftext|>"
    for each in raw["added_tokens"]:
        each["rstrip"] = each["content"] not in ("<unk>", "<s>", "<|endoftext|>")


def change(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def unknown_pattern(raw: dict[str, Any]) -> None:
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "\\w+"}


def word_pieces(raw: dict[str, Any]) -> None:
    raw["model"]["type"] = "WordPiece"


def lower_case(raw: dict[str, Any]) -> None:
    raw["normalizer"] = {"type": "Lowercase"}


def strip_left(raw: dict[str, Any]) -> None:
    raw["added_tokens"][0]["lstrip"] = True


def strip_right(raw: dict[str, Any]) -> None:
    raw["added_tokens"][0]["rstrip"] = True


def other_ends(raw: dict[str, Any]) -> None:
    raw["post_processor"] = {"type": "RobertaProcessing"}


def lost_merge(raw: dict[str, Any]) -> None:
    merges = raw["model"]["merges"]
    merges.remove(next(pair for pair in merges if len("".join(pair)) > 2))


def lost_byte(raw: dict[str, Any]) -> None:
    raw["model"]["vocab"]["unseen"] = raw["model"]["vocab"].pop("<0x41>")


def lost_letter(raw: dict[str, Any]) -> None:
    lose_bytes(raw, [0x41])


def lose_bytes(raw: dict[str, Any], lost: list[int]) -> None:
    """Give the places of these bytes to tokens that no text has."""
    vocabulary, letters = raw["model"]["vocab"], byte_letters()
    gone = [letters[byte] for byte in lost]
    for place, letter in enumerate(gone):
        vocabulary[f"unseen-{place}"] = vocabulary.pop(letter)
    merges = raw["model"]["merges"]
    raw["model"]["merges"] = [pair for pair in merges if not set("".join(pair)) & set(gone)]


def same_text(raw: dict[str, Any]) -> None:
    raw["added_tokens"][0]["content"] = raw["added_tokens"][1]["content"]


def no_vocabulary(raw: dict[str, Any]) -> None:
    del raw["model"]["vocab"]


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("llama3", unknown_pattern, "unknown pre-tokenizer"),
        ("gpt2", word_pieces, "tokenizer of the type WordPiece"),
        ("gpt2", lower_case, "normalizer Lowercase"),
        ("gpt2", strip_left, "rules about its place"),
        ("gpt2", strip_right, "remove the spaces after them"),
        ("gpt2", lost_letter, "no tokens for 1 of the 256 bytes"),
        ("gpt2", other_ends, "post-processor 'RobertaProcessing'"),
        ("llama2", lost_merge, "do not come from SentencePiece scores"),
        ("llama2", lost_byte, "no tokens for some of the 256 bytes"),
        ("llama2", lower_case, "unknown normalizer"),
        ("gpt2", same_text, "two tokens have the same text"),
        ("gpt2", no_vocabulary, "is damaged"),
    ],
)
def test_a_tokenizer_that_would_not_be_reproduced_is_refused(
    kind: str, edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / kind, kind)
    change(folder, edit)
    with pytest.raises(ModelError, match=message):
        converted(folder)
    assert not list(tmp_path.rglob("*.gguf"))


def test_more_tokens_than_embeddings_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    write_trained(folder, "gpt2")
    with pytest.raises(ModelError, match="more tokens than embeddings"):
        converted(folder)


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    with pytest.raises(ModelError, match=r"has no tokenizer.json.*Fetch it"):
        converted(folder)
