"""Several answers to one prompt: computed once, written apart, counted, aborted and failed together."""

from __future__ import annotations

import pytest

from engine.events import Arrived, BlockCopied, BlocksShared
from engine.request import FinishReason, RequestError, RequestStatus, SamplingParams, branch_id
from tests.oracles import EngineProbe, KVCheckingRunner, cold_answer, make_core
from tests.scheduling.common import plan_of


def answers_of(probe: EngineProbe, request: int, n: int) -> list[list[int]]:
    return [probe.answers[branch_id(request, index)].token_ids for index in range(n)]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_the_prompt_is_computed_once_and_each_answer_goes_its_own_way(length: int, prefix_cache: bool) -> None:
    probe = EngineProbe(make_core(block_size=4, prefix_cache=prefix_cache))
    request = probe.add(range(length), SamplingParams(max_tokens=6, n=3))
    probe.run()
    assert answers_of(probe, request, 3) == [cold_answer(range(length), 6, index=index) for index in range(3)]
    assert len(set(map(tuple, answers_of(probe, request, 3)))) == 3
    first, *others = [event.parent for event in probe.of(Arrived)]
    assert (first, others) == (0, [request, request])
    # Each further answer computes the prompt's last token itself: its logits are what it is drawn from.
    totals = probe.records[-1].totals
    assert totals.prompt_tokens == length + 2 and totals.recomputed_tokens == 0


def test_three_answers_need_room_for_one_prompt_and_three_tails() -> None:
    """Prompt of 10, 2 full blocks of 4: 2 + 3 · 1 blocks, into two of which the prompt's half block is copied."""
    probe = EngineProbe(make_core(block_size=4, num_blocks=64, prefix_cache=False))
    request = probe.add(range(10), SamplingParams(max_tokens=4, n=3))
    for _ in range(3):
        probe.step()
    rows = probe.core.keyframe().requests
    assert len(rows) == 3
    blocks = [set(row.blocks) for row in rows]
    assert len(blocks[0] & blocks[1] & blocks[2]) == 2, "the two full blocks of the prompt"
    assert len(set.union(*blocks)) == 2 + 3
    copies = probe.of(BlockCopied)
    assert [event.request_id for event in copies] == [branch_id(request, 1), branch_id(request, 2)]
    assert len({event.source for event in copies}) == 1 and len({event.destination for event in copies}) == 2
    assert [len(event.blocks) for event in probe.of(BlocksShared)] == [3, 3]
    probe.run()


def test_one_copy_is_enough_and_the_last_owner_writes_in_place() -> None:
    probe = EngineProbe(make_core(block_size=4, prefix_cache=False))
    request = probe.add(range(6), SamplingParams(max_tokens=5, n=2))
    probe.run()
    assert len(probe.of(BlockCopied)) == 1
    assert answers_of(probe, request, 2) == [cold_answer(range(6), 5, index=index) for index in range(2)]


def test_an_answer_whose_first_has_finished_computes_what_nobody_keeps_for_it() -> None:
    probe = EngineProbe(make_core(block_size=4, max_num_seqs=1, prefix_cache=False))
    request = probe.add(range(6), SamplingParams(max_tokens=3, n=3))
    probe.run()
    assert answers_of(probe, request, 3) == [cold_answer(range(6), 3, index=index) for index in range(3)]
    assert not probe.of(BlockCopied)


@pytest.mark.parametrize("state", ["before the first step", "prefill", "decode", "executing", "one is finished"])
def test_an_abort_frees_all_answers(state: str) -> None:
    probe = EngineProbe(make_core(block_size=4, token_budget=4))
    core, runner = probe.core, probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    request = probe.add(range(9), SamplingParams(max_tokens=12, n=3))
    other = probe.add([5], SamplingParams(max_tokens=3))
    if state != "before the first step":
        probe.step()
        assert len(probe.core.keyframe().requests) == 2, "further answers begin once the prompt is computed"
    if state in ("decode", "executing"):
        while len(plan_of(probe)) < 3 or len(answers_of(probe, request, 3)[2]) == 0:
            probe.step()
    if state == "one is finished":
        while probe.answers[request].last is None:
            probe.step()
    if state == "executing":
        runner.during = lambda plan: core.abort(request)
        probe.step()
        runner.during = None
    else:
        core.abort(request)
    probe.step()
    assert all(row.request_id == other for row in core.keyframe().requests)
    ends = [probe.answers[branch_id(request, index)].finish_reason for index in range(3)]
    assert ends == (["length", "abort", "abort"] if state == "one is finished" else ["abort"] * 3)
    probe.run()
    assert probe.answers[other].finish_reason == "length"


def test_one_answer_in_error_ends_alone_and_a_prompt_in_error_ends_all() -> None:
    probe = EngineProbe(make_core(block_size=4))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    request = probe.add(range(9), SamplingParams(max_tokens=5, n=3))
    runner.failures[branch_id(request, 1)] = "poisoned"
    probe.run()
    reasons = [probe.answers[branch_id(request, index)].finish_reason for index in range(3)]
    assert reasons == ["length", "error", "length"]
    request = probe.add(range(9), SamplingParams(max_tokens=5, n=3))
    runner.failures[request] = "poisoned"
    probe.run()
    lasts = [probe.answers[branch_id(request, index)].last for index in range(3)]
    assert all(last is not None and (last.finish_reason, last.error) == ("error", "poisoned") for last in lasts)


def test_answers_that_end_with_a_prompt_in_error_get_its_message_and_not_a_neighbours() -> None:
    probe = EngineProbe(make_core(block_size=4))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    requests = [probe.add(range(i, i + 5), SamplingParams(max_tokens=5, n=2)) for i in range(3)]
    runner.failures.update({request: f"error of {request}" for request in requests})
    probe.run()
    for request in requests:
        lasts = [probe.answers[branch_id(request, index)].last for index in range(2)]
        assert [last and last.error for last in lasts] == [f"error of {request}"] * 2


def test_an_absurd_number_of_answers_is_refused_by_name() -> None:
    for n in (0, -1, 129, 10**6):
        with pytest.raises(RequestError, match="n is"):
            SamplingParams(n=n)


def test_outputs_say_which_answer_they_belong_to_and_add_up() -> None:
    probe = EngineProbe(make_core(block_size=4))
    request = probe.add(range(5), SamplingParams(max_tokens=4, n=3))
    indices = set()
    while probe.core.has_work:
        for output in probe.step().outputs:
            assert output.request_id == request
            indices.add(output.index)
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH and output.prompt_tokens == 5
    assert indices == {0, 1, 2}
    totals = probe.records[-1].totals
    assert (totals.arrived, totals.finished, totals.output_tokens) == (3, 3, 12)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_answers_that_yield_to_a_higher_priority_go_on_as_they_were(preemption: str) -> None:
    probe = EngineProbe(
        make_core(
            num_blocks=12,
            block_size=4,
            order="priority",
            preemption=preemption,
            num_host_blocks=12,
            prefix_cache=False,
        )
    )
    request = probe.add(range(10), SamplingParams(max_tokens=12, n=3), priority=5)
    for _ in range(5):
        probe.step()
    high = probe.add([7] * 30, SamplingParams(max_tokens=5), priority=0)
    probe.step()
    waiting = [row for row in probe.core.keyframe().requests if row.status != RequestStatus.RUNNING]
    assert waiting, "there was no room for both"
    probe.run()
    assert probe.answers[high].token_ids == cold_answer([7] * 30, 5)
    assert answers_of(probe, request, 3) == [cold_answer(range(10), 12, index=index) for index in range(3)]
