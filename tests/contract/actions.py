"""Prefills, decodes and exports in the same way as the runtime."""

from __future__ import annotations

from rekindle.engine.base import Engine, KvType, Sampler, Sequence, Work, run_step
from rekindle.protocol.requests import SamplingParams

GREEDY = SamplingParams(temperature=0)
PROMPT = [3 + (7 * n) % 200 for n in range(150)]


def prefill(engine: Engine, sequence: Sequence, tokens: list[int]) -> int:
    """Append in canonical steps and sample the next token."""
    step = engine.capabilities.step_tokens
    sampler = engine.sampler(GREEDY, tokens)
    sampled = None
    start = sequence.length
    while start < len(tokens):
        stop = min(start - start % step + step, len(tokens))
        last = stop == len(tokens)
        [sampled] = run_step(
            engine, [Work(sequence, tokens[start:stop], sampler if last else None)]
        )
        start = stop
    assert sampled is not None
    return sampled.token


def decode(engine: Engine, sequence: Sequence, token: int, count: int) -> list[int]:
    sampler: Sampler = engine.sampler(GREEDY, [])
    tokens = [token]
    for _ in range(count):
        [sampled] = run_step(engine, [Work(sequence, [tokens[-1]], sampler)])
        assert sampled is not None
        tokens.append(sampled.token)
    return tokens


def answer(engine: Engine, sequence: Sequence, tokens: list[int]) -> list[int]:
    return decode(engine, sequence, prefill(engine, sequence, tokens), 12)


def cold(
    engine: Engine, tokens: list[int], *, exact: bool = True, kv_type: KvType | None = None
) -> list[int]:
    sequence = engine.sequences.open(exact=exact, kv_type=kv_type)
    said = answer(engine, sequence, tokens)
    engine.sequences.close(sequence)
    return said


def blocks(engine: Engine, sequence: Sequence, stop: int) -> list[bytes]:
    size = engine.capabilities.block_tokens
    return [
        bytes(engine.sequences.export(sequence, start, start + size))
        for start in range(0, stop, size)
    ]
