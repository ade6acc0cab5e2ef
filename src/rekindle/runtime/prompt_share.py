"""How much of the prompts a step has beside replies, on a GPU: replies have two thirds of the time.

What a step takes there is no straight line: up to some number of rows more of them cost nothing,
beyond it those after a long context cost much, and a step of a new size takes longer than one that
was seen before. So there are few sizes, and what each takes is learnt.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST_SLOWER = 1.4  # that replies become while a prompt is read beside them: 1.5, and not missed
SIZES = (512, 256, 128, 64, 32, 16)  # of a slice, in tokens
FIRST_TOKENS = 256  # of the first one, before anything is known
BURST_S = 0.1  # that prompts may take at once, after as long without any
MOST_STEPS_APART = 32  # of two slices, whatever they take
LEARNING = 0.3  # of what was known, that is replaced by what was seen


class PromptShare:
    """Replies may take so much longer than alone on average; where more prompts wait than replies
    run, by as much more. What they did not use of that is saved for a larger slice."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._alone_s: dict[int, float] = {}  # what steps of so many replies take, by bit length
        self._beside_s: dict[int, float] = {}  # and with a slice of so many tokens
        self._saved_s = BURST_S
        self._apart = 0  # steps since the last slice

    def tokens(self, replies: int, prompts: int) -> int:
        """The next slice beside so many replies, of the first of so many prompts; 0: none now."""
        alone_s = self._alone_s.get(replies.bit_length())
        if alone_s is None:
            return 0  # which teaches that
        if not self._beside_s:
            return min(FIRST_TOKENS, self._most)
        allowed_s = alone_s * _slower(replies, prompts) + self._saved_s
        fitting = (size for size in self._sizes() if self._expected_s(size, alone_s) <= allowed_s)
        least = min(SIZES[-1], self._most) if self._apart >= MOST_STEPS_APART else 0
        return next(fitting, least)

    def learn(self, replies: int, slice_tokens: int, prompts: int, took_s: float) -> None:
        """A step took so long, with or without a slice of the prompts that there were."""
        if not replies:
            self._saved_s = BURST_S  # nobody was slowed down
            return
        kind = replies.bit_length()
        self._apart = 0 if slice_tokens else self._apart + 1
        if slice_tokens:
            _learn(self._beside_s, _size(slice_tokens), took_s)
        elif not prompts or kind not in self._alone_s:
            _learn(self._alone_s, kind, took_s)
        if not prompts:
            self._beside_s.clear()  # the next one begins with an empty context
        alone_s = self._alone_s.get(kind, took_s)
        saved_s = self._saved_s + alone_s * _slower(replies, prompts) - took_s
        self._saved_s = min(saved_s, BURST_S)

    def _sizes(self) -> Iterator[int]:
        return (size for size in SIZES if size <= self._most)

    def _expected_s(self, size: int, alone_s: float) -> float:
        """Of a size that was not seen, as much for each token as the next one that was."""
        if size in self._beside_s:
            return self._beside_s[size]
        seen = min(self._beside_s, key=lambda other: abs(other - size))
        return alone_s + max(self._beside_s[seen] - alone_s, 0.0) * size / seen


def _size(slice_tokens: int) -> int:
    """What a slice counts as: it may be shorter, at the end of a prompt."""
    return next((size for size in reversed(SIZES) if size >= slice_tokens), SIZES[0])


def _slower(replies: int, prompts: int) -> float:
    return 1 + (MOST_SLOWER - 1) * max(1.0, prompts / replies)


def _learn(times_s: dict[int, float], key: int, took_s: float) -> None:
    before_s = times_s.get(key, took_s)
    times_s[key] = before_s + LEARNING * (took_s - before_s)
