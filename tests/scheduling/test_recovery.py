"""Memory that runs out in a step: nobody's answer is lost or changed, the pool is smaller, the engine goes on."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from engine.config import DISCIPLINES, PREEMPTIONS
from engine.events import RULE_OUT_OF_MEMORY, Finished, PoolShrunk
from engine.recorded_requests import RequestLog
from engine.recovery import STEPS_TRIED, smaller_pool
from engine.request import FinishReason, RequestStatus, SamplingParams, branch_id
from tests.oracles import EngineProbe, KVCheckingRunner, cold_answer, make_core, preemptions_of
from tests.scheduling.common import assert_answer, tokens
from tests.scheduling.traces import run_trace


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def runner_of(probe: EngineProbe) -> KVCheckingRunner:
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    return runner


def fail_next(probe: EngineProbe, when: str = "after") -> Any:
    runner_of(probe).shortage = (when, out_of_memory())
    return probe.step()


# One shortage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overlap", "when"), [*product([False, True], ["before", "after"]), (True, "awaited")], ids=str
)
def test_all_go_on_behind_the_tokens_they_had(when: str, overlap: bool) -> None:
    probe = EngineProbe(make_core(num_blocks=64, overlap=overlap))
    prompts = [list(range(length)) for length in (5, 16, 33)]
    ids = [probe.add(prompt, tokens(30)) for prompt in prompts]
    for _ in range(6):
        probe.step()
    result = fail_next(probe, when)
    assert result.record.request_ids == [], "nothing of the step counts"
    assert "from 64 to 51" in result.notice and "OutOfMemoryError: CUDA out of memory" in result.notice
    (shrunk,) = probe.of(PoolShrunk)
    assert (shrunk.before, shrunk.num_blocks) == (64, 51) and "CUDA out of memory" in shrunk.cause
    assert all(probe.row(i).status == RequestStatus.PREEMPTED and not probe.row(i).blocks for i in ids)
    assert probe.core.keyframe().num_blocks == 51 and probe.core.keyframe().cached_blocks == []
    probe.run()
    for request_id, prompt in zip(ids, prompts, strict=True):
        assert_answer(probe, request_id, prompt, 30)
        (told,) = preemptions_of(probe, request_id)
        assert (told.rule, told.mode, told.beneficiary) == (RULE_OUT_OF_MEMORY, "recompute", request_id)
        last = probe.answers[request_id].last
        assert last is not None and last.preemptions == 1 and last.error == ""


def test_a_core_without_a_pool_to_resize_passes_the_error_on() -> None:
    runner = KVCheckingRunner(16)
    core = make_core(runner=runner)
    core._recovery._resize = None
    runner.shortage = ("before", out_of_memory())
    core.add_request(1, [1, 2, 3], tokens(4))
    with pytest.raises(torch.OutOfMemoryError):
        core.step()


def test_other_errors_end_the_engine_as_before() -> None:
    probe = EngineProbe(make_core())
    runner_of(probe).shortage = ("before", RuntimeError("an illegal memory access was encountered"))
    probe.add([1, 2, 3])
    with pytest.raises(RuntimeError, match="illegal"):
        probe.step()


def test_requests_on_the_host_come_back_by_computing() -> None:
    """What they shared on the device is gone, and what was on its way is not to be trusted."""
    probe = EngineProbe(make_core(num_blocks=12, num_host_blocks=12, preemption="swap", token_budget=256))
    ids = [probe.add(range(i, i + 60), tokens(60)) for i in range(2)]
    while not any(row.status == RequestStatus.SWAPPED for row in probe.core.keyframe().requests):
        probe.step()
    fail_next(probe)
    assert not any(row.host_blocks for row in probe.core.keyframe().requests)
    probe.run()
    for i, request_id in enumerate(ids):
        assert_answer(probe, request_id, list(range(i, i + 60)), 60)


def test_an_abort_and_an_arrival_during_the_step_are_taken_in() -> None:
    probe = EngineProbe(make_core())
    gone, stays = probe.add([1] * 20, tokens(20)), probe.add([2] * 20, tokens(20))
    probe.step()
    added: list[int] = []

    def during(plan: Any) -> None:
        probe.core.abort(gone)
        added.append(probe.add([3] * 20, tokens(3)))

    runner_of(probe).during = during
    fail_next(probe)
    runner_of(probe).during = None
    assert probe.answers[gone].finish_reason == FinishReason.ABORT
    probe.run()
    assert_answer(probe, stays, [2] * 20, 20)
    assert_answer(probe, added[0], [3] * 20, 3)


def test_the_complete_answers_of_a_static_batch_are_handed_out() -> None:
    probe = EngineProbe(make_core(discipline="static"))
    short, long = probe.add([1, 2, 3], tokens(2)), probe.add([4, 5, 6], tokens(20))
    for _ in range(5):
        probe.step()
    assert probe.row(short).status == RequestStatus.ENDED and probe.answers[short].last is None
    fail_next(probe)
    assert_answer(probe, short, [1, 2, 3], 2)
    assert probe.answers[short].finish_reason == FinishReason.LENGTH and probe.answers[long].last is None
    probe.run()
    assert_answer(probe, long, [4, 5, 6], 20)


def test_answers_that_have_not_begun_stay_with_their_first() -> None:
    probe = EngineProbe(make_core(token_budget=16))
    request_id = probe.add(range(40), SamplingParams(max_tokens=5, n=3))
    probe.step()
    fail_next(probe)
    probe.run()
    for index in range(3):
        answer = probe.answers[branch_id(request_id, index)]
        assert answer.token_ids == cold_answer(list(range(40)), 5, index=index)


# Of a step in flight -------------------------------------------------------------------------------------------------


def overlapping(**settings: Any) -> EngineProbe:
    return EngineProbe(make_core(num_blocks=64, overlap=True, **settings))


def test_tokens_under_way_are_taken_back_and_computed_again() -> None:
    """Also the first, behind which further answers have begun."""
    probe = overlapping()
    early = probe.add(range(20), tokens(9))
    for _ in range(3):
        probe.step()
    late = probe.add(range(50, 60), SamplingParams(max_tokens=5, n=2))
    probe.step()
    assert probe.row(late).output_tokens == 1 and probe.row(late).first_token_time is None
    log = RequestLog(lambda request: None)
    log.restore(probe.core.keyframe())
    result = fail_next(probe, "awaited")
    assert result.outputs == [] and result.record.events[-1].withdrawn == [early, late]
    assert probe.row(late).output_tokens == 0 and probe.row(late).first_token_time is None
    log.apply(result.record)
    assert (log.open[early].output_tokens, log.open[late].first_token) == (3, None)
    probe.run()
    assert_answer(probe, early, list(range(20)), 9)
    for index in range(2):
        assert probe.answers[branch_id(late, index)].token_ids == cold_answer(list(range(50, 60)), 5, index=index)
    assert probe.records[-1].totals.output_tokens == 9 + 2 * 5


@pytest.mark.parametrize("discipline", ["vllm", "static"])
@pytest.mark.parametrize("act", ["step", "take_in", "by hand", "abort"])
def test_an_answer_that_lacked_only_its_last_token_says_so(discipline: str, act: str) -> None:
    """Whoever waits for the step: the next one, a pause, a step by hand, or the abort of the batch's last other row."""
    probe = overlapping(discipline=discipline, static_delivery="row")
    short, long = probe.add(range(10), tokens(3)), probe.add(range(30, 45), tokens(9))
    for _ in range(3):
        probe.step()
    assert probe.records[-1].totals.output_tokens == 6 and len(probe.answers[short].token_ids) == 2
    runner_of(probe).shortage = ("awaited", out_of_memory())
    if act == "abort":
        probe.core.abort(long)
    if act == "by hand":
        result = probe._look_at(probe.core.step(overlap=False))
    else:
        result = probe.take_in() if act == "take_in" else probe.step()
    assert "from 64 to 51" in result.notice
    last = probe.answers[short].last
    assert last is not None and last.finish_reason == FinishReason.ERROR and "last token" in last.error
    assert probe.answers[short].token_ids == cold_answer(list(range(10)), 2)
    probe.run()
    if act == "abort":
        assert probe.answers[long].finish_reason == FinishReason.ABORT
    else:
        assert_answer(probe, long, list(range(30, 45)), 9)
    assert probe.records[-1].totals.output_tokens == 2 + len(probe.answers[long].token_ids)


def test_what_a_batch_held_back_is_handed_out_without_the_last_token() -> None:
    probe = overlapping(discipline="static")
    short, long = probe.add(range(10), tokens(3)), probe.add(range(30, 45), tokens(9))
    for _ in range(3):
        probe.step()
    fail_next(probe, "awaited")
    assert probe.answers[short].token_ids == cold_answer(list(range(10)), 2)
    assert probe.answers[short].finish_reason == FinishReason.ERROR
    probe.run()
    assert_answer(probe, long, list(range(30, 45)), 9)


def test_steps_that_are_launched_and_run_short_again_and_again_end() -> None:
    """A launch that worked does not begin the count anew: the step has yet to be computed."""
    probe = overlapping(max_num_seqs=1)
    first, second = probe.add([1, 2, 3], tokens(4)), probe.add([4, 5, 6], tokens(4))
    for _ in range(STEPS_TRIED):
        assert probe.answers[first].last is None
        probe.step()
        fail_next(probe, "awaited")
    last = probe.answers[first].last
    assert last is not None and f"in {STEPS_TRIED} steps in a row" in last.error
    probe.run()
    assert_answer(probe, second, [4, 5, 6], 4)


# Pools that hold less than was promised ------------------------------------------------------------------------------


def test_what_can_never_fit_again_ends_with_the_numbers_and_keeps_its_tokens() -> None:
    probe = EngineProbe(make_core(num_blocks=10, token_budget=200))
    large, small = probe.add(range(130), tokens(25)), probe.add([7] * 5, tokens(5))
    for _ in range(4):
        probe.step()
    fail_next(probe)
    ended = probe.answers[large].last
    assert ended is not None and ended.finish_reason == FinishReason.ERROR
    assert "it has 8 blocks (128 tokens)" in ended.error and "at 134 tokens, needs 9" in ended.error
    assert probe.answers[large].token_ids == cold_answer(list(range(130)), 4)
    probe.run()
    assert_answer(probe, small, [7] * 5, 5)
    refused = probe.add(range(130), tokens(5))
    probe.run()
    last = probe.answers[refused].last
    assert last is not None and "the pool has 8" in last.error, "and the next one of that length is refused"


def test_who_asked_for_more_than_there_is_gets_what_there_is() -> None:
    """As at the beginning, where ``max_tokens`` is cut to the room of model and pool."""
    probe = EngineProbe(make_core(num_blocks=10, token_budget=64))
    request_id = probe.add(range(40), SamplingParams())
    probe.step()
    fail_next(probe)
    probe.run()
    assert_answer(probe, request_id, list(range(40)), 8 * 16 + 1 - 40)
    assert probe.answers[request_id].finish_reason == FinishReason.LENGTH


def test_the_first_shortage_leaves_the_largest_its_room() -> None:
    assert smaller_pool(100, [10, 90, 97]) == 90
    assert smaller_pool(100, [10, 97]) == 80
    assert smaller_pool(100, []) == 80
    assert smaller_pool(1, [1]) == 1 and smaller_pool(2, [2]) == 1
    probe = EngineProbe(make_core(num_blocks=100, block_size=2, token_budget=64))
    request_id = probe.add(range(150), tokens(30))
    probe.step()
    fail_next(probe)
    assert probe.core.keyframe().num_blocks == 90
    probe.run()
    assert_answer(probe, request_id, list(range(150)), 30)


# Again and again -----------------------------------------------------------------------------------------------------


def test_memory_that_runs_out_step_after_step_ends_those_in_the_step_and_not_the_engine() -> None:
    core = make_core(num_blocks=100, max_num_seqs=1)
    runner = core._runner
    assert isinstance(runner, KVCheckingRunner)
    core.add_request(1, [1, 2, 3], tokens(4))
    core.add_request(2, [4, 5, 6], tokens(4))
    outputs: list[Any] = []
    for _ in range(STEPS_TRIED):
        assert not outputs
        runner.shortage = ("after", out_of_memory())
        outputs = core.step().outputs
        core.check_invariants()
    (ended,) = outputs
    assert ended.request_id == 1 and ended.finish_reason == FinishReason.ERROR
    assert f"in {STEPS_TRIED} steps in a row" in ended.error and "--token-budget" in ended.error
    assert core.keyframe().num_blocks == 40, "100, 80, 64, 51, 40"
    given: list[int] = []
    while core.has_work:
        given += [token for output in core.step().outputs for token in output.token_ids]
    assert given == cold_answer([4, 5, 6], 4)


def test_a_step_that_works_in_between_begins_the_count_anew() -> None:
    probe = EngineProbe(make_core(num_blocks=400))
    request_id = probe.add(range(20), tokens(20))
    for _ in range(2 * STEPS_TRIED):
        probe.step()
        fail_next(probe)
    probe.run()
    assert_answer(probe, request_id, list(range(20)), 20)


def test_a_pool_that_came_out_smaller_than_asked_is_what_counts() -> None:
    probe = EngineProbe(make_core(num_blocks=100))
    probe.core._recovery._resize = lambda num_blocks: num_blocks // 2
    request_id = probe.add(range(20), tokens(20))
    probe.step()
    fail_next(probe)
    assert probe.core.keyframe().num_blocks == 40 == probe.core.limits.num_blocks
    probe.run()
    assert_answer(probe, request_id, list(range(20)), 20)


# Any traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("discipline", DISCIPLINES)
@pytest.mark.parametrize("preemption", PREEMPTIONS)
def test_traces_in_which_memory_runs_out(discipline: str, preemption: str) -> None:
    trace = run_trace(3, block_size=2, num_requests=25, shortages=0.05, discipline=discipline, preemption=preemption)
    assert trace.probe.of(PoolShrunk)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"overlap": True, "preemption": "swap", "order": "priority"},
        {"overlap": True, "discipline": "static"},
        {"speculative": "ngram", "draft_tokens": 4},
        {"prefix_cache": False, "changes": 0.05},
        {"host": "few", "preemption": "swap", "changes": 0.05, "order": "fair"},
    ],
    ids=str,
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_traces_of_other_kinds_in_which_memory_runs_out(block_size: int, settings: dict[str, Any]) -> None:
    run_trace(5, block_size=block_size, num_requests=25, shortages=0.04, **settings)


def test_every_request_of_a_trace_leaves_once() -> None:
    trace = run_trace(11, block_size=2, num_requests=40, shortages=0.05)
    left = [event.request_id for event in trace.probe.of(Finished)]
    assert len(left) == len(set(left))
