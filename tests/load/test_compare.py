"""``python -m engine.compare``: usage, the runs and their order, the same ids, and what is written."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine import bench, compare, comparing
from engine.comparison import load_comparison
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.lanes import SpanKind
from engine.loader import LoadedEngine, load_engine
from engine.same_ids import NEAR_TIE, Sameness, compare_ids, first_difference, top_two_gaps
from tests.load.comparisons import Silent, compared, disciplines, plan_of
from tests.load.fake_engine import Clock, FakeCore, FakeLoaded
from tests.process.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def loaded(model: str) -> LoadedEngine:
    cache = CacheConfig(num_blocks=100)
    return load_engine(
        EngineConfig(model=model, dtype="float32", device="cpu", threads=1, cache=cache), lambda *_: None
    )


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeLoaded:
    """A loaded engine whose cores serve by the clock, ``static`` twice as slowly as the others."""
    clock = Clock()
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock, sleep=clock.sleep))
    return FakeLoaded(lambda scheduler: FakeCore(clock, 1.0 if scheduler.discipline == "static" else 0.5))


# Runs ----------------------------------------------------------------------------------------------------------------


def test_each_seed_has_every_variant_in_turn_on_a_fresh_core(fake: FakeLoaded) -> None:
    audience = Silent()
    made = compared(fake, plan_of(disciplines("vllm", "static"), [4, 5]), audience)
    turns = [("vllm", 4), ("static", 4), ("vllm", 5), ("static", 5)]
    assert [(scheduler.discipline, seed) for scheduler, seed in fake.asked] == turns
    assert [(run["variant"], run["seed"]) for run in made.runs] == turns
    assert audience.began == [(number, *turn) for number, turn in enumerate(turns)]
    assert made.sameness == {"vllm": Sameness(same=6)}
    result = made.result(interrupted=False)
    assert result["ratios"]["vllm"]["request_throughput"] == pytest.approx(2.0)
    assert result["ratios"]["vllm"]["mean_e2el_ms"] == pytest.approx(0.5)
    assert result["ratios"]["static"]["duration"] == 1.0
    assert result["ratios"]["vllm"]["request_goodput"] is None, "nothing was asked of goodput"
    assert result["variants"] == [
        {"name": "vllm", "options": {"discipline": "vllm"}},
        {"name": "static", "options": {"discipline": "static"}},
    ]


def test_a_stop_keeps_the_runs_that_are_complete(fake: FakeLoaded) -> None:
    made = compared(fake, plan_of(disciplines("static", "vllm")), Silent(steps=8))  # in the middle of the second
    assert [run["variant"] for run in made.runs] == ["static"]
    assert len(fake.asked) == 2, "the second had begun"


def test_a_variant_that_cannot_run_leaves_the_others_to_run(fake: FakeLoaded) -> None:
    real = fake.make

    def make(scheduler: SchedulerConfig) -> FakeCore:
        core = real(scheduler)
        core.dies_at_step = 1 if scheduler.discipline == "vllm" else None
        return core

    fake.make = make
    made = compared(fake, plan_of(disciplines("static", "vllm", "orca"), [1, 2], warm_up=1))
    assert [run["variant"] for run in made.runs] == ["static", "orca", "static", "orca"]
    assert "on fire" in made.failures["vllm"] and len(made.failures) == 1
    assert len(fake.asked) == 5, "what failed is not tried with the next seed"
    assert made.faults() == [f"vllm could not run: {made.failures['vllm']}"]
    assert made.result(interrupted=False)["failures"] == made.failures


def test_a_baseline_that_fails_leaves_results_without_ratios(fake: FakeLoaded) -> None:
    real = fake.make

    def make(scheduler: SchedulerConfig) -> FakeCore:
        core = real(scheduler)
        core.dies_at_step = 1 if scheduler.discipline == "static" else None
        return core

    fake.make = make
    result = compared(fake, plan_of(disciplines("static", "vllm"), warm_up=1)).result(interrupted=False)
    assert result["ratios"] == {} and result["same_ids"] == {} and len(result["runs"]) == 1


# The same ids --------------------------------------------------------------------------------------------------------


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2
    assert first_difference([], [4]) == 0


def test_answers_are_equal_near_ties_or_different() -> None:
    asked: list[list[int]] = []

    def gaps(prefixes: list[list[int]]) -> list[float | None]:
        asked.extend(prefixes)
        return [NEAR_TIE / 2, NEAR_TIE * 2, None]

    found = compare_ids(
        [[7], [8], [9], [10], [11]],
        [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2], None],
        [[1, 2, 3], [1, 5, 3], [4, 2, 3], [1], [1]],
        gaps,
    )
    assert asked == [[8, 1], [9], [10, 1]]
    assert found == Sameness(same=1, near_ties=1, different=2, not_compared=1)
    assert found + Sameness(same=2) == Sameness(3, 1, 2, 1)


def test_the_gap_is_that_of_the_two_highest_logits(loaded: LoadedEngine) -> None:
    from engine.execution.sizing import prompt_step

    prefixes = [[5, 9, 17, 33] * 6, [40, 41, 42], [5, 9]]
    gaps = top_two_gaps(loaded, prefixes)
    for prefix, gap in zip(prefixes, gaps, strict=True):
        step = prompt_step(len(prefix), 16)
        logits = loaded.model.forward(dataclasses.replace(step, token_ids=np.array(prefix)))[0]
        first, second = torch.topk(logits, 2).values.tolist()
        assert gap == pytest.approx(first - second, abs=2e-5) and gap > 0


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(model: str, tmp_path: Path) -> Callable[..., int]:
    path = tmp_path / "w.jsonl"
    rows = [{"prompt_tokens": p, "output_tokens": o, "max_tokens": 30} for p, o in ((20, 5), (9, 14), (30, 9), (4, 22))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--workload", str(path), "--model", model, "--threads", "1", "--max-num-seqs", "2", "--dtype", "float32"]
    return lambda *arguments: compare.main([*given, *arguments])


def test_six_disciplines_give_the_same_answers_and_reports(command: Callable, tmp_path: Path, capsys) -> None:
    names = "static,orca,vllm,tgi,trtllm-no-evict,trtllm-max-util"
    page, target = tmp_path / "r.html", tmp_path / "r.json"
    given = ("--disciplines", names, "--kv-blocks", "100", "--html", str(page), "--json", str(target))
    assert command(*given, "--save-outputs") == 0
    result = load_comparison(target)
    assert result["baseline"] == "static" and [run["variant"] for run in result["runs"]] == names.split(",")
    assert all(found["different"] == found["not_compared"] == 0 for found in result["same_ids"].values())
    assert list(result["same_ids"]) == names.split(",")[1:]
    assert all(len(run["output_token_ids"]) == 4 for run in result["runs"])
    static = result["runs"][0]["static_totals"]
    assert static["measured_useful"] == pytest.approx(static["predicted_useful"], abs=0.01)
    assert result["ratios"]["vllm"]["slot_utilisation"] > 1.0
    out = capsys.readouterr()
    assert out.err == "" and all(name in out.out for name in names.split(",")) and "×" in out.out
    assert "η" in out.out
    assert "trtllm-max-util" in page.read_text()


def test_every_run_has_the_timeline_of_its_requests(command: Callable, capfd) -> None:
    assert command("--disciplines", "static,vllm", "--json", "-", "--warmup", "2") == 0
    for run in json.loads(capfd.readouterr().out)["runs"]:
        lanes = run["timeline"]
        assert [lane["request"] for lane in lanes] == [1, 2, 3, 4]
        assert [lane["reason"] for lane in lanes] == ["length"] * 4
        for lane, outputs in zip(lanes, run["output_lens"], strict=True):
            spans = lane["spans"]
            assert spans[0][1] == pytest.approx(lane["arrival"], abs=1e-4)
            for before, after in itertools.pairwise(spans):
                assert before[2] == pytest.approx(after[1], abs=2e-5), "no gap, no overlap"
            assert all(0 <= begin <= end <= run["duration"] + 1e-3 for _, begin, end, _ in spans)
            decoded = sum(tokens for kind, _, _, tokens in spans if kind == SpanKind.DECODE)
            assert decoded == outputs - 1, "the prefill gives the first"
            assert lane["end"] <= spans[-1][2] + 1e-4
        padding = sum(span[3] for lane in lanes for span in lane["spans"] if span[0] == SpanKind.PADDING)
        assert padding == run["padding_tokens"] and (padding > 0) == (run["variant"] == "static")


def test_json_alone_on_standard_output_without_the_ids(command: Callable, capfd) -> None:
    given = ("--disciplines", "orca,vllm", "--seeds", "1,2", "--json", "-", "--prefix-cache", "off")
    assert command(*given, "--kv-blocks", "100", "--baseline", "vllm") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["baseline"] == "vllm" and [run["seed"] for run in result["runs"]] == [1, 1, 2, 2]
    assert result["ratios"]["vllm"]["duration"] == 1.0
    assert all("output_token_ids" not in run and not run["prefix_cache"] for run in result["runs"])


def test_pools_and_drafts_vary_on_the_one_loaded_model(command: Callable, monkeypatch, capfd) -> None:
    loads: list[EngineConfig] = []
    real = bench.load
    monkeypatch.setattr(compare, "load", lambda config, progress: loads.append(config) or real(config, progress))
    given = ("--vary", "block_size=16,4", "--vary", "kv_blocks=12,40", "--vary", "speculative=off,ngram")
    assert command(*given, "--json", "-") == 0
    result = json.loads(capfd.readouterr().out)
    assert len(loads) == 1
    names = [run["variant"] for run in result["runs"]]
    assert len(names) == 8 and names[0] == "block_size=16 kv_blocks=12 speculative=off" == result["baseline"]
    for run in result["runs"]:
        said = dict(part.split("=") for part in run["variant"].split())
        assert str(run["block_size"]) == said["block_size"] == str(run["knobs"]["block_size"])
        assert str(run["kv_blocks_total"]) == said["kv_blocks"] == str(run["knobs"]["kv_blocks"])
        assert run["speculative"] == said["speculative"]
        assert run["completed"] == 4
    same = result["same_ids"]["block_size=16 kv_blocks=40 speculative=ngram"]
    assert same["same"] + same["near_ties"] == 4


def test_a_pool_that_does_not_fit_is_told_and_the_others_run(command: Callable, capfd) -> None:
    assert command("--vary", "kv_blocks=50,999999999,60", "--json", "-") == 1
    out = capfd.readouterr()
    assert "kv_blocks=999999999 could not run: 999,999,999 KV blocks of 16 tokens need" in out.err
    assert "blocks fit (--kv-blocks " in out.err and "Traceback" not in out.err
    result = json.loads(out.out)
    assert [run["kv_blocks_total"] for run in result["runs"]] == [50, 60]
    assert result["ratios"]["kv_blocks=60"]["duration"] > 0


def test_a_draft_model_that_is_not_loaded_is_refused(loaded: LoadedEngine) -> None:
    from engine.messages import Variant
    from engine.workload import EngineOptions

    variants = [Variant("off", EngineOptions()), Variant("draft", EngineOptions(speculative="draft:/nowhere"))]
    made = comparing.Comparison(loaded, loaded.config, plan_of(variants), Silent())
    made.run()
    assert [run["variant"] for run in made.runs] == ["off"]
    assert "a draft model is loaded with the model" in made.failures["draft"]


def test_a_draft_model_is_loaded_for_the_variant_that_wants_it(command: Callable, model: str, capfd) -> None:
    assert command("--vary", f"speculative=off,ngram,draft:{model}", "--json", "-", "--kv-blocks", "100") == 0
    result = json.loads(capfd.readouterr().out)
    off, ngram, draft = result["runs"]
    assert off["draft_tokens"] == 0 and draft["acceptance_rate"] == 1.0, "it drafts for itself"
    assert ngram["speculative"] == "ngram" and draft["speculative"].startswith("draft:")
    assert all(found["different"] == 0 for found in result["same_ids"].values())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to run"),
        (["--scenario", "kv-crunch"], "nothing to compare: give --disciplines a,b,… or --vary KNOB=a,b,…"),
        (["--scenario", "kv-crunch", "--disciplines", ""], "--disciplines is empty; name some of"),
        (["--scenario", "kv-crunch", "--disciplines", "static,lottery"], "'lottery' is unknown; it must be one of"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm,vllm"], "'vllm' is named twice"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,x"], "--seeds: 'x' is no seed"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,-2"], "--seeds: '-2' is no seed"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,1"], "--seeds: the seed 1 is there twice"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "4294967296"], "a seed is 4,294,967,295 at"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--json", "/"], "--json /: this is a folder"),
        (["--scenario", "kv-crunh", "--disciplines", "vllm"], "no scenario is called 'kv-crunh'"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--swap-blocks", "-1"], "swap_blocks is -1"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--goodput", "x"], "goodput objective 'x'"),
        (
            ["--scenario", "kv-crunch", "--disciplines", "vllm", "--baseline", "orca"],
            "--baseline is 'orca'; it must be",
        ),
        (["--scenario", "kv-crunch", "--vary", "token_budget"], "--vary has 'token_budget'; write KNOB=a,b,c"),
        (["--scenario", "kv-crunch", "--vary", "tokens=1"], "--vary has the knob 'tokens'; it must be one of"),
        (["--scenario", "kv-crunch", "--vary", "model=a,b"], "--vary cannot change model"),
        (["--scenario", "kv-crunch", "--vary", "token_budget=,"], "--vary gives no values of token_budget"),
        (["--scenario", "kv-crunch", "--vary", "token_budget=64,many"], "token_budget is 'many'; it is a whole number"),
        (["--scenario", "kv-crunch", "--vary", "token_budget=64,0"], "token_budget is 0; it must be at least 1"),
        (["--scenario", "kv-crunch", "--vary", "prefix_cache=on,yes"], "prefix_cache is 'yes'; it is on or off"),
        (["--scenario", "kv-crunch", "--vary", "block_size=16,12"], "block_size is 12; it must be a power of two"),
        (["--scenario", "kv-crunch", "--vary", "block_size=16,16"], "--vary has block_size=16 twice"),
        (
            ["--scenario", "kv-crunch", "--vary", "order=fcfs", "--vary", "order=fair"],
            "order is varied twice; give all its values at once",
        ),
        (["--scenario", "kv-crunch", "--vary", "speculative=draft:a,draft:b"], "one draft model can be loaded, not 2"),
        (
            [
                "--scenario",
                "kv-crunch",
                "--vary",
                "max_num_seqs=1,2,3,4,5,6",
                "--seeds",
                "1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17",
            ],
            "6 variants and 17 seeds are more than 100 runs",
        ),
    ],
)
def test_wrong_usage_is_2_with_a_sentence_and_loads_nothing(
    arguments: list[str], words: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        compare.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_that_is_not_there_and_a_bad_file_are_1(tmp_path: Path, capsys) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{}\n")
    assert compare.main(["--workload", str(bad), "--disciplines", "vllm"]) == 1
    bad.write_text('{"prompt_tokens": 3, "output_tokens": 1}\n')
    assert compare.main(["--workload", str(bad), "--disciplines", "vllm", "--model", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert "batchscope compare: " in err and "line 1" in err and "Traceback" not in err


def test_an_interrupted_command_reports_what_is_complete(command: Callable, monkeypatch, capfd) -> None:
    real = comparing.run_fresh
    done: list[str] = []

    def run_fresh(*arguments: Any, **given: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append("static")
        return real(*arguments, **given)

    monkeypatch.setattr(comparing, "run_fresh", run_fresh)
    assert command("--disciplines", "static,vllm", "--json", "-") == 1
    out = capfd.readouterr()
    assert "interrupted; 1 of 2 runs are complete" in out.err
    result = json.loads(out.out)
    assert result["interrupted"] and len(result["runs"]) == 1
