"""What must hold between any two steps, whatever was added, aborted or preempted: checked after every step in tests."""

from __future__ import annotations

from collections import Counter

from engine.request import WAITING_STATES, Request, RequestStatus
from engine.scheduling.plan import SchedulerOutput
from engine.scheduling.scheduler import Scheduler


def check_invariants(scheduler: Scheduler, last_plan: SchedulerOutput | None = None) -> None:
    """Raise AssertionError, naming the block or the request, where the scheduler's state contradicts itself."""
    running, waiting = scheduler.running, scheduler.waiting.in_order()
    _check_queues(scheduler, running, waiting)
    references = Counter(block for request in (*running, *waiting) for block in request.block_ids if block)
    scheduler.memory.pool.check(references)
    scheduler.memory.host.check([block for request in (*running, *waiting) for block in request.host_blocks])
    for request in (*running, *waiting):
        if request.status is RequestStatus.SWAPPED:
            _check_swapped(scheduler, request)
        elif request in running:
            _check_table(scheduler, request)
        else:
            assert not request.block_ids and request.num_computed_tokens == 0, f"{request!r} waits and holds blocks"
    if last_plan is not None:
        alone = sum(count > 1 for count in last_plan.num_new_tokens) == 1
        assert alone or last_plan.total_tokens <= last_plan.token_budget, "the chunks exceed the budget"
        assert len(set(last_plan.requests)) == len(last_plan.requests), "a request is in the plan twice"


def _check_queues(scheduler: Scheduler, running: list[Request], waiting: list[Request]) -> None:
    assert len(waiting) == len(scheduler.waiting), "the queue's length is not the number of those waiting"
    if scheduler.order.name != "fair":
        keys = [scheduler.order.key(request) for request in scheduler.waiting.queue.in_order()]
        assert keys == sorted(keys), "somebody stands in the queue where its priority does not put it"
    places = (
        {RequestStatus.RUNNING, RequestStatus.ENDED} if scheduler.discipline.ends_together else {RequestStatus.RUNNING}
    )
    assert all(request.status in places for request in running), "a request runs without saying so"
    assert all(request.status in WAITING_STATES for request in waiting), "a request waits without saying so"
    ids = Counter(request.request_id for request in (*running, *waiting))
    assert not ids or max(ids.values()) == 1, f"in two places: {[i for i, n in ids.items() if n > 1]}"
    deferred = scheduler.deferred
    assert deferred is None or deferred.request_id in {request.request_id for request in waiting}, (
        f"request {deferred.request_id if deferred else 0} is said to wait and does not"
    )


def _check_swapped(scheduler: Scheduler, request: Request) -> None:
    assert request.block_ids.count(0) == len(request.host_blocks) > 0, f"{request!r} misses other blocks than are away"
    covered = len(request.block_ids) * scheduler.memory.block_size
    assert 0 < request.num_computed_tokens <= covered, f"{request!r} has computed beyond its blocks"


def _check_table(scheduler: Scheduler, request: Request) -> None:
    memory, size = scheduler.memory, scheduler.memory.block_size
    table = request.block_ids
    assert 0 not in table and not request.host_blocks, f"{request!r} runs with blocks in host memory"
    assert len(set(table)) == len(table), f"{request!r} has a block twice"
    assert request.capacity == len(table) * size, f"{request!r} believes in other room than its blocks have"
    assert request.num_computed_tokens <= len(table) * size, f"{request!r} has computed beyond its blocks"
    assert request.num_computed_tokens <= request.num_tokens, f"{request!r} has computed beyond its tokens"
    full = request.num_computed_tokens // size
    for index, block in enumerate(table):
        digest = memory.pool.digests[block]
        if digest is None:
            continue
        assert index < full, f"{request!r}: block {block} has a digest and is not full"
        assert digest == request.block_hashes[index], f"{request!r}: block {block} is known as other contents"
