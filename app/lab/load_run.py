"""A load on its way through the window's engine, without Qt: the panel hands it the clock and what comes back.

::

    pump() ──due, and in flight < max_concurrency──▶ send ──▶ engine ──▶ take_outputs(), apply() ──▶ timelines
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from engine.events import Keyframe, RunTotals, StepRecord
from engine.messages import Output
from engine.metrics import RunRecorder, summarise
from engine.workload import ShapeError, Workload, WorkloadRequest

RunPhase = Literal["running", "stopping", "done", "stopped", "broken"]
"""``stopping``: what is open was aborted and has not ended yet. ``broken``: the engine died under it."""
SENT_AT_ONCE = 256
"""After this many requests the window gets to breathe."""
LAG_SECONDS = 2.0
"""Step records come at most this long after the tokens of the same step."""


class Engine(Protocol):
    """What a load needs of the bridge."""

    def add_request(self, **given: Any) -> int: ...

    def abort(self, request_id: int) -> None: ...


_COUNTS = {
    "preemptions": "preemptions",
    "recomputed_tokens": "recomputed_tokens",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "swapped_blocks": "swapped_out_blocks",
    "padding_tokens": "padding_tokens",
    "draft_tokens": "draft_tokens",
    "accepted_tokens": "accepted_tokens",
}
"""Key of a result -> the running total whose rise it is."""


class LoadRun:
    """One pass over a workload. Times are those of ``clock``, which must be the engine's."""

    def __init__(
        self,
        workload: Workload,
        engine: Engine,
        *,
        vocab_size: int,
        totals: RunTotals,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.workload = workload
        self.phase: RunPhase = "running"
        self.reason = ""
        """Of a broken run: the sentence for the user."""
        self._engine = engine
        self._vocab_size = vocab_size
        self.clock = clock
        self._totals_before = self._totals = totals
        self._elapsed = 0.0
        self.recorder = RunRecorder(clock())
        for request in workload.requests:
            self.recorder.expect(request)
        timelines = self.recorder.timelines
        self.request_ids: list[int | None] = [None] * len(timelines)
        """The engine's numbers of the requests, in order of the workload; None before one is sent."""
        self._pending = deque(sorted(range(len(timelines)), key=lambda i: (timelines[i].scheduled, i)))

    # Sending -----------------------------------------------------------------------------------------------------

    def pump(self) -> float | None:
        """Send what is due. Gives the seconds until the next arrival; None where only an answer can bring the next."""
        cap = self.workload.arrivals.max_concurrency
        sent = 0
        while self.phase == "running" and self._pending:
            if cap is not None and len(self.recorder.open) >= cap:
                return None
            if sent == SENT_AT_ONCE:
                return 0.0
            index = self._pending[0]
            wait = self.recorder.start + self.recorder.timelines[index].scheduled - self.clock()
            if wait > 0:
                return wait
            self._pending.popleft()
            self._send(index)
            sent += 1
        self._settle()
        return None

    def _send(self, index: int) -> None:
        request = self.workload.requests[index]
        timeline = self.recorder.timelines[index]
        now = self.clock()
        try:
            prompt = self._prompt(request)
        except ShapeError as error:
            timeline.finish_reason, timeline.error = "error", str(error)
            self.recorder.ended += 1
            return
        request_id = self._engine.add_request(
            params=request.params(),
            priority=request.priority,
            user=request.user,
            arrival_time=self.recorder.start + timeline.scheduled if self.workload.open_loop else now,
            ends_after=request.output_tokens,
            stream_text=False,
            **prompt,
        )
        self.request_ids[index] = request_id
        self.recorder.sent(request_id, timeline, now)

    def _prompt(self, request: WorkloadRequest) -> dict[str, Any]:
        if request.prompt is not None:
            return {"prompt": request.prompt}
        if request.prompt_token_ids is not None:
            return {"prompt_token_ids": request.prompt_token_ids}
        if request.prefix:  # the engine makes single prompts, not pairs that begin alike
            return {"prompt_token_ids": request.synthetic_ids(self._vocab_size)}
        return {"prompt_tokens": request.prompt_tokens, "synthetic_seed": request.seed}

    def stop(self) -> None:
        """Send nothing more and abort what is open."""
        if self.phase != "running":
            return
        self._pending.clear()
        self.phase = "stopping"
        for request_id in list(self.recorder.open):
            self._engine.abort(request_id)
        self._settle()

    def break_off(self, reason: str) -> None:
        """The engine is gone: what completed stays the result."""
        if self.phase in ("running", "stopping"):
            self._elapsed = self.clock() - self.recorder.start
            self._pending.clear()
            self.phase, self.reason = "broken", reason

    # What comes back ---------------------------------------------------------------------------------------------

    def take_outputs(self, outputs: Iterable[Output]) -> None:
        if not self.active:
            return
        for output in outputs:
            self.recorder.output(output)
        self._settle()

    def apply(self, record: StepRecord) -> None:
        """Take admissions and totals of a step. Records lag behind outputs, so the last come after the end."""
        if self._is_of_this_run(record.time):
            self.recorder.record(record)
            self._totals = record.totals

    def restore(self, keyframe: Keyframe) -> None:
        """Take the same from a state, where records were missed."""
        if not self._is_of_this_run(keyframe.time):
            return
        self._totals = keyframe.totals
        for state in keyframe.requests:
            timeline = self.recorder.sent_timelines.get(state.request_id)
            if timeline is not None and timeline.admitted is None and state.admitted_time is not None:
                timeline.admitted = state.admitted_time - self.recorder.start

    def _is_of_this_run(self, when: float) -> bool:
        """Of a run that has ended: a fresh engine's first state has the time 0 and is not of it."""
        start = self.recorder.start
        return self.phase != "broken" and (self.active or start <= when <= start + self._elapsed)

    def _settle(self) -> None:
        if self._pending or self.recorder.open:
            return
        self._elapsed = self.clock() - self.recorder.start
        if self.phase == "running":
            self.phase = "done"
        elif self.phase == "stopping":
            self.phase = "stopped"

    # What it shows -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.phase in ("running", "stopping")

    @property
    def lagging(self) -> bool:
        """Whether the records of the last steps may still be on their way, of a run that has ended."""
        return not self.active and self.clock() - self.recorder.start < self._elapsed + LAG_SECONDS

    @property
    def elapsed(self) -> float:
        """Seconds since the start; of an ended run, its duration."""
        return self.clock() - self.recorder.start if self.active else self._elapsed

    @property
    def tokens_per_second(self) -> float:
        """Output tokens so far over the time so far."""
        elapsed = self.elapsed
        return self.recorder.output_tokens / elapsed if elapsed > 0 else 0.0

    def summary(self) -> dict[str, Any]:
        """The result so far, keys as in ``bench``."""
        before, now = self._totals_before, self._totals
        counts = {key: getattr(now, name) - getattr(before, name) for key, name in _COUNTS.items()}
        return {**summarise(self.recorder.timelines, self.workload, elapsed=self.elapsed), **counts}

    def refusals(self) -> list[str]:
        """The sentences of failed requests, the commonest first, with how often each was said."""
        said = Counter(t.error for t in self.recorder.timelines if t.error)
        return [f"{count} × {sentence}" if count > 1 else sentence for sentence, count in said.most_common()]
