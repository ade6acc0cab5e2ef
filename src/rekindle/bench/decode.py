"""Scenario: how fast text is written, by one stream alone and by several together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.bench.reply import Reply
from rekindle.bench.rig import Rig, user
from rekindle.bench.stream import BenchFailed


@dataclass(frozen=True, slots=True)
class Decode:
    single_tokens_per_s: float
    together_tokens_per_s: float
    streams: int

    def figures(self) -> dict[str, float]:
        return {
            "decode_single_tokens_per_s": self.single_tokens_per_s,
            "decode_together_tokens_per_s": self.together_tokens_per_s,
        }


async def measure(rig: Rig) -> Decode:
    """Tokens a second after the first token, alone and together."""
    options = rig.options
    return Decode(
        single_tokens_per_s=await _rate(rig, 1, options.single_stream_tokens),
        together_tokens_per_s=await _rate(rig, options.streams, options.stream_tokens),
        streams=options.streams,
    )


async def _rate(rig: Rig, streams: int, tokens: int) -> float:
    chats = [user(f"{rig.nonce()}: tell a story about it.") for _ in range(streams)]
    # Prompts are put in place first: otherwise one stream's prefill falls into another's decode.
    await asyncio.gather(*(rig.full_reply(chat, 1) for chat in chats))
    return tokens_per_s(await asyncio.gather(*(rig.full_reply(chat, tokens) for chat in chats)))


def tokens_per_s(replies: Sequence[Reply]) -> float:
    """All tokens but each reply's first, over the time from the earliest first to the last."""
    tokens = sum(reply.usage.completion_tokens - 1 for reply in replies)
    span_s = max(reply.last_s for reply in replies) - min(reply.first_s for reply in replies)
    if tokens <= 0 or span_s <= 0:
        raise BenchFailed("the replies are too short to tell a speed from")
    return tokens / span_s
