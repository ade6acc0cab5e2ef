"""How much of the prompts a step has beside replies, on a GPU: replies have two thirds of the time.

A step of another shape than the last one takes several milliseconds more there, because its graph
is made anew, and so does the one after it. So prompts are read in few large slices, with steps of
replies alone in between: a little in every step would cost more.
"""

from __future__ import annotations

MOST_SLOWER = 1.45  # that replies become while a prompt is read beside them: within 1.5
SIZES = (512, 256, 128, 64)  # of a slice, in tokens
FIRST_TOKENS = 256  # of the first one, before anything is known
MOST_SLICE_S = 0.1  # that replies wait for one, if it can be helped
BURST_S = 0.15  # that prompts may take at once, after as long without any
MOST_STEPS_APART = 64  # of two slices, whatever they take
UNSETTLED_STEPS = 2  # after a slice, which may still pay for another shape
ALONE_LEARNING, ROW_LEARNING = 0.05, 0.3  # of what was known, that is replaced by what was seen


class PromptShare:
    """Replies may take so much longer than alone on average; where more prompts wait than replies
    run, by as much more. What they did not use of that is saved for the next slice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone_s: dict[int, float] = {}  # what steps of so many replies take, by bit length
        self._row_s: float | None = None  # and what a token of a prompt adds to it
        self._saved_s = BURST_S
        self._apart = 0  # steps since the last slice

    def tokens(self, replies: int, prompts: int, pending: int) -> int:
        """The next slice beside so many replies, of prompts that have so much left; 0: none now."""
        alone_s = self._alone_s.get(replies.bit_length())
        if alone_s is None:
            return 0  # which teaches that
        if self._row_s is None:
            return min(FIRST_TOKENS, self._most, pending)
        fitting = (size for size in SIZES if alone_s + size * self._row_s <= MOST_SLICE_S)
        size = min(next(fitting, SIZES[-1]), self._most, pending)
        allowed_s = alone_s * _slower(replies, prompts) + self._saved_s
        is_paid = alone_s + size * self._row_s <= allowed_s
        return size if is_paid or self._apart >= MOST_STEPS_APART else 0

    def learn(self, replies: int, slice_tokens: int, prompts: int, took_s: float) -> None:
        """A step took so long, with or without a slice of the prompts that there were."""
        if not replies:
            self._saved_s = BURST_S  # nobody was slowed down
            return
        kind = replies.bit_length()
        self._apart = 0 if slice_tokens else self._apart + 1
        is_settled = not prompts and self._apart > UNSETTLED_STEPS
        if not slice_tokens and (is_settled or kind not in self._alone_s):
            self._alone_s[kind] = _between(self._alone_s.get(kind), took_s, ALONE_LEARNING)
        alone_s = self._alone_s.get(kind, took_s)
        if slice_tokens >= min(SIZES[-1], self._most):
            row_s = max(took_s - alone_s, 0.0) / slice_tokens
            self._row_s = _between(self._row_s, row_s, ROW_LEARNING)
        saved_s = self._saved_s + alone_s * _slower(replies, prompts) - took_s
        self._saved_s = min(saved_s, BURST_S)


def _slower(replies: int, prompts: int) -> float:
    return 1 + (MOST_SLOWER - 1) * max(1.0, prompts / replies)


def _between(known: float | None, seen: float, learning: float) -> float:
    return seen if known is None else known + learning * (seen - known)
