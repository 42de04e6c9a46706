"""``python -m engine.compare``: usage, the runs and their order, ratios, the same ids, and both reports."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import bench, compare
from engine.bench_options import Chosen
from engine.compare_html import html_report
from engine.compare_report import print_comparison
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.loader import LoadedEngine, load_engine
from engine.same_ids import NEAR_TIE, Sameness, compare_ids, first_difference, top_two_gaps
from engine.workload import Workload, WorkloadRequest, load_scenario
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


def workload(count: int = 3, name: str = "w") -> Workload:
    return Workload(name, tuple(WorkloadRequest(2, prompt_tokens=4, seed=i) for i in range(count)))


def chosen(*workloads: Workload) -> Chosen:
    return Chosen(None, EngineConfig(), None, list(workloads))


def compared(fake: FakeLoaded, disciplines: list[str], seeds: list[int | None], **given: Any) -> compare.Comparison:
    made = compare.Comparison(fake, disciplines, chosen(*[workload()] * len(seeds)), seeds, **given)
    made.run()
    return made


# Runs ----------------------------------------------------------------------------------------------------------------


def test_each_seed_has_every_discipline_in_turn_on_a_fresh_core(fake: FakeLoaded) -> None:
    made = compared(fake, ["vllm", "static"], [4, 5])
    turns = [("vllm", 4), ("static", 4), ("vllm", 5), ("static", 5)]
    assert [(scheduler.discipline, seed) for scheduler, seed in fake.asked] == turns
    assert [(run["discipline"], run["seed"]) for run in made.runs] == turns
    assert made.sameness == {"vllm": Sameness(same=6)}
    result = compare.comparison(made.runs, made.sameness, "static", interrupted=False)
    assert result["ratios"]["vllm"]["request_throughput"] == pytest.approx(2.0)
    assert result["ratios"]["vllm"]["mean_e2el_ms"] == pytest.approx(0.5)
    assert result["ratios"]["static"]["duration"] == 1.0
    assert result["ratios"]["vllm"]["request_goodput"] is None, "nothing was asked of goodput"


def test_a_stop_keeps_the_runs_that_are_complete(fake: FakeLoaded) -> None:
    steps = [0]

    def stop_wanted() -> bool:
        steps[0] += 1
        return steps[0] > 14  # in the middle of the second run

    made = compared(fake, ["static", "vllm"], [None], stop_wanted=stop_wanted)
    assert [run["discipline"] for run in made.runs] == ["static"]
    assert len(fake.asked) == 2, "the second had begun"


def test_a_failed_warm_up_leaves_the_runs_before_it(fake: FakeLoaded) -> None:
    real = fake.make

    def make(scheduler: SchedulerConfig) -> FakeCore:
        core = real(scheduler)
        core.dies_at_step = 1 if scheduler.discipline == "vllm" else None
        return core

    fake.make = make
    made = compare.Comparison(fake, ["static", "vllm"], chosen(workload()), [None], warm_up=1)
    with pytest.raises(bench.BenchFailure, match="on fire"):
        made.run()
    assert [run["discipline"] for run in made.runs] == ["static"]


# Figures -------------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_over_seeds_of_pairs() -> None:
    def run(discipline: str, seed: int, **figures: Any) -> dict[str, Any]:
        return {"discipline": discipline, "seed": seed, **figures}

    runs = [
        run("orca", 1, duration=10.0, mean_ttft_ms=None, steps=0),
        run("vllm", 1, duration=5.0, mean_ttft_ms=3.0, steps=4),
        run("orca", 2, duration=1.0, mean_ttft_ms=4.0, steps=0),
        run("vllm", 2, duration=4.0, mean_ttft_ms=2.0, steps=5),
        run("orca", 3, duration=2.0, mean_ttft_ms=None, steps=0),
        run("vllm", 3, duration=2.0, mean_ttft_ms=None, steps=6),
    ]
    ratios = compare.ratios_to(runs, "orca")
    assert ratios["vllm"]["duration"] == 1.0, "of 0.5, 4 and 1"
    assert ratios["vllm"]["mean_ttft_ms"] == 0.5, "only one seed has both"
    assert ratios["vllm"]["steps"] is None, "no ratio to 0"
    assert set(ratios["vllm"]) == set(compare.RATIO_KEYS)


def test_the_baseline_is_static_where_it_runs_else_the_first() -> None:
    assert compare.baseline_of(["vllm", "static", "orca"]) == "static"
    assert compare.baseline_of(["vllm", "orca"]) == "vllm"


def test_without_the_baseline_there_are_no_ratios(fake: FakeLoaded) -> None:
    made = compared(fake, ["vllm"], [None])
    result = compare.comparison(made.runs, {}, "static", interrupted=True)
    assert result["ratios"] == {} and result["interrupted"]
    stream = io.StringIO()
    print_comparison(result, stream)
    assert "requests per second" in stream.getvalue()
    assert "Interrupted" in html_report(result, None)


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
    from engine.execution.sizing import warm_up_batch

    prefixes = [[5, 9, 17, 33] * 6, [40, 41, 42], [5, 9]]
    gaps = top_two_gaps(loaded, prefixes)
    backend = loaded.make_core(scheduler=SchedulerConfig())._runner._backend
    for prefix, gap in zip(prefixes, gaps, strict=True):
        batch = warm_up_batch(len(prefix), 16, torch.device("cpu"))
        logits = backend.forward(dataclasses.replace(batch, token_ids=torch.tensor(prefix)))[0]
        first, second = torch.topk(logits, 2).values.tolist()
        assert gap == pytest.approx(first - second, abs=2e-5) and gap > 0


# The command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def command(model: str, tmp_path: Path) -> Callable[..., int]:
    path = tmp_path / "w.jsonl"
    rows = [{"prompt_tokens": p, "output_tokens": o, "max_tokens": 30} for p, o in ((20, 5), (9, 14), (30, 9), (4, 22))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--workload", str(path), "--model", model, "--threads", "1", "--kv-blocks", "100", "--max-num-seqs", "2"]
    return lambda *arguments: compare.main([*given, "--dtype", "float32", *arguments])


def test_six_disciplines_give_the_same_answers_and_reports(command: Callable, tmp_path: Path, capsys) -> None:
    names = "static,orca,vllm,tgi,trtllm-no-evict,trtllm-max-util"
    page, target = tmp_path / "r.html", tmp_path / "r.json"
    assert command("--disciplines", names, "--html", str(page), "--json", str(target), "--save-outputs") == 0
    result = json.loads(target.read_text())
    assert result["baseline"] == "static" and [run["discipline"] for run in result["runs"]] == names.split(",")
    assert all(found["different"] == found["not_compared"] == 0 for found in result["same_ids"].values())
    assert list(result["same_ids"]) == names.split(",")[1:]
    assert all(len(run["output_token_ids"]) == 4 for run in result["runs"])
    static = result["runs"][0]["static_totals"]
    assert static["measured_useful"] == pytest.approx(static["predicted_useful"], abs=0.01)
    assert result["ratios"]["vllm"]["slot_utilisation"] > 1.0
    out = capsys.readouterr()
    assert out.err == "" and all(name in out.out for name in names.split(",")) and "×" in out.out
    assert "trtllm-max-util" in page.read_text()


def test_json_alone_on_standard_output_without_the_ids(command: Callable, capfd) -> None:
    assert command("--disciplines", "orca,vllm", "--seeds", "1,2", "--json", "-", "--prefix-cache", "off") == 0
    result = json.loads(capfd.readouterr().out)
    assert result["baseline"] == "orca" and [run["seed"] for run in result["runs"]] == [1, 1, 2, 2]
    assert all("output_token_ids" not in run and not run["prefix_cache"] for run in result["runs"])


class _Links(HTMLParser):
    """Everything in a page that would fetch something or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [tag] if tag in ("script", "link", "img", "iframe") else []
        self.found += [name for name, _ in attrs if name in ("src", "href") or name.startswith("on")]
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag, "tags are balanced"


def test_the_page_needs_nothing_and_escapes_everything(fake: FakeLoaded) -> None:
    made = compared(fake, ["static", "vllm"], [None])
    result = compare.comparison(made.runs, made.sameness, "static", interrupted=False)
    hostile = dataclasses.replace(load_scenario("conversation"), title="<script>x</script>", watch="a & b <img src=x>")
    page = html_report(result, hostile)
    parser = _Links()
    parser.feed(page)
    assert parser.found == [] and parser.open == []
    assert "&lt;script&gt;" in page and "&lt;img" in page and "&lt;x&gt;" in page
    assert "http" not in page and "url(" not in page and "prefers-color-scheme: dark" in page
    widths = [float(w) for w in re.findall(r'rect class="b\w+" [^>]*width="([\d.]+)"', page)]
    assert widths[1] == pytest.approx(2 * widths[0], rel=0.01), "twice the requests per second, twice the bar"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to run"),
        (["--scenario", "kv-crunch"], "--disciplines is empty; name some of"),
        (["--scenario", "kv-crunch", "--disciplines", "static,lottery"], "'lottery' is unknown; it must be one of"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm,vllm"], "'vllm' is named twice"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,x"], "--seeds has 'x'"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,-2"], "--seeds has '-2'"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--seeds", "1,1"], "--seeds has 1 twice"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--html", "/nowhere/x.html"], "--html /nowhere/x.html"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--json", "/"], "--json /: this is a folder"),
        (["--scenario", "kv-crunh", "--disciplines", "vllm"], "no scenario is called 'kv-crunh'"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--swap-blocks", "-1"], "swap_blocks is -1"),
        (["--scenario", "kv-crunch", "--disciplines", "vllm", "--goodput", "x"], "goodput objective 'x'"),
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
    real = compare.run_fresh
    done: list[str] = []

    def run_fresh(*arguments: Any, **given: Any) -> dict[str, Any]:
        if done:
            raise KeyboardInterrupt
        done.append("static")
        return real(*arguments, **given)

    monkeypatch.setattr(compare, "run_fresh", run_fresh)
    assert command("--disciplines", "static,vllm", "--json", "-") == 1
    out = capfd.readouterr()
    assert "interrupted; 1 of 2 runs are complete" in out.err
    result = json.loads(out.out)
    assert result["interrupted"] and len(result["runs"]) == 1
