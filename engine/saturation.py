"""The rate where the queue starts to grow: what the engine can serve for as long as one likes.

A *probe* sends the same number of requests at one rate, evenly spaced (a random crowd makes a queue of its own at any
rate), and looks at what became of the queue. Rates are doubled until it grows (or halved until it does not), then the
gap is bisected::

    rate    1     2     4     8                     held: the last rate that the engine kept up with
    grew    no    no    no    yes                   grew: the first that it did not
                        |--5.7--|   no              bisected until grew / held ≤ 1.05
                            |-6.7-| yes  …

**The criterion**, of a probe's completed requests in order of their arrival: the queue grew where both hold,

1. *achieved* < 0.95 · *offered*: requests completed per second from the first completion to the last, against requests
   arrived per second from the first arrival to the last. The time that the last answer takes is in neither.
2. The mean wait of the last third exceeds that of the first third by more than one gap between arrivals, wait being
   the time from the intended arrival to the first token: by Little's law the queue is longer by a request or more.

The first alone would take the noise of a few slow answers for saturation, the second alone that of a crowd that drains.
Above the capacity c, achieved is c; so at 5 % of slack and 5 % of bisection the rate found is within 10 % of c.

Light: no torch, so that window and command line search alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

from engine.load_shapes import Arrivals
from engine.metrics import RequestTimeline, distribution
from engine.workload import Workload, with_seed

KEPT_UP = 0.95
"""Achieved over offered throughput from which on a probe counts as served."""
TOLERANCE = 1.05
"""Ratio of the two rates between which the search ends."""
MOST_PROBES = 16
PROBE_REQUESTS = 48
"""Of a probe, at least."""
LEAST_REQUESTS = 12
"""With fewer completed, thirds say nothing."""
FIRST_RATE = 1.0
"""Requests per second of the first probe, where the load names none."""
LEAST_RATE, HIGHEST_RATE = 1e-3, 1e4


@dataclass(frozen=True, slots=True)
class Probe:
    """What became of the requests at one rate. Rates in requests per second."""

    rate: float
    """As asked for."""
    offered: float | None
    """As they came; None below two completed requests."""
    achieved: float | None
    """As they were completed; None below two, or where all were completed at once."""
    first_wait_ms: float | None
    last_wait_ms: float | None
    """Mean time from the intended arrival to the first token of the first and of the last third."""
    p99_ttft_ms: float | None
    completed: int
    requests: int
    grew: bool
    """Whether the queue grew."""

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def judge(timelines: Sequence[RequestTimeline], rate: float) -> Probe:
    """The criterion of the module's docstring on the requests of a run at ``rate``."""
    done = sorted((t for t in timelines if t.completed), key=lambda t: t.scheduled)
    offered = _per_second([t.scheduled for t in done])
    achieved = _per_second([t.token_times[-1] for t in done])
    waits = [wait for t in done if (wait := t.ttft(t.scheduled)) is not None]
    third = len(waits) // 3
    first = sum(waits[:third]) / third if third else None
    last = sum(waits[-third:]) / third if third else None
    behind = offered is not None and achieved is not None and achieved < KEPT_UP * offered
    longer = first is not None and last is not None and offered is not None and last - first > 1 / offered
    return Probe(
        rate=rate,
        offered=offered,
        achieved=achieved,
        first_wait_ms=None if first is None else first * 1e3,
        last_wait_ms=None if last is None else last * 1e3,
        p99_ttft_ms=distribution(waits, "ttft")["p99_ttft_ms"],
        completed=len(done),
        requests=len(timelines),
        grew=behind and longer,
    )


def _per_second(instants: list[float]) -> float | None:
    """(n − 1) / (last − first)."""
    span = max(instants) - min(instants) if instants else 0.0
    return (len(instants) - 1) / span if span > 0 else None


@dataclass
class SaturationSearch:
    """Which rate to try next, from what became of those before. Pure: the driver runs the probes."""

    first_rate: float = FIRST_RATE
    most_probes: int = MOST_PROBES
    probes: list[Probe] = field(default_factory=list)
    """In the order they were made."""
    cancelled: bool = False

    @property
    def held(self) -> float | None:
        """The highest rate below :attr:`grew` that the engine kept up with."""
        held = [p.rate for p in self.probes if not p.grew and (self.grew is None or p.rate < self.grew)]
        return max(held, default=None)

    @property
    def grew(self) -> float | None:
        """The lowest rate at which the queue grew."""
        return min((p.rate for p in self.probes if p.grew), default=None)

    @property
    def next_rate(self) -> float | None:
        """Requests per second of the next probe; None where the search is over."""
        if self.cancelled or len(self.probes) >= self.most_probes or self._useless():
            return None
        held, grew = self.held, self.grew
        if held is None and grew is None:
            return self.first_rate
        if grew is None:
            assert held is not None
            return None if held >= HIGHEST_RATE else min(2 * held, HIGHEST_RATE)
        if held is None:
            return None if grew <= LEAST_RATE else max(grew / 2, LEAST_RATE)
        return None if grew / held <= TOLERANCE else math.sqrt(grew * held)

    def _useless(self) -> bool:
        """Whether nothing completed, so that another rate would tell nothing either."""
        return bool(self.probes) and self.probes[-1].completed < min(LEAST_REQUESTS, self.probes[-1].requests)

    @property
    def found(self) -> bool:
        """Whether the saturation rate is known to the tolerance."""
        return self.held is not None and self.grew is not None and self.grew / self.held <= TOLERANCE

    def note(self, probe: Probe) -> None:
        self.probes.append(probe)

    def sentence(self) -> str:
        """What is known, for people."""
        held, grew = self.held, self.grew
        if self.found:
            return f"The queue starts to grow at {held:.3g} requests/s: {held:.3g}/s held, at {grew:.3g}/s it grew."
        if self.probes and self._useless():
            last = self.probes[-1]
            return f"No rate was found: {last.completed} of {last.requests} requests completed at {last.rate:.3g}/s."
        why = "cancelled" if self.cancelled else f"{len(self.probes)} probes were not enough"
        if held is not None and grew is not None:
            return f"Between {held:.3g} and {grew:.3g} requests/s the queue starts to grow ({why})."
        if held is not None:
            return f"Up to {held:.3g} requests/s the queue did not grow ({why})."
        if grew is not None:
            return f"Already at {grew:.3g} requests/s the queue grew ({why})."
        return f"No rate was tried ({why})."

    def result(self) -> dict[str, Any]:
        """Plain figures: ``saturation_rate`` is :attr:`held`, None unless :attr:`found`."""
        return {
            "saturation_rate": self.held if self.found else None,
            "held_rate": self.held,
            "grew_rate": self.grew,
            "cancelled": self.cancelled,
            "summary": self.sentence(),
            "probes": [probe.as_dict() for probe in self.probes],
        }


def probe_size(max_num_seqs: int) -> int:
    """Requests of a probe: a queue is there only once the slots are taken, and is to grow for a while then."""
    return max(PROBE_REQUESTS, 2 * max_num_seqs)


def first_rate_of(workload: Workload) -> float:
    """The rate that a load names, else :data:`FIRST_RATE`."""
    rate = workload.arrivals.request_rate
    return rate if rate is not None and math.isfinite(rate) else FIRST_RATE


def probe_workload(workload: Workload, rate: float, number: int, requests: int) -> Workload:
    """``requests`` of the load, gone through in turn, in an open loop at ``rate``. Each probe ``number`` has synthetic
    prompts of its own, so that none finds those of another in the prefix cache."""
    seed = 1_000 + number
    chosen = tuple(replace(request, arrival_s=0.0) for request in islice(cycle(workload.requests), requests))
    probe = with_seed(replace(workload, requests=chosen), seed)
    return probe.with_arrivals(Arrivals(request_rate=rate, burstiness=math.inf), seed)
