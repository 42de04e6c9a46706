"""Throughput, latencies and changed knobs as folds: what they say now, and what they said then."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from app.scope.changes import KnobChanges, differing
from app.scope.curves import gap_curves
from app.scope.latency import Latency
from app.scope.rates import GRAIN, KNOTS_KEPT, Rates
from app.scope.samples import Samples, percentiles
from app.scope.steps import PARTS
from engine.config import SchedulerConfig
from engine.events import Arrived, Ended, Finished, Keyframe, Reconfigured, Reprioritised, RowKind, RunTotals
from engine.run_state import RunState
from tests.app.runs import Run, record_of


def start(*, step: int = 0, **given: object) -> Keyframe:
    return Keyframe(step, 0.0, 4, 16, 8, 64, [], [], None, RunTotals(steps=step), **given)


def rates_of(step_seconds: list[float], tokens_per_step: int) -> Rates:
    rates = Rates()
    rates.restore(start())
    now, total = 50.0, 0
    for number, seconds in enumerate(step_seconds, 1):
        total += tokens_per_step
        rates.apply(record_of(number, time=now, seconds=seconds, output=total, prompt=2 * total))
        now += seconds
    return rates


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.003, 0.05, 0.31, 1.7])
def test_the_gauge_is_right_at_every_phase(seconds: float) -> None:
    for steps in range(int(2 / seconds) + 2, int(2 / seconds) + 12):
        rates = rates_of([seconds] * steps, 12)
        assert rates.rate("output") == pytest.approx(12 / seconds, rel=0.05)
        assert rates.rate("prompt") == pytest.approx(24 / seconds, rel=0.05)


def test_the_gauge_is_zero_exactly_when_idle() -> None:
    rates = rates_of([0.1] * 30, 3)
    assert rates.rate("output") > 0
    rates.apply(record_of(31, time=53.0, seconds=0.1, output=93, running=0))
    assert rates.rate("output") == 0.0
    assert Rates().rate("output") == 0.0


@pytest.mark.parametrize("window", [10.0, 60.0, math.inf])
def test_the_curve_is_even_for_an_even_run_and_as_long_as_the_window(window: float) -> None:
    series = rates_of([0.13] * 1000, 6).series(window)
    assert series is not None
    assert -min(window, 130.01) <= series.ages[0] and series.ages[-1] == 0 and np.all(np.diff(series.ages) > 0)
    assert series.ages[0] < -0.95 * min(window, 130.0) and len(series.ages) < 200
    assert series.output == pytest.approx(np.full(len(series.output), 6 / 0.13), rel=0.06)


def test_steps_that_were_missed_are_counted() -> None:
    rates = rates_of([0.1] * 20, 5)
    totals = RunTotals(steps=60, output_tokens=300, prompt_tokens=200)
    rates.restore(Keyframe(60, 56.0, 4, 16, 8, 64, RunState().keyframe().requests, [], None, totals))
    assert rates.over("output", 50.0, 56.0) == pytest.approx(300)
    assert rates.over("steps", 50.0, 56.0) == 20  # what the others took is not known
    assert rates.ratio("forward", "steps", 50.0, 56.0) == pytest.approx(0.1)


def test_what_was_known_then_is_shown_then() -> None:
    lengths = [0.02 + 0.01 * (i % 7) for i in range(400)]
    whole = rates_of(lengths, 7)
    then = rates_of(lengths[:150], 7)
    for name in ("output", "prompt", "steps", "seconds", "forward", "running"):
        for back in (0.5, 2.0, 5.0):
            assert whole.over(name, then.end - back, then.end) == pytest.approx(
                then.over(name, then.end - back, then.end), rel=GRAIN / back
            )
    series, cut = then.series(5.0), whole.series(5.0, then.end)
    assert series is not None and cut is not None
    assert cut.ages == pytest.approx(series.ages) and cut.output == pytest.approx(series.output, rel=0.06)
    assert whole.rate("output", then.end) == pytest.approx(then.rate("output"), rel=0.03)
    assert whole.series(5.0, 49.0) is None  # before the run


def test_means_over_a_window_are_of_its_steps() -> None:
    run = Run(num_blocks=40)
    for request_id in range(1, 5):
        run.add(request_id, 30, 40)
    run.step(30)
    rates, records = run.history.rates, run.records
    begin, end = records[0].time, rates.end
    took = [r.timings.total for r in records]
    assert rates.ratio("seconds", "steps", begin, end) == pytest.approx(np.mean(took))
    running = np.average([r.num_running for r in records], weights=took)
    assert rates.ratio("running", "seconds", begin, end) == pytest.approx(running)
    used = [40 - r.free_blocks - r.cached_blocks for r in records]
    assert rates.ratio("kv", "seconds", begin, end) == pytest.approx(np.average(used, weights=took) / 40)
    parts = [rates.over(part, begin, end) for part in PARTS]
    assert sum(parts) == pytest.approx(sum(took))
    assert rates.ratio("prefix_hits", "prefix_queries", end, end + 5) is None


def test_hours_fit_in_what_is_kept_and_an_idle_hour_is_two_knots() -> None:
    rates = Rates(capacity=64)
    rates.restore(start())
    for step in range(1, 1000):
        rates.apply(record_of(step, time=step * 0.1, seconds=0.1, output=step))
    assert len(rates) <= 64
    assert rates.over("output", rates.begin, rates.end) == pytest.approx((rates.end - rates.begin) * 10, rel=0.01)
    fine = rates_of([0.002] * 5000, 1)  # 10 s
    assert len(fine) <= 10 / GRAIN * 2 + 5
    assert fine.over("output", 50.0, 60.0) == pytest.approx(5000)
    before = len(rates)
    rates.apply(record_of(1000, time=3700.0, seconds=0.1, output=1000))
    assert len(rates) == before + 2
    assert rates.over("output", 200.0, 3699.0) == 0
    assert KNOTS_KEPT * GRAIN / 60 > 13


def test_nonsense_does_not_spoil_the_sums() -> None:
    rates = rates_of([0.1] * 10, 5)
    for seconds in (math.nan, math.inf):
        rates.apply(record_of(11, time=51.0, seconds=seconds, output=60))
    rates.apply(record_of(12, time=51.0, seconds=0.1, output=10**18))
    series = rates.series(60.0)
    assert series is not None and np.isfinite(series.output).all()
    assert rates.over("output", 50.0, 52.0) == pytest.approx(1e18)


def test_a_run_that_begins_anew_begins_new_sums() -> None:
    rates = rates_of([0.1] * 10, 5)
    rates.restore(start())
    assert rates.series(60.0) is None and rates.rate("output") == 0.0
    rates.apply(record_of(1, time=70.0, seconds=0.1, output=5))
    assert rates.begin == 70.0 and rates.over("output", 0.0, 100.0) == 5


# Latencies -----------------------------------------------------------------------------------------------------------


def all_of(samples: Samples) -> np.ndarray:
    found = samples.between(-math.inf, math.inf)
    return np.repeat(found.values, found.weights)


def test_latency_is_from_arrival_and_between_tokens() -> None:
    run = Run(num_blocks=60)
    run.add(1, 100, 5)
    run.step(10_000)
    latency = run.history.latency
    arrival = run.records[0].events[0].arrival_time
    ends = [r.time + r.timings.total for r in run.records if sum(r.new_tokens)]
    assert all_of(latency.ttft) == pytest.approx([ends[0] - arrival])
    assert all_of(latency.itl) == pytest.approx(np.diff(ends))
    assert all_of(latency.e2el) == pytest.approx([ends[-1] - arrival])
    assert latency.ttft.between(0, math.inf).request_ids.tolist() == [1]


def test_every_token_of_every_request_has_its_gap() -> None:
    run = Run()
    run.crunch()
    latency = run.history.latency
    totals = run.state.totals
    assert len(all_of(latency.ttft)) == len(all_of(latency.e2el)) == 6
    assert len(all_of(latency.itl)) == totals.output_tokens - 6
    made: dict[int, list[float]] = {}
    for record in run.records:
        for request_id, new in zip(record.request_ids, record.new_tokens, strict=True):
            if new:
                made.setdefault(request_id, []).append(record.time + record.timings.total)
    gaps = np.concatenate([np.diff(times) for times in made.values()])
    assert np.sort(all_of(latency.itl)) == pytest.approx(np.sort(gaps))


def test_no_gap_is_taken_across_missing_records() -> None:
    run = Run(num_blocks=60)
    run.add(1, 20, 50)
    run.step(10)
    count = len(all_of(run.history.latency.itl))
    for _ in range(10):
        run.core.step()
    run.restore(run.core.keyframe())
    run.step(1)
    assert len(all_of(run.history.latency.itl)) == count
    run.step(1)
    assert len(all_of(run.history.latency.itl)) == count + 1
    assert len(all_of(run.history.latency.ttft)) == 1
    run.step(10_000)
    assert len(all_of(run.history.latency.e2el)) == 1  # its arrival is in the keyframe


def test_latencies_are_of_the_priority_at_that_time() -> None:
    run = Run(num_blocks=60)
    run.add(1, 20, 20, priority=0)
    run.add(2, 20, 20, priority=7)
    run.step(6)
    latency = run.history.latency
    assert latency.ttft.priorities(0, math.inf) == [0, 7]
    before = len(latency.itl.between(0, math.inf, 7))
    record = run.step(1)
    assert record is not None
    latency.apply(
        record_of(
            record.step + 1,
            time=latency.end,
            seconds=0.1,
            events=[Reprioritised(2, 3)],
            rows=[(2, RowKind.DECODE, 1, 1, 0, 0)],
        )
    )
    assert len(latency.itl.between(0, math.inf, 7)) == before + 1
    assert latency.itl.between(0, math.inf, 3).values == pytest.approx([0.1])


def test_what_was_aborted_or_refused_has_no_end() -> None:
    run = Run(num_blocks=60)
    run.add(1, 20, 50)
    run.add(2, 20, 5)
    run.step(3)
    run.core.abort(1)
    run.step(10_000)
    assert run.history.latency.e2el.between(0, math.inf).request_ids.tolist() == [2]
    assert run.history.latency._row_of == {}


@pytest.mark.parametrize(("delivery", "took"), [("batch", 3.0), ("row", 2.0)])
def test_an_answer_of_a_static_batch_ends_when_it_is_handed_out(delivery: str, took: float) -> None:
    latency = Latency()
    latency.restore(start(scheduler=SchedulerConfig(discipline="static", static_delivery=delivery)))
    rows = [(1, RowKind.DECODE, 1, 1, 0, 0)]
    latency.apply(record_of(1, time=0.0, seconds=1.0, events=[Arrived(1, 5, 9, 0, "", 0.0)], rows=rows))
    latency.apply(record_of(2, time=1.0, seconds=1.0, events=[Ended(1, "stop", 2)], rows=rows))
    padded = [(1, RowKind.PADDING, 0, 0, 1, 0)]
    latency.apply(record_of(3, time=2.0, seconds=1.0, events=[Finished(1, "stop", 2)], rows=padded))
    assert all_of(latency.e2el) == pytest.approx([took])
    assert latency._row_of == {}


def test_samples_end_at_the_moment() -> None:
    run = Run()
    run.crunch()
    latency, middle = run.history.latency, run.records[len(run.records) // 2]
    then = Run()
    for record in run.records[: len(run.records) // 2 + 1]:
        then.history.apply(record)
    now = middle.time + middle.timings.total
    for name in ("ttft", "itl", "e2el"):
        cut = getattr(latency, name).between(now - 1.0, now)
        there = getattr(then.history.latency, name).between(now - 1.0, math.inf)
        assert np.array_equal(cut.values, there.values) and np.array_equal(cut.weights, there.weights)
        assert cut.percentiles() == there.percentiles()


def test_old_gaps_are_thinned_out_and_still_tell_their_percentiles() -> None:
    rng = np.random.default_rng(3)
    samples = Samples(2000, merged=True)
    values = rng.lognormal(-4, 0.3, 20_000)
    for i, value in enumerate(values):
        samples.add(i * 0.002, np.array([value]), np.array([i % 2]))
        assert len(samples) <= 2000
    found = samples.between(-math.inf, math.inf)
    kept = values[-int(found.weights.sum()) :]
    assert found.weights.sum() > 2000  # more than there are rows
    assert np.all(np.diff(found.times) >= 0)
    told, exact = found.percentiles(), percentiles(kept)
    for mine, true in ((told.p50, exact.p50), (told.p90, exact.p90), (told.p99, exact.p99)):
        assert mine == pytest.approx(true, rel=0.02)
    assert samples.priorities(-math.inf, math.inf) == [0, 1]


def test_samples_without_merging_forget_the_oldest() -> None:
    samples = Samples(100)
    for i in range(1000):
        samples.add(float(i), np.array([1.0 + i]), 0, 1, np.array([i]))
    found = samples.between(-math.inf, math.inf)
    assert 50 <= len(found) <= 100 and found.request_ids[-1] == 999
    assert found.values.tolist() == [1.0 + i for i in found.request_ids]


def test_percentiles_of_nothing_and_of_nonsense() -> None:
    assert percentiles(np.zeros(0)).p50 is None
    assert percentiles(np.array([np.nan, np.inf])).p99 is None
    assert percentiles(np.array([1.0, np.nan, 3.0])).p50 == 2.0
    assert Latency().recent_ttft().p50 is None


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(5)
    for count in (1, 2, 3, 100, 1001):
        values = rng.exponential(size=count)
        weights = rng.integers(1, 5, count)
        for found, plain in (
            (percentiles(values), values),
            (percentiles(values, weights), np.repeat(values, weights)),
        ):
            assert (found.p50, found.p90, found.p99) == pytest.approx(tuple(np.percentile(plain, (50, 90, 99))))
            assert found.count == len(plain)


def test_gap_curves_break_where_there_was_none() -> None:
    samples = Samples(100)
    for t in (1.1, 1.2, 8.0):
        samples.add(t, np.array([0.5]), 0)
    curves = gap_curves(samples.between(0.0, 8.0), 8.0)
    assert curves.ages[-1] == 0.0 and np.all(np.diff(curves.ages) > 0)
    assert np.isnan(curves.p50).sum() == len(curves.p50) - 2
    assert len(gap_curves(samples.between(9.0, 10.0), 10.0).ages) == 0


def test_folding_500_decoding_requests_costs_little() -> None:
    latency, rates = Latency(), Rates()
    for fold in (latency, rates):
        fold.restore(start())
    rows = [(i, RowKind.DECODE, 1, 1, 0, 0) for i in range(1, 501)]
    arrivals = [Arrived(i, 5, 9, i % 3, "", 0.0) for i in range(1, 501)]
    records = [record_of(s, time=s * 0.1, seconds=0.1, output=500 * s, rows=rows) for s in range(2, 202)]
    first = record_of(1, time=0.1, seconds=0.1, output=500, events=arrivals, rows=rows)
    for fold in (latency, rates):
        fold.apply(first)
    begun = time.thread_time()
    for record in records:
        latency.apply(record)
        rates.apply(record)
    assert (time.thread_time() - begun) / len(records) < 0.001  # five times what it should be, for slow machines


# Knobs ---------------------------------------------------------------------------------------------------------------


def test_changed_knobs_are_marked_with_what_changed() -> None:
    changes = KnobChanges()
    before = SchedulerConfig()
    changes.restore(start(discipline="vllm", scheduler=before))
    after = SchedulerConfig(max_num_batched_tokens=256, order="fair")
    changes.apply(
        record_of(5, time=3.0, seconds=0.1, events=[Reconfigured("vllm", "fair", "recompute", "", 32, scheduler=after)])
    )
    [change] = changes.between(0.0, 10.0)
    assert (change.step, change.time, change.before, change.after) == (5, 3.0, before, after)
    assert differing(before, after) == ["order", "max_num_batched_tokens"]
    assert change.label == "order fcfs → fair and 1 more"
    assert changes.between(3.0, 10.0) == [] and changes.between(0.0, 2.9) == []
    changes.restore(start())
    assert changes.between(0.0, 10.0) == []


def test_a_discipline_is_marked_when_it_takes_over() -> None:
    changes = KnobChanges()
    changes.restore(start(discipline="vllm", scheduler=SchedulerConfig()))
    wanted = SchedulerConfig(discipline="static")
    told = [Reconfigured("vllm", "fcfs", "recompute", "static", 32, scheduler=wanted)]
    changes.apply(record_of(5, time=3.0, seconds=0.1, events=told))
    assert changes.between(0.0, 10.0) == []
    told = [Reconfigured("static", "fcfs", "recompute", "", 32, scheduler=wanted)]
    changes.apply(record_of(9, time=4.0, seconds=0.1, events=told))
    assert [(c.step, c.label) for c in changes.between(0.0, 10.0)] == [(9, "discipline vllm → static")]
