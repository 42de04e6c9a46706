"""The load panel's arithmetic: ranges, what does not fit, which options the engine lacks, runs without Qt."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from app.lab.load_model import (
    LoadRanges,
    RequestLength,
    ScenarioConfigs,
    differences,
    live_latencies,
    milliseconds,
    misfits,
    result_rows,
)
from app.lab.load_run import SENT_AT_ONCE, LoadRun
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.events import Admitted, RunTotals, StepRecord, StepTimings
from engine.messages import ModelInfo, Output
from engine.metrics import RequestTimeline
from engine.workload import Arrivals, EngineOptions, Workload, WorkloadRequest
from tests.app.scripted import ScriptedClient


@pytest.fixture
def info() -> ModelInfo:
    return ScriptedClient(num_blocks=10, max_model_len=200).info()


# Ranges --------------------------------------------------------------------------------------------------------------


def test_ranges_become_a_workload() -> None:
    ranges = LoadRanges(
        requests=200, prompt_low=5, prompt_high=9, output_low=2, output_high=2, urgent_percent=25, seed=3
    )
    workload = ranges.build()
    assert len(workload.requests) == 200 and not workload.open_loop
    assert {r.prompt_tokens for r in workload.requests} == {5, 6, 7, 8, 9}
    assert {r.output_tokens for r in workload.requests} == {2}
    assert 25 < sum(r.priority == 0 for r in workload.requests) < 80
    assert {r.priority for r in replace(ranges, urgent_percent=0).build().requests} == {0}
    assert replace(ranges, arrivals="closed loop", concurrency=7).build().arrivals.max_concurrency == 7
    rated = replace(ranges, arrivals="open loop", rate=10.0).build()
    assert rated.open_loop and rated.requests[-1].arrival_s == pytest.approx(20, rel=0.3)


def test_ranges_that_cannot_be() -> None:
    assert LoadRanges().fault(2048) == ""
    assert LoadRanges().fault(None) == ""
    assert "64 to 32" in LoadRanges(prompt_low=64, prompt_high=32).fault(None)
    fault = LoadRanges(prompt_high=1_500, output_high=1_000).fault(2_048)
    assert "2,500" in fault and "2,048" in fault


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


def test_differences_are_named_as_on_the_command_line() -> None:
    wanted = EngineConfig(cache=CacheConfig(num_blocks=24), scheduler=SchedulerConfig(order="priority"))
    assert differences(wanted, EngineConfig()) == ["kv blocks 24 (now automatic)", "order priority (now fcfs)"]
    assert differences(wanted, wanted) == []


def test_every_knob_in_which_two_configurations_differ_is_named() -> None:
    changed = {str: "x", bool: False, int: 3, float: 0.25, dict: {"a": 2.0}, type(None): 5}
    special = {"dtype": "float32", "device": "cpu", "discipline": "static", "order": "fair", "preemption": "swap"}
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
    assert [milliseconds(v) for v in (None, 0.0, 12.34, 1_234.5, 12_345.6)] == [
        "n/a",
        "0.0 ms",
        "12.3 ms",
        "1,234 ms",
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


def make_run(*requests: WorkloadRequest, **arrivals: Any) -> tuple[LoadRun, FakeBridge, Clock]:
    bridge, clock = FakeBridge(), Clock()
    workload = Workload("x", requests, Arrivals(**arrivals))
    return LoadRun(workload, bridge, vocab_size=500, totals=RunTotals(preemptions=2), clock=clock), bridge, clock


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
