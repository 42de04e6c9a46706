"""The waiting queue against a sorted list, and what it keeps of those who left."""

from __future__ import annotations

import random

import pytest

from engine.config import SchedulerConfig
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduling.orders import HeapQueue, QueueOrder, WaitingQueue, yield_rank

ORDERS = {
    "fcfs": SchedulerConfig(),
    "priority": SchedulerConfig(order="priority"),
    "ageing": SchedulerConfig(order="priority", ageing=2.0),
}


def request(request_id: int, arrival: float = 0.0, priority: int = 0) -> Request:
    return Request(request_id, [1], SamplingParams(), max_tokens=1, arrival_time=arrival, priority=priority)


def expected_key(name: str, one: Request) -> tuple[float, ...]:
    if name == "fcfs":
        return (one.arrival_time, one.request_id)
    if name == "priority":
        return (one.priority, one.arrival_time, one.request_id)
    return (one.arrival_time + 2.0 * one.priority, one.request_id)


def leave(queue: WaitingQueue, one: Request, status: RequestStatus) -> None:
    one.status = status
    queue.forget(one)


@pytest.mark.parametrize("name", ORDERS)
def test_random_joining_leaving_and_coming_back(name: str) -> None:
    rng, queue = random.Random(name), HeapQueue(QueueOrder(ORDERS[name]))
    waiting: list[Request] = []
    running: list[Request] = []
    for request_id in range(1, 3_000):
        choice = rng.random()
        if choice < 0.5:
            one = request(request_id, rng.randrange(50), rng.randrange(4))
            queue.push(one)
            waiting.append(one)
        elif choice < 0.7 and waiting:
            one = min(waiting, key=lambda r: expected_key(name, r))
            assert queue.head() is one
            leave(queue, one, RequestStatus.RUNNING)
            waiting.remove(one)
            running.append(one)
        elif choice < 0.85 and waiting:
            one = waiting.pop(rng.randrange(len(waiting)))
            leave(queue, one, rng.choice([RequestStatus.FINISHED, RequestStatus.RUNNING]))
            if one.status is RequestStatus.RUNNING:
                running.append(one)
        elif running:
            one = running.pop(rng.randrange(len(running)))
            one.status, one.epoch = RequestStatus.PREEMPTED, one.epoch + 1
            queue.push(one)
            waiting.append(one)
        assert len(queue) == len(waiting)
        if request_id % 100 == 0:
            assert queue.in_order() == sorted(waiting, key=lambda r: expected_key(name, r))
    assert queue.head() is min(waiting, key=lambda r: expected_key(name, r))


def test_those_who_left_are_not_kept() -> None:
    queue = HeapQueue(QueueOrder(SchedulerConfig()))
    everyone = [request(i, float(i)) for i in range(10_000)]
    for one in everyone:
        queue.push(one)
    for one in everyone[1:]:
        leave(queue, one, RequestStatus.FINISHED)
    assert len(queue) == 1 and queue.head() is everyone[0]
    assert len(queue._heap) <= 2 + 64


def test_an_arrival_outranks_strictly_lower_priorities_under_priority_only() -> None:
    low, high, equal = request(1, priority=3), request(2, priority=1), request(3, priority=3)
    strict, fcfs = QueueOrder(ORDERS["ageing"]), QueueOrder(ORDERS["fcfs"])
    assert strict.outranks(high, low)
    assert not strict.outranks(equal, low) and not strict.outranks(low, high)
    assert not fcfs.outranks(high, low)


def test_the_lowest_priority_and_then_the_latest_arrival_yields_first() -> None:
    requests = [request(1, 5.0, 0), request(2, 1.0, 2), request(3, 3.0, 2), request(4, 9.0, 1)]
    assert [r.request_id for r in sorted(requests, key=yield_rank, reverse=True)] == [3, 2, 4, 1]
