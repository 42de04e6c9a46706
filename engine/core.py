"""The engine's core: add, abort, step. No threads, no I/O, the clock is injected and the runner is handed in.

What one step does, and where its time goes::

    began                    scheduled            executed          updated       done
      │ inbox   schedule         │ runner.execute     │ inbox  update   │ text       │ record, outputs
      └────── schedule ──────────┴ prepare│forward│sample ┴─ schedule ──┴ detokenise ┘

Adding and aborting only leave a note in the inbox, which a step takes up where it begins and once more between
execution and update. So the state between two steps is always that of the last record, and an abort that comes while
the step runs still discards that step's token.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine.admission import EngineLimits, make_answers
from engine.answer import AnswerText
from engine.config import SPECULATION_NGRAM, SPECULATION_OFF, ConfigError, SchedulerConfig
from engine.delivery import (
    Withheld,
    empty_columns,
    keyframe_of,
    last_output,
    record_columns,
    step_outputs,
    step_timings,
)
from engine.events import Keyframe, StepRecord, StepTimings
from engine.inbox import Abortion, Addition, Change, Note, Ranking, Refusal
from engine.messages import Output
from engine.request import BRANCH_STRIDE, FinishReason, Request, RequestStatus, SamplingParams
from engine.scheduling.costs import PreemptionCosts
from engine.scheduling.invariants import check_invariants
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.results import StepUpdate
from engine.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.text.codec import TextCodec


class Runner(Protocol):
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


@dataclass(frozen=True)
class StepResult:
    record: StepRecord | None
    """None if there was nothing to do."""
    outputs: list[Output]


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
        eos_token_ids: frozenset[int] = frozenset(),
        codec: TextCodec | None = None,
        cache_key: bytes = b"",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``num_blocks`` does not count the null block. ``num_host_blocks`` and ``costs`` are for preemption by
        swapping. ``proposer`` names who the runner has to draft (as ``scheduler.speculative`` does, which may change
        only between it and ``off``); None: whoever is asked for, n-grams where nobody is. ``cache_key`` stands for all
        that decides the contents of a block besides its tokens. ``seed`` seeds the requests that bring none."""
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
        self._codec = codec
        self._seed = seed
        self._clock = clock
        self._inbox: deque[Note] = deque()
        self._requests: dict[int, Request] = {}
        """All that are not finished, those in the inbox included."""
        self._families: dict[int, list[Request]] = {}
        """All answers of a request that asked for several, by its id, until none is left."""
        self._answers: dict[int, AnswerText] = {}
        self._withheld = Withheld()
        self._step = 0
        self._last_time = 0.0
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
        if request_id in self._requests or request_id in self._families:
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
        if params.n > 1:
            self._families[request_id] = answers
        for request in answers:
            self._scheduler.memory.prepare(request)
            self._requests[request.request_id] = request
            if self._codec is not None and (stream_text or params.stop):
                self._answers[request.request_id] = AnswerText(self._codec, request, stream_text)
        self._inbox.append(Addition(answers[0]))

    def reject(self, request_id: int, message: str) -> None:
        """Refuse a request that did not get as far as :meth:`add_request`; the next step says so."""
        self._inbox.append(Refusal(request_id, message))

    def abort(self, request_id: int) -> None:
        """End a request in whatever state it is: no token of it comes any more, only the output that ends it. An
        unknown or finished one is ignored."""
        if request_id in self._requests or request_id in self._families:
            self._inbox.append(Abortion(request_id))

    def set_priority(self, request_id: int, priority: int) -> None:
        """Another priority for a request, all its answers included, wherever it is: it counts from the next step on. An
        unknown or finished one is ignored."""
        if request_id in self._requests or request_id in self._families:
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
        return bool(self._requests or self._inbox or self._scheduler.pending_discipline)

    @property
    def has_notes(self) -> bool:
        """Whether something was left that :meth:`take_in` would take up."""
        return bool(self._inbox)

    @property
    def num_requests(self) -> int:
        """Answers that have not ended."""
        return len(self._requests)

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """The knobs in force or, the discipline, wanted."""
        return self._scheduler.config

    # One step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Schedule, execute, take the results in, detokenise; hand out what that gave and the record of it."""
        began = self._clock()
        outputs = self._begin(began)
        plan = self._scheduler.schedule(self._step + 1, began)
        scheduled = self._clock()
        if plan is None:
            return self._without_rows(began, scheduled, outputs)
        result = self._runner.execute(plan)
        executed = self._clock()
        self._take_inbox(began, outputs)
        update = self._scheduler.update(plan, result, executed)
        updated = self._clock()
        errors = dict(result.errors)
        texts = self._read_answers(plan, update, errors) if self._answers else {}
        timings = step_timings(result, began, scheduled, executed, updated, self._clock())
        ended_at = began + timings.total
        for row in update.first_rows:
            self._start_branches(plan.requests[row], ended_at)
        room = self._scheduler.room()
        left = self._scheduler.settle({plan.requests[row]: reason for row, reason in update.ended.items()})
        given = step_outputs(plan, update, result, texts, errors, ended_at, branched=bool(self._families))
        outputs += self._let_go(left, given, ended_at, {plan.requests[row]: why for row, why in errors.items()})
        self._last_plan = plan
        return StepResult(self._record(began, timings, (plan, result, update), room), outputs)

    def take_in(self) -> StepResult:
        """Take up what was left since the last step (arrivals, aborts, priorities, knobs) and tell of it, as a step
        that computes nothing; nothing is scheduled."""
        began = self._clock()
        outputs = self._begin(began)
        return self._without_rows(began, self._clock(), outputs)

    def _begin(self, now: float) -> list[Output]:
        outputs: list[Output] = []
        self._take_inbox(now, outputs)
        if left := self._scheduler.settle({}):  # an abort took the last row that the others stayed for
            outputs += self._let_go(left, [], now, {})
        return outputs

    def _without_rows(self, began: float, done: float, outputs: list[Output]) -> StepResult:
        if not self._scheduler.events and not outputs:
            return StepResult(None, [])
        return StepResult(self._record(began, StepTimings(done - began), None), outputs)

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
                self._rank(note)
            else:
                for request_id in self._answer_ids(note.request_id):
                    if (request := self._requests.get(request_id)) is not None:
                        self._abort(request, now, outputs)

    def _answer_ids(self, client_id: int) -> list[int]:
        family = self._families.get(client_id)
        return [client_id] if family is None else [member.request_id for member in family]

    def _rank(self, note: Ranking) -> None:
        for request_id in self._answer_ids(note.request_id):
            request = self._requests.get(request_id)
            if request is None:
                continue
            for branch in request.branches:  # not in a queue yet
                branch.priority = note.priority
            self._scheduler.set_priority(request, note.priority)

    def _abort(self, request: Request, now: float, outputs: list[Output]) -> None:
        if request.status is RequestStatus.ENDED and not self._withheld.holds(request):
            return  # its answer is complete and was handed out; only its row goes on
        answer = self._answers.get(request.request_id)
        text = "" if answer is None or request.status is RequestStatus.ENDED else answer.flush()
        self._scheduler.finish(request, FinishReason.ABORT)
        given = [last_output(request, now, [], text), *self._forget(request, now)]
        outputs += self._withheld.pass_on(given, [request, *request.branches], now, holding=False)
        request.branches = []

    def _let_go(
        self, left: list[Request], given: list[Output], now: float, messages: dict[Request, str]
    ) -> list[Output]:
        """Forget those that have left, ``messages`` saying why where it was an error; what clients get now of what was
        ``given`` and of what was held back."""
        gone = list(left)
        for request in left:
            given += self._forget(request, now, messages.get(request, ""))
            gone += request.branches
        return self._withheld.pass_on(given, gone, now, holding=self._scheduler.discipline.withholds_answers)

    def _forget(self, request: Request, now: float, error: str = "") -> list[Output]:
        """Forget a request that has left. Other answers to its prompt that have not begun end with it, and these
        outputs say so."""
        client_id = request.request_id % BRANCH_STRIDE
        given = []
        for gone in (request, *request.branches):
            del self._requests[gone.request_id]
            self._answers.pop(gone.request_id, None)
            if gone is not request:
                gone.status, gone.finish_reason = RequestStatus.FINISHED, request.finish_reason
                given.append(last_output(gone, now, [], "", error=error))
        family = self._families.get(client_id)
        if family is not None and not any(member.request_id in self._requests for member in family):
            del self._families[client_id]
        return given

    def _start_branches(self, request: Request, now: float) -> None:
        """A request has its first token: its prompt is computed, and further answers to it may begin."""
        request.first_token_time = now
        for branch in request.branches:
            self._scheduler.add(branch)
        request.branches = []

    def _read_answers(self, plan: SchedulerOutput, update: StepUpdate, errors: dict[int, str]) -> dict[int, str]:
        """Certain text by row. A stop string ends its request here; text that cannot be made ends it with an error."""
        texts: dict[int, str] = {}
        for row, request in enumerate(plan.requests):
            tokens, answer = update.new_tokens[row], self._answers.get(request.request_id)
            ended = update.ended.get(row)
            if answer is None or not (tokens or ended):
                continue
            try:
                step = answer.push(tokens, ended)
            except Exception as error:  # one answer's text must not end its neighbours
                errors[row] = f"The answer could not be turned into text: {error}"
                update.ended[row] = FinishReason.ERROR
                continue
            texts[row] = step.text
            if step.stopped and ended is not FinishReason.ERROR:
                update.ended[row] = FinishReason.STOP
                update.new_tokens[row] = tokens[: step.num_tokens]
                self._scheduler.drop_output(request, len(tokens) - step.num_tokens)
        return texts

    def _record(
        self,
        began: float,
        timings: StepTimings,
        done: tuple[SchedulerOutput, ModelRunnerOutput, StepUpdate] | None,
        room: tuple[int, int, int] = (0, 0, 0),
    ) -> StepRecord:
        scheduler, memory = self._scheduler, self._scheduler.memory
        self._step += 1
        self._last_time = began
        return StepRecord(
            step=self._step,
            time=began,
            timings=timings,
            events=scheduler.take_events(),
            **record_columns(*done) if done is not None else empty_columns(),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            free_blocks=memory.pool.num_free,
            cached_blocks=memory.pool.num_cached,
            token_budget=scheduler.token_budget,
            totals=scheduler.counters.snapshot(),
            num_slots=room[0],
            num_swapped=len(scheduler.waiting.swapped),
            host_blocks_used=memory.host.num_used,
            reserved_tokens=room[1],
            tail_tokens=room[2],
        )

    # State --------------------------------------------------------------------------------------------------------

    def keyframe(self) -> Keyframe:
        """The whole state after the last record."""
        return keyframe_of(self._scheduler, self._step, self._last_time)

    def check_invariants(self) -> None:
        """Raise AssertionError where queues, tables and pool contradict each other (for tests: costs O(pool))."""
        check_invariants(self._scheduler, self._last_plan)
        known = {r.request_id for r in (*self._scheduler.running, *self._scheduler.waiting.in_order())}
        coming = {note.request.request_id for note in self._inbox if isinstance(note, Addition)}
        unborn = {branch.request_id for request in self._requests.values() for branch in request.branches}
        assert known | coming | unborn == set(self._requests), "requests are known that neither run nor wait"
        assert set(self._answers) <= set(self._requests), "texts of finished requests are kept"
        for client_id, family in self._families.items():
            assert any(member.request_id in self._requests for member in family), f"request {client_id} is kept"
