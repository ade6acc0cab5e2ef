"""A conversation whose history holds the server's real replies, and the measure of its turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rekindle.bench.client import Message
from rekindle.bench.reply import Reply
from rekindle.bench.rig import Rig

#: The stages of a turn up to its first byte, in order.
STAGES = ("front", "encode", "queue", "plan", "restore", "compute", "first_byte")


@dataclass(frozen=True, slots=True)
class Turn:
    ttft_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    stages_s: Mapping[str, float] = field(default_factory=dict)  # of the time to the first token

    @classmethod
    def of(cls, reply: Reply) -> Turn:
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


class Conversation:
    def __init__(self, rig: Rig, system: str | None = None) -> None:
        self._rig = rig
        self._messages: list[Message] = []
        if system is not None:
            self._messages.append({"role": "system", "content": system})

    async def ask(self, question: str) -> Turn:
        """Send the whole history with the question; remember the reply."""
        self._messages.append({"role": "user", "content": question})
        reply = await self._rig.client.chat(self._messages, self._rig.options.turn_reply_tokens)
        self._messages.append({"role": "assistant", "content": reply.text})
        return Turn.of(reply)
