"""From a discipline's plan to the columns of a step, checked against what a step may do."""

from __future__ import annotations

from operator import add, eq, ge

from engine.events import RowKind
from engine.memory.kv_cache import Moves
from engine.request import Request, RequestStatus
from engine.scheduling.discipline import PlanningDesk
from engine.scheduling.plan import SchedulerOutput

_DECODE, _PREFILL, _RECOMPUTE = int(RowKind.DECODE), int(RowKind.PREFILL), int(RowKind.RECOMPUTE)
_PADDING = int(RowKind.PADDING)


class PlanError(RuntimeError):
    """A discipline planned what must not run: a fault of its code, never of a request."""


def lay_out(planner: str, step: int, desk: PlanningDesk, draft_limits: list[int], moves: Moves) -> SchedulerOutput:
    """What the desk's plan says, column by column: the rows in the order of the plan, those of padding alone behind
    them. Raises :class:`PlanError`, naming ``planner``, where that cannot run."""
    plan, padding = desk.plan, list[int]()
    if desk.padding:
        plan = {**plan, **{request: 0 for request in desk.padding if request not in plan}}
        padding = [desk.padding.get(request, 0) for request in plan]
    requests, counts = list(plan), list(plan.values())
    starts = [request.num_computed_tokens for request in requests]
    if padding:
        starts = [s if n else s + r.padded for r, s, n in zip(requests, starts, counts, strict=True)]
    ends = list(map(add, starts, counts))
    lengths = [len(request.token_ids) for request in requests]
    samples = list(map(eq, ends, lengths))
    if padding:
        samples = [sampled and count > 0 for sampled, count in zip(samples, counts, strict=True)]
    if not padding and all(map(ge, starts, [request.prefill_end for request in requests])):
        kinds = [_DECODE] * len(requests)
    else:
        kinds = [_kind(r, s, n) for r, s, n in zip(requests, starts, counts, strict=True)]
    output = SchedulerOutput(
        step=step,
        requests=requests,
        epochs=[request.epoch for request in requests],
        starts=starts,
        num_new_tokens=counts,
        block_tables=[request.block_ids for request in requests],
        samples=samples,
        block_copies=moves.copies,
        kinds=kinds,
        padding=padding,
        draft_limits=draft_limits,
        swap_out=moves.swap_out,
        swap_in=moves.swap_in,
        token_budget=desk.token_budget,
    )
    _check(planner, output, desk, ends, lengths)
    return output


def _kind(request: Request, start: int, count: int) -> int:
    if count == 0:
        return _PADDING
    return _DECODE if start >= request.prefill_end else _RECOMPUTE if start < request.lost_tokens else _PREFILL


def _check(planner: str, output: SchedulerOutput, desk: PlanningDesk, ends: list[int], lengths: list[int]) -> None:
    total, counts = output.total_tokens, output.num_new_tokens
    if total > desk.token_budget and (desk.chunked_prefill or sum(count > 1 for count in counts) != 1):
        raise PlanError(f"{planner} planned {total} tokens; the budget is {desk.token_budget}")
    extra = output.padding or output.draft_limits
    reaches = list(map(add, ends, extra)) if extra else ends
    running, ended = RequestStatus.RUNNING, RequestStatus.ENDED
    wrong = [
        f"{request!r} × {count} up to {reach}"
        for request, count, end, length, reach in zip(output.requests, counts, ends, lengths, reaches, strict=True)
        if (request.status is not running and (request.status is not ended or count > 0))
        or reach > request.capacity
        or (end > length if count > 0 else reach == end)
    ]
    if wrong:
        raise PlanError(f"{planner} planned what cannot run: {'; '.join(wrong)}")
