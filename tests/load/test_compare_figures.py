"""What is said of a comparison: medians, spreads, ratios, waste, knobs, sentences; and how a saved one is read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.compare_report import print_comparison
from engine.comparison import (
    FIGURES,
    RATIO_KEYS,
    ComparisonError,
    Spread,
    efficiency_of,
    load_comparison,
    median_of,
    ratios_to,
    read_comparison,
    shown_figures,
    spread_of,
    variants_of,
    waste_of,
)
from engine.comparison_words import observations
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.messages import Variant
from engine.variants import knob_rows, load_config, parse_vary, product, variant_config
from engine.workload import EngineOptions
from tests.load.comparisons import plan_of, result_of, run_result


def run(variant: str, seed: int, **figures: Any) -> dict[str, Any]:
    return {"variant": variant, "seed": seed, **figures}


# Figures -------------------------------------------------------------------------------------------------------------


def test_ratios_are_medians_over_seeds_of_pairs() -> None:
    runs = [
        run("orca", 1, duration=10.0, mean_ttft_ms=None, steps=0),
        run("vllm", 1, duration=5.0, mean_ttft_ms=3.0, steps=4),
        run("orca", 2, duration=1.0, mean_ttft_ms=4.0, steps=0),
        run("vllm", 2, duration=4.0, mean_ttft_ms=2.0, steps=5),
        run("orca", 3, duration=2.0, mean_ttft_ms=None, steps=0),
        run("vllm", 3, duration=2.0, mean_ttft_ms=None, steps=6),
        run("vllm", 4, duration=900.0, mean_ttft_ms=None, steps=6),
    ]
    ratios = ratios_to(runs, "orca")
    assert ratios["vllm"]["duration"] == 1.0, "of 0.5, 4 and 1; of seed 4 there is no pair"
    assert ratios["vllm"]["mean_ttft_ms"] == 0.5, "only one seed has both"
    assert ratios["vllm"]["steps"] is None, "no ratio to 0"
    assert set(ratios["vllm"]) == set(RATIO_KEYS)
    assert ratios_to(runs, "static") == {}


def test_a_spread_is_over_the_seeds_that_have_the_figure() -> None:
    runs = [run("a", s, p99_itl_ms=v) for s, v in enumerate([4.0, None, 1.0, 9.0])] + [run("b", 1, p99_itl_ms=None)]
    assert spread_of(runs, "a", "p99_itl_ms") == Spread(1.0, 4.0, 9.0, 3)
    assert median_of(runs, "a", "p99_itl_ms") == 4.0
    assert spread_of(runs, "b", "p99_itl_ms") is None and median_of(runs, "b", "p99_itl_ms") is None


def test_goodput_of_0_is_shown_and_without_objectives_it_is_not() -> None:
    def keys(**figures: Any) -> set[str]:
        return {figure.key for figure in shown_figures(result_of([run_result("a", **figures)]))}

    assert keys(request_goodput=0.0, preemptions=0, steps=3) == {"request_goodput", "steps"}
    assert keys(request_goodput=None, mean_ttft_ms=None) == set()


def test_waste_and_efficiency_are_medians_over_the_seeds() -> None:
    wastes: list[Any] = [(10, 1.0), (30, 2.0), (20, 9.0)]
    runs = []
    for seed, (tokens, seconds) in enumerate(wastes):
        made = run_result("static", seed)
        made["waste"]["padding"] = {"tokens": tokens, "seconds": seconds}
        made["static_totals"] = {"eta": 0.5 + seed / 10, "predicted_useful": 0.7, "measured_useful": None}
        runs.append(made)
    result = result_of([*runs, run_result("vllm", 0)])
    assert waste_of(result, "static", "padding") == (20, 2.0)
    assert waste_of(result, "vllm", "padding") == (None, None)
    assert efficiency_of(result, "static") == {"eta": 0.6, "predicted_useful": 0.7, "measured_useful": None}
    assert efficiency_of(result, "vllm") is None


def test_variants_without_a_run_have_no_column() -> None:
    result = result_of([run_result("b"), run_result("a")])
    result["variants"] = [{"name": name, "options": {}} for name in ("a", "failed", "b")]
    assert variants_of(result) == ["a", "b"]


def test_the_table_has_na_where_there_is_no_sample() -> None:
    stream = io.StringIO()
    print_comparison(
        result_of([run_result("a [bold]", p99_itl_ms=None, steps=4), run_result("b", p99_itl_ms=12.0)]), stream
    )
    rows = stream.getvalue().splitlines()
    assert "a [bold]" in stream.getvalue()
    assert next(r for r in rows if r.startswith("P99 ITL")).split()[2:5] == ["n/a", "12", "ms"]


# Variants ------------------------------------------------------------------------------------------------------------


def test_disciplines_and_knobs_make_a_product() -> None:
    made = product(["static", "vllm"], [parse_vary("token-budget=64,auto"), parse_vary("prefix_cache=on,off")])
    assert [v.name for v in made][:3] == [
        "static token_budget=64 prefix_cache=on",
        "static token_budget=64 prefix_cache=off",
        "static token_budget=auto prefix_cache=on",
    ]
    assert len(made) == 8
    assert made[0].options == EngineOptions(discipline="static", token_budget=64, prefix_cache=True)
    assert made[2].options == EngineOptions(discipline="static", prefix_cache=True), "auto says nothing"
    assert [v.name for v in product([], [parse_vary("watermark=0,0.1")])] == ["watermark=0", "watermark=0.1"]


def test_a_block_size_alone_keeps_the_tokens_of_the_pool() -> None:
    base = EngineConfig(cache=CacheConfig(num_blocks=100, swap_blocks=10))

    def cache(**said: Any) -> CacheConfig:
        variant = Variant("v", EngineOptions(**said))
        return variant_config(plan_of([variant]), variant, base).cache

    assert cache(block_size=32) == CacheConfig(32, 50, swap_blocks=5)
    assert cache(block_size=4) == CacheConfig(4, 400, swap_blocks=40)
    assert cache(block_size=256).num_blocks == 6
    assert cache(block_size=32, kv_blocks=70) == CacheConfig(32, 70, swap_blocks=5)
    assert cache(kv_blocks=70) == CacheConfig(16, 70, swap_blocks=10)


def test_what_is_loaded_has_room_for_every_variant() -> None:
    variants = product([], [parse_vary("max_num_seqs=2,64"), parse_vary("speculative=off,draft:d")])
    loaded = load_config(plan_of(variants), EngineConfig())
    assert loaded.scheduler.max_num_seqs == 64 and loaded.scheduler.speculative == "draft:d"
    variants = product([], [parse_vary("kv_blocks=50,auto"), parse_vary("token_budget=auto,64")])
    loaded = load_config(plan_of(variants), EngineConfig())
    assert loaded.cache.num_blocks is None and loaded.scheduler.max_num_batched_tokens is None
    variants = product([], [parse_vary("kv_blocks=50,60")])
    assert load_config(plan_of(variants, baseline="kv_blocks=60"), EngineConfig()).cache.num_blocks == 60
    own = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=128))
    assert load_config(plan_of(variants), own).scheduler.max_num_batched_tokens == 128


def test_knobs_that_differ_come_first() -> None:
    runs = [run_result("a"), run_result("b")]
    runs[0]["knobs"] |= {"watermark": 0.1, "prefix_cache": True}
    runs[1]["knobs"] |= {"watermark": 0.2, "prefix_cache": True}
    first, *rest = knob_rows(result_of(runs))
    assert first.label == "watermark" and first.values == {"a": "0.1", "b": "0.2"} and first.differs
    assert not any(row.differs for row in rest)
    assert next(row for row in rest if row.label == "prefix cache").values == {"a": "on", "b": "on"}


# Sentences -----------------------------------------------------------------------------------------------------------


def test_the_sentences_have_the_numbers() -> None:
    static = run_result("static", duration=12.0, mean_ttft_ms=900.0, computed_tokens=600, preemptions=0)
    static["waste"]["padding"] = {"tokens": 200, "seconds": 3.0}
    static["static_totals"] = {"eta": 0.5, "predicted_useful": 0.6, "measured_useful": 0.61}
    vllm = run_result("vllm", duration=4.0, mean_ttft_ms=300.0, preemptions=3, recomputed_tokens=1234)
    told = " ".join(observations(result_of([static, vllm])))
    assert "vllm is through with the work in 4.0 s, static takes 12.0 s: 3.00 times as long." in told
    assert "300 ms on average under vllm and 900 ms under static" in told
    assert "200 were padding (25%) and took 3.00 s" in told
    assert "η 50.0%; useful work was predicted at 60.0% and measured at 61.0%" in told
    assert "vllm preempted 3 times: 1,234 tokens were computed again." in told
    assert "static preempted" not in told and "One seed" in told


def test_variants_that_hardly_differ_are_not_ranked() -> None:
    told = observations(result_of([run_result("a", duration=10.0), run_result("b", duration=10.2)]))
    assert told == ["One seed was run, so nothing is said of chance: differences of a few percent may be it."]


# Saved ones ----------------------------------------------------------------------------------------------------------


def saved(**given: Any) -> bytes:
    return msgspec.json.encode(result_of([run_result("a", steps=3), run_result("b")], **given))


def test_a_saved_comparison_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(saved(watch="ä"))
    assert load_comparison(path) == msgspec.json.decode(saved(watch="ä"))


def changed(change: Any) -> bytes:
    result = msgspec.json.decode(saved())
    change(result)
    return msgspec.json.encode(result)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "this is no comparison"),
        (b"\xff\x00garbage", "this is no comparison"),
        (b"[1, 2]", "it has no runs"),
        (b'{"date": "2026", "duration": 3}', "it has no runs"),
        (b'{"baseline": "static", "runs": [{"discipline": "static"}]}', "neither variants nor timelines; run it again"),
        (saved()[:-9], "this is no comparison"),
        (changed(lambda r: r.update(runs=[])), "no run that was completed"),
        (changed(lambda r: r["runs"][0].pop("timeline")), "missing required field `timeline`"),
        (changed(lambda r: r["runs"][1].update(variant="c")), "a run is of 'c', which is none of the variants"),
        (changed(lambda r: r["runs"][0].update(steps="many")), "steps of a is 'many', not a number"),
        (changed(lambda r: r["runs"][0]["timeline"][0]["spans"].append([99, 0, 1, 1])), "states of kind 99"),
        (changed(lambda r: r["runs"][0]["timeline"][0]["spans"].append([0, 1])), "of length 4"),
        (changed(lambda r: r["runs"][0]["waste"].pop("tail")), "does not tell its waste by tail"),
        (changed(lambda r: r["ratios"].update(a={"steps": "x"})), "no comparison that this version reads"),
    ],
)
def test_what_is_no_comparison_is_refused_with_a_sentence(text: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(ComparisonError) as caught:
        read_comparison(text)
    assert words in str(caught.value)
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(ComparisonError) as of_file:
        load_comparison(path)
    assert str(of_file.value) == f"{path}: {caught.value}"


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match=r"cannot be read: No such file"):
        load_comparison(tmp_path / "none.json")


def test_every_figure_is_defined() -> None:
    assert all(figure.meaning and figure.label for figure in FIGURES)
    assert len({figure.key for figure in FIGURES}) == len(FIGURES)


def test_what_happened_once_is_said_to_have_happened_once() -> None:
    told = " ".join(observations(result_of([run_result("a", preemptions=1), run_result("b", preemptions=0)])))
    assert "a preempted once." in told and "1 times" not in told
