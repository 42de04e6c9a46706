"""What the ``vllm`` discipline decides: who runs, who waits and why, who yields."""

from __future__ import annotations

import pytest

from engine.events import Admitted, Deferred, Preempted, RowKind, SwappedOut
from engine.memory.block_pool import OutOfBlocksError
from engine.scheduling.disciplines.vllm import RULE_ARRIVAL, RULE_GROWTH
from tests.oracles import (
    EDGE_LENGTHS,
    EngineProbe,
    assert_cold,
    kinds_of,
    make_core,
    preemptions_of,
)
from tests.scheduling.common import assert_answer, plan_of, tokens

# Budget and chunks ------------------------------------------------------------------------------------------------


def test_decodes_come_first_and_the_chunk_takes_what_is_left() -> None:
    probe = EngineProbe(make_core(token_budget=64))
    decoders = [probe.add([i, i + 1], tokens(50)) for i in range(10)]
    probe.step()
    long = probe.add(range(200), tokens(5))
    chunks = []
    for _ in range(4):
        probe.step()
        plan = plan_of(probe)
        assert list(plan)[:10] == decoders and all(plan[d] == 1 for d in decoders)
        assert sum(plan.values()) <= 64
        chunks.append(plan[long])
    assert chunks == [54, 54, 54, 38]
    probe.run()
    assert_answer(probe, long, list(range(200)), 5)


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_a_budget_below_the_number_of_requests_still_moves_every_running_one(budget: int) -> None:
    probe = EngineProbe(make_core(token_budget=budget, max_num_seqs=10))
    ids = [probe.add([i] * 4, tokens(6)) for i in range(10)]
    while probe.core.has_work:
        result = probe.step()
        assert result.record is not None and sum(result.record.num_tokens) <= budget
        assert result.record.num_running <= budget
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, [i] * 4, 6)


def test_a_budget_full_of_decodes_is_no_shield_against_a_higher_priority() -> None:
    probe = EngineProbe(make_core(token_budget=2, max_num_seqs=8, order="priority"))
    low = [probe.add([i], tokens(30), priority=5, arrival_time=float(i)) for i in range(3)]
    probe.step()
    assert set(plan_of(probe)) == set(low[:2])
    assert probe.core.keyframe().deferred == Deferred(low[2], "budget", 1, 0)
    high = probe.add([9], tokens(2), priority=0, arrival_time=9.0)
    probe.step()
    assert set(plan_of(probe)) == {low[0], high}
    probe.run()
    assert_answer(probe, low[1], [1], 30)


def test_chunks_make_the_same_steps_whatever_the_cache_does() -> None:
    """Five chunks are five prefill rows, and each moves on from the one before."""
    probe = EngineProbe(make_core(token_budget=16, prefix_cache=False))
    request = probe.add(range(80), tokens(3))
    probe.run()
    assert kinds_of(probe.records, request)[:5] == [(RowKind.PREFILL, 16)] * 5
    assert [kind for kind, _ in kinds_of(probe.records, request)[5:]] == [RowKind.DECODE] * 2


def test_without_chunks_a_prompt_that_does_not_fit_the_rest_of_the_budget_takes_no_memory() -> None:
    probe = EngineProbe(make_core(token_budget=40, chunked_prefill=False))
    first = probe.add([1] * 35, tokens(4))
    waiting = probe.add([2] * 40, tokens(2))
    probe.step()
    assert plan_of(probe) == {first: 35}
    assert probe.row(waiting).blocks == [] and probe.state.referenced_blocks == 3
    assert probe.core.keyframe().deferred == Deferred(waiting, "budget", 40, 5)
    probe.run()
    assert kinds_of(probe.records, waiting)[0] == (RowKind.PREFILL, 40)


def test_without_chunks_what_grew_beyond_a_step_comes_back_alone() -> None:
    probe = EngineProbe(
        make_core(num_blocks=8, block_size=4, token_budget=12, chunked_prefill=False, prefix_cache=False)
    )
    ids = [probe.add([i] * 10, tokens(12)) for i in range(2)]
    probe.run()
    assert probe.records[-1].totals.preemptions >= 1
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, [i] * 10, 12)


def test_without_chunks_a_prompt_longer_than_the_budget_is_the_only_prefill_of_its_step() -> None:
    probe = EngineProbe(make_core(token_budget=40, chunked_prefill=False))
    first = probe.add([3] * 20, tokens(6))
    request = probe.add([1] * 100, tokens(3))
    behind = probe.add([2] * 5, tokens(3))
    probe.step()
    assert plan_of(probe) == {first: 20}
    probe.step()
    assert plan_of(probe) == {first: 1, request: 100}
    probe.step()
    assert plan_of(probe) == {first: 1, request: 1, behind: 5}
    probe.run()
    assert_answer(probe, request, [1] * 100, 3)


# Who fits ---------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once_and_the_rest_finishes() -> None:
    probe = EngineProbe(make_core(num_blocks=49, token_budget=256, max_num_seqs=4))
    huge = probe.add([5] * 1_002)
    edge = probe.add([6] * 700, tokens(200))
    small = [probe.add([7, i], tokens(5)) for i in range(10)]
    probe.step()
    refused = probe.answers[huge].last
    assert refused is not None and refused.finish_reason == "error"
    assert "1,002 tokens" in refused.error and "49" in refused.error and "784" in refused.error
    probe.run()
    assert probe.answers[edge].finish_reason == "length"
    assert len(probe.answers[edge].token_ids) == 784 + 1 - 700, "the keys of the last token are never needed"
    for i, request_id in enumerate(small):
        assert_answer(probe, request_id, [7, i], 5)


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_a_pool_of_exactly_one_request_serves_it_and_the_next(length: int) -> None:
    need = -(-(length + 20 - 1) // 16)
    probe = EngineProbe(make_core(num_blocks=need))
    ids = [probe.add([i] * length, tokens(20)) for i in range(3)]
    probe.run()
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, [i] * length, 20)


def test_one_free_block_admits_one_of_two() -> None:
    probe = EngineProbe(make_core(num_blocks=1, block_size=128))
    first, second = probe.add([1, 2], tokens(3)), probe.add([3, 4], tokens(3))
    probe.step()
    assert plan_of(probe) == {first: 2}
    assert probe.core.keyframe().deferred == Deferred(second, "blocks", 1, 0)
    probe.run()
    assert_answer(probe, second, [3, 4], 3)


def test_nobody_passes_the_head_and_it_starts_when_the_running_have_finished() -> None:
    """Head-of-line policy: in order. The head's bound is what those ahead of it still have to do."""
    probe = EngineProbe(make_core(num_blocks=10, block_size=4, token_budget=64))
    runner = probe.add([1] * 16, tokens(8))  # 4 blocks now, 6 at the end
    head = probe.add([2] * 28, tokens(4))  # 7 blocks
    small = [probe.add([3, i], tokens(2)) for i in range(4)]
    probe.run()
    order = [event.request_id for event in probe.of(Admitted) if not event.resumed]
    assert order == [runner, head, *small]
    told = probe.of(Deferred)[0]
    assert (told.request_id, told.reason) == (head, "blocks")


def test_admission_leaves_the_watermark_free_and_says_so() -> None:
    probe = EngineProbe(make_core(num_blocks=10, block_size=4, watermark=0.3))
    probe.add([1] * 20, tokens(8))
    second = probe.add([2] * 12, tokens(4))
    probe.step()
    assert probe.core.keyframe().deferred == Deferred(second, "watermark", 3 + 3, 5)
    probe.run()
    alone = probe.add([3] * 38, tokens(2))  # all ten blocks: nobody runs, so nothing is left free
    probe.run()
    assert_answer(probe, alone, [3] * 38, 2)


def test_the_reason_for_waiting_is_told_when_it_changes_and_only_then() -> None:
    probe = EngineProbe(make_core(num_blocks=4, block_size=4, max_num_seqs=2))
    probe.add([1] * 4, tokens(3))
    probe.add([2] * 4, tokens(5))
    waiting = probe.add([3] * 12, tokens(2))
    probe.run()
    told = [event.reason for event in probe.of(Deferred) if event.request_id == waiting]
    assert told == ["slots", "blocks"]


def test_one_reason_a_step_is_told_though_the_head_is_looked_at_twice() -> None:
    """A higher priority waits for blocks; then a lower one's chunk takes the budget too: that is not a new reason."""
    probe = EngineProbe(make_core(num_blocks=30, block_size=4, token_budget=8, order="priority"))
    holder = probe.add([1] * 4, tokens(60), priority=0, arrival_time=0.0)  # 16 blocks in the end
    while probe.core.keyframe().requests == [] or probe.row(holder).num_computed < 40:
        probe.step()
    low = probe.add([2] * 60, tokens(2), priority=5, arrival_time=1.0)  # 15 blocks, 8 steps
    probe.step()
    high = probe.add([3] * 90, tokens(2), priority=1, arrival_time=2.0)  # 23 blocks: too many even without the low one
    for _ in range(4):
        probe.step()
        assert low in plan_of(probe)
    assert [(event.request_id, event.reason) for event in probe.of(Deferred)] == [(high, "blocks")]
    probe.run()


# Preemption -------------------------------------------------------------------------------------------------------


def crowded(num_requests: int = 3, **options: object) -> EngineProbe:
    """Requests of one full block each in a pool without a free one: the next decode needs room."""
    probe = EngineProbe(make_core(num_blocks=num_requests, block_size=8, prefix_cache=False, **options))  # type: ignore[arg-type]
    for i in range(num_requests):
        probe.add([10 + i] * 7, tokens(9), priority=0)
    probe.step()
    probe.step()
    assert probe.records[-1].free_blocks == 0 and probe.records[-1].num_running == num_requests
    return probe


def test_the_victim_leaves_the_plan_and_gives_its_budget_back() -> None:
    probe = crowded(3, token_budget=24)
    probe.step()
    event = probe.of(Preempted)[0]
    assert (event.request_id, event.beneficiary, event.rule, event.tokens, event.blocks) == (3, 1, RULE_GROWTH, 8, 1)
    plan = plan_of(probe)
    # 1 took the block of 3; then 2, last in rank now, had to yield for itself.
    assert plan == {1: 1}
    assert [(e.request_id, e.beneficiary) for e in probe.of(Preempted)] == [(3, 1), (2, 2)]
    probe.run()
    for i in range(3):
        assert_answer(probe, 1 + i, [10 + i] * 7, 9)


def test_a_planned_victim_is_taken_out_of_the_plan() -> None:
    """The requester comes behind its victim in the order of running: the victim's row goes, its token is free again."""
    core = make_core(num_blocks=2, block_size=8, prefix_cache=False, max_num_seqs=2, order="priority")
    probe = EngineProbe(core)
    low = probe.add([1] * 3, tokens(12), priority=5)
    probe.step()
    high = probe.add([2] * 7, tokens(9), priority=0)
    probe.step()
    probe.step()
    assert [r.request_id for r in core.keyframe().requests] == [low, high]
    probe.step()
    assert [(e.request_id, e.beneficiary) for e in probe.of(Preempted)] == [(low, high)]
    assert plan_of(probe) == {high: 1}
    probe.run()
    assert_answer(probe, low, [1] * 3, 12)
    assert_answer(probe, high, [2] * 7, 9)


def test_a_preempted_request_comes_back_before_later_arrivals() -> None:
    probe = crowded(2)
    late = probe.add([9] * 2, tokens(2))
    probe.run()
    order = [(event.request_id, event.resumed) for event in probe.of(Admitted)]
    assert order == [(1, False), (2, False), (2, True), (late, False)]


def test_recompute_is_a_prefill_of_all_and_one_sample() -> None:
    """Prompt 3, preempted after many outputs: all positions come back in chunks, told apart from prompt tokens."""
    core = make_core(num_blocks=12, block_size=4, token_budget=16, prefix_cache=False)
    probe = EngineProbe(core)
    probe.add([1] * 4, tokens(40))
    victim = probe.add([2] * 3, tokens(40))
    while not probe.of(Preempted):
        probe.step()
    event = probe.of(Preempted)[0]
    assert event.request_id == victim
    length = probe.row(victim).prompt_tokens + probe.row(victim).output_tokens
    before, computed_once = len(probe.records), probe.records[-1].totals.prompt_tokens
    probe.run()
    resumed = kinds_of(probe.records[before:], victim)
    prefill = [(kind, count) for kind, count in resumed if kind != RowKind.DECODE]
    assert sum(count for _, count in prefill) == length == event.tokens + 1
    assert {kind for kind, _ in prefill} == {RowKind.RECOMPUTE} and len(prefill) > 1
    totals = probe.records[-1].totals
    assert totals.recomputed_tokens == event.tokens and totals.prompt_tokens == computed_once == 7
    assert_answer(probe, victim, [2] * 3, 40)


def test_resuming_on_its_own_cached_blocks_computes_the_rest_only() -> None:
    core = make_core(num_blocks=16, block_size=4, max_num_seqs=1, order="priority")
    probe = EngineProbe(core)
    victim = probe.add(range(12), tokens(20), priority=1)
    for _ in range(3):
        probe.step()
    probe.add([99], tokens(2), priority=0)
    probe.run()
    resumed = next(event for event in probe.of(Admitted) if event.resumed)
    assert resumed.request_id == victim and resumed.cached_tokens == 12
    rows = kinds_of(probe.records, victim)
    assert (RowKind.RECOMPUTE, 3) in rows, "15 tokens, 12 of them hits"
    assert probe.records[-1].totals.recomputed_tokens == 2
    assert_answer(probe, victim, list(range(12)), 20)
    last = probe.answers[victim].last
    assert last is not None and last.cached_tokens == 0, "its own blocks save nothing of the prompt at first admission"


@pytest.mark.parametrize("discipline", ["vllm", "trtllm-max-util"])
def test_a_preempted_request_comes_back_when_all_can_grow_for_as_long_as_that_takes(discipline: str) -> None:
    probe = EngineProbe(
        make_core(discipline=discipline, num_blocks=9, block_size=4, prefix_cache=False, token_budget=4)
    )
    first, second = probe.add([1, 1], tokens(11)), probe.add([2, 2], tokens(16))
    victim = probe.add([3] * 11, tokens(9))
    while probe.answers[first].last is None:
        probe.step()
    assert len(preemptions_of(probe, victim)) == 1
    probe.step()
    # Its 13 tokens take 4 blocks and, at 4 a step, 4 steps: then it and the other have 17 tokens each, a block more.
    told = probe.of(Deferred)[-1]
    assert (told.request_id, told.reason, told.needed, told.available) == (victim, "resume", 4 + 2, 5)
    probe.run()
    assert len(preemptions_of(probe, victim)) == 1
    assert_answer(probe, victim, [3] * 11, 9)
    assert_answer(probe, second, [2, 2], 16)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_request_that_never_ran_needs_no_more_than_its_blocks(preemption: str) -> None:
    """The margin is for those who come back."""
    probe = EngineProbe(make_core(num_blocks=4, block_size=4, preemption=preemption, num_host_blocks=4))
    first, second = probe.add([1] * 8, tokens(2)), probe.add([2] * 8, tokens(1))
    probe.step()
    assert set(plan_of(probe)) == {first, second} and not probe.of(Deferred)
    probe.run()


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_pool_for_three_of_many_long_answers_does_not_thrash(prefix_cache: bool) -> None:
    probe = EngineProbe(make_core(num_blocks=30, block_size=4, prefix_cache=prefix_cache, token_budget=32))
    ids = [probe.add([i] * 10, tokens(50)) for i in range(12)]
    probe.run()
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, [i] * 10, 50)
    assert len(probe.of(Preempted)) <= 3 * len(ids)


def test_an_allocation_that_fails_sends_the_request_back_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = make_core(num_blocks=32, block_size=4)
    probe = EngineProbe(core)
    ids = [probe.add([i] * 6, tokens(12)) for i in range(3)]
    probe.step()
    pool, failures = core._scheduler.memory.pool, iter([True])
    take = pool.take

    def fail_once(count: int, evicted: list[int]) -> list[int]:
        if next(failures, False):
            raise OutOfBlocksError("injected")
        return take(count, evicted)

    monkeypatch.setattr(pool, "take", fail_once)
    probe.run()
    assert len(probe.of(Preempted)) == 1
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, [i] * 6, 12)


# Priority ---------------------------------------------------------------------------------------------------------


def test_a_higher_priority_starts_in_the_next_step_and_an_equal_one_preempts_nobody() -> None:
    probe = EngineProbe(make_core(max_num_seqs=2, order="priority"))
    low = [probe.add([i], tokens(30), priority=5, arrival_time=float(i)) for i in range(2)]
    probe.step()
    equal = probe.add([7], tokens(3), priority=5, arrival_time=2.0)
    probe.step()
    assert not probe.of(Preempted) and set(plan_of(probe)) == set(low)
    high = probe.add([8], tokens(3), priority=1, arrival_time=3.0)
    probe.step()
    assert set(plan_of(probe)) == {low[0], high}
    assert [(e.request_id, e.beneficiary, e.rule) for e in probe.of(Preempted)] == [(low[1], high, RULE_ARRIVAL)]
    probe.run()
    assert len(probe.of(Preempted)) == 1
    started = [event.request_id for event in probe.of(Admitted)]
    assert started == [*low, high, low[1], equal], "the victim is back before its equal that came later"


def test_under_fcfs_priorities_take_nobodys_place() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1))
    probe.add([1], tokens(5), priority=5)
    probe.step()
    probe.add([2], tokens(5), priority=0)
    probe.run()
    assert not probe.of(Preempted)


def test_a_higher_priority_takes_as_many_blocks_as_it_needs_and_no_more() -> None:
    probe = EngineProbe(make_core(num_blocks=12, block_size=4, order="priority", token_budget=128))
    low = [probe.add([i] * 10, tokens(2), priority=5, arrival_time=float(i)) for i in range(4)]  # 3 blocks each
    probe.step()
    high = probe.add([9] * 20, tokens(3), priority=0, arrival_time=9.0)  # 5 blocks: two victims
    probe.step()
    assert [e.request_id for e in probe.of(Preempted)] == [low[3], low[2]]
    assert high in plan_of(probe)
    probe.run()
    assert_answer(probe, low[3], [3] * 10, 2)


@pytest.mark.parametrize("blocks", range(1, 24))
def test_the_fewest_yield_however_many_could(blocks: int) -> None:
    sizes = [1, 3, 2, 1, 5, 2, 2, 4, 1, 1]
    probe = EngineProbe(make_core(num_blocks=24, block_size=4, order="priority", token_budget=256))
    low = [
        probe.add([i] * (4 * size - 1), tokens(2), priority=5, arrival_time=float(i)) for i, size in enumerate(sizes)
    ]
    probe.step()
    high = probe.add(range(500, 500 + 4 * blocks - 1), tokens(2), priority=0, arrival_time=99.0)
    probe.step()
    free, fewest = 24 - sum(sizes), 0
    while free < blocks:
        fewest += 1
        free += sizes[-fewest]
    assert [e.request_id for e in probe.of(Preempted) if e.beneficiary == high] == low[::-1][:fewest]
    probe.run()


def test_nobody_is_preempted_for_one_who_would_not_fit_all_the_same() -> None:
    probe = EngineProbe(make_core(num_blocks=10, block_size=4, order="priority", token_budget=128))
    probe.add([1] * 20, tokens(12), priority=0, arrival_time=0.0)
    low = probe.add([2] * 10, tokens(6), priority=5, arrival_time=1.0)
    probe.step()
    high = probe.add([3] * 35, tokens(2), priority=1, arrival_time=2.0)
    probe.step()
    assert not probe.of(Preempted) and low in plan_of(probe)
    probe.run()
    assert_answer(probe, high, [3] * 35, 2)


def test_a_higher_priority_goes_before_a_lower_ones_chunks() -> None:
    """A long prompt of low priority must not keep the whole budget to itself for many steps."""
    probe = EngineProbe(make_core(token_budget=16, order="priority"))
    low = probe.add(range(400), tokens(2), priority=5)
    probe.step()
    high = probe.add(range(8), tokens(2), priority=0)
    probe.step()
    assert plan_of(probe) == {high: 8, low: 8}
    probe.run()
    assert_answer(probe, low, list(range(400)), 2)


def test_ageing_lets_the_old_join_first_and_keep_its_place() -> None:
    core = make_core(max_num_seqs=1, order="priority", ageing=10.0, clock=lambda: 0.0)
    probe = EngineProbe(core)
    probe.add([1], tokens(3), priority=0, arrival_time=0.0)
    probe.step()
    old_low = probe.add([2], tokens(9), priority=2, arrival_time=0.0)  # key 20
    probe.add([3], tokens(3), priority=0, arrival_time=25.0)  # key 25
    for _ in range(4):
        probe.step()
    assert [event.request_id for event in probe.of(Admitted)][1] == old_low
    newer_high = probe.add([4], tokens(3), priority=0, arrival_time=15.0)  # key 15: it would have come first
    probe.step()
    assert [(e.request_id, e.beneficiary) for e in probe.of(Preempted)] == [(old_low, newer_high)]
    probe.run()
    assert_answer(probe, old_low, [2], 9)


def test_what_swapped_requests_share_does_not_hold_up_a_higher_priority() -> None:
    probe = EngineProbe(
        make_core(num_blocks=14, block_size=4, num_host_blocks=16, order="priority", preemption="swap", max_num_seqs=3)
    )
    head = list(range(24))  # six blocks that both low ones share
    low = []
    for i in range(2):
        low.append(probe.add([*head, 50 + i], tokens(24), priority=5, arrival_time=float(i)))
        probe.step()
    while probe.row(low[1]).output_tokens < 4:
        probe.step()
    long = probe.add([80] * 28, tokens(30), priority=0, arrival_time=2.0)
    probe.step()
    assert {event.request_id for event in probe.of(SwappedOut)} == set(low), "both have left"
    assert any(probe.row(low[0]).blocks), "and still hold what they share"
    high = probe.add([90] * 18, tokens(2), priority=0, arrival_time=3.0)
    for _ in range(4):
        probe.step()
    assert probe.answers[high].last is not None and probe.answers[long].last is None
    probe.run()
    for i, request in enumerate(low):
        assert_answer(probe, request, [*head, 50 + i], 24)


def test_under_fcfs_the_latest_arrival_yields_whatever_its_priority() -> None:
    probe = EngineProbe(make_core(num_blocks=8, block_size=4, prefix_cache=False))
    first = probe.add([1] * 10, tokens(12), priority=5, arrival_time=0.0)
    second = probe.add([2] * 10, tokens(12), priority=0, arrival_time=1.0)
    probe.run()
    assert {event.request_id for event in probe.of(Preempted)} == {second}
    assert_answer(probe, first, [1] * 10, 12)


# Prefix cache through the engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_warm_answers_are_cold_ones_and_something_is_always_computed(length: int) -> None:
    prompt = list(range(length))
    probe = EngineProbe(make_core())
    cached = []
    for _ in range(3):
        request = probe.add(prompt, tokens(20))
        probe.run()
        assert_cold(make_core, prompt, tokens(20), probe.answers[request].token_ids)
        last = probe.answers[request].last
        assert last is not None
        cached.append(last.cached_tokens)
    assert cached == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]
    longer = probe.add([*prompt, *range(500, 516)], tokens(2))
    probe.run()
    last = probe.answers[longer].last
    assert last is not None and last.cached_tokens == length // 16 * 16


def test_hits_are_counted_in_tokens_once() -> None:
    probe = EngineProbe(make_core())
    for _ in range(2):
        probe.add(range(40), tokens(2))
        probe.run()
    totals = probe.records[-1].totals
    assert (totals.prefix_query_tokens, totals.prefix_hit_tokens, totals.prompt_tokens) == (80, 32, 48)


def test_a_constant_digest_would_be_caught_by_the_checking_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks themselves are worth something: with colliding digests the runner sees foreign tokens."""
    from engine.memory.kv_cache import KVCacheManager

    def collide(self: KVCacheManager, request: object, full: int) -> None:
        request.block_hashes[:] = [bytes([i]) * 16 for i in range(full)]  # type: ignore[attr-defined]

    monkeypatch.setattr(KVCacheManager, "_extend_digests", collide)
    core = make_core(block_size=4)
    core.add_request(1, [1] * 9, tokens(2))
    while core.has_work:
        core.step()
    core.add_request(2, [2] * 9, tokens(2))
    with pytest.raises(AssertionError, match="own tokens"):
        core.step()
