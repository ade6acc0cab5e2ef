"""Scenarios of decoding: how fast text is written, greedily and with temperature."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rekindle.bench.client import BenchFailed, Reply
from rekindle.bench.rig import Rig, user

SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 1}


@dataclass(frozen=True, slots=True)
class Decode:
    """How fast text is written, by one stream alone and by several together."""

    single_tokens_per_s: float
    together_tokens_per_s: float
    streams: int

    def figures(self) -> dict[str, float]:
        return {
            "decode_single_tokens_per_s": self.single_tokens_per_s,
            "decode_together_tokens_per_s": self.together_tokens_per_s,
        }


@dataclass(frozen=True, slots=True)
class Sampled:
    """The same with temperature, which costs a choice among many candidates for every token."""

    decode: Decode

    def figures(self) -> dict[str, float]:
        return {
            "sampled_single_tokens_per_s": self.decode.single_tokens_per_s,
            "sampled_together_tokens_per_s": self.decode.together_tokens_per_s,
        }


async def measure_decode(rig: Rig, **sampling: float) -> Decode:
    """Tokens a second after the first token, alone and together."""
    options = rig.options
    return Decode(
        single_tokens_per_s=await _rate(rig, 1, options.single_stream_tokens, sampling),
        together_tokens_per_s=await _rate(rig, options.streams, options.stream_tokens, sampling),
        streams=options.streams,
    )


async def measure_sampled(rig: Rig) -> Sampled:
    return Sampled(await measure_decode(rig, **SAMPLING))


async def _rate(rig: Rig, streams: int, tokens: int, sampling: Mapping[str, float]) -> float:
    chats = [user(f"{rig.nonce()}: tell a story about it.") for _ in range(streams)]
    # Prompts are put in place first: otherwise one stream's prefill falls into another's decode.
    await asyncio.gather(*(rig.full_reply(chat, 1) for chat in chats))
    replies = (rig.full_reply(chat, tokens, **sampling) for chat in chats)
    return tokens_per_s(await asyncio.gather(*replies))


def tokens_per_s(replies: Sequence[Reply]) -> float:
    """All tokens but each reply's first, over the time from the earliest first to the last."""
    tokens = sum(reply.usage.completion_tokens - 1 for reply in replies)
    span_s = max(reply.last_s for reply in replies) - min(reply.first_s for reply in replies)
    if tokens <= 0 or span_s <= 0:
        raise BenchFailed("the replies are too short to measure a speed")
    return tokens / span_s
