"""Measures chats: an article, what the cache saves, a shared document, agents and so on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from rekindle.bench.client import (
    NOT_SUPPORTED,
    BenchFailed,
    ErrorStatus,
    Message,
    StreamedReply,
)
from rekindle.bench.rig import (
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

    def figures(self) -> dict[str, float]:
        return {
            "article_turn1_s": self.first.ttft_s,
            "article_turn2_s": self.second.ttft_s,
            "article_turn3_s": self.third.ttft_s,
            "article_reference_s": self.reference.ttft_s,
            "article_turn1_over_turn2": self.first.ttft_s / self.second.ttft_s,
            "article_turn2_over_reference": self.second.ttft_s / self.reference.ttft_s,
            "article_turn2_new_tokens": added_in(self.first, self.second),
            "article_turn2_computed_tokens": computed_in(self.first, self.second),
            **{f"warm_{stage}_s": spent for stage, spent in self.second.breakdown().items()},
        }


async def measure_article(rig: Rig) -> Article:
    talk = BenchConversation(rig, system=f"{rig.nonce()}. You answer questions about an article.")
    article = rig.prose(rig.options.article_tokens)
    first = await talk.ask(f"{article}\n\nWhat is this article about? Answer in one line.")
    second = await talk.ask("Which of these people did the hardest work, and why?")
    third = await talk.ask("Where was that, and at which time of the year?")
    return Article(first, second, third, await _reference(rig, computed_in(first, second)))


def added_in(first: TimedTurn, second: TimedTurn) -> int:
    """The tokens of turn two that were neither in the prompt nor in the reply of turn one."""
    return second.prompt_tokens - first.prompt_tokens - first.completion_tokens


def computed_in(first: TimedTurn, second: TimedTurn) -> int:
    """The tokens that turn two computed, or added if the server does not report this."""
    return added_in(first, second) if second.cached_tokens is None else second.computed_tokens


async def _reference(rig: Rig, tokens: int) -> TimedTurn:
    """Time a fresh prompt of which the server computes this many tokens.

    No server can compute them faster, because there is no long context and nothing to look up.
    """
    words, tries = max(1, tokens // 2), list[TimedTurn]()
    for _ in range(6):
        turn = await BenchConversation(rig).ask(f"{rig.nonce()} {filler(rig.chance, words)}")
        tries.append(turn)
        words = max(1, words + tokens - turn.computed_tokens)
    # The median time of the tries whose token counts came closest, within one token.
    closest = min(abs(turn.computed_tokens - tokens) for turn in tries)
    near = [turn for turn in tries if abs(turn.computed_tokens - tokens) <= max(1, closest)]
    return sorted(near, key=lambda turn: turn.ttft_s)[len(near) // 2]


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """The same prompt with the cache and without it."""

    cached: TimedTurn
    uncached: TimedTurn


@dataclass(frozen=True, slots=True)
class Savings(Round):
    """The turns of a conversation with a long system prompt, each with and without the cache.

    The prompt of the pre-warmed turn was computed before a user sent the first message.
    """

    cold: ComparedTurn
    prewarmed: ComparedTurn
    second: ComparedTurn
    third: ComparedTurn
    was_prepared: bool  # False: the server cannot prepare prompts, so another chat did it

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name in ("cold", "prewarmed", "second", "third"):
            turn: ComparedTurn = getattr(self, name)
            cached_s, uncached_s = turn.cached.ttft_s, turn.uncached.ttft_s
            figures[f"savings_{name}_s"] = cached_s
            figures[f"savings_{name}_uncached_s"] = uncached_s
            figures[f"savings_{name}_speedup"] = uncached_s / cached_s
        return figures


_QUESTIONS = (
    "Who built something, and where?",
    "Which of these people did the hardest work, and why?",
    "Where was that, and at which time of the year?",
)


async def measure_savings(rig: Rig) -> Savings:
    """Measure three turns and a pre-warmed first turn, then the same prompts without the cache.

    The order matters: a server with few slots may lose the conversation to an uncached prompt.
    """
    talk = BenchConversation(rig, _message(rig, rig.options.article_tokens))
    measured: list[tuple[TimedTurn, list[Message]]] = []
    for question in _QUESTIONS:
        measured.append((await talk.ask(question), talk.prompt))
    system = _message(rig, rig.options.article_tokens)
    was_prepared = await _prewarm(rig, system)
    fresh = BenchConversation(rig, system)
    measured.insert(1, (await fresh.ask(_QUESTIONS[0]), fresh.prompt))
    turns = [ComparedTurn(turn, await _uncached(rig, prompt)) for turn, prompt in measured]
    cold, prewarmed, second, third = turns
    return Savings(cold, prewarmed, second, third, was_prepared)


async def _prewarm(rig: Rig, system: str) -> bool:
    """Prepare a system prompt, with a chat of another user if the server has no other way."""
    prompt: list[Message] = [{"role": "system", "content": system}]
    if await rig.client.prepare(prompt):
        return True
    await rig.client.chat([*prompt, *user("Hello.")], 1)
    return False


async def _uncached(rig: Rig, prompt: list[Message]) -> TimedTurn:
    """Time a prompt without the cache: by opting out, or else by a change of its first words."""
    tokens = rig.options.turn_reply_tokens
    try:
        turn = TimedTurn.of(await rig.client.chat(prompt, tokens, use_kv_cache=False))
    except ErrorStatus as refusal:
        if refusal.status not in NOT_SUPPORTED:
            raise
    else:
        if turn.cached_tokens == 0:
            return turn
    _, _, rest = str(prompt[0]["content"]).partition(". ")
    changed = {**prompt[0], "content": f"{rig.nonce()}. {rest}"}
    return TimedTurn.of(await rig.client.chat([changed, *prompt[1:]], tokens))


@dataclass(frozen=True, slots=True)
class SharedDocument(Round):
    """Many concurrent questions about one document."""

    wall_s: float  # from sending the first question to the end of the last answer
    answers: tuple[TimedTurn, ...]

    def figures(self) -> dict[str, float]:
        computed = computed_figure("document_computed_tokens", self.answers)
        return {"document_wall_s": self.wall_s, **computed}


async def measure_document(rig: Rig) -> SharedDocument:
    options = rig.options
    system = f"{rig.nonce()}. Answer from this document.\n\n{rig.prose(options.document_tokens)}"
    document: Message = {"role": "system", "content": system}
    questions = [
        user(f"Question {number}: what does sentence {number} of the document say?")
        for number in range(1, options.questions + 1)
    ]
    start_s = time.perf_counter()
    replies = await asyncio.gather(
        *(rig.full_reply([document, *question], options.answer_tokens) for question in questions)
    )
    wall_s = time.perf_counter() - start_s
    return SharedDocument(wall_s, tuple(TimedTurn.of(reply) for reply in replies))


@dataclass(frozen=True, slots=True)
class Agents(Round):
    """Agents with long system prompts that take turns. There are more of them than slots of a
    server."""

    rounds: tuple[tuple[TimedTurn, ...], ...]  # the first round is cold
    scenario: ClassVar[str] = "agents"

    @property
    def warm(self) -> list[TimedTurn]:
        return [turn for turns in self.rounds[1:] for turn in turns]

    def figures(self) -> dict[str, float]:
        waits_s = [turn.ttft_s for turn in self.warm]
        return {
            f"{self.scenario}_cold_s": median(turn.ttft_s for turn in self.rounds[0]),
            f"{self.scenario}_warm_s": median(waits_s),
            f"{self.scenario}_worst_s": max(waits_s),
        }


async def measure_agents(rig: Rig) -> Agents:
    talks = [BenchConversation(rig, system) for system in agent_prompts(rig)]
    rounds = []
    for number in range(1, rig.options.agent_rounds + 1):
        question = f"Step {number}: what will you do next, and what do you need for it?"
        rounds.append(tuple([await talk.ask(question) for talk in talks]))
    return Agents(tuple(rounds))


def agent_prompts(rig: Rig) -> list[str]:
    return [
        f"{rig.nonce()}. You are agent {number}. {rig.prose(rig.options.agent_tokens)}"
        for number in range(1, rig.options.agents + 1)
    ]


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
        computed = alone | together if alone and together else {}
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
    turns, tokens = rig.options.turns, rig.options.turn_tokens
    talk = BenchConversation(rig)
    alone = [await talk.ask(_message(rig, tokens)) for _ in range(turns)]
    system = _message(rig, rig.options.agent_tokens)
    talks = [BenchConversation(rig, system) for _ in range(2)]
    rounds = [[await talk.ask(_message(rig, tokens)) for talk in talks] for _ in range(turns)]
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
