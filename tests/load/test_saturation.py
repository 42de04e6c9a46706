"""The rate where the queue starts to grow, against servers whose capacity is known."""

from __future__ import annotations

import heapq
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from engine import bench
from engine.config import EngineConfig
from engine.metrics import RequestTimeline
from engine.saturation import (
    FIRST_RATE,
    TOLERANCE,
    Probe,
    SaturationSearch,
    first_rate_of,
    judge,
    probe_workload,
)
from engine.saturation_run import find_rate
from engine.workload import Arrivals, SharedPrefix, Uniform, Workload, WorkloadRequest, WorkloadShape
from tests.load.fake_engine import Clock, FakeCore, FakeLoaded
from tests.process.tiny_model import make_tiny_model


def serve(rate: float, slots: int, services: list[float], burst: int = 1) -> list[RequestTimeline]:
    """A queue before ``slots`` servers, requests coming evenly in groups of ``burst``."""
    free = [0.0] * slots
    timelines = []
    for index, service in enumerate(services):
        arrival = (index - index % burst) / rate
        begun = max(arrival, heapq.heappop(free))
        heapq.heappush(free, begun + service)
        times = [begun + 0.1 * service, begun + service]
        timelines.append(
            RequestTimeline(arrival, sent=arrival, token_times=times, token_ids=[1, 2], finish_reason="length")
        )
    return timelines


def search(slots: int, services: list[float], first: float = FIRST_RATE) -> SaturationSearch:
    found = SaturationSearch(first)
    while (rate := found.next_rate) is not None:
        found.note(judge(serve(rate, slots, services), rate))
    return found


# The criterion -------------------------------------------------------------------------------------------------------


def test_a_queue_that_grows_and_one_that_does_not() -> None:
    services = [1.0] * 48
    below = judge(serve(3.9, 4, services), 3.9)
    assert not below.grew and below.achieved == pytest.approx(below.offered, rel=0.05)
    above = judge(serve(5.0, 4, services), 5.0)
    assert above.grew and above.achieved == pytest.approx(4.0, rel=0.1) and above.offered == pytest.approx(5.0)
    assert above.last_wait_ms > above.first_wait_ms + 1_000 and above.p99_ttft_ms > above.last_wait_ms


def test_the_last_answer_s_own_time_is_no_saturation() -> None:
    """Ten seconds each, one a second, a slot for everyone: the run takes 57 s for 47 s of arrivals."""
    probe = judge(serve(1.0, 64, [10.0] * 48), 1.0)
    assert not probe.grew and probe.achieved == pytest.approx(1.0)


def test_a_crowd_that_is_served_before_the_next_is_no_saturation() -> None:
    probe = judge(serve(1.0, 1, [0.8] * 48, burst=6), 1.0)
    assert probe.p99_ttft_ms > 3_000 and not probe.grew


def test_pitfall_l1_growth_is_seen_though_service_alone_never_changes() -> None:
    """Arrivals every 0.1 s at one slot of 0.5 s: waits grow by 0.4 s each, service stays 0.5 s."""
    probe = judge(serve(10.0, 1, [0.5] * 24), 10.0)
    assert probe.grew and probe.achieved == pytest.approx(2.0)
    assert probe.last_wait_ms - probe.first_wait_ms == pytest.approx(400 * 16)


def test_what_did_not_complete_is_left_out() -> None:
    timelines = serve(5.0, 4, [1.0] * 48)
    failed = [RequestTimeline(t.scheduled, finish_reason="error") for t in timelines[:10]]
    assert judge([*failed, *timelines[10:]], 5.0).completed == 38
    for few in ([], timelines[:1], failed):
        probe = judge(few, 5.0)
        assert not probe.grew and probe.achieved is None
        assert json.dumps(probe.as_dict(), allow_nan=False)


# The search ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("service", [0.02, 0.5, 3.0, 40.0])
@pytest.mark.parametrize("first", [1.0, 7.3])
def test_the_rate_found_is_the_capacity(slots: int, service: float, first: float) -> None:
    found = search(slots, [service] * 48, first)
    assert found.found and found.grew / found.held <= TOLERANCE
    assert found.held == pytest.approx(slots / service, rel=0.08)
    assert len(found.probes) <= 16


@pytest.mark.parametrize("slots", [1, 8])
def test_answers_of_all_lengths_scatter_around_it(slots: int) -> None:
    ratios = []
    for seed in range(21):
        draw = random.Random(seed)
        services = [draw.lognormvariate(0.0, 0.6) for _ in range(96)]
        ratios.append(search(slots, services).held / (slots / statistics.mean(services)))
    assert statistics.median(ratios) == pytest.approx(1.0, abs=0.1)


def probe(rate: float, grew: bool, completed: int = 48) -> Probe:
    return Probe(rate, rate, rate, 1.0, 2.0, 3.0, completed, 48, grew)


def test_doubling_then_halving_the_gap() -> None:
    found, tried = SaturationSearch(1.0), []
    while (rate := found.next_rate) is not None:
        tried.append(rate)
        found.note(probe(rate, rate > 5.5))
    assert tried[:5] == pytest.approx([1, 2, 4, 8, 32**0.5])
    assert found.held <= 5.5 <= found.grew <= found.held * TOLERANCE
    assert f"starts to grow at {found.held:.3g} requests/s" in found.sentence()


def test_it_goes_down_where_the_first_is_too_much_already() -> None:
    found, tried = SaturationSearch(1.0), []
    while (rate := found.next_rate) is not None:
        tried.append(rate)
        found.note(probe(rate, rate > 0.3))
    assert tried[:3] == [1.0, 0.5, 0.25] and found.held <= 0.3 <= found.grew


def test_it_ends_in_bounded_probes_and_says_what_is_known() -> None:
    never = SaturationSearch(1.0, most_probes=5)
    while (rate := never.next_rate) is not None:
        never.note(probe(rate, False))
    assert len(never.probes) == 5 and never.result()["saturation_rate"] is None
    assert never.sentence() == "Up to 16 requests/s the queue did not grow (5 probes were not enough)."
    always = SaturationSearch(1.0, most_probes=3)
    while (rate := always.next_rate) is not None:
        always.note(probe(rate, True))
    assert always.sentence() == "Already at 0.25 requests/s the queue grew (3 probes were not enough)."
    refused = SaturationSearch(1.0)
    refused.note(probe(1.0, False, completed=0))
    assert refused.next_rate is None and "0 of 48 requests completed" in refused.sentence()
    halfway = SaturationSearch(1.0)
    halfway.note(probe(1.0, False))
    halfway.note(probe(2.0, True))
    halfway.cancelled = True
    assert halfway.next_rate is None
    assert halfway.sentence() == "Between 1 and 2 requests/s the queue starts to grow (cancelled)."
    assert SaturationSearch(1.0, cancelled=True).sentence() == "No rate was tried (cancelled)."


def test_a_noisy_probe_does_not_confuse_the_search() -> None:
    """A rate that held above one that grew: what counts is the gap below the lowest that grew."""
    found = SaturationSearch(1.0)
    for rate, grew in ((1.0, False), (2.0, False), (4.0, True), (2.83, True), (1.5, True)):
        found.note(probe(rate, grew))
    assert (found.held, found.grew) == (1.0, 1.5) and 1.0 < found.next_rate < 1.5


def test_probes_are_of_the_load_but_never_twice_of_the_same_prompts() -> None:
    shape = WorkloadShape(
        5, Uniform(low=8, high=9), 3, shared_prefix=SharedPrefix(16), arrivals=Arrivals(ramp="1:4:linear")
    )
    load = shape.build("x")
    first, second = (probe_workload(load, 4.0, number, 12) for number in (0, 1))
    assert [r.prompt_tokens for r in first.requests] == [load.requests[i % 5].prompt_tokens for i in range(12)]
    assert [r.arrival_s for r in first.requests] == pytest.approx([i / 4 for i in range(12)])
    assert first.arrivals.max_concurrency is None and first.open_loop
    prompts = [tuple(r.synthetic_ids(10_000)) for w in (load, first, second) for r in w.requests]
    assert len(set(prompts)) == 5 + 12 + 12
    assert len({p[:16] for p in prompts[5:17]}) == 1 and prompts[5][:16] != prompts[17][:16], "shared within a probe"


def test_the_first_rate_is_the_load_s_own() -> None:
    load = WorkloadShape(3, 4, 2, arrivals=Arrivals(request_rate=2.5)).build("x")
    assert first_rate_of(load) == 2.5
    for arrivals in (Arrivals(), Arrivals(request_rate=float("inf")), Arrivals(ramp="1:2:linear")):
        assert first_rate_of(replace(load, arrivals=arrivals)) == FIRST_RATE


# On an engine --------------------------------------------------------------------------------------------------------


def loaded(clock: Clock, service: float, slots: int, **core: object) -> FakeLoaded:
    return FakeLoaded(lambda scheduler: FakeCore(clock, service, slots, **core))


def requests(count: int = 6) -> Workload:
    return Workload("x", tuple(WorkloadRequest(10, prompt_tokens=20) for _ in range(count)))


@pytest.mark.parametrize(("service", "slots"), [(0.5, 1), (2.0, 8)])
def test_a_mock_server_s_capacity_is_found(service: float, slots: int) -> None:
    clock = Clock()
    engine = loaded(clock, service, slots)
    result = find_rate(engine, requests(), EngineConfig(), clock=clock, sleep=clock.sleep)
    assert result["saturation_rate"] == pytest.approx(slots / service, rel=0.08)
    assert len(engine.asked) == len(result["probes"]), "a fresh core for each"
    assert result["requests_per_probe"] == 64 and result["interrupted"] is False
    json.dumps(result, allow_nan=False)


def test_a_search_that_is_stopped_keeps_its_whole_probes() -> None:
    clock = Clock()
    engine = loaded(clock, 0.5, 1)
    result = find_rate(
        engine,
        requests(),
        EngineConfig(),
        clock=clock,
        sleep=clock.sleep,
        stop_wanted=lambda: len(engine.asked) == 3,
    )
    assert len(result["probes"]) == 2 and result["interrupted"] and result["cancelled"]
    assert result["saturation_rate"] is None and "cancelled" in result["summary"]


def test_a_probe_that_fails_is_a_sentence() -> None:
    clock = Clock()
    with pytest.raises(bench.BenchFailure, match=r"probe at 1 requests/s failed: .*on fire"):
        find_rate(loaded(clock, 0.5, 1, dies_at_step=30), requests(), EngineConfig(), clock=clock, sleep=clock.sleep)


def test_the_command_finds_a_rate_and_writes_it(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.saturation.PROBE_REQUESTS", 24)
    monkeypatch.setattr("engine.saturation.FIRST_RATE", 64.0)
    model = str(make_tiny_model(tmp_path / "tiny"))
    path, target = tmp_path / "load.jsonl", tmp_path / "rate.json"
    path.write_text('{"prompt_tokens": 12, "output_tokens": 6}\n' * 4)
    engine = ["--model", model, "--dtype", "float32", "--threads", "1", "--token-budget", "64", "--kv-blocks", "200"]
    code = bench.main([*engine, "--max-num-seqs", "2", "--workload", str(path), "--find-rate", "--json", str(target)])
    result = json.loads(target.read_text())
    out = capsys.readouterr()
    assert code == (0 if result["saturation_rate"] else 1)
    assert result["probes"] and result["model_id"] and result["summary"] in out.out
    assert "achieved" in out.out and "P99 TTFT" in out.out


@pytest.mark.parametrize("option", [["--ramp", "1:2:linear"], ["--max-concurrency", "3"], ["--save-outputs"]])
def test_what_a_search_decides_itself_cannot_be_asked_for(option: list[str], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        bench.main(["--scenario", "kv-crunch", "--find-rate", *option])
    assert caught.value.code == 2 and f"--find-rate does not go with {option[0]}" in capsys.readouterr().err
