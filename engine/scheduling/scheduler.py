"""The scheduler: lays the desk for a discipline, validates and executes its plan, and takes the step's results in.

    add ──▶ waiting ──admit──▶ running ──update──▶ finish
               ▲                  │
               └─────preempt──────┘      blocks freed, epoch bumped, computed tokens 0

Every change leaves an event in ``events``, which the core takes away after each step. What a step costs does not depend
on how many requests wait nor on how large the pool or its cache is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.config import SchedulerConfig
from engine.events import Admitted, AnyEvent, Arrived, Deferred, Finished, Preempted, Rejected, RowKind
from engine.memory.kv_cache import KVCacheManager
from engine.request import FinishReason, Request, RequestStatus
from engine.scheduling.counters import Counters
from engine.scheduling.discipline import Discipline, PlanningDesk
from engine.scheduling.orders import QueueOrder, WaitingQueue
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.disciplines.vllm import VllmDiscipline

DISCIPLINES: dict[str, type[Discipline]] = {"vllm": VllmDiscipline}
"""One file each in this package."""

_DECODE, _PREFILL, _RECOMPUTE = int(RowKind.DECODE), int(RowKind.PREFILL), int(RowKind.RECOMPUTE)


def _end_reason(request: Request, token: int) -> FinishReason | None:
    """Why ``token``, which has just been appended, ends the request; None if it does not."""
    length = len(request.token_ids)
    if token in request.stop_token_ids and length >= request.min_length:
        return FinishReason.STOP
    return FinishReason.LENGTH if length >= request.length_limit else None


class PlanError(RuntimeError):
    """A discipline planned what must not run: a fault of its code, never of a request."""


@dataclass(frozen=True, slots=True)
class StepUpdate:
    """What one step gave; rows as in the :class:`SchedulerOutput`."""

    new_tokens: list[list[int]]
    """Output tokens per row, nothing behind the one that ended it."""
    num_computed: list[int]
    """Computed tokens per row after the step."""
    ended: dict[int, FinishReason] = field(default_factory=dict)
    """Row → why its request is over. The caller finishes it, for it may know better: a stop string."""
    first_rows: list[int] = field(default_factory=list)
    """Rows that gave a request its first token."""


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        token_budget: int,
        cache_key: bytes = b"",
    ) -> None:
        self.config = config
        self.token_budget = token_budget
        self.events: list[AnyEvent] = []
        self.memory = KVCacheManager(
            num_blocks, block_size, prefix_cache=prefix_cache, cache_key=cache_key, events=self.events
        )
        self.order = QueueOrder(config)
        self.waiting = WaitingQueue(self.order)
        self.running: list[Request] = []
        self.deferred: Deferred | None = None
        """Why the head of the queue waits, as last told."""
        self.counters = Counters()
        self._discipline = DISCIPLINES[config.discipline]()
        self._watermark_blocks = int(config.watermark * num_blocks)
        self._now = 0.0

    # Queues -------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that fits the pool; its prompt has been through :meth:`KVCacheManager.prepare`."""
        self.waiting.push(request)
        self.counters.arrived += 1
        self.events.append(
            Arrived(
                request.request_id,
                request.num_prompt_tokens,
                request.max_tokens,
                request.priority,
                request.user,
                request.arrival_time,
            )
        )

    def refuse(self, request_id: int, message: str) -> None:
        """Account for a request that never waits."""
        self.counters.arrived += 1
        self.counters.finished += 1
        self.counters.rejected += 1
        self.events.append(Rejected(request_id, message))

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is; a second time changes nothing."""
        status = request.status
        if status is RequestStatus.FINISHED:
            return
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.epoch += 1
        if status is RequestStatus.RUNNING:
            self.running.remove(request)
        else:
            self.waiting.forget_one()
        self.memory.release(request)
        self._clear_deferred(request)
        self.counters.finished += 1
        self.events.append(Finished(request.request_id, str(reason), request.num_output_tokens))

    def admit(self, request: Request, hits: Sequence[int], num_new_tokens: int) -> bool:
        if not self.memory.admit(request, hits, num_new_tokens):
            return False
        resumed = request.status is RequestStatus.PREEMPTED
        request.status = RequestStatus.RUNNING
        self.waiting.forget_one()
        self.running.append(request)
        cached = request.num_computed_tokens
        if not resumed:
            request.admitted_time = self._now
            request.num_cached_tokens = cached
            if self.memory.prefix_cache:
                self.counters.prefix_query_tokens += request.num_prompt_tokens
                self.counters.prefix_hit_tokens += cached
        self._clear_deferred(request)
        self.events.append(Admitted(request.request_id, cached, self._now - request.queued_since, resumed))
        return True

    def preempt(self, victim: Request, beneficiary: Request, rule: str) -> None:
        lost, blocks = victim.num_computed_tokens, len(victim.block_ids)
        self.running.remove(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.epoch += 1
        victim.num_preemptions += 1
        victim.lost_tokens = max(victim.lost_tokens, lost)
        victim.prefill_end = max(victim.prefill_end, lost)
        victim.queued_since = self._now
        self.counters.preemptions += 1
        self.events.append(
            Preempted(victim.request_id, beneficiary.request_id, rule, self.config.preemption, lost, blocks)
        )
        self.memory.release(victim)
        self.waiting.push(victim)

    def defer(self, request: Request, reason: str, needed: int, available: int) -> None:
        told = self.deferred
        if told is None or told.request_id != request.request_id or told.reason != reason:
            self.deferred = Deferred(request.request_id, reason, needed, available)
            self.events.append(self.deferred)

    def _clear_deferred(self, request: Request) -> None:
        if self.deferred is not None and self.deferred.request_id == request.request_id:
            self.deferred = None

    def drop_output(self, request: Request, count: int) -> None:
        """Forget the last ``count`` tokens of an answer whose end was found before them."""
        if count:
            del request.token_ids[-count:]
            self.counters.output_tokens -= count

    def take_events(self) -> list[AnyEvent]:
        """What has changed since the last call."""
        events = self.events.copy()
        self.events.clear()
        return events

    # One step -----------------------------------------------------------------------------------------------------

    def schedule(self, step: int, now: float) -> SchedulerOutput | None:
        """Plan one step at ``now``; None if nothing can be computed."""
        self._now = now
        desk = PlanningDesk(
            running=self.running,
            waiting=self.waiting,
            memory=self.memory,
            tools=self,
            order=self.order,
            token_budget=self.token_budget,
            max_num_seqs=self.config.max_num_seqs,
            chunked_prefill=self.config.chunked_prefill,
            watermark_blocks=self._watermark_blocks,
        )
        self._discipline.plan(desk)
        if not desk.plan:
            return None
        output = self._output(step, desk.plan)
        self._validate(output)
        return output

    def _output(self, step: int, plan: dict[Request, int]) -> SchedulerOutput:
        requests, counts = list(plan), list(plan.values())
        starts = [request.num_computed_tokens for request in requests]
        return SchedulerOutput(
            step=step,
            requests=requests,
            epochs=[request.epoch for request in requests],
            starts=starts,
            num_new_tokens=counts,
            block_tables=[request.block_ids for request in requests],
            samples=[s + n == len(r.token_ids) for r, s, n in zip(requests, starts, counts, strict=True)],
            block_copies=self.memory.take_copies(),
            kinds=[
                _DECODE if s >= r.prefill_end else _RECOMPUTE if s < r.lost_tokens else _PREFILL
                for r, s in zip(requests, starts, strict=True)
            ],
        )

    def _validate(self, output: SchedulerOutput) -> None:
        total = output.total_tokens
        if total > self.token_budget:
            raise PlanError(f"{self._discipline.name} planned {total} tokens; the budget is {self.token_budget}")
        if len(self.running) > self.config.max_num_seqs:
            raise PlanError(f"{len(self.running)} requests run; at most {self.config.max_num_seqs} may")
        running = RequestStatus.RUNNING
        wrong = [
            f"{request!r} × {count}"
            for request, start, count in zip(output.requests, output.starts, output.num_new_tokens, strict=True)
            if request.status is not running
            or count < 1
            or start + count > request.capacity
            or start + count > len(request.token_ids)
        ]
        if wrong:
            raise PlanError(f"{self._discipline.name} planned what cannot run: {'; '.join(wrong)}")

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput) -> StepUpdate:
        """Take in what the runner computed. Rows whose request was preempted or aborted meanwhile are dropped by epoch,
        rows in error keep nothing of the step."""
        self.counters.steps += 1
        ends = [start + count for start, count in zip(output.starts, output.num_new_tokens, strict=True)]
        update = StepUpdate(list(result.token_ids), ends)
        dropped = self._dropped_rows(output, result, update)
        for row, (request, kind, end, sampled) in enumerate(
            zip(output.requests, output.kinds, ends, result.token_ids, strict=True)
        ):
            if dropped and row in dropped:
                continue
            request.num_computed_tokens = end
            tokens = request.token_ids
            if kind != _DECODE:
                self._count_prefill(request, output.starts[row], end)
                if sampled and len(tokens) == request.num_prompt_tokens:
                    update.first_rows.append(row)
            for token in sampled:
                tokens.append(token)
                if token in request.stop_token_ids or len(tokens) >= request.length_limit:
                    reason = _end_reason(request, token)
                    if reason is not None:
                        update.ended[row] = reason
                        update.new_tokens[row] = sampled[: len(tokens) - end]
                        break
            if end >= request.cache_edge:
                self.memory.register_full_blocks(request)
        self.counters.output_tokens += sum(map(len, update.new_tokens))
        return update

    @staticmethod
    def _dropped_rows(output: SchedulerOutput, result: ModelRunnerOutput, update: StepUpdate) -> set[int]:
        """Rows that give nothing: stale ones, and those in error, which end their request."""
        epochs = [request.epoch for request in output.requests]
        if epochs == output.epochs and not result.errors:
            return set()
        dropped = {row for row, epoch in enumerate(output.epochs) if epoch != epochs[row]}
        for row in result.errors.keys() - dropped:
            update.ended[row] = FinishReason.ERROR
            dropped.add(row)
        for row in dropped:
            update.new_tokens[row] = []
        return dropped

    def _count_prefill(self, request: Request, start: int, end: int) -> None:
        """Tell the prompt tokens computed for the first time from those computed again."""
        again = max(min(end, request.lost_tokens) - start, 0)
        self.counters.recomputed_tokens += again
        self.counters.prompt_tokens += max(min(end, request.num_prompt_tokens) - start - again, 0)
