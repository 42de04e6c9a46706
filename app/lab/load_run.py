"""A load on its way through the window's engine, without Qt: the panel hands it the clock and what comes back.

::

    warming ──all answered──▶ running: the clock starts ──▶ done
    pump() ──due, and in flight < max_concurrency──▶ send ──▶ engine ──▶ take_outputs(), apply() ──▶ timelines
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

from engine.events import Keyframe, RunTotals, StepRecord
from engine.messages import Output
from engine.metrics import RunRecorder, meets, summarise
from engine.workload import ShapeError, Workload, WorkloadRequest, estimated_tokens, prompt_length

RunPhase = Literal["warming", "running", "stopping", "done", "stopped", "broken"]
"""``stopping``: what is open was aborted and has not ended yet. ``broken``: the engine died under it."""
WARM_UP_SEED = 1 << 40
"""Prompts of the warm-up are none of the workload's, so that it finds nothing of its own in the prefix cache."""
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
    """One pass over a workload. Times are those of ``clock``, which must be the engine's.

    ``warm_up`` requests, as long as the workload's first ones, are answered before the clock starts, and not counted.
    What may be clipped is, to ``max_model_len`` tokens.
    """

    def __init__(
        self,
        workload: Workload,
        engine: Engine,
        *,
        vocab_size: int,
        max_model_len: int,
        totals: RunTotals,
        warm_up: int = 0,
        objectives: dict[str, float] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.workload = workload
        self.objectives = objectives
        """Of goodput, in milliseconds."""
        self.phase: RunPhase = "warming" if warm_up and workload.requests else "running"
        self.reason = ""
        """Of a broken run: the sentence for the user."""
        self._engine = engine
        self._vocab_size = vocab_size
        self._context = max_model_len
        self.clock = clock
        self._totals_before = self._totals = totals
        self._carried = dict.fromkeys(_COUNTS, 0)
        self._engine_taken = False
        self._elapsed = 0.0
        self._held_since: float | None = None
        self._held_seconds = 0.0
        self.recorder = RunRecorder(clock())
        self._requests = [request.clipped(prompt_length(request), max_model_len) for request in workload.requests]
        for given, request in zip(workload.requests, self._requests, strict=True):
            self.recorder.expect(request).clipped = request is not given
        timelines = self.recorder.timelines
        self.request_ids: list[int | None] = [None] * len(timelines)
        """The engine's numbers of the requests, in order of the workload; None before one is sent."""
        self._pending = deque(sorted(range(len(timelines)), key=lambda i: (timelines[i].scheduled, i)))
        self._warm_pending = deque(self._warm_up_requests(warm_up))
        self._warming: set[int] = set()
        """Requests of the warm-up that are open."""

    def _warm_up_requests(self, count: int) -> list[WorkloadRequest]:
        result = []
        for index in range(count if self._requests else 0):
            like = self._requests[index % len(self._requests)]
            length = min(prompt_length(like) or estimated_tokens(like.prompt or ""), max(1, self._context // 2))
            result.append(WorkloadRequest(like.output_tokens, prompt_tokens=length, seed=WARM_UP_SEED + index))
        return result

    # Sending -----------------------------------------------------------------------------------------------------

    def pump(self) -> float | None:
        """Send what is due. Gives the seconds until the next arrival; None where only an answer can bring the next."""
        if self._held_since is not None:
            return None
        cap = self.workload.arrivals.max_concurrency
        if self.phase == "warming":
            self._pump_warm_up(cap)
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

    def _pump_warm_up(self, cap: int | None) -> None:
        while self._warm_pending and (cap is None or len(self._warming) < cap):
            self._warming.add(self._add(self._warm_pending.popleft(), arrival_time=self.clock()))
        if not self._warming:
            self.phase = "running"
            self.recorder.start = self.clock()

    def _add(self, request: WorkloadRequest, *, arrival_time: float) -> int:
        return self._engine.add_request(
            params=request.params(),
            priority=request.priority,
            user=request.user,
            arrival_time=arrival_time,
            ends_after=request.output_tokens,
            stream_text=False,
            **self._prompt(request),
        )

    def _send(self, index: int) -> None:
        timeline = self.recorder.timelines[index]
        now = self.clock()
        arrival = self.recorder.start + timeline.scheduled if self.workload.open_loop else now
        try:
            request_id = self._add(self._requests[index], arrival_time=arrival)
        except ShapeError as error:
            timeline.finish_reason, timeline.error = "error", str(error)
            self.recorder.ended += 1
            return
        self.request_ids[index] = request_id
        self.recorder.sent(request_id, timeline, now)

    def _prompt(self, request: WorkloadRequest) -> dict[str, Any]:
        if request.prompt is not None:
            return {"prompt": request.prompt, "prompt_limit": self._prompt_limit(request)}
        if request.prompt_token_ids is not None:
            return {"prompt_token_ids": request.prompt_token_ids}
        if request.prefix:  # the engine makes single prompts, not pairs that begin alike
            return {"prompt_token_ids": request.synthetic_ids(self._vocab_size)}
        return {"prompt_tokens": request.prompt_tokens, "synthetic_seed": request.seed}

    def _prompt_limit(self, request: WorkloadRequest) -> int | None:
        """Tokens of a text that the engine may keep; only it knows how many there are."""
        return request.longest_prompt(self._context) if request.clip else None

    def hold(self) -> None:
        """Send nothing until :meth:`resume`: the engine pauses, or a comparison has it."""
        if self._held_since is None and self.active:
            self._held_since = self.clock()

    def resume(self) -> None:
        """Go on; what was to come meanwhile comes later by as much."""
        if self._held_since is None:
            return
        held = self.clock() - self._held_since
        self._held_since = None
        self._held_seconds += held
        if self.phase == "running" and self.workload.open_loop:
            for index in self._pending:
                self.recorder.timelines[index].scheduled += held

    @property
    def held(self) -> bool:
        return self._held_since is not None

    def stop(self) -> None:
        """Send nothing more and abort what is open."""
        if self.phase not in ("warming", "running"):
            return
        self.resume()
        self._pending.clear()
        self._warm_pending.clear()
        self.phase = "stopping"
        for request_id in [*self._warming, *self.recorder.open]:
            self._engine.abort(request_id)
        self._settle()

    def break_off(self, reason: str) -> None:
        """The engine is gone: what completed stays the result."""
        if self.active:
            self.resume()
            self._elapsed = self.clock() - self.recorder.start
            self._pending.clear()
            self._warm_pending.clear()
            self.phase, self.reason = "broken", reason

    # What comes back ---------------------------------------------------------------------------------------------

    def take_outputs(self, outputs: Iterable[Output]) -> None:
        if not self.active:
            return
        for output in outputs:
            if output.request_id in self._warming:
                if output.finish_reason is not None:
                    self._warming.discard(output.request_id)
            else:
                self.recorder.output(output)
        self._settle()

    def apply(self, record: StepRecord) -> None:
        """Take admissions and totals of a step. Records lag behind outputs, so the last come after the end."""
        if self._is_of_this_run(record.time):
            self.recorder.record(record)
            self._take_totals(record.totals, record.time)

    def restore(self, keyframe: Keyframe) -> None:
        """Take the same from a state, where records were missed."""
        if not self._is_of_this_run(keyframe.time):
            return
        self._take_totals(keyframe.totals, keyframe.time)
        for state in keyframe.requests:
            timeline = self.recorder.sent_timelines.get(state.request_id)
            if timeline is not None and timeline.admitted is None and state.admitted_time is not None:
                timeline.admitted = state.admitted_time - self.recorder.start

    def _take_totals(self, totals: RunTotals, when: float) -> None:
        self._totals = totals
        if self.phase == "warming" or when < self.recorder.start:
            self._totals_before = totals  # a record of the warm-up, or of what went before, that came late

    def take_engine(self, taken: bool) -> None:
        """A comparison's runs have the engine, or no longer: meanwhile steps are not of this load, and afterwards the
        engine's totals begin anew."""
        if taken and not self._engine_taken:
            self._carried = self._counts()
            self._totals_before = self._totals = RunTotals()
        self._engine_taken = taken

    def _is_of_this_run(self, when: float) -> bool:
        """Of a run that has ended: a fresh engine's first state has the time 0 and is not of it."""
        start = self.recorder.start
        if self._engine_taken or self.phase == "broken":
            return False
        return self.active or start <= when <= start + self._elapsed

    def _settle(self) -> None:
        if self.phase == "warming" or self._pending or self.recorder.open or self._warming:
            return
        self._elapsed = self.clock() - self.recorder.start
        if self.phase == "running":
            self.phase = "done"
        elif self.phase == "stopping":
            self.phase = "stopped"

    # What it shows -----------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        return self.phase in ("warming", "running", "stopping")

    @property
    def warm_up_left(self) -> int:
        """Requests of the warm-up that have not been answered yet."""
        return len(self._warm_pending) + len(self._warming)

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
        """The result so far, keys as in ``bench``; ``paused_seconds`` are those in which nothing was sent."""
        for timeline, request in zip(self.recorder.timelines, self._requests, strict=True):
            if request.prompt is not None and timeline.prompt_tokens == self._prompt_limit(request):
                timeline.clipped = True
        held = 0.0 if self._held_since is None else self.clock() - self._held_since
        return {
            **summarise(self.recorder.timelines, self.workload, elapsed=self.elapsed, objectives=self.objectives),
            **self._counts(),
            "paused_seconds": self._held_seconds + held,
        }

    def _counts(self) -> dict[str, int]:
        before, now = self._totals_before, self._totals
        return {key: self._carried[key] + getattr(now, name) - getattr(before, name) for key, name in _COUNTS.items()}

    def meets_objectives(self, index: int) -> bool | None:
        """Whether a completed request meets every objective; None without objectives or without a whole answer."""
        timeline = self.recorder.timelines[index]
        if not self.objectives or not timeline.completed:
            return None
        return meets(timeline, timeline.scheduled if self.workload.open_loop else timeline.sent, self.objectives)

    def refusals(self) -> list[str]:
        """The sentences of failed requests, the commonest first, with how often each was said."""
        said = Counter(t.error for t in self.recorder.timelines if t.error)
        return [f"{count} × {sentence}" if count > 1 else sentence for sentence, count in said.most_common()]
