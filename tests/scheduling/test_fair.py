"""Order ``fair``: the queue against a plain model of virtual token counters, and what users get from an engine."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from engine.config import SchedulerConfig
from engine.request import Request, RequestStatus, SamplingParams
from engine.scheduling.orders import MAX_IDLE_USERS, FairQueue, QueueOrder
from tests.oracles import EngineProbe, make_core, preemptions_of
from tests.scheduling.common import admitted_order, plan_of, tokens


def fair_queue(**weights: float) -> FairQueue:
    return FairQueue(QueueOrder(SchedulerConfig(order="fair")), weights)


class PlainCounters:
    """The same rules written down without a thought for cost: Algorithm 2 of the paper, with weights. Preemption, which
    the paper has not, lifts nobody."""

    def __init__(self, weights: dict[str, float]) -> None:
        self.weights = weights
        self.served: dict[str, float] = defaultdict(float)
        self.waiting: list[Request] = []
        self.last_left: str | None = None

    def users(self) -> set[str]:
        return {request.user for request in self.waiting}

    def push(self, request: Request) -> None:
        if request.status is RequestStatus.WAITING and request.user not in self.users():
            if self.waiting:
                least = min(self.served[user] for user in self.users())
            else:
                least = 0.0 if self.last_left is None else self.served[self.last_left]
            self.served[request.user] = max(self.served[request.user], least)
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        if request.user not in self.users():
            self.last_left = request.user

    def in_order(self) -> list[Request]:
        return sorted(self.waiting, key=lambda r: (self.served[r.user], r.user, r.arrival_time, r.request_id))

    def charge(self, request: Request, input_tokens: int, output_tokens: int) -> None:
        self.served[request.user] += (input_tokens + 2 * output_tokens) / self.weights.get(request.user, 1.0)


@pytest.mark.parametrize("num_users", [1, 2, 5, 200])
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_against_the_plain_model(seed: int, num_users: int) -> None:
    rng, weights = random.Random(f"{seed} {num_users}"), {"u0": 4.0, "u1": 0.25}
    queue, model = fair_queue(**weights), PlainCounters(weights)
    running: list[Request] = []
    for request_id in range(1, 1_500):
        choice = rng.random()
        if choice < 0.4:
            one = Request(
                request_id,
                [1] * rng.randint(1, 9),
                SamplingParams(),
                max_tokens=1,
                user=f"u{rng.randrange(num_users)}",
                arrival_time=float(rng.randrange(50)),
            )
            queue.push(one)
            model.push(one)
        elif choice < 0.6 and model.waiting:
            one = model.in_order()[0]
            assert queue.head() is one
            one.status = RequestStatus.RUNNING
            queue.forget(one)
            model.remove(one)
            queue.charge(one, input_tokens=one.num_prompt_tokens)
            model.charge(one, one.num_prompt_tokens, 0)
            running.append(one)
        elif choice < 0.7 and model.waiting:
            one = rng.choice(model.waiting)
            one.status = RequestStatus.FINISHED
            queue.forget(one)
            model.remove(one)
        elif choice < 0.8 and running:
            one = running.pop(rng.randrange(len(running)))
            one.status, one.epoch = RequestStatus.PREEMPTED, one.epoch + 1
            queue.push(one)
            model.push(one)
        elif running:
            one = rng.choice(running)
            queue.charge(one, output_tokens=(count := rng.randint(1, 5)))
            model.charge(one, 0, count)
        assert len(queue) == len(model.waiting)
        assert queue.head() is (model.in_order()[0] if model.waiting else None)
        if request_id % 50 == 0:
            assert queue.in_order() == model.in_order()
            assert all(queue.served(user) == pytest.approx(served) for user, served in model.served.items())


# What is kept -----------------------------------------------------------------------------------------------------


def visit(queue: FairQueue, request_id: int, user: str, *, tokens: int) -> None:
    """Somebody comes, and is aborted while waiting or gets some ``tokens``."""
    one = Request(request_id, [1], SamplingParams(), max_tokens=1, user=user)
    queue.push(one)
    one.status = RequestStatus.RUNNING if tokens else RequestStatus.FINISHED
    queue.forget(one)
    if tokens:
        queue.charge(one, input_tokens=tokens)


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("somebody_waits", [True, False])
def test_a_hundred_thousand_users_leave_a_bounded_trace(somebody_waits: bool, tokens: int) -> None:
    queue = fair_queue()
    if somebody_waits:
        queue.push(Request(1, [1], SamplingParams(), max_tokens=1, user="a waits"))
    for number in range(100_000):
        visit(queue, number + 2, f"user {number}", tokens=tokens)
    assert len(queue._served) <= 2 * MAX_IDLE_USERS + 2
    assert len(queue._users) <= 70 and queue._listed == {user for _, user in queue._users}
    assert len(queue._queues) == len(queue) == somebody_waits


def test_a_forgotten_user_comes_back_in_the_right_place() -> None:
    """What the queue noted of a user before it forgot the counter must not stand in for the new one."""
    queue = fair_queue()
    visit(queue, 1, "forgotten", tokens=500)
    head = Request(2, [1], SamplingParams(), max_tokens=1, user="a")
    head_user_served = queue.served("a")
    queue.push(head)
    visit(queue, 3, "forgotten", tokens=500)
    for number in range(2 * MAX_IDLE_USERS + 10):
        visit(queue, number + 4, f"user {number}", tokens=10_000)
    assert queue.served("forgotten") == head_user_served == 0.0
    back = Request(99_999_999, [1], SamplingParams(), max_tokens=1, user="forgotten")
    queue.push(back)
    queue.charge(head, input_tokens=100)
    assert queue.served("forgotten") < queue.served("a")
    assert queue.head() is back


# In an engine -----------------------------------------------------------------------------------------------------


def fair(**options: object) -> EngineProbe:
    return EngineProbe(make_core(order="fair", **options))  # type: ignore[arg-type]


def served(probe: EngineProbe, user: str) -> float:
    queue = probe.core._scheduler.waiting.queue
    assert isinstance(queue, FairQueue)
    return queue.served(user)


def test_a_user_with_one_request_starts_before_the_hundred_of_another() -> None:
    probe = fair(max_num_seqs=4)
    many = [probe.add([1] * 8, tokens(10), user="a") for _ in range(100)]
    for _ in range(3):
        probe.step()
    one = probe.add([2] * 8, tokens(10), user="b")
    for _ in range(11):
        probe.step()
    assert one in admitted_order(probe), "with the first place that becomes free"
    assert admitted_order(probe).index(one) <= 4
    probe.run()
    fcfs = EngineProbe(make_core(max_num_seqs=4))
    for _ in range(100):
        fcfs.add([1] * 8, tokens(10))
    last = fcfs.add([2] * 8, tokens(10))
    fcfs.run()
    assert admitted_order(fcfs)[-1] == last
    assert set(admitted_order(probe)) == {*many, one}


def test_two_backlogged_users_get_the_same_service_whatever_their_lengths() -> None:
    probe = fair(max_num_seqs=3)
    for _ in range(60):
        probe.add([1] * 4, tokens(4), user="short")
    for _ in range(15):
        probe.add([2] * 30, tokens(20), user="long")
    probe.step()
    while len(probe.core.keyframe().requests) > 25:
        probe.step()
    difference = abs(served(probe, "short") - served(probe, "long"))
    assert difference <= 2 * (30 + 2 * 20) * 3, "the bound of the paper: twice what the places can hold"
    assert served(probe, "short") > 300
    probe.run()


def test_weights_are_shares() -> None:
    probe = fair(max_num_seqs=2, user_weights={"heavy": 3.0})
    owners = {}
    for _ in range(60):
        for user in ("heavy", "light"):
            owners[probe.add([1] * 4, tokens(8), user=user)] = user
    for _ in range(200):
        probe.step()
    started = [owners[request] for request in admitted_order(probe)]
    assert started.count("heavy") == pytest.approx(3 * started.count("light"), rel=0.15)
    probe.run()


def test_other_weights_forget_nothing_of_what_users_have_got() -> None:
    probe = fair(max_num_seqs=1)
    for _ in range(3):
        probe.add([1] * 8, tokens(10), user="heavy")
    while len(admitted_order(probe)) < 2:
        probe.step()
    before = served(probe, "heavy")
    probe.core.reconfigure(SchedulerConfig(order="fair", max_num_seqs=1, user_weights={"light": 2.0}))
    probe.step()
    assert served(probe, "heavy") == before + 2
    probe.add([2] * 8, tokens(10), user="light")
    probe.step()
    assert served(probe, "light") == before + 2, "what the one who waits had got"
    probe.run()


def test_idle_time_earns_no_credit() -> None:
    probe = fair(max_num_seqs=1)
    probe.add([1] * 4, tokens(2), user="returns")
    probe.run()
    for _ in range(30):
        probe.add([2] * 4, tokens(10), user="works")
    for _ in range(200):
        probe.step()
    returning = [probe.add([1] * 4, tokens(10), user="returns") for _ in range(10)]
    at = len(admitted_order(probe))
    probe.run()
    after = ["returns" if request in returning else "works" for request in admitted_order(probe)[at:]]
    assert after[:8].count("returns") in (4, 5), "they take turns; it does not catch up on what it never asked for"


def test_an_empty_queue_gives_no_credit_over_whoever_left_it_last() -> None:
    probe = fair(max_num_seqs=2)
    first = probe.add([1] * 4, tokens(200), user="a")
    for _ in range(150):
        probe.step()
    assert served(probe, "a") == 4 + 2 * 150
    probe.add([2] * 4, tokens(10), user="b")
    probe.step()
    assert served(probe, "b") >= 4 + 2 * 150
    probe.core.abort(first)
    probe.run()


def test_aborted_and_repeated_work_is_charged_once() -> None:
    probe = fair(max_num_seqs=2, num_blocks=8, block_size=4)
    waits = probe.add([1] * 5, tokens(8), user="w")
    probe.core.abort(waits)
    probe.step()
    assert served(probe, "w") == 0, "it never ran"
    first = probe.add([1] * 8, tokens(16), user="a")
    second = probe.add([2] * 8, tokens(16), user="b")
    while not probe.core._scheduler.counters.preemptions:
        probe.step()
    probe.run()
    for user, request in (("a", first), ("b", second)):
        assert served(probe, user) >= 8 + 2 * len(probe.answers[request].token_ids)
    lifted = served(probe, "b") - served(probe, "a")
    assert abs(lifted) <= 8 + 2 * 16, "what was computed again cost nothing"
    third = probe.add([3] * 6, tokens(9), user="c")
    for _ in range(3):
        probe.step()
    before = served(probe, "c")
    probe.core.abort(third)
    probe.run()
    assert served(probe, "c") == before, "what it got stays charged, and nothing more"


def test_a_preempted_request_is_the_first_of_its_user_again() -> None:
    probe = fair(max_num_seqs=4, num_blocks=10, block_size=4)
    ids = [probe.add([i] * 8, tokens(20), user="a", arrival_time=float(i)) for i in range(6)]
    while not probe.core._scheduler.counters.preemptions:
        probe.step()
    waiting = [row.request_id for row in probe.core.keyframe().requests if row.status != RequestStatus.RUNNING]
    assert waiting == sorted(waiting)
    probe.run()
    first_starts = list(dict.fromkeys(admitted_order(probe)))
    assert first_starts == ids


def test_a_preempted_request_costs_its_user_no_credit() -> None:
    probe = fair(num_blocks=16, block_size=4, max_num_seqs=3, prefix_cache=False)
    heavy = [probe.add([i] * 20, tokens(30), user="heavy") for i in range(6)]
    while served(probe, "heavy") < 90:
        probe.step()
    light = probe.add([9], tokens(60), user="light")
    while not preemptions_of(probe, light):
        before = served(probe, "light")
        probe.step()
    assert served(probe, "light") <= before + 2 < served(probe, "heavy")
    probe.run()
    assert all(len(probe.answers[request].token_ids) == 30 for request in heavy)


@pytest.mark.parametrize("discipline", ["static", "orca", "vllm", "tgi", "trtllm-no-evict", "trtllm-max-util"])
def test_every_discipline_serves_the_light_user_within_a_bound(discipline: str) -> None:
    probe = fair(discipline=discipline, max_num_seqs=4, token_budget=128)
    for _ in range(50):
        probe.add([1] * 8, tokens(10), user="a")
    probe.step()
    one = probe.add([2] * 8, tokens(10), user="b")
    steps = 0
    while one not in plan_of(probe):
        probe.step()
        steps += 1
    assert steps <= 12, "the batch that ran when it came, and one step"
    probe.run()
