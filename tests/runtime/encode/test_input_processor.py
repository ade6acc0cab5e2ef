"""Encodes requests: the choices of a request share its prompt, and too long prompts are refused."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec import structs

from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.engine.base import TokenMask
from rekindle.errors import ContextTooLong, Unsupported
from rekindle.protocol.requests import Choice, GenerateRequest, Names, SamplingParams, ToolUse
from tests.chat.tool_templates import HERMES
from tests.support.agent import TOOLS
from tests.support.conversations import Conversations
from tests.support.fake import FakeEngine
from tests.support.harness import RuntimeHarness

ASK = GenerateRequest(
    turn=1,
    more_choices=[Choice(turn=2, seed=8), Choice(turn=3, seed=9, names=Names(in_memory=True))],
    messages=[{"role": "user", "content": "Add one and two."}],
    tools=TOOLS,
    names=Names(session_id="sums"),
    sampling=SamplingParams(seed=7),
    max_tokens=None,
)


def test_the_choices_of_a_request_are_encoded_once() -> None:
    talks = Conversations(HERMES)
    processor = talks.runtime.input_processor
    with patch.object(
        processor._encoder, "chat", autospec=True, side_effect=processor._encoder.chat
    ) as rendered:
        choices = processor.encode(ASK)
    assert rendered.call_count == 1
    assert len({id(choice.prompt) for choice in choices}) == 1


def test_each_choice_has_its_own_turn_seed_names_and_parser() -> None:
    choices = Conversations(HERMES).runtime.input_processor.encode(ASK)
    assert [each.request.turn for each in choices] == [1, 2, 3]
    assert [each.request.sampling.seed for each in choices] == [7, 8, 9]
    assert [each.request.names for each in choices] == [
        Names(session_id="sums"),
        None,
        Names(in_memory=True),
    ]
    assert len({id(each.decoding.parser) for each in choices}) == 3


def test_a_grammar_is_compiled_once_and_each_choice_has_its_own_state() -> None:
    asked = structs.replace(ASK, tool_use=ToolUse(choice="required"))
    compile = GrammarCompiler.compile
    with patch.object(GrammarCompiler, "compile", autospec=True, side_effect=compile) as compiled:
        processor = Conversations(HERMES).runtime.input_processor
        first, *others = (each.decoding.token_mask for each in processor.encode(asked))
    assert compiled.call_count == 1
    assert first is not None

    def allowed(mask: TokenMask | None) -> list[bool]:
        assert mask is not None
        logits = np.zeros(processor.tokenizer.size, np.float32)
        mask.mask(logits)
        return list(np.isfinite(logits))

    before = allowed(first)
    first.accept(before.index(True))
    assert allowed(first) != before
    assert [allowed(each) for each in others] == [before, before]


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    harness = RuntimeHarness(FakeEngine(context_tokens=60))
    request = GenerateRequest(
        turn=1, prompt=list(range(60)), sampling=SamplingParams(), max_tokens=None
    )
    with pytest.raises(ContextTooLong, match=r"60 tokens.*60"):
        harness.encode_one(request)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, "has 10"),
        ({"tools": [{**TOOLS[0], "note": "x" * (16 << 20)}]}, "at least 10"),
    ],
    ids=["messages", "tools"],
)
def test_no_grammar_is_compiled_for_a_prompt_that_does_not_fit(fields: Any, found: str) -> None:
    processor = Conversations(HERMES).runtime.input_processor
    with (
        patch.object(processor._output_format, "decodings", autospec=True) as compiled,
        pytest.raises(ContextTooLong, match=found),
    ):
        processor.encode(structs.replace(ASK, **fields))
    compiled.assert_not_called()


def test_an_exact_request_is_refused_where_no_answer_would_be_exact() -> None:
    processor = RuntimeHarness(FakeEngine(can_be_exact=False)).runtime.input_processor
    asked = GenerateRequest(turn=1, prompt=[1, 2, 3], sampling=SamplingParams(), max_tokens=4)
    assert processor.encode(asked)
    with pytest.raises(Unsupported, match="cache_exact") as raised:
        processor.encode(structs.replace(asked, exact=True))
    assert raised.value.param == "cache_exact"
