"""A workload through an :class:`EngineCore` in this process: sends what is due, steps, sleeps when idle.

::

    pending ──due, and in flight < max_concurrency──▶ core.add_request ──▶ core.step() ──▶ recorder
       ▲                                                                       │
       └── nothing to step: sleep until the next arrival ◀─────────────────────┘

The clock and the sleep are injected, so that the tests run hours in milliseconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.events import StepRecord
from engine.load_shapes import synthetic_prompt
from engine.messages import Output
from engine.metrics import RequestTimeline, RunRecorder
from engine.request import RequestError, SamplingParams
from engine.step_counters import StepCounters
from engine.workload import Workload, WorkloadRequest

LONGEST_SLEEP = 0.1
"""Seconds: a stop is felt within this time while the engine is idle."""


class Core(Protocol):
    """What the run needs of an ``EngineCore``."""

    @property
    def has_work(self) -> bool: ...

    def add_request(
        self,
        request_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str = "",
        arrival_time: float | None = None,
        ends_after: int | None = None,
        stream_text: bool = True,
    ) -> None: ...

    def reject(self, request_id: int, message: str) -> None: ...

    def step(self) -> Any: ...


class Codec(Protocol):
    """What the run needs of a ``TextCodec``."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request whose prompt is ids; ``refusal`` says why it has none."""

    request: WorkloadRequest
    prompt_token_ids: list[int]
    refusal: str = ""
    clipped: bool = False
    """Whether prompt or answer were shortened to the model's context."""


def prepare(workload: Workload, codec: Codec, vocab_size: int, max_model_len: int) -> list[PreparedRequest]:
    """Turn every prompt into ids, before the clock starts. A prompt that cannot be made refuses its request only; one
    that may be clipped is, to ``max_model_len`` tokens with its answer."""
    prepared = []
    for request in workload.requests:
        try:
            prepared.append(_prepare(request, codec, vocab_size, max_model_len))
        except (RequestError, ValueError) as error:
            prepared.append(PreparedRequest(request, [], str(error)))
    return prepared


def _prepare(request: WorkloadRequest, codec: Codec, vocab_size: int, max_model_len: int) -> PreparedRequest:
    if request.prompt_tokens is not None:
        fitted = request.clipped(request.prompt_tokens, max_model_len)
        if (fitted.prompt_tokens or 0) > max_model_len:  # before it is made: it may be of any length
            raise RequestError(
                f"prompt_tokens is {request.prompt_tokens:,}; the model's context holds {max_model_len:,}"
            )
        ids = fitted.synthetic_ids(vocab_size, codec.special_ids)
    else:
        ids = list(request.prompt_token_ids or ()) if request.prompt is None else codec.encode(request.prompt)
        fitted = request.clipped(len(ids), max_model_len)
        if fitted is not request:
            ids = ids[: request.longest_prompt(max_model_len)]
    return PreparedRequest(fitted, ids, clipped=fitted is not request)


def warm_up_requests(
    prepared: Sequence[PreparedRequest], count: int, codec: Codec, vocab: int
) -> list[PreparedRequest]:
    """``count`` requests as long as the workload's first ones, with prompts of their own, so that nothing of the
    workload is in the prefix cache when it starts."""
    usable = [p for p in prepared if p.prompt_token_ids]
    result = []
    for i in range(count if usable else 0):
        like = usable[i % len(usable)]
        ids = synthetic_prompt(len(like.prompt_token_ids), vocab, 2**40 + i, codec.special_ids)
        output = like.request.output_tokens
        result.append(PreparedRequest(WorkloadRequest(output_tokens=output, prompt_tokens=len(ids)), ids))
    return result


@dataclass
class WorkloadRun:
    """One pass over ``prepared``; :meth:`run` returns when all have ended or ``stop_wanted`` says so."""

    core: Core
    prepared: Sequence[PreparedRequest]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    max_concurrency: int | None = None
    open_loop: bool = False
    first_id: int = 1
    counters: StepCounters | None = None
    stop_wanted: Callable[[], bool] = lambda: False
    on_progress: Callable[[WorkloadRun], None] = lambda run: None
    on_record: Callable[[WorkloadRun, StepRecord], None] = lambda run, record: None
    """Called with the record of each step, right after it."""
    recorder: RunRecorder = field(init=False)
    elapsed: float = field(init=False, default=0.0)
    """Seconds from the start to the last token or the stop."""

    def run(self) -> RunRecorder:
        start = self.clock()
        self.recorder = RunRecorder(start)
        if self.counters is not None:
            self.counters.start = start
        timelines = [self.recorder.expect(p.request) for p in self.prepared]
        for timeline, prepared in zip(timelines, self.prepared, strict=True):
            timeline.prompt_tokens, timeline.clipped = len(prepared.prompt_token_ids), prepared.clipped
        order = sorted(range(len(timelines)), key=lambda i: (timelines[i].scheduled, i))
        pending = deque(order)
        try:
            while not self.stop_wanted():
                self._send_due(pending, timelines)
                if self.core.has_work:
                    self._step()
                elif self.recorder.open:
                    raise RuntimeError(
                        f"the engine has no work left, but {len(self.recorder.open)} requests are unanswered"
                    )
                elif pending:
                    wait = start + timelines[pending[0]].scheduled - self.clock()
                    self.sleep(min(max(wait, 0.0), LONGEST_SLEEP))
                else:
                    break
        finally:
            self.elapsed = self.clock() - start
        return self.recorder

    def _send_due(self, pending: deque[int], timelines: list[RequestTimeline]) -> None:
        """Send the pending requests whose time has come and for which there is room."""
        while pending and (self.max_concurrency is None or len(self.recorder.open) < self.max_concurrency):
            index = pending[0]
            now = self.clock()
            if now < self.recorder.start + timelines[index].scheduled:
                return
            pending.popleft()
            self._send(index, timelines[index], now)

    def _send(self, index: int, timeline: RequestTimeline, now: float) -> None:
        prepared = self.prepared[index]
        request = prepared.request
        request_id = self.first_id + index
        self.recorder.sent(request_id, timeline, now)
        if prepared.refusal:
            self.core.reject(request_id, prepared.refusal)
            return
        self.core.add_request(
            request_id,
            prepared.prompt_token_ids,
            request.params(),
            priority=request.priority,
            user=request.user,
            arrival_time=self.recorder.start + timeline.scheduled if self.open_loop else now,
            ends_after=request.output_tokens,
            stream_text=False,
        )

    def _step(self) -> None:
        result = self.core.step()
        if result.record is not None:
            self.recorder.record(result.record)
            if self.counters is not None:
                self.counters.add(result.record)
            self.on_record(self, result.record)
        outputs: list[Output] = result.outputs
        for output in outputs:
            self.recorder.output(output)
        self.on_progress(self)
