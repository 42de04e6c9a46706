"""A few threads that run one compiled function together, and meet inside it.

numba's and torch's thread pools wake their threads for every operation; a step has hundreds of them, a few microseconds
each. Here the threads enter a whole step once::

    thread 0   ─┬─ unit 0 ─ unit 2 ─ unit 3 ─┬─ unit 0 ─ ...      units of a phase go to whoever asks next: a thread
    thread 1   ─┴─ unit 1 ───────────────────┴─ unit 1 ─ ...      that the system has put aside holds up one unit
                 phase 0                  meet  phase 1

Who computes a unit has no influence on its result.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np

from kernels.cpu.atomics import fetch_add, give_way, load_shared, relax
from kernels.cpu.compiled import inner

LINE = 8
"""int64 numbers in a cache line: a counter each, so that counters do not slow each other down."""
GIVEN_UP = 1
"""Place of a flag: a thread will not come, nobody waits for it any more."""
SPINS = 2_000
"""Looks at a counter before a waiting thread lets others have its core: some 50 µs, more than phases differ by."""


@inner()
def claim(counters, phase):
    """The next unit of a phase that nobody has taken yet; there is no end to them."""
    return fetch_add(counters, (phase + 1) * LINE, 1)


@inner()
def meet(counters, threads):
    """Wait until all threads are here. What each wrote before is then visible to all."""
    if threads == 1:
        return
    goal = (fetch_add(counters, 0, 1) // threads + 1) * threads
    spins = 0
    while load_shared(counters, 0) < goal and load_shared(counters, GIVEN_UP) == 0:
        relax()
        spins += 1
        if spins > SPINS:
            give_way()


class Team:
    """``threads`` threads, the caller's among them."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._others = ThreadPoolExecutor(threads - 1, thread_name_prefix="cpu-kernels") if threads > 1 else None

    def run(self, counters: np.ndarray, work: Callable[[int], None]) -> None:
        """Call ``work`` with 0 … ``threads`` - 1, all at once; it has to release the interpreter's lock, and meets by
        ``counters``. What one raises is raised here when all have come to an end: they no longer wait for it, and what
        they computed is void."""
        if self._others is None:
            work(0)
            return

        def attempt(thread: int) -> None:
            try:
                work(thread)
            except BaseException:
                counters[GIVEN_UP] = 1
                raise

        running: list[Future[None]] = []
        try:
            for thread in range(1, self.threads):
                running.append(self._others.submit(attempt, thread))
            work(0)
        except BaseException:
            counters[GIVEN_UP] = 1
            raise
        finally:
            wait(running)
        for other in running:
            other.result()

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()


def counters(phases: int) -> np.ndarray:
    """Shared by the threads of one run: the first line counts arrivals, each other the units taken of a phase."""
    return np.zeros((phases + 1) * LINE, dtype=np.int64)
