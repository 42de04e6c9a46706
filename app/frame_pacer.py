"""How often the window's frames come: often enough to look live, seldom enough to leave the engine its cores."""

from __future__ import annotations

import os


class FramePacer:
    """How long a frame waits after the one before it.

    At most 30 frames a second. Where the engine computes on the CPU the window's frames cost it tokens: with few cores
    they come slower while it works. A frame that was dear to draw is followed by a longer pause, so that drawing takes
    about an eighth of one core at most, down to six frames a second.
    """

    FASTEST = 1 / 30
    SLOWEST = 0.16
    SHARE = 8.0

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores if cores is not None else (os.cpu_count() or 1)
        self._cost = 0.0

    def note_cost(self, seconds: float) -> None:
        """Processor time of a frame on the GUI thread: where the engine has the cores, the clock says little."""
        self._cost += 0.2 * (seconds - self._cost)

    def interval(self, *, busy_on_cpu: bool) -> float:
        """Seconds from the beginning of one frame to the beginning of the next."""
        base = self.FASTEST
        if busy_on_cpu:
            base = 1 / 11 if self._cores <= 2 else 1 / 15 if self._cores <= 4 else 1 / 20 if self._cores <= 8 else base
        return min(self.SLOWEST, max(base, self.SHARE * self._cost))
