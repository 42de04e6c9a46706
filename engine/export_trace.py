"""A run as a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing. Light.

::

    process "engine"         thread "steps"       a slice per step, in it schedule, prepare, forward, sample, detokenise
                             counters             requests, KV blocks, tokens per step
    process "requests of a"  thread "request 12"  a slice per span of time in one state; marks where it was preempted,
                             …                    refused or ended

One event a line: X a slice with its length, i a mark, C the values of a counter from here on, M a name. ``ts`` and
``dur`` are microseconds with three digits after the point, from the first moment that the run tells of; the slices of
a thread come in order and none cuts another. The format:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TextIO

import msgspec
import numpy as np

from engine.events import (
    AnyEvent,
    Arrived,
    Ended,
    Finished,
    Keyframe,
    Preempted,
    Reconfigured,
    Rejected,
    Reprioritised,
    RowKind,
    StepRecord,
    StepTimings,
    pool_after,
)
from engine.lanes import Lanes, SpanKind
from engine.recorded_requests import first_moment
from engine.recording import RunHeader
from engine.request import FinishReason, request_name

ENGINE = 1
"""Process and thread of the engine; users' processes follow, and requests' threads."""
IDLE_SECONDS = 0.001
"""A longer time between two steps is shown as one without tokens."""
PARTS = StepTimings.__struct_fields__
KINDS = {kind: kind.name.lower() for kind in SpanKind}
TOKENS = {RowKind.DECODE: "decode", RowKind.PREFILL: "prefill", RowKind.RECOMPUTE: "recompute"}


class _SpanStream(Lanes):
    """Lanes that hand their spans over as these end, in place of keeping them: rows of ``OpenLanes.table``."""

    def __init__(self) -> None:
        self.ended: list[np.ndarray] = []
        super().__init__()

    def keep(self, spans: np.ndarray) -> None:
        self.ended.append(spans)

    def take(self) -> np.ndarray | None:
        """What has ended since this was asked last."""
        spans = np.concatenate(self.ended) if self.ended else None
        self.ended.clear()
        return spans


@dataclass(slots=True)
class _Thread:
    """Of one request that has not left."""

    process: int
    number: int
    end: int = 0
    """Nanoseconds at the end of its last slice."""


class TraceExport:
    """Writes the trace while the run is gone through."""

    def __init__(self, file: TextIO, header: RunHeader) -> None:
        self._file = file
        self._header = header
        self._lanes = _SpanStream()
        self._zero: float | None = None
        """Engine clock of the trace's 0."""
        self._end = 0
        """Nanoseconds at the end of the last step."""
        self._num_blocks = 0
        self._processes: dict[str, int] = {}
        """By user."""
        self._threads: dict[int, _Thread] = {}
        """By request."""
        self._num_threads = ENGINE
        self._separator = "\n"
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        self._describe("process_name", ENGINE, ENGINE, name="engine")
        self._describe("process_sort_index", ENGINE, ENGINE, sort_index=0)
        self._describe("thread_name", ENGINE, ENGINE, name="steps")

    # The run ------------------------------------------------------------------------------------------------------

    def restore(self, keyframe: Keyframe) -> None:
        if self._zero is None:
            self._zero = first_moment(keyframe)
        self._num_blocks = keyframe.num_blocks
        for request in keyframe.requests:
            self._thread(request.request_id, request.user)
        self._lanes.restore(keyframe)
        self._spans(self._lanes.take())
        alive = {request.request_id for request in keyframe.requests}
        self._threads = {i: thread for i, thread in self._threads.items() if i in alive}

    def apply(self, record: StepRecord) -> None:
        if self._zero is None:
            self._zero = first_moment(record)
        for event in record.events:
            if isinstance(event, Arrived):
                self._thread(event.request_id, event.user)
        self._num_blocks = pool_after(record, self._num_blocks)
        self._lanes.apply(record)
        self._spans(self._lanes.take())
        begin = max(self._ns(record.time), self._end)
        end = self._step(record, begin)
        for event in record.events:
            self._mark(event, begin, end)
        self._counters(record, begin, end)
        self._end = end

    def finish(self) -> None:
        """Write what has not ended, and the end of the file."""
        self._spans(self._lanes.open_spans())
        other = {"program": f"batchscope {self._header.program}", "recorded": self._header.created}
        if self._header.workload:
            other["workload"] = self._header.workload
        if self._header.info is not None:
            other |= {"model": self._header.info.name, "device": self._header.info.device}
        self._file.write(f'\n],"otherData":{msgspec.json.encode(other).decode()}}}\n')

    # Steps --------------------------------------------------------------------------------------------------------

    def _step(self, record: StepRecord, begin: int) -> int:
        """The slice of a step with its parts, one after the other; returns its end."""
        ends, at = [], 0.0
        for part in PARTS:
            seconds = getattr(record.timings, part)
            at += seconds if math.isfinite(seconds) and seconds > 0 else 0.0
            ends.append(begin + round(at * 1e9))
        what = {
            "step": record.step,
            "requests": len(record.request_ids),
            "tokens": sum(record.num_tokens),
            "budget": record.token_budget,
        }
        self._slice("step", ENGINE, ENGINE, begin, ends[-1], what)
        part_begin = begin
        for part, part_end in zip(PARTS, ends, strict=True):
            if part_end > part_begin:
                self._slice(part, ENGINE, ENGINE, part_begin, part_end)
            part_begin = part_end
        return ends[-1]

    def _counters(self, record: StepRecord, begin: int, end: int) -> None:
        tokens = dict.fromkeys((*TOKENS.values(), "drafts", "padding"), 0)
        if begin - self._end > IDLE_SECONDS * 1e9:
            self._counter("tokens per step", self._end, tokens)
        for kind, count in zip(record.kinds, record.num_tokens, strict=True):
            if kind in TOKENS:
                tokens[TOKENS[RowKind(kind)]] += count
        tokens["drafts"], tokens["padding"] = sum(record.drafts), sum(record.padding)
        tokens["decode"] -= tokens["drafts"]
        self._counter("tokens per step", begin, tokens)
        waiting = record.num_waiting - record.num_swapped
        requests = {"running": record.num_running, "waiting": waiting, "swapped": record.num_swapped}
        self._counter("requests", end, requests)
        used = self._num_blocks - record.takeable_blocks
        self._counter("KV blocks", end, {"in use": used, "cached": record.cached_blocks})

    def _mark(self, event: AnyEvent, begin: int, end: int) -> None:
        """What a step did that has no length."""
        if isinstance(event, Preempted):
            what: dict[str, Any] = {"for": request_name(event.beneficiary), "rule": event.rule, "mode": event.mode}
            what |= {"tokens": event.tokens, "blocks": event.blocks}
            self._request_mark("preempted", event.request_id, begin, what)
        elif isinstance(event, Rejected):
            self._request_mark("refused", event.request_id, begin, {"message": event.message})
            self._threads.pop(event.request_id, None)
        elif isinstance(event, Reprioritised):
            self._request_mark("priority changed", event.request_id, begin, {"priority": event.priority})
        elif isinstance(event, Ended):
            self._request_mark(f"answer complete: {event.reason}", event.request_id, end, {})
        elif isinstance(event, Finished):
            at = begin if event.reason == FinishReason.ABORT else end
            tokens = {"output_tokens": event.output_tokens}
            self._request_mark(f"left: {event.reason}", event.request_id, at, tokens)
            self._threads.pop(event.request_id, None)
        elif isinstance(event, Reconfigured):
            knobs = {"discipline": event.discipline, "order": event.order, "preemption": event.preemption}
            if event.pending_discipline:
                knobs["pending"] = event.pending_discipline
            if event.scheduler is not None:
                knobs |= msgspec.to_builtins(event.scheduler)
            self._write({"ph": "i", "name": "knobs changed", "s": "g"}, ENGINE, ENGINE, begin, knobs)

    def _request_mark(self, name: str, request_id: int, at: int, what: dict[str, Any]) -> None:
        thread = self._threads.get(request_id)
        if thread is None:  # it was refused before it had one
            self._write(
                {"ph": "i", "name": f"request {request_name(request_id)} {name}", "s": "t"}, ENGINE, ENGINE, at, what
            )
        else:
            self._write({"ph": "i", "name": name, "s": "t"}, thread.process, thread.number, at, what)

    # Requests -----------------------------------------------------------------------------------------------------

    def _thread(self, request_id: int, user: str) -> None:
        if request_id in self._threads:
            return
        process = self._processes.get(user)
        if process is None:
            process = self._processes[user] = ENGINE + 1 + len(self._processes)
            self._describe("process_name", process, process, name=f"requests of {user}" if user else "requests")
            self._describe("process_sort_index", process, process, sort_index=process)
        self._num_threads += 1
        self._threads[request_id] = _Thread(process, self._num_threads)
        self._describe("thread_name", process, self._num_threads, name=f"request {request_name(request_id)}")
        self._describe("thread_sort_index", process, self._num_threads, sort_index=self._num_threads)

    def _spans(self, spans: np.ndarray | None) -> None:
        if spans is None:
            return
        columns = (
            spans[name].tolist() for name in ("request_id", "kind", "begin", "end", "tokens", "drafts", "accepted")
        )
        for request_id, kind, begin, end, tokens, drafts, accepted in zip(*columns, strict=True):
            thread = self._threads.get(request_id)
            if thread is None:
                continue
            first = max(self._ns(begin), thread.end)
            thread.end = max(self._ns(end), first)
            what = {"tokens": tokens} if tokens else {}
            if drafts:
                what |= {"drafts": drafts, "accepted": accepted}
            self._slice(KINDS[SpanKind(kind)], thread.process, thread.number, first, thread.end, what)

    # Writing ------------------------------------------------------------------------------------------------------

    def _ns(self, time: float) -> int:
        """Nanoseconds after the trace's 0; a time that is none is the end of the last step."""
        since = time - (self._zero or 0.0)
        return max(round(since * 1e9), 0) if math.isfinite(since) else self._end

    def _slice(
        self, name: str, process: int, thread: int, begin: int, end: int, what: dict[str, Any] | None = None
    ) -> None:
        self._write({"ph": "X", "name": name, "dur": (end - begin) / 1000}, process, thread, begin, what)

    def _counter(self, name: str, at: int, values: dict[str, int]) -> None:
        self._write({"ph": "C", "name": name}, ENGINE, ENGINE, at, values)

    def _describe(self, kind: str, process: int, thread: int, /, **what: Any) -> None:
        self._write({"ph": "M", "name": kind}, process, thread, 0, what)

    def _write(self, event: dict[str, Any], process: int, thread: int, at: int, what: dict[str, Any] | None) -> None:
        event |= {"pid": process, "tid": thread, "ts": at / 1000}
        if what:
            event["args"] = what
        self._file.write(self._separator + msgspec.json.encode(event).decode())
        self._separator = ",\n"
