"""Why a request waits, what it does, what a preemption cost: sentences with numbers from the run state. Qt-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from app.words import bytes_label, count, seconds_label
from engine.config import SchedulerConfig
from engine.events import Deferred, Preempted, Rejected, RequestState, RowKind
from engine.request import RequestStatus, request_name
from engine.run_state import IN_BATCH, LedgerEntry, RunState

MOST_LISTED = 300
"""Nobody reads further down a queue, and every row has a sentence that changes with each step."""

Phase = Literal["decode", "prefill", "recompute", "ended", "stalled", "waiting", "preempted", "swapped"]
WAITING_PHASES = frozenset({"waiting", "preempted", "swapped"})

_PHASES: dict[int, Phase] = {
    RowKind.DECODE: "decode",
    RowKind.PREFILL: "prefill",
    RowKind.RECOMPUTE: "recompute",
    RowKind.PADDING: "ended",
}
_WAITING: dict[int, Phase] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.SWAPPED: "swapped",
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
    """Requests that are not finished: those in the batch in order of arrival, then the waiting in order of the queue.

    Of a long queue only the first :data:`MOST_LISTED` waiting ones are listed, and the ``chosen`` request.
    """
    phases = last_phases(state)
    running = [r for r in state.requests.values() if r.status in IN_BATCH]
    waiting = waiting_order(state, scheduler)
    for request in running:
        if request.status == RequestStatus.ENDED:
            phases[request.request_id] = "ended"
    rows = [_row(r, phases.get(r.request_id, "stalled"), running_sentence(r, phases, state)) for r in running]
    preemptions = _latest_preemptions(state)
    for position, request in enumerate(waiting):
        if position >= MOST_LISTED and request.request_id != chosen:
            continue
        why = waiting_sentence(request, position, waiting, state, preemptions.get(request.request_id))
        rows.append(_row(request, _WAITING[request.status], why))
    return rows


def last_phases(state: RunState) -> dict[int, Phase]:
    """What each request of the last step was doing in it."""
    record = state.last_record
    if record is None:
        return {}
    return {i: _PHASES[kind] for i, kind in zip(record.request_ids, record.kinds, strict=True)}


def waiting_order(state: RunState, scheduler: SchedulerConfig) -> list[RequestState]:
    """The waiting requests as the queue has them; the one that the scheduler named as its head comes first, then those
    that are swapped: they come back before new ones join."""
    head = state.deferred.request_id if state.deferred is not None else None

    def key(request: RequestState) -> tuple[bool, bool, float, float, int]:
        rank = 0.0
        if state.order == "priority":
            rank = float(request.priority)
            if scheduler.ageing is not None:
                rank = request.arrival_time + request.priority * scheduler.ageing
        swapped = request.status == RequestStatus.SWAPPED
        return request.request_id != head, not swapped, rank, request.arrival_time, request.request_id

    return sorted((r for r in state.requests.values() if r.status not in IN_BATCH), key=key)


def running_sentence(request: RequestState, phases: dict[int, Phase], state: RunState) -> str:
    phase = phases.get(request.request_id)
    if phase == "ended":
        return _ended_sentence(request, state)
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


def _ended_sentence(request: RequestState, state: RunState) -> str:
    running = sum(1 for r in state.requests.values() if r.status == RequestStatus.RUNNING)
    batch = f"batch {state.batch.batch}" if state.batch is not None else "its batch"
    complete = f"Complete: {count(request.output_tokens, 'token')} ({request.finish_reason})"
    return f"{complete}. Padding until {batch} ends; {count(running, 'answer')} in it {_is(running)} not complete."


def waiting_sentence(
    request: RequestState,
    position: int,
    waiting: list[RequestState],
    state: RunState,
    preemption: Preempted | None,
) -> str:
    lost = f"{preempted_sentence(preemption)} " if preemption is not None else ""
    if position > 0:
        head = request_name(waiting[0].request_id)
        between = f", {count(position - 1, 'request')} between" if position > 1 else ""
        return f"{lost}Behind request {head}, the head of the queue{between}."
    deferred = state.deferred
    if deferred is not None and deferred.request_id == request.request_id:
        return lost + deferred_sentence(deferred, state)
    return f"{lost}Head of the queue; joins with the next step that has room."


def deferred_sentence(deferred: Deferred, state: RunState) -> str:
    """The binding reason of the head of the queue."""
    sentence = _DEFERRED.get(deferred.reason)
    if sentence is None:
        return f"Waits for {deferred.reason}: needs {deferred.needed:,}, has {deferred.available:,}."
    return sentence(deferred, state)


def _blocks(deferred: Deferred, state: RunState) -> str:
    # Told when the reason changed; meanwhile there may be fewer.
    available = min(deferred.available, state.num_blocks - state.referenced_blocks)
    room = "no block is free" if available == 0 else f"{count(available, 'block')} {_is(available)} free"
    return f"Needs {count(deferred.needed, 'block')} of KV memory; {room} of {state.num_blocks:,}."


def _watermark(deferred: Deferred, state: RunState) -> str:
    free = f"{count(deferred.available, 'block')} {_is(deferred.available)} free"
    return (
        f"Needs {count(deferred.needed, 'block')}, those included that admission leaves to the running requests to "
        f"grow into (watermark); {free}."
    )


def _resume(deferred: Deferred, state: RunState) -> str:
    free = f"{count(deferred.available, 'block')} {_is(deferred.available)} free"
    return (
        f"Needs {count(deferred.needed, 'block')}, so that after its preemption it does more than it lost before it "
        f"yields again; {free}."
    )


def _promised(deferred: Deferred, state: RunState) -> str:
    left = f"{deferred.available:,} of {count(state.num_blocks, 'block')} {_is(deferred.available)}"
    needs = f"Needs {count(deferred.needed, 'block')} until its end"
    return f"{needs}; {left} neither in use nor promised to running requests."


def _slots(deferred: Deferred, state: RunState) -> str:
    return f"All {count(state.max_num_seqs, 'running place')} are taken (max_num_seqs)."


def _budget(deferred: Deferred, state: RunState) -> str:
    left = f"{count(deferred.available, 'token')} {_is(deferred.available)} left"
    return f"Needs {count(deferred.needed, 'token')} of the step's budget of {state.token_budget:,}; {left}."


def _batch(deferred: Deferred, state: RunState) -> str:
    running = sum(1 for r in state.requests.values() if r.status == RequestStatus.RUNNING)
    number = f" {state.batch.batch}" if state.batch is not None else ""
    return (
        f"Nobody joins static batch{number} before it ends; {count(running, 'answer')} of {state.num_running:,} in it "
        f"{_is(running)} not complete."
    )


def _joining(deferred: Deferred, state: RunState) -> str:
    wait = "1 waits" if deferred.available == 1 else f"{deferred.available:,} wait"
    return (
        f"Joining would pause the {count(state.num_running, 'running request')}: it waits until {deferred.needed:,} "
        f"wait (waiting_served_ratio; {wait}) or the longest pause is over (max_waiting_tokens)."
    )


def _draining(deferred: Deferred, state: RunState) -> str:
    after = f" to {state.pending_discipline}" if state.pending_discipline else ""
    left = f"{count(state.num_running, 'request')} {_is(state.num_running)} still in it"
    return f"The discipline changes{after} when the batch has drained; {left}."


_DEFERRED: dict[str, Callable[[Deferred, RunState], str]] = {
    "blocks": _blocks,
    "watermark": _watermark,
    "resume": _resume,
    "promised": _promised,
    "slots": _slots,
    "budget": _budget,
    "batch": _batch,
    "joining": _joining,
    "draining": _draining,
}


def preempted_sentence(event: Preempted, block_bytes: int = 0) -> str:
    """Who gave what to whom, and what became of it. block_bytes: of one KV block; 0: not known."""
    own = event.beneficiary == event.request_id
    to = "to the pool, since it could not grow" if own else f"to request {request_name(event.beneficiary)}"
    rule = f" ({event.rule})" if event.rule else ""
    gave = f"Gave {count(event.blocks, 'block')} {to}{rule}; "
    if event.mode != "swap":
        return gave + f"{count(event.tokens, 'token')} to compute again."
    size = f" ({bytes_label(event.swapped_blocks * block_bytes)})" if block_bytes else ""
    return gave + f"{count(event.tokens, 'token')} in {count(event.swapped_blocks, 'block')}{size} of host memory."


def ledger_sentence(entry: LedgerEntry, block_bytes: int = 0) -> str:
    event = entry.event
    if isinstance(event, Rejected):
        return f"Rejected: {event.message}"
    parts = [preempted_sentence(event, block_bytes)]
    if event.fallback:
        parts.append(f"Not swapped: {event.fallback.rstrip('.')}.")
    estimates = [
        f"{what} {seconds_label(seconds)}"
        for what, seconds in (("computing again", event.recompute_seconds), ("swapping", event.swap_seconds))
        if seconds is not None
    ]
    if estimates:
        parts.append(f"Estimated: {', '.join(estimates)}.")
    if entry.dropped:
        parts.append(f"Given up in host memory: {entry.dropped.rstrip('.')}.")
    if entry.recovered is not None:
        again = entry.recovered.recomputed_tokens
        computed = f", {count(again, 'token')} computed again" if again else ""
        parts.append(f"Back where it was after {seconds_label(entry.recovered.seconds)}{computed}.")
    return " ".join(parts)


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def _latest_preemptions(state: RunState) -> dict[int, Preempted]:
    """The last preemption of each request that waits because of one."""
    lost = {r.request_id for r in state.requests.values() if r.status not in IN_BATCH and r.preemptions}
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
        blocks=sum(1 for block in request.blocks if block),
        priority=request.priority,
        user=request.user,
        why=why,
    )
