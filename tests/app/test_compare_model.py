"""What the compare panel makes of its fields, and what it says of a plan and of its progress; without Qt."""

from __future__ import annotations

import pytest

from app.lab.compare_model import (
    KNOBS,
    CompareChoice,
    CompareFault,
    CompareLoad,
    Knob,
    expected_seconds,
    plan_fault,
    plan_remarks,
    plan_summary,
)
from app.lab.compare_progress import CompareClock, progress_sentence, progress_share
from engine.config import EngineConfig
from engine.messages import ComparePlan, CompareProgress, ModelInfo
from engine.variants import parse_seeds
from engine.workload import EngineOptions, Workload, WorkloadError, WorkloadRequest, load_scenario
from tests.app.scripted import ScriptedClient


@pytest.fixture
def info() -> ModelInfo:
    return ScriptedClient(num_blocks=10, max_model_len=400).info()


def knob(name: str) -> Knob:
    return next(each for each in KNOBS if each.name == name)


def load(*lengths: tuple[int, int], options: EngineOptions | None = None, last_arrival: float = 0.0) -> CompareLoad:
    requests = tuple(
        WorkloadRequest(output, prompt_tokens=prompt, arrival_s=last_arrival if i else 0.0)
        for i, (prompt, output) in enumerate(lengths or ((40, 20), (60, 30)))
    )
    return CompareLoad("Two", lambda seed: Workload("two", requests), "Watch.\n", options or EngineOptions())


def choice(**given: object) -> CompareChoice:
    return CompareChoice(**{"load": load(), "disciplines": ("static", "vllm"), **given})


def plan(**given: object) -> ComparePlan:
    return choice(**given).plan()


# Choosing ------------------------------------------------------------------------------------------------------------


def test_disciplines_become_variants_of_a_plan() -> None:
    made = plan(seeds="3, 5", warm_up=2, objectives={"ttft": 500.0, "e2el": 4000.0})
    assert [(v.name, v.options.said()) for v in made.variants] == [
        ("static", {"discipline": "static"}),
        ("vllm", {"discipline": "vllm"}),
    ]
    assert (made.title, made.watch, made.baseline) == ("Two", "Watch.", "static")
    assert (made.seeds, len(made.workloads), made.warm_up) == ([3, 5], 2, 2)
    assert made.objectives == {"ttft": 500.0, "e2el": 4000.0}


def test_a_knob_has_a_variant_for_each_value_under_every_discipline() -> None:
    made = plan(disciplines=(), knob=knob("token_budget"), values=("64", "128"))
    assert [v.options.said() for v in made.variants] == [{"token_budget": 64}, {"token_budget": 128}]
    assert made.baseline == made.variants[0].name
    both = plan(knob=knob("prefix_cache"), values=("on", "off"))
    assert [v.options.said() for v in both.variants] == [
        {"discipline": d, "prefix_cache": on} for d in ("static", "vllm") for on in (True, False)
    ]


@pytest.mark.parametrize("each", KNOBS, ids=lambda each: each.name)
def test_the_usual_values_of_every_knob_make_a_plan(each: Knob, info: ModelInfo) -> None:
    made = plan(disciplines=(), knob=each, values=each.usual)
    assert len(made.variants) == len(each.usual)
    assert plan_fault(made, EngineConfig(), info) == ""


def test_the_chosen_baseline_counts_as_long_as_it_runs() -> None:
    assert plan(baseline="vllm").baseline == "vllm"
    assert plan(baseline="orca").baseline == "static"
    assert plan(disciplines=("vllm", "orca")).baseline == "vllm"


def test_seeds_are_listed_or_a_range() -> None:
    assert parse_seeds("") == [None]
    assert parse_seeds("1, 2 7") == [1, 2, 7]
    assert parse_seeds("2-4,9") == [2, 3, 4, 9]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"disciplines": ()}, "Tick the disciplines"),
        ({"disciplines": ("vllm",)}, "vllm alone has nothing to be compared with"),
        ({"knob": KNOBS[0], "values": ()}, "Give the values of token budget"),
        ({"knob": KNOBS[0], "values": ("64", "many")}, "'many'"),
        ({"knob": KNOBS[0], "values": ("64", "64")}, "there twice"),
        ({"seeds": "1,x"}, "'x'"),
        ({"seeds": "1,2,1"}, "seed 1 is there twice"),
        ({"seeds": "5-2"}, "from 5 to 2"),
        ({"seeds": "0-999"}, "more than 100 runs"),
        ({"seeds": "4294967296"}, "a seed is 4,294,967,295 at most"),
        ({"seeds": "1-60"}, "120 runs"),
        ({"load": CompareLoad("none", lambda seed: Workload("none", ()))}, "no requests"),
    ],
)
def test_what_cannot_be_compared_is_said_in_a_sentence(given: dict, words: str) -> None:
    with pytest.raises(CompareFault, match=words) as fault:
        plan(**given)
    assert str(fault.value).endswith(".")


def test_a_workload_that_cannot_be_built_is_a_fault() -> None:
    def broken(seed: int | None) -> Workload:
        raise WorkloadError("load.jsonl, line 3: needs a prompt")

    with pytest.raises(CompareFault, match="line 3"):
        plan(load=CompareLoad("broken", broken))


def test_a_recorded_workload_has_no_seeds_and_a_single_variant_will_do() -> None:
    recorded = CompareLoad("run", load().build, seeded=False)
    assert len(plan(load=recorded, disciplines=("vllm",), beside_recorded=True).variants) == 1
    with pytest.raises(CompareFault, match="no other seeds"):
        plan(load=recorded, seeds="1,2")


# What an engine can do of it -----------------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_is_said(info: ModelInfo) -> None:
    long = plan(load=load((500, 5), (20, 5)))
    assert plan_fault(long, EngineConfig(), info) == ""
    assert any("1 prompt of up to 500 tokens will be refused" in s for s in plan_remarks(long, EngineConfig(), info))
    hopeless = plan_fault(plan(load=load((500, 5), (450, 5))), EngineConfig(), info)
    assert "Every prompt" in hopeless and "450" in hopeless and "400" in hopeless


def test_a_pool_that_is_too_small_is_said_of_its_variant(info: ModelInfo) -> None:
    pools = plan(disciplines=(), knob=knob("kv_blocks"), values=("3", "5", "64"))
    fault = plan_fault(pools, EngineConfig(), info)
    assert "kv_blocks=3" in fault and "60 tokens" in fault and "3 blocks of 16, 48 tokens" in fault
    enough = plan(disciplines=(), knob=knob("kv_blocks"), values=("5", "64"))
    assert plan_fault(enough, EngineConfig(), info) == ""
    remarks = plan_remarks(enough, EngineConfig(), info)
    assert len(remarks) == 1 and remarks[0].startswith("kv_blocks=5: 1 request of up to 90 tokens cannot fit")


def test_another_block_size_keeps_the_memory_of_the_pool(info: ModelInfo) -> None:
    sizes = plan(disciplines=(), knob=knob("block_size"), values=("8", "32"))
    assert plan_fault(sizes, EngineConfig(), info) == "" and plan_remarks(sizes, EngineConfig(), info) == []


def test_an_impossible_value_names_its_variant(info: ModelInfo) -> None:
    odd = plan(disciplines=(), knob=knob("block_size"), values=("16", "24"))
    assert "block_size=24: block_size is 24" in plan_fault(odd, EngineConfig(), info)


def test_what_takes_another_engine_is_said(info: ModelInfo) -> None:
    other = plan(load=load(options=EngineOptions(dtype="float32")))
    assert "wants dtype float32; the engine runs with auto" in plan_fault(other, EngineConfig(), info)
    assert plan_fault(other, EngineConfig(dtype="float32"), info) == ""


def test_every_scenario_can_be_compared_on_a_roomy_engine() -> None:
    info = ScriptedClient(num_blocks=4_000, max_model_len=8_192).info()
    for name in ("bus-and-metro", "kv-crunch", "rush-hour", "noisy-neighbour", "long-prompt", "shared-prompt"):
        scenario = load_scenario(name)
        made = plan(load=CompareLoad(scenario.title, scenario.build, scenario.watch, scenario.engine))
        assert plan_fault(made, EngineConfig(), info) == ""


# How much it is ------------------------------------------------------------------------------------------------------


def test_the_summary_counts_runs_and_guesses_their_time() -> None:
    made = plan(seeds="1-3")
    assert plan_summary(made, None) == "6 runs: 2 variants, 3 seeds, 2 requests each."
    assert expected_seconds(made, 50.0) == pytest.approx(6 * 150 / 50)
    assert "about 18 s" in plan_summary(made, 50.0)


def test_a_run_takes_at_least_as_long_as_its_arrivals() -> None:
    slow = plan(load=load((10, 5), (10, 5), last_arrival=60.0))
    assert expected_seconds(slow, 1e6) == pytest.approx(120.0)
    assert "at least 2:00 min" in plan_summary(slow, None)


# Progress ------------------------------------------------------------------------------------------------------------


def test_progress_in_words() -> None:
    running = CompareProgress(1, 6, "vllm", 1, 14, 96)
    assert progress_sentence(running) == "run 2 of 6: vllm, seed 1 · 14 of 96 requests"
    assert progress_share(running) == pytest.approx((1 + 14 / 96) / 6)
    assert progress_sentence(CompareProgress(0, 6, "orca", None, 1, 1, True)) == "run 1 of 6: orca · warming up"
    assert progress_share(CompareProgress(0, 6, "orca", None, 1, 1, True)) == 0.0
    assert progress_sentence(CompareProgress(-1, 6, "", None, 1, 3)) == "It waits for 2 answers to end."
    assert progress_sentence(CompareProgress(-1, 6, "", None, 3, 3)) == "It is about to begin."


def test_the_rest_is_guessed_from_what_has_passed() -> None:
    clock = CompareClock()
    assert clock.left(CompareProgress(-1, 2, "", None, 0, 1), 0.0) == ""
    assert clock.left(CompareProgress(0, 2, "vllm", None, 0, 10), 100.0) == ""
    assert clock.left(CompareProgress(0, 2, "vllm", None, 1, 10), 101.0) == "", "too early to tell"
    assert clock.left(CompareProgress(0, 2, "vllm", None, 5, 10), 110.0) == "about 30 s left"
