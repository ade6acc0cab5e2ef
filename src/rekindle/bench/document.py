"""Scenario: many questions at once over one shared document."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rekindle.bench.client import Message
from rekindle.bench.conversation import Turn
from rekindle.bench.rig import Rig


@dataclass(frozen=True, slots=True)
class Document:
    wall_s: float  # from the first question sent to the last answer complete
    answers: tuple[Turn, ...]

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"document_wall_s": self.wall_s}
        if all(answer.cached_tokens is not None for answer in self.answers):
            computed = sum(answer.computed_tokens for answer in self.answers)
            figures["document_computed_tokens"] = computed
        return figures


async def measure(rig: Rig) -> Document:
    """Wall time until every question about a never seen document has its whole answer."""
    system = (
        f"{rig.nonce()}. Answer from this document.\n\n{rig.prose(rig.options.document_tokens)}"
    )
    chats = [_messages(system, number) for number in range(1, rig.options.questions + 1)]
    start_s = time.perf_counter()
    replies = await asyncio.gather(
        *(rig.full_reply(chat, rig.options.answer_tokens) for chat in chats)
    )
    wall_s = time.perf_counter() - start_s
    return Document(wall_s, tuple(Turn.of(reply) for reply in replies))


def _messages(system: str, number: int) -> list[Message]:
    question = f"Question {number}: what does sentence {number} of the document say?"
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
