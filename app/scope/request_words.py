"""What is known of one request at a step, as pairs of a name and a figure. Qt-free."""

from __future__ import annotations

from app.scope.reasons import last_phases
from app.translation import tr
from app.words import count, seconds_label
from engine.events import RequestState
from engine.request import RequestStatus
from engine.run_state import RunState

_STATUSES = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
    RequestStatus.SWAPPED: "swapped",
    RequestStatus.FINISHED: "finished",
    RequestStatus.ENDED: "complete",
}


def find_request(state: RunState, request_id: int) -> RequestState | None:
    """Of those that are not finished, or finished of late."""
    found = state.requests.get(request_id)
    if found is not None:
        return found
    return next((request for request in reversed(state.finished) if request.request_id == request_id), None)


def request_figures(request: RequestState, now: float, begin: float) -> list[tuple[str, str]]:
    """now: engine clock at the step; begin: at the first arrival of the run, from which arrivals are counted."""
    rows = [
        (tr("arrived"), tr("at {time}", time=seconds_label(max(0.0, request.arrival_time - begin)))),
        (tr("prompt"), count(request.prompt_tokens, "token")),
        (tr("answer"), f"{request.output_tokens:,} of {request.max_tokens:,}"),
        (tr("computed"), count(request.num_computed, "token")),
        (tr("cached"), count(request.cached_tokens, "token")),
        ("TTFT", _first_token(request, now)),
        (
            tr("preempted"),
            {0: tr("never"), 1: tr("once")}.get(request.preemptions, tr("{times:,} times", times=request.preemptions)),
        ),
        (tr("blocks"), _blocks(request)),
        (tr("priority"), str(request.priority)),
    ]
    if request.user:
        rows.append(("user", request.user))
    if request.finished_time is not None:
        rows.append(("E2EL", seconds_label(request.finished_time - request.arrival_time)))
    return rows


def request_status(state: RunState, request: RequestState) -> str:
    """``decode``, ``waiting``, ``finished (length)``."""
    if request.finish_reason:
        return f"{_STATUSES[RequestStatus(request.status)]} ({request.finish_reason})"
    if request.status == RequestStatus.RUNNING:
        return last_phases(state).get(request.request_id, "running")
    return _STATUSES[RequestStatus(request.status)]


def _first_token(request: RequestState, now: float) -> str:
    if request.first_token_time is not None:
        return seconds_label(request.first_token_time - request.arrival_time)
    if request.finished_time is not None:
        return tr("no token")
    return tr("{waited} so far", waited=seconds_label(max(0.0, now - request.arrival_time)))


def _blocks(request: RequestState) -> str:
    held = sum(1 for block in request.blocks if block)
    return (
        tr("{held:,} + {host_blocks:,} in host memory", held=held, host_blocks=len(request.host_blocks))
        if request.host_blocks
        else f"{held:,}"
    )
