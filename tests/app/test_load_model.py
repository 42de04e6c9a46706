"""The load panel's arithmetic: ranges, what does not fit, which options the engine lacks, runs without Qt."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from app.lab.load_model import (
    RequestLength,
    ScenarioConfigs,
    clip_remarks,
    differences,
    fitted,
    lengths_of,
    live_latencies,
    milliseconds,
    misfits,
    result_rows,
    shape_fault,
)
from app.lab.load_run import SENT_AT_ONCE, LoadRun
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.events import Admitted, RunTotals, StepRecord, StepTimings
from engine.messages import ModelInfo, Output
from engine.metrics import RequestTimeline
from engine.workload import (
    Arrivals,
    EngineOptions,
    LogNormal,
    RowCounts,
    SharedPrefix,
    Uniform,
    Workload,
    WorkloadRequest,
    WorkloadShape,
)
from tests.app.scripted import ScriptedClient


@pytest.fixture
def info() -> ModelInfo:
    return ScriptedClient(num_blocks=10, max_model_len=200).info()


# Numbers of one's own -------------------------------------------------------------------------------------------------


def test_numbers_that_the_model_cannot_hold() -> None:
    shape = WorkloadShape(4, Uniform(low=5, high=1_500), LogNormal(50, 0.5, 1, 1_000))
    assert shape_fault(shape, None) == "" and shape_fault(shape, 2_500) == ""
    fault = shape_fault(shape, 2_048)
    assert "1,500" in fault and "2,500" in fault and "2,048" in fault
    shared = msgspec.structs.replace(shape, prompt_tokens=[3, 9], output_tokens=7, shared_prefix=SharedPrefix(2_040))
    assert shape_fault(shared, 2_056) == "" and "beginning of 2,040" in shape_fault(shared, 2_048)


# Fit -----------------------------------------------------------------------------------------------------------------


def test_misfits_name_the_numbers(info: ModelInfo) -> None:
    assert misfits([RequestLength(100, 60)], info) == []
    (refused,) = misfits([RequestLength(200, 5), RequestLength(900, 5)], info)
    assert refused.startswith("2 prompts of up to 900 tokens will be refused") and "200" in refused
    large_pool = msgspec.structs.replace(info, num_blocks=1_000)
    (cut,) = misfits([RequestLength(150, 100)], large_pool)
    assert "1 answer will end at the model's context of 200" in cut
    (large,) = misfits([RequestLength(100, 90)], info)
    assert "10 blocks of 16, 160 tokens" in large


def test_what_is_clipped_is_said_and_then_fits(info: ModelInfo) -> None:
    counted = WorkloadRequest(20, prompt_tokens=500, clip=True)
    workload = Workload("x", (counted, counted, WorkloadRequest(9, prompt_tokens=20, clip=True)))
    assert clip_remarks(workload, 200) == ["2 of 3 requests will be clipped to the model's context of 200 tokens."]
    assert lengths_of(fitted(workload, 200))[0] == RequestLength(180, 20)
    assert not [s for s in misfits(lengths_of(fitted(workload, 200)), info) if "refused" in s]
    text = Workload("x", (WorkloadRequest(20, prompt="x", clip=True),))
    (remark,) = clip_remarks(text, 200)
    assert "the engine counts their tokens and clips" in remark
    assert clip_remarks(Workload("x", (WorkloadRequest(20, prompt_tokens=500),)), 200) == []


def test_differences_are_named_as_on_the_command_line() -> None:
    wanted = EngineConfig(cache=CacheConfig(num_blocks=24), scheduler=SchedulerConfig(order="priority"))
    assert differences(wanted, EngineConfig()) == ["kv blocks 24 (now automatic)", "order priority (now fcfs)"]
    assert differences(wanted, wanted) == []


def test_every_knob_in_which_two_configurations_differ_is_named() -> None:
    changed = {str: "x", bool: False, int: 3, float: 0.25, dict: {"a": 2.0}, type(None): 5}
    special = {
        "dtype": "float32",
        "kv_dtype": "fp8",
        "device": "cpu",
        "discipline": "static",
        "order": "fair",
        "preemption": "swap",
    }
    special |= {"static_delivery": "row", "speculative": "ngram", "block_size": 8}
    plain = EngineConfig()
    for part in (plain, plain.cache, plain.scheduler):
        for field in dataclasses.fields(part):
            if field.name in ("cache", "scheduler"):
                continue
            value = special.get(field.name, changed[type(getattr(part, field.name))])
            other = dataclasses.replace(part, **{field.name: value})
            name = {CacheConfig: "cache", SchedulerConfig: "scheduler"}.get(type(part))
            wanted = other if name is None else dataclasses.replace(plain, **{name: other})
            assert len(differences(wanted, plain)) == 1, field.name


def test_a_scenario_goes_over_what_the_user_chose_not_over_the_last_scenario() -> None:
    configs = ScenarioConfigs()
    chosen = EngineConfig(dtype="float32")
    crunch = EngineOptions(kv_blocks=24)
    wanted = configs.wanted(crunch, chosen)
    assert (wanted.cache.num_blocks, wanted.dtype) == (24, "float32")
    configs.restarted(wanted)
    assert configs.wanted(EngineOptions(order="priority"), wanted).cache.num_blocks is None
    assert configs.wanted(EngineOptions(), wanted) == chosen
    other = EngineConfig(dtype="bfloat16", cache=CacheConfig(num_blocks=99))
    assert configs.wanted(EngineOptions(), other) == other, "the user chose anew"


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_for_a_reader() -> None:
    values = (None, 0.0, 12.34, 123.4, 999.6, 1_234.5, 9_996.0, 12_345.6)
    assert [milliseconds(v) for v in values] == [
        "n/a",
        "0.0 ms",
        "12.3 ms",
        "123 ms",
        "1.00 s",
        "1.23 s",
        "10.0 s",
        "12.3 s",
    ]
    rows = dict(
        result_rows({"completed": 0, "num_prompts": 3, "failed": 3, "unfinished": 0, "output_throughput": None})
    )
    assert rows["output tokens/s"] == "n/a" and rows["completed"] == "0 of 3" and "not finished" not in rows


def test_live_figures_take_what_is_there() -> None:
    going = RequestTimeline(0.0, sent=0.0, token_times=[1.0, 1.5])
    done = RequestTimeline(0.0, sent=1.0, token_times=[4.0], token_ids=[1], finish_reason="stop")
    figures = live_latencies([going, done, RequestTimeline(0.0)], open_loop=False)
    assert figures["mean_ttft_ms"] == pytest.approx(2_000)
    assert figures["mean_itl_ms"] == pytest.approx(500)
    assert figures["mean_e2el_ms"] == pytest.approx(3_000)
    assert figures["mean_tpot_ms"] is None


# Runs ----------------------------------------------------------------------------------------------------------------


class FakeBridge:
    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.aborted: list[int] = []

    def add_request(self, **given: Any) -> int:
        self.sent.append(given)
        return 100 + len(self.sent)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def make_run(
    *requests: WorkloadRequest, warm_up: int = 0, objectives: dict[str, float] | None = None, **arrivals: Any
) -> tuple[LoadRun, FakeBridge, Clock]:
    bridge, clock = FakeBridge(), Clock()
    run = LoadRun(
        Workload("x", requests, Arrivals(**arrivals)),
        bridge,
        vocab_size=500,
        max_model_len=100,
        totals=RunTotals(preemptions=2),
        warm_up=warm_up,
        objectives=objectives,
        clock=clock,
    )
    return run, bridge, clock


def request(**given: Any) -> WorkloadRequest:
    return WorkloadRequest(**({"output_tokens": 2, "prompt_tokens": 10} | given))


def end(run: LoadRun, clock: Clock, number: int, reason: str = "length", error: str = "") -> None:
    tokens = [] if reason in ("error", "abort") else [1, 2]
    run.take_outputs([Output(number, clock(), tokens, finish_reason=reason, error=error, prompt_tokens=10)])


def test_arrivals_are_honoured() -> None:
    run, bridge, clock = make_run(request(), request(arrival_s=1.0), request(arrival_s=1.5, priority=3, user="b"))
    assert run.pump() == pytest.approx(1.0)
    assert len(bridge.sent) == 1
    clock.now += 0.4
    assert run.pump() == pytest.approx(0.6)
    clock.now += 2.0
    assert run.pump() is None
    assert [s["arrival_time"] for s in bridge.sent] == pytest.approx([50.0, 51.0, 51.5]), "intended, though sent late"
    assert (bridge.sent[2]["priority"], bridge.sent[2]["user"]) == (3, "b")
    assert bridge.sent[0]["ends_after"] == 2 and bridge.sent[0]["stream_text"] is False
    assert bridge.sent[0]["params"].ignore_eos


def test_a_closed_loop_follows_the_answers() -> None:
    run, bridge, clock = make_run(request(), request(), request(), max_concurrency=2)
    assert run.pump() is None and len(bridge.sent) == 2
    end(run, clock, 101)
    assert run.pump() is None and len(bridge.sent) == 3
    end(run, clock, 102)
    assert run.phase == "running"
    end(run, clock, 103)
    assert run.phase == "done" and run.recorder.ended == 3


def test_a_flood_lets_the_window_breathe() -> None:
    run, bridge, _ = make_run(*[request()] * (SENT_AT_ONCE + 1))
    assert run.pump() == 0.0 and len(bridge.sent) == SENT_AT_ONCE
    assert run.pump() is None and len(bridge.sent) == SENT_AT_ONCE + 1


def test_prompts_of_each_kind() -> None:
    run, bridge, _ = make_run(
        request(prompt_tokens=None, prompt="hello"),
        request(prompt_tokens=None, prompt_token_ids=(1, 2)),
        request(seed=9),
        request(prompt_tokens=40, prefix=((32, 5),), seed=1),
        request(prompt_tokens=40, prefix=((32, 5),), seed=2),
    )
    run.pump()
    text, ids, synthetic, first, second = bridge.sent
    assert text["prompt"] == "hello" and ids["prompt_token_ids"] == (1, 2)
    assert (synthetic["prompt_tokens"], synthetic["synthetic_seed"]) == (10, 9)
    assert first["prompt_token_ids"][:32] == second["prompt_token_ids"][:32]
    assert first["prompt_token_ids"] != second["prompt_token_ids"] and len(first["prompt_token_ids"]) == 40


def test_stop_aborts_what_is_open_and_ends_when_all_have_said_so() -> None:
    run, bridge, clock = make_run(request(), request(), request(arrival_s=9.0))
    run.pump()
    end(run, clock, 101)
    run.stop()
    assert (run.phase, bridge.aborted) == ("stopping", [102])
    end(run, clock, 102, "abort")
    assert run.phase == "stopped" and run.pump() is None and len(bridge.sent) == 2
    summary = run.summary()
    assert (summary["completed"], summary["failed"], summary["unfinished"]) == (1, 0, 2)
    run.stop()
    assert bridge.aborted == [102]


def test_refusals_are_gathered() -> None:
    run, _, clock = make_run(request(), request(), request())
    run.pump()
    end(run, clock, 101, "error", "too long")
    end(run, clock, 102, "error", "too long")
    end(run, clock, 103, "error", "no room")
    assert run.refusals() == ["2 × too long", "no room"]
    assert run.phase == "done" and run.summary()["failed"] == 3


def test_a_death_keeps_what_completed() -> None:
    run, _, clock = make_run(request(), request())
    run.pump()
    clock.now += 1.0
    end(run, clock, 101)
    run.break_off("it died")
    clock.now += 5.0
    end(run, clock, 102)
    assert (run.phase, run.reason, run.summary()["completed"]) == ("broken", "it died", 1)
    assert run.elapsed == pytest.approx(1.0)


def record(time: float, totals: RunTotals, *events: Any) -> StepRecord:
    return StepRecord(1, time, StepTimings(), list(events), [], [], [], [], [], 0, 0, 0, 0, 64, totals)


def test_records_give_admissions_and_totals_even_a_little_late() -> None:
    run, _, clock = make_run(request())
    run.pump()
    clock.now += 1.0
    end(run, clock, 101)
    assert run.phase == "done"
    run.apply(record(50.4, RunTotals(preemptions=5, recomputed_tokens=7), Admitted(101, 0, 0.4, False)))
    run.apply(record(60.0, RunTotals(preemptions=99)))
    summary = run.summary()
    assert (summary["preemptions"], summary["recomputed_tokens"]) == (3, 7), "steps after the end are not of this run"
    assert summary["mean_service_e2el_ms"] == pytest.approx(600)


@pytest.mark.parametrize("phase", [0.0, 0.13, 0.5, 0.77, 0.99])
def test_the_live_rate_is_right_whenever_it_is_read(phase: float) -> None:
    """Pitfall L7: steps of 20 ms that give two tokens each, 100 tokens per second, read at any moment of a step."""
    run, _, clock = make_run(request(output_tokens=500))
    run.pump()
    counted = []
    assert run.tokens_per_second == 0.0, "nothing has come yet"
    for step in range(1, 201):
        clock.now = 50.0 + 0.02 * step
        run.take_outputs([Output(101, clock.now, [1, 2])])
        clock.now += 0.02 * phase
        counted.append(run.recorder.output_tokens)
        if step >= 20:
            assert run.tokens_per_second == pytest.approx(100.0, rel=0.05)
    assert counted == sorted(counted) and counted[-1] == 400
    run.take_outputs([Output(101, clock.now, [], finish_reason="length")])
    clock.now += 1_000.0
    assert run.tokens_per_second == pytest.approx(100.0, rel=0.05), "of a run that has ended, its own"


# Warm-up, objectives, clipping ---------------------------------------------------------------------------------------


def test_the_warm_up_is_answered_first_and_counts_for_nothing() -> None:
    """Pitfall L6: neither its tokens, nor its time, nor what it cost the engine, nor its prompts."""
    run, bridge, clock = make_run(request(seed=4), request(seed=5, prompt_tokens=12), warm_up=3)
    assert run.pump() is None and run.phase == "warming" and run.warm_up_left == 3
    assert [s["prompt_tokens"] for s in bridge.sent] == [10, 12, 10]
    assert (
        not {s["synthetic_seed"] for s in bridge.sent} & {4, 5} and len({s["synthetic_seed"] for s in bridge.sent}) == 3
    )
    for number in (101, 102, 103):
        clock.now += 10.0
        end(run, clock, number)
    run.apply(record(79.5, RunTotals(preemptions=4)))
    run.pump()
    assert (run.phase, len(bridge.sent), run.recorder.start) == ("running", 5, 80.0)
    run.apply(record(79.9, RunTotals(preemptions=7)))  # of the warm-up, but it comes late
    clock.now += 1.0
    run.apply(record(80.5, RunTotals(preemptions=8)))
    end(run, clock, 104)
    end(run, clock, 105)
    summary = run.summary()
    assert (summary["completed"], summary["num_prompts"], summary["total_output_tokens"]) == (2, 2, 4)
    assert summary["duration"] == pytest.approx(1.0) and summary["preemptions"] == 1
    assert summary["mean_e2el_ms"] == pytest.approx(1_000)


def test_a_warm_up_keeps_to_the_cap_and_can_be_stopped() -> None:
    run, bridge, clock = make_run(request(), warm_up=3, max_concurrency=2)
    run.pump()
    assert len(bridge.sent) == 2
    end(run, clock, 101, "error", "no")
    run.pump()
    assert len(bridge.sent) == 3
    run.stop()
    assert run.phase == "stopping" and sorted(bridge.aborted) == [102, 103]
    end(run, clock, 102, "abort")
    assert run.phase == "stopping"
    end(run, clock, 103, "abort")
    assert run.phase == "stopped" and run.summary()["unfinished"] == 1


def test_goodput_and_who_met_the_objectives() -> None:
    run, _, clock = make_run(request(), request(), request(), objectives={"e2el": 1_500.0})
    run.pump()
    clock.now += 1.0
    end(run, clock, 101)
    clock.now += 1.0
    end(run, clock, 102)
    assert [run.meets_objectives(i) for i in range(3)] == [True, False, None]
    end(run, clock, 103, "error", "no")
    assert run.summary()["request_goodput"] == pytest.approx(1 / 2.0)
    assert dict(result_rows(run.summary()))["goodput, requests/s"] == "0.50"
    plain, _, _ = make_run(request())
    assert plain.meets_objectives(0) is None and plain.summary()["request_goodput"] is None


def test_what_may_be_clipped_is_sent_clipped_and_counted() -> None:
    run, bridge, clock = make_run(
        request(prompt_tokens=400, clip=True),
        request(prompt_tokens=None, prompt="long", output_tokens=20, clip=True),
        request(prompt_tokens=None, prompt="short", output_tokens=20, clip=True),
        request(prompt_tokens=400),
    )
    run.workload = Workload("x", run.workload.requests, rows=RowCounts("csv", 4, {}))
    run.pump()
    assert bridge.sent[0]["prompt_tokens"] == 98 and bridge.sent[3]["prompt_tokens"] == 400
    assert [s.get("prompt_limit") for s in bridge.sent] == [None, 80, 80, None], "the engine cuts texts"
    for number, length in ((101, 98), (102, 80), (103, 33)):
        run.take_outputs([Output(number, clock(), [1, 2], finish_reason="length", prompt_tokens=length)])
    end(run, clock, 104, "error", "too long")
    assert run.summary()["rows_clipped"] == 2


# Held up -------------------------------------------------------------------------------------------------------------


def test_while_the_engine_pauses_nothing_is_sent_and_the_rest_comes_later_by_as_much() -> None:
    run, bridge, clock = make_run(request(), request(arrival_s=1.0), request(arrival_s=2.0))
    run.pump()
    clock.now += 0.5
    run.hold()
    clock.now += 7.0
    assert run.pump() is None and len(bridge.sent) == 1 and run.held
    assert run.summary()["paused_seconds"] == pytest.approx(7.0)
    run.resume()
    assert run.pump() == pytest.approx(0.5)
    clock.now += 0.5
    assert run.pump() == pytest.approx(1.0) and len(bridge.sent) == 2
    assert bridge.sent[1]["arrival_time"] == pytest.approx(58.0), "the intended arrival has moved, too"
    end(run, clock, 102)
    assert run.recorder.timelines[1].e2el(run.recorder.timelines[1].scheduled) == pytest.approx(0.0)
    run.hold()
    run.stop()
    assert not run.held and run.phase == "stopping", "what is held can be stopped"


def test_steps_of_a_comparison_are_not_of_the_load() -> None:
    run, _, clock = make_run(request(), request(arrival_s=50.0))
    run.pump()
    run.apply(record(50.1, RunTotals(preemptions=5)))
    end(run, clock, 101)
    run.hold()
    run.take_engine(True)
    run.apply(record(51.0, RunTotals(preemptions=90), Admitted(102, 0, 0.0, False)))
    run.take_engine(False)
    run.resume()
    run.apply(record(52.0, RunTotals(preemptions=1)))  # of an engine that began afresh
    assert run.summary()["preemptions"] == 3 + 1
