"""Log probabilities of tokens as OpenAI's APIs show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.protocol.events import TokenLogprob


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI sends this number instead."""
    return max(logprob, -9999.0)


def token_logprobs(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Each token with the best alternatives."""
    return [
        {
            **_token(token.piece, token.logprob),
            "top_logprobs": [_token(piece, logprob) for piece, logprob in token.top],
        }
        for token in logprobs
    ]


def _token(piece: bytes, logprob: float) -> dict[str, Any]:
    return {
        "token": piece.decode(errors="replace"),
        "logprob": finite(logprob),
        "bytes": list(piece),
    }
