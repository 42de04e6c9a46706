"""Memory under pressure: no deadlock, no livelock, no answer changed, whichever way a request yields.

Groups S and K of the project's list of faults that engines have had, as far as the scheduler goes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import DISCIPLINES, SchedulerConfig
from engine.events import Admitted, Preempted, Recovered, SwapDropped, SwappedIn, SwappedOut
from engine.memory.block_pool import OutOfBlocksError
from engine.request import RequestStatus, SamplingParams, branch_id
from engine.scheduling.costs import PreemptionCosts
from tests.oracles import (
    EngineProbe,
    KVCheckingRunner,
    assert_pool_whole,
    cold_answer,
    make_core,
    preemptions_of,
    prefilled_tokens,
)
from tests.scheduling.common import assert_answer, plan_of, tokens

PREEMPTING = ("vllm", "trtllm-max-util")
CHEAP_SWAP = PreemptionCosts(seconds_per_token=1.0, seconds_per_block=1.0)
DEAR_SWAP = PreemptionCosts(seconds_per_token=1.0, seconds_per_block=1_000.0)
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption": "recompute"},
    "swap": {"preemption": "swap"},
    "auto that swaps": {"preemption": "auto", "costs": CHEAP_SWAP},
    "auto that recomputes": {"preemption": "auto", "costs": DEAR_SWAP},
}
SWAPPING = ("swap", "auto that swaps")


def tight(discipline: str, mode: str, num_blocks: int, **options: Any) -> EngineProbe:
    settings = {"num_host_blocks": num_blocks, "prefix_cache": False, **MODES[mode], **options}
    return EngineProbe(make_core(discipline=discipline, num_blocks=num_blocks, **settings))


# Progress ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare", [0, 1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_pool_for_one_request_serves_all_of_them(discipline: str, mode: str, spare: int) -> None:
    """The probe holds that somebody moves at every step, holders of host memory included."""
    probe = tight(discipline, mode, 5 + spare, block_size=4, token_budget=16)
    ids = [probe.add([i] * 10, tokens(11)) for i in range(6)]  # 20 tokens: 5 blocks
    probe.run()
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 10, 11)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discipline", PREEMPTING)
@pytest.mark.parametrize(
    ("count", "prompt", "answer", "room"),
    [(2, 600, 200, 1_000), (3, 600, 200, 1_300), (4, 200, 200, 900), (6, 100, 150, 700), (2, 16, 400, 500)],
)
def test_nobody_is_computed_over_and_over(
    discipline: str, mode: str, count: int, prompt: int, answer: int, room: int
) -> None:
    probe = tight(discipline, mode, room // 16, token_budget=128)
    ids = [probe.add([i] * prompt, tokens(answer)) for i in range(count)]
    probe.run()
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * prompt, answer)
    totals = probe.records[-1].totals
    if prompt > answer:
        assert prefilled_tokens(probe.records) <= 2 * count * prompt
    assert totals.computed_tokens <= 2 * count * (prompt + answer - 1)
    assert totals.preemptions == len(probe.of(Preempted)) <= 2 * count
    assert totals.recomputed_tokens == totals.computed_tokens - count * (prompt + answer - 1)
    assert bool(probe.of(Preempted)) == (2 * prompt <= room), "two of 600 tokens do not even begin together"
    if mode in SWAPPING:
        assert totals.recomputed_tokens == 0 and totals.swapped_in_blocks == totals.swapped_out_blocks


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discipline", PREEMPTING)
def test_a_stream_of_arrivals_does_not_make_a_tight_pool_thrash(discipline: str, mode: str) -> None:
    rng = random.Random(5)
    probe = tight(discipline, mode, 40, block_size=4, token_budget=32)
    asked = {}
    for _ in range(60):
        prompt, answer = [rng.randrange(900) for _ in range(rng.randint(5, 40))], rng.randint(10, 60)
        asked[probe.add(prompt, tokens(answer))] = (prompt, answer)
        for _ in range(rng.randrange(12)):
            probe.step()
    probe.run()
    for request, (prompt, answer) in asked.items():
        assert_answer(probe, request, prompt, answer)
    assert 0 < len(probe.of(Preempted)) <= 2 * len(asked)
    assert probe.records[-1].totals.computed_tokens <= 2 * sum(len(p) + o - 1 for p, o in asked.values())


# Priorities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discipline", PREEMPTING)
def test_the_high_start_next_step_and_equals_never_evict_each_other(discipline: str, mode: str) -> None:
    probe = tight(discipline, mode, 64, max_num_seqs=2, order="priority")
    low = [probe.add([i], tokens(40), priority=5, arrival_time=float(i)) for i in range(2)]
    probe.step()
    probe.add([7], tokens(3), priority=5, arrival_time=2.0)
    for _ in range(5):
        probe.step()
    assert not probe.of(Preempted) and set(plan_of(probe)) == set(low)
    high = probe.add([8], tokens(3), priority=1, arrival_time=3.0)
    probe.step()
    assert high in plan_of(probe)
    probe.run()
    assert [(e.request_id, e.beneficiary) for e in probe.of(Preempted)] == [(low[1], high)], "once, and no ping-pong"
    assert_answer(probe, low[1], [1], 40)


# Answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("discipline", PREEMPTING)
@pytest.mark.parametrize("outputs", [1, 15, 16, 17])
def test_preemption_after_any_number_of_outputs_changes_no_answer(
    outputs: int, discipline: str, mode: str, prefix_cache: bool
) -> None:
    probe = tight(discipline, mode, 64, max_num_seqs=1, order="priority", prefix_cache=prefix_cache)
    victim = probe.add([1, 2, 3, 4, 5], tokens(40), priority=1)
    while len(probe.answers[victim].token_ids) < outputs:
        probe.step()
    probe.add([7, 7], tokens(3), priority=0)
    probe.run()
    assert len(preemptions_of(probe, victim)) == 1
    answer = probe.answers[victim]
    assert answer.token_ids == cold_answer([1, 2, 3, 4, 5], 40), "no repeat, no gap"
    assert answer.last is not None and answer.last.preemptions == 1 and answer.last.prompt_tokens == 5
    assert probe.records[-1].totals.output_tokens == 43


def test_what_comes_back_from_the_host_computes_nothing_again_and_samples_once() -> None:
    probe = tight("vllm", "swap", 64, max_num_seqs=1, order="priority", block_size=4)
    victim = probe.add([1, 2, 3], tokens(40), priority=1)
    for _ in range(6):
        probe.step()
    probe.add([7, 7], tokens(2), priority=0)
    probe.run()
    assert_answer(probe, victim, [1, 2, 3], 40)
    assert prefilled_tokens(probe.records) == 3 + 2
    out, back = probe.of(SwappedOut)[0], probe.of(SwappedIn)[0]
    assert out.request_id == back.request_id == victim and out.host_blocks == back.host_blocks
    assert len(out.blocks) == 2, "8 computed tokens, however many blocks were held"
    recovered = probe.of(Recovered)[0]
    assert (recovered.request_id, recovered.recomputed_tokens) == (victim, 0)
    totals = probe.records[-1].totals
    assert totals.swapped_out_blocks == totals.swapped_in_blocks == 2


def test_auto_takes_what_is_cheaper_and_shows_both_estimates() -> None:
    """2 blocks against 8 tokens: swapping at 3 s a block costs 6 s, computing at 1 s a token 8 s."""
    for per_block, mode in ((3.0, "swap"), (5.0, "recompute")):
        costs = PreemptionCosts(seconds_per_token=1.0, seconds_per_block=per_block)
        core = make_core(
            max_num_seqs=1, order="priority", block_size=4, preemption="auto", costs=costs, num_host_blocks=64
        )
        probe = EngineProbe(core)
        probe.add([1, 2, 3], tokens(40), priority=1)
        for _ in range(6):
            probe.step()
        probe.add([7, 7], tokens(2), priority=0)
        probe.run()
        event = probe.of(Preempted)[0]
        assert event.mode == mode and event.fallback == ""
        assert (event.recompute_seconds, event.swap_seconds) == (8.0, 2 * per_block)


def test_auto_without_measured_costs_computes_again() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1, order="priority", preemption="auto", num_host_blocks=64))
    probe.add([1, 2, 3], tokens(40), priority=1)
    probe.step()
    probe.add([7, 7], tokens(2), priority=0)
    probe.run()
    event = probe.of(Preempted)[0]
    assert (event.mode, event.recompute_seconds, event.swap_seconds) == ("recompute", None, None)


# Host memory ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", PREEMPTING)
@pytest.mark.parametrize("num_host_blocks", [0, 1, 2])
def test_a_host_pool_that_is_full_falls_back_to_recomputing(discipline: str, num_host_blocks: int) -> None:
    probe = tight(discipline, "swap", 12, block_size=4, num_host_blocks=num_host_blocks, token_budget=32)
    ids = [probe.add([i] * 6, tokens(30)) for i in range(5)]
    probe.run()
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 6, 30)
    modes = {event.mode for event in probe.of(Preempted)}
    assert "recompute" in modes
    fallen = [event for event in probe.of(Preempted) if event.mode == "recompute"]
    assert all(f"host blocks and {num_host_blocks} are free" in e.fallback or " are free" in e.fallback for e in fallen)


@pytest.mark.parametrize("discipline", PREEMPTING)
def test_swapped_requests_come_back_before_new_ones_and_none_starves(discipline: str) -> None:
    probe = tight(discipline, "swap", 24, block_size=4, token_budget=32, max_num_seqs=16)
    ids = []
    swapped_since: dict[int, int] = {}
    longest = 0
    for i in range(20):
        ids.append(probe.add([i] * 9, SamplingParams(max_tokens=12, n=3)))
    for step in range(5_000):
        if not probe.core.has_work:
            break
        record = probe.step().record
        assert record is not None
        for event in record.events:
            if isinstance(event, Admitted):
                first = min(swapped_since, key=swapped_since.__getitem__, default=None)
                assert first is None or event.request_id in swapped_since, "a new one starts, and a swapped one waits"
                longest = max(longest, step - swapped_since.pop(event.request_id, step))
            elif isinstance(event, SwappedOut):
                swapped_since[event.request_id] = step
            elif isinstance(event, SwapDropped):
                swapped_since.pop(event.request_id)
    assert_pool_whole(probe.core)
    assert probe.of(SwappedIn), "or there was no pressure"
    assert longest <= 12 * 16, "as many steps as the running need to finish"
    for i, request in enumerate(ids):
        for index in range(3):
            answer = probe.answers[branch_id(request, index)]
            assert answer.token_ids == cold_answer([i] * 9, 12, index=index)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("during", [False, True])
@pytest.mark.parametrize("state", ["swapped", "coming back", "came back"])
def test_aborts_around_a_swap_leave_both_pools_whole(state: str, during: bool, prefix_cache: bool) -> None:
    core = make_core(
        max_num_seqs=1, order="priority", block_size=4, preemption="swap", num_host_blocks=8, prefix_cache=prefix_cache
    )
    probe, runner = EngineProbe(core), core._runner
    assert isinstance(runner, KVCheckingRunner)
    victim = probe.add(range(9), tokens(40), priority=1)
    for _ in range(4):
        probe.step()
    other = probe.add([7], tokens(3), priority=0)
    probe.step()
    assert probe.row(victim).status == RequestStatus.SWAPPED
    if state != "swapped":
        while probe.answers[other].last is None:
            probe.step()
    if state == "came back":
        probe.step()
        assert probe.row(victim).status == RequestStatus.RUNNING
    if during or state == "coming back":
        # It is taken back in by the plan of this very step, which moves its blocks while it is aborted.
        runner.during = lambda plan: core.abort(victim)
        probe.step()
        runner.during = None
        if state == "coming back":
            assert runner.plan is not None and runner.plan.swap_in
    else:
        core.abort(victim)
    probe.run()
    core.abort(victim)
    assert not core.has_work
    answer = probe.answers[victim]
    assert answer.finish_reason == "abort"
    assert answer.token_ids == cold_answer(range(9), len(answer.token_ids))
    later = probe.add(range(9), tokens(6))
    probe.run()
    assert_answer(probe, later, list(range(9)), 6)


def test_blocks_that_others_share_stay_and_are_given_up_when_nobody_else_can_move() -> None:
    """Two swapped answers share their prompt's blocks on the device, and one that needs more than the rest is first."""
    probe = tight("vllm", "swap", 12, block_size=4, order="priority", token_budget=64)
    family = probe.add(range(24), SamplingParams(max_tokens=9, n=2), priority=5)
    for _ in range(3):
        probe.step()
    high = probe.add([7] * 40, tokens(5), priority=0)  # 11 of 12 blocks
    probe.step()
    swapped = [row for row in probe.core.keyframe().requests if row.status == RequestStatus.SWAPPED]
    dropped = probe.of(SwapDropped)
    assert len(swapped) + len(dropped) >= 1
    probe.run()
    assert_answer(probe, high, [7] * 40, 5)
    for index in range(2):
        assert probe.answers[branch_id(family, index)].token_ids == cold_answer(range(24), 9, index=index)


# Allocations that fail --------------------------------------------------------------------------------------------


def failing_take(take: Callable[..., list[int]], fails: Callable[[int], bool]) -> Callable[..., list[int]]:
    calls = 0

    def attempt(count: int, evicted: list[int]) -> list[int]:
        nonlocal calls
        if count == 0:
            return take(count, evicted)
        calls += 1
        if fails(calls):
            raise OutOfBlocksError("injected")
        return take(count, evicted)

    return attempt


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("failure", range(1, 13))
def test_an_allocation_that_fails_although_it_was_counted_on_harms_nobody(
    failure: int, discipline: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th time that blocks are taken fails, whoever takes them: at joining, at growing, at padding a batch."""
    probe = tight(discipline, mode, 40, block_size=4, waiting_served_ratio=0.0, prefix_cache=True, speculative="ngram")
    pool = probe.core._scheduler.memory.pool
    monkeypatch.setattr(pool, "take", failing_take(pool.take, lambda call: call == failure))
    prompts = {probe.add([i] * (5 + 4 * i), tokens(14)): [i] * (5 + 4 * i) for i in range(3)}
    probe.step()
    prompts[late] = [9] * 7 if (late := probe.add([9] * 7, tokens(14))) else []
    probe.run()
    for request, prompt in prompts.items():
        assert_answer(probe, request, prompt, 14)


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("seed", range(4))
def test_one_allocation_in_four_may_fail(seed: int, discipline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    probe = tight(discipline, "swap", 30, block_size=2, waiting_served_ratio=0.0)
    probe._watch_progress = lambda record: None  # type: ignore[method-assign]  # a failure may well cost a step
    pool = probe.core._scheduler.memory.pool
    monkeypatch.setattr(pool, "take", failing_take(pool.take, lambda call: rng.random() < 0.25))
    asked = {}
    for _ in range(12):
        prompt, answer = [rng.randrange(900) for _ in range(rng.randint(1, 20))], rng.randint(1, 20)
        asked[probe.add(prompt, tokens(answer))] = (prompt, answer)
        probe.step()
    probe.run(max_steps=5_000)
    for request, (prompt, answer) in asked.items():
        assert_answer(probe, request, prompt, answer)


# Recordings of what it cost ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", PREEMPTING)
def test_every_preemption_says_for_whom_by_which_rule_and_what_it_cost(discipline: str) -> None:
    core = make_core(
        discipline=discipline,
        num_blocks=14,
        block_size=4,
        prefix_cache=False,
        preemption="auto",
        costs=CHEAP_SWAP,
        num_host_blocks=6,
        clock=iter(range(10**6)).__next__,
    )
    probe = EngineProbe(core)
    for i in range(5):
        probe.add([i] * 6, tokens(25))
    probe.run()
    events = probe.of(Preempted)
    assert {event.mode for event in events} == {"swap", "recompute"}
    for event in events:
        assert event.rule and event.beneficiary in probe.answers and event.tokens > 0 and event.blocks > 0
        assert event.recompute_seconds == event.tokens
        assert (event.swapped_blocks > 0) == (event.mode == "swap")
    recovered = probe.of(Recovered)
    assert len(recovered) <= len(events)
    assert {event.request_id for event in recovered} == {event.request_id for event in events}
    assert all(event.seconds > 0 for event in recovered)
    assert sum(event.recomputed_tokens for event in recovered) == probe.records[-1].totals.recomputed_tokens


@pytest.mark.parametrize("discipline", PREEMPTING)
def test_what_the_victims_of_an_arrival_share_with_each_other_makes_room_for_it(discipline: str) -> None:
    """Swapped they would go on holding it, and the arrival for which they yielded would wait all the same."""
    probe = tight(discipline, "swap", 14, block_size=4, order="priority", prefix_cache=True)
    common = list(range(24))
    low = []
    for i in range(2):
        low.append(probe.add([*common, 900 + i], tokens(8), priority=5))
        probe.step()
    probe.add(range(600, 605), tokens(16), priority=0)
    probe.step()
    high = probe.add(range(500, 528), tokens(1), priority=0)
    probe.step()
    assert probe.answers[high].finish_reason == "length"
    assert {event.request_id for event in probe.of(Preempted)} == set(low)
    probe.run()
    for i, request in enumerate(low):
        assert_answer(probe, request, [*common, 900 + i], 8)
    moved = sum(len(event.blocks) for event in probe.of(SwappedIn))
    assert probe.records[-1].totals.swapped_out_blocks == probe.records[-1].totals.swapped_in_blocks == moved


def test_references_given_back_leave_out_what_a_swapped_request_goes_on_sharing() -> None:
    probe = tight("vllm", "swap", 64, block_size=4, order="priority", max_num_seqs=2, prefix_cache=True)
    common = list(range(24))
    probe.add([*common, 900], tokens(8), priority=5)
    probe.step()
    probe.add([*common, 901], tokens(8), priority=5)
    probe.step()
    probe.add([1], tokens(2), priority=0)
    probe.step()
    event = probe.of(Preempted)[0]
    assert (event.mode, event.blocks, event.swapped_blocks) == ("swap", 1, 1)
    probe.run()


def test_a_full_queue_behind_a_preempted_head_is_released_when_the_discipline_changes() -> None:
    """What a discipline that reserves takes over from one that swapped is computed again, and nothing is lost."""
    probe = tight("vllm", "swap", 12, block_size=4, max_num_seqs=4)
    ids = [probe.add([i] * 6, tokens(25)) for i in range(4)]
    while not any(row.status == RequestStatus.SWAPPED for row in probe.core.keyframe().requests):
        probe.step()
    probe.core.reconfigure(SchedulerConfig(discipline="orca", preemption="swap"))
    probe.run()
    assert {event.reason for event in probe.of(SwapDropped)} == {"orca does not swap"}
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 6, 25)
