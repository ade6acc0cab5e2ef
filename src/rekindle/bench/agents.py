"""Scenario: agents with long system prompts taking turns, more of them than a server has slots."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from rekindle.bench.conversation import Conversation, Turn
from rekindle.bench.rig import Rig


@dataclass(frozen=True, slots=True)
class Agents:
    rounds: tuple[tuple[Turn, ...], ...]  # the first is cold

    @property
    def warm_ttft_s(self) -> list[float]:
        return [turn.ttft_s for turns in self.rounds[1:] for turn in turns]

    def figures(self) -> dict[str, float]:
        return {
            "agents_cold_s": median(turn.ttft_s for turn in self.rounds[0]),
            "agents_warm_s": median(self.warm_ttft_s),
            "agents_worst_s": max(self.warm_ttft_s),
        }


async def measure(rig: Rig) -> Agents:
    """Time to first token of each agent's turn, one agent after the other, round after round."""
    talks = [Conversation(rig, _system(rig, number)) for number in range(1, rig.options.agents + 1)]
    rounds = []
    for number in range(1, rig.options.agent_rounds + 1):
        question = f"Step {number}: what will you do next, and what do you need for it?"
        rounds.append(tuple([await talk.ask(question) for talk in talks]))
    return Agents(tuple(rounds))


def _system(rig: Rig, number: int) -> str:
    return f"{rig.nonce()}. You are agent {number}. {rig.prose(rig.options.agent_tokens)}"
