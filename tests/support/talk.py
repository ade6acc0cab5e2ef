"""Runs conversations on a real engine in this process and records logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rekindle.chat.encode import Encoder
from rekindle.chat.prompt import Prompt
from rekindle.chat.template import ChatTemplate
from rekindle.engine.base import Engine, EngineOptions, Sequence
from rekindle.engine.llamacpp.engine import LlamaCppEngine
from tests.support.harness import Reply, RuntimeHarness

Observe = Callable[[Sequence, np.ndarray[Any, Any]], None]


class ObservedEngine(Engine, Protocol):
    """An engine that exposes the logits of every choice."""

    observe: Observe | None


@dataclass
class Answered:
    """The answer of a turn with the logits of each token."""

    reply: Reply
    logits: list[np.ndarray[Any, Any]] = field(default_factory=list)

    def same_bits(self, other: Answered) -> bool:
        return (
            self.reply.tokens == other.reply.tokens
            and len(self.logits) == len(other.logits)
            and all(
                np.array_equal(mine, theirs)
                for mine, theirs in zip(self.logits, other.logits, strict=True)
            )
        )


class Talker:
    """A harness with a model. `forget` removes all cached state."""

    def __init__(
        self,
        path: Path,
        load: Callable[[EngineOptions], ObservedEngine] = LlamaCppEngine,
        *,
        parallel: int = 4,
        context: int = 2048,
        threads: int = 1,
    ) -> None:
        options = EngineOptions(
            path=path, parallel=parallel, threads=threads, context_tokens=context
        )
        self.engine = load(options)
        template = ChatTemplate(self.engine.chat_template or "")
        self.encoder = Encoder(self.engine.tokenizer, template)
        self._parallel = parallel
        self.forget()

    def forget(self, **limits: Any) -> None:
        self.engine.sequences.reset()
        self.harness = RuntimeHarness(self.engine, parallel=self._parallel, **limits)

    def prompt(self, messages: list[dict[str, str]]) -> Prompt:
        return self.encoder.chat(messages, template_kwargs={})

    def answer(self, prompt: Prompt, **ask: Any) -> Answered:
        """Run one turn and record its logits."""
        recorded: list[np.ndarray[Any, Any]] = []

        def observe(_sequence: Sequence, logits: np.ndarray[Any, Any]) -> None:
            recorded.append(logits.copy())

        self.engine.observe = observe
        reply = self.harness.ask(prompt, **ask)
        self.engine.observe = None
        return Answered(reply, recorded)

    def close(self) -> None:
        self.engine.close()
