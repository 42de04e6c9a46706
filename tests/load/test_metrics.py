"""What a run's figures mean: origins of latency, percentiles, empty sample sets, goodput."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from engine.bench_run import WorkloadRun, prepare
from engine.events import RunTotals, StepRecord, StepTimings
from engine.messages import Output
from engine.metrics import (
    RequestTimeline,
    RunRecorder,
    distribution,
    most_at_once,
    parse_goodput,
    summarise,
)
from engine.request import SamplingParams
from engine.step_counters import StepCounters
from engine.workload import Arrivals, Workload, WorkloadRequest, WorkloadShape, load_workload
from tests.load.fake_engine import Clock, FakeCodec, FakeCore
from tests.oracles import make_core


def run(workload: Workload, *, service: float = 0.5, slots: int = 1, **core: object) -> tuple[WorkloadRun, dict]:
    clock = Clock()
    engine = FakeCore(clock, service, slots, **core)
    counters = StepCounters(RunTotals(), num_blocks=100, block_size=16, max_num_seqs=slots)
    result = WorkloadRun(
        engine,
        prepare(workload, FakeCodec(), 1_000, 4_096),
        clock,
        clock.sleep,
        workload.arrivals.max_concurrency,
        workload.open_loop,
        counters=counters,
    )
    result.run()
    summary = summarise(result.recorder.timelines, workload, elapsed=result.elapsed) | counters.summary()
    strict(summary)
    return result, summary


def strict(summary: dict) -> None:
    """The result is strict JSON: no NaN, no infinity."""
    json.loads(json.dumps(summary, allow_nan=False))


def every(seconds: float, count: int, output: int = 1) -> Workload:
    return Workload(
        "x", tuple(WorkloadRequest(output_tokens=output, prompt_tokens=10, arrival_s=i * seconds) for i in range(count))
    )


# L1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [None, 1])
def test_open_loop_latency_counts_from_the_intended_arrival(cap: int | None) -> None:
    """Arrivals every 0.1 s at one slot of 0.5 s: 0.5 + 0.4 i, wherever the queue is; service alone stays 0.5."""
    workload = every(0.1, 8)
    workload = Workload("x", workload.requests, Arrivals(max_concurrency=cap))
    result, summary = run(workload)
    latencies = [t.e2el(t.scheduled) for t in result.recorder.timelines]
    assert latencies == pytest.approx([0.5 + 0.4 * i for i in range(8)])
    assert latencies[-1] == pytest.approx(3.3)
    assert summary["latency_from"] == "intended arrival"
    assert summary["mean_e2el_ms"] == pytest.approx(1_900)
    assert summary["mean_service_e2el_ms"] == pytest.approx(500)
    assert summary["p99_service_e2el_ms"] == pytest.approx(500)
    assert summary["duration"] == pytest.approx(4.0)


def test_closed_loop_latency_counts_from_submission_and_the_schedule_is_shown_apart() -> None:
    workload = Workload("x", every(0.0, 4).requests, Arrivals(max_concurrency=1))
    _, summary = run(workload)
    assert summary["latency_from"] == "submission"
    assert summary["mean_e2el_ms"] == pytest.approx(500)
    assert summary["mean_schedule_e2el_ms"] == pytest.approx(500 * (1 + 2 + 3 + 4) / 4)
    assert summary["max_concurrent_requests"] == 1


def test_all_at_once_counts_the_queue() -> None:
    _, summary = run(every(0.0, 4))
    assert summary["mean_e2el_ms"] == pytest.approx(500 * (1 + 2 + 3 + 4) / 4)
    assert (summary["request_rate"], summary["max_concurrent_requests"]) == ("inf", 4)


# Definitions ---------------------------------------------------------------------------------------------------------


def test_ttft_tpot_itl_and_e2el_of_one_request() -> None:
    timeline = RequestTimeline(1.0, sent=1.5, token_times=[2.0, 2.5, 4.0], token_ids=[1, 2, 3], finish_reason="length")
    summary = summarise([timeline], every(1.0, 2), elapsed=4.0)
    assert summary["mean_ttft_ms"] == 1_000
    assert summary["mean_e2el_ms"] == 3_000
    assert summary["mean_tpot_ms"] == (3_000 - 1_000) / 2
    assert summary["itls"] == [[0.5, 1.5]] and summary["mean_itl_ms"] == 1_000
    assert summary["ttfts"] == [1.0] and summary["start_times"] == [1.5]


def test_percentiles_interpolate_linearly() -> None:
    figures = distribution([0.004, 0.001, 0.003, 0.002], "x")
    assert figures["p50_x_ms"] == figures["median_x_ms"] == pytest.approx(2.5)
    assert figures["p90_x_ms"] == pytest.approx(3.7)
    assert figures["p99_x_ms"] == pytest.approx(3.97)
    assert figures["mean_x_ms"] == pytest.approx(2.5)
    assert figures["std_x_ms"] == pytest.approx(math.sqrt(1.25))
    single = distribution([0.002], "x")
    assert (single["p99_x_ms"], single["std_x_ms"]) == (pytest.approx(2.0), 0.0)


def test_percentiles_of_many() -> None:
    values = np.random.default_rng(0).exponential(size=1_000)
    figures = distribution(values, "x")
    assert figures["p99_x_ms"] == pytest.approx(1e3 * float(np.quantile(values, 0.99)))


# L3 ------------------------------------------------------------------------------------------------------------------


def test_output_tokens_are_the_ids_whatever_their_text() -> None:
    """A hundred spaces that a tokeniser would make one token of, in chunks that it would begin anew each time."""
    recorder = RunRecorder(0.0)
    timeline = recorder.expect(WorkloadRequest(output_tokens=100, prompt_tokens=7))
    recorder.sent(1, timeline, 0.0)
    for chunk in range(20):
        ends = "length" if chunk == 19 else None
        recorder.output(Output(1, 1.0 + chunk, [220] * 5, text=" " * 5, finish_reason=ends, prompt_tokens=7))
    summary = summarise(recorder.timelines, every(0.0, 1), elapsed=20.0)
    assert (summary["total_output_tokens"], summary["output_lens"]) == (100, [100])
    assert summary["output_throughput"] == 5.0 and recorder.output_tokens == 100
    assert summary["mean_tpot_ms"] == pytest.approx(19_000 / 99) and len(summary["itls"][0]) == 99


# L5 ------------------------------------------------------------------------------------------------------------------


def test_answers_of_one_token_have_no_tpot() -> None:
    _, summary = run(every(0.0, 3, output=1))
    assert summary["completed"] == 3 and summary["mean_ttft_ms"] is not None
    for key in ("mean", "median", "std", "p50", "p90", "p99"):
        assert summary[f"{key}_tpot_ms"] is None and summary[f"{key}_itl_ms"] is None


def test_all_failed_and_none_at_all() -> None:
    _, summary = run(every(0.0, 3), refuse_longer_than=9)
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (0, 3, 0)
    assert summary["mean_ttft_ms"] is None and summary["request_throughput"] is None
    assert "10 tokens" in summary["errors"][0]
    empty = summarise([], Workload("x", ()), elapsed=0.0)
    strict(empty)
    assert (empty["num_prompts"], empty["output_throughput"], empty["p99_e2el_ms"]) == (0, None, None)


def test_a_run_cut_short_counts_what_completed() -> None:
    done = RequestTimeline(0.0, sent=0.0, token_times=[0.5], token_ids=[1], finish_reason="stop", prompt_tokens=4)
    half = RequestTimeline(0.0, sent=0.0, token_times=[0.5, 0.6], token_ids=[1, 2], prompt_tokens=4)
    never = RequestTimeline(0.0, prompt_tokens=4)
    summary = summarise([done, half, never], every(0.0, 3), elapsed=1.0)
    strict(summary)
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (1, 0, 2)
    assert (summary["total_output_tokens"], summary["total_input_tokens"]) == (1, 4)
    assert summary["output_lens"] == [1, 2, 0] and summary["start_times"] == [0.0, 0.0, None]


# L6 ------------------------------------------------------------------------------------------------------------------


def test_totals() -> None:
    shape = WorkloadShape(10, 100, 20)
    _, summary = run(shape.build("x"), slots=3)
    assert (summary["total_input_tokens"], summary["total_output_tokens"]) == (1_000, 200)
    assert summary["total_token_throughput"] * summary["duration"] == pytest.approx(1_200)
    assert summary["output_throughput"] * summary["duration"] == pytest.approx(200)


# Goodput, concurrency ------------------------------------------------------------------------------------------------


def test_goodput_counts_those_that_meet_everything() -> None:
    workload = every(0.1, 8)
    result, _ = run(workload)
    timelines = result.recorder.timelines

    def goodput(text: str) -> float | None:
        return summarise(timelines, workload, elapsed=4.0, objectives=parse_goodput(text))["request_goodput"]

    assert goodput("e2el:1000") == pytest.approx(2 / 4.0)  # 0.5 and 0.9 s
    assert goodput("e2el:100000") == pytest.approx(8 / 4.0)
    assert goodput("ttft:1000,tpot:1") == pytest.approx(2 / 4.0)  # no TPOT of one token to miss
    assert goodput("e2el:1") == 0.0
    assert summarise(timelines, workload, elapsed=4.0)["request_goodput"] is None


@pytest.mark.parametrize(
    "text", ["", "tft:5", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-3", "ttft:nan", "ttft:inf", "ttft:1,ttft:2"]
)
def test_goodput_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        parse_goodput(text)


def test_most_at_once() -> None:
    spans = [(0.0, 1.0), (0.5, 2.0), (1.0, 3.0), (2.5, None)]
    timelines = [RequestTimeline(0.0, sent=a, finished=b) for a, b in spans]
    assert most_at_once([*timelines, RequestTimeline(0.0)], 4.0) == 2
    assert most_at_once([], 1.0) == 0


def test_each_priority_has_its_own_percentiles() -> None:
    requests = tuple(WorkloadRequest(output_tokens=1, prompt_tokens=4, priority=p) for p in (0, 1, 1))
    _, summary = run(Workload("x", requests))
    assert list(summary["by_priority"]) == ["0", "1"]
    assert summary["by_priority"]["0"]["mean_e2el_ms"] == pytest.approx(500)
    assert summary["by_priority"]["1"]["mean_e2el_ms"] == pytest.approx(1_250)
    assert summary["by_priority"]["1"]["completed"] == 2


# Steps ---------------------------------------------------------------------------------------------------------------


def record(rows: int, waiting: int, free: int, cached: int, totals: RunTotals) -> StepRecord:
    ids = list(range(rows))
    columns = [1] * rows
    return StepRecord(
        1, 0.0, StepTimings(), [], ids, *[columns] * 4, rows, waiting, free, cached, 64, totals, num_slots=rows
    )


def test_step_counters_count_from_the_baseline() -> None:
    counters = StepCounters(
        RunTotals(preemptions=3, recomputed_tokens=50), num_blocks=10, block_size=16, max_num_seqs=4
    )
    assert counters.summary()["slot_utilisation"] is None
    counters.add(record(4, 2, 1, 2, RunTotals(preemptions=3, recomputed_tokens=50)))
    counters.add(record(2, 1, 4, 0, RunTotals(preemptions=4, recomputed_tokens=70, prefix_hit_tokens=16)))
    counters.add(record(1, 0, 9, 1, RunTotals(preemptions=5, recomputed_tokens=75, prefix_hit_tokens=32)))
    counters.add(record(0, 0, 10, 0, RunTotals(preemptions=5, recomputed_tokens=75, prefix_hit_tokens=32)))
    summary = counters.summary()
    assert summary["steps"] == 3, "a record of a refusal alone is no step of work"
    assert (summary["preemptions"], summary["recomputed_tokens"], summary["prefix_hit_tokens"]) == (2, 25, 32)
    assert summary["slot_utilisation"] == (4 + 2) / 8
    assert summary["slot_utilisation_run"] == (4 + 2 + 1) / 12
    assert (summary["kv_blocks_peak"], summary["kv_blocks_total"]) == (0, 10), "no block was taken"


def test_the_peak_of_blocks_is_that_of_a_steps_middle() -> None:
    """Requests that end in the step in which they began hold blocks at no step's end; shared blocks count once."""
    core = make_core(block_size=4, num_blocks=20)
    counters = StepCounters(RunTotals(), num_blocks=20, block_size=4, max_num_seqs=32)

    def peak_after(*prompts: list[int]) -> int:
        for number, prompt in enumerate(prompts):
            core.add_request(number, prompt, SamplingParams(max_tokens=1))
        while core.has_work:
            step = core.step().record
            assert step is not None
            counters.add(step)
        return int(counters.summary()["kv_blocks_peak"])

    assert peak_after([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 3
    assert peak_after([1, 2, 3, 4, 5, 6, 7, 8, 10], [1, 2, 3, 4, 5, 6, 7, 8, 11]) == 4
    assert peak_after([5] * 4) == 4


def test_the_recorder_takes_only_its_own_requests() -> None:
    recorder = RunRecorder(10.0)
    timeline = recorder.expect(WorkloadRequest(output_tokens=2, prompt_tokens=5))
    recorder.sent(7, timeline, 10.5)
    recorder.output(Output(6, 11.0, [1, 2]))
    recorder.output(Output(7, 11.0, [5]))
    recorder.output(Output(7, 12.0, [6], finish_reason="length", prompt_tokens=5, cached_tokens=3, preemptions=1))
    recorder.output(Output(7, 13.0, [9]))
    assert (timeline.sent, timeline.token_times, timeline.token_ids) == (0.5, [1.0, 2.0], [5, 6])
    assert (timeline.cached_tokens, timeline.preemptions, timeline.completed) == (3, 1, True)
    assert not recorder.open and recorder.ended == 1 and recorder.output_tokens == 2


def test_the_pacing_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt_tokens": 3, "output_tokens": 1, "arrival_s": 2.0, "priority": 4, "user": "b"}\n'
        '{"prompt": "hey", "output_tokens": 1, "max_tokens": 8}\n'
    )
    workload = load_workload(path)
    result, _ = run(workload)
    core = result.core
    assert [(i, len(ids)) for i, ids, _ in core.added] == [(2, 3), (1, 3)], "by arrival, ids by place in the file"
    late = core.added[1][2]
    assert (late["priority"], late["user"], late["ends_after"], late["stream_text"]) == (4, "b", 1, False)
    assert late["arrival_time"] == pytest.approx(102.0)
    assert core.added[0][2]["params"].max_tokens == 8
    assert [t.sent for t in result.recorder.timelines] == pytest.approx([2.0, 0.0])
    assert result.elapsed == pytest.approx(2.5)
