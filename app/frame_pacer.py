"""How often the window's frames come: often enough to look live, seldom enough to leave the engine its cores."""

from __future__ import annotations

import math
import os
import time

APART_SECONDS = 1.0
"""After so long without a frame, what the process has spent meanwhile was for something else."""


class FramePacer:
    """How long a frame waits after the one before it.

    At most 30 frames a second. Where the engine computes on the CPU the window's frames cost it tokens: with few cores
    they come slower while it works. Dear frames are followed by longer pauses, down to four a second, so that all that
    the window's process does takes about an eighth of one core at most, and on a machine of two cores a twelfth: there
    the engine's threads wait for each other, and what is taken from one is taken from both.
    """

    FASTEST = 1 / 30
    SLOWEST = 0.25
    SHARE = 8.0

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores if cores is not None else (os.cpu_count() or 1)
        self._cost = 0.0
        self._spent = 0.0
        self._begun_at = -math.inf

    def begin_frame(self) -> None:
        """A frame begins: what the process has spent since the one before, painting and reading included, was the cost
        of that. Processor time: where the engine has the cores, the clock says little."""
        begun_at, spent = time.perf_counter(), time.process_time()
        if begun_at - self._begun_at < APART_SECONDS:
            self.note_cost(spent - self._spent)
        self._begun_at, self._spent = begun_at, spent

    def note_cost(self, seconds: float) -> None:
        """Processor time of a frame."""
        self._cost += 0.2 * (seconds - self._cost)

    def interval(self, *, busy_on_cpu: bool) -> float:
        """Seconds from the beginning of one frame to the beginning of the next."""
        base = self.FASTEST
        if busy_on_cpu:
            base = 1 / 11 if self._cores <= 2 else 1 / 15 if self._cores <= 4 else 1 / 20 if self._cores <= 8 else base
        share = 1.5 * self.SHARE if self._cores <= 2 and busy_on_cpu else self.SHARE
        return min(self.SLOWEST, max(base, share * self._cost))
