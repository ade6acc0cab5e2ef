"""Measures chats: an article, a shared document, agents, a crowd, hybrid models, decode speed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rekindle.bench.client import BenchFailed, Message, StreamedReply
from rekindle.bench.rig import (
    AgentRounds,
    BenchConversation,
    Rig,
    Round,
    TimedTurn,
    computed_figure,
    filler,
    user,
)


@dataclass(frozen=True, slots=True)
class Article(Round):
    """Three turns about a long article, and a fresh short prompt for comparison.

    The fresh prompt computes as many tokens as turn two.
    """

    first: TimedTurn
    second: TimedTurn
    third: TimedTurn
    reference: TimedTurn

    @property
    def new_tokens(self) -> int:
        """The tokens of turn two that were neither in the prompt nor in the reply of turn one."""
        known = self.first.prompt_tokens + self.first.completion_tokens
        return self.second.prompt_tokens - known

    def figures(self) -> dict[str, float]:
        return {
            "article_turn1_s": self.first.ttft_s,
            "article_turn2_s": self.second.ttft_s,
            "article_turn3_s": self.third.ttft_s,
            "article_reference_s": self.reference.ttft_s,
            "article_turn1_over_turn2": self.first.ttft_s / self.second.ttft_s,
            "article_turn2_over_reference": self.second.ttft_s / self.reference.ttft_s,
            "article_turn2_new_tokens": self.new_tokens,
            "article_turn2_computed_tokens": computed_in(self.first, self.second),
            **{f"warm_{stage}_s": spent for stage, spent in self.second.breakdown().items()},
        }


async def measure_article(rig: Rig) -> Article:
    """Measure the time to first token of three turns about a new article."""
    talk = BenchConversation(rig, system=f"{rig.nonce()}. You answer questions about an article.")
    article = rig.prose(rig.options.article_tokens)
    first = await talk.ask(f"{article}\n\nWhat is this article about? Answer in one line.")
    second = await talk.ask("Which of these people did the hardest work, and why?")
    third = await talk.ask("Where was that, and at which time of the year?")
    return Article(first, second, third, await _reference(rig, computed_in(first, second)))


def computed_in(first: TimedTurn, second: TimedTurn) -> int:
    """The tokens that turn two computed, or added if the server does not report this."""
    if second.cached_tokens is None:
        return second.prompt_tokens - first.prompt_tokens - first.completion_tokens
    return second.computed_tokens


async def _reference(rig: Rig, tokens: int) -> TimedTurn:
    """Time a fresh prompt of which the server computes this many tokens.

    No server can compute them faster, because there is no long context and nothing to look up.
    """
    words, tries = max(1, tokens // 2), list[TimedTurn]()
    for _ in range(6):
        turn = await BenchConversation(rig).ask(f"{rig.nonce()} {filler(rig.chance, words)}")
        tries.append(turn)
        words = max(1, words + tokens - turn.computed_tokens)
    return _middle_of_closest(tries, tokens)


def _middle_of_closest(tries: list[TimedTurn], tokens: int) -> TimedTurn:
    """The median time of the tries whose token counts came closest, within one token."""
    closest = min(abs(turn.computed_tokens - tokens) for turn in tries)
    near = [turn for turn in tries if abs(turn.computed_tokens - tokens) <= max(1, closest)]
    return sorted(near, key=lambda turn: turn.ttft_s)[len(near) // 2]


@dataclass(frozen=True, slots=True)
class SharedDocument(Round):
    """Many concurrent questions about one document."""

    wall_s: float  # from sending the first question to the end of the last answer
    answers: tuple[TimedTurn, ...]

    def figures(self) -> dict[str, float]:
        computed = computed_figure("document_computed_tokens", self.answers)
        return {"document_wall_s": self.wall_s, **computed}


async def measure_document(rig: Rig) -> SharedDocument:
    """Measure the time until all questions about a new document are answered."""
    system = (
        f"{rig.nonce()}. Answer from this document.\n\n{rig.prose(rig.options.document_tokens)}"
    )
    chats = [_about(system, number) for number in range(1, rig.options.questions + 1)]
    start_s = time.perf_counter()
    replies = await asyncio.gather(
        *(rig.full_reply(chat, rig.options.answer_tokens) for chat in chats)
    )
    wall_s = time.perf_counter() - start_s
    return SharedDocument(wall_s, tuple(TimedTurn.of(reply) for reply in replies))


def _about(system: str, number: int) -> list[Message]:
    question = f"Question {number}: what does sentence {number} of the document say?"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


@dataclass(frozen=True, slots=True)
class Agents(AgentRounds):
    """Agents with long system prompts that take turns."""

    def figures(self) -> dict[str, float]:
        return self.times("agents")


async def measure_agents(rig: Rig) -> Agents:
    """Measure the time to first token of each agent in turn, round after round."""
    prose_tokens = rig.options.agent_tokens
    talks = [
        BenchConversation(rig, f"{rig.nonce()}. You are agent {number}. {rig.prose(prose_tokens)}")
        for number in range(1, rig.options.agents + 1)
    ]
    rounds = []
    for number in range(1, rig.options.agent_rounds + 1):
        question = f"Step {number}: what will you do next, and what do you need for it?"
        rounds.append(tuple([await talk.ask(question) for talk in talks]))
    return Agents(tuple(rounds))


@dataclass(frozen=True, slots=True)
class Crowd(Round):
    """Sequential turns on a server that already keeps many conversations."""

    again: tuple[TimedTurn, ...]  # second turns of kept conversations
    fresh: tuple[TimedTurn, ...]  # first turns of new conversations

    def figures(self) -> dict[str, float]:
        return {
            "crowd_again_s": median(turn.ttft_s for turn in self.again),
            "crowd_worst_s": max(turn.ttft_s for turn in self.again),
            "crowd_fresh_s": median(turn.ttft_s for turn in self.fresh),
            **computed_figure("crowd_computed_tokens", self.again),
        }


async def measure_crowd(rig: Rig) -> Crowd:
    """Start many short conversations. Then continue some of them, from the oldest to the newest,
    and start a new one after each."""
    options = rig.options
    kept = [BenchConversation(rig) for _ in range(options.kept)]
    for talk in kept:
        await talk.ask(_message(rig, options.kept_tokens))
    again, fresh = [], []
    for talk in kept[:: max(1, options.kept // options.kept_again)]:
        again.append(await talk.ask("And then?"))
        fresh.append(await BenchConversation(rig).ask(_message(rig, options.kept_tokens)))
    return Crowd(tuple(again), tuple(fresh))


@dataclass(frozen=True, slots=True)
class Hybrid(Round):
    """How many tokens a server computes for a model whose state cannot be truncated.

    Nothing is timed. Recurrent and hybrid models resume only from a checkpoint, so many servers
    compute their prompts again.
    """

    alone: tuple[TimedTurn, ...]
    agents: tuple[tuple[TimedTurn, ...], ...]  # by agent; they take turns and share a system prompt

    def figures(self) -> dict[str, float]:
        agents = [turn for turns in self.agents for turn in turns]
        alone = computed_figure("hybrid_computed_tokens", self.alone)
        together = computed_figure("hybrid_agents_computed_tokens", agents)
        computed = {**alone, **together} if alone and together else {}
        return {**computed, "hybrid_least_tokens": least_for(self.alone)}


def least_for(turns: Sequence[TimedTurn]) -> int:
    """The prompt tokens to compute if none is computed twice, as prompt or as reply.

    Decoding a reply computes all of its tokens except the last. The tokens that the first turn
    reuses, such as the start of the template, were computed before.
    """
    written = sum(turn.completion_tokens - 1 for turn in turns[:-1])
    return turns[-1].prompt_tokens - written - (turns[0].cached_tokens or 0)


async def measure_hybrid(rig: Rig) -> Hybrid:
    """Measure one conversation, then two that take turns and share a system prompt."""
    talk = BenchConversation(rig)
    alone = [
        await talk.ask(_message(rig, rig.options.turn_tokens)) for _ in range(rig.options.turns)
    ]
    system = f"{rig.nonce()}. {rig.prose(rig.options.agent_tokens)}"
    talks = [BenchConversation(rig, system) for _ in range(2)]
    rounds = [
        [await talk.ask(_message(rig, rig.options.turn_tokens)) for talk in talks]
        for _ in range(rig.options.turns)
    ]
    return Hybrid(tuple(alone), tuple(zip(*rounds, strict=True)))


def _message(rig: Rig, tokens: int) -> str:
    return f"{rig.nonce()}. {rig.prose(tokens)}"


@dataclass(frozen=True, slots=True)
class Decode(Round):
    """The decode speed of a single stream and of several concurrent streams."""

    single_tokens_per_s: float
    together_tokens_per_s: float
    streams: int
    scenario: str = "decode"

    def figures(self) -> dict[str, float]:
        return {
            f"{self.scenario}_single_tokens_per_s": self.single_tokens_per_s,
            f"{self.scenario}_together_tokens_per_s": self.together_tokens_per_s,
        }


async def measure_decode(rig: Rig, scenario: str = "decode", **sampling: float) -> Decode:
    """Measure greedy decoding, unless other sampling is given."""
    options = rig.options
    single = await _rate(rig, 1, options.single_stream_tokens, sampling)
    together = await _rate(rig, options.streams, options.stream_tokens, sampling)
    return Decode(single, together, options.streams, scenario)


async def measure_sampled(rig: Rig) -> Decode:
    """Measure decoding with a temperature, where the sampler ranks many candidates per token."""
    return await measure_decode(rig, "sampled", temperature=0.8, top_p=0.95, seed=1)


async def _rate(rig: Rig, streams: int, tokens: int, sampling: Mapping[str, float]) -> float:
    chats = [user(f"{rig.nonce()}: tell a story about it.") for _ in range(streams)]
    # Cache the prompts first. Otherwise one stream's prefill would slow down another's decode.
    await asyncio.gather(*(rig.full_reply(chat, 1) for chat in chats))
    replies = (rig.full_reply(chat, tokens, **sampling) for chat in chats)
    return tokens_per_s(await asyncio.gather(*replies))


def tokens_per_s(replies: Sequence[StreamedReply]) -> float:
    """The decode speed of concurrent replies, without the first token of each.

    The time runs from the earliest first token to the last token of all.
    """
    tokens = sum(reply.usage.completion_tokens - 1 for reply in replies)
    span_s = max(reply.last_s for reply in replies) - min(reply.first_s for reply in replies)
    if tokens <= 0 or span_s <= 0:
        raise BenchFailed("the replies are too short to measure a speed")
    return tokens / span_s
