"""Provides what the scenarios share: a calibrated client, texts, conversations and timed turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    fitted,
)

#: The stages of a turn until its first byte, in order.
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


@dataclass(frozen=True, slots=True)
class Rig:
    """One server under measurement."""

    client: Client
    options: BenchOptions
    chance: Random
    tokens_per_word: float
    ignores_eos: bool  # False: replies may be shorter than requested

    def prose(self, tokens: int) -> str:
        """A text of about this many tokens, by the tokenizer of the server's model."""
        return prose(self.chance, round(tokens / self.tokens_per_word))

    def nonce(self) -> str:
        return nonce(self.chance)

    async def full_reply(
        self, messages: Sequence[Message], tokens: int, **sampling: float
    ) -> StreamedReply:
        """Get a reply of exactly this many tokens, if the server supports ignore_eos."""
        extra = {"ignore_eos": True} if self.ignores_eos else {}
        return await self.client.chat(messages, tokens, **extra, **sampling)


@asynccontextmanager
async def open_rig(options: BenchOptions) -> AsyncIterator[Rig]:
    """Connect to a server, warm it up and find out how many tokens a word has."""
    async with connect(options) as client:
        ignores_eos = await _accepts_ignore_eos(client)
        speed = await _calibrate(client, ignores_eos, options.seed)
        options = fitted(options, speed.prefill_s_per_token, speed.decode_s_per_token)
        yield Rig(client, options, Random(options.seed), speed.tokens_per_word, ignores_eos)


async def _accepts_ignore_eos(client: Client) -> bool:
    try:
        await client.chat(user("Say hello."), 4, ignore_eos=True)
    except ErrorStatus as refusal:
        if refusal.status not in (400, 422):
            raise
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Calibration:
    tokens_per_word: float
    prefill_s_per_token: float
    decode_s_per_token: float


async def _calibrate(client: Client, ignores_eos: bool, seed: str | None) -> _Calibration:
    """Find out how the server counts tokens, and roughly how fast it is."""
    sample = prose(Random(seed), 120)  # without a seed, a text that the server has not cached
    extra = {"ignore_eos": True} if ignores_eos else {}
    short = await client.chat(user("."), 8, **extra)
    long = await client.chat(user(sample), 1)
    tokens = long.usage.prompt_tokens - short.usage.prompt_tokens
    if tokens <= 0:
        raise BenchFailed("the server's usage.prompt_tokens does not grow with the prompt")
    return _Calibration(
        tokens / len(sample.split()),
        long.ttft_s / long.usage.prompt_tokens,
        (short.last_s - short.first_s) / max(short.usage.completion_tokens - 1, 1),
    )


def user(content: str) -> list[Message]:
    return [{"role": "user", "content": content}]


class Round(ABC):
    """One measurement of a scenario. Subclasses are dataclasses."""

    __slots__ = ()

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """The values of this round, by the names in `results.FIGURES`."""


@dataclass(frozen=True, slots=True)
class TimedTurn:
    """The measurements of one reply."""

    ttft_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    stages_s: Mapping[str, float] = field(default_factory=dict)  # until the first token

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
        """The time to first token by stage, or nothing if the server does not report stages.

        The server cannot see the time in the network and in this client, which is "rest".
        """
        if not self.stages_s:
            return {}
        known = {stage: self.stages_s.get(stage, 0.0) for stage in STAGES}
        return {**known, "rest": self.ttft_s - sum(known.values())}

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not reused. Without a report, all of them."""
        return self.prompt_tokens - (self.cached_tokens or 0)


def computed_figure(name: str, turns: Sequence[TimedTurn]) -> dict[str, float]:
    """The number of computed tokens under this name. Empty if the server does not report it."""
    if any(turn.cached_tokens is None for turn in turns):
        return {}
    return {name: sum(turn.computed_tokens for turn in turns)}


class BenchConversation:
    """A conversation whose history contains the server's own replies."""

    def __init__(self, rig: Rig, system: str | None = None) -> None:
        self._rig = rig
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})

    @property
    def prompt(self) -> list[Message]:
        """The messages of the last request."""
        return self._messages[:-1]

    async def ask(self, question: str | list[Message]) -> TimedTurn:
        """Ask a question, as text or parts, with the whole history."""
        self._messages.append({"role": "user", "content": question})
        reply = await self._rig.client.chat(self._messages, self._rig.options.turn_reply_tokens)
        self._messages.append({"role": "assistant", "content": reply.text})
        return TimedTurn.of(reply)


def prose(chance: Random, words: int, paragraph: int = 5) -> str:
    """Paragraphs of this many sentences each, with at least this many words in total."""
    sentences: list[str] = []
    while words > 0:
        sentences.append(SENTENCE.format(**{kind: chance.choice(WORDS[kind]) for kind in WORDS}))
        words -= len(sentences[-1].split())
    starts = range(0, len(sentences), paragraph)
    return "\n\n".join(" ".join(sentences[start : start + paragraph]) for start in starts)


def filler(chance: Random, words: int) -> str:
    """Exactly this many short words. Nearly every tokeniser makes one token of each."""
    return " ".join(chance.choice(WORDS["short"]) for _ in range(words))


def nonce(chance: Random) -> str:
    """Random words. At the start of a prompt they prevent the reuse of earlier prompts."""
    every = [word for words in WORDS.values() for word in words]
    return " ".join(chance.choice(every) for _ in range(6)).capitalize()
