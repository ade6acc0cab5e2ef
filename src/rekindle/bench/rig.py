"""What a scenario works with: a client, texts of a known length, and the load to put on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from random import Random

from rekindle.bench import text
from rekindle.bench.client import Client, Message, Refused, connect
from rekindle.bench.options import BenchOptions
from rekindle.bench.reply import Reply
from rekindle.bench.stream import BenchFailed

SAMPLE_WORDS = 120


@dataclass(frozen=True, slots=True)
class Rig:
    client: Client
    options: BenchOptions
    chance: Random
    tokens_per_word: float
    ignores_eos: bool  # False: the server refuses the field, replies may be shorter than asked

    def prose(self, tokens: int) -> str:
        """Text of about this many tokens of the server's own model."""
        return text.prose(self.chance, round(tokens / self.tokens_per_word))

    def filler(self, words: int) -> str:
        return text.filler(self.chance, words)

    def nonce(self) -> str:
        return text.nonce(self.chance)

    async def full_reply(self, messages: Sequence[Message], tokens: int) -> Reply:
        """A reply of exactly this many tokens, where the server can be told not to stop."""
        extra = {"ignore_eos": True} if self.ignores_eos else {}
        return await self.client.chat(messages, tokens, **extra)


@asynccontextmanager
async def open_rig(options: BenchOptions) -> AsyncIterator[Rig]:
    """A rig for the options' server, warmed up and calibrated by its own token counts."""
    async with connect(options) as client:
        ignores_eos = await _accepts_ignore_eos(client)
        tokens_per_word = await _tokens_per_word(client)
        yield Rig(client, options, Random(options.seed), tokens_per_word, ignores_eos)


async def _accepts_ignore_eos(client: Client) -> bool:
    try:
        await client.chat(user("Say hello."), 4, ignore_eos=True)
    except Refused as refusal:
        if refusal.status not in (400, 422):
            raise
        return False
    return True


async def _tokens_per_word(client: Client) -> float:
    sample = text.prose(Random(0), SAMPLE_WORDS)
    short = await client.chat(user("."), 1)
    long = await client.chat(user(sample), 1)
    tokens = long.usage.prompt_tokens - short.usage.prompt_tokens
    if tokens <= 0:
        raise BenchFailed("the server's usage.prompt_tokens does not grow with the prompt")
    return tokens / len(sample.split())


def user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]
