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
from hashlib import blake2b
from typing import TYPE_CHECKING, Protocol

from engine.admission import EngineLimits
from engine.answer import AnswerText
from engine.config import SchedulerConfig
from engine.events import Keyframe, RequestState, StepRecord, StepTimings
from engine.messages import Output, TokenLogprob
from engine.request import FinishReason, Request, SamplingParams
from engine.scheduling.invariants import check_invariants
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.scheduler import Scheduler, StepUpdate

if TYPE_CHECKING:
    from engine.text.codec import TextCodec


class Runner(Protocol):
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput: ...


@dataclass(frozen=True)
class StepResult:
    record: StepRecord | None
    """None if there was nothing to do."""
    outputs: list[Output]


@dataclass(frozen=True, slots=True)
class _Addition:
    request: Request
    answer: AnswerText | None


@dataclass(frozen=True, slots=True)
class _Refusal:
    request_id: int
    message: str


@dataclass(frozen=True, slots=True)
class _Abortion:
    request_id: int


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
        eos_token_ids: frozenset[int] = frozenset(),
        codec: TextCodec | None = None,
        cache_key: bytes = b"",
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``num_blocks`` does not count the null block. ``cache_key`` stands for all that decides the contents of a
        block besides its tokens. ``seed`` seeds the requests that bring none."""
        self._runner = runner
        self._scheduler = Scheduler(
            scheduler,
            num_blocks=num_blocks,
            block_size=block_size,
            prefix_cache=prefix_cache,
            token_budget=token_budget,
            cache_key=cache_key,
        )
        self.limits = EngineLimits(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            largest_prefill=None if scheduler.chunked_prefill else token_budget,
        )
        # A tokenizer may name ids that the model's head does not have: they are never drawn and cannot be banned.
        self._eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._codec = codec
        self._seed = seed
        self._clock = clock
        self._inbox: deque[_Addition | _Refusal | _Abortion] = deque()
        self._requests: dict[int, Request] = {}
        """All that are not finished, those in the inbox included."""
        self._answers: dict[int, AnswerText] = {}
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
        step; ``max_tokens`` is cut to the room of model and pool. ValueError if ``request_id`` is in use."""
        if request_id in self._requests:
            raise ValueError(f"request {request_id} is in the engine already; an id is used once")
        message = self.limits.refusal(prompt_token_ids, params, ends_after)
        if message is not None:
            self.reject(request_id, message)
            return
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            max_tokens=self.limits.max_tokens(len(prompt_token_ids), params),
            arrival_time=self._clock() if arrival_time is None else arrival_time,
            priority=priority,
            user=user,
            ends_after=ends_after,
            seed=self._seed_of(request_id) if params.seed is None else params.seed,
            stop_token_ids=self._stop_token_ids(params),
        )
        self._scheduler.memory.prepare(request)
        answer = None
        if self._codec is not None and (stream_text or params.stop):
            answer = AnswerText(self._codec, request, stream_text)
        self._requests[request_id] = request
        self._inbox.append(_Addition(request, answer))

    def reject(self, request_id: int, message: str) -> None:
        """Refuse a request that did not get as far as :meth:`add_request`; the next step says so."""
        self._inbox.append(_Refusal(request_id, message))

    def abort(self, request_id: int) -> None:
        """End a request in whatever state it is: no token of it comes any more, only the output that ends it. An
        unknown or finished one is ignored."""
        if request_id in self._requests:
            self._inbox.append(_Abortion(request_id))

    @property
    def has_work(self) -> bool:
        """Whether a step has something to compute or to tell."""
        return bool(self._requests or self._inbox)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = frozenset[int]() if params.ignore_eos else self._eos_token_ids
        return eos.union(params.stop_token_ids) if params.stop_token_ids else eos

    def _seed_of(self, request_id: int) -> int:
        """A seed in [0, 2^63) that depends on the engine's seed and the request's id alone."""
        digest = blake2b(f"{self._seed}:{request_id}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    # One step -----------------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Schedule, execute, take the results in, detokenise; hand out what that gave and the record of it."""
        began = self._clock()
        outputs: list[Output] = []
        self._take_inbox(began, outputs)
        plan = self._scheduler.schedule(self._step + 1, began)
        scheduled = self._clock()
        if plan is None:
            if not self._scheduler.events and not outputs:
                return StepResult(None, [])
            return StepResult(self._record(began, StepTimings(scheduled - began), None, None), outputs)
        result = self._runner.execute(plan)
        executed = self._clock()
        self._take_inbox(began, outputs)
        update = self._scheduler.update(plan, result)
        updated = self._clock()
        errors = dict(result.errors)
        texts = self._read_answers(plan, update, errors) if self._answers else {}
        timings = _timings(result, began, scheduled, executed, updated, self._clock())
        ended_at = began + timings.total
        for row in update.first_rows:
            plan.requests[row].first_token_time = ended_at
        for row, reason in update.ended.items():
            self._close(plan.requests[row], reason)
        outputs += self._outputs(plan, update, result, texts, errors, ended_at)
        self._last_plan = plan
        return StepResult(self._record(began, timings, plan, update), outputs)

    def _take_inbox(self, now: float, outputs: list[Output]) -> None:
        inbox, scheduler = self._inbox, self._scheduler
        while inbox:
            note = inbox.popleft()
            if isinstance(note, _Addition):
                scheduler.add(note.request)
                if note.answer is not None:
                    self._answers[note.request.request_id] = note.answer
            elif isinstance(note, _Refusal):
                scheduler.refuse(note.request_id, note.message)
                outputs.append(Output(note.request_id, now, [], finish_reason=FinishReason.ERROR, error=note.message))
            elif (request := self._requests.get(note.request_id)) is not None:
                answer = self._answers.get(note.request_id)
                text = "" if answer is None else answer.flush()
                self._close(request, FinishReason.ABORT)
                outputs.append(_last_output(request, now, [], text))

    def _close(self, request: Request, reason: FinishReason) -> None:
        self._scheduler.finish(request, reason)
        del self._requests[request.request_id]
        self._answers.pop(request.request_id, None)

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

    def _outputs(
        self,
        plan: SchedulerOutput,
        update: StepUpdate,
        result: ModelRunnerOutput,
        texts: dict[int, str],
        errors: dict[int, str],
        now: float,
    ) -> list[Output]:
        new_tokens, logprobs = update.new_tokens, result.logprobs
        special = {*update.ended, *texts, *(row for row, values in enumerate(logprobs) if values)}
        rows = zip(plan.requests, new_tokens, strict=True)
        if not special:
            return [Output(request.request_id, now, tokens) for request, tokens in rows if tokens]
        outputs = [
            Output(request.request_id, now, tokens)
            for row, (request, tokens) in enumerate(rows)
            if tokens and row not in special
        ]
        for row in sorted(special):
            request, tokens, text = plan.requests[row], new_tokens[row], texts.get(row, "")
            values = (
                [TokenLogprob(p.token_id, p.logprob, p.top) for p in logprobs[row][: len(tokens)]] if logprobs else []
            )
            if row in update.ended:
                outputs.append(_last_output(request, now, tokens, text, values, errors.get(row, "")))
            elif tokens:
                outputs.append(Output(request.request_id, now, tokens, text, values))
        return outputs

    def _record(
        self, began: float, timings: StepTimings, plan: SchedulerOutput | None, update: StepUpdate | None
    ) -> StepRecord:
        scheduler, pool = self._scheduler, self._scheduler.memory.pool
        self._step += 1
        self._last_time = began
        return StepRecord(
            step=self._step,
            time=began,
            timings=timings,
            events=scheduler.take_events(),
            request_ids=[request.request_id for request in plan.requests] if plan else [],
            num_tokens=plan.num_new_tokens if plan else [],
            num_computed=update.num_computed if update else [],
            kinds=plan.kinds if plan else [],
            new_tokens=list(map(len, update.new_tokens)) if update else [],
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            free_blocks=pool.num_free,
            cached_blocks=pool.num_cached,
            token_budget=scheduler.token_budget,
            totals=scheduler.counters.snapshot(),
        )

    # State --------------------------------------------------------------------------------------------------------

    def keyframe(self) -> Keyframe:
        """The whole state after the last record."""
        scheduler = self._scheduler
        return Keyframe(
            step=self._step,
            time=self._last_time,
            num_blocks=scheduler.memory.num_blocks,
            block_size=scheduler.memory.block_size,
            max_num_seqs=scheduler.config.max_num_seqs,
            token_budget=scheduler.token_budget,
            requests=[_state_of(request) for request in (*scheduler.running, *scheduler.waiting.in_order())],
            cached_blocks=scheduler.memory.pool.registered_blocks(),
            deferred=scheduler.deferred,
            totals=scheduler.counters.snapshot(),
        )

    def check_invariants(self) -> None:
        """Raise AssertionError where queues, tables and pool contradict each other (for tests: costs O(pool))."""
        check_invariants(self._scheduler, self._last_plan)
        known = {r.request_id for r in (*self._scheduler.running, *self._scheduler.waiting.in_order())}
        coming = {note.request.request_id for note in self._inbox if isinstance(note, _Addition)}
        assert known | coming == set(self._requests), "requests are known that neither run nor wait"
        assert set(self._answers) <= known, "texts of finished requests are kept"


def _timings(
    result: ModelRunnerOutput, began: float, scheduled: float, executed: float, updated: float, done: float
) -> StepTimings:
    """Preparation is all of the execution that is neither forward nor sampling, so that the parts add up."""
    rest = executed - scheduled - result.forward_seconds - result.sample_seconds
    return StepTimings(
        schedule=(scheduled - began) + (updated - executed),
        prepare=max(result.prepare_seconds, rest),
        forward=result.forward_seconds,
        sample=result.sample_seconds,
        detokenise=done - updated,
    )


def _last_output(
    request: Request,
    now: float,
    token_ids: list[int],
    text: str,
    logprobs: list[TokenLogprob] | None = None,
    error: str = "",
) -> Output:
    return Output(
        request.request_id,
        now,
        token_ids,
        text,
        logprobs or [],
        finish_reason=request.finish_reason,
        error=error,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
    )


def _state_of(request: Request) -> RequestState:
    return RequestState(
        request_id=request.request_id,
        arrival_time=request.arrival_time,
        prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        priority=request.priority,
        user=request.user,
        status=request.status,
        num_computed=request.num_computed_tokens,
        output_tokens=request.num_output_tokens,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
        blocks=list(request.block_ids),
        admitted_time=request.admitted_time,
        first_token_time=request.first_token_time,
    )
