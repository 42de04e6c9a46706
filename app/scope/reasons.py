"""Why a request waits, what it does, what a preemption cost: sentences with numbers from the run state. Qt-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.words import count
from engine.config import SchedulerConfig
from engine.events import Deferred, Preempted, Rejected, RequestState, RowKind
from engine.request import RequestStatus
from engine.run_state import LedgerEntry, RunState

MOST_LISTED = 300
"""Nobody reads further down a queue, and every row has a sentence that changes with each step."""

Phase = Literal["decode", "prefill", "recompute", "stalled", "waiting", "preempted"]

_PHASES: dict[int, Phase] = {
    RowKind.DECODE: "decode",
    RowKind.PREFILL: "prefill",
    RowKind.RECOMPUTE: "recompute",
}


@dataclass(frozen=True, slots=True)
class QueueRow:
    """A request of the queue table."""

    request_id: int
    phase: Phase
    computed: int
    tokens: int
    """Prompt and output so far."""
    blocks: int
    priority: int
    user: str
    why: str


def queue_rows(state: RunState, scheduler: SchedulerConfig, chosen: int | None = None) -> list[QueueRow]:
    """Requests that are not finished: running ones in order of arrival, then waiting ones in order of the queue.

    Of a long queue only the first :data:`MOST_LISTED` waiting ones are listed, and the ``chosen`` request.
    """
    phases = last_phases(state)
    running = [r for r in state.requests.values() if r.status == RequestStatus.RUNNING]
    waiting = waiting_order(state, scheduler)
    rows = [_row(r, phases.get(r.request_id, "stalled"), running_sentence(r, phases, state)) for r in running]
    preemptions = _latest_preemptions(state)
    for position, request in enumerate(waiting):
        if position >= MOST_LISTED and request.request_id != chosen:
            continue
        why = waiting_sentence(request, position, waiting, state, preemptions.get(request.request_id))
        phase: Phase = "preempted" if request.status == RequestStatus.PREEMPTED else "waiting"
        rows.append(_row(request, phase, why))
    return rows


def last_phases(state: RunState) -> dict[int, Phase]:
    """What each request of the last step was doing in it."""
    record = state.last_record
    if record is None:
        return {}
    return {i: _PHASES[kind] for i, kind in zip(record.request_ids, record.kinds, strict=True)}


def waiting_order(state: RunState, scheduler: SchedulerConfig) -> list[RequestState]:
    """The waiting requests as the queue has them; the one that the scheduler named as its head comes first."""
    head = state.deferred.request_id if state.deferred is not None else None

    def key(request: RequestState) -> tuple[bool, float, float, int]:
        rank = 0.0
        if scheduler.order == "priority":
            rank = float(request.priority)
            if scheduler.ageing is not None:
                rank = request.arrival_time + request.priority * scheduler.ageing
        return request.request_id != head, rank, request.arrival_time, request.request_id

    return sorted((r for r in state.requests.values() if r.status != RequestStatus.RUNNING), key=key)


def running_sentence(request: RequestState, phases: dict[int, Phase], state: RunState) -> str:
    phase = phases.get(request.request_id)
    if phase == "decode":
        return f"Token {request.output_tokens:,} of at most {request.max_tokens:,}."
    total = request.prompt_tokens + request.output_tokens
    if phase == "recompute":
        return f"{request.num_computed:,} of {count(total, 'token')} that a preemption took are computed again."
    if phase == "prefill":
        reused = f", {request.cached_tokens:,} of them from the prefix cache" if request.cached_tokens else ""
        done = f"{min(request.num_computed, request.prompt_tokens):,} of {count(request.prompt_tokens, 'prompt token')}"
        return f"{done}{reused}."
    if state.last_record is None:
        return "Running; its next step is not in yet."
    return f"Running, but the last step's budget of {count(state.token_budget, 'token')} went to others."


def waiting_sentence(
    request: RequestState,
    position: int,
    waiting: list[RequestState],
    state: RunState,
    preemption: Preempted | None,
) -> str:
    lost = f"{preempted_sentence(preemption)} " if preemption is not None else ""
    if position > 0:
        head = waiting[0].request_id
        between = f", {count(position - 1, 'request')} between" if position > 1 else ""
        return f"{lost}Behind request {head}, the head of the queue{between}."
    deferred = state.deferred
    if deferred is not None and deferred.request_id == request.request_id:
        return lost + deferred_sentence(deferred, state)
    return f"{lost}Head of the queue; joins with the next step that has room."


def deferred_sentence(deferred: Deferred, state: RunState) -> str:
    """The binding reason of the head of the queue."""
    needed, available = deferred.needed, deferred.available
    if deferred.reason == "blocks":
        # Told when the reason changed; meanwhile there may be fewer.
        available = min(available, state.num_blocks - state.referenced_blocks)
        room = "no block is free" if available == 0 else f"{count(available, 'block')} {_is(available)} free"
        return f"Needs {count(needed, 'block')} of KV memory; {room} of {state.num_blocks:,}."
    if deferred.reason == "slots":
        return f"All {count(state.max_num_seqs, 'running place')} are taken (max_num_seqs)."
    if deferred.reason == "budget":
        left = f"{count(available, 'token')} {_is(available)} left"
        return f"Needs {count(needed, 'token')} of the step's budget of {state.token_budget:,}; {left}."
    if deferred.reason == "watermark":
        free = f"{count(available, 'block')} {_is(available)} free above the watermark"
        return f"Needs {count(needed, 'block')}; {free}, which is kept for running requests to grow into."
    return f"Waits for {deferred.reason}: needs {needed:,}, has {available:,}."


def preempted_sentence(event: Preempted) -> str:
    own = event.beneficiary == event.request_id
    to = "to the pool, since it could not grow" if own else f"to request {event.beneficiary}"
    rule = f" ({event.rule})" if event.rule else ""
    return f"Gave {count(event.blocks, 'block')} {to}{rule}; {count(event.tokens, 'token')} to compute again."


def ledger_sentence(entry: LedgerEntry) -> str:
    event = entry.event
    if isinstance(event, Rejected):
        return f"Rejected: {event.message}"
    return preempted_sentence(event)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _latest_preemptions(state: RunState) -> dict[int, Preempted]:
    """The last preemption of each request that waits because of one."""
    lost = {r.request_id for r in state.requests.values() if r.status == RequestStatus.PREEMPTED}
    found: dict[int, Preempted] = {}
    for entry in reversed(state.ledger):
        if len(found) == len(lost):
            break
        event = entry.event
        if isinstance(event, Preempted) and event.request_id in lost:
            found.setdefault(event.request_id, event)
    return found


def _row(request: RequestState, phase: Phase, why: str) -> QueueRow:
    return QueueRow(
        request_id=request.request_id,
        phase=phase,
        computed=request.num_computed,
        tokens=request.prompt_tokens + request.output_tokens,
        blocks=len(request.blocks),
        priority=request.priority,
        user=request.user,
        why=why,
    )
