"""A matcher enforces its grammar on any logits and never stops the engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rekindle.chat.grammar.lark import Grammar
from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.errors import BadRequest, Unsupported
from tests.chat.grammar.writer import ByteVocabulary, Writer, json_grammar

INTEGER = json_grammar({"type": "integer"}, "response_format")
#: Quick to build, but each further letter makes its automaton larger.
GROWING = json_grammar({"type": "string", "pattern": "^(.*a.{1,500}){1,500}$"}, "response_format")


def row(size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.arange(size, dtype=np.float32)


@pytest.mark.parametrize("extra", range(33))
def test_any_size_of_vocabulary_is_masked_to_its_end(extra: int) -> None:
    writer = Writer([f"<|{number}|>" for number in range(extra)])
    logits = row(writer.vocabulary.size)
    writer.matcher(INTEGER).mask(logits)
    assert set(np.flatnonzero(np.isfinite(logits))) == {*b"-0123456789"}


def test_allowed_logits_keep_their_value() -> None:
    writer = Writer()
    logits = row(writer.vocabulary.size)
    writer.matcher(INTEGER).mask(logits)
    assert [logits[digit] for digit in b"059"] == [*b"059"]


def test_a_row_may_be_longer_than_the_vocabulary() -> None:
    writer = Writer()
    logits = row(writer.vocabulary.size + 100)
    writer.matcher(INTEGER).mask(logits)
    assert set(np.flatnonzero(np.isfinite(logits))) == {*b"-0123456789"}


def test_a_complete_reply_may_only_end_and_stays_so() -> None:
    writer = Writer()
    matcher = writer.matcher(json_grammar({"type": "null"}, "response_format"))
    assert not matcher.done
    assert writer.follow(matcher, "null and void") == "null"
    for _ in range(3):
        assert writer.allowed(matcher) == writer.vocabulary.end_tokens
        assert matcher.done
        assert matcher.trouble is None
        matcher.accept(min(writer.vocabulary.end_tokens))


def test_a_grammar_that_turns_out_too_costly_ends_the_reply_and_says_so() -> None:
    writer = Writer()
    matcher = writer.matcher(GROWING)
    assert matcher.trouble is None
    writer.follow(matcher, '"' + "abca" * 200)
    assert matcher.trouble
    assert "\n" not in matcher.trouble
    assert writer.allowed(matcher) == writer.vocabulary.end_tokens


def test_a_token_that_was_not_allowed_ends_the_reply_and_says_so() -> None:
    writer = Writer()
    matcher = writer.matcher(INTEGER)
    matcher.accept(ord("x"))
    assert matcher.trouble
    assert writer.allowed(matcher) == writer.vocabulary.end_tokens


def test_a_reply_can_be_replayed_from_its_tokens() -> None:
    writer = Writer()
    matcher = writer.matcher(json_grammar({"const": "abc"}, "response_format"))
    writer.follow(matcher, '"ab')
    matcher.accept(ord("x"))  # a token that was lost with its step
    matcher.replay([*b'"a'])
    assert matcher.trouble is None
    assert writer.allowed(matcher) == {ord("b")}


def test_a_grammar_that_cannot_be_built_is_a_mistake_of_the_request() -> None:
    with pytest.raises(BadRequest) as refused:
        Writer().matcher(Grammar("start: nowhere", "tools"))
    assert refused.value.param == "tools"
    assert "nowhere" in str(refused.value)


def test_a_model_without_an_end_token_is_not_constrained() -> None:
    vocabulary = ByteVocabulary()
    compiler = GrammarCompiler(vocabulary, vocabulary_size=vocabulary.size, end_tokens=())
    with pytest.raises(Unsupported):
        compiler.compile(INTEGER)


class Counted(ByteVocabulary):
    """Counts how often its tokens are read."""

    read = 0

    def piece(self, token: int, *, special: bool) -> bytes:
        self.read += token == 0
        return super().piece(token, special=special)


def test_the_vocabulary_is_read_once_and_only_when_it_is_needed() -> None:
    vocabulary = Counted()
    compiler = vocabulary.compiler()
    assert vocabulary.read == 0
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(compiler.compile, [INTEGER] * 8))
    assert vocabulary.read == 1
    assert len({id(each) for each in made}) == 8


def test_control_tokens_do_not_match_text() -> None:
    writer = Writer(["<tool>"])
    matcher = writer.matcher(Grammar("start: /(?s:.*)/", "tools"))
    allowed = writer.allowed(matcher)
    assert writer.vocabulary.control_texts["<tool>"] not in allowed
    assert 0xFF not in allowed  # in no character
    assert {*b"ab<"} < allowed
