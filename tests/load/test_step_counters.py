"""What steps add up to: waste in tokens and seconds, places, batches, and a ledger of preemptions."""

from __future__ import annotations

from typing import Any

import pytest

from engine.bench import run_faults
from engine.events import (
    AnyEvent,
    BatchEnded,
    BlocksAllocated,
    BlocksFreed,
    Preempted,
    Recovered,
    RunTotals,
    StepRecord,
    StepTimings,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.request import SamplingParams
from engine.step_counters import StepCounters
from tests.oracles import EngineProbe, make_core


def counters(**changes: Any) -> StepCounters:
    given = {"num_blocks": 10, "block_size": 16, "max_num_seqs": 4, "kv_bytes_per_block": 1_600, "start": 100.0}
    return StepCounters(RunTotals(), **(given | changes))


def step(
    *events: AnyEvent, number: int = 1, seconds: float = 1.0, totals: RunTotals | None = None, **gauges: int
) -> StepRecord:
    """A step that computed something for one request."""
    return StepRecord(
        step=number,
        time=100.0 + number,
        timings=StepTimings(forward=seconds),
        events=list(events),
        request_ids=[1],
        num_tokens=[1],
        num_computed=[1],
        kinds=[0],
        new_tokens=[1],
        num_running=1,
        num_waiting=gauges.pop("num_waiting", 0),
        free_blocks=0,
        cached_blocks=0,
        token_budget=64,
        totals=totals or RunTotals(),
        **gauges,
    )


def test_what_was_computed_for_nothing_has_its_share_of_each_step() -> None:
    run = counters()
    run.add(step(seconds=2.0, totals=RunTotals(computed_tokens=60, padding_tokens=20, recomputed_tokens=30)))
    later = RunTotals(computed_tokens=70, padding_tokens=20, recomputed_tokens=30, draft_tokens=8, accepted_tokens=3)
    run.add(step(seconds=1.0, totals=later))
    summary = run.summary()
    waste = summary["waste"]
    assert waste["padding"] == {"tokens": 20, "seconds": pytest.approx(2.0 * 20 / 80)}
    assert waste["recomputed"] == {"tokens": 30, "seconds": pytest.approx(2.0 * 30 / 80)}
    assert waste["rejected_drafts"] == {"tokens": 5, "seconds": pytest.approx(1.0 * 5 / 10)}
    assert (summary["draft_tokens"], summary["accepted_tokens"], summary["acceptance_rate"]) == (8, 3, 3 / 8)
    assert summary["padding_tokens"] == 20
    assert counters().summary()["acceptance_rate"] is None


def test_empty_memory_is_weighted_by_time() -> None:
    run = counters()
    run.add(step(seconds=3.0, reserved_tokens=40, tail_tokens=8))
    run.add(step(seconds=1.0, reserved_tokens=80))
    waste = run.summary()["waste"]
    assert waste["reserved"] == {
        "tokens": (3 * 40 + 80) / 4,
        "peak_tokens": 80,
        "seconds": (3 * 40 + 80) / 160,
        "bytes": 50 * 100,
        "peak_bytes": 80 * 100,
    }
    assert (waste["tail"]["tokens"], waste["tail"]["peak_tokens"]) == (6, 8)
    assert counters().summary()["waste"]["tail"]["tokens"] is None


def test_places_are_those_without_a_complete_answer() -> None:
    run = counters()
    run.add(step(num_slots=4, num_waiting=2))
    run.add(step(num_slots=1, num_waiting=1))
    run.add(step(num_slots=2))
    summary = run.summary()
    assert summary["slot_utilisation"] == 5 / 8 and summary["slot_utilisation_run"] == 7 / 12
    assert (summary["running_peak"], summary["running_mean"]) == (4, 7 / 3)


def test_the_ledger_follows_a_preemption_to_its_end() -> None:
    run = counters()
    swap = Preempted(7, 8, "latest arrival", "swap", 40, 3, 2, recompute_seconds=0.5, swap_seconds=0.1)
    run.add(step(BlocksAllocated(7, [1, 2, 3]), number=1))
    run.add(step(BlocksFreed(7, [3]), SwappedOut(7, [1, 2], [0, 1]), swap, number=2))
    run.add(step(SwappedIn(7, [4, 5], [0, 1]), Recovered(7, 3.5, 0), number=3))
    run.add(step(Preempted(7, 7, "its own growth", "recompute", 41, 3, fallback="host memory is full"), number=4))
    run.add(step(Preempted(7, 9, "latest arrival", "recompute", 10, 1), number=5))
    run.add(step(Recovered(7, 1.25, 41), number=6))
    swapped, again, last = run.summary()["preemption_ledger"]
    assert swapped == {
        "step": 2,
        "time": 2.0,
        "victim": 7,
        "beneficiary": 8,
        "rule": "latest arrival",
        "mode": "swap",
        "tokens": 40,
        "blocks": 3,
        "swapped_blocks": 2,
        "bytes_moved": 4 * 1_600,
        "recompute_seconds": 0.5,
        "swap_seconds": 0.1,
        "fallback": "",
        "recomputed_tokens": 0,
        "lost_seconds": 3.5,
    }
    assert (again["lost_seconds"], again["fallback"]) == (None, "host memory is full"), "preempted again before"
    assert (last["lost_seconds"], last["recomputed_tokens"], last["bytes_moved"]) == (1.25, 41, 0)
    assert run.summary()["kv_blocks_peak"] == 3


def test_a_swap_that_is_given_up_in_its_own_step_has_moved_nothing() -> None:
    run = counters()
    swap = Preempted(7, 8, "latest arrival", "swap", 40, 3, 2)
    run.add(step(swap, SwappedOut(7, [1, 2], [0, 1]), SwapDropped(7, [0, 1], "needed"), number=1))
    run.add(step(swap, SwappedOut(7, [1, 2], [0, 1]), number=2))
    run.add(step(SwapDropped(7, [0, 1], "needed"), number=3))
    moved = [(entry["swapped_blocks"], entry["bytes_moved"]) for entry in run.summary()["preemption_ledger"]]
    assert moved == [(0, 0), (2, 2 * 1_600)]


def test_batches_and_their_totals() -> None:
    run = counters()
    run.add(step(BatchEnded(1, 4, 10, 60, 40, 0.5, 0.6, 0.6), BatchEnded(2, 2, 5, 90, 210, 0.2, 0.3, 0.3)))
    summary = run.summary()
    assert [batch["size"] for batch in summary["static_batches"]] == [4, 2]
    assert summary["static_totals"] == {
        "batches": 2,
        "useful_tokens": 150,
        "padding_tokens": 250,
        "eta": pytest.approx((0.5 * 100 + 0.2 * 300) / 400),
        "predicted_useful": pytest.approx((0.6 * 100 + 0.3 * 300) / 400),
        "measured_useful": 150 / 400,
    }
    assert counters().summary()["static_totals"] is None


def summary_of(lengths: list[tuple[int, int]], **core: Any) -> dict[str, Any]:
    """A run of (prompt, output) lengths on the engine itself."""
    engine = make_core(block_size=4, **core)
    start = engine.keyframe()
    run = StepCounters(
        start.totals, num_blocks=start.num_blocks, block_size=start.block_size, max_num_seqs=start.max_num_seqs
    )
    for number, (prompt, output) in enumerate(lengths):
        ids = [(number * 31 + i) % 900 for i in range(prompt)]
        engine.add_request(number, ids, SamplingParams(max_tokens=output), ends_after=output)
    while engine.has_work:
        record = engine.step().record
        assert record is not None
        run.add(record)
    return run.summary()


def test_a_static_batch_wastes_what_the_formula_predicts() -> None:
    lengths = [(8, 3), (20, 12), (5, 30), (11, 6)]
    summary = summary_of(lengths, discipline="static", max_num_seqs=4, num_blocks=200)
    (batch,) = summary["static_batches"]
    predicted = sum(p + o - 1 for p, o in lengths) / (4 * (20 + 30 - 1))
    assert batch["predicted_useful"] == pytest.approx(predicted)
    assert batch["measured_useful"] == pytest.approx(predicted, abs=0.01)
    assert (
        summary["padding_tokens"]
        == summary["waste"]["padding"]["tokens"]
        == 4 * 49 - sum(p + o - 1 for p, o in lengths)
    )
    assert summary["waste"]["padding"]["seconds"] > 0 and summary["waste"]["reserved"]["peak_tokens"] > 0
    continuous = summary_of(lengths, max_num_seqs=4, num_blocks=200)
    assert continuous["padding_tokens"] == 0 and continuous["waste"]["reserved"]["peak_tokens"] < 40


def test_a_tight_pool_leaves_a_ledger_whose_losses_add_up() -> None:
    summary = summary_of([(20, 24)] * 6, max_num_seqs=6, num_blocks=24, prefix_cache=False)
    ledger = summary["preemption_ledger"]
    assert summary["preemptions"] == len(ledger) > 0
    assert all(entry["mode"] == "recompute" and entry["rule"] for entry in ledger)
    recovered = [entry for entry in ledger if entry["lost_seconds"] is not None]
    assert recovered and all(entry["lost_seconds"] > 0 for entry in recovered)
    assert summary["waste"]["recomputed"]["tokens"] == summary["recomputed_tokens"] > 0


def test_a_pool_that_shrank_in_a_run_is_told_with_it() -> None:
    probe = EngineProbe(make_core(num_blocks=50))
    counted = counters(num_blocks=50)
    probe.add(range(20))
    probe.step()
    probe.core._runner.shortage = ("after", MemoryError())  # type: ignore[attr-defined]
    probe.run()
    for record in probe.records:
        counted.add(record)
    summary = counted.summary()
    assert summary["pool_shrinks"] == [{"num_blocks": 40, "before": 50, "cause": "MemoryError", "withdrawn": []}]
    assert summary["kv_blocks_total"] == 50
    (fault,) = run_faults({"failure": "", "failed": 0, **summary})
    assert fault == "memory ran out in 1 step (MemoryError), and the pool shrank from 50 to 40 KV blocks"
