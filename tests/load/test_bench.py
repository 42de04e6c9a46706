"""``python -m engine.bench`` from its arguments to its JSON, on a tiny model of random weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine import bench, bench_report
from engine.bench_options import choose
from engine.bench_run import WorkloadRun, prepare, warm_up_requests
from engine.config import EngineConfig
from engine.loader import LoadedEngine
from engine.step_counters import StepCounters
from engine.workload import EngineOptions, Workload, WorkloadRequest
from tests.load.fake_engine import Clock, FakeCodec, FakeCore, FakeLoaded
from tests.process.tiny_model import MAX_POSITION, make_tiny_model

VLLM_KEYS = [
    "date",
    "backend",
    "model_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_concurrent_requests",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "start_times",
    "errors",
]
OWN_KEYS = [
    "steps",
    "preemptions",
    "swapped_blocks",
    "swapped_in_blocks",
    "acceptance_rate",
    "running_peak",
    "running_mean",
    "static_batches",
    "static_totals",
    "preemption_ledger",
    "waste",
    "by_user",
    "speculative",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "padding_tokens",
    "slot_utilisation",
    "kv_blocks_total",
    "kv_blocks_peak",
    "draft_tokens",
    "accepted_tokens",
    "slot_utilisation_run",
    "discipline",
    "order",
    "preemption",
    "dtype",
    "kv_dtype",
    "device",
    "weights_sha256",
    "output_token_ids",
    "by_priority",
    "peak_memory_mb",
    "load_seconds",
    "first_token_at",
]
STATISTICS = ("mean", "median", "std", "p50", "p90", "p99")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run(model: str, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    """Run ``bench`` on the tiny model; gives the exit code and the result."""

    def run_bench(*arguments: str) -> tuple[int, dict]:
        target = tmp_path / "result.json"
        target.unlink(missing_ok=True)
        common = (
            "--model",
            model,
            "--dtype",
            "float32",
            "--threads",
            "1",
            "--token-budget",
            "64",
            "--kv-blocks",
            "200",
        )
        code = bench.main([*common, *arguments, "--json", str(target)])
        return code, json.loads(target.read_text(), parse_constant=_no_constant) if target.exists() else {}

    return run_bench


def _no_constant(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def workload(tmp_path: Path, *rows: dict) -> str:
    path = tmp_path / "load.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_every_promised_key_is_there(run: Callable, tmp_path: Path) -> None:
    rows = [{"prompt_tokens": 20, "output_tokens": 5, "max_tokens": 40, "priority": i % 2} for i in range(6)]
    code, result = run("--workload", workload(tmp_path, *rows), "--save-outputs", "--goodput", "ttft:100000")
    assert code == 0
    assert [key for key in VLLM_KEYS + OWN_KEYS if key not in result] == []
    assert [
        f"{s}_{m}_ms" for s in STATISTICS for m in ("ttft", "tpot", "itl", "e2el") if f"{s}_{m}_ms" not in result
    ] == []
    assert (result["completed"], result["failed"], result["num_prompts"]) == (6, 0, 6)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (120, 30)
    assert [len(ids) for ids in result["output_token_ids"]] == [5] * 6 == result["output_lens"]
    assert (result["kv_blocks_total"], result["discipline"], result["dtype"]) == (200, "vllm", "float32")
    assert result["kv_dtype"] == "float32"
    assert 0 < result["kv_blocks_peak"] <= 200 and result["steps"] > 0 and result["peak_memory_mb"] > 50
    assert set(result["by_priority"]) == {"0", "1"} and result["by_priority"]["0"]["completed"] == 3
    assert result["request_goodput"] == pytest.approx(6 / result["duration"])
    assert 0 < result["mean_service_ttft_ms"] <= result["mean_ttft_ms"] <= result["mean_e2el_ms"]


def test_a_scenario_that_crunches_gives_the_ids_of_a_large_pool(run: Callable) -> None:
    crunch = ("--scenario", "kv-crunch", "--save-outputs")
    code, tight = run(*crunch, "--kv-blocks", "24")
    assert code == 0 and tight["completed"] == 12 and tight["preemptions"] > 0 and tight["recomputed_tokens"] > 0
    assert tight["kv_blocks_peak"] <= 24
    code, wide = run(*crunch, "--kv-blocks", "2000")
    assert code == 0 and wide["preemptions"] == 0
    assert tight["output_token_ids"] == wide["output_token_ids"]
    assert all(len(set(ids)) > 1 for ids in wide["output_token_ids"]), (
        "a model that always says the same proves nothing"
    )


def test_swap_and_recompute_give_the_same_ids_and_each_its_ledger(run: Callable) -> None:
    crunch = ("--scenario", "kv-crunch", "--save-outputs", "--kv-blocks", "24")
    code, swapped = run(*crunch, "--preemption", "swap", "--swap-blocks", "64")
    assert code == 0 and swapped["completed"] == 12
    assert swapped["swapped_blocks"] == swapped["swapped_in_blocks"] > 0
    moved = [entry for entry in swapped["preemption_ledger"] if entry["mode"] == "swap"]
    assert sum(entry["swapped_blocks"] for entry in moved) == swapped["swapped_blocks"]
    assert all(entry["bytes_moved"] % (2 * entry["swapped_blocks"]) == 0 for entry in moved), "out and back"
    assert all(entry["lost_seconds"] > 0 for entry in moved)
    code, recomputed = run(*crunch, "--preemption", "recompute")
    assert code == 0 and recomputed["swapped_blocks"] == 0 and recomputed["waste"]["recomputed"]["tokens"] > 0
    assert swapped["output_token_ids"] == recomputed["output_token_ids"]


def test_drafts_are_counted_and_change_nothing(run: Callable, tmp_path: Path, capsys) -> None:
    rows = [{"prompt": "the cat and the dog and the cat and the dog and the ", "output_tokens": 40}] * 3
    path = workload(tmp_path, *rows)
    code, plain = run("--workload", path, "--save-outputs")
    assert code == 0 and plain["acceptance_rate"] is None and "drafted" not in capsys.readouterr().out
    code, drafted = run("--workload", path, "--save-outputs", "--speculative", "ngram", "--draft-tokens", "3")
    assert code == 0 and drafted["output_token_ids"] == plain["output_token_ids"]
    assert drafted["draft_tokens"] >= drafted["accepted_tokens"] > 0 and drafted["steps"] < plain["steps"]
    rejected = drafted["draft_tokens"] - drafted["accepted_tokens"]
    assert drafted["waste"]["rejected_drafts"]["tokens"] == rejected
    assert "drafted / accepted tokens" in capsys.readouterr().out


def test_every_knob_of_the_engine_has_an_option_and_reaches_it() -> None:
    given = {
        "--swap-blocks": "7",
        "--speculative": "ngram",
        "--draft-tokens": "3",
        "--static-delivery": "row",
        "--waiting-served-ratio": "1.5",
        "--max-waiting-tokens": "9",
        "--user-weights": "ann=2,b=e=0.5",
        "--discipline": "static",
    }
    arguments = ["--scenario", "kv-crunch", *(part for pair in given.items() for part in pair)]
    parser = bench.build_parser()
    config = choose(parser, parser.parse_args(arguments), [None]).config
    assert config.cache.swap_blocks == 7
    scheduler = config.scheduler
    assert (scheduler.speculative, scheduler.draft_tokens, scheduler.static_delivery) == ("ngram", 3, "row")
    assert (scheduler.waiting_served_ratio, scheduler.max_waiting_tokens) == (1.5, 9)
    assert scheduler.user_weights == {"ann": 2.0, "b=e": 0.5} and scheduler.discipline == "static"
    options = {action.dest for action in parser._actions}
    assert set(EngineOptions.__struct_fields__) <= options


def test_the_scenario_gives_the_options_and_the_command_line_wins(model: str, tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    arguments = ["--model", model, "--threads", "1", "--token-budget", "64", "--json", str(target)]
    assert bench.main([*arguments, "--scenario", "kv-crunch"]) == 0
    assert json.loads(target.read_text())["kv_blocks_total"] == 32
    assert bench.main([*arguments, "--scenario", "kv-crunch", "--kv-blocks", "90", "--max-num-seqs", "3"]) == 0
    result = json.loads(target.read_text())
    assert (result["kv_blocks_total"], result["max_num_seqs"], result["workload"]) == (90, 3, "kv-crunch")


def test_open_and_closed_loop(run: Callable, tmp_path: Path) -> None:
    path = workload(tmp_path, *[{"prompt_tokens": 8, "output_tokens": 4}] * 8)
    _, closed = run("--workload", path, "--max-concurrency", "2")
    assert (closed["max_concurrent_requests"], closed["max_concurrency"], closed["request_rate"]) == (2, 2, "inf")
    _, opened = run("--workload", path, "--request-rate", "40", "--burstiness", "inf")
    assert (opened["request_rate"], opened["latency_from"]) == (40.0, "intended arrival")
    assert opened["duration"] >= 7 / 40
    assert opened["start_times"][-1] == pytest.approx(7 / 40, abs=0.15)
    _, ramped = run("--workload", path, "--ramp", "50:100:exponential", "--seed", "4")
    assert ramped["ramp"] == "50:100:exponential" and ramped["seed"] == 4


def test_warm_up_is_not_counted(run: Callable, tmp_path: Path) -> None:
    path = workload(tmp_path, *[{"prompt_tokens": 32, "output_tokens": 3}] * 3)
    code, result = run("--workload", path, "--warmup", "5")
    assert code == 0
    assert (result["completed"], result["total_input_tokens"], result["prefix_hit_tokens"]) == (3, 96, 0)
    assert result["prefix_query_tokens"] == 96, "totals of the warm-up are left out"


def test_failed_requests_are_counted_and_the_others_go_on(run: Callable, tmp_path: Path, capsys) -> None:
    rows = [
        {"prompt_tokens": 10, "output_tokens": 3},
        {"prompt_tokens": MAX_POSITION + 5, "output_tokens": 3},
        {"prompt_token_ids": [1, 2, 999_999], "output_tokens": 3},
        {"prompt_tokens": 10, "output_tokens": 3},
    ]
    code, result = run("--workload", workload(tmp_path, *rows), "--save-outputs")
    assert code == 1
    assert (result["completed"], result["failed"]) == (2, 2)
    assert result["errors"][0] == result["errors"][3] == ""
    assert f"{MAX_POSITION + 5:,}" in result["errors"][1] and "999999" in result["errors"][2].replace(",", "")
    assert result["output_token_ids"][1:3] == [[], []]
    assert "2 of 4 requests failed" in capsys.readouterr().err


def test_an_answer_ends_at_the_models_length(run: Callable, tmp_path: Path) -> None:
    code, result = run("--workload", workload(tmp_path, {"prompt_tokens": MAX_POSITION - 4, "output_tokens": 50}))
    assert code == 0 and result["output_lens"][0] <= 5


def test_one_token_answers_give_nulls(run: Callable, tmp_path: Path, capsys) -> None:
    code, result = run("--workload", workload(tmp_path, *[{"prompt": "abc", "output_tokens": 1}] * 2))
    assert code == 0 and result["mean_tpot_ms"] is None and result["p99_itl_ms"] is None
    out = capsys.readouterr()
    assert "n/a" in out.out and "TTFT" in out.out
    assert out.err == "", "no progress in a pipe"


def test_names_of_files_and_users_are_printed_as_they_are(run: Callable, tmp_path: Path, capsys) -> None:
    names = ["[/red]", "[bold]ann", ""]
    path = tmp_path / "[x] [b]load.jsonl"
    path.write_text("".join(json.dumps({"prompt_tokens": 3, "output_tokens": 1, "user": n}) + "\n" for n in names))
    code, result = run("--workload", str(path))
    table = capsys.readouterr().out
    assert code == 0 and set(result["by_user"]) == set(names)
    assert table.startswith("[x] [b]load · ") and "user [/red]" in table and "user [bold]ann" in table


# Usage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--workload FILE"),
        (["--scenario", "kv-crunh"], "no scenario is called 'kv-crunh'; give one of batch-curve, bus-and-metro"),
        (["--scenario", "/tmp"], "or the path of a .toml file"),
        (["--scenario", "kv-crunch", "--workload", "x"], "not allowed with"),
        (["--scenario", "kv-crunch", "--discipline", "lottery"], "lottery"),
        (["--scenario", "kv-crunch", "--kv-blocks", "0"], "kv_blocks is 0"),
        (["--scenario", "kv-crunch", "--block-size", "24"], "block_size is 24"),
        (["--scenario", "kv-crunch", "--watermark", "1"], "watermark is 1"),
        (["--scenario", "kv-crunch", "--request-rate", "0"], "request_rate is 0"),
        (["--scenario", "kv-crunch", "--request-rate", "1", "--ramp", "1:2:linear"], "exclude"),
        (["--scenario", "kv-crunch", "--prefix-cache", "maybe"], "maybe"),
        (["--scenario", "kv-crunch", "--goodput", "speed:3"], "speed"),
        (["--scenario", "kv-crunch", "--goodput", "ttft:inf"], "ttft is 'inf'; it must be milliseconds above 0"),
        (["--scenario", "kv-crunch", "--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--scenario", "kv-crunch", "--warmup", "-1"], "--warmup is -1; it must be 0 to 10,000"),
        (["--scenario", "kv-crunch", "--warmup", "9" * 20], f"--warmup is {'9' * 20}; it must be 0 to 10,000"),
        (["--scenario", "kv-crunch", "--json", "/"], "--json /: this is a folder"),
        (["--scenario", "kv-crunch", "--seed", "-1"], "--seed is -1"),
        (["--scenario", "kv-crunch", "--seed", "9" * 20], f"--seed is {'9' * 20}; it must be 0 to 4,294,967,295"),
        (["--scenario", "kv-crunch", "--swap-blocks", "-1"], "swap_blocks is -1"),
        (["--scenario", "kv-crunch", "--speculative", "oracle"], "speculative is 'oracle'"),
        (["--scenario", "kv-crunch", "--draft-tokens", "0"], "draft_tokens is 0"),
        (["--scenario", "kv-crunch", "--static-delivery", "bulk"], "bulk"),
        (["--scenario", "kv-crunch", "--waiting-served-ratio", "-1"], "waiting_served_ratio is -1"),
        (["--scenario", "kv-crunch", "--max-waiting-tokens", "-1"], "max_waiting_tokens is -1"),
        (["--scenario", "kv-crunch", "--user-weights", "ann"], "'ann' is not USER=WEIGHT"),
        (["--scenario", "kv-crunch", "--user-weights", "ann=x"], "'ann=x' is not USER=WEIGHT"),
        (["--scenario", "kv-crunch", "--user-weights", "a=1,a=2"], "user 'a' has two weights"),
        (["--scenario", "kv-crunch", "--user-weights", "a=0"], "the weight of user 'a' is 0"),
    ],
)
def test_wrong_usage_is_2_with_a_sentence_and_loads_nothing(
    arguments: list[str], words: str, capsys, monkeypatch
) -> None:
    monkeypatch.setattr(bench, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_a_bad_line_is_1_with_file_and_line(tmp_path: Path, capsys) -> None:
    path = workload(tmp_path, {"prompt_tokens": 3, "output_tokens": 1}, {"prompt_tokens": 3})
    assert bench.main(["--workload", path, "--json", "-"]) == 1
    out = capsys.readouterr()
    assert f"{path}, line 2" in out.err and out.out == ""


def test_a_model_that_is_not_there_is_1_with_a_sentence(tmp_path: Path, capsys) -> None:
    path = workload(tmp_path, {"prompt_tokens": 3, "output_tokens": 1})
    (tmp_path / "empty").mkdir()
    assert bench.main(["--workload", path, "--model", str(tmp_path / "empty"), "--json", "-"]) == 1
    out = capsys.readouterr()
    assert str(tmp_path / "empty") in out.err and "Traceback" not in out.err and out.out == ""


def test_a_result_that_cannot_be_written_is_shown_all_the_same(model: str, tmp_path: Path, capsys, monkeypatch) -> None:
    path = workload(tmp_path, {"prompt_tokens": 3, "output_tokens": 1})
    target = tmp_path / "folder" / "result.json"
    target.parent.mkdir()
    real = bench.load

    def load(config: EngineConfig, progress: bench_report.Progress) -> LoadedEngine:
        target.parent.rmdir()  # the place is lost while the run goes on
        return real(config, progress)

    monkeypatch.setattr(bench, "load", load)
    arguments = ["--model", model, "--threads", "1", "--kv-blocks", "200", "--workload", path]
    assert bench.main([*arguments, "--json", str(target)]) == 1
    out = capsys.readouterr()
    assert "output throughput" in out.out and "TTFT" in out.out
    assert out.err == f"batchscope bench: --json {target} cannot be written: No such file or directory\n"


@pytest.mark.parametrize(("unfinished", "said"), [(0, False), (3, True)])
def test_the_table_of_a_part_says_whose_figures_it_shows(
    run: Callable, tmp_path: Path, capsys, unfinished: int, said: bool
) -> None:
    _, result = run("--workload", workload(tmp_path, *[{"prompt_tokens": 3, "output_tokens": 2}] * 5))
    capsys.readouterr()
    part = result | {"completed": 5 - unfinished, "unfinished": unfinished}
    bench_report.print_table(part, sys.stdout)
    sentence = "Tokens and latencies are those of the 2 of 5 requests that completed."
    assert (sentence in capsys.readouterr().out) is said


def test_the_warm_up_has_a_bar_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, seen = Clock(), []
    progress = SimpleNamespace(
        warming_up=lambda run: seen.append(("warm-up", run.recorder.ended, len(run.prepared))),
        running=lambda run: seen.append(("run", run.recorder.ended, len(run.prepared))),
    )
    loaded = SimpleNamespace(
        core=FakeCore(clock, 0.01),
        codec=FakeCodec(),
        info=SimpleNamespace(vocab_size=100, max_model_len=50, kv_bytes_per_block=64),
    )
    load = Workload("x", tuple(WorkloadRequest(1, prompt_tokens=4) for _ in range(2)))
    monkeypatch.setattr(bench, "_engine_facts", lambda *_: {})  # of a model, and here is none
    bench.run_bench(loaded, load, EngineConfig(), warm_up=3, progress=progress)
    assert ("warm-up", 3, 3) in seen and ("run", 2, 2) in seen
    assert seen.index(("warm-up", 3, 3)) < seen.index(("run", 2, 2))


# The process ---------------------------------------------------------------------------------------------------------


def command(model: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "engine.bench", "--model", model, "--threads", "1", *arguments]


def test_json_alone_is_on_standard_output(model: str, tmp_path: Path) -> None:
    path = workload(tmp_path, {"prompt_tokens": 3, "output_tokens": 2})
    done = subprocess.run(command(model, "--workload", path, "--json", "-"), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout, parse_constant=_no_constant)["completed"] == 1
    assert done.stderr == b""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_gives_what_completed_and_1(model: str, tmp_path: Path) -> None:
    rows = [{"prompt_tokens": 3, "output_tokens": 2}, {"prompt_tokens": 3, "output_tokens": 2, "arrival_s": 600.0}]
    target = tmp_path / "r.json"
    ready = tmp_path / "ready"
    # The child says when its run has begun, in the place of a progress bar.
    program = (
        "import sys, pathlib; from engine import bench, bench_report\n"
        f"bench_report.Progress.running = lambda self, run: pathlib.Path({str(ready)!r}).touch()\n"
        "sys.exit(bench.main(sys.argv[1:]))"
    )
    arguments = command(model, "--workload", workload(tmp_path, *rows), "--json", str(target))[3:]
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 120
        while not ready.exists() and time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 1
    result = json.loads(target.read_text())
    assert (result["completed"], result["unfinished"], result["interrupted"]) == (1, 1, True)
    assert b"interrupted; 1 of 2" in err and b"Traceback" not in err


# The run itself, by a clock that the test moves ----------------------------------------------------------------------


def test_idle_waits_sleep_until_the_next_arrival() -> None:
    clock, slept = Clock(), []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock.sleep(seconds)

    load = Workload("x", tuple(WorkloadRequest(1, prompt_tokens=4, arrival_s=t) for t in (0.0, 30.0)))
    run = WorkloadRun(FakeCore(clock, 0.5), prepare(load, FakeCodec(), 100, 50), clock, sleep, None, True)
    run.run()
    assert run.elapsed == pytest.approx(30.5)
    assert sum(slept) == pytest.approx(29.5) and max(slept) <= 0.1


def test_a_step_that_fails_keeps_what_completed() -> None:
    clock = Clock()
    core = FakeCore(clock, 0.5, dies_at_step=3)
    load = Workload("x", tuple(WorkloadRequest(1, prompt_tokens=4) for _ in range(4)))
    run = WorkloadRun(core, prepare(load, FakeCodec(), 100, 50), clock, clock.sleep)
    with pytest.raises(RuntimeError, match="on fire"):
        run.run()
    assert sum(t.completed for t in run.recorder.timelines) == 2
    assert run.elapsed == pytest.approx(1.0)


@pytest.mark.parametrize("warm_up, seconds_ago", [(0, 7.5), (1, 15.5), (2, 23.5)])
def test_the_first_token_of_all_may_be_the_warm_ups(
    warm_up: int, seconds_ago: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request takes 8 s, its first token 0.5 of them; the clock does not move by itself."""
    clock = Clock()
    monkeypatch.setattr(bench, "time", SimpleNamespace(perf_counter=clock, sleep=clock.sleep))
    loaded = FakeLoaded(lambda scheduler: FakeCore(clock, 8.0), core=FakeCore(clock, 8.0))
    load = Workload("x", (WorkloadRequest(16, prompt_tokens=4),))
    result = bench.run_bench(loaded, load, EngineConfig(), warm_up=warm_up)
    assert time.time() - result["first_token_at"] == pytest.approx(seconds_ago, abs=0.4)


def test_a_warm_up_that_fails_is_a_sentence() -> None:
    loaded = SimpleNamespace(
        core=FakeCore(Clock(), 0.5, dies_at_step=1),
        codec=FakeCodec(),
        info=SimpleNamespace(vocab_size=100, max_model_len=50, kv_bytes_per_block=64),
    )
    load = Workload("x", (WorkloadRequest(1, prompt_tokens=4),))
    with pytest.raises(bench.BenchFailure, match=r"warm-up failed: A step failed .*on fire"):
        bench.run_bench(loaded, load, EngineConfig(), warm_up=1)


def test_an_engine_that_forgets_a_request_is_caught() -> None:
    clock = Clock()
    core = FakeCore(clock, 0.5)
    core.add_request = lambda *_, **__: None  # type: ignore[method-assign]
    load = Workload("x", (WorkloadRequest(1, prompt_tokens=4),))
    with pytest.raises(RuntimeError, match="1 requests are unanswered"):
        WorkloadRun(core, prepare(load, FakeCodec(), 100, 50), clock, clock.sleep).run()


def test_prompts_are_made_ordinary_and_never_absurdly_long() -> None:
    class Refusing(FakeCodec):
        def encode(self, text: str) -> list[int]:
            raise ValueError("no tokens")

    load = Workload(
        "x",
        (
            WorkloadRequest(1, prompt_tokens=2_000),
            WorkloadRequest(1, prompt_tokens=10**12),
            WorkloadRequest(1, prompt="hm"),
        ),
    )
    made, absurd, refused = prepare(load, Refusing(), 50, 4_000)
    assert len(made.prompt_token_ids) == 2_000 and set(made.prompt_token_ids) == set(range(2, 50))
    assert "1,000,000,000,000" in absurd.refusal and "4,000" in absurd.refusal
    assert refused.refusal == "no tokens"
    warm = warm_up_requests([made, absurd], 3, FakeCodec(), 50)
    assert [len(p.prompt_token_ids) for p in warm] == [2_000] * 3
    assert made.prompt_token_ids not in [p.prompt_token_ids for p in warm]
    assert warm_up_requests([absurd], 2, FakeCodec(), 50) == []


def test_counters_are_fed() -> None:
    clock = Clock()
    core = FakeCore(clock, 0.5)
    counters = StepCounters(core.keyframe().totals, num_blocks=100, block_size=16, max_num_seqs=1)
    load = Workload("x", tuple(WorkloadRequest(2, prompt_tokens=4) for _ in range(2)))
    WorkloadRun(core, prepare(load, FakeCodec(), 100, 50), clock, clock.sleep, counters=counters).run()
    summary = counters.summary()
    assert (summary["steps"], summary["kv_blocks_peak"], summary["slot_utilisation"]) == (4, 1, 1.0)


# Traces --------------------------------------------------------------------------------------------------------------


def test_a_trace_runs_and_its_rows_are_counted(run: Callable, tmp_path: Path, capsys) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        f"5,ChatGPT,20,4,24,API log\n5.4,ChatGPT,{MAX_POSITION + 40},6,0,API log\n5.4,ChatGPT,20,0,20,API log\n"
        "6,ChatGPT,20,4,24,API log\n"
    )
    code, result = run("--workload", str(path), "--time-scale", "4", "--limit", "3")
    assert code == 0 and (result["completed"], result["failed"]) == (2, 0)
    assert (result["rows_read"], result["rows_clipped"], result["rows_rejected"]) == (3, 1, 1)
    assert result["rejections"] == {"0 response tokens: the request failed": 1}
    assert result["input_lens"] == [20, MAX_POSITION - 6] and result["output_lens"] == [4, 6]
    assert result["start_times"][1] == pytest.approx(0.1, abs=0.1) and result["latency_from"] == "intended arrival"
    out = capsys.readouterr()
    assert "burst: 3 rows of BurstGPT csv, 1 rejected (1 × 0 response tokens: the request failed)" in out.err
    assert f"1 requests were clipped to the model's context of {MAX_POSITION:,} tokens" in out.err
    assert "rows of the file read / clipped / rejected" in out.out


def test_drawn_workloads_have_no_rows(run: Callable, tmp_path: Path, capsys) -> None:
    _, result = run("--scenario", "bus-and-metro")
    assert result["rows_read"] is result["rows_clipped"] is result["rejections"] is None
    _, result = run("--workload", workload(tmp_path, {"prompt_tokens": 4, "output_tokens": 2}))
    assert (result["rows_read"], result["rows_rejected"], result["rejections"]) == (1, 0, {})
    assert capsys.readouterr().err == "", "of a file of ours nothing is left out, so nothing is said"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "kv-crunch", "--limit", "5"], "--time-scale and --limit go with --workload"),
        (["--workload", "FILE", "--limit", "0"], "limit is 0"),
        (["--workload", "FILE", "--time-scale", "-1"], "time_scale is -1"),
    ],
)
def test_wrong_options_of_a_trace(arguments: list[str], words: str, tmp_path: Path, capsys) -> None:
    path = workload(tmp_path, {"prompt_tokens": 4, "output_tokens": 2})
    with pytest.raises(SystemExit) as caught:
        bench.main([path if a == "FILE" else a for a in arguments])
    assert caught.value.code == 2 and words in capsys.readouterr().err
