"""What tokens a request has at least, seen before any of it is tokenised."""

from __future__ import annotations

from rekindle.errors import ContextTooLong


def check_size(value: object, longest_bytes: int, context_tokens: int, *, param: str) -> None:
    """Refuse what cannot fit in tokens of so many bytes: making them takes its time."""
    least = _characters(value) // longest_bytes
    if least >= context_tokens:
        raise ContextTooLong(least, context_tokens, param=param, at_least=True)


def _characters(value: object) -> int:
    """Characters in all strings of a JSON value, a lower bound of their bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_characters(each) for each in value.values())
    if isinstance(value, list):
        return sum(_characters(each) for each in value)
    return 0
