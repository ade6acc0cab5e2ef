"""What a scenario works with: a client, texts of a known length, conversations and their turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

from rekindle.bench.client import (
    BenchFailed,
    BenchOptions,
    Client,
    ErrorStatus,
    Message,
    StreamedReply,
    connect,
)

SAMPLE_WORDS = 120

#: The stages of a turn up to its first byte, in order.
STAGES = ("front", "encode", "queue", "plan", "restore", "compute", "first_byte")

_LINES = {
    "person": "teacher doctor farmer writer painter driver captain student baker singer",
    "deed": "found built moved carried opened painted watched measured repaired described",
    "kind": "old small quiet heavy bright open narrow early common wooden",
    "thing": "bridge garden letter engine window market river house table tower",
    "place": "village harbor station library valley forest island city school museum",
    "time": "spring winter summer morning evening autumn weather darkness silence company",
    "short": "time work life hand part place case week point fact home water room area money",
}
WORDS = {kind: line.split() for kind, line in _LINES.items()}
SENTENCE = "The {kind} {person} {deed} the {thing} near the {place} in the {time}."
SENTENCES_A_PARAGRAPH = 5
NONCE_WORDS = 6


@dataclass(frozen=True, slots=True)
class Rig:
    """One server under measurement."""

    client: Client
    options: BenchOptions
    chance: Random
    tokens_per_word: float
    ignores_eos: bool  # False: the server refuses the field, replies may be shorter than asked

    def prose(self, tokens: int) -> str:
        """Text of about this many tokens of the server's own model."""
        return prose(self.chance, round(tokens / self.tokens_per_word))

    def filler(self, words: int) -> str:
        return filler(self.chance, words)

    def nonce(self) -> str:
        return nonce(self.chance)

    async def full_reply(
        self, messages: Sequence[Message], tokens: int, **sampling: float
    ) -> StreamedReply:
        """A reply of exactly this many tokens, where the server takes ignore_eos; greedy, unless
        other sampling is given."""
        extra = {"ignore_eos": True} if self.ignores_eos else {}
        return await self.client.chat(messages, tokens, **extra, **sampling)


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
    except ErrorStatus as refusal:
        if refusal.status not in (400, 422):
            raise
        return False
    return True


async def _tokens_per_word(client: Client) -> float:
    sample = prose(Random(0), SAMPLE_WORDS)
    short = await client.chat(user("."), 1)
    long = await client.chat(user(sample), 1)
    tokens = long.usage.prompt_tokens - short.usage.prompt_tokens
    if tokens <= 0:
        raise BenchFailed("the server's usage.prompt_tokens does not grow with the prompt")
    return tokens / len(sample.split())


def user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """One reply as measured."""

    ttft_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    stages_s: Mapping[str, float] = field(default_factory=dict)  # of the time to the first token

    @classmethod
    def of(cls, reply: StreamedReply) -> TimedTurn:
        usage = reply.usage
        return cls(
            reply.ttft_s,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.first_token_time,
        )

    def breakdown(self) -> dict[str, float]:
        """Where the time to the first token went, as the server reports it; what it cannot see
        (the network, this client) is the rest. Empty where a server reports nothing."""
        if not self.stages_s:
            return {}
        known = {stage: self.stages_s.get(stage, 0.0) for stage in STAGES}
        return {**known, "rest": self.ttft_s - sum(known.values())}

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not reused; all of them where the server does not say."""
        return self.prompt_tokens - (self.cached_tokens or 0)


class BenchConversation:
    """Its history holds the server's real replies."""

    def __init__(self, rig: Rig, system: str | None = None) -> None:
        self._rig = rig
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})

    async def ask(self, question: str | list[Message]) -> TimedTurn:
        """Send the whole history with the question, a text or parts; remember the reply."""
        self._messages.append({"role": "user", "content": question})
        reply = await self._rig.client.chat(self._messages, self._rig.options.turn_reply_tokens)
        self._messages.append({"role": "assistant", "content": reply.text})
        return TimedTurn.of(reply)


# -- text made of common words, the same for the same source of chance ---------------------------


def prose(chance: Random, words: int) -> str:
    """Paragraphs of whole sentences, with at least this many words."""
    sentences: list[str] = []
    while words > 0:
        sentences.append(_sentence(chance))
        words -= len(sentences[-1].split())
    starts = range(0, len(sentences), SENTENCES_A_PARAGRAPH)
    return "\n\n".join(" ".join(sentences[n : n + SENTENCES_A_PARAGRAPH]) for n in starts)


def filler(chance: Random, words: int) -> str:
    """Exactly this many short words, each one token for nearly every tokeniser."""
    return " ".join(chance.choice(WORDS["short"]) for _ in range(words))


def nonce(chance: Random) -> str:
    """A line nobody sent before: put first, it keeps a server from reusing an older prompt."""
    every = [word for words in WORDS.values() for word in words]
    return " ".join(chance.choice(every) for _ in range(NONCE_WORDS)).capitalize()


def _sentence(chance: Random) -> str:
    return SENTENCE.format(**{kind: chance.choice(words) for kind, words in WORDS.items()})
