"""How much of the prompts a step has beside replies, on a GPU: replies have two thirds of the time,
less where more prompts wait than replies run.

Prompts are read (chunked prefill) in few large slices, with steps of replies alone in between: a
step of another shape than the last one is slower by itself (where CUDA graphs are made of two steps
that are alike, by several milliseconds, and so is the next one), and a little in every step would
cost more.
"""

from __future__ import annotations

MOST_SLOWER = 1.45  # that replies become while a prompt is read beside them: within 1.5
LEAST_SLOWER = 1.1  # than beside a prompt without slices, whose cells may slow them down alone
MOST_SLICE_TOKENS = 512
FIRST_TOKENS = 256  # of the first one, before anything is known
MOST_SLICE_S = 0.1  # that replies wait for one, if it can be helped
BURST_S = 0.15  # that prompts may take at once, after as long without any
MOST_STEPS_APART = 64  # of two slices, whatever they take
UNSETTLED_STEPS = 2  # of a new shape, that may be slower than those that follow
LEAST_TAUGHT_TOKENS = 64  # of a slice that says what a token takes
SLOW, QUICK = 0.05, 0.3  # of what was known, that is replaced by what was seen


class PromptShare:
    """Replies may take so much longer than alone on average; where more prompts wait than replies
    run, by as much more. What they did not use of that is saved for the next slice."""

    def __init__(self) -> None:
        # What steps without a slice take, by the bit length of the number of replies:
        self._alone_s: dict[int, float] = {}  # where there is no prompt, if that was ever seen
        self._beside_s: dict[int, float] = {}  # beside the prompts that are read now
        self._row_s: float | None = None  # and what a token of a slice adds to that
        self._saved_s = BURST_S
        self._wanted_s = BURST_S  # that the next slice takes
        self._apart = 0  # steps since the last slice
        self._kind, self._alike = 0, 0  # of the last step, and of how many before it without one

    def tokens(self, replies: int, prompts: int, pending: int, limit: int) -> int:
        """The next slice beside so many replies, of prompts that have so much left; 0: none now."""
        kind = replies.bit_length()
        if kind not in self._alone_s:
            return 0  # which teaches that
        size = min(pending, limit)
        if self._row_s is None:
            return min(size, FIRST_TOKENS)
        self._wanted_s = size * self._row_s
        left_s = self._saved_s + self._allowed_s(replies, prompts) - self._base_s(kind)
        return size if self._wanted_s <= left_s or self._apart >= MOST_STEPS_APART else 0

    def learn(self, replies: int, slice_tokens: int, prompts: int, took_s: float) -> None:
        """A step took so long, with or without a slice of the prompts that there were."""
        if not replies:
            self._saved_s = BURST_S  # nobody was slowed down
            return
        kind = replies.bit_length()
        self._apart = 0 if slice_tokens else self._apart + 1
        self._alike = 0 if slice_tokens or kind != self._kind else self._alike + 1
        self._kind = kind
        if slice_tokens >= LEAST_TAUGHT_TOKENS:
            row_s = max(took_s - self._base_s(kind), 0.0) / slice_tokens
            self._row_s = _between(self._row_s, row_s, QUICK)
        elif self._alike > UNSETTLED_STEPS:
            self._learn_base(kind, took_s, is_alone=not prompts)
        if kind not in self._alone_s:
            return
        saved_s = self._saved_s + self._allowed_s(replies, prompts) - took_s
        self._saved_s = min(max(saved_s, -BURST_S), max(self._wanted_s, BURST_S))

    def _learn_base(self, kind: int, took_s: float, *, is_alone: bool) -> None:
        if is_alone or kind not in self._alone_s:
            self._alone_s[kind] = _between(self._alone_s.get(kind), took_s, SLOW)
        if is_alone:
            self._beside_s.clear()  # the next prompt begins with an empty context
        else:
            self._beside_s[kind] = _between(self._beside_s.get(kind), took_s, QUICK)

    def _base_s(self, kind: int) -> float:
        return self._beside_s.get(kind, self._alone_s.get(kind, 0.0))

    def _allowed_s(self, replies: int, prompts: int) -> float:
        """What a step may take on average."""
        kind = replies.bit_length()
        slower = 1 + (MOST_SLOWER - 1) * max(1.0, prompts / replies)
        return max(slower * self._alone_s[kind], LEAST_SLOWER * self._base_s(kind))


def _between(known: float | None, seen: float, learning: float) -> float:
    return seen if known is None else known + learning * (seen - known)
