"""The requests of a recorded run, put together from its steps: when they came, their tokens, how they ended. Light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.events import (
    Admitted,
    AnyEvent,
    Arrived,
    Ended,
    Finished,
    Keyframe,
    PoolShrunk,
    Preempted,
    Reconfigured,
    Rejected,
    Reprioritised,
    StepRecord,
)
from engine.handout import Handout, Handouts
from engine.request import FinishReason


@dataclass(slots=True)
class RecordedRequest:
    """Instants are on the engine's clock."""

    request_id: int
    arrival: float
    arrived_step: int
    """The step that told of it; 0: it was there when the recording begins."""
    prompt_tokens: int = 0
    """0: not known, for one that was refused."""
    max_tokens: int = 0
    priority: int = 0
    user: str = ""
    parent: int = 0
    prefix: list[int] = field(default_factory=list)
    """:attr:`engine.events.Arrived.prefix`."""
    admitted: float | None = None
    token_times: list[float] = field(default_factory=list)
    """When its client got each output token; without those from before the recording."""
    earlier_tokens: int = 0
    """How many it had when the recording begins, and how many came in gaps of it."""
    earlier_first_token: float | None = None
    """When the first of those came."""
    cached_tokens: int = 0
    preemptions: int = 0
    ended_step: int | None = None
    """The step that completed its answer, or ended it in another way."""
    finished: float | None = None
    finish_reason: str = ""
    error: str = ""

    @property
    def output_tokens(self) -> int:
        return self.earlier_tokens + len(self.token_times)

    @property
    def first_token(self) -> float | None:
        return self.earlier_first_token or (self.token_times[0] if self.token_times else None)


class RequestLog:
    """Folds the steps of a run. ``on_end`` gets each request that has left; those still there are in :attr:`open`."""

    def __init__(self, on_end: Callable[[RecordedRequest], None], priorities_until: int | None = None) -> None:
        """``priorities_until``: changes of priority after this step are passed over."""
        self.open: dict[int, RecordedRequest] = {}
        """In order of arrival."""
        self.end = 0.0
        """When the last step ended, engine clock."""
        self._on_end = on_end
        self._priorities_until = priorities_until
        self._withholds = False
        """Whether answers are handed out when their batch ends."""
        self._withheld: dict[int, int] = {}
        """Tokens that are held back for a batch, by request."""
        self._handouts = Handouts()

    def restore(self, keyframe: Keyframe) -> None:
        """Begin with this state, or go on with it behind a gap: what happened to a request meanwhile is not known."""
        self._handouts.restore(keyframe)
        alive = {request.request_id for request in keyframe.requests}
        for request_id in [i for i in self.open if i not in alive]:
            self._leave(self.open[request_id], "", keyframe.time, keyframe.step)
        for request in keyframe.requests:
            known = self.open.get(request.request_id)
            if known is None:
                known = self.open[request.request_id] = RecordedRequest(request.request_id, request.arrival_time, 0)
                known.prompt_tokens, known.max_tokens = request.prompt_tokens, request.max_tokens
                known.priority, known.user, known.parent = request.priority, request.user, request.parent
                known.earlier_first_token = request.first_token_time
            known.admitted = request.admitted_time
            known.cached_tokens, known.preemptions = request.cached_tokens, request.preemptions
            under_way = self._handouts.under_way(request.request_id)
            known.earlier_tokens = request.output_tokens - len(known.token_times) - under_way
        scheduler = keyframe.scheduler
        self._withholds = withholds_answers(keyframe.discipline, scheduler.static_delivery if scheduler else "batch")
        self._withheld.clear()
        self.end = max(self.end, keyframe.time)

    def apply(self, record: StepRecord) -> None:
        for event in record.events:
            if not isinstance(event, Ended | Finished):  # the row of this step comes first
                self._event(event, record)
        for given in self._handouts.apply(record):
            self._take(given, record)
        self.end = max(self.end, record.end)

    def _take(self, given: Handout, record: StepRecord) -> None:
        for request_id, new in zip(given.request_ids, given.new_tokens, strict=True):
            request = self.open.get(request_id) if new else None
            if request is None:
                continue
            if self._withholds:
                self._withheld[request_id] = self._withheld.get(request_id, 0) + new
            else:
                request.token_times += [given.time] * new
        for event in given.ends:
            at = record.time if event.reason == FinishReason.ABORT else given.time
            self._end(event, given.step, at)

    def _event(self, event: AnyEvent, record: StepRecord) -> None:
        if isinstance(event, Arrived):
            self.open[event.request_id] = RecordedRequest(
                request_id=event.request_id,
                arrival=event.arrival_time,
                arrived_step=record.step,
                prompt_tokens=event.prompt_tokens,
                max_tokens=event.max_tokens,
                priority=event.priority,
                user=event.user,
                parent=event.parent,
                prefix=event.prefix,
            )
        elif isinstance(event, Rejected):
            refused = self.open.get(event.request_id) or RecordedRequest(event.request_id, record.time, record.step)
            refused.error = event.message
            self._leave(refused, FinishReason.ERROR, record.time, record.step)
        elif isinstance(event, Reconfigured):
            delivery = event.scheduler.static_delivery if event.scheduler else "batch"
            self._withholds = withholds_answers(event.discipline, delivery)
        elif isinstance(event, Admitted | Preempted | Reprioritised):
            self._change(event, record)
        elif isinstance(event, PoolShrunk):
            for request_id in event.withdrawn:
                self._withdraw(request_id)

    def _withdraw(self, request_id: int) -> None:
        """The last token of a request did not come. Only one from before the recording was counted by then."""
        request = self.open.get(request_id)
        if request is not None and not self._handouts.under_way(request_id):
            request.earlier_tokens -= 1

    def _change(self, event: Admitted | Preempted | Reprioritised, record: StepRecord) -> None:
        request = self.open.get(event.request_id)
        if request is None:
            return
        if isinstance(event, Preempted):
            request.preemptions += 1
        elif isinstance(event, Reprioritised):
            if self._priorities_until is None or record.step <= self._priorities_until:
                request.priority = event.priority
        elif not event.resumed:
            request.admitted, request.cached_tokens = record.time, event.cached_tokens

    def _end(self, event: Ended | Finished, step: int, at: float) -> None:
        request = self.open.get(event.request_id)
        if request is None:
            return
        if isinstance(event, Ended):
            request.ended_step, request.finish_reason = step, event.reason
        else:
            self._leave(request, event.reason, at, step)

    def _leave(self, request: RecordedRequest, reason: str, at: float, step: int) -> None:
        self.open.pop(request.request_id, None)
        request.token_times += [at] * self._withheld.pop(request.request_id, 0)
        request.finished, request.finish_reason = at, reason
        if request.ended_step is None:
            request.ended_step = step
        self._on_end(request)


def withholds_answers(discipline: str, static_delivery: str) -> bool:
    return discipline == "static" and static_delivery == "batch"


def by_arrival(requests: list[RecordedRequest]) -> list[RecordedRequest]:
    def key(request: RecordedRequest) -> Any:
        return request.arrival, request.request_id

    return sorted(requests, key=key)


def first_moment(part: Keyframe | StepRecord) -> float | None:
    """The earliest instant of which a part of a run tells, engine clock: an arrival, or its own time; None: nothing."""
    if isinstance(part, StepRecord):
        arrivals = [event.arrival_time for event in part.events if isinstance(event, Arrived)]
        return min([part.time, *arrivals])
    return min([part.time, *(request.arrival_time for request in part.requests)]) if part.requests else None
