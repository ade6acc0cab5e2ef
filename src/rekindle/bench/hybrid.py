"""Scenario: what a conversation costs in tokens computed, on a model whose state cannot be cut.

Nothing is timed. Where state can be cut, as in most models, few servers compute a token twice;
recurrent and hybrid models go on from where a state was kept, or from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.bench.conversation import Conversation, Turn
from rekindle.bench.rig import Rig

AGENTS = 2


@dataclass(frozen=True, slots=True)
class Hybrid:
    alone: tuple[Turn, ...]
    agents: tuple[tuple[Turn, ...], ...]  # by agent; they took turns, under one system prompt

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        told = [*self.alone, *(turn for turns in self.agents for turn in turns)]
        if all(turn.cached_tokens is not None for turn in told):
            figures["hybrid_computed_tokens"] = computed_in(self.alone)
            figures["hybrid_agents_computed_tokens"] = sum(map(computed_in, self.agents))
        figures["hybrid_least_tokens"] = least_for(self.alone)
        return figures


def computed_in(turns: Sequence[Turn]) -> int:
    return sum(turn.computed_tokens for turn in turns)


def least_for(turns: Sequence[Turn]) -> int:
    """Prompt tokens to compute when none is computed twice, be it as prompt or as reply.

    Writing a reply computes all of its tokens but the last. What the first turn found of others,
    if only the first words of the template, was computed before.
    """
    written = sum(turn.completion_tokens - 1 for turn in turns[:-1])
    return turns[-1].prompt_tokens - written - (turns[0].cached_tokens or 0)


async def measure(rig: Rig) -> Hybrid:
    """A conversation by itself; then two that share a system prompt, taking turns."""
    talk = Conversation(rig)
    alone = [await talk.ask(_message(rig)) for _ in range(rig.options.turns)]
    system = f"{rig.nonce()}. {rig.prose(rig.options.agent_tokens)}"
    talks = [Conversation(rig, system) for _ in range(AGENTS)]
    rounds = [[await talk.ask(_message(rig)) for talk in talks] for _ in range(rig.options.turns)]
    return Hybrid(tuple(alone), tuple(zip(*rounds, strict=True)))


def _message(rig: Rig) -> str:
    return f"{rig.nonce()}. {rig.prose(rig.options.turn_tokens)}"
