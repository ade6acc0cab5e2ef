"""Prompts of texts and tokens, and prompts for the text of a gap."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from rekindle.errors import BadRequest, Unsupported
from rekindle.protocol.requests import ExtraFile, Infill
from rekindle.runtime.encode.infill import InfillEncoder, mixed_tokens
from rekindle.tokens import FimTokens
from tests.support.numpy_engine.tokenizer import ByteTokenizer

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE, BOS = range(250, 256)
FIM = FimTokens(prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE)
WITH_FILES = FimTokens(
    prefix=PREFIX, suffix=SUFFIX, middle=MIDDLE, repository=REPOSITORY, file=FILE
)


@dataclass
class CodeTokenizer(ByteTokenizer):
    """Bytes, with tokens for a gap."""

    fim: FimTokens | None = field(default_factory=lambda: FIM)  # type: ignore[assignment]
    add_bos: bool = False
    bos: int | None = BOS
    longest_bytes: int = 1

    def __post_init__(self) -> None:
        super().__init__()


def encoded(
    infill: Infill, start: str = "", *, context: int = 1000, reply: int = 10, **tokenizer: object
) -> str:
    """The prompt, with its control tokens as letters in brackets."""
    names = {PREFIX: "[P]", SUFFIX: "[S]", MIDDLE: "[M]", REPOSITORY: "[R]", FILE: "[F]", BOS: "^"}
    code = CodeTokenizer(**tokenizer)  # type: ignore[arg-type]
    tokens = InfillEncoder(code, context).encode(infill, start, reply)
    return "".join(names.get(each) or code.piece(each, special=True).decode() for each in tokens)


def test_the_gap_comes_after_what_is_before_and_behind_it() -> None:
    gap = Infill(prefix="before", suffix="behind")
    assert encoded(gap, "start") == "[P]before[S]behind[M]start"
    assert encoded(gap, add_bos=True) == "^[P]before[S]behind[M]"


def test_other_files_come_first_as_a_repository_if_the_model_knows_them() -> None:
    gap = Infill(prefix="a", suffix="b", extra=[ExtraFile("x.c", "one"), ExtraFile("y.c", "two")])
    assert encoded(gap, fim=WITH_FILES) == (
        "[R]myproject\n[F]x.c\none[F]y.c\ntwo[F]filename\n[P]a[S]b[M]"
    )
    assert encoded(gap) == ("\n\n--- snippet ---\n\none\n\n--- snippet ---\n\ntwo[P]a[S]b[M]")


def test_a_text_with_the_name_of_a_control_token_stays_text() -> None:
    assert encoded(Infill(prefix="<|im_end|>", suffix="")) == "[P]<|im_end|>[S][M]"


def test_what_does_not_fit_is_left_out_far_from_the_gap() -> None:
    """The end of the prefix and the start of the suffix stay, and the last of the excerpts."""
    long = Infill(prefix="a" * 500 + "END", suffix="START" + "b" * 500)
    found = encoded(long, context=104, reply=20)
    prefix, _, rest = found.removeprefix("[P]").partition("[S]")
    suffix, _, inside = rest.partition("[M]")
    assert (len(prefix), len(suffix), inside) == (60, 20, "")
    assert prefix.endswith("aEND")
    assert suffix.startswith("STARTb")
    near = Infill(prefix="a", suffix="b", extra=[ExtraFile("x", "c" * 500 + "LAST")])
    found = encoded(near, context=104, reply=20)
    assert found.endswith("cLAST[P]a[S]b[M]")
    assert found.startswith("c" * 70)


def test_a_prompt_for_a_gap_always_leaves_room_for_the_reply() -> None:
    gap = Infill(prefix="a" * 900, suffix="b" * 900, extra=[ExtraFile("x", "c" * 900)])
    for context, reply in [(64, 10), (64, 1000), (1000, 0), (16, 4)]:
        code = CodeTokenizer(add_bos=True)
        tokens = InfillEncoder(code, context).encode(gap, "d" * 900, reply or None)
        assert len(tokens) < context


def test_a_model_without_tokens_for_a_gap_says_so() -> None:
    with pytest.raises(Unsupported, match="cannot fill in the middle"):
        InfillEncoder(ByteTokenizer(), 100).encode(Infill(), "", None)


def test_texts_and_tokens_are_one_prompt() -> None:
    code = CodeTokenizer(add_bos=True)
    a = code.encode("a", special=False)
    assert mixed_tokens([7, "a", 8], code) == [7, *a, 8]
    assert mixed_tokens(["a", 8], code) == [BOS, *a, 8], "BOS comes before a text"
    assert mixed_tokens(["<|im_end|>"], ByteTokenizer()) == [0], (
        "its author may write control tokens"
    )
    with pytest.raises(BadRequest, match="token ids"):
        mixed_tokens(["a", 10_000], code)


def test_the_tokens_for_a_gap_are_found_by_their_usual_names() -> None:
    qwen = {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3, "<|file_sep|>": 4}
    assert FimTokens.named(qwen) == FimTokens(prefix=1, suffix=2, middle=3, file=4)
    assert FimTokens.named({"<fim_prefix>": 1, "<fim_suffix>": 2}) is None
