"""``orca``, ``tgi`` and ``trtllm-no-evict``: nothing is ever taken back, because memory is reserved or promised."""

from __future__ import annotations

import math
import random

import pytest

from engine.events import Deferred, Preempted, RowKind, StepRecord
from engine.request import SamplingParams
from tests.oracles import EngineProbe, make_core
from tests.scheduling.common import admitted_order, assert_answer, deferred_reasons, plan_of, tokens

RESERVING = ("orca", "tgi", "trtllm-no-evict")


def probe_of(discipline: str, **options: object) -> EngineProbe:
    return EngineProbe(make_core(discipline=discipline, **{"token_budget": 64, **options}))  # type: ignore[arg-type]


def kinds(record: StepRecord) -> dict[int, RowKind]:
    return dict(zip(record.request_ids, map(RowKind, record.kinds), strict=True))


# What the three have in common ------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("discipline", RESERVING)
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_ever_preempted_and_whoever_waits_gets_in(seed: int, discipline: str, order: str) -> None:
    rng = random.Random(seed)
    probe = probe_of(discipline, num_blocks=30, block_size=4, order=order, preemption="swap", num_host_blocks=30)
    asked = {}
    for _ in range(30):
        prompt, length = [rng.randrange(900) for _ in range(rng.randint(1, 40))], rng.randint(1, 40)
        request = probe.add(
            prompt, tokens(length), priority=rng.randrange(3), user=rng.choice("ab"), ends_after=rng.randint(1, 40)
        )
        asked[request] = prompt
        probe.step()
    probe.run()
    assert not probe.of(Preempted)
    assert any(reason in ("blocks", "promised") for reason in deferred_reasons(probe)), "or the pool was no test"
    for request, prompt in asked.items():
        assert_answer(probe, request, prompt, len(probe.answers[request].token_ids))


@pytest.mark.parametrize("discipline", RESERVING)
def test_a_higher_priority_goes_to_the_head_and_waits_for_room(discipline: str) -> None:
    probe = probe_of(discipline, order="priority", max_num_seqs=1)
    first = probe.add([1], tokens(4), priority=5)
    probe.step()
    low, high = probe.add([2], tokens(2), priority=5), probe.add([3], tokens(2), priority=0)
    probe.run()
    assert not probe.of(Preempted) and admitted_order(probe) == [first, high, low]
    assert "slots" in deferred_reasons(probe)


@pytest.mark.parametrize("discipline", RESERVING)
def test_room_is_kept_for_all_that_was_asked_though_the_answer_ends_early(discipline: str) -> None:
    """What a scheduler sees is max_tokens: 8 blocks of 4 for 2 + 31 - 1 tokens, of which 2 are ever used."""
    probe = probe_of(discipline, num_blocks=15, block_size=4)
    early, waits = probe.add([1, 2], tokens(31), ends_after=4), probe.add([3, 4], tokens(31), ends_after=4)
    probe.step()
    assert list(plan_of(probe)) == [early]
    event = probe.of(Deferred)[0]
    assert (event.request_id, event.needed) == (waits, 8)
    assert event.available == 15 - 8, "whether it is held or promised"
    probe.run()
    assert_answer(probe, waits, [3, 4], 4)
    roomy = probe_of(discipline, num_blocks=16, block_size=4)
    both = [roomy.add([1, 2], tokens(31)), roomy.add([3, 4], tokens(31))]
    roomy.step()
    assert list(plan_of(roomy)) == both


@pytest.mark.parametrize("discipline", RESERVING)
def test_nobody_passes_the_head(discipline: str) -> None:
    probe = probe_of(discipline, num_blocks=10, block_size=4)
    probe.add([1] * 4, tokens(5))  # 2 of 10 blocks
    head = probe.add([2] * 30, tokens(7))  # 9
    small = [probe.add([i], tokens(2)) for i in range(3, 6)]
    probe.run()
    assert admitted_order(probe)[1:] == [head, *small]


@pytest.mark.parametrize("discipline", RESERVING)
def test_hits_of_the_prefix_cache_are_not_reserved_twice(discipline: str) -> None:
    """Running hits take no room, idle ones do, and at least one token is computed."""
    probe = probe_of(discipline, num_blocks=8, block_size=4)
    prompt = list(range(16))
    first = probe.add(prompt, tokens(1))
    probe.run()
    second, third = probe.add(prompt, tokens(13)), probe.add(prompt, tokens(1))
    probe.step()
    # 7 blocks for the first two tables together would not do: 7 + 4. Sharing 3 of them makes it 7 + 1.
    assert plan_of(probe) == {second: 4, third: 4}
    probe.run()
    for request, length in ((first, 1), (second, 13), (third, 1)):
        assert_answer(probe, request, prompt, length)


@pytest.mark.parametrize("discipline", RESERVING)
def test_drafts_stay_within_the_reservation(discipline: str) -> None:
    probe = probe_of(discipline, num_blocks=9, block_size=4, speculative="ngram", draft_tokens=5)
    ids = [probe.add([i] * 3, tokens(15)) for i in range(2)]  # 17 tokens: 5 blocks each
    while probe.core.has_work:
        probe.step()
        assert all(len(request.blocks) <= 5 for request in probe.core.keyframe().requests)
    assert probe.records[-1].totals.accepted_tokens > 0
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 3, 15)


# orca -------------------------------------------------------------------------------------------------------------


def test_orca_reserves_all_blocks_at_once_and_takes_no_more() -> None:
    probe = probe_of("orca", block_size=4)
    request = probe.add(range(6), tokens(20))
    sizes = set()
    while probe.core.has_work:
        probe.step()
        sizes |= {len(row.blocks) for row in probe.core.keyframe().requests}
    assert sizes == {math.ceil((6 + 20 - 1) / 4)}
    assert_answer(probe, request, list(range(6)), 20)


def test_orca_joins_at_every_iteration_beside_the_decodes() -> None:
    probe = probe_of("orca")
    first = probe.add([1] * 3, tokens(6))
    probe.step()
    second = probe.add([2] * 5, tokens(2))
    probe.step()
    assert plan_of(probe) == {first: 1, second: 5}
    assert kinds(probe.records[-1]) == {first: RowKind.DECODE, second: RowKind.PREFILL}


def test_orca_computes_prompts_whole_whatever_the_configuration_says() -> None:
    probe = probe_of("orca", token_budget=16, chunked_prefill=True)
    first = probe.add([1] * 4, tokens(9))
    probe.step()
    fits, waits = probe.add([2] * 15, tokens(2)), probe.add([3] * 15, tokens(2))
    probe.step()
    assert plan_of(probe) == {first: 1, fits: 15}
    assert [(e.request_id, e.reason, e.needed, e.available) for e in probe.of(Deferred)] == [(waits, "budget", 15, 0)]
    long = probe.add([4] * 40, tokens(2))
    probe.step()
    assert plan_of(probe)[waits] == 15
    probe.step()
    assert plan_of(probe)[long] == 40, "longer than the budget: the only prefill of its step"
    assert kinds(probe.records[-1])[first] is RowKind.DECODE
    probe.run()
    assert_answer(probe, long, [4] * 40, 2)


def test_orca_admits_within_a_step_until_the_places_are_taken() -> None:
    probe = probe_of("orca", max_num_seqs=3)
    ids = [probe.add([i], tokens(3)) for i in range(5)]
    probe.step()
    assert list(plan_of(probe)) == ids[:3] and deferred_reasons(probe) == ["slots"]


# tgi --------------------------------------------------------------------------------------------------------------


def tgi(**options: object) -> EngineProbe:
    return probe_of("tgi", **options)


def test_tgi_a_joining_prefill_is_a_step_of_its_own_and_pauses_the_decodes() -> None:
    probe = tgi(waiting_served_ratio=0.0)
    first = probe.add([1] * 4, tokens(6))
    probe.step()
    second = probe.add([2] * 5, tokens(3))
    probe.step()
    assert plan_of(probe) == {second: 5}, "the first request's decode waits"
    probe.step()
    assert plan_of(probe) == {first: 1, second: 1}
    probe.run()
    for record in probe.records:
        found = set(kinds(record).values())
        assert found <= {RowKind.PREFILL} or found <= {RowKind.DECODE}


@pytest.mark.parametrize(("ratio", "running", "needed"), [(0.3, 4, 1), (0.5, 5, 2), (1.2, 5, 6), (1.0, 3, 3)])
def test_tgi_the_waiting_join_once_they_are_the_ratio_of_the_running(ratio: float, running: int, needed: int) -> None:
    probe = tgi(waiting_served_ratio=ratio, max_waiting_tokens=1_000, max_num_seqs=32)
    first = [probe.add([i], tokens(60)) for i in range(running)]
    probe.step()
    assert list(plan_of(probe)) == first, "an empty batch takes all at once"
    for waiting in range(1, needed):
        probe.add([9], tokens(60))
        for _ in range(3):
            probe.step()
            assert list(plan_of(probe)) == first, f"{waiting} wait; {needed} must"
    if needed > 1:
        events = probe.of(Deferred)
        assert [(event.reason, event.needed, event.available) for event in events] == [("joining", needed, 1)]
    probe.add([9], tokens(60))
    probe.step()
    assert len(plan_of(probe)) == needed and not set(plan_of(probe)) & set(first)


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_tgi_after_max_waiting_tokens_decode_steps_whoever_waits_joins(limit: int) -> None:
    probe = tgi(waiting_served_ratio=2.0, max_waiting_tokens=limit)
    running = [probe.add([i], tokens(60)) for i in range(4)]
    probe.step()
    waits = probe.add([9] * 3, tokens(2))
    steps = 0
    while waits not in plan_of(probe):
        probe.step()
        steps += 1
    assert steps == limit + 1
    again = probe.add([8] * 3, tokens(2))
    steps = 0
    while again not in plan_of(probe):
        probe.step()
        steps += 1
    assert steps == max(limit, 1) + 1, "counted from the last joining, behind which comes a decode"
    assert set(running) <= {row.request_id for row in probe.core.keyframe().requests}


def test_tgi_an_empty_batch_takes_whoever_waits() -> None:
    probe = tgi(waiting_served_ratio=9.0, max_waiting_tokens=1_000)
    request = probe.add([1], tokens(2))
    probe.step()
    assert plan_of(probe) == {request: 1}


def test_tgi_the_prefill_and_the_total_limit_end_the_group_at_the_first_that_does_not_fit() -> None:
    probe = tgi(token_budget=20, num_blocks=20, block_size=4, waiting_served_ratio=0.0)
    first, second, third = (probe.add([i] * 9, tokens(4)) for i in range(3))
    fourth = probe.add([3] * 2, tokens(4))
    probe.step()
    assert plan_of(probe) == {first: 9, second: 9}, "18 of 20 tokens; the fourth does not pass the third"
    assert [(e.request_id, e.reason) for e in probe.of(Deferred)] == [(third, "budget")]
    probe.step()
    assert plan_of(probe) == {third: 9, fourth: 2}
    huge = probe.add([4] * 12, tokens(40))  # 51 tokens: 13 blocks; 3 · 3 + 2 of 20 are held
    small = probe.add([5], tokens(1))
    for _ in range(2):  # the decode that follows a joining, then one because nobody can join
        probe.step()
        assert set(plan_of(probe)) == {first, second, third, fourth}
    assert [(e.request_id, e.reason, e.needed, e.available) for e in probe.of(Deferred)][-1] == (huge, "blocks", 13, 9)
    probe.run()
    assert admitted_order(probe)[-2:] == [huge, small]


def test_tgi_a_prompt_longer_than_the_budget_is_prefilled_alone() -> None:
    probe = tgi(token_budget=16, waiting_served_ratio=0.0)
    small, long, behind = probe.add([1] * 3, tokens(3)), probe.add([2] * 50, tokens(3)), probe.add([3] * 3, tokens(3))
    plans = []
    for _ in range(4):
        probe.step()
        plans.append(plan_of(probe))
    assert plans == [{small: 3}, {long: 50}, {small: 1, long: 1}, {behind: 3}]


def test_tgi_those_that_run_decode_between_two_joinings_however_many_wait() -> None:
    probe = tgi(num_blocks=600, max_num_seqs=32)
    running = probe.add([1], tokens(40))
    probe.step()
    probe.step()
    for i in range(6):
        probe.add([i] * 60, tokens(30))
    decoded = []
    for _ in range(12):
        probe.step()
        decoded.append(running in plan_of(probe))
    assert decoded == [False, True] * 6


# trtllm-no-evict --------------------------------------------------------------------------------------------------


def test_no_evict_takes_blocks_as_they_are_needed_but_promises_the_rest() -> None:
    probe = probe_of("trtllm-no-evict", num_blocks=12, block_size=4)
    first = probe.add([1] * 4, tokens(29))  # 32 tokens: 8 blocks
    probe.step()
    assert len(probe.row(first).blocks) == 1
    second = probe.add([2] * 4, tokens(17))  # 5 blocks, of which 12 - 8 = 4 are not promised
    probe.step()
    event = probe.of(Deferred)[0]
    assert (event.request_id, event.reason, event.needed, event.available) == (second, "promised", 5, 4)
    third = probe.add([3], tokens(1))
    probe.step()
    assert plan_of(probe) == {first: 1}, "nobody passes the head"
    probe.run()
    assert admitted_order(probe) == [first, second, third]


def test_no_evict_a_promise_shrinks_as_blocks_are_handed_out_and_ends_with_the_request() -> None:
    probe = probe_of("trtllm-no-evict", num_blocks=12, block_size=4)
    first = probe.add([1] * 4, tokens(29), ends_after=10)
    probe.step()
    waits = probe.add([2] * 4, tokens(29))
    while probe.answers[first].last is None:
        probe.step()
        assert waits not in plan_of(probe), "12 blocks never do for two ends of 8"
    probe.step()
    assert list(plan_of(probe)) == [waits]


@pytest.mark.parametrize(("chunked", "computed"), [(True, [15, 15, 10, 1]), (False, [40, 1])])
def test_no_evict_chunks_prompts_where_that_is_switched_on(chunked: bool, computed: list[int]) -> None:
    probe = probe_of("trtllm-no-evict", token_budget=16, chunked_prefill=chunked)
    first = probe.add([1] * 4, tokens(9))
    probe.step()
    long = probe.add([2] * 40, tokens(2))
    for count in computed:
        probe.step()
        assert plan_of(probe) == {first: 1, long: count}
    probe.run()
    assert_answer(probe, long, [2] * 40, 2)


def test_no_evict_decodes_and_prefills_share_a_step() -> None:
    probe = probe_of("trtllm-no-evict")
    first = probe.add([1] * 4, tokens(9))
    probe.step()
    second = probe.add([2] * 6, tokens(9))
    probe.step()
    assert kinds(probe.records[-1]) == {first: RowKind.DECODE, second: RowKind.PREFILL}


def test_several_answers_share_the_prompt_of_a_reserving_discipline() -> None:
    for discipline in RESERVING:
        probe = probe_of(discipline, num_blocks=12, block_size=4, waiting_served_ratio=0.0)
        request = probe.add([1] * 9, SamplingParams(max_tokens=4, n=3))  # 3 blocks, of which two are shared: 3 + 1 + 1
        for _ in range(3):
            probe.step()
        assert len(probe.core.keyframe().requests) == 3
        held = {block for row in probe.core.keyframe().requests for block in row.blocks}
        assert len(held) == 5
        probe.run()
        assert_answer(probe, request, [1] * 9, 4)
