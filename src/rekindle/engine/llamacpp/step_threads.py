"""How many threads compute a step of replies, chosen by how long steps take.

Threads meet after each of a step's many small parts. Where a program wants one of their cores, be
it our own front, the thread that it takes the place of keeps all others waiting for a whole slice
of the scheduler's: on two cores that are shared with one busy program, two threads took ten times
as long as one (decision 42). With a core left free, that program runs there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import inf
from statistics import fmean

FEWER = 1  # threads less, while others want a core
MEMORY_STEPS = 12  # whose mean counts: of many fast steps with a few slow ones, those do
ROUND_STEPS = 16  # after which it is seen whether the other number is due to be tried
TRIAL_STEPS = 4  # of which the first, that may have to wake threads, teaches nothing
TRIAL_SHARE = 0.01  # of the time, that may be lost on trials
MOST_TRIAL_SHARE = 0.1  # while a core is left to others
MOST_DUE_S = 10.0  # between two: others that wanted a core may have gone
LEAST_GAIN = 0.95  # of the time a step takes
IS_SLOWER = 2  # times as slow as it was: then the other number is tried at once
IS_HOPELESS = 4  # times as slow in a trial, which ends it


_Times = deque[float]


class StepThreads:
    """The threads of one context; steps of twice as many rows are learnt about by themselves."""

    def __init__(self, most: int, set_threads: Callable[[int], None]) -> None:
        """`set_threads` has the context compute with so many from now on, as `most` do now."""
        self._most = self._set = most
        self._set_threads = set_threads
        self._choices: dict[int, Choice] = {}  # by the bits of the number of rows
        self._choice: Choice | None = None  # of the step under way

    def begin(self, replies: int) -> None:
        """A step of so many replies begins; 0: it has prompts in it, for which all are best."""
        self._choice, threads = None, self._most
        if replies:
            kind = replies.bit_length()
            if kind not in self._choices:
                self._choices[kind] = Choice(self._most)
            self._choice = self._choices[kind]
            threads = self._choice.next
        if threads != self._set:
            self._set = threads
            self._set_threads(threads)

    def end(self, took_s: float) -> None:
        if self._choice is not None:
            self._choice.learn(took_s)


class Choice:
    """All threads or fewer, for steps of about as many rows."""

    def __init__(self, most: int) -> None:
        self.threads = self._most = most
        self._other = max(most - FEWER, 1)
        self._times_s = {count: _Times(maxlen=MEMORY_STEPS) for count in (most, self._other)}
        self._best_s = inf  # that a step took on average with the threads of now
        self._in_trial = False
        self._steps, self._spent_s = 0, 0.0  # since this trial began, or the last one ended
        self._due_s = 0.0  # to be spent before the next trial

    @property
    def next(self) -> int:
        """For the next step."""
        return self._other if self._in_trial else self.threads

    def learn(self, took_s: float) -> None:
        """A step took so long with the threads that were `next`."""
        self._times_s[self.next].append(took_s)
        self._steps += 1
        self._spent_s += took_s
        if self._in_trial:
            self._go_on_trying(took_s)
        elif self._steps % ROUND_STEPS == 0 and self._is_trial_due():
            self._in_trial, self._steps, self._spent_s = True, 0, 0.0

    def _is_trial_due(self) -> bool:
        mean_s = fmean(self._times_s[self.threads])
        self._best_s = min(self._best_s, mean_s)
        if self.threads == self._most and mean_s > IS_SLOWER * self._best_s:
            self._best_s = mean_s
            self._times_s[self._other].clear()  # of steps as they were: the contexts may be longer
            return True
        return self._spent_s >= self._due_s

    def _go_on_trying(self, took_s: float) -> None:
        usual_s = fmean(self._times_s[self.threads])
        is_hopeless = took_s > IS_HOPELESS * usual_s
        if self._steps == 1 and not is_hopeless:
            self._times_s[self._other].pop()
        elif self._steps == TRIAL_STEPS or is_hopeless:
            self._end_trial(usual_s)

    def _end_trial(self, usual_s: float) -> None:
        lost_s = self._spent_s - self._steps * usual_s
        self._due_s = lost_s / TRIAL_SHARE
        self._in_trial, self._steps, self._spent_s = False, 0, 0.0
        if fmean(self._times_s[self._other]) < LEAST_GAIN * usual_s:
            self.threads, self._other = self._other, self.threads
            self._best_s = inf
        if self.threads < self._most:  # nothing else shows when all are best again
            self._due_s = min(self._due_s, max(MOST_DUE_S, lost_s / MOST_TRIAL_SHARE))
