"""The waiting queue against a sorted list, and what it keeps of those who left."""

from __future__ import annotations

import itertools
import random

import pytest

from engine.config import SchedulerConfig
from engine.events import Admitted, Arrived
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduling.orders import HeapQueue, QueueOrder, WaitingLine, WaitingQueue
from tests.oracles import EngineProbe, make_core

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


def test_the_latest_arrival_yields_first_under_priority_among_the_lowest() -> None:
    requests = [request(1, 5.0, 0), request(2, 1.0, 2), request(3, 3.0, 2), request(4, 9.0, 1)]

    def yielding(order: str) -> list[int]:
        rank = QueueOrder(ORDERS[order]).yield_rank
        return [r.request_id for r in sorted(requests, key=rank, reverse=True)]

    assert yielding("priority") == [3, 2, 4, 1]
    assert yielding("fcfs") == [4, 1, 3, 2]


def test_who_has_come_first_by_age_keeps_its_place() -> None:
    aged = QueueOrder(ORDERS["ageing"])  # a level is worth 2 seconds
    low = request(1, arrival=0.0, priority=2)
    assert aged.outranks(request(2, arrival=3.0, priority=0), low)
    assert not aged.outranks(request(3, arrival=5.0, priority=0), low)
    assert QueueOrder(ORDERS["priority"]).outranks(request(3, arrival=5.0, priority=0), low)


# In an engine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ageing", [4.0, 12.0, 40.0])
def test_ageing_bounds_who_may_overtake(ageing: float, seed: int) -> None:
    """One level of priority is worth ``ageing`` seconds: whoever overtakes came at most that much later a level."""
    rng = random.Random(seed)
    clock = itertools.count()
    core = make_core(
        discipline="orca", max_num_seqs=1, order="priority", ageing=ageing, clock=lambda: float(next(clock))
    )
    probe, priorities = EngineProbe(core), dict[int, int]()
    for _ in range(60):
        priority = rng.randrange(4)
        priorities[probe.add([1], SamplingParams(max_tokens=rng.randint(1, 3)), priority=priority)] = priority
        for _ in range(rng.randrange(3)):
            probe.step()
    probe.run()
    arrivals = {event.request_id: event.arrival_time for event in probe.of(Arrived)}
    order = [event.request_id for event in probe.of(Admitted)]
    overtaken = 0
    for place, earlier in enumerate(order):
        for later in order[place + 1 :]:
            if arrivals[later] < arrivals[earlier]:
                overtaken += 1
                levels = priorities[later] - priorities[earlier]
                assert levels > 0 and arrivals[earlier] <= arrivals[later] + levels * ageing
    assert overtaken > 0


@pytest.mark.parametrize("discipline", ["orca", "vllm", "trtllm-max-util"])
@pytest.mark.parametrize(("ageing", "starves"), [(None, True), (5.0, False)])
def test_a_stream_of_higher_priorities_starves_the_low_only_where_priorities_are_strict(
    ageing: float | None, starves: bool, discipline: str
) -> None:
    now = 0.0
    core = make_core(discipline=discipline, max_num_seqs=1, order="priority", ageing=ageing, clock=lambda: now)
    probe = EngineProbe(core)
    probe.add([1], SamplingParams(max_tokens=2), priority=0)
    probe.step()
    low = probe.add([2], SamplingParams(max_tokens=2), priority=3)
    ended_at = None
    for step in range(60):
        now = float(step)
        if step % 2 == 0:
            probe.add([3], SamplingParams(max_tokens=2), priority=0)
        probe.step()
        if ended_at is None and probe.answers[low].last is not None:
            ended_at = now
    assert (ended_at is None) == starves
    if ended_at is not None:
        # At most 3 levels · 5 seconds of arrivals go before it, 8 requests of 2 steps each.
        assert ended_at <= 3 * 5.0 + 6
    probe.run()


def test_a_line_is_rearranged_in_any_order_with_the_swapped_still_first() -> None:
    line = WaitingLine(QueueOrder(ORDERS["fcfs"]), ORDERS["fcfs"])
    rng = random.Random(1)
    everyone = [request(i, rng.random(), rng.randrange(5)) for i in range(1, 2_000)]
    for one in everyone[:50]:
        one.status = RequestStatus.SWAPPED
    for one in everyone:
        line.push(one)
    for name, config in [*ORDERS.items(), ("fair", SchedulerConfig(order="fair"))]:
        line.arrange(QueueOrder(config), config)
        key = "fcfs" if name == "fair" else name
        swapped = sorted(everyone[:50], key=lambda r: expected_key(key, r))
        waiting = sorted(everyone[50:], key=lambda r: expected_key(key, r))
        assert line.in_order() == [*swapped, *waiting] and len(line) == len(everyone)
        overtakes = config.order == "priority" and waiting[0].priority < swapped[0].priority
        assert line.head() is (waiting[0] if overtakes else swapped[0])
        line.closed = True
        assert line.head() is None and line.first() is not None
        line.closed = False
