"""Which priority puts a request where it was dragged to in the line. Qt-free.

The line is sorted by (priority, arrival, id), or with ageing by (arrival + priority x ageing, id): a place between two
others is a range of priorities, often of one, sometimes of none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST = 1_000_000
"""Priorities lie between this and its negative."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides where a request stands."""

    priority: int
    arrival: float
    request_id: int


def priority_between(
    moved: Standing, above: Standing | None, below: Standing | None, ageing: float | None = None, *, upwards: bool
) -> int:
    """The priority nearest to its own with which ``moved`` stands between ``above`` and ``below``; None: nobody there.
    Where none does, it comes before ``below`` if it is moved ``upwards``, else after ``above``."""
    least = -MOST if above is None else _first_after(moved, above, ageing)
    most = MOST if below is None else _last_before(moved, below, ageing)
    if least > most:
        return max(-MOST, min(MOST, most if upwards else least))
    return max(least, min(most, moved.priority))


def _first_after(moved: Standing, other: Standing, ageing: float | None) -> int:
    later = (moved.arrival, moved.request_id) > (other.arrival, other.request_id)
    if ageing is None:
        return other.priority if later else other.priority + 1
    return math.floor(other.priority + (other.arrival - moved.arrival) / ageing) + 1


def _last_before(moved: Standing, other: Standing, ageing: float | None) -> int:
    earlier = (moved.arrival, moved.request_id) < (other.arrival, other.request_id)
    if ageing is None:
        return other.priority if earlier else other.priority - 1
    return math.ceil(other.priority + (other.arrival - moved.arrival) / ageing) - 1
