"""Drafts in the scheduler: inside the step's budget and the request's blocks, never at anybody's cost."""

from __future__ import annotations

import pytest

from engine.config import DISCIPLINES
from engine.events import Preempted, RowKind
from engine.scheduling.plan import SchedulerOutput
from tests.oracles import EngineProbe, KVCheckingRunner, cold_answer, kinds_of, make_core
from tests.scheduling.common import assert_answer, plan_of, tokens

DRAFTING = tuple(name for name in DISCIPLINES if name != "static")


def drafting(**options: object) -> EngineProbe:
    return EngineProbe(make_core(**{"speculative": "ngram", **options}))  # type: ignore[arg-type]


def last_plan(probe: EngineProbe) -> SchedulerOutput:
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner) and runner.plan is not None
    return runner.plan


def limits(probe: EngineProbe) -> dict[int, int]:
    """Request id → drafts allowed in the last step."""
    plan = last_plan(probe)
    allowed = plan.draft_limits or [0] * len(plan.requests)
    return {request.request_id: limit for request, limit in zip(plan.requests, allowed, strict=True)}


# The same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DRAFTING)
@pytest.mark.parametrize("draft_tokens", range(1, 9))
def test_answers_are_the_same_for_every_number_of_drafts(draft_tokens: int, discipline: str) -> None:
    probe = drafting(discipline=discipline, draft_tokens=draft_tokens, block_size=4, waiting_served_ratio=0.0)
    ids = {probe.add(range(length), tokens(20 + length)): length for length in (1, 4, 7, 15)}
    probe.run()
    for request, length in ids.items():
        assert_answer(probe, request, list(range(length)), 20 + length)
    totals = probe.records[-1].totals
    assert 0 < totals.accepted_tokens < totals.draft_tokens
    assert totals.steps < 35, "fewer steps than tokens"


@pytest.mark.parametrize(("right", "steps"), [(True, 1 + 4), (False, 20)])
def test_accepted_drafts_save_steps_and_rejected_ones_cost_none(right: bool, steps: int) -> None:
    probe = drafting(draft_tokens=4)
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    answer = cold_answer([1, 2, 3], 30)

    def draft(context: list[int], limit: int) -> list[int]:
        done = len(context) - 3
        return answer[done : done + limit] if right else [(token + 1) % 1_000 for token in answer[done : done + limit]]

    runner.draft = draft
    request = probe.add([1, 2, 3], tokens(20))
    probe.run()
    assert_answer(probe, request, [1, 2, 3], 20)
    totals = probe.records[-1].totals
    assert totals.steps == steps
    assert totals.accepted_tokens == (totals.draft_tokens if right else 0)
    # A rejected draft is computed too, and counted as such.
    assert totals.computed_tokens == sum(sum(record.num_tokens) for record in probe.records)


def test_drafts_behind_the_end_are_cut_off() -> None:
    """The request ends in the middle of what was accepted: ids, counts and computed tokens end there."""
    probe = drafting(draft_tokens=8)
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    answer = cold_answer([1, 2, 3], 30)
    runner.draft = lambda context, limit: answer[len(context) - 3 : len(context) - 3 + limit]
    request = probe.add([1, 2, 3], tokens(30), ends_after=6)
    probe.run()
    assert_answer(probe, request, [1, 2, 3], 6)
    assert probe.records[-1].totals.output_tokens == 6
    assert probe.records[-1].new_tokens == [5]


def test_only_accepted_tokens_reach_the_prefix_cache() -> None:
    probe = drafting(draft_tokens=3, block_size=2)
    first = probe.add([1, 2, 3], tokens(20))
    probe.run()
    whole = [1, 2, 3, *probe.answers[first].token_ids]
    again = probe.add(whole, tokens(4))
    probe.run()  # the runner holds that what was found are exactly these tokens
    assert_answer(probe, again, whole, 4)
    last = probe.answers[again].last
    assert last is not None and last.cached_tokens == 22, "all but the token that nobody had computed"


# Budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", ["vllm", "trtllm-max-util", "trtllm-no-evict"])
def test_decoders_first_then_the_chunk_then_drafts_within_the_budget(discipline: str) -> None:
    probe = drafting(discipline=discipline, token_budget=64, num_blocks=256, draft_tokens=5)
    decoders = [probe.add([i], tokens(80)) for i in range(10)]
    probe.step()
    long = probe.add(range(200), tokens(4))
    for chunk in (54, 54, 54, 38):
        probe.step()
        assert plan_of(probe)[long] == chunk
        assert last_plan(probe).total_tokens <= 64
        allowed = limits(probe)
        assert allowed[long] == 0
        # What the last chunk leaves goes to those that decode, in order.
        assert [allowed[request] for request in decoders] == ([5, 5, 5, 1] if chunk == 38 else [0, 0, 0, 0]) + [0] * 6
    for _ in range(5):
        probe.step()
        assert last_plan(probe).total_tokens <= 64
    probe.run()
    for i, request in enumerate(decoders):
        assert_answer(probe, request, [i], 80)


@pytest.mark.parametrize("budget", [1, 3, 7])
def test_a_budget_below_the_number_of_decoders_still_moves_all_that_run(budget: int) -> None:
    probe = drafting(token_budget=budget, max_num_seqs=10)
    ids = [probe.add([i], tokens(9)) for i in range(10)]
    while probe.core.has_work:
        probe.step()
        assert last_plan(probe).total_tokens <= budget
        assert len(probe.core.keyframe().requests) == 0 or plan_of(probe)
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i], 9)


def test_a_prompt_in_chunks_is_sampled_with_its_last_one_while_others_check_drafts() -> None:
    probe = drafting(token_budget=16, draft_tokens=4, block_size=4)
    decoder = probe.add([1], tokens(60))
    for _ in range(4):
        probe.step()
    long = probe.add(range(40), tokens(3))
    sampled = []
    while not sampled or not sampled[-1]:
        probe.step()
        plan = last_plan(probe)
        row = [request.request_id for request in plan.requests].index(long)
        sampled.append(plan.samples[row])
        assert limits(probe)[long] == 0
        assert len(probe.answers[long].token_ids) == int(plan.samples[row])
    assert sampled == [False, False, True]
    assert [count for kind, count in kinds_of(probe.records, long) if kind is RowKind.PREFILL] == [15, 15, 10]
    probe.run()
    assert_answer(probe, long, list(range(40)), 3)
    assert_answer(probe, decoder, [1], 60)


# Limits and blocks ------------------------------------------------------------------------------------------------


def test_drafts_are_cut_to_what_the_request_may_still_answer() -> None:
    probe = drafting(max_model_len=512, draft_tokens=5, num_blocks=64, token_budget=1_024)
    request = probe.add([1] * 508, tokens(100))
    probe.step()
    probe.step()
    # One token is there; of the 4 that fit, the last one's keys are never needed.
    assert limits(probe) == {request: 2}
    while probe.core.has_work:
        probe.step()
        assert limits(probe)[request] <= 2
    assert_answer(probe, request, [1] * 508, 4)


@pytest.mark.parametrize("discipline", ["vllm", "trtllm-max-util"])
@pytest.mark.parametrize("spare", [0, 1, 2, 3])
def test_drafts_take_no_block_that_somebody_needs(spare: int, discipline: str) -> None:
    """With one free block drafts are shortened to the blocks at hand, with none left the step is a plain decode."""
    probe = drafting(discipline=discipline, num_blocks=10 + spare, block_size=4, draft_tokens=5, prefix_cache=False)
    ids = [probe.add([i] * 4, tokens(17)) for i in range(2)]  # 20 tokens: 5 blocks each
    while probe.core.has_work:
        probe.step()
        for request, limit in limits(probe).items():
            row = last_plan(probe).requests[[r.request_id for r in last_plan(probe).requests].index(request)]
            assert limit <= 5 and (limit == 0 or len(row.block_ids) <= 5)
    assert not probe.of(Preempted), "both fit to their ends, and drafts change nothing about that"
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 4, 17)


def test_in_a_tight_pool_drafts_are_left_out_rather_than_anybody_preempted() -> None:
    def preemptions(speculative: str) -> int:
        probe = drafting(speculative=speculative, num_blocks=12, block_size=4, draft_tokens=8, prefix_cache=False)
        ids = [probe.add([i] * 4, tokens(30)) for i in range(4)]
        probe.run()
        for i, request in enumerate(ids):
            assert_answer(probe, request, [i] * 4, 30)
        return len(probe.of(Preempted))

    assert preemptions("ngram") <= preemptions("off") + 1


def test_a_prompt_that_may_not_be_split_leaves_no_budget_for_drafts() -> None:
    probe = drafting(chunked_prefill=False, token_budget=16)
    decoder = probe.add([1], tokens(30))
    probe.step()
    long = probe.add(range(50), tokens(2))
    probe.step()
    assert plan_of(probe)[long] == 50 and limits(probe) == {decoder: 0, long: 0}
    probe.run()
    assert_answer(probe, decoder, [1], 30)
