"""Scenario: a long article, then one-line follow-ups about it."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.bench.conversation import Conversation, Turn
from rekindle.bench.rig import Rig

FIRST = "What is this article about? Answer in one line."
SECOND = "Which of these people did the hardest work, and why?"
THIRD = "Where was that, and at which time of the year?"

REFERENCE_TRIES = 6


@dataclass(frozen=True, slots=True)
class Article:
    """Three turns, and the fresh short prompt that computes as many tokens as turn two did."""

    first: Turn
    second: Turn
    third: Turn
    reference: Turn

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


async def measure(rig: Rig) -> Article:
    """Time to first token of three turns over an article the server has never seen."""
    talk = Conversation(rig, system=f"{rig.nonce()}. You answer questions about an article.")
    first = await talk.ask(f"{rig.prose(rig.options.article_tokens)}\n\n{FIRST}")
    second = await talk.ask(SECOND)
    third = await talk.ask(THIRD)
    return Article(first, second, third, await _reference(rig, computed_in(first, second)))


def computed_in(first: Turn, second: Turn) -> int:
    """Tokens turn two computed, as reported; without a report, those it added."""
    if second.cached_tokens is None:
        return second.prompt_tokens - first.prompt_tokens - first.completion_tokens
    return second.computed_tokens


async def _reference(rig: Rig, tokens: int) -> Turn:
    """A fresh prompt of which the server computes this many tokens, with next to no context.

    The cheapest way to compute so many tokens: no long context to attend to, nothing to look up.
    """
    words, tries = max(1, tokens // 2), list[Turn]()
    for _ in range(REFERENCE_TRIES):
        turn = await Conversation(rig).ask(f"{rig.nonce()} {rig.filler(words)}")
        tries.append(turn)
        words = max(1, words + tokens - turn.computed_tokens)
    return _middle_of_closest(tries, tokens)


def _middle_of_closest(tries: list[Turn], tokens: int) -> Turn:
    """The median in time among the tries that came closest in tokens, give or take one."""
    closest = min(abs(turn.computed_tokens - tokens) for turn in tries)
    near = [turn for turn in tries if abs(turn.computed_tokens - tokens) <= max(1, closest)]
    return sorted(near, key=lambda turn: turn.ttft_s)[len(near) // 2]
