"""Throughput and latency of the last minute, as folds over step records. Qt-free.

Throughput: a step's tokens are spread evenly over the time it took, then summed in bins of :data:`BIN_SECONDS`, each
with half of its neighbours; so it is tokens per second whatever the length of the steps. Counts come from the running
totals, so records that were replaced by a keyframe are counted too.

Latency: TTFT is the end of the step that gave a request its first token, less its arrival. ITL is the time between the
ends of two steps that gave it tokens, divided by the tokens of the second; where records are missing no gap is taken.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from engine.events import Arrived, Finished, Keyframe, Rejected, RunTotals, StepRecord

WINDOW_SECONDS = 60.0
BIN_SECONDS = 0.5
GAUGE_SECONDS = 2.0
"""The gauge is the mean over the steps of this last while."""
SAMPLES_KEPT = 8192
FIRST_TOKENS_KEPT = 1024


@dataclass(frozen=True, slots=True)
class RateSeries:
    """``ages``: seconds before the last step's end of each bin's middle, rising to 0; tokens per second of each bin."""

    ages: np.ndarray
    prompt: np.ndarray
    output: np.ndarray


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds; None without a sample."""

    p50: float | None
    p99: float | None
    count: int


class Throughput:
    """Tokens per second, prompt and output apart."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._bins: dict[int, list[float]] = {}
        self._recent: deque[tuple[float, float, int]] = deque()
        self._totals: RunTotals | None = None
        self._end = 0.0
        self._first = 0.0
        self._idle = True

    @property
    def end(self) -> float:
        """Engine clock when the last step ended."""
        return self._end

    def restore(self, keyframe: Keyframe) -> None:
        if self._totals is None or keyframe.totals.steps < self._totals.steps:
            self._clear()
            self._totals = keyframe.totals
            return
        self._count(self._end, keyframe.time, keyframe.totals)
        self._idle = not keyframe.requests

    def apply(self, record: StepRecord) -> None:
        self._count(record.time, record.time + record.timings.total, record.totals)
        self._idle = record.num_running == 0 and record.num_waiting == 0

    def _count(self, begun: float, ended: float, totals: RunTotals) -> None:
        before = self._totals or RunTotals()
        prompt = totals.prompt_tokens - before.prompt_tokens
        output = totals.output_tokens - before.output_tokens
        if self._end == 0.0:
            self._first = begun
        self._totals = totals
        self._end = max(self._end, ended)
        self._spread(begun, ended, prompt, output)
        self._recent.append((begun, ended, output))
        while self._recent and self._recent[0][0] < ended - GAUGE_SECONDS and len(self._recent) > 2:
            self._recent.popleft()

    def _spread(self, begun: float, ended: float, prompt: int, output: int) -> None:
        begun = max(begun, ended - WINDOW_SECONDS)
        first, last = math.floor(begun / BIN_SECONDS), math.floor(ended / BIN_SECONDS)
        length = ended - begun
        for index in range(first, last + 1):
            low, high = max(begun, index * BIN_SECONDS), min(ended, (index + 1) * BIN_SECONDS)
            share = (high - low) / length if length > 0 else 1.0
            sums = self._bins.setdefault(index, [0.0, 0.0])
            sums[0] += prompt * share
            sums[1] += output * share
        oldest = last - int(WINDOW_SECONDS / BIN_SECONDS) - 1
        for index in [i for i in self._bins if i < oldest]:
            del self._bins[index]

    def output_rate(self) -> float:
        """Output tokens per second over the last :data:`GAUGE_SECONDS`; 0 exactly when nothing runs or waits."""
        if self._idle or not self._recent:
            return 0.0
        seconds = self._recent[-1][1] - self._recent[0][0]
        return sum(tokens for _, _, tokens in self._recent) / seconds if seconds > 0 else 0.0

    def series(self) -> RateSeries | None:
        """The last minute, or less where the run is younger; None before the first step."""
        if self._end == 0.0:
            return None
        last = math.floor(self._end / BIN_SECONDS)
        first = max(math.floor(self._first / BIN_SECONDS), last - int(WINDOW_SECONDS / BIN_SECONDS))
        indices = np.arange(first, last + 1)
        sums = np.array([self._bins.get(int(i), (0.0, 0.0)) for i in indices]).reshape(-1, 2)
        widths = np.full(len(indices), BIN_SECONDS)
        # The bins at the two ends are not whole yet: their rate is over the part that has passed.
        widths[0] -= max(0.0, self._first - first * BIN_SECONDS) if first * BIN_SECONDS < self._first else 0.0
        widths[-1] -= (last + 1) * BIN_SECONDS - self._end
        rates = _smooth(sums) / np.maximum(_smooth(widths[:, None]), 1e-3)
        ages = np.minimum((indices + 0.5) * BIN_SECONDS - self._end, 0.0)
        return RateSeries(ages, rates[:, 0], rates[:, 1])


class Latency:
    """Times to first token and gaps between tokens, with the moment each was known."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._arrivals: dict[int, float] = {}
        self._last_token: dict[int, float] = {}
        self.first_tokens: deque[tuple[float, float, int]] = deque(maxlen=FIRST_TOKENS_KEPT)
        """(engine clock, TTFT in seconds, request id), oldest first."""
        self._gap_times = np.zeros(SAMPLES_KEPT)
        self._gaps = np.zeros(SAMPLES_KEPT)
        self._written = 0
        self._step = 0
        self.end = 0.0

    def restore(self, keyframe: Keyframe) -> None:
        if keyframe.step < self._step:
            self._clear()
        self._step = keyframe.step
        self._arrivals = {r.request_id: r.arrival_time for r in keyframe.requests if r.first_token_time is None}
        self._last_token = {}

    def apply(self, record: StepRecord) -> None:
        self._step = record.step
        for event in record.events:
            if isinstance(event, Arrived):
                self._arrivals[event.request_id] = event.arrival_time
        ended = record.time + record.timings.total
        self.end = max(self.end, ended)
        for request_id, tokens in zip(record.request_ids, record.new_tokens, strict=True):
            if tokens:
                self._token(request_id, ended, tokens)
        for event in record.events:
            if isinstance(event, Finished | Rejected):
                self._arrivals.pop(event.request_id, None)
                self._last_token.pop(event.request_id, None)

    def _token(self, request_id: int, ended: float, tokens: int) -> None:
        arrival = self._arrivals.pop(request_id, None)
        if arrival is not None:
            self.first_tokens.append((ended, ended - arrival, request_id))
        before = self._last_token.get(request_id)
        if before is not None:
            at = self._written % SAMPLES_KEPT
            self._gap_times[at], self._gaps[at] = ended, (ended - before) / tokens
            self._written += 1
        self._last_token[request_id] = ended

    def gaps(self) -> tuple[np.ndarray, np.ndarray]:
        """(engine clock, ITL in seconds) of the last minute, oldest first; of at most :data:`SAMPLES_KEPT` gaps."""
        count = min(self._written, SAMPLES_KEPT)
        order = np.arange(self._written - count, self._written) % SAMPLES_KEPT
        times, gaps = self._gap_times[order], self._gaps[order]
        fresh = times >= self.end - WINDOW_SECONDS
        return times[fresh], gaps[fresh]

    def itl(self) -> Percentiles:
        return percentiles(self.gaps()[1])

    def ttft(self) -> Percentiles:
        """Of the first tokens of the last minute; where there were none, of those before."""
        fresh = [ttft for time, ttft, _ in self.first_tokens if time >= self.end - WINDOW_SECONDS]
        return percentiles(np.array(fresh if fresh else [ttft for _, ttft, _ in self.first_tokens]))


def _smooth(bins: np.ndarray) -> np.ndarray:
    """Each bin with half of each neighbour [n, columns]: a bin holds few steps, and the bins at the ends are cut."""
    padded = np.pad(bins, ((1, 1), (0, 0)))
    return padded[1:-1] + 0.5 * (padded[:-2] + padded[2:])


def percentiles(values: np.ndarray) -> Percentiles:
    values = values[np.isfinite(values)]
    if not len(values):
        return Percentiles(None, None, 0)
    ordered = np.sort(values)
    return Percentiles(quantile(ordered, 0.5), quantile(ordered, 0.99), len(values))


def quantile(ordered: np.ndarray, share: float) -> float:
    """Of sorted values, between two of them linearly, as numpy's default does; without what that call costs."""
    position = share * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (position - low))
