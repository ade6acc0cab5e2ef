"""Scenarios of chats: an article, a shared document, agents, a crowd, a hybrid model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rekindle.bench.client import Message
from rekindle.bench.rig import BenchConversation, Rig, TimedTurn

FIRST = "What is this article about? Answer in one line."
SECOND = "Which of these people did the hardest work, and why?"
THIRD = "Where was that, and at which time of the year?"

REFERENCE_TRIES = 6

HYBRID_AGENTS = 2


@dataclass(frozen=True, slots=True)
class Article:
    """A long article, then one-line follow-ups about it: three turns, and the fresh short prompt
    that computes as many tokens as turn two did."""

    first: TimedTurn
    second: TimedTurn
    third: TimedTurn
    reference: TimedTurn

    @property
    def new_tokens(self) -> int:
        """What turn two added to all that turn one had already seen or written."""
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
    """Time to first token of three turns over an article the server has never seen."""
    talk = BenchConversation(rig, system=f"{rig.nonce()}. You answer questions about an article.")
    first = await talk.ask(f"{rig.prose(rig.options.article_tokens)}\n\n{FIRST}")
    second = await talk.ask(SECOND)
    third = await talk.ask(THIRD)
    return Article(first, second, third, await _reference(rig, computed_in(first, second)))


def computed_in(first: TimedTurn, second: TimedTurn) -> int:
    """Tokens turn two computed, as reported; without a report, those it added."""
    if second.cached_tokens is None:
        return second.prompt_tokens - first.prompt_tokens - first.completion_tokens
    return second.computed_tokens


async def _reference(rig: Rig, tokens: int) -> TimedTurn:
    """A fresh prompt of which the server computes this many tokens, with next to no context.

    The cheapest way to compute so many tokens: no long context to attend to, nothing to look up.
    """
    words, tries = max(1, tokens // 2), list[TimedTurn]()
    for _ in range(REFERENCE_TRIES):
        turn = await BenchConversation(rig).ask(f"{rig.nonce()} {rig.filler(words)}")
        tries.append(turn)
        words = max(1, words + tokens - turn.computed_tokens)
    return _middle_of_closest(tries, tokens)


def _middle_of_closest(tries: list[TimedTurn], tokens: int) -> TimedTurn:
    """The median in time among the tries that came closest in tokens, give or take one."""
    closest = min(abs(turn.computed_tokens - tokens) for turn in tries)
    near = [turn for turn in tries if abs(turn.computed_tokens - tokens) <= max(1, closest)]
    return sorted(near, key=lambda turn: turn.ttft_s)[len(near) // 2]


@dataclass(frozen=True, slots=True)
class SharedDocument:
    """Many questions at once over one shared document."""

    wall_s: float  # from the first question sent to the last answer complete
    answers: tuple[TimedTurn, ...]

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"document_wall_s": self.wall_s}
        if all(answer.cached_tokens is not None for answer in self.answers):
            computed = sum(answer.computed_tokens for answer in self.answers)
            figures["document_computed_tokens"] = computed
        return figures


async def measure_document(rig: Rig) -> SharedDocument:
    """Wall time until every question about a never seen document has its whole answer."""
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
class Agents:
    """Agents with long system prompts taking turns, more of them than a server has slots."""

    rounds: tuple[tuple[TimedTurn, ...], ...]  # the first is cold

    @property
    def warm_ttft_s(self) -> list[float]:
        return [turn.ttft_s for turns in self.rounds[1:] for turn in turns]

    def figures(self) -> dict[str, float]:
        return {
            "agents_cold_s": median(turn.ttft_s for turn in self.rounds[0]),
            "agents_warm_s": median(self.warm_ttft_s),
            "agents_worst_s": max(self.warm_ttft_s),
        }


async def measure_agents(rig: Rig) -> Agents:
    """Time to first token of each agent's turn, one agent after the other, round after round."""
    talks = [
        BenchConversation(rig, _system(rig, number)) for number in range(1, rig.options.agents + 1)
    ]
    rounds = []
    for number in range(1, rig.options.agent_rounds + 1):
        question = f"Step {number}: what will you do next, and what do you need for it?"
        rounds.append(tuple([await talk.ask(question) for talk in talks]))
    return Agents(tuple(rounds))


def _system(rig: Rig, number: int) -> str:
    return f"{rig.nonce()}. You are agent {number}. {rig.prose(rig.options.agent_tokens)}"


@dataclass(frozen=True, slots=True)
class Crowd:
    """Turns on a server that keeps many conversations already, one after the other."""

    again: tuple[TimedTurn, ...]  # follow-ups to some of those it keeps
    fresh: tuple[TimedTurn, ...]  # first turns of new ones

    def figures(self) -> dict[str, float]:
        figures = {
            "crowd_again_s": median(turn.ttft_s for turn in self.again),
            "crowd_worst_s": max(turn.ttft_s for turn in self.again),
            "crowd_fresh_s": median(turn.ttft_s for turn in self.fresh),
        }
        if all(turn.cached_tokens is not None for turn in self.again):
            figures["crowd_computed_tokens"] = _computed_by(self.again)
        return figures


async def measure_crowd(rig: Rig) -> Crowd:
    """Fill the server with short conversations; go on with some of them, from the oldest to the
    newest, a new one after each."""
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
class Hybrid:
    """What a conversation costs in tokens computed, on a model whose state cannot be truncated.

    Nothing is timed. Where state can be truncated, as in most models, few servers compute a token
    twice; recurrent and hybrid models continue from a checkpoint, or from the beginning.
    """

    alone: tuple[TimedTurn, ...]
    agents: tuple[tuple[TimedTurn, ...], ...]  # by agent; they took turns, under one system prompt

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        turns = [*self.alone, *(turn for each in self.agents for turn in each)]
        if all(turn.cached_tokens is not None for turn in turns):
            figures["hybrid_computed_tokens"] = _computed_by(self.alone)
            figures["hybrid_agents_computed_tokens"] = sum(map(_computed_by, self.agents))
        figures["hybrid_least_tokens"] = least_for(self.alone)
        return figures


def _computed_by(turns: Sequence[TimedTurn]) -> int:
    return sum(turn.computed_tokens for turn in turns)


def least_for(turns: Sequence[TimedTurn]) -> int:
    """Prompt tokens to compute when none is computed twice, be it as prompt or as reply.

    Writing a reply computes all of its tokens but the last. What the first turn found of others,
    if only the first words of the template, was computed before.
    """
    written = sum(turn.completion_tokens - 1 for turn in turns[:-1])
    return turns[-1].prompt_tokens - written - (turns[0].cached_tokens or 0)


async def measure_hybrid(rig: Rig) -> Hybrid:
    """A conversation by itself; then two that share a system prompt, taking turns."""
    talk = BenchConversation(rig)
    alone = [
        await talk.ask(_message(rig, rig.options.turn_tokens)) for _ in range(rig.options.turns)
    ]
    system = f"{rig.nonce()}. {rig.prose(rig.options.agent_tokens)}"
    talks = [BenchConversation(rig, system) for _ in range(HYBRID_AGENTS)]
    rounds = [
        [await talk.ask(_message(rig, rig.options.turn_tokens)) for talk in talks]
        for _ in range(rig.options.turns)
    ]
    return Hybrid(tuple(alone), tuple(zip(*rounds, strict=True)))


def _message(rig: Rig, tokens: int) -> str:
    return f"{rig.nonce()}. {rig.prose(tokens)}"
