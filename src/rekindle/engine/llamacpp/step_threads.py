"""Chooses how many threads compute a step on a CPU.

The threads of a step synchronise after each of its many small operations. If another program takes
the core of one thread, all others wait for it at every operation, up to a time slice of the
scheduler. With two threads on two cores, of which another program used one, a step took up to a
hundred times as long as with one thread (decision 42). So steps leave free the cores that other
programs use. The system says how many these are where it can (Linux). The times of steps show
whether it helps.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable
from math import inf
from pathlib import Path
from statistics import fmean

PAUSE_S = 0.05  # after such a pause other programs are counted again, before the first step
SAMPLES = 4  # the smallest count is used, because short work of other programs does not matter
SAMPLE_INTERVAL_S = 0.0005
CROWDED = 0.85  # a step that got less than this fraction of its threads' CPU time was disturbed

ROUND_STEPS = 16  # check after this many steps whether a trial is due
TRIAL_STEPS = 4  # the first step of a trial may have to wake threads and is not counted
TRIAL_TIME_SHARE = 0.01  # fraction of the time that trials may lose
REDUCED_TRIAL_TIME_SHARE = 0.1  # the same fraction while cores are left to other programs
MAX_TRIAL_INTERVAL_S = 10.0  # limit while cores are left to other programs, which may have ended
RECOUNT_INTERVAL_S = 1.0  # between two counts of other programs, while cores are left to them

IdleCores = Callable[[], int | None]


class OtherPrograms:
    """Counts the threads of other programs that run or wait for a core."""

    def __init__(self, proc: Path = Path("/proc"), cores: int | None = None) -> None:
        self._load = proc / "loadavg"
        self._own_threads = proc / "self" / "task"
        self._cores = cores or os.cpu_count() or 1

    def idle_cores(self) -> int | None:
        """Return how many cores no other program uses. None if the system does not say."""
        least = self._cores
        for sample in range(SAMPLES):
            if sample:
                time.sleep(SAMPLE_INTERVAL_S)
            try:
                least = min(least, self._running())
            except (OSError, ValueError, IndexError):
                return None
            if not least:
                break
        return self._cores - least

    def _running(self) -> int:
        running = int(self._load.read_bytes().split()[3].split(b"/")[0])
        return 0 if running <= 1 else max(running - self._own_running(), 0)

    def _own_running(self) -> int:
        running = 0
        for thread in self._own_threads.iterdir():
            try:
                state = (thread / "stat").read_bytes().rpartition(b")")[2].split()[0]
            except OSError:  # the thread has ended
                continue
            running += state == b"R"
        return running


class StepThreads:
    """Sets the number of threads before each step and learns from its time.

    Decode steps are grouped by the bit length of their row count. Steps with prefill are a group of
    their own.
    """

    def __init__(
        self,
        most: int,
        set_threads: Callable[[int], None],
        idle_cores: IdleCores,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._most = self._set = most
        self._set_threads = set_threads
        self._idle_cores = idle_cores
        self._clock, self._cpu_clock = clock, cpu_clock
        self._decoding = defaultdict[int, ThreadChoice](lambda: ThreadChoice(most, idle_cores))
        self._prefill = ThreadChoice(most, idle_cores, tries_regularly=False, trial_steps=1)
        self._choice = self._prefill  # of the current step
        self._rows = 1
        self._is_crowded = False  # other programs had a part of the last step's cores
        self._started_s = self._cpu_started_s = 0.0
        self._ended_s = -inf

    def begin(self, rows: int, *, is_prefill: bool) -> None:
        """Set the threads of a step of `rows` rows."""
        choice = self._prefill if is_prefill else self._decoding[rows.bit_length()]
        if self._must_count(choice):
            idle = self._idle_cores()
            for each in (self._prefill, *self._decoding.values()):
                each.restart(idle)
        self._choice = choice
        self._rows = rows if is_prefill else 1
        if choice.next != self._set:
            self._set = choice.next
            self._set_threads(self._set)
        self._started_s, self._cpu_started_s = self._clock(), self._cpu_clock()

    def _must_count(self, choice: ThreadChoice) -> bool:
        """Whether to count idle cores before a step of this group. What one group has found out
        about other programs holds for the next group, too."""
        has_changed = choice is not self._choice
        is_disturbed = self._is_crowded or self._choice.threads < self._most
        return self._clock() - self._ended_s > PAUSE_S or (has_changed and is_disturbed)

    def end(self) -> None:
        self._ended_s = self._clock()
        took_s = self._ended_s - self._started_s
        cpu_s = self._cpu_clock() - self._cpu_started_s
        self._is_crowded = cpu_s < CROWDED * self._set * took_s
        self._choice.learn(took_s, rows=self._rows, is_crowded=self._is_crowded)


class ThreadChoice:
    """Compares two numbers of threads, for steps of similar size.

    The other number is tried when other programs disturb a step and, if `tries_regularly`, now and
    then. The time that a trial loses decides when the next one is due.
    """

    def __init__(
        self,
        most: int,
        idle_cores: IdleCores = lambda: None,
        *,
        tries_regularly: bool = True,
        trial_steps: int = TRIAL_STEPS,
    ) -> None:
        self.threads = self._most = most
        self._other = self._one_less
        self._idle_cores = idle_cores
        self._tries_regularly = tries_regularly
        self._trial_steps = trial_steps
        # Times per row of prefill, or per decode step, by number of threads.
        self._times_s = defaultdict[int, deque[float]](lambda: deque(maxlen=12))
        self._best_s = inf  # best mean time with all threads
        self._in_trial = False
        self._steps, self._rows, self._spent_s = 0, 0, 0.0  # since a trial began or ended
        self._due_s = 0.0  # time to spend before the next trial
        self._disturbed_due_s = 0.0  # computing time after which a disturbed step may start a trial

    @property
    def next(self) -> int:
        """The number of threads for the next step."""
        return self._other if self._in_trial else self.threads

    @property
    def _one_less(self) -> int:
        return max(self._most - 1, 1)

    def restart(self, idle_cores: int | None) -> None:
        """Use the cores that are idle now. If they are unknown, nothing changes."""
        if idle_cores is None:
            return
        self._reset(in_trial=False)
        self.threads = max(min(idle_cores, self._most), 1)
        if self.threads < self._most:
            self._other, self._due_s = self._most, RECOUNT_INTERVAL_S

    def learn(self, took_s: float, *, rows: int = 1, is_crowded: bool = False) -> None:
        """Record the time of a step with `next` threads. `is_crowded` says that other programs had
        a part of its cores."""
        row_s = took_s / rows
        self._times_s[self.next].append(row_s)
        self._steps += 1
        self._rows += rows
        self._spent_s += took_s
        if self._in_trial:
            self._continue_trial(row_s)
        elif self._may_use_more() or (is_crowded and self._is_disturbed(row_s)) or self._is_due():
            self._reset(in_trial=True)

    def _reset(self, *, in_trial: bool) -> None:
        self._in_trial = in_trial
        self._steps, self._rows, self._spent_s = 0, 0, 0.0

    def _may_use_more(self) -> bool:
        """Whether a trial of more threads is due, because cores may have become idle."""
        if self.threads == self._most or self._spent_s < self._due_s:
            return False
        idle = self._idle_cores()
        if idle is not None and idle <= self.threads:
            self._reset(in_trial=False)
            self._due_s = RECOUNT_INTERVAL_S
            return False
        self._other = self._most if idle is None else min(idle, self._most)
        return True

    def _is_disturbed(self, row_s: float) -> bool:
        """Whether to try fewer threads now, because the last step was slow."""
        usual_s = self._best_s if self._tries_regularly else 0.0
        is_slow = row_s > 4 * usual_s or usual_s == inf
        if self.threads < self._most or self._spent_s < self._disturbed_due_s or not is_slow:
            return False
        idle = self._idle_cores()
        if idle is not None and idle >= self._most:
            return False
        self._other = self._one_less if idle is None else max(idle, 1)
        self._times_s[self.threads] = deque([row_s], maxlen=12)
        self._times_s[self._other].clear()
        return True

    def _is_due(self) -> bool:
        """Whether a regular trial of one thread less is due."""
        is_regular = self._tries_regularly and self._steps % ROUND_STEPS == 0
        if self.threads < self._most or not is_regular:
            return False
        self._other = self._one_less
        mean_s = fmean(self._times_s[self.threads])
        self._best_s = min(self._best_s, mean_s)
        if mean_s > 2 * self._best_s:
            self._best_s = mean_s
            self._times_s[self._other].clear()  # contexts may have grown since
            return True
        return self._spent_s >= self._due_s

    def _continue_trial(self, row_s: float) -> None:
        current_s = fmean(self._times_s[self.threads])
        is_hopeless = row_s > 4 * current_s  # ends the trial early
        if self._steps == self._trial_steps or is_hopeless:
            self._end_trial(current_s)
        elif self._steps == 1:
            self._times_s[self._other].pop()

    def _end_trial(self, current_s: float) -> None:
        lost_s = self._spent_s - self._rows * current_s
        self._due_s = lost_s / TRIAL_TIME_SHARE
        self._disturbed_due_s = lost_s / REDUCED_TRIAL_TIME_SHARE
        self._reset(in_trial=False)
        if fmean(self._times_s[self._other]) < 0.95 * current_s:
            self.threads, self._other = self._other, self.threads
            self._best_s = inf
            self._due_s = abs(lost_s) / REDUCED_TRIAL_TIME_SHARE  # going back may lose as much
        if self.threads < self._most:  # only a trial shows when all threads are best again
            self._due_s = min(self._due_s, max(MAX_TRIAL_INTERVAL_S, self._disturbed_due_s))
