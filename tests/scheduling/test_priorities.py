"""Priorities that change while a request waits, runs, is swapped or is over; and what a pause takes in."""

from __future__ import annotations

import random

import pytest

from engine.config import DISCIPLINES, SchedulerConfig
from engine.events import Admitted, Arrived, Preempted, Reprioritised
from engine.request import Request, RequestStatus, SamplingParams, branch_id
from engine.scheduling.orders import QueueOrder, WaitingLine
from tests.oracles import EngineProbe, KVCheckingRunner, make_core, preemptions_of
from tests.scheduling.common import admitted_order, assert_answer, plan_of, tokens
from tests.scheduling.traces import run_trace


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_waiting_request_joins_where_its_new_priority_puts_it(discipline: str) -> None:
    probe = EngineProbe(make_core(discipline=discipline, order="priority", max_num_seqs=1, waiting_served_ratio=0.0))
    probe.add([1], tokens(3), priority=0)
    waiting = [probe.add([i], tokens(2), priority=i) for i in range(2, 6)]
    probe.step()
    probe.core.set_priority(waiting[3], 1)
    probe.core.set_priority(waiting[0], 9)
    probe.core.set_priority(waiting[1], 9)
    probe.core.set_priority(waiting[1], 3)
    probe.step()
    rows = probe.core.keyframe().requests
    assert [row.request_id for row in rows if row.status == RequestStatus.WAITING][-1] == waiting[0]
    probe.run()
    assert admitted_order(probe)[1:] == [waiting[3], waiting[1], waiting[2], waiting[0]]
    assert probe.of(Reprioritised) == [
        Reprioritised(waiting[3], 1),
        Reprioritised(waiting[0], 9),
        Reprioritised(waiting[1], 9),
        Reprioritised(waiting[1], 3),
    ]
    for i, request in enumerate(waiting, start=2):
        assert_answer(probe, request, [i], 2)


def test_a_running_request_that_is_lowered_yields_and_one_that_is_raised_does_not() -> None:
    probe = EngineProbe(make_core(order="priority", max_num_seqs=2))
    first, second = (probe.add([i], tokens(30), priority=5, arrival_time=float(i)) for i in (1, 2))
    probe.step()
    waits = probe.add([3], tokens(4), priority=5, arrival_time=3.0)
    probe.step()
    assert set(plan_of(probe)) == {first, second}
    probe.core.set_priority(first, 6)
    probe.step()
    assert set(plan_of(probe)) == {second, waits} and len(preemptions_of(probe, first)) == 1
    probe.core.set_priority(first, 0)
    probe.step()
    assert first in plan_of(probe), "it takes its place back"
    probe.run()
    for i, request in enumerate((first, second, waits), start=1):
        assert_answer(probe, request, [i], 4 if request == waits else 30)


def test_a_swapped_request_comes_back_where_its_priority_puts_it() -> None:
    probe = EngineProbe(
        make_core(num_blocks=12, block_size=4, preemption="swap", num_host_blocks=40, order="priority", token_budget=8)
    )
    ids = [probe.add([i] * 6, tokens(25), priority=5, arrival_time=float(i)) for i in range(5)]

    def swapped() -> list[int]:
        return [row.request_id for row in probe.core.keyframe().requests if row.status == RequestStatus.SWAPPED]

    while len(swapped()) < 2:
        probe.step()
    last = swapped()[-1]
    probe.core.set_priority(last, 4)
    probe.take_in()
    assert swapped()[0] == last
    seen = len(probe.events)
    probe.run()
    came_back = [e.request_id for e in probe.events[seen:] if isinstance(e, Admitted) and e.resumed]
    assert came_back[0] == last
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 6, 25)


@pytest.mark.parametrize("order", ["fcfs", "fair"])
def test_orders_that_do_not_ask_for_it_tell_it_and_go_on(order: str) -> None:
    probe = EngineProbe(make_core(order=order, max_num_seqs=1))
    ids = [probe.add([i], tokens(2), user="u") for i in range(4)]
    probe.step()
    probe.core.set_priority(ids[3], -9)
    probe.step()
    assert probe.of(Reprioritised) == [Reprioritised(ids[3], -9)] and probe.row(ids[3]).priority == -9
    probe.run()
    assert admitted_order(probe) == ids and not probe.of(Preempted)


def test_a_priority_set_under_another_order_counts_when_the_order_changes() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1))
    ids = [probe.add([i], tokens(3)) for i in range(4)]
    probe.step()
    probe.core.set_priority(ids[3], -1)
    probe.core.reconfigure(SchedulerConfig(order="priority", max_num_seqs=1))
    probe.step()
    assert set(plan_of(probe)) == {ids[3]}
    probe.run()


def test_all_answers_of_a_request_have_its_priority() -> None:
    probe = EngineProbe(make_core(order="priority", max_num_seqs=2, token_budget=8))
    several = probe.add(range(20), SamplingParams(max_tokens=6, n=3), priority=5)
    other = probe.add(range(20, 30), tokens(6), priority=4)
    probe.core.set_priority(several, 3)  # still in the inbox
    probe.step()
    assert set(plan_of(probe)) == {several}
    probe.core.set_priority(several, 2)  # its further answers have not begun
    while len(probe.of(Arrived)) < 4:
        probe.step()
    assert [event.priority for event in probe.of(Arrived) if event.parent] == [2, 2]
    probe.core.set_priority(several, 1)
    probe.step()
    family = [branch_id(several, index) for index in range(3)]
    assert [probe.row(request).priority for request in family] == [1, 1, 1]
    told = [event.request_id for event in probe.of(Reprioritised) if event.priority == 1]
    assert told == family
    probe.run()
    assert_answer(probe, other, list(range(20, 30)), 6)


def test_what_changes_nothing_is_not_told_and_nobody_is_asked_for() -> None:
    probe = EngineProbe(make_core())
    request = probe.add([1], tokens(2), priority=3)
    probe.step()
    probe.core.set_priority(request, 3)
    probe.core.set_priority(77, 1)
    probe.run()
    probe.core.set_priority(request, 1)
    assert not probe.core.has_work and probe.of(Reprioritised) == []


def test_a_priority_may_change_in_the_middle_of_a_step() -> None:
    probe = EngineProbe(make_core(order="priority", max_num_seqs=1))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    running, waiting = probe.add([1], tokens(9), priority=1), probe.add([2], tokens(2), priority=2)
    runner.during = lambda plan: probe.core.set_priority(waiting, 0)
    probe.step()
    runner.during = None
    assert probe.answers[running].token_ids, "the step that ran still counts"
    probe.step()
    assert set(plan_of(probe)) == {waiting}
    probe.run()
    assert_answer(probe, running, [1], 9)


@pytest.mark.parametrize("ageing", [None, 2.0])
def test_the_queue_is_sorted_whoever_is_moved_and_keeps_no_more_dead_than_living(ageing: float | None) -> None:
    config = SchedulerConfig(order="priority", ageing=ageing)
    rng, order = random.Random(f"{ageing}"), QueueOrder(config)
    line = WaitingLine(order, config)
    waiting: list[Request] = []
    for request_id in range(1, 200):
        request = Request(request_id, [1], SamplingParams(), max_tokens=1, arrival_time=rng.random())
        line.push(request)
        waiting.append(request)
    for _ in range(5_000):
        request = rng.choice(waiting)
        request.priority = rng.randrange(5)
        line.place_anew(request)
        assert line.head() is min(waiting, key=order.key)
    assert line.in_order() == sorted(waiting, key=order.key) and len(line) == 199
    assert len(line.queue._heap) <= 3 * 199 + 64


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_priorities_change_in_every_state_of_random_traffic(discipline: str, preemption: str) -> None:
    trace = run_trace(
        1,
        block_size=4,
        num_requests=60,
        ranks=0.5,
        changes=0.02,
        discipline=discipline,
        preemption=preemption,
        order="priority",
        max_num_seqs=4,
    )
    assert set(trace.ranked_in) >= {"waiting", "running", "over"}
    if discipline == "vllm":
        assert set(trace.ranked_in) & {"preempted", "swapped"}
    assert trace.probe.of(Reprioritised)


# Taking in without a step -------------------------------------------------------------------------------------------


def test_a_pause_takes_in_who_comes_and_ends_who_is_aborted() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1))
    running, waiting = probe.add([1], tokens(9)), probe.add([2], tokens(9))
    probe.step()
    steps = probe.state.totals.steps
    new = probe.add([3], tokens(2), priority=4)
    probe.core.set_priority(waiting, 2)
    probe.core.reconfigure(SchedulerConfig(max_num_seqs=1, chunk_size=7))
    probe.core.abort(running)
    probe.take_in()
    assert probe.answers[running].finish_reason == "abort"
    assert set(probe.state.requests) == {waiting, new} and probe.state.num_running == 0
    assert probe.state.scheduler is not None and probe.state.scheduler.chunk_size == 7
    assert probe.state.totals.steps == steps
    assert probe.take_in().record is None, "there is nothing more to tell"
    probe.run()
    assert_answer(probe, waiting, [2], 9)


def test_an_abort_of_the_last_open_answer_of_a_static_batch_lets_the_others_out() -> None:
    probe = EngineProbe(make_core(discipline="static"))
    short, long = probe.add([1], tokens(1)), probe.add([2] * 3, tokens(40))
    for _ in range(3):
        probe.step()
    assert probe.answers[short].last is None, "it is held back with its batch"
    assert probe.core.keyframe().batch is not None
    probe.core.abort(long)
    probe.take_in()
    assert probe.answers[short].finish_reason == "length" and probe.answers[long].finish_reason == "abort"
    assert probe.core.keyframe().batch is None and not probe.core.has_work
