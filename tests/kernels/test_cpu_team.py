"""Threads that run one compiled function together."""

from __future__ import annotations

import time

import numba
import numpy as np
import pytest

from kernels.cpu.team import Team, claim, counters, meet

PHASES = 60
UNITS = 37


@numba.njit(nogil=True)
def count_units(counters, threads, thread, taken, unfinished):
    """Marks each unit that is claimed; behind each meeting, counts the units of the phase that nobody has marked."""
    for phase in range(PHASES):
        while True:
            unit = claim(counters, phase)
            if unit >= UNITS:
                break
            taken[thread, phase, unit] += 1
        meet(counters, threads)
        unfinished[thread] += np.sum(taken[:, phase] == 0) - taken.shape[0] * UNITS + np.sum(taken[:, phase])
        meet(counters, threads)


@pytest.fixture(params=[1, 2, 3, 7])
def team(request: pytest.FixtureRequest):
    team = Team(request.param)
    yield team
    team.close()


@pytest.mark.timeout(60)
def test_each_unit_is_taken_once_and_done_before_the_next_phase(team: Team) -> None:
    for _ in range(20):
        taken = np.zeros((team.threads, PHASES, UNITS), np.int64)
        unfinished, shared = np.zeros(team.threads, np.int64), counters(PHASES)
        team.run(shared, lambda thread: count_units(shared, team.threads, thread, taken, unfinished))  # noqa: B023
        assert (taken.sum(axis=0) == 1).all()
        assert not unfinished.any()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fails", [0, 1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_an_exception_surfaces_and_nobody_waits_for_it(fails: int, late: bool) -> None:
    """Before the others have begun, or when they are waiting already."""
    team, ended = Team(3), []

    def work(thread: int) -> None:
        if thread == fails:
            time.sleep(0.1 * late)
            raise KeyboardInterrupt if fails == 0 else MemoryError(f"thread {thread}")
        time.sleep(0.1 * (not late))
        count_units(shared, 3, thread, taken, unfinished)
        ended.append(thread)

    shared, taken = counters(PHASES), np.zeros((3, PHASES, UNITS), np.int64)
    unfinished = np.zeros(3, np.int64)
    with pytest.raises((KeyboardInterrupt, MemoryError)):
        team.run(shared, work)
    assert len(ended) == 2 and fails not in ended, "an error is raised when all have ended"
    shared, taken, fails = counters(PHASES), np.zeros((3, PHASES, UNITS), np.int64), -1
    team.run(shared, work)
    assert (taken.sum(axis=0) == 1).all()
    team.close()


@pytest.mark.timeout(60)
def test_a_closed_team_says_so_at_once() -> None:
    team = Team(2)
    team.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        team.run(counters(PHASES), lambda thread: None)
