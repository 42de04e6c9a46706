"""A plan run for the window: on a tiny model, with a floor that notes what it is told and ends it where asked."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from engine import comparing
from engine.comparing import encode, run_comparison
from engine.comparison import read_comparison
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore, StepResult
from engine.events import Keyframe, StepRecord
from engine.loader import LoadedEngine, load_engine
from engine.messages import CompareProgress, Reply, Variant
from engine.run_state import RunState
from engine.workload import EngineOptions, Workload, WorkloadRequest
from tests.load.comparisons import disciplines, plan_of, result_of, run_result
from tests.process.tiny_model import make_tiny_model


class NotingFloor:
    """The engine in the hands of a comparison, as :class:`engine.floor.Floor` is, with all that it is told."""

    def __init__(self, loaded: LoadedEngine, stop_after: int = 10**9) -> None:
        self.loaded = loaded
        self.scheduler = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64)
        self.progress: list[CompareProgress] = []
        self.runs: list[tuple[EngineCore, Keyframe, list[StepRecord]]] = []
        self.steps = 0
        self.stop_after = stop_after
        self.asked = 0

    def send(self, reply: Reply) -> None:
        assert isinstance(reply, CompareProgress)
        self.progress.append(reply)

    def begin(self, core: EngineCore) -> None:
        self.runs.append((core, core.keyframe(), []))

    def stepped(self, result: StepResult) -> None:
        assert result.record is not None and result.outputs == []
        self.steps += 1
        self.runs[-1][2].append(result.record)

    def stop_wanted(self) -> bool:
        self.asked += 1
        return self.steps >= self.stop_after


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedEngine:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    cache = CacheConfig(num_blocks=60)
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", threads=1, cache=cache)
    return load_engine(config, lambda *_: None)


def small(count: int = 4, output: int = 6) -> Workload:
    return Workload("w", tuple(WorkloadRequest(output, prompt_tokens=20 + i, seed=i) for i in range(count)))


def test_a_plan_gives_what_the_command_writes(loaded: LoadedEngine) -> None:
    floor = NotingFloor(loaded)
    plan = plan_of(disciplines("static", "vllm"), [3, 4], small(), watch="Watch.", objectives={"ttft": 1e6})
    done = run_comparison(floor, plan)
    assert done.error == ""
    result = read_comparison(done.result)
    assert (result["title"], result["watch"], result["baseline"]) == ("A title", "Watch.", "static")
    assert [(run["variant"], run["seed"]) for run in result["runs"]] == [
        ("static", 3),
        ("vllm", 3),
        ("static", 4),
        ("vllm", 4),
    ]
    assert result["same_ids"]["vllm"]["same"] == 8 and not result["interrupted"]
    assert all(run["request_goodput"] > 0 and run["max_num_seqs"] == 2 for run in result["runs"])
    assert all("output_token_ids" not in run and len(run["timeline"]) == 4 for run in result["runs"])


def test_the_window_can_follow_every_run_from_its_beginning(loaded: LoadedEngine) -> None:
    floor = NotingFloor(loaded)
    run_comparison(floor, plan_of(disciplines("static", "vllm"), load=small(), warm_up=1))
    assert len(floor.runs) == 2 and len({id(core) for core, _, _ in floor.runs}) == 2
    for core, begun, records in floor.runs:
        assert begun.step == 0 and begun.requests == []
        state = RunState()
        state.restore(begun)
        for record in records:
            state.apply(record)
        assert state.totals == core.keyframe().totals and state.totals.finished == 5, "the warm-up's, too"


def test_progress_tells_the_run_and_how_far_it_is(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PROGRESS_SECONDS", 0.0)
    floor = NotingFloor(loaded)
    run_comparison(floor, plan_of(disciplines("static", "vllm"), [3, 4], small(), warm_up=1))
    told = floor.progress
    assert [p.run for p in told] == sorted(p.run for p in told) and {p.run for p in told} == {0, 1, 2, 3}
    assert all(p.runs == 4 for p in told)
    assert {(p.run, p.name, p.seed) for p in told} == {
        (0, "static", 3),
        (1, "vllm", 3),
        (2, "static", 4),
        (3, "vllm", 4),
    }
    for number in range(4):
        of_run = [p for p in told if p.run == number]
        warm = [p for p in of_run if p.warming_up]
        assert warm and of_run[: len(warm)] == warm and all(p.requests == 1 for p in warm)
        counted = [p.completed for p in of_run[len(warm) :]]
        assert counted == sorted(counted) and counted[-1] == of_run[-1].requests == 4


def test_a_few_messages_a_second_are_enough(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PROGRESS_SECONDS", 3600.0)
    floor = NotingFloor(loaded)
    run_comparison(floor, plan_of(disciplines("vllm"), load=small(output=40)))
    assert floor.steps > 40 and len(floor.progress) == 2, "the first step and the last"


def test_a_cancel_ends_it_after_the_step_in_progress(loaded: LoadedEngine) -> None:
    floor = NotingFloor(loaded)
    run_comparison(floor, plan_of(disciplines("static"), load=small()))
    first = floor.steps
    floor = NotingFloor(loaded, stop_after=first + 3)
    done = run_comparison(floor, plan_of(disciplines("static", "vllm", "orca"), load=small()))
    assert floor.steps == first + 3
    assert done.error == "Cancelled; 1 of 3 runs are complete."
    result = read_comparison(done.result)
    assert result["interrupted"] and [run["variant"] for run in result["runs"]] == ["static"]
    assert result["ratios"]["static"]["duration"] == 1.0


def test_a_cancel_in_the_first_run_leaves_no_result(loaded: LoadedEngine) -> None:
    done = run_comparison(NotingFloor(loaded, stop_after=2), plan_of(disciplines("static", "vllm"), load=small()))
    assert done.result == b"" and done.error == "Cancelled; 0 of 2 runs are complete."


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (EngineOptions(kv_blocks=10**9), "fails could not run: 1,000,000,000 KV blocks of 16 tokens need"),
        (EngineOptions(speculative="draft:/nowhere"), "a draft model is loaded with the model"),
        (EngineOptions(threads=7), "threads is 7, but the engine was loaded with 1; load it again with that"),
        (EngineOptions(block_size=12), "block_size is 12; it must be a power of two"),
    ],
)
def test_a_variant_that_cannot_run_is_told_and_the_others_do(
    loaded: LoadedEngine, options: EngineOptions, words: str
) -> None:
    variants = [*disciplines("static"), Variant("fails", options), *disciplines("vllm")]
    done = run_comparison(NotingFloor(loaded), plan_of(variants, [1, 2], small()))
    assert words in done.error
    result = read_comparison(done.result)
    assert [run["variant"] for run in result["runs"]] == ["static", "vllm"] * 2
    assert list(result["failures"]) == ["fails"] and not result["interrupted"]


def test_where_nothing_can_run_there_is_a_sentence_and_no_result(loaded: LoadedEngine) -> None:
    done = run_comparison(NotingFloor(loaded), plan_of([Variant("x", EngineOptions(threads=7))], load=small()))
    assert done.result == b"" and done.error.startswith("x could not run: threads is 7")


def test_a_request_that_is_refused_is_told(loaded: LoadedEngine) -> None:
    load = Workload("w", (*small(2).requests, WorkloadRequest(4, prompt_tokens=100_000)))
    done = run_comparison(NotingFloor(loaded), plan_of(disciplines("static"), load=load))
    assert "static, seed 0: 1 of 3 requests failed: prompt_tokens is 100,000" in done.error
    lane = read_comparison(done.result)["runs"][0]["timeline"][2]
    assert lane["reason"] == "error" and lane["end"] is not None


def test_a_fault_of_the_comparison_is_not_the_engine_s(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("nothing to compare")

    monkeypatch.setattr(comparing, "compare_ids", broken)
    done = run_comparison(NotingFloor(loaded), plan_of(disciplines("static", "vllm"), load=small()))
    assert done.error == "The comparison failed: ZeroDivisionError: nothing to compare."
    assert len(read_comparison(done.result)["runs"]) == 2


def test_blocks_of_another_size_come_and_go_with_their_variant(loaded: LoadedEngine) -> None:
    variants = [Variant(f"b{n}", EngineOptions(block_size=n)) for n in (4, 16, 64)]
    variants += [Variant("few", EngineOptions(kv_blocks=20, swap_blocks=3))]
    floor = NotingFloor(loaded)
    result = read_comparison(run_comparison(floor, plan_of(variants, load=small())).result)
    shapes = [(k.block_size, k.num_blocks, k.num_host_blocks) for _, k, _ in floor.runs]
    assert [shape[:2] for shape in shapes] == [(4, 240), (16, 60), (64, 15), (16, 20)] and shapes[3][2] == 3
    for run, shape in zip(result["runs"], shapes, strict=True):
        assert (run["block_size"], run["kv_blocks_total"]) == shape[:2]
    assert all(found["different"] == 0 and found["same"] == 4 for found in result["same_ids"].values())
    core = loaded.fresh_core(SchedulerConfig())
    again = core.keyframe()
    assert (again.block_size, again.num_blocks) == (16, 60), "and the engine has its own again"
    assert loaded.info_of(core).kv_bytes_per_block == loaded.info.kv_bytes_per_block


def test_a_pool_that_does_not_fit_leaves_the_one_there_was(loaded: LoadedEngine) -> None:
    from engine.models.errors import ModelLoadError

    loaded.fresh_core(SchedulerConfig(), kv_blocks=25)
    before = loaded.model.size
    with pytest.raises(ModelLoadError, match=r"10,000,000,000 KV blocks of 16 tokens need .* at most [\d,]+ blocks"):
        loaded.fresh_core(SchedulerConfig(), kv_blocks=10**10)
    assert loaded.model.size == before and before.num_blocks == 25


def test_a_result_too_long_for_a_message_loses_what_is_least_missed() -> None:
    lanes = [[(0, i / 10, (i + 1) / 10, 3) for i in range(200)] for _ in range(20)]
    details: dict[str, Any] = {"itls": [[0.1] * 50] * 20, "errors": [""] * 20}
    runs = [run_result(name, seed, lanes, **details) for seed in (1, 2) for name in ("a", "b")]
    result = result_of(runs)
    whole = len(encode(result))

    def left(limit: int) -> list[tuple[bool, bool]]:
        read = read_comparison(encode(result, limit))
        return [(bool(run["timeline"]), bool(run["itls"])) for run in read["runs"]]

    assert left(whole) == [(True, True)] * 4
    assert left(whole - 1) == [(True, True)] * 2 + [(False, True)] * 2
    half = len(encode(result, whole - 1))
    assert left(half - 1) == [(True, False)] * 2 + [(False, False)] * 2
    assert left(10) == [(False, False)] * 4, "the figures stay in any case"


def test_an_open_loop_can_be_cancelled_while_it_waits(loaded: LoadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    late = dataclasses.replace(small(2).requests[1], arrival_s=3600.0)
    floor = NotingFloor(loaded)

    def stop_wanted() -> bool:
        floor.asked += 1
        return floor.asked > 14

    monkeypatch.setattr(floor, "stop_wanted", stop_wanted)
    done = run_comparison(floor, plan_of(disciplines("vllm"), load=Workload("w", (small(1).requests[0], late))))
    assert "Cancelled" in done.error
