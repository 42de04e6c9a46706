"""``trtllm-max-util``: as many as fit now; the last to start is paused, and comes back when there is room."""

from __future__ import annotations

import pytest

from engine.events import Admitted, Preempted
from tests.oracles import EngineProbe, make_core, preemptions_of
from tests.scheduling.common import admitted_order, assert_answer, plan_of, tokens


def max_util(**options: object) -> EngineProbe:
    options = {"discipline": "trtllm-max-util", "block_size": 4, **options}
    return EngineProbe(make_core(**options))  # type: ignore[arg-type]


def test_the_last_to_start_is_paused_not_the_last_to_arrive() -> None:
    """The one that arrived last was let in first, by its priority at the time of the queue; it stays."""
    probe = max_util(num_blocks=6, order="priority", ageing=100.0, clock=lambda: 0.0)
    late = probe.add([1] * 8, tokens(9), arrival_time=50.0)  # 4 blocks in the end
    probe.step()
    early = probe.add([2] * 8, tokens(9), arrival_time=0.0)
    while not probe.of(Preempted):
        probe.step()
    event = probe.of(Preempted)[0]
    assert (event.request_id, event.beneficiary, event.rule) == (early, late, "started last")
    probe.run()
    assert len(preemptions_of(probe, late)) == 0
    assert_answer(probe, early, [2] * 8, 9)
    assert_answer(probe, late, [1] * 8, 9)


def test_vllm_lets_the_last_to_arrive_yield_in_the_same_place() -> None:
    probe = max_util(discipline="vllm", num_blocks=6, order="priority", ageing=100.0, clock=lambda: 0.0)
    late = probe.add([1] * 8, tokens(9), arrival_time=50.0)
    probe.step()
    probe.add([2] * 8, tokens(9), arrival_time=0.0)
    probe.run()
    assert probe.of(Preempted)[0].request_id == late


def test_under_priority_the_lowest_is_paused_first_and_among_equals_the_last_to_start() -> None:
    probe = max_util(num_blocks=9, order="priority", token_budget=128)
    low = [probe.add([i] * 8, tokens(9), priority=5, arrival_time=float(i)) for i in range(2)]
    probe.step()
    high = probe.add([9] * 8, tokens(9), priority=0, arrival_time=9.0)
    probe.run()
    assert len(preemptions_of(probe, high)) == 0, "though it started last"
    assert probe.of(Preempted)[0].request_id == low[1]


def test_admission_leaves_no_margin_to_the_running_whatever_the_watermark() -> None:
    probe = max_util(num_blocks=4, watermark=0.5)
    first, second = probe.add([1] * 8, tokens(2)), probe.add([2] * 8, tokens(1))
    probe.step()
    assert list(plan_of(probe)) == [first, second], "all four blocks are taken"
    careful = max_util(discipline="vllm", num_blocks=4, watermark=0.5)
    first = careful.add([1] * 8, tokens(2))
    careful.add([2] * 8, tokens(1))
    careful.step()
    assert list(plan_of(careful)) == [first]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_paused_request_is_restarted_before_those_that_never_ran(preemption: str) -> None:
    probe = max_util(num_blocks=8, preemption=preemption, num_host_blocks=8, token_budget=32)
    ids = [probe.add([i] * 8, tokens(17), arrival_time=float(i)) for i in range(5)]
    probe.run()
    assert probe.of(Preempted)
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 8, 17)
    paused: set[int] = set()
    for event in probe.events:
        if isinstance(event, Preempted):
            paused.add(event.request_id)
        elif isinstance(event, Admitted):
            assert not paused or event.request_id in paused, "a paused one waits, and somebody else starts"
            paused.discard(event.request_id)
    first_starts = list(dict.fromkeys(admitted_order(probe)))
    assert first_starts == ids
