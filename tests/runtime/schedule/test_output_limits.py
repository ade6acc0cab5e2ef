"""A reply begins, ends and is cut where vLLM's fields say, with a real sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rekindle.engine.base import EngineOptions, Sampled
from rekindle.errors import BadRequest, ContextTooLong
from rekindle.protocol.events import Delta, Started, TextDelta
from rekindle.protocol.requests import SamplingParams, StructuredOutput, ToolUse
from rekindle.runtime.schedule.output import TimeLimit
from tests.chat.tool_templates import HERMES
from tests.support.conversations import Conversations
from tests.support.fake import FakeEngine
from tests.support.harness import Reply, RuntimeHarness
from tests.support.numpy_engine import SUFFIX
from tests.support.numpy_engine.engine import NumpyEngine
from tests.support.numpy_engine.model import write_numpy

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> RuntimeHarness:
    path: Path = tmp_path_factory.mktemp("numpy") / f"tiny{SUFFIX}"
    options = EngineOptions(path=write_numpy(path, context=256), parallel=2)
    return RuntimeHarness(NumpyEngine(options))


def ask(harness: RuntimeHarness, *, max_tokens: int = 12, **fields: Any) -> Reply:
    """Split fields into those of sampling and those of the request."""
    names = SamplingParams.__dataclass_fields__
    sampling = {
        "temperature": 0.0,
        **{name: fields.pop(name) for name in [*fields] if name in names},
    }
    return harness.ask_text(
        TEXT, sampling=SamplingParams(**sampling), max_tokens=max_tokens, **fields
    )


def test_a_stop_token_ends_the_reply_and_is_not_part_of_it(harness: RuntimeHarness) -> None:
    said = ask(harness).tokens
    at = next(n for n in range(2, 12) if said[n] not in said[:n])
    reply = ask(harness, stop_token_ids=[said[at]])
    assert reply.tokens == said[:at]
    assert reply.finished.reason == "stop"
    ignoring = ask(harness, stop_token_ids=[said[at]], ignore_eos=True)
    assert ignoring.tokens == said[:at]


def test_a_reply_does_not_end_before_its_minimum(harness: RuntimeHarness) -> None:
    said = ask(harness, ignore_eos=True).tokens
    first = said[0]
    reply = ask(harness, stop_token_ids=[first], min_tokens=4, max_tokens=30)
    assert first not in reply.tokens[:4]
    assert len(reply.tokens) >= 4
    ended = ask(harness, stop_token_ids=[first], max_tokens=30)
    assert ended.tokens == []


def test_a_bad_word_is_not_in_the_reply(harness: RuntimeHarness) -> None:
    said = ask(harness, ignore_eos=True).text
    word = said[2:5]
    assert word in said
    assert word not in ask(harness, bad_words=[word], ignore_eos=True, max_tokens=40).text


def test_sampling_fields_of_all_kinds_work_together(harness: RuntimeHarness) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.8,
        "seed": 1,
        "top_k": 40,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "dry_multiplier": 2.0,
        "min_tokens": 20,
        "bad_words": ["a", "the"],
    }
    reply = ask(harness, **fields, max_tokens=20)
    assert len(reply.tokens) == 20
    assert "a" not in reply.text
    assert ask(harness, **fields, max_tokens=20).tokens == reply.tokens


def test_dry_ends_a_loop(harness: RuntimeHarness) -> None:
    def longest_repeat(tokens: list[int]) -> int:
        """Length of the longest run of tokens that occurs twice."""
        count = len(tokens)
        lengths = (
            length
            for length in range(count, 0, -1)
            if len({tuple(tokens[at : at + length]) for at in range(count - length + 1)})
            < count - length + 1
        )
        return next(lengths, 0)

    plain = ask(harness, ignore_eos=True, max_tokens=80).tokens
    dry = ask(harness, ignore_eos=True, max_tokens=80, dry_multiplier=50.0).tokens
    assert longest_repeat(dry) < longest_repeat(plain)


def test_a_grammar_ends_a_reply_before_its_minimum(harness: RuntimeHarness) -> None:
    output = StructuredOutput(choices=["yes"], param="guided_choice")
    reply = ask(harness, min_tokens=9, structured_output=output)
    assert reply.text == "yes"
    assert reply.finished.reason == "stop"


def test_a_grammar_goes_on_up_to_the_minimum(harness: RuntimeHarness) -> None:
    output = StructuredOutput(regex="a*", param="guided_regex")
    reply = ask(harness, min_tokens=9, structured_output=output)
    assert len(reply.text) >= 9
    assert set(reply.text) == {"a"}


def test_a_stop_string_counts_only_after_the_minimum() -> None:
    said = RuntimeHarness(FakeEngine()).ask(list(range(100, 160)), max_tokens=8).tokens
    stop = [f"{said[1]} {said[2]}", f"{said[4]} {said[5]}"]
    harness = RuntimeHarness(FakeEngine())

    def text(least: int) -> list[int]:
        sampling = SamplingParams(temperature=0, min_tokens=least)
        reply = harness.ask(list(range(100, 160)), max_tokens=8, stop=stop, sampling=sampling)
        return [int(word) for word in reply.text.split()]

    assert text(0) == text(2) == said[:1]  # the third token completes it
    assert text(3) == text(5) == said[:4]
    assert text(6) == said


@pytest.mark.parametrize("limit", [1, 7, 40, 10_000])
def test_a_prompt_is_truncated_to_its_last_tokens(harness: RuntimeHarness, limit: int) -> None:
    reply = ask(harness, truncate_prompt_tokens=limit)
    plain = ask(harness)
    expected = plain.turn.encoded.prompt.tokens.ids()[-limit:]
    assert reply.turn.encoded.prompt.tokens.ids() == expected
    assert reply.finished.prompt_tokens == len(expected)


def test_a_prompt_that_is_too_long_fits_after_truncation(harness: RuntimeHarness) -> None:
    sampling = SamplingParams(temperature=0)
    long = TEXT * 3
    with pytest.raises(ContextTooLong):
        harness.ask_text(long, sampling=sampling)
    reply = harness.ask_text(long, sampling=sampling, truncate_prompt_tokens=100)
    assert reply.finished.prompt_tokens == 100
    fitted = harness.ask_text(long, sampling=sampling, truncate_prompt_tokens=-1, max_tokens=16)
    assert fitted.finished.prompt_tokens == 256 - 16
    with pytest.raises(ContextTooLong):
        harness.ask_text(long, sampling=sampling, truncate_prompt_tokens=300)


def test_a_truncated_chat_is_answered_and_its_state_is_reused(harness: RuntimeHarness) -> None:
    messages = [{"role": "user", "content": TEXT}]
    first = harness.ask_chat(messages, truncate_prompt_tokens=60)
    again = harness.ask_chat(messages, truncate_prompt_tokens=60)
    assert first.finished.prompt_tokens == 60
    assert again.reused == 59
    assert again.tokens == first.tokens


def test_a_stop_token_that_the_model_does_not_have_is_refused(harness: RuntimeHarness) -> None:
    with pytest.raises(BadRequest, match="token ids") as refused:
        ask(harness, stop_token_ids=[1 << 20])
    assert refused.value.param == "stop_token_ids"


CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>\n'
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(("most", "made"), [(None, 3), (1, 1), (2, 2), (5, 3)])
def test_calls_beyond_the_most_are_left_out(most: int | None, made: int) -> None:
    talks = Conversations(HERMES)
    turn = talks.begin(
        [{"role": "user", "content": "Add."}], tools=[ADD], tool_use=ToolUse(max_calls=most)
    )
    written = "".join(CALL.format(n=n) for n in range(3))
    for token in talks.letters.encode(written, special=True):
        if turn.output.finish_reason is None:
            turn.accept(Sampled(token))
    if turn.output.finish_reason is None:
        turn.output.finish("stop")
    assert len(turn.output.message.tool_calls) == made
    assert turn.output.finish_reason == "tool_calls"


def parts(reply: Reply) -> list[TextDelta]:
    found = (event.part for event in reply.events if isinstance(event, Delta))
    return [part for part in found if isinstance(part, TextDelta)]


def test_a_reply_can_show_the_ids_of_its_tokens(harness: RuntimeHarness) -> None:
    """Every token is in one part, also those whose text waits for the rest of a character."""
    reply = ask(harness, returns_tokens=True, ignore_eos=True, max_tokens=40)
    assert [token for part in parts(reply) for token in part.tokens or ()] == reply.tokens
    assert all(part.tokens is None for part in parts(ask(harness)))


def test_log_probabilities_have_the_ids_of_their_tokens(harness: RuntimeHarness) -> None:
    reply = ask(harness, top_logprobs=3, ignore_eos=True)
    found = [each for part in parts(reply) for each in part.logprobs or ()]
    assert [each.token for each in found] == reply.tokens
    tokenizer = harness.runtime.engine.tokenizer
    for each in found:
        best = [tokenizer.piece(token, special=True) for token in each.top_tokens]
        assert best == [piece for piece, _ in each.top]


def test_a_turn_can_show_its_prompt_as_text(harness: RuntimeHarness) -> None:
    shown = [each for each in ask(harness, returns_prompt=True).events if isinstance(each, Started)]
    assert [each.prompt for each in shown] == [TEXT]
    plain = [each for each in ask(harness).events if isinstance(each, Started)]
    assert [each.prompt for each in plain] == [None]


def test_a_time_limit_waits_for_the_end_of_the_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("rekindle.runtime.schedule.output.time.monotonic", lambda: now_s)
    limit = TimeLimit(2.0)
    assert not limit.is_over("a")
    now_s = 103.0
    assert not limit.is_over("still the first line")
    assert limit.is_over("\n")
    quick = TimeLimit(2.0)
    assert not quick.is_over("a\nb"), "the time begins with the first token"
    now_s = 104.0
    assert not quick.is_over("c")
    now_s = 106.0
    assert quick.is_over("d")


def test_a_reply_ends_at_its_time_limit(harness: RuntimeHarness) -> None:
    """A limit of no time ends the reply at its first line break, with the reason `length`."""
    newline = harness.runtime.engine.tokenizer.encode("\n", special=False)
    bias: dict[str, Any] = {"logit_bias": {newline[0]: 100.0}, "ignore_eos": True, "max_tokens": 30}
    reply = ask(harness, max_generate_s=1e-9, **bias)
    assert len(reply.tokens) <= 2
    assert reply.finished.reason == "length"
    assert len(ask(harness, **bias).tokens) == 30
