"""Chooses how many threads compute a decode step, by measuring how long steps take.

The threads synchronise after each of the many small operations of a step. If another program takes
the core of one thread, all others wait for a whole time slice of the scheduler. On two cores shared
with one busy program, two threads took ten times as long as one (decision 42). Leaving one core
free avoids that.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from statistics import fmean

ROUND_STEPS = 16  # check after this many steps whether a trial is due
TRIAL_STEPS = 4  # the first step of a trial may have to wake threads and is not counted
TRIAL_TIME_SHARE = 0.01  # fraction of the time that trials may lose
REDUCED_TRIAL_TIME_SHARE = 0.1  # the same while a core is left to other programs
MAX_TRIAL_INTERVAL_S = 10.0  # the same state: the other programs may have ended


class StepThreads:
    """Sets the thread count of one context. Steps are grouped by the bit length of their number of
    rows."""

    def __init__(self, most: int, set_threads: Callable[[int], None]) -> None:
        self._most = self._set = most
        self._set_threads = set_threads
        # By bit length of the number of rows.
        self._choices = defaultdict[int, ThreadChoice](lambda: ThreadChoice(most))
        self._choice: ThreadChoice | None = None  # of the current step

    def begin(self, replies: int) -> None:
        """Set the threads of a step that decodes `replies` rows. 0 means that it has prefill, for
        which all threads are best."""
        self._choice, threads = None, self._most
        if replies:
            self._choice = self._choices[replies.bit_length()]
            threads = self._choice.next
        if threads != self._set:
            self._set = threads
            self._set_threads(threads)

    def end(self, took_s: float) -> None:
        if self._choice is not None:
            self._choice.learn(took_s)


class ThreadChoice:
    """Compares all threads with one thread less, for steps of similar size.

    The other number is tried now and then. The time that a trial loses decides when the next one is
    due.
    """

    def __init__(self, most: int) -> None:
        self.threads = self._most = most
        self._other = max(most - 1, 1)
        self._times_s = {count: deque[float](maxlen=12) for count in (most, self._other)}
        self._best_s = inf  # best mean step time with the current threads
        self._in_trial = False
        self._steps, self._spent_s = 0, 0.0  # since the trial began, or the last one ended
        self._due_s = 0.0  # time to spend before the next trial

    @property
    def next(self) -> int:
        """The number of threads for the next step."""
        return self._other if self._in_trial else self.threads

    def learn(self, took_s: float) -> None:
        """Record how long a step took with `next` threads."""
        self._times_s[self.next].append(took_s)
        self._steps += 1
        self._spent_s += took_s
        if self._in_trial:
            self._continue_trial(took_s)
        elif self._steps % ROUND_STEPS == 0 and self._is_trial_due():
            self._in_trial, self._steps, self._spent_s = True, 0, 0.0

    def _is_trial_due(self) -> bool:
        mean_s = fmean(self._times_s[self.threads])
        self._best_s = min(self._best_s, mean_s)
        if self.threads == self._most and mean_s > 2 * self._best_s:  # try the other number now
            self._best_s = mean_s
            self._times_s[self._other].clear()  # contexts may have grown since
            return True
        return self._spent_s >= self._due_s

    def _continue_trial(self, took_s: float) -> None:
        current_s = fmean(self._times_s[self.threads])
        is_hopeless = took_s > 4 * current_s  # ends the trial early
        if self._steps == 1 and not is_hopeless:
            self._times_s[self._other].pop()
        elif self._steps == TRIAL_STEPS or is_hopeless:
            self._end_trial(current_s)

    def _end_trial(self, current_s: float) -> None:
        lost_s = self._spent_s - self._steps * current_s
        self._due_s = lost_s / TRIAL_TIME_SHARE
        self._in_trial, self._steps, self._spent_s = False, 0, 0.0
        if fmean(self._times_s[self._other]) < 0.95 * current_s:
            self.threads, self._other = self._other, self.threads
            self._best_s = inf
        if self.threads < self._most:  # only a trial shows when all threads are best again
            self._due_s = min(
                self._due_s, max(MAX_TRIAL_INTERVAL_S, lost_s / REDUCED_TRIAL_TIME_SHARE)
            )
