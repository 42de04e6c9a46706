"""``chunk_size``: most tokens of one prompt in one step, so that several prompts share it."""

from __future__ import annotations

import pytest

from engine.config import DISCIPLINES
from engine.events import Preempted, RowKind
from tests.oracles import EngineProbe, kinds_of, make_core
from tests.scheduling.common import assert_answer, deferred_reasons, plan_of, tokens
from tests.scheduling.traces import run_trace

CHUNKING = ("vllm", "trtllm-max-util", "trtllm-no-evict")


@pytest.mark.parametrize("discipline", CHUNKING)
def test_several_prompts_share_a_step(discipline: str) -> None:
    probe = EngineProbe(make_core(discipline=discipline, token_budget=50, chunk_size=16))
    decoding = probe.add([7], tokens(20))
    probe.step()
    long = [probe.add([i] * 40, tokens(3)) for i in range(4)]
    probe.step()
    assert plan_of(probe) == {decoding: 1, long[0]: 16, long[1]: 16, long[2]: 16, long[3]: 1}
    probe.step()
    assert plan_of(probe) == {decoding: 1, long[0]: 16, long[1]: 16, long[2]: 16, long[3]: 1}
    probe.step()
    assert plan_of(probe) == {decoding: 1, long[0]: 8, long[1]: 8, long[2]: 8, long[3]: 16}
    probe.run()
    for i, request in enumerate(long):
        assert_answer(probe, request, [i] * 40, 3)
        assert max(count for _, count in kinds_of(probe.records, request)) <= 16


@pytest.mark.parametrize("discipline", sorted(set(DISCIPLINES) - set(CHUNKING)))
def test_whole_prompts_know_no_chunks(discipline: str) -> None:
    plans = []
    for chunk_size in (None, 4):
        probe = EngineProbe(make_core(discipline=discipline, chunk_size=chunk_size, waiting_served_ratio=0.0))
        for i in range(3):
            probe.add([i] * 30, tokens(4))
        probe.run()
        plans.append([(r.request_ids, r.num_tokens, r.padding) for r in probe.records])
    assert plans[0] == plans[1]


def test_without_chunked_prefill_a_chunk_size_says_nothing() -> None:
    probe = EngineProbe(make_core(chunked_prefill=False, chunk_size=4))
    request = probe.add([1] * 30, tokens(2))
    probe.step()
    assert plan_of(probe) == {request: 30}


def test_what_was_lost_is_computed_again_in_chunks() -> None:
    probe = EngineProbe(make_core(order="priority", max_num_seqs=1, chunk_size=8, prefix_cache=False))
    low = probe.add([1] * 20, tokens(20), priority=5)
    for _ in range(6):
        probe.step()
    probe.add([2] * 4, tokens(2), priority=0)
    probe.run()
    again = [count for kind, count in kinds_of(probe.records, low) if kind == RowKind.RECOMPUTE]
    assert again == [8, 8, 8]
    assert_answer(probe, low, [1] * 20, 20)


def test_prompts_that_share_a_step_are_only_let_in_where_all_of_them_fit() -> None:
    probe = EngineProbe(make_core(num_blocks=16, block_size=4, chunk_size=4, token_budget=32))
    first, second = (probe.add([i] * 40, tokens(1)) for i in (1, 2))
    probe.step()
    assert plan_of(probe) == {first: 4} and deferred_reasons(probe) == ["watermark"]
    probe.run()
    assert not probe.of(Preempted)
    for i, request in enumerate((first, second), start=1):
        assert_answer(probe, request, [i] * 40, 1)


def test_a_higher_priority_does_not_wait_for_prompts_that_rank_below_it() -> None:
    probe = EngineProbe(make_core(num_blocks=16, block_size=4, chunk_size=4, token_budget=32, order="priority"))
    low = probe.add([1] * 40, tokens(1), priority=5)
    probe.step()
    high = probe.add([2] * 40, tokens(1), priority=0)
    probe.step()
    assert high in plan_of(probe)
    probe.run()
    assert_answer(probe, low, [1] * 40, 1)
    assert_answer(probe, high, [2] * 40, 1)


@pytest.mark.parametrize("discipline", CHUNKING)
@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_random_traffic_in_chunks(discipline: str, chunk_size: int) -> None:
    trace = run_trace(
        2, block_size=4, num_requests=40, discipline=discipline, chunk_size=chunk_size, order="priority", ranks=0.1
    )
    rows = [
        count
        for record in trace.probe.records
        for count, kind in zip(record.num_tokens, record.kinds, strict=True)
        if kind in (RowKind.PREFILL, RowKind.RECOMPUTE)
    ]
    assert max(rows) == chunk_size
