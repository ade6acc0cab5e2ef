"""A constraint controls the replies of a real model, and only those."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rekindle.chat.grammar.matcher import GrammarCompiler
from rekindle.engine.base import EngineOptions, Sampled, TokenMask, Work, run_step
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from rekindle.protocol.requests import SamplingParams
from tests.chat.grammar.writer import json_grammar
from tests.support.tiny import write_llama

PROMPT = [10, 20, 30, 40]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colours": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0)
WAYS = {
    "greedy": GREEDY,
    "greedy, biased": SamplingParams(temperature=0, logit_bias={5: 4.0}),
    "greedy, penalised": SamplingParams(temperature=0, repetition_penalty=1.2),
    "random": SamplingParams(temperature=1, top_p=1, seed=1),
    "random, the best few": SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.01, seed=2),
    "with log probabilities": SamplingParams(temperature=1, seed=3, top_logprobs=2),
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaCppEngine]:
    path: Path = write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")
    built = LlamaCppEngine(EngineOptions(path=path, parallel=2, threads=1, context_tokens=512))
    yield built
    built.close()


@pytest.fixture(scope="module")
def compiler(engine: LlamaCppEngine) -> GrammarCompiler:
    vocabulary = engine.tokenizer
    return GrammarCompiler(
        vocabulary, vocabulary_size=vocabulary.size, end_tokens=vocabulary.end_tokens
    )


def write(
    engine: LlamaCppEngine,
    sampling: SamplingParams,
    constraint: TokenMask | None = None,
    *,
    exact: bool = False,
    most: int = 200,
) -> list[Sampled]:
    """Return a reply up to its end token, or to `most` tokens."""
    sequence = engine.sequences.open(exact=exact)
    sampler = engine.sampler(sampling, PROMPT, constraint)
    reply: list[Sampled] = []
    tokens = PROMPT
    try:
        while len(reply) < most:
            [sampled] = run_step(engine, [Work(sequence, tokens, sampler)])
            assert sampled is not None
            reply.append(sampled)
            if sampled.token in engine.tokenizer.end_tokens:
                break
            tokens = [sampled.token]
    finally:
        engine.sequences.close(sequence)
    return reply


def text(engine: LlamaCppEngine, reply: list[Sampled]) -> str:
    pieces = (engine.tokenizer.piece(each.token, special=False) for each in reply)
    return b"".join(pieces).decode()


def is_person(value: Any) -> bool:
    return (
        list(value) == ["name", "age", "colours"]
        and len(value["name"]) <= 8
        and 0 <= value["age"] <= 120
        and set(value["colours"]) <= {"red", "blue"}
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exact", [False, True])
def test_a_reply_under_a_schema_is_json_of_that_schema(
    engine: LlamaCppEngine, compiler: GrammarCompiler, way: str, exact: bool
) -> None:
    constraint = compiler.compile(json_grammar(SCHEMA, "response_format"))
    reply = write(engine, WAYS[way], constraint, exact=exact)
    assert reply[-1].token in engine.tokenizer.end_tokens
    assert is_person(json.loads(text(engine, reply)))
    assert constraint.trouble is None


def test_a_constraint_does_not_affect_other_replies(
    engine: LlamaCppEngine, compiler: GrammarCompiler
) -> None:
    alone = write(engine, GREEDY, most=12)
    free, bound = engine.sequences.open(exact=False), engine.sequences.open(exact=False)
    constraint = compiler.compile(json_grammar({"type": "object"}, "response_format"))
    samplers = [engine.sampler(GREEDY, PROMPT), engine.sampler(GREEDY, PROMPT, constraint)]
    tokens, written = [PROMPT, PROMPT], []
    for _ in range(12):
        work = [
            Work(sequence, pending, sampler)
            for sequence, pending, sampler in zip((free, bound), tokens, samplers, strict=True)
        ]
        results = run_step(engine, work)
        tokens = [[each.token] for each in results if each is not None]
        written.append(tokens[0][0])
    engine.sequences.close(free)
    engine.sequences.close(bound)
    assert written[: len(alone)] == [each.token for each in alone]


@pytest.mark.parametrize("way", WAYS)
def test_without_a_constraint_the_model_chooses_freely(engine: LlamaCppEngine, way: str) -> None:
    rows: list[np.ndarray[Any, Any]] = []
    engine.observe = lambda _sequence, logits: rows.append(logits.copy())
    try:
        reply = write(engine, WAYS[way], most=8)
    finally:
        engine.observe = None
    assert reply == write(engine, WAYS[way], most=8)
    if way == "greedy":
        assert [each.token for each in reply] == [int(row.argmax()) for row in rows]


class OnlyThe:
    """Allows one token."""

    trouble = None

    def __init__(self, token: int) -> None:
        self.token = token
        self.accepted: list[int] = []

    def mask(self, logits: Any) -> None:
        kept = logits[self.token]
        logits[:] = -np.inf
        logits[self.token] = kept

    def accept(self, token: int) -> None:
        self.accepted.append(token)

    def replay(self, tokens: Sequence[int]) -> None:
        self.accepted = list(tokens)


@pytest.mark.parametrize("way", WAYS)
def test_a_constraint_decides_and_is_told_every_token(engine: LlamaCppEngine, way: str) -> None:
    [first] = write(engine, GREEDY, most=1)
    unlikely = (first.token + 7) % 200 + 20
    constraint = OnlyThe(unlikely)
    reply = write(engine, WAYS[way], constraint, most=5)
    assert [each.token for each in reply] == [unlikely] * 5
    assert constraint.accepted == [unlikely] * 5


@pytest.mark.parametrize("temperature", [0, 1])
def test_log_probabilities_are_the_models_own(engine: LlamaCppEngine, temperature: float) -> None:
    """A masked row would give the only allowed token a probability of one."""
    sampling = SamplingParams(temperature=temperature, seed=1, top_logprobs=3)
    [free] = write(engine, sampling, most=1)
    [bound] = write(engine, sampling, OnlyThe(free.top[2][0]), most=1)
    assert bound.top == free.top
    assert bound.token == free.top[2][0]
    assert bound.logprob == free.top[2][1]
