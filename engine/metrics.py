"""What a run was like, in the words of ``vllm bench serve``: TTFT, TPOT, ITL, E2EL, throughput, goodput.

Instants of one request, in seconds after the start of the run::

    scheduled        sent         admitted     first token                 last token
        |   client    |   engine      |   prefill   |  ITL   ITL   ITL ...      |
        |   holds it  |   queues it   |             |                           |
        |------------ schedule ------------------------------------- E2EL ------|
                      |------------ submission --------------------- E2EL ------|
                                      |------------ service -------- E2EL ------|

Three origins, three answers. *Schedule-relative* latency counts from the intended arrival: what a user feels who does
not care why he waits; a generator that is held up itself cannot hide it. *Service* latency counts from the first
admission. The plain keys (``mean_ttft_ms`` …) count from the intended arrival in an open loop and from submission in a
closed loop, where a request has no other arrival; ``latency_from`` says which.

A quantity without a sample is None, never NaN and never 0. Light: numpy and msgspec only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.events import Admitted, StepRecord
from engine.messages import Output
from engine.request import FinishReason
from engine.step_counters import ratio
from engine.workload import Workload, WorkloadRequest

PERCENTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")


@dataclass(slots=True)
class RequestTimeline:
    """What happened to one request. Instants are seconds after the start of the run."""

    scheduled: float
    """Its intended arrival."""
    priority: int = 0
    user: str = ""
    prompt_tokens: int = 0
    sent: float | None = None
    """When the client handed it to the engine."""
    admitted: float | None = None
    """When it first joined the batch."""
    token_times: list[float] = field(default_factory=list)
    """When each output token was there; tokens of one step have the same time."""
    token_ids: list[int] = field(default_factory=list)
    finished: float | None = None
    finish_reason: str | None = None
    error: str = ""
    cached_tokens: int = 0
    preemptions: int = 0
    clipped: bool = False
    """Whether prompt or answer were shortened to the model's context."""

    @property
    def completed(self) -> bool:
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def failed(self) -> bool:
        return self.finish_reason == FinishReason.ERROR

    def ttft(self, origin: float | None) -> float | None:
        """Time to first token: from ``origin`` to the first output token."""
        return None if origin is None or not self.token_times else self.token_times[0] - origin

    def e2el(self, origin: float | None) -> float | None:
        """End-to-end latency: from ``origin`` to the last output token."""
        return None if origin is None or not self.token_times else self.token_times[-1] - origin

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, (E2EL − TTFT) / (output tokens − 1); None below two tokens."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between successive output tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def service_origin(self) -> float | None:
        return self.sent if self.admitted is None else self.admitted


class RunRecorder:
    """Gathers the timelines of a run from what the engine sends. ``start`` is the run's zero on the engine's clock."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.timelines: list[RequestTimeline] = []
        """In order of the workload."""
        self.open: dict[int, RequestTimeline] = {}
        """Sent and not ended, by request id."""
        self.sent_timelines: dict[int, RequestTimeline] = {}
        """All that were ever sent, by request id: a step's record may come after the end that it tells of."""
        self.ended = 0
        """Requests that have ended, in whatever way."""
        self.output_tokens = 0
        """Tokens that have come so far, of all requests."""

    def expect(self, request: WorkloadRequest) -> RequestTimeline:
        """A request of the workload that will be sent."""
        prompt_tokens = request.prompt_tokens or len(request.prompt_token_ids or ())
        timeline = RequestTimeline(request.arrival_s, request.priority, request.user, prompt_tokens)
        self.timelines.append(timeline)
        return timeline

    def sent(self, request_id: int, timeline: RequestTimeline, now: float) -> None:
        timeline.sent = now - self.start
        self.open[request_id] = self.sent_timelines[request_id] = timeline

    def record(self, record: StepRecord) -> None:
        """Take the admissions of a step."""
        for event in record.events:
            if isinstance(event, Admitted) and not event.resumed:
                timeline = self.sent_timelines.get(event.request_id)
                if timeline is not None:
                    timeline.admitted = record.time - self.start

    def output(self, output: Output) -> None:
        """Take new tokens, or the end, of a request; those of others are passed over."""
        timeline = self.open.get(output.request_id)
        if timeline is None:
            return
        when = output.time - self.start
        timeline.token_times += [when] * len(output.token_ids)
        timeline.token_ids += output.token_ids
        self.output_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._end(output.request_id, timeline, when, output)

    def _end(self, request_id: int, timeline: RequestTimeline, when: float, output: Output) -> None:
        timeline.finished = when
        timeline.finish_reason = output.finish_reason
        timeline.error = output.error
        timeline.prompt_tokens = output.prompt_tokens or timeline.prompt_tokens
        timeline.cached_tokens = output.cached_tokens
        timeline.preemptions = output.preemptions
        del self.open[request_id]
        self.ended += 1


def parse_goodput(text: str) -> dict[str, float]:
    """``ttft:MS,tpot:MS,e2el:MS``, any of them. Raises ValueError with what is wrong."""
    objectives: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        name = name.strip()
        if name not in OBJECTIVES:
            raise ValueError(
                f"goodput objective {name!r} is unknown; it must be one of {', '.join(OBJECTIVES)}, e.g. ttft:500"
            )
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"goodput objective {name} is {value!r}; it must be milliseconds above 0")
        if name in objectives:
            raise ValueError(f"goodput objective {name} is given twice")
        objectives[name] = limit
    return objectives


def distribution(values_s: Iterable[float | None], name: str) -> dict[str, float | None]:
    """``{mean,median,std,p50,p90,p99}_NAME_ms`` of samples in seconds; percentiles by linear interpolation between the
    nearest ranks, the deviation that of the population; all None without a sample."""
    samples = np.array([v for v in values_s if v is not None], dtype=np.float64) * 1e3
    keys = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES)]
    if not len(samples):
        return {f"{key}_{name}_ms": None for key in keys}
    values = [samples.mean(), np.median(samples), samples.std(), *np.percentile(samples, PERCENTILES)]
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, values, strict=True)}


def latencies(timelines: Sequence[RequestTimeline], *, open_loop: bool) -> dict[str, float | None]:
    """All distributions of the completed ones among ``timelines``, from the three origins of the module's diagram."""
    done = [t for t in timelines if t.completed]
    result: dict[str, float | None] = {}
    plain = [t.scheduled if open_loop else t.sent for t in done]
    result |= distribution((t.ttft(o) for t, o in zip(done, plain, strict=True)), "ttft")
    result |= distribution((t.tpot for t in done), "tpot")
    result |= distribution((gap for t in done for gap in t.itls), "itl")
    result |= distribution((t.e2el(o) for t, o in zip(done, plain, strict=True)), "e2el")
    result |= distribution((t.ttft(t.scheduled) for t in done), "schedule_ttft")
    result |= distribution((t.e2el(t.scheduled) for t in done), "schedule_e2el")
    result |= distribution((t.ttft(t.service_origin) for t in done), "service_ttft")
    result |= distribution((t.e2el(t.service_origin) for t in done), "service_e2el")
    return result


def most_at_once(timelines: Iterable[RequestTimeline], elapsed: float) -> int:
    """Most requests in flight at once: sent and not ended."""
    changes: list[tuple[float, int]] = []
    for timeline in timelines:
        if timeline.sent is not None:
            changes.append((timeline.sent, 1))
            changes.append((elapsed if timeline.finished is None else timeline.finished, -1))
    peak = now = 0
    for _, change in sorted(changes):  # an end before a start at the same instant: the slot was free
        now += change
        peak = max(peak, now)
    return peak


def meets(timeline: RequestTimeline, origin: float | None, objectives: dict[str, float]) -> bool:
    """Whether a completed request meets every objective; one without a sample (TPOT of one token) is not missed."""
    measured = {"ttft": timeline.ttft(origin), "tpot": timeline.tpot, "e2el": timeline.e2el(origin)}
    return all((value := measured[name]) is None or value * 1e3 <= limit for name, limit in objectives.items())


def summarise(
    timelines: Sequence[RequestTimeline],
    workload: Workload,
    *,
    elapsed: float,
    objectives: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The result of a run, keys as in ``vllm bench serve``.

    ``elapsed``: seconds from the start of the run to its end.
    Token totals and latencies are those of completed requests; a count of tokens is the count of ids. ``goodput`` is
    completed requests per second that meet every objective, None without objectives. ``rows_…`` are those of the
    workload's file, None where it was drawn.
    """
    open_loop = workload.open_loop
    done = [t for t in timelines if t.completed]
    failed = [t for t in timelines if t.failed]
    inputs = sum(t.prompt_tokens for t in done)
    outputs = sum(len(t.token_ids) for t in done)
    origins = [t.scheduled if open_loop else t.sent for t in timelines]
    good = None
    if objectives:
        good = sum(meets(t, o, objectives) for t, o in zip(timelines, origins, strict=True) if t.completed)
    burstiness = workload.arrivals.burstiness
    return {
        "num_prompts": len(timelines),
        **_row_counts(timelines, workload),
        "request_rate": workload.request_rate,
        "burstiness": burstiness if math.isfinite(burstiness) else "inf",
        "ramp": workload.arrivals.ramp,
        "max_concurrency": workload.arrivals.max_concurrency,
        "duration": elapsed,
        "completed": len(done),
        "failed": len(failed),
        "unfinished": len(timelines) - len(done) - len(failed),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": ratio(len(done), elapsed),
        "request_goodput": None if good is None else ratio(good, elapsed),
        "goodput_objectives_ms": objectives or None,
        "output_throughput": ratio(outputs, elapsed),
        "total_token_throughput": ratio(inputs + outputs, elapsed),
        "max_concurrent_requests": most_at_once(timelines, elapsed),
        "latency_from": "intended arrival" if open_loop else "submission",
        **latencies(timelines, open_loop=open_loop),
        "by_priority": _by(timelines, lambda t: t.priority, open_loop),
        "by_user": _by(timelines, lambda t: t.user, open_loop),
        "input_lens": [t.prompt_tokens for t in timelines],
        "output_lens": [len(t.token_ids) for t in timelines],
        "ttfts": [t.ttft(o) for t, o in zip(timelines, origins, strict=True)],
        "itls": [t.itls for t in timelines],
        "start_times": [t.sent for t in timelines],
        "errors": [t.error for t in timelines],
        "finish_reasons": [t.finish_reason for t in timelines],
    }


def _row_counts(timelines: Sequence[RequestTimeline], workload: Workload) -> dict[str, Any]:
    rows = workload.rows
    if rows is None:
        return dict.fromkeys(("rows_read", "rows_clipped", "rows_rejected", "rejections"))
    clipped = sum(t.clipped for t in timelines)
    return {
        "rows_read": rows.read,
        "rows_clipped": clipped,
        "rows_rejected": rows.rejected,
        "rejections": rows.rejections,
    }


def _by(
    timelines: Sequence[RequestTimeline], key: Callable[[RequestTimeline], Any], open_loop: bool
) -> dict[str, dict[str, Any]]:
    """The latencies again for each group of requests, in order of their keys."""
    groups: dict[Any, list[RequestTimeline]] = {}
    for timeline in timelines:
        groups.setdefault(key(timeline), []).append(timeline)
    return {
        str(name): {"completed": sum(t.completed for t in group), **latencies(group, open_loop=open_loop)}
        for name, group in sorted(groups.items())
    }
