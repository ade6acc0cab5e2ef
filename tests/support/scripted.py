"""A fake engine that samples given texts, so that real replies pass through a real runtime."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from rekindle.engine.base import Sampler, TokenMask
from rekindle.protocol.requests import SamplingParams
from tests.support.fake import VOCABULARY_SIZE, FakeEngine, FakeSampler


@dataclass
class ScriptedSampler(FakeSampler):
    """Follows its script, and then samples anything that the constraint allows."""

    line: Iterator[int] = field(default_factory=lambda: iter(()))

    def choose(self, state: bytes) -> int:
        token = next(self.line, None)
        if token is None:
            return super().choose(state)
        if self.token_mask is not None:
            scores = np.zeros(VOCABULARY_SIZE, np.float32)
            self.token_mask.mask(scores)
            assert scores[token] == 0, f"the constraint forbids the script's token {token}"
            self.token_mask.accept(token)
        return token


@dataclass
class ScriptedEngine(FakeEngine):
    """Each reply follows the next script. Its state depends on all its tokens."""

    context_tokens: int = 1 << 16
    pool_tokens: int = 1 << 17
    scripts: deque[list[int]] = field(default_factory=deque)

    def sampler(
        self, sampling: SamplingParams, prompt: Seq[int], token_mask: TokenMask | None = None
    ) -> Sampler:
        return ScriptedSampler(sampling, token_mask, line=iter(self.scripts.popleft()))
