"""Why a request waits, what it does, what a preemption cost: sentences with numbers from the run state. Qt-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Literal

import numpy as np

from app.scope.ledger_history import LedgerEntry, LedgerHistory
from app.scope.waits import LineRates, Wait, head_wait, wait_at
from app.translation import tr
from app.words import are, bytes_label, count, seconds_label
from engine.config import SchedulerConfig
from engine.events import RULE_OUT_OF_MEMORY, Deferred, Preempted, Recovered, Rejected, RequestState, RowKind
from engine.request import RequestStatus, request_name
from engine.run_state import IN_BATCH, RunState

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
    arrival: float
    """Engine clock."""
    why: str
    wait: Wait | None = None
    """What it is expected to wait still; None: not known yet, or in the batch."""


@dataclass(frozen=True, slots=True)
class Queue:
    """The requests that are not finished, and how many of them there are."""

    rows: list[QueueRow]
    running: int
    waiting: int
    """Preempted and swapped ones included."""
    swapped: int


def queue_of(
    state: RunState,
    scheduler: SchedulerConfig,
    ledger: LedgerHistory,
    rates: LineRates,
    *,
    last_step: int | None = None,
    chosen: int | None = None,
) -> Queue:
    """Requests that are not finished: those in the batch in order of arrival, then the waiting in order of the queue.

    Of a long queue only the first :data:`MOST_LISTED` waiting ones are listed, and the ``chosen`` request. What the
    ledger knows is cut after ``last_step``.
    """
    running, waiting, swapped = _sides(state)
    line = _line(waiting, swapped, state, scheduler)
    phases = last_phases(state)
    for request in running:
        if request.status == RequestStatus.ENDED:
            phases[request.request_id] = "ended"
    rows = [_row(r, phases.get(r.request_id, "stalled"), running_sentence(r, phases, state)) for r in running]
    listed = list(enumerate(line[:MOST_LISTED]))
    if chosen in state.requests and state.requests[chosen].status not in IN_BATCH:
        place = next(place for place, request in enumerate(line) if request.request_id == chosen)
        if place >= MOST_LISTED:
            listed.append((place, line[place]))
    preemptions = ledger.latest_preemptions((r.request_id for _, r in listed if r.preemptions), last_step)
    head = head_wait(state, rates, scheduler)
    for place, request in listed:
        why = waiting_sentence(request, place, line, state, preemptions.get(request.request_id))
        rows.append(_row(request, _WAITING[request.status], why, wait_at(place, head, rates)))
    return Queue(rows, len(running), len(line), len(swapped))


def _sides(state: RunState) -> tuple[list[RequestState], list[RequestState], list[RequestState]]:
    """Those in the batch, those that wait, and those that wait in host memory; in order of arrival."""
    everyone = list(state.requests.values())
    statuses = np.frombuffer(bytes([request.status for request in everyone]), dtype=np.uint8)

    def those(*wanted: RequestStatus) -> list[RequestState]:
        mask = np.zeros(len(RequestStatus), dtype=np.bool_)
        mask[list(wanted)] = True
        found = [everyone[i] for i in np.flatnonzero(mask[statuses]).tolist()]
        found.sort(key=attrgetter("arrival_time"))  # all but sorted, and sorting is stable
        return found

    waiting = those(RequestStatus.WAITING, RequestStatus.PREEMPTED)
    return those(RequestStatus.RUNNING, RequestStatus.ENDED), waiting, those(RequestStatus.SWAPPED)


def last_phases(state: RunState) -> dict[int, Phase]:
    """What each request of the last step was doing in it."""
    record = state.last_record
    if record is None:
        return {}
    return {i: _PHASES[kind] for i, kind in zip(record.request_ids, record.kinds, strict=True)}


def _line(
    waiting: list[RequestState], swapped: list[RequestState], state: RunState, scheduler: SchedulerConfig
) -> list[RequestState]:
    """All that wait as the queue has them: first the one that the scheduler named as its head, then the swapped, who
    come back before others join. Under ``fair`` the users take turns, which is what it comes to in the long run: what
    each has got is known to the scheduler alone.
    """
    ageing = scheduler.ageing
    if state.order == "priority" and ageing is not None:
        waiting.sort(key=lambda r: r.arrival_time + r.priority * ageing)
    elif state.order == "priority":
        waiting.sort(key=attrgetter("priority"))
    elif state.order == "fair":
        waiting = _in_turns(waiting)
    line = swapped + waiting
    head = state.deferred.request_id if state.deferred is not None else None
    place = next((i for i, r in enumerate(line) if r.request_id == head), 0)
    if place:
        line.insert(0, line.pop(place))
    return line


def _in_turns(waiting: list[RequestState]) -> list[RequestState]:
    """Every user's first, then every user's second, and so on."""
    users: defaultdict[str, list[RequestState]] = defaultdict(list)
    for request in waiting:
        users[request.user].append(request)
    requests = list(chain.from_iterable(users.values()))
    turns = np.concatenate([np.arange(len(own)) for own in users.values()]) if requests else np.zeros(0)
    return [requests[i] for i in np.argsort(turns, kind="stable").tolist()]


def running_sentence(request: RequestState, phases: dict[int, Phase], state: RunState) -> str:
    phase = phases.get(request.request_id)
    if phase == "ended":
        return _ended_sentence(request, state)
    if phase == "decode":
        return tr(
            "Token {output_tokens:,} of at most {max_tokens:,}.",
            output_tokens=request.output_tokens,
            max_tokens=request.max_tokens,
        )
    total = request.prompt_tokens + request.output_tokens
    if phase == "recompute":
        return tr(
            "{num_computed:,} of {tokens} that a preemption took are computed again.",
            num_computed=request.num_computed,
            tokens=count(total, "token"),
        )
    if phase == "prefill":
        reused = (
            tr(", {cached_tokens:,} of them from the prefix cache", cached_tokens=request.cached_tokens)
            if request.cached_tokens
            else ""
        )
        done = f"{min(request.num_computed, request.prompt_tokens):,} of {count(request.prompt_tokens, 'prompt token')}"
        return f"{done}{reused}."
    if state.last_record is None:
        return tr("Running; its next step is not in yet.")
    return tr(
        "Running, but the last step's budget of {tokens} went to others.", tokens=count(state.token_budget, "token")
    )


def _ended_sentence(request: RequestState, state: RunState) -> str:
    running = sum(1 for r in state.requests.values() if r.status == RequestStatus.RUNNING)
    batch = tr("batch {batch}", batch=state.batch.batch) if state.batch is not None else tr("its batch")
    complete = tr(
        "Complete: {tokens} ({finish_reason})",
        tokens=count(request.output_tokens, "token"),
        finish_reason=request.finish_reason,
    )
    return tr(
        "{complete}. Padding until {batch} ends; {answers} in it {are} not complete.",
        complete=complete,
        batch=batch,
        answers=count(running, "answer"),
        are=are(running),
    )


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
        between = tr(", {requests} between", requests=count(position - 1, "request")) if position > 1 else ""
        return tr("{lost}Behind request {head}, the head of the queue{between}.", lost=lost, head=head, between=between)
    deferred = state.deferred
    if deferred is not None and deferred.request_id == request.request_id:
        return lost + deferred_sentence(deferred, state)
    return tr("{lost}Head of the queue; joins with the next step that has room.", lost=lost)


def deferred_sentence(deferred: Deferred, state: RunState) -> str:
    """The binding reason of the head of the queue."""
    sentence = _DEFERRED.get(deferred.reason)
    if sentence is None:
        return tr(
            "Waits for {reason}: needs {needed:,}, has {available:,}.",
            reason=deferred.reason,
            needed=deferred.needed,
            available=deferred.available,
        )
    return sentence(deferred, state)


def _blocks(deferred: Deferred, state: RunState) -> str:
    # Told when the reason changed; meanwhile there may be fewer.
    available = min(deferred.available, state.num_blocks - state.referenced_blocks)
    room = (
        tr("no block is free")
        if available == 0
        else tr("{blocks} {are} free", blocks=count(available, "block"), are=are(available))
    )
    return tr(
        "Needs {blocks} of KV memory; {room} of {num_blocks:,}.",
        blocks=count(deferred.needed, "block"),
        room=room,
        num_blocks=state.num_blocks,
    )


def _watermark(deferred: Deferred, state: RunState) -> str:
    free = tr("{blocks} {are} free", blocks=count(deferred.available, "block"), are=are(deferred.available))
    return tr(
        "Needs {blocks}, those included that admission leaves to the running requests to "
        "grow into (watermark); {free}.",
        blocks=count(deferred.needed, "block"),
        free=free,
    )


def _resume(deferred: Deferred, state: RunState) -> str:
    free = tr("{blocks} {are} free", blocks=count(deferred.available, "block"), are=are(deferred.available))
    return tr(
        "Needs {blocks}, so that after its preemption it does more than it lost before it yields again; {free}.",
        blocks=count(deferred.needed, "block"),
        free=free,
    )


def _promised(deferred: Deferred, state: RunState) -> str:
    left = f"{deferred.available:,} of {count(state.num_blocks, 'block')} {are(deferred.available)}"
    needs = tr("Needs {blocks} until its end", blocks=count(deferred.needed, "block"))
    return tr("{needs}; {left} neither in use nor promised to running requests.", needs=needs, left=left)


def _slots(deferred: Deferred, state: RunState) -> str:
    return tr("All {places} are taken (max_num_seqs).", places=count(state.max_num_seqs, "running place"))


def _budget(deferred: Deferred, state: RunState) -> str:
    left = tr("{tokens} {are} left", tokens=count(deferred.available, "token"), are=are(deferred.available))
    return tr(
        "Needs {tokens} of the step's budget of {token_budget:,}; {left}.",
        tokens=count(deferred.needed, "token"),
        token_budget=state.token_budget,
        left=left,
    )


def _batch(deferred: Deferred, state: RunState) -> str:
    running = sum(1 for r in state.requests.values() if r.status == RequestStatus.RUNNING)
    number = f" {state.batch.batch}" if state.batch is not None else ""
    return tr(
        "Nobody joins static batch{number} before it ends; {answers} of {num_running:,} in it {are} not complete.",
        number=number,
        answers=count(running, "answer"),
        num_running=state.num_running,
        are=are(running),
    )


def _joining(deferred: Deferred, state: RunState) -> str:
    wait = tr("1 waits") if deferred.available == 1 else tr("{available:,} wait", available=deferred.available)
    return tr(
        "Joining would pause the {requests}: it waits until {needed:,} "
        "wait (waiting_served_ratio; {wait}) or the longest pause is over (max_waiting_tokens).",
        requests=count(state.num_running, "running request"),
        needed=deferred.needed,
        wait=wait,
    )


def _draining(deferred: Deferred, state: RunState) -> str:
    after = f" to {state.pending_discipline}" if state.pending_discipline else ""
    left = tr("{requests} {are} still in it", requests=count(state.num_running, "request"), are=are(state.num_running))
    return tr("The discipline changes{after} when the batch has drained; {left}.", after=after, left=left)


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
    if event.rule == RULE_OUT_OF_MEMORY:
        return tr(
            "Lost {blocks} ({rule}); {tokens} to compute again.",
            blocks=count(event.blocks, "block"),
            rule=event.rule,
            tokens=count(event.tokens, "token"),
        )
    own = event.beneficiary == event.request_id
    to = (
        tr("to the pool, since it could not grow")
        if own
        else tr("to request {request_name}", request_name=request_name(event.beneficiary))
    )
    rule = f" ({event.rule})" if event.rule else ""
    gave = tr("Gave {blocks} {to}{rule}; ", blocks=count(event.blocks, "block"), to=to, rule=rule)
    if event.mode != "swap":
        return gave + tr("{tokens} to compute again.", tokens=count(event.tokens, "token"))
    size = f" ({bytes_label(event.swapped_blocks * block_bytes)})" if block_bytes else ""
    return gave + tr(
        "{tokens} in {blocks}{size} of host memory.",
        tokens=count(event.tokens, "token"),
        blocks=count(event.swapped_blocks, "block"),
        size=size,
    )


def preemption_details(event: Preempted) -> list[str]:
    """Why it was not swapped where it should have been, and what both ways were estimated to take."""
    parts = [tr("Not swapped: {reason}.", reason=event.fallback.rstrip("."))] if event.fallback else []
    estimates = [
        f"{what} {seconds_label(seconds)}"
        for what, seconds in ((tr("computing again"), event.recompute_seconds), ("swapping", event.swap_seconds))
        if seconds is not None
    ]
    return parts + ([tr("Estimated: {estimates}.", estimates=", ".join(estimates))] if estimates else [])


def ledger_sentence(entry: LedgerEntry, block_bytes: int = 0) -> str:
    event = entry.event
    if isinstance(event, Rejected):
        return tr("Rejected: {message}", message=event.message)
    parts = [preempted_sentence(event, block_bytes), *preemption_details(event)]
    if entry.dropped:
        parts.append(tr("Given up in host memory: {reason}.", reason=entry.dropped.rstrip(".")))
    if entry.recovered is not None:
        parts.append(recovered_sentence(entry.recovered))
    else:
        parts.extend(_OUTCOMES.get(entry.outcome, ()))
    return " ".join(parts)


_OUTCOMES = {
    "again": (tr("Preempted anew before it was back where it had been: the time is counted there."),),
    "ended": (tr("It ended before it was back where it had been."),),
    "unseen": (tr("Whether it came back was not seen: records are missing."),),
}


def recovered_sentence(event: Recovered) -> str:
    again = event.recomputed_tokens
    computed = tr(", {tokens} computed again", tokens=count(again, "token")) if again else ""
    return tr("Back where it was after {seconds}{computed}.", seconds=seconds_label(event.seconds), computed=computed)


def _row(request: RequestState, phase: Phase, why: str, wait: Wait | None = None) -> QueueRow:
    blocks = request.blocks
    return QueueRow(
        request_id=request.request_id,
        phase=phase,
        computed=request.num_computed,
        tokens=request.prompt_tokens + request.output_tokens,
        blocks=len(blocks) - blocks.count(0),
        priority=request.priority,
        user=request.user,
        arrival=request.arrival_time,
        why=why,
        wait=wait,
    )
