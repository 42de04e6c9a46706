"""From what a step gave to what clients and windows get: outputs, held back where a batch delivers as a whole, the
columns of the record, and the state written out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from engine.events import Keyframe, RequestState, StepRecord, StepTimings
from engine.in_flight import Landed
from engine.messages import Output, TokenLogprob
from engine.request import FinishReason, Request, branch_id, branch_of
from engine.scheduling.plan import ModelRunnerOutput, SchedulerOutput
from engine.scheduling.results import StepUpdate

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler


class Withheld:
    """Answers that are handed out as a whole when their batch ends, by request id."""

    def __init__(self) -> None:
        self._held: dict[int, Output] = {}

    def holds(self, request: Request) -> bool:
        return request.request_id in self._held

    def pass_on(self, outputs: list[Output], left: list[Request], now: float, *, holding: bool) -> list[Output]:
        """What clients get of ``outputs``: all, unless they are to be held back; then what was held of the requests
        that have ``left``, stamped with the time at which they get it."""
        if not holding and not self._held:
            return outputs
        passed = []
        for output in outputs:
            key = branch_id(output.request_id, output.index)
            held = self._held.pop(key, None)
            joined = output if held is None else _joined(held, output)
            if holding:
                self._held[key] = joined
            else:
                passed.append(joined)
        for request in left:
            held = self._held.pop(request.request_id, None)
            if held is not None:
                passed.append(msgspec.structs.replace(held, time=now))
        return passed


def _joined(first: Output, then: Output) -> Output:
    return msgspec.structs.replace(
        then,
        token_ids=first.token_ids + then.token_ids,
        text=first.text + then.text,
        logprobs=first.logprobs + then.logprobs,
    )


def step_outputs(
    plan: SchedulerOutput,
    update: StepUpdate,
    result: ModelRunnerOutput,
    texts: dict[int, str],
    errors: dict[int, str],
    now: float,
    *,
    branched: bool,
) -> list[Output]:
    """What a step gave its rows. ``texts`` and ``errors`` by row; ``branched``: whether some are further answers to a
    prompt. Most rows gave a bare token, and their outputs come first."""
    new_tokens, logprobs = update.new_tokens, result.logprobs
    special = {*update.ended, *texts}
    if any(logprobs):
        special.update(row for row, values in enumerate(logprobs) if values)
    if branched:
        special.update(range(len(plan.requests)))
    bare: Iterable[tuple[Request, list[int]]] = zip(plan.requests, new_tokens, strict=True)
    if special:
        bare = [pair for row, pair in enumerate(bare) if row not in special]
    outputs = [Output(request.request_id, now, tokens) for request, tokens in bare if tokens]
    for row in sorted(special):
        request, tokens, text = plan.requests[row], new_tokens[row], texts.get(row, "")
        values = [TokenLogprob(p.token_id, p.logprob, p.top) for p in logprobs[row][: len(tokens)]] if logprobs else []
        if row in update.ended:
            outputs.append(last_output(request, now, tokens, text, values, errors.get(row, ""), update.ended[row]))
        elif tokens:
            outputs.append(token_output(request, now, tokens, text, values))
    return outputs


def token_output(request: Request, now: float, token_ids: list[int], text: str, logprobs: list[TokenLogprob]) -> Output:
    client_id, index = branch_of(request.request_id)
    return Output(client_id, now, token_ids, text, logprobs, index=index)


def last_output(
    request: Request,
    now: float,
    token_ids: list[int],
    text: str,
    logprobs: list[TokenLogprob] | None = None,
    error: str = "",
    reason: FinishReason | None = None,
) -> Output:
    """``reason``: why it is over; None: what the request says."""
    client_id, index = branch_of(request.request_id)
    return Output(
        client_id,
        now,
        token_ids,
        text,
        logprobs or [],
        finish_reason=reason or request.finish_reason,
        error=error,
        prompt_tokens=request.num_prompt_tokens,
        cached_tokens=request.num_cached_tokens,
        preemptions=request.num_preemptions,
        index=index,
    )


def step_timings(
    result: ModelRunnerOutput,
    early: Landed,
    late: Landed,
    began: float,
    scheduled: float,
    executed: float,
    updated: float,
    done: float,
) -> StepTimings:
    """Preparation is all of the execution that is neither forward nor sampling, so that the parts add up. Of a step
    that stays in flight, forward is what was waited for the one before, which landed ``early``, before the schedule, or
    ``late``, behind the launch, and detokenise its texts."""
    rest = executed - scheduled - late.seconds - result.forward_seconds - result.sample_seconds
    return StepTimings(
        schedule=(scheduled - began - early.seconds) + (updated - executed),
        prepare=max(result.prepare_seconds, rest),
        forward=result.forward_seconds + early.waited + late.waited,
        sample=result.sample_seconds,
        detokenise=(done - updated) + (early.seconds - early.waited) + (late.seconds - late.waited),
    )


def empty_columns() -> dict[str, list[int]]:
    """Those of a step that computed nothing."""
    return {name: [] for name in ("request_ids", "num_tokens", "num_computed", "kinds", "new_tokens")}


def record_columns(plan: SchedulerOutput, result: ModelRunnerOutput, update: StepUpdate) -> dict[str, list[int]]:
    """The columns of a step's record, by name."""
    num_tokens, drafts = plan.num_new_tokens, result.drafts
    return {
        "request_ids": [request.request_id for request in plan.requests],
        "num_tokens": list(map(sum, zip(num_tokens, drafts, strict=True))) if drafts else num_tokens,
        "num_computed": update.num_computed,
        "kinds": plan.kinds,
        "new_tokens": list(map(len, update.new_tokens)),
        "padding": plan.padding,
        "drafts": drafts,
    }


def step_record(
    scheduler: Scheduler,
    step: int,
    began: float,
    timings: StepTimings,
    columns: dict[str, list[int]],
    room: tuple[int, int, int],
    *,
    in_flight: bool,
    landed_at: float,
) -> StepRecord:
    """The record of ``step``, as ``scheduler`` is after it; takes its events. ``room``: what
    :meth:`engine.scheduling.scheduler.Scheduler.room` said before answers left."""
    memory = scheduler.memory
    return StepRecord(
        step=step,
        time=began,
        timings=timings,
        events=scheduler.take_events(),
        **columns,
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
        in_flight=in_flight,
        landed_at=landed_at,
    )


def keyframe_of(scheduler: Scheduler, step: int, time: float) -> Keyframe:
    """The state of ``scheduler`` after ``step``, which began at ``time``."""
    memory, pool = scheduler.memory, scheduler.memory.pool
    cached = pool.registered_blocks()
    return Keyframe(
        step=step,
        time=time,
        num_blocks=memory.num_blocks,
        block_size=memory.block_size,
        max_num_seqs=scheduler.config.max_num_seqs,
        token_budget=scheduler.token_budget,
        requests=[state_of(request) for request in (*scheduler.running, *scheduler.waiting.in_order())],
        cached_blocks=cached,
        deferred=scheduler.deferred,
        totals=scheduler.counters.snapshot(),
        num_host_blocks=memory.host.num_blocks,
        discipline=scheduler.discipline_name,
        order=scheduler.config.order,
        preemption=scheduler.config.preemption,
        pending_discipline=scheduler.pending_discipline,
        cached_parents=pool.parents_of(cached),
        batch=scheduler.discipline.batch if scheduler.running else None,
        scheduler=scheduler.config,
    )


def state_of(request: Request) -> RequestState:
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
        finish_reason=request.finish_reason or "",
        host_blocks=list(request.host_blocks),
        parent=request.parent.request_id if request.parent is not None else 0,
    )
