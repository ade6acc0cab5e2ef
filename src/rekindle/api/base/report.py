"""`x_cache` of an answer, in every dialect: what was reused, and why not more."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from rekindle.protocol.events import CacheReport, Finished, TokenLogprob


def x_cache(turns: Sequence[Finished], choices: int = 1) -> dict[str, Any]:
    """The first choice's report; for several prompts their sum, and the first that is no hit."""
    reports = [turn.cache for turn in turns[::choices]]
    shown = next((report for report in reports if report.status != "hit"), reports[0])
    status = _status(reports)
    fields: dict[str, Any] = {
        "hit": status != "miss",
        "status": status,
        "cache_key": shown.cache_key,
        "reused_tokens": sum(report.reused_tokens for report in reports),
        "new_cache_key": shown.new_cache_key,
        "cached_tokens": sum(report.cached_tokens for report in reports),
        "reason": shown.reason,
        "tier": next((report.tier for report in reports if report.tier), None),
        "kv_bits": min((report.kv_bits for report in reports if report.kv_bits), default=None),
    }
    if group_size := next((each.kv_group_size for each in reports if each.kv_group_size), None):
        fields["kv_group_size"] = group_size
    if shown.diverged_at is not None:
        fields["diverged_at"] = structs.asdict(shown.diverged_at)
    if normalised := dict.fromkeys(what for report in reports for what in report.normalised):
        fields["normalised"] = list(normalised)
    return fields


def _status(reports: Sequence[CacheReport]) -> str:
    kinds = {report.status for report in reports}
    return kinds.pop() if len(kinds) == 1 else "partial_hit"


def log_line(turn: Finished) -> str:
    """What a turn cost, for the log."""
    cache = turn.cache
    source = f" from {cache.tier}" if cache.tier else ""
    return (
        f"{turn.prompt_tokens} prompt tokens: {cache.reused_tokens} reused{source} "
        f"({cache.status}, {cache.reason}), the rest in {turn.prompt_eval_s:.2f} s; "
        f"{turn.completion_tokens} generated ({turn.reason})"
    )


# ----------------------------------------------------------------------
# Log probabilities of tokens as OpenAI's APIs show them.


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


# ----------------------------------------------------------------------
# Headers of an answer that say what of its request was left out.

IGNORED_TOOLS = "x-ignored-tools"  # there are none of these here
MOST_NAMED = 16  # in one header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


def notes(left_out: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """A header for each kind of which something was left out, with some of the names."""
    return {header: _names(names) for header, names in left_out.items() if names}


def _names(names: Sequence[str]) -> str:
    """Without what a header cannot hold."""
    return ", ".join(_UNSAFE.sub("?", name[:128]) for name in names[:MOST_NAMED])
