"""The scheduler: lays the desk for a discipline, validates and executes its plan, and takes the step's results in.

    add ──▶ waiting ──admit──▶ running ──update──▶ settle ──▶ finished
               ▲                  │
               ├──── recompute ───┤      epoch bumped, blocks freed, computed tokens 0
               └── swapped ◀ swap ┘      epoch bumped, blocks in host memory, computed tokens kept

Every change leaves an event in ``events``, which the core takes away after each step. What a step costs does not depend
on how many requests wait nor on how large the pool or its cache is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.config import SPECULATION_OFF, SchedulerConfig
from engine.events import (
    RULE_OUT_OF_MEMORY,
    Admitted,
    AnyEvent,
    Arrived,
    Deferred,
    Ended,
    Finished,
    PoolShrunk,
    Preempted,
    Reconfigured,
    Recovered,
    Rejected,
    Reprioritised,
    SwapDropped,
)
from engine.memory.kv_cache import Joining, KVCacheManager
from engine.request import WAITING_STATES, FinishReason, Request, RequestStatus
from engine.scheduling.columns import PlanError, lay_out
from engine.scheduling.costs import PreemptionCosts
from engine.scheduling.counters import Counters
from engine.scheduling.discipline import Discipline, PlanningDesk, make_discipline
from engine.scheduling.orders import QueueOrder, WaitingLine
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.preemption import choose_preemption
from engine.scheduling.results import StepUpdate, take_results


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
        num_host_blocks: int = 0,
        costs: PreemptionCosts | None = None,
    ) -> None:
        self.config = config
        self._budget_at_load = token_budget
        self.token_budget = config.max_num_batched_tokens or token_budget
        self.events: list[AnyEvent] = []
        self.memory = KVCacheManager(
            num_blocks,
            block_size,
            prefix_cache=prefix_cache,
            cache_key=cache_key,
            events=self.events,
            num_host_blocks=num_host_blocks,
        )
        self.order = QueueOrder(config)
        self.waiting = WaitingLine(self.order, config)
        self.running: list[Request] = []
        self.deferred: Deferred | None = None
        """Why the head of the queue waits, as last told."""
        self.counters = Counters()
        self.discipline: Discipline = make_discipline(config)
        self.discipline_name = config.discipline
        """The one that plans; ``config.discipline`` is the one that is wanted."""
        self._costs = costs
        self._recovering: list[Request] = []
        """Preempted, and not yet where they were."""
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
                request.parent.request_id if request.parent is not None else 0,
                self.memory.prefix_of(request),
            )
        )

    def set_priority(self, request: Request, priority: int) -> None:
        """Another priority for a request that waits or runs."""
        if request.priority == priority:
            return
        request.priority = priority
        if request.status in WAITING_STATES:
            self.waiting.place_anew(request)
        self.events.append(Reprioritised(request.request_id, priority))

    def refuse(self, request_id: int, message: str) -> None:
        """Account for a request that never waits."""
        self.counters.arrived += 1
        self.counters.finished += 1
        self.counters.rejected += 1
        self.events.append(Rejected(request_id, message))

    def settle(self, ended: Mapping[Request, FinishReason]) -> list[Request]:
        """Account for answers that a step has completed: the requests that have left with it, ended now or before."""
        failed = [request for request, reason in ended.items() if reason is FinishReason.ERROR]
        for request, reason in ended.items():
            request.finish_reason = reason
        complete = [request for request in ended if request not in failed] if failed else list(ended)
        if self.discipline.ends_together:
            for request in complete:
                request.status = RequestStatus.ENDED
                self.events.append(Ended(request.request_id, str(ended[request]), request.num_output_tokens))
        leaving = failed + self.discipline.leaving(
            [request for request in self.running if request not in failed] if failed else self.running,
            complete,
            self.counters,
            self.events,
        )
        for request in leaving:
            self.finish(request, request.finish_reason or FinishReason.LENGTH)
        return leaving

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in whatever state it is, and give up what it holds; a second time changes nothing."""
        status = request.status
        if status is RequestStatus.FINISHED:
            return
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.epoch += 1
        request.parent = None  # a chain of requests must not keep each other alive
        if status in (RequestStatus.RUNNING, RequestStatus.ENDED):
            self.running.remove(request)
        else:
            self.waiting.forget(request, status)
        self.memory.release(request)
        self._clear_deferred(request)
        if request.preempted_at is not None:
            self._recovering.remove(request)
        self.counters.finished += 1
        self.events.append(Finished(request.request_id, str(reason), request.num_output_tokens))

    def admit(self, request: Request, joining: Joining, num_tokens: int) -> bool:
        status = request.status
        if len(self.running) >= self.config.max_num_seqs:
            raise PlanError(f"{self.discipline_name} admits {request!r} to a batch of {len(self.running)}")
        if not self.memory.join(request, joining, num_tokens):
            return False
        request.status = RequestStatus.RUNNING
        request.padded = 0
        self.waiting.forget(request, status)
        self.running.append(request)
        cached = request.num_computed_tokens
        resumed = request.num_preemptions > 0
        if not resumed:
            request.admitted_time = self._now
            request.num_cached_tokens = cached
            self.waiting.queue.charge(request, input_tokens=request.num_prompt_tokens)
            if self.memory.prefix_cache:
                self.counters.prefix_query_tokens += request.num_prompt_tokens
                self.counters.prefix_hit_tokens += cached
        self._clear_deferred(request)
        self.events.append(Admitted(request.request_id, cached, self._now - request.queued_since, resumed))
        return True

    def preempt(self, victim: Request, beneficiary: Request, rule: str, mode: str | None = None) -> None:
        """``mode``: as :attr:`engine.config.SchedulerConfig.preemption`, which it is where it is None."""
        computed, blocks = victim.num_computed_tokens, len(victim.block_ids)
        choice = choose_preemption(victim, mode or self.config.preemption, self.memory, self._costs)
        moved = choice.swapped_blocks
        if moved:
            blocks -= self.memory.blocks_for(computed) - moved  # it goes on referring to those that others share
        self.running.remove(victim)
        victim.epoch += 1
        victim.num_preemptions += 1
        victim.queued_since = self._now
        if victim.preempted_at is None:
            victim.preempted_at = self._now
            self._recovering.append(victim)
        self.counters.preemptions += 1
        self.events.append(
            Preempted(
                victim.request_id,
                beneficiary.request_id,
                rule,
                "swap" if moved else "recompute",
                computed,
                blocks,
                moved,
                choice.recompute_seconds,
                choice.swap_seconds,
                choice.fallback,
            )
        )
        if moved:
            self.memory.swap_out(victim)
            victim.status = RequestStatus.SWAPPED
        else:
            self._lose(victim)
        self.waiting.push(victim)

    def drop_swapped(self, request: Request, reason: str) -> None:
        """A swapped request gives up its blocks on host and device, and waits to be computed again."""
        self.events.append(SwapDropped(request.request_id, request.host_blocks, reason))
        self._lose(request)
        request.epoch += 1
        self.waiting.forget(request, RequestStatus.SWAPPED)
        self.waiting.push(request)

    def start_over(self, num_blocks: int, cause: str, withdrawn: Sequence[Request]) -> None:
        """Memory ran out in a step (``cause``), and the KV storage was made anew with ``num_blocks`` blocks: what it
        held is lost, and all that run or are swapped wait to be computed again. Complete answers have left before.
        ``withdrawn``: who has lost a token that was told of."""
        for request in list(self.running):
            self.preempt(request, request, RULE_OUT_OF_MEMORY, "recompute")
        for request in self.waiting.swapped.in_order():
            self.drop_swapped(request, "memory ran out in the step")
        before = self.memory.num_blocks
        self.memory.renew(num_blocks)
        self.events.append(PoolShrunk(num_blocks, before, cause, [request.request_id for request in withdrawn]))

    def _lose(self, request: Request) -> None:
        """What a request has computed is gone."""
        lost = request.num_computed_tokens
        request.status = RequestStatus.PREEMPTED
        request.lost_tokens = max(request.lost_tokens, lost)
        request.prefill_end = max(request.prefill_end, lost)
        self.memory.release(request)

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

    # Knobs --------------------------------------------------------------------------------------------------------

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Change the knobs: the discipline once the batch has drained, everything else at once."""
        before, self.config = self.config, config
        self.token_budget = config.max_num_batched_tokens or self._budget_at_load
        knobs = ("order", "ageing", "user_weights")
        if any(getattr(before, name) != getattr(config, name) for name in knobs):
            self.order = QueueOrder(config)
            self.waiting.arrange(self.order, config)
        self.waiting.closed = config.discipline != self.discipline_name
        if not self.waiting.closed:
            self.discipline.config = config
        self._tell_knobs()

    @property
    def pending_discipline(self) -> str:
        """The one that takes over when the batch has drained; empty without one."""
        return self.config.discipline if self.waiting.closed else ""

    def _change_discipline(self) -> None:
        self.discipline = make_discipline(self.config)
        self.discipline_name = self.config.discipline
        self.waiting.closed = False
        if not self.discipline.preempts:
            for request in self.waiting.swapped.in_order():
                self.drop_swapped(request, f"{self.discipline_name} does not swap")
        self._tell_knobs()

    def _tell_knobs(self) -> None:
        config = self.config
        self.events.append(
            Reconfigured(
                self.discipline_name,
                config.order,
                config.preemption,
                self.pending_discipline,
                config.max_num_seqs,
                config,
            )
        )

    # One step -----------------------------------------------------------------------------------------------------

    def schedule(self, step: int, now: float) -> SchedulerOutput | None:
        """Plan one step at ``now``; None if nothing can be computed."""
        self._now = now
        if self.waiting.closed:
            if not self.running:
                self._change_discipline()
            elif (first := self.waiting.first()) is not None:
                self.defer(first, "draining", len(self.running), 0)
        config = self.config
        desk = PlanningDesk(
            running=self.running,
            waiting=self.waiting,
            memory=self.memory,
            tools=self,
            order=self.order,
            # A budget lowered below their number keeps others out; each that runs goes on with a token of every step.
            token_budget=max(self.token_budget, len(self.running)),
            max_num_seqs=config.max_num_seqs,
            chunked_prefill=config.chunked_prefill and not self.discipline.whole_prompts,
            chunk_size=config.chunk_size,
            watermark_blocks=int(config.watermark * self.memory.num_blocks),
            totals=self.counters,
        )
        self.discipline.plan(desk)
        if not desk.plan and not desk.padding:
            return None
        limits: list[int] = []
        if config.speculative != SPECULATION_OFF and self.discipline.speculates:
            limits = self._draft_limits(desk)
        moves = self.memory.take_moves()
        self.counters.swapped_out_blocks += len(moves.swap_out)
        self.counters.swapped_in_blocks += len(moves.swap_in)
        return lay_out(self.discipline_name, step, desk, limits, moves)

    def _draft_limits(self, desk: PlanningDesk) -> list[int]:
        """How many drafts each row of the plan may have: what is left of the budget goes to those that decode, in
        order, within what they may still answer. Nobody yields for a draft: where no block is to be had it is left
        out, and while few are left the blocks are kept for tokens that are certain."""
        left, limits = desk.budget_left, list[int]()
        for request, count in desk.plan.items():
            computed = request.num_computed_tokens
            wanted = 0
            if left > 0 and count == 1 and computed + 1 == len(request.token_ids):
                wanted = min(self.config.draft_tokens, left, request.footprint - len(request.token_ids))
            if wanted > 0 and computed + 1 + wanted > request.capacity:
                spare = self.memory.pool.num_available > len(self.running)
                if not (spare and self.memory.reserve(request, 1 + wanted)):
                    wanted = request.capacity - computed - 1
            limits.append(max(wanted, 0))
            left -= limits[-1]
        return limits if any(limits) else []

    def update(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> StepUpdate:
        """Take in what the runner computed until ``now``. Rows whose request was preempted or aborted meanwhile are
        dropped by epoch, rows in error keep nothing of the step."""
        update = take_results(output, result, self.memory, self.counters)
        if self._recovering:
            self._tell_recovered(now)
        if self.order.name == "fair":
            for request, tokens in zip(output.requests, update.new_tokens, strict=True):
                self.waiting.queue.charge(request, output_tokens=len(tokens))
        return update

    def _tell_recovered(self, now: float) -> None:
        for request in list(self._recovering):
            if request.status is RequestStatus.RUNNING and request.num_computed_tokens >= request.lost_tokens:
                assert request.preempted_at is not None
                seconds = now - request.preempted_at
                self.events.append(Recovered(request.request_id, seconds, request.recomputed_tokens))
                self._recovering.remove(request)
                request.preempted_at, request.recomputed_tokens = None, 0

    def room(self) -> tuple[int, int, int]:
        """(places in the batch without a complete answer, KV slots in blocks not begun, empty slots in those begun),
        over the running requests."""
        running, size = self.running, self.memory.block_size
        computed = [request.num_computed_tokens for request in running]
        empty = sum([request.capacity for request in running]) - sum(computed)
        tail = sum([-count % size for count in computed])
        slots = len(running)
        if self.discipline.ends_together:
            slots = sum(request.status is not RequestStatus.ENDED for request in running)
        return slots, empty - tail, tail
