"""The engine's core: add, abort, step. No threads, no I/O, the clock is injected and the runner is handed in.

What one step does, and where its time goes::

    began                    scheduled            executed          updated       done
      │ inbox   schedule         │ runner.execute     │ inbox  update   │ text       │ record, outputs
      └────── schedule ──────────┴ prepare│forward│sample ┴─ schedule ──┴ detokenise ┘

With ``overlap`` the runner only launches a step, and what it gives arrives in the next one
(:mod:`engine.in_flight`). A step is taken in when it is launched: so the state between two steps is that of the last
record, and a record holds what one call of :meth:`EngineCore.step` has scheduled and changed.

Adding and aborting only leave a note in the inbox, which a step takes up where it begins and once more between
execution and update. So the state between two steps is always that of the last record, and an abort that comes while
the step runs still discards that step's token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from engine.admission import EngineLimits, make_answers
from engine.config import SPECULATION_NGRAM, SPECULATION_OFF, ConfigError, SchedulerConfig
from engine.delivery import empty_columns, keyframe_of, record_columns, step_outputs, step_record, step_timings
from engine.events import Keyframe, RunTotals, StepRecord, StepTimings
from engine.in_flight import InFlight, Landed, OverlappingRunner, Runner, arrived, expected, under_way, waits_for_tokens
from engine.inbox import Abortion, Addition, Change, Note, Ranking, Refusal
from engine.messages import Output
from engine.recovery import LAST_TOKEN_LOST, PoolRecovery
from engine.request import BRANCH_STRIDE, FinishReason, Request, RequestStatus, SamplingParams
from engine.roster import Roster
from engine.scheduling.costs import PreemptionCosts
from engine.scheduling.invariants import check_invariants
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.results import StepUpdate
from engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.text.codec import TextCodec


@dataclass(frozen=True)
class StepResult:
    record: StepRecord | None
    """None if there was nothing to do."""
    outputs: list[Output]
    notice: str = ""
    """What the user should know: memory ran out in the step, and the pool is smaller than it was."""


class EngineCore:
    def __init__(
        self,
        runner: Runner,
        *,
        scheduler: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool,
        max_model_len: int,
        vocab_size: int,
        token_budget: int,
        num_host_blocks: int = 0,
        costs: PreemptionCosts | None = None,
        proposer: str | None = None,
        overlap: bool = False,
        resize_pool: Callable[[int], int] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        codec: TextCodec | None = None,
        cache_key: bytes = b"",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``num_blocks`` does not count the null block. ``num_host_blocks`` and ``costs`` are for preemption by
        swapping. ``proposer`` names who the runner has to draft (as ``scheduler.speculative`` does, which may change
        only between it and ``off``); None: whoever is asked for, n-grams where nobody is. ``overlap``: whether a step
        is scheduled while the one before is computed; ``runner`` is then an :class:`OverlappingRunner` and drafts by
        no model. ``resize_pool``: as :class:`engine.recovery.PoolRecovery` takes it. ``cache_key`` stands for all that
        decides the contents of a block besides its tokens. ``seed`` seeds the requests that bring none."""
        asked = scheduler.speculative
        self._proposer = proposer or (SPECULATION_NGRAM if asked == SPECULATION_OFF else asked)
        self._refuse_other_drafts(scheduler)
        self._runner = runner
        self._scheduler = Scheduler(
            scheduler,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=prefix_cache,
            token_budget=token_budget,
            cache_key=cache_key,
            num_host_blocks=num_host_blocks,
            costs=costs,
        )
        self.limits = EngineLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
        )
        # A tokenizer may name ids that the model's head does not have: they are never drawn and cannot be banned.
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._seed = seed
        self._clock = clock
        self._inbox: deque[Note] = deque()
        self._roster = Roster(self._scheduler, codec)
        self._overlaps = overlap
        self._recovery = PoolRecovery(resize_pool)
        self._in_flight: InFlight | None = None
        self._landed_at = 0.0
        """When tokens of the step before arrived, until a record tells; 0: none did."""
        self._step = 0
        self._last_time = 0.0
        self._last_totals = RunTotals()
        self._last_plan: SchedulerOutput | None = None

    # Requests -----------------------------------------------------------------------------------------------------

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
    ) -> None:
        """Queue a request. One that can never run is refused by an output with ``finish_reason`` ``error`` of the next
        step; ``max_tokens`` is cut to the room of model and pool. ValueError if ``request_id`` is in use or not in
        0 … 2^32 - 1."""
        if request_id in self._roster:
            raise ValueError(f"request {request_id} is in the engine already; an id is used once")
        if not 0 <= request_id < BRANCH_STRIDE:
            raise ValueError(f"request id {request_id} is not one of 0 to {BRANCH_STRIDE - 1:,}")
        message = self.limits.refusal(prompt_token_ids, params, ends_after)
        if message is not None:
            self.reject(request_id, message)
            return
        answers = make_answers(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=self.limits.max_tokens(len(prompt_token_ids), params),
            arrival_time=self._clock() if arrival_time is None else arrival_time,
            priority=priority,
            user=user,
            ends_after=ends_after,
            eos_token_ids=self._eos_token_ids,
            engine_seed=self._seed,
        )
        for request in answers:
            self._scheduler.memory.prepare(request)
        self._roster.enter(answers, stream_text)
        self._inbox.append(Addition(answers[0]))

    def reject(self, request_id: int, message: str) -> None:
        """Refuse a request that did not get as far as :meth:`add_request`; the next step says so."""
        self._inbox.append(Refusal(request_id, message))

    def abort(self, request_id: int) -> None:
        """End a request in whatever state it is: no token of it comes any more, only the output that ends it. An
        unknown or finished one is ignored."""
        if request_id in self._roster:
            self._inbox.append(Abortion(request_id))

    def set_priority(self, request_id: int, priority: int) -> None:
        """Another priority for a request, all its answers included, wherever it is: it counts from the next step on. An
        unknown or finished one is ignored."""
        if request_id in self._roster:
            self._inbox.append(Ranking(request_id, priority))

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """Change the scheduler's knobs with the next step: the discipline once the batch has drained, everything else
        at once. ConfigError where a knob cannot change while a model is loaded."""
        self._refuse_other_drafts(scheduler)
        self._inbox.append(Change(scheduler))

    def _refuse_other_drafts(self, scheduler: SchedulerConfig) -> None:
        asked, loaded = scheduler.speculative, self._proposer
        if asked not in (SPECULATION_OFF, loaded):
            raise ConfigError(
                f"speculative is {asked!r}, but this engine can only change between {SPECULATION_OFF} and {loaded}: "
                f"a draft model is loaded with the model. Load it again with --speculative {asked}."
            )

    @property
    def has_work(self) -> bool:
        """Whether a step has something to compute or to tell."""
        return bool(self._roster.requests or self._inbox or self._in_flight or self._scheduler.pending_discipline)

    @property
    def has_notes(self) -> bool:
        """Whether something was left that :meth:`take_in` would take up."""
        return bool(self._inbox or self._in_flight)

    @property
    def num_requests(self) -> int:
        """Answers that have not ended."""
        return len(self._roster.requests)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The knobs in force or, the discipline, wanted."""
        return self._scheduler.config

    # One step -----------------------------------------------------------------------------------------------------

    def step(self, *, overlap: bool = True) -> StepResult:
        """Schedule, execute, take the results in, detokenise; hand out what that gave and the record of it. ``overlap``
        False: nothing of the step is left in flight, also by a core that overlaps."""
        began = self._clock()
        outputs = self._begin(began)
        flying = overlap and self._overlaps and self._scheduler.config.speculative == SPECULATION_OFF
        early = Landed() if flying and not waits_for_tokens(self._in_flight) else self._land()
        runner, recovery = cast(OverlappingRunner, self._runner), self._recovery
        if recovery.shortage:
            return self._recover(began, self._clock(), outputs + early.outputs)
        plan = self._scheduler.schedule(self._step + 1, began)
        scheduled = self._clock()
        if plan is None:
            return self._without_rows(began, scheduled, outputs, early or self._land())
        flight = recovery.attempt(runner.launch, plan, plan, done=False) if flying else None
        late = self._land()  # the step before: this one is computed meanwhile
        outputs += early.outputs + late.outputs
        result = expected(plan) if flying else recovery.attempt(runner.execute, plan, plan)
        if result is None or recovery.shortage:
            return self._recover(began, scheduled, outputs)
        executed = self._clock()
        self._take_inbox(began, outputs)
        update = self._scheduler.update(plan, result, executed)
        updated = self._clock()
        errors = dict(result.errors)
        texts = {} if flying else self._roster.answers.read(plan, update, errors, self._scheduler.drop_output)
        timings = step_timings(result, early, late, began, scheduled, executed, updated, self._clock())
        ended_at = began + timings.total
        for row in update.first_rows:
            self._roster.start_branches(plan.requests[row], None if flying else ended_at)
        room = self._scheduler.room()
        left = self._scheduler.settle({plan.requests[row]: reason for row, reason in update.ended.items()})
        if flying:
            self._in_flight = InFlight(flight, plan, update, left)
        else:
            given = step_outputs(plan, update, result, texts, errors, ended_at, branched=bool(self._roster.families))
            messages = {plan.requests[row]: why for row, why in errors.items()}
            outputs += self._roster.let_go(left, given, ended_at, messages)
        self._last_plan = plan
        return StepResult(self._record(began, timings, (plan, result, update), room), outputs)

    def _recover(self, began: float, scheduled: float, outputs: list[Output]) -> StepResult:
        """Memory ran out in a step, and nothing of it counts: all wait again, for a smaller pool."""
        scheduler, roster = self._scheduler, self._roster
        self._take_inbox(began, outputs)
        complete = [request for request in scheduler.running if request.status is RequestStatus.ENDED]
        for request in complete:  # only their rows went on
            scheduler.finish(request, request.finish_reason or FinishReason.LENGTH)
        outputs += roster.let_go(complete, [], self._clock(), {})
        recovery = self._recovery.recover(scheduler, roster.unborn())
        self.limits = replace(self.limits, num_blocks=scheduler.memory.num_blocks)
        now = self._clock()
        outputs += roster.fail(recovery.ended, now)
        timings = StepTimings(schedule=scheduled - began, forward=now - scheduled)
        return StepResult(self._record(began, timings, None), outputs, recovery.notice)

    def take_in(self) -> StepResult:
        """Take up what was left since the last step (arrivals, aborts, priorities, knobs, a step in flight) and tell of
        it, as a step that computes nothing; nothing is scheduled."""
        began = self._clock()
        outputs = self._begin(began)
        return self._without_rows(began, self._clock(), outputs, self._land())

    def _land(self) -> Landed:
        """Wait for the step in flight and hand out what it gave; answers that its tokens end leave now."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return Landed()
        plan, scheduler, roster, begin = step.plan, self._scheduler, self._roster, self._clock()
        result = self._recovery.attempt(cast(OverlappingRunner, self._runner).collect, step.flight, plan)
        now = self._clock()
        if result is None:
            return Landed(self._withdraw(step, now), waited=now - begin, seconds=self._clock() - begin)
        update, errors = arrived(step, result, roster.requests, now), dict(result.errors)
        self._landed_at = now if any(update.new_tokens) else 0.0
        scheduler.counters.output_tokens -= sum(row in update.ended for row in errors)  # expected, and no token
        texts = roster.answers.read(plan, update, errors, scheduler.drop_output)
        left = [request for request in step.left if request.request_id in roster.requests]
        late: dict[Request, FinishReason] = {}
        for row, reason in update.ended.items():
            request = plan.requests[row]
            over = request.status is RequestStatus.ENDED and reason is not FinishReason.ERROR
            if not over and request.status is not RequestStatus.FINISHED:
                request.epoch += 1  # whatever of it was launched since counts no more
                late[request] = reason
        if late:
            left += scheduler.settle(late)
        given = step_outputs(plan, update, result, texts, errors, now, branched=bool(roster.families))
        outputs = roster.let_go(left, given, now, {plan.requests[row]: why for row, why in errors.items()})
        return Landed(outputs, waited=now - begin, seconds=self._clock() - begin)

    def _withdraw(self, step: InFlight, now: float) -> list[Output]:
        """Memory ran out in the step in flight, and its tokens will not come. Who goes on is computed again, but an
        answer that lacked only its last token has left its place already, and ends without it."""
        requests, ended = self._roster.requests, dict[Request, str]()
        for row in under_way(step, requests):
            request = step.plan.requests[row]
            self._scheduler.drop_output(request, 1)
            self._recovery.withdrawn.append(request)
            if row in step.update.ended:
                ended[request] = LAST_TOKEN_LOST.format(cause=self._recovery.shortage)
        left = [request for request in step.left if request.request_id in requests and request not in ended]
        return self._roster.fail(ended, now, left)

    def _begin(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        self._take_inbox(now, outputs)
        if left := self._scheduler.settle({}):  # an abort took the last row that the others stayed for
            outputs += self._land().outputs  # their last tokens
            left = [request for request in left if request.request_id in self._roster.requests]
            outputs += self._roster.let_go(left, [], now, {})
        return outputs

    def _without_rows(self, began: float, done: float, outputs: list[Output], landed: Landed) -> StepResult:
        given = outputs + landed.outputs
        if self._recovery.shortage:
            return self._recover(began, done, given)
        told = self._scheduler.counters.snapshot() == self._last_totals  # one that was under way may not have come
        if told and not self._scheduler.events and not outputs and not self._landed_at:
            return StepResult(None, given)
        return StepResult(self._record(began, StepTimings(done - began), None), given)

    def _take_inbox(self, now: float, outputs: list[Output]) -> None:
        inbox, scheduler = self._inbox, self._scheduler
        while inbox:
            note = inbox.popleft()
            if isinstance(note, Addition):
                scheduler.add(note.request)
            elif isinstance(note, Refusal):
                scheduler.refuse(note.request_id, note.message)
                outputs.append(Output(note.request_id, now, [], finish_reason=FinishReason.ERROR, error=note.message))
            elif isinstance(note, Change):
                scheduler.reconfigure(note.scheduler)
            elif isinstance(note, Ranking):
                self._roster.rank(note.request_id, note.priority)
            else:
                for request in self._roster.answers_to(note.request_id):
                    outputs += self._roster.abort(request, now)

    def _record(
        self,
        began: float,
        timings: StepTimings,
        done: tuple[SchedulerOutput, ModelRunnerOutput, StepUpdate] | None,
        room: tuple[int, int, int] = (0, 0, 0),
    ) -> StepRecord:
        self._step += 1
        self._last_time = began
        columns = record_columns(*done) if done is not None else empty_columns()
        flying, landed_at, self._landed_at = self._in_flight is not None, self._landed_at, 0.0
        record = step_record(
            self._scheduler, self._step, began, timings, columns, room, in_flight=flying, landed_at=landed_at
        )
        self._last_totals = record.totals
        return record

    # State --------------------------------------------------------------------------------------------------------

    def keyframe(self) -> Keyframe:
        """The whole state after the last record."""
        return keyframe_of(self._scheduler, self._step, self._last_time)

    def check_invariants(self) -> None:
        """Raise AssertionError where queues, tables and pool contradict each other (for tests: costs O(pool))."""
        check_invariants(self._scheduler, self._last_plan)
        coming = {note.request.request_id for note in self._inbox if isinstance(note, Addition)}
        landing = set() if self._in_flight is None else {request.request_id for request in self._in_flight.left}
        self._roster.check(coming | (landing & set(self._roster.requests)))
