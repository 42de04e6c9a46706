"""A run as two tables. Light.

``steps.csv``, a row for each step. Seconds begin at 0 with the first step or arrival that the run tells of.

==============================  ======================================================================================
step                            number of the step
begin_s, end_s                  when it ran
schedule_ms … detokenise_ms     what its parts took
requests                        rows of the batch
decode_tokens, prefill_tokens,  tokens computed, by what their row is; ``recompute``: it begins with tokens computed a
recompute_tokens                second time, after a preemption; what it computes behind them is in it
draft_tokens, padding_tokens    drafted tokens that were checked; computed only to fill a static batch
new_tokens                      output tokens that requests got
token_budget                    most tokens of a step
running, waiting, swapped       requests after the step; those waiting include those swapped
slots                           places in the batch taken by requests without a complete answer
free_blocks, cached_blocks,     KV blocks after the step: with nothing in them; found by their content, but in no
used_blocks                     request's table; referred to by requests
host_blocks                     blocks in host memory
reserved_slots, tail_slots      KV slots in blocks that running requests have not begun, and at the ends of begun ones
arrived, finished, rejected,    of requests, in this step
preemptions
==============================  ======================================================================================

``requests.csv``, a row for each request in the order in which they left, those that had not left at the end. Empty:
it never came to that, or the recording begins after it.

==============================  ======================================================================================
request, parent                 its number; that of the request whose prompt it shares (``12.1``: answer 1 of 12)
user, priority
arrival_s, admitted_s,          its instants; ``end_s``: it left
first_token_s, last_token_s,
end_s
prompt_tokens, max_tokens,      its lengths; ``max_tokens``: what it may have; ``cached_tokens``: found in the cache
output_tokens, cached_tokens
preemptions                     how often its blocks were taken
ttft_ms, tpot_ms, e2el_ms       from its arrival: to the first token; per token after the first; to the last token
finish_reason, error            ``stop``, ``length``, ``abort``, ``error`` with the sentence; empty: had not left
==============================  ======================================================================================
"""

from __future__ import annotations

import csv
import math
from typing import Any, TextIO

from engine.events import Keyframe, RowKind, RunTotals, StepRecord, StepTimings, pool_after
from engine.recorded_requests import RecordedRequest, RequestLog, by_arrival, first_moment
from engine.request import request_name

PARTS = StepTimings.__struct_fields__
STEP_COLUMNS = (
    "step",
    "begin_s",
    "end_s",
    *(f"{part}_ms" for part in PARTS),
    "requests",
    "decode_tokens",
    "prefill_tokens",
    "recompute_tokens",
    "draft_tokens",
    "padding_tokens",
    "new_tokens",
    "token_budget",
    "running",
    "waiting",
    "swapped",
    "slots",
    "free_blocks",
    "cached_blocks",
    "used_blocks",
    "host_blocks",
    "reserved_slots",
    "tail_slots",
    "arrived",
    "finished",
    "rejected",
    "preemptions",
)
REQUEST_COLUMNS = (
    "request",
    "parent",
    "user",
    "priority",
    "arrival_s",
    "admitted_s",
    "first_token_s",
    "last_token_s",
    "end_s",
    "prompt_tokens",
    "max_tokens",
    "output_tokens",
    "cached_tokens",
    "preemptions",
    "ttft_ms",
    "tpot_ms",
    "e2el_ms",
    "finish_reason",
    "error",
)


class TableExport:
    """Writes both tables while the run is gone through."""

    def __init__(self, steps: TextIO, requests: TextIO) -> None:
        self._steps, self._requests = csv.writer(steps), csv.writer(requests)
        self._steps.writerow(STEP_COLUMNS)
        self._requests.writerow(REQUEST_COLUMNS)
        self._log = RequestLog(self._write_request)
        self._totals = RunTotals()
        self._num_blocks = 0
        self._zero: float | None = None

    def restore(self, keyframe: Keyframe) -> None:
        if self._zero is None:
            self._zero = first_moment(keyframe)
        self._totals, self._num_blocks = keyframe.totals, keyframe.num_blocks
        self._log.restore(keyframe)

    def apply(self, record: StepRecord) -> None:
        if self._zero is None:
            self._zero = first_moment(record)
        self._num_blocks = pool_after(record, self._num_blocks)
        self._log.apply(record)
        self._write_step(record)
        self._totals = record.totals

    def finish(self) -> None:
        for request in by_arrival(list(self._log.open.values())):
            self._write_request(request)

    def _write_step(self, record: StepRecord) -> None:
        tokens = dict.fromkeys(RowKind, 0)
        for kind, count in zip(record.kinds, record.num_tokens, strict=True):
            tokens[RowKind(kind)] += count
        drafts = sum(record.drafts)
        before, now = self._totals, record.totals
        self._steps.writerow(
            (
                record.step,
                self._seconds(record.time),
                self._seconds(record.end),
                *(_milliseconds(getattr(record.timings, part)) for part in PARTS),
                len(record.request_ids),
                tokens[RowKind.DECODE] - drafts,
                tokens[RowKind.PREFILL],
                tokens[RowKind.RECOMPUTE],
                drafts,
                sum(record.padding),
                sum(record.new_tokens),
                record.token_budget,
                record.num_running,
                record.num_waiting,
                record.num_swapped,
                record.num_slots,
                record.free_blocks,
                record.cached_blocks,
                self._num_blocks - record.takeable_blocks,
                record.host_blocks_used,
                record.reserved_tokens,
                record.tail_tokens,
                now.arrived - before.arrived,
                now.finished - before.finished,
                now.rejected - before.rejected,
                now.preemptions - before.preemptions,
            )
        )

    def _write_request(self, request: RecordedRequest) -> None:
        first, last = request.first_token, request.token_times[-1] if request.token_times else None
        ttft = None if first is None else first - request.arrival
        per_token = None
        if first is not None and last is not None and request.output_tokens > 1:
            per_token = (last - first) / (request.output_tokens - 1)
        self._requests.writerow(
            (
                request_name(request.request_id),
                request_name(request.parent) if request.parent else "",
                request.user,
                request.priority,
                self._seconds(request.arrival),
                self._seconds(request.admitted),
                self._seconds(first),
                self._seconds(last),
                self._seconds(request.finished),
                request.prompt_tokens or "",
                request.max_tokens or "",
                request.output_tokens,
                request.cached_tokens,
                request.preemptions,
                _milliseconds(ttft),
                _milliseconds(per_token),
                _milliseconds(None if last is None else last - request.arrival),
                request.finish_reason,
                request.error,
            )
        )

    def _seconds(self, time: float | None) -> Any:
        return _rounded(None if time is None else time - (self._zero or 0.0), 9)


def _milliseconds(seconds: float | None) -> Any:
    return _rounded(None if seconds is None else seconds * 1e3, 6)


def _rounded(value: float | None, digits: int) -> Any:
    """An empty field for what is no number."""
    return "" if value is None or not math.isfinite(value) else round(value, digits)
