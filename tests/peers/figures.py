"""The figures of a run, their medians over rounds, and ours as ratios to the best peer's.

Every engine's figures come from the same data, when each output token of each request was there, by the definitions of
:mod:`engine.metrics`. All requests are there at 0, so TTFT and E2EL include the time that a request waits for a place.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.metrics import RequestTimeline, latencies
from engine.request import FinishReason
from tests.peers.cases import Case

Figures = dict[str, float | None]


@dataclass(frozen=True)
class Figure:
    key: str
    title: str
    places: int
    more_is_better: bool = False


TTFT_ALONE = Figure("p50_ttft_ms", "TTFT P50 ms", 0)
MEMORY_AND_START = (Figure("peak_memory_mb", "peak MB", 0), Figure("start_s", "start s", 1))
OF_A_LOAD = (
    Figure("output_throughput", "out tok/s", 1, more_is_better=True),
    Figure("mean_ttft_ms", "TTFT mean ms", 0),
    Figure("p99_ttft_ms", "TTFT P99 ms", 0),
    Figure("p50_itl_ms", "ITL P50 ms", 1),
    Figure("p99_itl_ms", "ITL P99 ms", 1),
    Figure("mean_tpot_ms", "TPOT mean ms", 1),
    Figure("mean_e2el_ms", "E2EL mean ms", 0),
    Figure("p99_e2el_ms", "E2EL P99 ms", 0),
    *MEMORY_AND_START,
    Figure("decode_throughput", "decode tok/s", 1, more_is_better=True),
)
ALONE = (TTFT_ALONE, Figure("mean_ttft_ms", "TTFT mean ms", 0), *MEMORY_AND_START)


def figures_of(case: Case) -> tuple[Figure, ...]:
    """The columns of a case's table."""
    return ALONE if case.alone else OF_A_LOAD


@dataclass(frozen=True)
class Outcome:
    """What came of one run."""

    token_times: dict[int, list[float]] = field(default_factory=dict)
    """Of the completed requests, by place in the workload: seconds after all were there, for each output token."""
    start_s: float | None = None
    """From the start of the process to the first token of the warm-up request."""
    peak_memory_mb: float | None = None
    """Most that was resident, in MB of 2^20 bytes."""
    failure: str = ""
    """Why the run does not count, as a sentence; empty where it does."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the engine says it is."""


def figures(case: Case, outcome: Outcome) -> Figures:
    """All figures of a completed run. ``output_throughput``: output tokens over the time to the last of them;
    ``decode_throughput``: 1 / mean TPOT, the tokens per second that one request sees once it has begun."""
    timelines, begin = [], 0.0
    for times in sorted(outcome.token_times.values()):
        timelines.append(RequestTimeline(begin, token_times=list(times), finish_reason=FinishReason.LENGTH))
        begin = times[-1] if case.alone else 0.0
    measured = latencies(timelines, open_loop=True)
    tokens = sum(len(times) for times in outcome.token_times.values())
    tpot = measured["mean_tpot_ms"]
    return {
        **measured,
        "output_throughput": tokens / max(times[-1] for times in outcome.token_times.values()),
        "decode_throughput": 1e3 / tpot if tpot else None,
        "peak_memory_mb": outcome.peak_memory_mb,
        "start_s": outcome.start_s,
    }


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure over the rounds that have it."""
    keys = dict.fromkeys(key for each in rounds for key in each)
    samples = {key: [value for each in rounds if (value := each.get(key)) is not None] for key in keys}
    return {key: statistics.median(values) if values else None for key, values in samples.items()}


@dataclass(frozen=True)
class Ratio:
    """Ours divided by the best peer's."""

    value: float
    peer: str


def ratios(columns: Sequence[Figure], ours: Figures, peers: dict[str, Figures]) -> dict[str, Ratio]:
    """For each figure that we and at least one peer have. ``peers``: medians by label."""
    found = {}
    for column in columns:
        mine = ours.get(column.key)
        theirs = {label: value for label, each in peers.items() if (value := each.get(column.key))}
        if mine is not None and theirs:
            best = (max if column.more_is_better else min)(theirs, key=theirs.__getitem__)
            found[column.key] = Ratio(mine / theirs[best], best)
    return found
