"""Workload files, shapes, arrivals and scenarios."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from engine.load_shapes import draw_lengths
from engine.workload import (
    Arrivals,
    EngineOptions,
    Exponential,
    LogNormal,
    Normal,
    PriorityShare,
    ShapeError,
    SharedPrefix,
    Uniform,
    UnknownScenarioError,
    WorkloadError,
    WorkloadShape,
    arrival_times,
    list_scenarios,
    load_scenario,
    load_workload,
    longest,
    synthetic_prompt,
)

GOOD = '{"prompt_tokens": 5, "output_tokens": 2}'


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "load.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_is_read_with_every_field(tmp_path: Path) -> None:
    row = {
        "prompt_token_ids": [3, 4],
        "output_tokens": 5,
        "max_tokens": 9,
        "arrival_s": 1.5,
        "priority": -2,
        "user": "ann",
        "ignore_eos": False,
    }
    path = write(tmp_path, GOOD, "", json.dumps(row), '{"prompt": "Grüße", "output_tokens": 1}')
    first, second, third = load_workload(path).requests
    assert (first.prompt_tokens, first.params().max_tokens, first.arrival_s, first.ignore_eos) == (5, 2, 0.0, True)
    assert (second.prompt_token_ids, second.output_tokens, second.params().max_tokens) == ((3, 4), 5, 9)
    assert (second.arrival_s, second.priority, second.user, second.params().ignore_eos) == (1.5, -2, "ann", False)
    assert third.prompt == "Grüße"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt_tokens": 5', "malformed|truncated"),
        ("[1, 2]", "object"),
        ('{"prompt_tokens": 5}', "output_tokens is required: the number of tokens after which the answer ends"),
        ('{"prompt": "Hello", "max_tokens": 0}', "output_tokens is required"),
        ('{"output_tokens": 5}', "exactly one of prompt, prompt_token_ids and prompt_tokens; it has none"),
        ('{"prompt": "a", "prompt_tokens": 2, "output_tokens": 5}', "it has prompt and prompt_tokens"),
        ('{"prompt": "", "output_tokens": 5}', "prompt is empty"),
        ('{"prompt_token_ids": [], "output_tokens": 5}', "prompt_token_ids is empty"),
        ('{"prompt_token_ids": [1, -7], "output_tokens": 5}', "-7"),
        ('{"prompt_tokens": 0, "output_tokens": 5}', "prompt_tokens is 0"),
        ('{"prompt_tokens": 5, "output_tokens": 0}', "output_tokens is 0"),
        ('{"prompt_tokens": 5, "output_tokens": -1}', "output_tokens is -1"),
        ('{"prompt_tokens": "5", "output_tokens": 1}', "prompt_tokens"),
        ('{"prompt_tokens": 5, "output_tokens": 8, "max_tokens": 4}', "max_tokens is 4, below output_tokens 8"),
        ('{"prompt_tokens": 5, "output_tokens": 8, "arrival_s": -0.5}', "arrival_s is -0.5"),
        ('{"prompt_tokens": 5, "output_tokens": 2147483648}', "output_tokens is 2,147,483,648; it must be at most"),
        (
            '{"prompt_tokens": 5, "output_tokens": 8, "priority": 99999999999999999999}',
            "priority is 99,.* must be -2",
        ),
        (
            '{"prompt_tokens": 5, "output_tokens": 8, "priorty": 1}',
            "there is no field 'priorty'; allowed are .*prompt_tokens.*priority",
        ),
        ('{"prompt_tokens": 5, "output_tokens": 8, "arrival_s": NaN}', "malformed|invalid"),
    ],
)
def test_a_bad_line_is_named_with_file_line_and_fault(tmp_path: Path, line: str, words: str) -> None:
    path = write(tmp_path, GOOD, "", GOOD, line, GOOD)
    with pytest.raises(WorkloadError, match=words) as caught:
        load_workload(path)
    assert f"{path}, line 4: " in str(caught.value)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"prompt": "\xff\xfe", "output_tokens": 1}\n')
    with pytest.raises(WorkloadError, match="line 2: this is not a text file"):
        load_workload(path)
    for start in (b"\x7fELF\x02\x01\x01\x00\x00\x01\n", b"\x89PNG\r\n\x1a\n"):
        path.write_bytes(start)
        with pytest.raises(WorkloadError) as caught:
            load_workload(path)
        assert f"{path}, line 1: this is not a text file" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="no requests"):
        load_workload(write(tmp_path, "", "  "))
    with pytest.raises(WorkloadError, match=r"missing\.jsonl cannot be read"):
        load_workload(tmp_path / "missing.jsonl")
    with pytest.raises(WorkloadError, match="cannot be read"):
        load_workload(tmp_path)


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert len(load_workload(path).requests) == 1


# Prompts -------------------------------------------------------------------------------------------------------------


def test_synthetic_prompts_are_ordinary_and_repeatable() -> None:
    forbidden = frozenset(range(0, 100, 2))
    ids = synthetic_prompt(5_000, 100, seed=7, forbidden=forbidden)
    assert len(ids) == 5_000
    assert set(ids) == set(range(1, 100, 2))
    assert ids == synthetic_prompt(5_000, 100, seed=7, forbidden=forbidden)
    assert ids != synthetic_prompt(5_000, 100, seed=8, forbidden=forbidden)
    assert set(synthetic_prompt(50, 4, 0, {1, 3, 300})) == {0, 2}, "a tokenizer may have more ids than the model"
    with pytest.raises(ShapeError, match="all 4 tokens"):
        synthetic_prompt(1, 4, 0, range(4))
    with pytest.raises(ShapeError, match="prompt_tokens is 0"):
        synthetic_prompt(0, 4, 0)


def test_requests_of_one_group_share_their_prefix_and_nothing_else() -> None:
    shape = WorkloadShape(30, 10, 1, shared_prefix=SharedPrefix(tokens=32, groups=3))
    prompts = [r.synthetic_ids(50_000) for r in shape.build("x").requests]
    assert {len(p) for p in prompts} == {42}
    assert len({tuple(p[:32]) for p in prompts}) == 3
    assert len({tuple(p[32:]) for p in prompts}) == 30


# Shapes --------------------------------------------------------------------------------------------------------------


def test_lengths() -> None:
    rng = np.random.default_rng(0)
    assert draw_lengths(7, 3, rng) == [7, 7, 7]
    assert draw_lengths([1, 2], 5, rng) == [1, 2, 1, 2, 1]
    uniform = draw_lengths(Uniform(low=3, high=5), 3_000, rng)
    assert set(uniform) == {3, 4, 5}
    assert min(uniform.count(n) for n in (3, 4, 5)) > 900
    drawn = draw_lengths(LogNormal(median=100, sigma=0.5, low=20, high=400), 20_000, rng)
    assert min(drawn) >= 20 and max(drawn) <= 400
    assert np.median(drawn) == pytest.approx(100, rel=0.03)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.05)
    normal = draw_lengths(Normal(mean=200, deviation=30, low=120, high=400), 20_000, rng)
    assert min(normal) == 120 and np.mean(normal) == pytest.approx(200, rel=0.02)
    assert np.std(normal) == pytest.approx(30, rel=0.05)
    exponential = draw_lengths(Exponential(mean=100, high=10_000), 20_000, rng)
    assert min(exponential) == 1 and np.mean(exponential) == pytest.approx(100, rel=0.05)
    assert np.mean(np.array(exponential) > 200) == pytest.approx(math.exp(-2), rel=0.1), "memoryless"
    for made, top in ((uniform, 5), (drawn, 400), (normal, 400)):
        assert max(made) <= top
    shapes = (7, [3, 9, 4], Uniform(low=1, high=5), Normal(3, 1, 1, 8), Exponential(3, high=6))
    assert [longest(shape) for shape in shapes] == [7, 9, 5, 8, 6]
    for impossible in ({"mean": 0.0}, {"mean": math.inf}, {"mean": 5.0, "low": 9, "high": 3}):
        with pytest.raises(ShapeError, match="exponential"):
            Exponential(**impossible)
    with pytest.raises(ShapeError, match="normal deviation is -1"):
        Normal(5.0, -1.0)
    for bad in (0, [], [4, -1]):
        with pytest.raises(ShapeError):
            draw_lengths(bad, 2, rng)
    with pytest.raises(ShapeError, match="length 1,000,001 is impossible"):
        draw_lengths([4, 1_000_001], 2, rng)
    with pytest.raises(ShapeError, match="1,000,000"):
        Uniform(low=1, high=1_000_001)


def test_a_shape_gives_shares_limits_and_the_same_load_for_the_same_seed() -> None:
    shape = _shape((1.0, 3.0))
    workload = shape.build("x")
    urgent = sum(r.priority == 0 for r in workload.requests)
    assert urgent == pytest.approx(500, abs=80)
    assert all(r.params().max_tokens == max(20, r.output_tokens) for r in workload.requests)
    assert shape.build("x") == workload
    assert shape.build("x", seed=5) != workload


def _shape(priority_shares: tuple[float, float]) -> WorkloadShape:
    first, second = priority_shares
    return WorkloadShape(
        requests=2_000,
        prompt_tokens=Uniform(low=1, high=9),
        output_tokens=Uniform(low=1, high=50),
        max_tokens=20,
        priorities=[PriorityShare(0, first), PriorityShare(2, second)],
    )


def test_shares_that_make_no_sense_are_refused() -> None:
    for shares in ((0.0, 0.0), (-1.0, 2.0), (math.nan, 1.0)):
        with pytest.raises(ShapeError, match="shares"):
            _shape(shares).build("x")


# Arrivals ------------------------------------------------------------------------------------------------------------


def gaps(arrivals: Arrivals, count: int = 20_000, seed: int = 1) -> np.ndarray:
    times = arrival_times(count, arrivals, seed)
    assert times[0] == 0.0
    return np.diff(times)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    drawn = gaps(Arrivals(request_rate=8.0, burstiness=burstiness))
    assert drawn.mean() == pytest.approx(1 / 8, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


def test_poisson_gaps_are_memoryless() -> None:
    drawn = gaps(Arrivals(request_rate=1.0))
    assert np.mean(drawn > 2.0) == pytest.approx(math.exp(-2.0), rel=0.1)


def test_infinite_burstiness_is_even_and_infinite_rate_is_at_once() -> None:
    assert arrival_times(4, Arrivals(request_rate=10.0, burstiness=math.inf), 0) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert arrival_times(3, Arrivals(request_rate=math.inf), 0) == [0, 0, 0]
    assert arrival_times(3, Arrivals(), 0) == [0, 0, 0]
    assert arrival_times(0, Arrivals(request_rate=2.0), 0) == []
    assert arrival_times(1, Arrivals(ramp="1:2:linear"), 0) == [0]


def test_ramps_go_from_one_rate_to_the_other() -> None:
    linear = gaps(Arrivals(ramp="1:9:linear", burstiness=math.inf), count=1_001)
    assert (linear[0], linear[499], linear[-1]) == pytest.approx((1.0, 1 / 5, 1 / 9), rel=0.01)
    exponential = gaps(Arrivals(ramp="1:9:exponential", burstiness=math.inf), count=1_001)
    assert (exponential[0], exponential[499], exponential[-1]) == pytest.approx((1.0, 1 / 3, 1 / 9), rel=0.01)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"request_rate": 0.0}, "request_rate is 0"),
        ({"request_rate": -1.0}, "request_rate is -1"),
        ({"burstiness": 0.0}, "burstiness is 0"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"ramp": "1:2"}, "FROM:TO:linear"),
        ({"ramp": "1:x:linear"}, "FROM:TO:linear"),
        ({"ramp": "1:2:cubic"}, "cubic"),
        ({"ramp": "0:2:linear"}, "start is 0"),
        ({"ramp": "1:2:linear", "request_rate": 1.0}, "exclude"),
    ],
)
def test_impossible_arrivals_are_refused(given: dict, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        Arrivals(**given)


def test_times_of_a_file_stay_unless_a_rate_is_given(tmp_path: Path) -> None:
    line = '{"prompt_tokens": 5, "output_tokens": 2, "arrival_s": 3.0}'
    workload = load_workload(write(tmp_path, GOOD, line))
    assert workload.open_loop and workload.request_rate is None
    capped = workload.with_arrivals(Arrivals(max_concurrency=1), 0)
    assert [r.arrival_s for r in capped.requests] == [0.0, 3.0]
    at_once = workload.with_arrivals(Arrivals(request_rate=math.inf), 0)
    assert not at_once.open_loop and at_once.request_rate == "inf"
    rated = workload.with_arrivals(Arrivals(request_rate=2.0, burstiness=math.inf), 0)
    assert [r.arrival_s for r in rated.requests] == [0.0, 0.5]


# Scenarios -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list_scenarios())
def test_every_built_in_scenario_is_whole(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.title and len(scenario.watch) > 40
    workload = scenario.build()
    assert workload.name == name and workload.requests
    assert scenario.engine.config()
    assert workload == scenario.build()


def test_the_promised_scenarios_are_there() -> None:
    promised = ["bus-and-metro", "conversation", "rush-hour", "noisy-neighbour", "kv-crunch", "long-prompt"]
    promised += ["shared-prompt", "repetitive"]
    for name in promised:
        watch = load_scenario(name).watch.strip()
        assert re.search(r"\b([Ww]atch|Compare)\b", watch) and len(watch) <= 320, "short enough for a narrow panel"
    bus = load_scenario("bus-and-metro").build()
    assert [(r.prompt_tokens, r.output_tokens) for r in bus.requests] == [(100, 50), (200, 150), (150, 80)]
    assert not bus.open_loop
    rush = load_scenario("rush-hour").build()
    assert rush.open_loop and {r.priority for r in rush.requests} == {0, 1}
    crunch = load_scenario("kv-crunch")
    config = crunch.engine.config()
    blocks, size = config.cache.num_blocks, config.cache.block_size
    needs = [-(-(r.prompt_tokens + r.output_tokens) // size) for r in crunch.build().requests]
    assert max(needs) <= blocks, "each request alone must fit"
    running = sorted(needs)[: config.scheduler.max_num_seqs]
    assert sum(running) > blocks, "together they must not"
    assert len(load_scenario("conversation").build().requests) == 96


def test_the_scenarios_of_the_claims_are_what_they_say() -> None:
    spread = load_scenario("spread").build().requests
    totals = [r.prompt_tokens + r.output_tokens for r in spread]
    assert (min(totals), max(totals)) == (20, 2048)
    longest = max(r.prompt_tokens for r in spread) + max(r.output_tokens for r in spread) - 1
    assert sum(totals) / (len(totals) * max(totals)) < 0.2
    assert sum(total - 1 for total in totals) / (len(totals) * longest) < 0.2
    assert load_scenario("spread").engine.config().scheduler.max_num_seqs == len(spread), "one batch"
    short = load_scenario("short-answers").build()
    outputs = np.array([r.output_tokens for r in short.requests])
    assert short.open_loop and len(short.requests) >= 500
    assert np.median(outputs) == 6 and max(outputs) == 48 and 0.005 < np.mean(outputs >= 40) < 0.05
    curve = load_scenario("batch-curve").build().requests
    assert len({(r.prompt_tokens, r.output_tokens) for r in curve}) == 1 and len(curve) == 32


def test_the_scenarios_of_the_engine_s_parts_are_what_they_say() -> None:
    shared = [r.synthetic_ids(1_000) for r in load_scenario("shared-prompt").build().requests]
    assert len({tuple(ids[:512]) for ids in shared}) == 1
    assert len({tuple(ids) for ids in shared}) == len(shared)
    noisy = load_scenario("noisy-neighbour").build()
    users = [r.user for r in noisy.requests]
    assert noisy.open_loop and users.count("noisy") > 5 * users.count("quiet") > 0
    long = load_scenario("long-prompt").build().requests
    assert {r.user for r in long} == {"decoding", "long"}
    assert all((r.prompt_tokens >= 1_500) == (r.user == "long") == (r.arrival_s > 0) for r in long)
    for request in load_scenario("repetitive").build().requests:
        assert request.prompt[-12:-1] in request.prompt[:-12] or request.prompt.count("\n") > 3


def test_an_unknown_scenario_names_the_known_ones() -> None:
    with pytest.raises(
        UnknownScenarioError, match=r"'rushhour'; give one of .*rush-hour, .*or the path of a \.toml file"
    ):
        load_scenario("rushhour")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "TOML|value|Invalid"),
        ('title = "x"', "watch"),
        ('title="x"\nwatch="y"\n[workload]\nrequests=1\nprompt_tokens=1', "output_tokens"),
        ('title="x"\nwatch="y"\n[workload]\nrequests=0\nprompt_tokens=1\noutput_tokens=1', "requests is 0"),
        ('title="x"\nwatch="y"\n[workload]\nrequests=1\nprompt_tokens=1\noutput_tokens=1\nspeed=2', "speed"),
        ('title="x"\nwatch="y"\n[workload]\nrequests=1\nprompt_tokens=1\noutput_tokens=1\nseed=-1', "seed is -1"),
        ('title="x"\nwatch="y"\n[workload]\nfile="a.jsonl"\nseed=-1', "seed is -1"),
        ('title="x"\nwatch="y"\n[workload]\nfile="a.jsonl"\n[engine]\nkv_blocks=0', "kv_blocks is 0"),
        ('title="x"\nwatch="y"\n[workload]\nfile="a.jsonl"\n[engine]\nkv_block=4', "kv_block"),
        ('title="x"\nwatch="y"\n[workload]\nfile="a.jsonl"\n[engine]\norder="lifo"', "lifo"),
    ],
)
def test_a_bad_scenario_says_file_and_fault(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(WorkloadError, match=words) as caught:
        load_scenario(str(path))
    assert str(path) in str(caught.value)


def test_a_scenario_of_the_users_own(tmp_path: Path) -> None:
    write(tmp_path, GOOD, GOOD)
    path = tmp_path / "mine.toml"
    path.write_text('title="x"\nwatch="y"\n[workload]\nfile="load.jsonl"\narrivals={request_rate=4}', encoding="utf-8")
    workload = load_scenario(str(path)).build(seed=9)
    assert workload.name == "mine" and workload.open_loop and workload.request_rate == 4.0
    assert workload.requests[0].seed != load_scenario(str(path)).build(seed=8).requests[0].seed


def test_the_command_line_beats_the_scenario_beats_the_defaults() -> None:
    scenario = EngineOptions(kv_blocks=24, max_num_seqs=8, prefix_cache=False)
    config = EngineOptions(kv_blocks=64, token_budget=100).over(scenario).config()
    assert config.cache.num_blocks == 64
    assert config.scheduler.max_num_batched_tokens == 100
    assert (config.scheduler.max_num_seqs, config.cache.prefix_cache) == (8, False)
    assert config.cache.block_size == 16
