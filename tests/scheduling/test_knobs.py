"""Knobs that change while the engine runs: the discipline when the batch has drained, everything else at once."""

from __future__ import annotations

import dataclasses
from itertools import permutations
from typing import Any

import pytest

from engine.config import DISCIPLINES, ConfigError
from engine.events import Admitted, Preempted, Reconfigured
from engine.request import RequestStatus
from tests.oracles import EngineProbe, KVCheckingRunner, make_core, preemptions_of
from tests.scheduling.common import admitted_order, assert_answer, deferred_reasons, plan_of, tokens


def change(probe: EngineProbe, **knobs: Any) -> None:
    probe.core.reconfigure(dataclasses.replace(probe.core._scheduler.config, **knobs))


@pytest.mark.parametrize(("before", "after"), list(permutations(DISCIPLINES, 2)))
def test_a_discipline_takes_over_when_the_batch_has_drained(before: str, after: str) -> None:
    probe = EngineProbe(make_core(discipline=before, preemption="swap", num_host_blocks=64, max_num_seqs=4))
    first = [probe.add([i] * 9, tokens(6)) for i in range(4)]
    probe.step()
    change(probe, discipline=after)
    later = [probe.add([i] * 9, tokens(6)) for i in range(4, 8)]
    while (keyframe := probe.core.keyframe()).discipline == before:
        assert not keyframe.pending_discipline or keyframe.pending_discipline == after
        assert set(plan_of(probe)) <= set(first), "nobody joins while it drains"
        probe.step()
    assert set(admitted_order(probe)[:4]) == set(first)
    assert all(probe.answers[request].last is not None for request in first)
    assert "draining" in deferred_reasons(probe)
    told = [(event.discipline, event.pending_discipline) for event in probe.of(Reconfigured)]
    assert told == [(before, after), (after, "")]
    probe.run()
    for i, request in enumerate([*first, *later]):
        assert_answer(probe, request, [i] * 9, 6)


def test_a_change_that_is_taken_back_lets_others_join_again() -> None:
    probe = EngineProbe(make_core())
    probe.add([1], tokens(9))
    probe.step()
    change(probe, discipline="static")
    second = probe.add([2], tokens(9))
    probe.step()
    assert second not in plan_of(probe)
    change(probe, discipline="vllm")
    probe.step()
    assert second in plan_of(probe)
    probe.run()
    assert probe.core.keyframe().discipline == "vllm"


def test_a_discipline_takes_over_though_nobody_comes_after_the_last_has_left() -> None:
    probe = EngineProbe(make_core(discipline="vllm"))
    probe.add([1], tokens(3))
    probe.step()
    change(probe, discipline="static")
    probe.run()
    keyframe = probe.core.keyframe()
    assert (keyframe.discipline, keyframe.pending_discipline) == ("static", "")


def test_an_idle_engine_changes_at_once() -> None:
    probe = EngineProbe(make_core())
    change(probe, discipline="orca")
    probe.step()
    assert not probe.core.has_work and probe.core.keyframe().discipline == "orca"


def test_a_budget_that_is_no_longer_asked_for_is_again_what_it_was_at_load() -> None:
    probe = EngineProbe(make_core(token_budget=64))
    change(probe, max_num_batched_tokens=16)
    probe.step()
    assert probe.core.keyframe().token_budget == 16
    change(probe, max_num_batched_tokens=None)
    probe.step()
    assert probe.core.keyframe().token_budget == 64


@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_a_budget_lowered_below_the_running_keeps_others_out_and_stalls_nobody(discipline: str) -> None:
    probe = EngineProbe(make_core(discipline=discipline, max_num_seqs=8, waiting_served_ratio=0.0))
    ids = [probe.add([i] * 3, tokens(12)) for i in range(6)]
    probe.step()
    change(probe, max_num_batched_tokens=2)
    waits = probe.add([9] * 3, tokens(4))
    for _ in range(5):
        probe.step()
        assert plan_of(probe) == dict.fromkeys(ids, 1)
    probe.run()
    for i, request in enumerate([*ids, waits]):
        assert_answer(probe, request, [9 if request == waits else i] * 3, 4 if request == waits else 12)
    assert max(sum(plan.num_tokens) for plan in probe.records[-2:]) <= 2


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("discipline", DISCIPLINES)
def test_places_lowered_below_the_running_keep_others_out(discipline: str, order: str) -> None:
    """Under ``priority`` a preempting discipline makes room for a higher one by as many as are too many."""
    probe = EngineProbe(make_core(discipline=discipline, max_num_seqs=8, order=order, waiting_served_ratio=0.0))
    ids = [probe.add([i] * 3, tokens(30), priority=5, arrival_time=float(i)) for i in range(6)]
    probe.step()
    change(probe, max_num_seqs=2)
    high = probe.add([9] * 3, tokens(4), priority=0)
    probe.step()
    if order == "priority" and discipline in ("vllm", "trtllm-max-util"):
        assert set(plan_of(probe)) == {ids[0], high}
        assert [event.request_id for event in probe.of(Preempted)] == ids[:0:-1]
    else:
        assert set(plan_of(probe)) == set(ids)
    probe.run()
    assert probe.core.keyframe().max_num_seqs == 2
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 3, 30)


def test_the_order_changes_while_many_wait() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1, block_size=4))
    running = probe.add([1], tokens(3))
    priorities = {}
    for i in range(300):
        request = probe.add([i % 7], tokens(1), priority=(i * 7) % 10, user=f"u{i % 3}", arrival_time=1e6 + i)
        priorities[request] = (i * 7) % 10
    probe.step()
    change(probe, order="priority")
    for _ in range(102):
        probe.step()
    first = admitted_order(probe)[1:101]
    assert [priorities[request] for request in first] == sorted(priorities.values())[:100]
    change(probe, order="fcfs")
    rest = sorted(priorities.keys() - set(first))
    for _ in range(100):
        probe.step()
    assert admitted_order(probe)[101:200] == rest[: len(admitted_order(probe)[101:200])]
    change(probe, order="fair")
    probe.run()
    assert set(admitted_order(probe)) == {running, *priorities}
    assert [event.order for event in probe.of(Reconfigured)] == ["priority", "fcfs", "fair"]


def test_swapped_requests_survive_a_change_of_order_and_of_preemption() -> None:
    probe = EngineProbe(
        make_core(num_blocks=12, block_size=4, preemption="swap", num_host_blocks=12, prefix_cache=False)
    )
    ids = [probe.add([i] * 6, tokens(25)) for i in range(4)]
    while not any(row.status == RequestStatus.SWAPPED for row in probe.core.keyframe().requests):
        probe.step()
    change(probe, order="priority", preemption="recompute")
    swapped = {row.request_id for row in probe.core.keyframe().requests if row.status == RequestStatus.SWAPPED}
    probe.run()
    assert swapped and {event.mode for event in probe.of(Preempted)} >= {"swap"}
    assert all(any(e.resumed and e.request_id == request for e in probe.of(Admitted)) for request in swapped)
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 6, 25)


def test_ageing_and_weights_change_at_once() -> None:
    probe = EngineProbe(make_core(max_num_seqs=1, order="priority", clock=lambda: 0.0))
    probe.add([1], tokens(3), priority=0)
    probe.step()
    old_low = probe.add([2], tokens(2), priority=2, arrival_time=0.0)
    new_high = probe.add([3], tokens(2), priority=1, arrival_time=25.0)
    probe.step()
    change(probe, ageing=10.0)  # keys 20 and 35
    while len(admitted_order(probe)) < 2:
        probe.step()
    assert admitted_order(probe)[1] == old_low
    probe.run()
    assert len(preemptions_of(probe, old_low)) == 0, "by its age it came before the one of higher priority"
    assert new_high in admitted_order(probe)


def test_speculation_and_chunks_change_at_once() -> None:
    probe = EngineProbe(make_core(token_budget=16))
    request = probe.add([1] * 4, tokens(60))
    for _ in range(3):
        probe.step()
    assert probe.records[-1].totals.draft_tokens == 0
    change(probe, speculative="ngram", draft_tokens=3, chunked_prefill=False)
    long = probe.add([2] * 40, tokens(2))
    probe.step()
    assert plan_of(probe)[long] == 40
    probe.step()
    assert 0 < probe.records[-1].totals.draft_tokens <= 6
    change(probe, speculative="off")
    probe.step()
    drafted = probe.records[-1].totals.draft_tokens
    probe.run()
    assert probe.records[-1].totals.draft_tokens == drafted
    assert_answer(probe, request, [1] * 4, 60)


def test_a_half_computed_prompt_goes_on_when_chunks_are_switched_off() -> None:
    for discipline in ("vllm", "trtllm-max-util", "trtllm-no-evict"):
        probe = EngineProbe(make_core(discipline=discipline, token_budget=16))
        long = probe.add(range(100), tokens(2))
        probe.step()
        change(probe, chunked_prefill=False)
        probe.step()
        assert plan_of(probe) == {long: 84}
        probe.run()
        assert_answer(probe, long, list(range(100)), 2)


def test_knobs_may_change_in_the_middle_of_a_step() -> None:
    probe = EngineProbe(make_core(max_num_seqs=4))
    runner = probe.core._runner
    assert isinstance(runner, KVCheckingRunner)
    ids = [probe.add([i] * 20, tokens(8)) for i in range(4)]
    probe.step()
    runner.during = lambda plan: change(probe, max_num_batched_tokens=1, max_num_seqs=1, order="fair")
    probe.step()
    runner.during = None
    probe.run()
    for i, request in enumerate(ids):
        assert_answer(probe, request, [i] * 20, 8)


def test_a_draft_model_that_was_not_loaded_is_refused_and_nothing_changes() -> None:
    probe = EngineProbe(make_core())
    with pytest.raises(ConfigError, match="draft:other"):
        change(probe, speculative="draft:other")
    assert not probe.core.has_work
