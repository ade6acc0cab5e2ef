"""One step's work: the next token of every reply, and a slice of the prompts being read."""

from __future__ import annotations

import math

from rekindle.engine.base import Capabilities, Work
from rekindle.runtime.schedule.turn import Turn

# ----------------------------------------------------------------------
# How much of the prompts a step has beside replies, on a GPU: replies have two thirds of the time,
# less where more prompts wait than replies run.
#
# Prompts are read (chunked prefill) in few large slices, with steps of replies alone in between: a
# step of another shape than the last one is slower by itself (where CUDA graphs are made of two
# steps that are alike, by several milliseconds, and so is the next one), and a little in every
# step would cost more.

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


ALONE_S, SHARED_S = 0.9, 0.25  # how long a prefill slice may hold up a cancel, or other replies
LEAST_SLICE_TOKENS = 4  # on the slowest machines
# From here on slices are nearly as fast a token as large ones. Below, attention of llama.cpp's CPU
# kernels goes row by row, which after a long context is up to 30 times slower.
WHOLE_SLICE_TOKENS = 64
GRAIN_TOKENS = 16  # larger slices are multiples of it, as kernels like them
UNKNOWN_SLICE_TOKENS = 16  # before the first slice has shown how fast the machine is
SHORT_TOKENS = 64  # of a prompt's rest, that goes first beside replies on a GPU
RETRY_STEPS = 8  # smaller slices after which a whole one is tried again
QUANTUM_SLICES = 4  # slices after which a long prompt lets the next one in

Batch = list[tuple[Turn, Work]]


class Batcher:
    """Composes batches of the turns that run; prompts take turns by quanta of a few slices."""

    def __init__(self, capabilities: Capabilities, parallel: int) -> None:
        self._step_tokens = capabilities.step_tokens
        self._whole_pictures = capabilities.whole_pictures
        most = capabilities.batch_tokens - parallel
        self._slice = SliceSize(most)
        self._share = PromptShare() if capabilities.device == "gpu" else None
        self._replies = self._prompts = 0  # beside one another, in the step that was composed last

    def learn(self, batch: Batch, took_s: float, steps: int = 1) -> int:
        """Learn from so many steps how large the next slices may be; how many rows one had."""
        rows = sum(len(work.tokens) for _, work in batch)
        self._slice.learn(rows, took_s)
        if self._share:
            slice_tokens = rows - self._replies
            for _ in range(steps):
                self._share.learn(self._replies, slice_tokens, self._prompts, took_s)
        return rows

    def has_room(self, running: list[Turn]) -> bool:
        """Whether the next batch has rows left for another prompt."""
        prefilling = _prefilling(running)
        pending = sum(turn.pending_tokens for turn in prefilling)
        slice_tokens = self._slice_tokens(running)
        return pending < slice_tokens or self._has_had_quantum(prefilling[0], running)

    def compose(self, running: list[Turn], waiting: int = 0) -> Batch:
        """The next step; so many turns have not been started yet."""
        batch = [(turn, turn.last_work()) for turn in running if turn.is_decoding]
        self._replies, self._prompts = len(batch), 0
        if len(batch) < len(running):  # those that are over have nothing that is pending, or one
            batch += self._compose_prefill(running, waiting)
        return batch

    def _compose_prefill(self, running: list[Turn], waiting: int) -> Batch:
        prefilling = [turn for turn in _prefilling(running) if not turn.wants_vectors]
        if not prefilling:
            return []
        self._prompts = len(prefilling) + waiting
        most, share = self._slice_tokens(running), self._share if self._replies else None
        if share:  # short ones do not wait until a long one's slice is paid for
            prefilling = list(filter(_is_short, prefilling)) or prefilling
        pending = sum(turn.pending_tokens for turn in prefilling)
        if share:
            room = share.tokens(self._replies, self._prompts, pending, most)
        else:
            room = self._even_slice(pending, most)
        batch: Batch = []
        for turn in prefilling:
            if room <= 0:
                break
            work = turn.next_work(room, self._step_tokens, whole_pictures=self._whole_pictures)
            if len(work.tokens) > room and batch and not turn.request.exact:
                continue  # a picture that is computed whole comes first another time
            batch.append((turn, work))
            room -= len(work.tokens)
        return batch

    @staticmethod
    def _even_slice(pending: int, slice_tokens: int) -> int:
        """As many slices as it takes anyway, but of one size: a short last one is a slow one, and
        several short ones are worse."""
        slices = max(1, math.ceil(pending / slice_tokens))
        even = math.ceil(pending / slices)
        return max(even, WHOLE_SLICE_TOKENS) if slice_tokens >= WHOLE_SLICE_TOKENS else even

    def rotate(self, running: list[Turn]) -> None:
        """Put a prompt that has had its quantum behind the others."""
        prefilling = _prefilling(running) if len(running) > 1 else []
        if len(prefilling) > 1 and self._has_had_quantum(prefilling[0], running):
            prefilling[0].slice_tokens = 0
            running.remove(prefilling[0])
            running.append(prefilling[0])

    def _has_had_quantum(self, turn: Turn, running: list[Turn]) -> bool:
        slices = 1 if self._share and _has_replies(running) else QUANTUM_SLICES
        return turn.slice_tokens >= slices * self._slice_tokens(running)

    def _slice_tokens(self, running: list[Turn]) -> int:
        """The most that a slice may have now."""
        if not _has_replies(running):
            return self._slice.tokens(ALONE_S)
        if self._share:  # where slices are far apart, and as large as they may be
            return min(self._slice.tokens(MOST_SLICE_S), MOST_SLICE_TOKENS)
        return self._slice.tokens(SHARED_S)


def _has_replies(running: list[Turn]) -> bool:
    return any(turn.is_decoding for turn in running)


def _is_short(turn: Turn) -> bool:
    return turn.pending_tokens <= SHORT_TOKENS


def _prefilling(running: list[Turn]) -> list[Turn]:
    return [turn for turn in running if turn.pending_tokens > 1 or turn.next_picture]


class SliceSize:
    """How many prompt tokens one step may take, learnt from how long steps take: some time for the
    step itself, and some for each row. Of a large model all weights are read in every step; were
    that time put down to the rows, slices would shrink until they are nothing but overhead.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._step_s = self._row_s = 0.0
        self._has_seen_two_sizes = False
        self._last_rows, self._last_s = 0, 0.0
        self._retry_steps: float = math.inf  # until a whole slice is tried again
        self._patience_steps = RETRY_STEPS

    def learn(self, rows: int, took_s: float) -> None:
        """Slower is believed at once, faster by and by. Where whole slices fit, smaller steps teach
        nothing: other kernels compute them, and slices made as small would stay slow."""
        if rows < LEAST_SLICE_TOKENS / 2:
            return
        usual = self.tokens(SHARED_S)
        least = WHOLE_SLICE_TOKENS if usual >= WHOLE_SLICE_TOKENS else usual / 2
        if rows < least or took_s <= 0:
            return
        self._count(rows, took_s)
        more_rows, more_s = rows - self._last_rows, took_s - self._last_s
        expected_s = self._step_s + rows * self._row_s
        if self._last_rows < WHOLE_SLICE_TOKENS <= rows and 2 * took_s < expected_s:
            self._step_s, self._row_s = 0.0, took_s / rows  # another kernel: not by and by
            self._has_seen_two_sizes = False
        elif self._is_other_size(rows) and more_rows * more_s > 0:
            # What more rows take more is theirs, the rest the step's own.
            self._has_seen_two_sizes = self._last_rows > 0
            self._row_s = min(more_s / more_rows, took_s / rows)
            self._step_s = took_s - rows * self._row_s
        else:
            slower = took_s / expected_s
            factor = slower if slower > 1 else 0.7 + 0.3 * slower
            self._step_s, self._row_s = self._step_s * factor, self._row_s * factor
        self._last_rows, self._last_s = rows, took_s

    def _count(self, rows: int, took_s: float) -> None:
        """A busy moment can make whole slices too slow and leave those that are small, and slow for
        it. So where they have been possible they are tried again, ever more seldom in vain."""
        if rows < WHOLE_SLICE_TOKENS:
            self._retry_steps -= 1
            return
        in_vain = self._retry_steps <= 0 and took_s * WHOLE_SLICE_TOKENS / rows > ALONE_S
        self._patience_steps = 2 * self._patience_steps if in_vain else RETRY_STEPS
        self._retry_steps = self._patience_steps

    def _is_other_size(self, rows: int) -> bool:
        return 3 * abs(rows - self._last_rows) > max(rows, self._last_rows)

    def tokens(self, allowed_s: float) -> int:
        """Beside other replies, too, a slice is no smaller than it has to be for its speed, if it
        could be as large alone."""
        wanted = self._fitting(allowed_s)
        if allowed_s < ALONE_S:
            wanted = max(wanted, min(self._fitting(ALONE_S), WHOLE_SLICE_TOKENS))
        if self._retry_steps <= 0 and WHOLE_SLICE_TOKENS * self._row_s <= 2 * ALONE_S:
            wanted = max(wanted, WHOLE_SLICE_TOKENS)
        return min(wanted, self._most)

    def _fitting(self, allowed_s: float) -> int:
        """At least half of a step is spent on rows, though it then takes longer than allowed."""
        if not self._row_s:
            return UNKNOWN_SLICE_TOKENS
        wanted = int(max(allowed_s - self._step_s, self._step_s) / self._row_s)
        if not (self._has_seen_two_sizes or self._is_other_size(wanted)):
            wanted = self._last_rows // 2
        # Times vary: no more than twice the last slice, or what half the time allows on average.
        safe = max(2 * self._last_rows, int(self._last_rows * allowed_s / 2 / self._last_s))
        wanted = max(min(wanted, safe), LEAST_SLICE_TOKENS)
        return wanted - wanted % GRAIN_TOKENS if wanted > WHOLE_SLICE_TOKENS else wanted
