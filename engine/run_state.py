"""The state of a run as a fold over its step records: what every view draws from.

``RunState.apply(record)`` advances by one step; ``RunState.restore(keyframe)`` begins anywhere. Folding all records
from the start gives the engine's own keyframe at every step: the tests hold that. Light: numpy and msgspec only.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.block_state import BlockState
from engine.config import SchedulerConfig
from engine.events import (
    Admitted,
    AnyEvent,
    Arrived,
    BatchEnded,
    BatchStarted,
    BlockCopied,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksShared,
    Deferred,
    Ended,
    Finished,
    Keyframe,
    PoolShrunk,
    Preempted,
    Reconfigured,
    Recovered,
    Rejected,
    Reprioritised,
    RequestState,
    RunTotals,
    StepRecord,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.handout import ended_by_rows
from engine.request import FinishReason, RequestStatus

FINISHED_KEPT = 2_000
"""How many finished requests stay for the views; the oldest go first."""
BATCHES_KEPT = 100
IN_BATCH = frozenset({RequestStatus.RUNNING, RequestStatus.ENDED})
"""The states in which a request has a place in the batch."""


class RunState:
    """Requests and blocks after the last applied step.

    Blocks are arrays over block ids (:class:`BlockState`). A block is *referenced*
    (``block_refs`` > 0), *cached* (no reference, but ``block_hashed``) or *free*.
    """

    def __init__(self) -> None:
        self.step = 0
        self.time = 0.0
        self.num_host_blocks = 0
        self.block_size = 1
        self.max_num_seqs = 0
        self.token_budget = 0
        self.discipline = self.order = self.preemption = self.pending_discipline = ""
        self.scheduler: SchedulerConfig | None = None
        """All knobs as they are in force or, the discipline, wanted; None: not told."""
        self.totals = RunTotals()
        self.requests: dict[int, RequestState] = {}
        """All that are not finished, by id, in order of arrival."""
        self.finished: deque[RequestState] = deque(maxlen=FINISHED_KEPT)
        self.deferred: Deferred | None = None
        """Why the head of the queue waits."""
        self.batch: BatchStarted | None = None
        """The static batch that runs, where one does and its beginning was seen."""
        self.batches: deque[BatchEnded] = deque(maxlen=BATCHES_KEPT)
        """The static batches that have ended, oldest first."""
        self.last_record: StepRecord | None = None
        self.missed_steps = 0
        """Steps whose records were replaced by a keyframe."""
        self._last_tokens_due: list[RequestState] = []
        """Finished ones whose last tokens have yet to arrive."""
        self._ended_by_rows: frozenset[int] = frozenset()
        """Of a step in flight, or in which one landed, :func:`engine.handout.ended_by_rows`."""
        self._blocks = BlockState(0)

    # Blocks -----------------------------------------------------------------------------------------------------

    @property
    def num_blocks(self) -> int:
        return len(self._blocks.refs) - 1

    @property
    def block_refs(self) -> np.ndarray:
        """int32 [num_blocks + 1]"""
        return self._blocks.refs

    @property
    def block_owner(self) -> np.ndarray:
        """int64 [num_blocks + 1], :attr:`BlockState.owner`."""
        return self._blocks.owner

    @property
    def block_hashed(self) -> np.ndarray:
        """bool [num_blocks + 1]"""
        return self._blocks.hashed

    @property
    def block_parent(self) -> np.ndarray:
        """int32 [num_blocks + 1], :attr:`BlockState.parent`: made when it is asked for, O(num_blocks)."""
        return self._blocks.parent

    # Gauges -----------------------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Places taken in the batch, those of answers that are complete included."""
        return sum(1 for r in self.requests.values() if r.status in IN_BATCH)

    @property
    def num_waiting(self) -> int:
        """All others, preempted and swapped ones included."""
        return len(self.requests) - self.num_running

    @property
    def num_swapped(self) -> int:
        return sum(1 for r in self.requests.values() if r.status == RequestStatus.SWAPPED)

    @property
    def host_blocks_used(self) -> int:
        return sum(len(r.host_blocks) for r in self.requests.values())

    @property
    def referenced_blocks(self) -> int:
        return int(np.count_nonzero(self.block_refs))

    @property
    def kv_usage(self) -> float:
        """Share of the pool that requests refer to, 0 to 1."""
        return self.referenced_blocks / self.num_blocks if self.num_blocks else 0.0

    # The fold ---------------------------------------------------------------------------------------------------

    def restore(self, keyframe: Keyframe) -> None:
        """Begin from ``keyframe``. Finished requests of a run that goes on are kept."""
        if keyframe.step < self.step or self.num_blocks != keyframe.num_blocks:
            self.finished.clear()
            self.batches.clear()
            self.missed_steps = 0
        elif self.step:
            self.missed_steps += keyframe.step - self.step
        self.step, self.time = keyframe.step, keyframe.time
        self.block_size, self.max_num_seqs = keyframe.block_size, keyframe.max_num_seqs
        self.token_budget, self.totals = keyframe.token_budget, keyframe.totals
        self.deferred = keyframe.deferred
        self.num_host_blocks = keyframe.num_host_blocks
        self.discipline, self.pending_discipline = keyframe.discipline, keyframe.pending_discipline
        self.order, self.preemption = keyframe.order, keyframe.preemption
        self.batch, self.scheduler = keyframe.batch, keyframe.scheduler
        self.last_record = None
        self._last_tokens_due = []
        self._blocks = BlockState(keyframe.num_blocks)
        self.requests = {}
        for request in sorted(keyframe.requests, key=lambda r: (r.arrival_time, r.request_id)):
            own = copy.copy(request)
            own.blocks, own.host_blocks = list(request.blocks), list(request.host_blocks)
            self.requests[own.request_id] = own
        self._blocks.hold({request.request_id: request.blocks for request in self.requests.values()})
        self._blocks.cache(keyframe.cached_blocks, keyframe.cached_parents)

    def keyframe(self) -> Keyframe:
        """This state, written out; requests by id."""
        cached = np.flatnonzero(self.block_hashed)
        return Keyframe(
            step=self.step,
            time=self.time,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            token_budget=self.token_budget,
            requests=sorted(self.requests.values(), key=lambda r: r.request_id),
            cached_blocks=cached.tolist(),
            deferred=self.deferred,
            totals=self.totals,
            num_host_blocks=self.num_host_blocks,
            discipline=self.discipline,
            order=self.order,
            preemption=self.preemption,
            pending_discipline=self.pending_discipline,
            cached_parents=self.block_parent[cached].tolist(),
            batch=self.batch,
            scheduler=self.scheduler,
        )

    def apply(self, record: StepRecord) -> None:
        """Advance by one step."""
        self.step, self.time = record.step, record.time
        self.token_budget, self.totals = record.token_budget, record.totals
        self._land(record)
        ends: list[Ended | Finished] = []
        for event in record.events:
            if isinstance(event, Ended | Finished):
                ends.append(event)  # its row of this step comes first
            else:
                self._apply_event(event, record)
        self._apply_columns(record)
        for event in ends:
            self._apply_event(event, record)
        self.last_record = record

    def _land(self, record: StepRecord) -> None:
        """The tokens of the step before have arrived, or do not come."""
        due, self._last_tokens_due = self._last_tokens_due, []
        if record.in_flight or record.landed_at:
            self._ended_by_rows = ended_by_rows(record)
        if not record.landed_at:
            return
        for request in (*self.requests.values(), *due):
            if request.output_tokens and request.first_token_time is None:
                request.first_token_time = record.landed_at
        for request in due:
            request.finished_time = record.landed_at

    def _apply_event(self, event: AnyEvent, record: StepRecord) -> None:
        _HANDLERS[type(event)](self, event, record)

    def _apply_columns(self, record: StepRecord) -> None:
        ended_at = record.end
        for request_id, computed, new in zip(record.request_ids, record.num_computed, record.new_tokens, strict=True):
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_computed = computed
            if new:
                request.output_tokens += new
                if request.first_token_time is None and not record.in_flight:
                    request.first_token_time = ended_at

    def _arrive(self, event: Arrived, record: StepRecord) -> None:
        self.requests[event.request_id] = RequestState(
            request_id=event.request_id,
            arrival_time=event.arrival_time,
            prompt_tokens=event.prompt_tokens,
            max_tokens=event.max_tokens,
            priority=event.priority,
            user=event.user,
            status=RequestStatus.WAITING,
            num_computed=0,
            output_tokens=0,
            cached_tokens=0,
            preemptions=0,
            blocks=[],
            host_blocks=[],
            parent=event.parent,
        )

    def _rank(self, event: Reprioritised, record: StepRecord) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            request.priority = event.priority

    def _admit(self, event: Admitted, record: StepRecord) -> None:
        self._clear_deferred(event.request_id)
        request = self.requests.get(event.request_id)
        if request is None:
            return
        request.status = RequestStatus.RUNNING
        request.num_computed = event.cached_tokens
        if not event.resumed:
            request.cached_tokens = event.cached_tokens
            request.admitted_time = record.time

    def _defer(self, event: Deferred, record: StepRecord) -> None:
        self.deferred = event

    def _clear_deferred(self, request_id: int) -> None:
        if self.deferred is not None and self.deferred.request_id == request_id:
            self.deferred = None

    def _preempt(self, event: Preempted, record: StepRecord) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            return
        request.preemptions += 1
        if event.mode == "swap":
            request.status = RequestStatus.SWAPPED
        else:
            request.status = RequestStatus.PREEMPTED
            request.num_computed = 0

    def _swap_out(self, event: SwappedOut, record: StepRecord) -> None:
        self._blocks.release(event.blocks)
        request = self.requests.get(event.request_id)
        if request is not None:
            moved = set(event.blocks)
            request.blocks = [0 if b in moved else b for b in request.blocks]
            request.host_blocks = list(event.host_blocks)

    def _swap_in(self, event: SwappedIn, record: StepRecord) -> None:
        self._blocks.take(event.request_id, event.blocks)
        request = self.requests.get(event.request_id)
        if request is not None:
            coming = iter(event.blocks)
            request.blocks = [b or next(coming) for b in request.blocks]
            request.host_blocks = []

    def _drop_swap(self, event: SwapDropped, record: StepRecord) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            request.status = RequestStatus.PREEMPTED
            request.num_computed = 0
            request.blocks = _on_device(request.blocks)
            request.host_blocks = []

    def _allocate(self, event: BlocksAllocated, record: StepRecord) -> None:
        self._blocks.take(event.request_id, event.blocks)
        if event.request_id in self.requests:
            self.requests[event.request_id].blocks.extend(event.blocks)

    def _share(self, event: BlocksShared, record: StepRecord) -> None:
        self._blocks.share(event.request_id, event.blocks)
        if event.request_id in self.requests:
            self.requests[event.request_id].blocks.extend(event.blocks)

    def _cache(self, event: BlocksCached, record: StepRecord) -> None:
        self._blocks.cache(event.blocks, event.parents)

    def _evict(self, event: BlocksEvicted, record: StepRecord) -> None:
        self._blocks.evict(event.blocks)

    def _copy(self, event: BlockCopied, record: StepRecord) -> None:
        self._blocks.release([event.source])
        self._blocks.take(event.request_id, [event.destination])
        request = self.requests.get(event.request_id)
        if request is not None:
            request.blocks = [event.destination if b == event.source else b for b in request.blocks]

    def _free(self, event: BlocksFreed, record: StepRecord) -> None:
        self._blocks.release(event.blocks)
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if len(event.blocks) == len(request.blocks):
            request.blocks = []
        else:
            gone = set(event.blocks)
            request.blocks = [b for b in request.blocks if b not in gone]

    def _begin_batch(self, event: BatchStarted, record: StepRecord) -> None:
        self.batch = event

    def _end_batch(self, event: BatchEnded, record: StepRecord) -> None:
        self.batch = None
        self.batches.append(event)

    def _reconfigure(self, event: Reconfigured, record: StepRecord) -> None:
        self.discipline, self.pending_discipline = event.discipline, event.pending_discipline
        self.order, self.preemption = event.order, event.preemption
        self.max_num_seqs = event.max_num_seqs or self.max_num_seqs
        self.scheduler = event.scheduler or self.scheduler

    def _shrink(self, event: PoolShrunk, record: StepRecord) -> None:
        self._blocks = BlockState(event.num_blocks)
        self.batch = None
        longest = event.num_blocks * self.block_size + 1  # the keys of a last token are never needed
        for request in self.requests.values():
            request.max_tokens = min(request.max_tokens, longest - request.prompt_tokens)
        for request_id in event.withdrawn:
            if (known := self.requests.get(request_id)) is not None:
                known.output_tokens -= 1

    def _reject(self, event: Rejected, record: StepRecord) -> None:
        self.requests.pop(event.request_id, None)

    def _end(self, event: Ended, record: StepRecord) -> None:
        request = self.requests.get(event.request_id)
        if request is not None:
            request.status = RequestStatus.ENDED
            request.finish_reason = event.reason
            request.output_tokens = event.output_tokens

    def _finish(self, event: Finished, record: StepRecord) -> None:
        self._clear_deferred(event.request_id)
        request = self.requests.pop(event.request_id, None)
        if request is None:
            return
        batch = self.batch
        if batch is not None and self.requests.keys().isdisjoint(batch.request_ids):
            self.batch = None  # all of it were aborted
        request.blocks, request.host_blocks = [], []
        request.status = RequestStatus.FINISHED
        request.finish_reason = event.reason
        request.output_tokens = event.output_tokens
        aborted = event.reason == FinishReason.ABORT
        request.finished_time = record.time if aborted else record.end
        own = request.request_id in self._ended_by_rows
        if record.in_flight and own:
            self._last_tokens_due.append(request)
        elif record.landed_at and not own and not aborted:
            request.finished_time = record.landed_at
        self.finished.append(request)


def _on_device(table: list[int]) -> list[int]:
    """The blocks of a table without the empty places of those in host memory."""
    return [block for block in table if block]


_HANDLERS: dict[type, Callable[[RunState, Any, StepRecord], None]] = {
    Arrived: RunState._arrive,
    Reprioritised: RunState._rank,
    Admitted: RunState._admit,
    Deferred: RunState._defer,
    Preempted: RunState._preempt,
    SwappedOut: RunState._swap_out,
    SwappedIn: RunState._swap_in,
    SwapDropped: RunState._drop_swap,
    Recovered: lambda state, event, record: None,
    BatchStarted: RunState._begin_batch,
    BatchEnded: RunState._end_batch,
    Reconfigured: RunState._reconfigure,
    PoolShrunk: RunState._shrink,
    BlocksAllocated: RunState._allocate,
    BlocksShared: RunState._share,
    BlocksCached: RunState._cache,
    BlocksEvicted: RunState._evict,
    BlockCopied: RunState._copy,
    BlocksFreed: RunState._free,
    Rejected: RunState._reject,
    Ended: RunState._end,
    Finished: RunState._finish,
}
