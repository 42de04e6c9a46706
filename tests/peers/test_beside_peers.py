"""The comparison with other engines, on engines that are scripts: what is measured, and what is said when one fails."""

from __future__ import annotations

import json
import signal
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize

from engine.bench_run import prepare
from engine.text.codec import TextCodec
from engine.workload import WorkloadError, load_workload
from tests import beside_peers
from tests.models.tiny_gguf import write_tiny_gguf
from tests.peers.cases import Case, CaseMaker
from tests.peers.figures import OF_A_LOAD, Outcome, Ratio, figures, medians, ratios
from tests.peers.requantise import requantise
from tests.peers.runs import Batchscope, Peer, watch
from tests.process.tiny_model import make_tiny_model


def case_of(*output_tokens: int, alone: bool = False) -> Case:
    rows = [{"prompt_token_ids": [1, 2, 3], "output_tokens": n} for n in output_tokens]
    return Case("made up", rows, {"prompt_token_ids": [4, 5, 6], "output_tokens": 2}, 2, alone)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


# Figures -------------------------------------------------------------------------------------------------------------


def test_figures_count_from_when_all_were_there() -> None:
    found = figures(case_of(3, 2), Outcome({0: [1.0, 1.25, 1.75], 1: [3.0, 4.0]}, 2.5, 800.0))
    assert found["output_throughput"] == pytest.approx(5 / 4)
    assert (found["mean_ttft_ms"], found["p99_ttft_ms"]) == pytest.approx((2000, 2980))
    assert (found["p50_itl_ms"], found["mean_tpot_ms"]) == pytest.approx((500, (375 + 1000) / 2))
    assert found["mean_e2el_ms"] == pytest.approx(2875)
    assert found["decode_throughput"] == pytest.approx(1e3 / 687.5)
    assert (found["start_s"], found["peak_memory_mb"]) == (2.5, 800.0)
    assert all(column.key in found for column in OF_A_LOAD)


def test_requests_alone_count_from_the_end_of_the_one_before() -> None:
    found = figures(case_of(1, 1, 1, alone=True), Outcome({2: [0.9], 0: [0.2], 1: [0.5]}))
    assert (found["p50_ttft_ms"], found["mean_ttft_ms"]) == pytest.approx((300, 300))
    assert found["decode_throughput"] is None and found["p50_itl_ms"] is None


def test_medians_are_over_the_rounds_that_have_the_figure() -> None:
    rounds = [{"a": 1.0, "b": None}, {"a": 5.0, "b": None}, {"a": 2.0, "b": None, "c": 7.0}]
    assert medians(rounds) == {"a": 2.0, "b": None, "c": 7.0}
    assert medians([]) == {}


def test_the_best_peer_is_the_fastest_or_the_least() -> None:
    ours = {"output_throughput": 600.0, "p99_itl_ms": 100.0, "start_s": None, "peak_memory_mb": 900.0}
    peers = {
        "x": {"output_throughput": 300.0, "p99_itl_ms": 50.0, "start_s": 1.0, "peak_memory_mb": None},
        "y": {"output_throughput": 200.0, "p99_itl_ms": 200.0, "start_s": 1.0, "peak_memory_mb": None},
        "failed": {},
    }
    assert ratios(OF_A_LOAD, ours, peers) == {"output_throughput": Ratio(2.0, "x"), "p99_itl_ms": Ratio(2.0, "x")}


# Cases ---------------------------------------------------------------------------------------------------------------


def write(path: Path, *rows: dict) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_case_has_the_ids_that_bench_would_make(model: Path, tmp_path: Path) -> None:
    path = write(
        tmp_path / "load.jsonl",
        {"prompt_tokens": 30, "output_tokens": 5, "max_tokens": 50},
        {"prompt_token_ids": [7, 8], "output_tokens": 300},
    )
    case = CaseMaker(model).from_file(path, 32)
    codec = TextCodec.from_folder(model)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    expected = [p.prompt_token_ids for p in prepare(load_workload(path), codec, vocab_size, 1000)]
    assert [row["prompt_token_ids"] for row in case.rows] == expected
    assert [row["output_tokens"] for row in case.rows] == [5, 300]
    assert (case.max_concurrency, case.max_model_len) == (2, 512)
    assert len(case.warm_up["prompt_token_ids"]) == 30 and case.warm_up["prompt_token_ids"] != expected[0]
    assert load_workload(case.write(tmp_path / "again.jsonl")).requests[1].prompt_token_ids == (7, 8)


def test_no_two_prompts_alone_are_equal(model: Path) -> None:
    case = CaseMaker(model).prompt_alone(50, 4)
    prompts = [row["prompt_token_ids"] for row in (*case.rows, case.warm_up)]
    assert [len(ids) for ids in prompts] == [50] * 5
    assert len({tuple(ids[:8]) for ids in prompts}) == 5, "a block of a prefix cache would be shared"
    assert case.alone and case.max_concurrency == 1


@pytest.mark.parametrize("row", [{"prompt": "text"}, {"prompt_tokens": 3, "arrival_s": 1.0}])
def test_what_peers_cannot_be_given_is_refused(model: Path, tmp_path: Path, row: dict) -> None:
    with pytest.raises(WorkloadError, match="beside peers"):
        CaseMaker(model).from_file(write(tmp_path / "load.jsonl", {**row, "output_tokens": 2}), 32)


# Runs ----------------------------------------------------------------------------------------------------------------

FAKE_ENGINE = """
import os, pathlib, subprocess, time
def start(job):
    {start}
    def run(rows, done):
        for i, row in enumerate(rows):
            {each}
            done(i, [time.perf_counter()] * row["output_tokens"])
    return "1.2.3", run
"""


def fake_peer(folder: Path, *, start: str = "pass", each: str = "pass") -> Peer:
    """A peer whose engine is the template above, and whose environment is this one with the engine in it."""
    (folder / "on_fake.py").write_text(FAKE_ENGINE.format(start=start, each=each))
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return Peer("Fake", "on_fake", str(python), folder / "model.gguf", "Q9")


def test_a_peer_is_measured_from_its_start(tmp_path: Path) -> None:
    peer = fake_peer(tmp_path, start="time.sleep(0.5)", each="time.sleep(0.1)")
    outcome = peer.run(case_of(3, 2), 1, 60.0)
    assert outcome.failure == "" and outcome.facts == {"version": "1.2.3"}
    assert outcome.start_s > 0.6 and outcome.peak_memory_mb > 5
    assert {i: len(times) for i, times in outcome.token_times.items()} == {0: 3, 1: 2}
    assert 0.1 <= outcome.token_times[0][0] < outcome.token_times[1][0] and outcome.token_times[1][0] >= 0.2
    assert peer.label == "Fake Q9"


FAILING_AT_THE_SECOND = 'if i == 1: raise RuntimeError("no room [left]")'


@pytest.mark.parametrize(
    "start, each, words",
    [
        ("import no_such_engine", "pass", "exit code 1: ModuleNotFoundError: No module named 'no_such_engine'"),
        ("os.kill(os.getpid(), 9)", "pass", "killed by SIGKILL"),
        ("pass", FAILING_AT_THE_SECOND, "no room [left]; 1 of 2 requests had completed, 3 tokens"),
        ("pass", "i == 1 and os._exit(0)", "it ended early; 1 of 2 requests had completed, 3 tokens"),
        ("pass", "row['output_tokens'] += i", "request 2 was given 3 tokens where 2 were asked; 2 of 2"),
    ],
)
def test_a_peer_that_fails_says_why_and_how_far_it_came(tmp_path: Path, start: str, each: str, words: str) -> None:
    assert words in fake_peer(tmp_path, start=start, each=each).run(case_of(3, 2), 1, 60.0).failure


def test_a_peer_that_is_not_there_says_so(tmp_path: Path) -> None:
    outcome = Peer("X", "on_x", str(tmp_path / "python"), tmp_path, "").run(case_of(1), 1, 60.0)
    assert outcome.failure == f"{tmp_path / 'python'} cannot be started: No such file or directory"


def test_a_run_that_takes_too_long_is_ended_with_all_it_started(tmp_path: Path) -> None:
    note = tmp_path / "child"
    child = "subprocess.Popen(['sleep', '600']).pid"
    hang = f"if i == 1: pathlib.Path({str(note)!r}).write_text(str({child})); time.sleep(600)"
    began = time.monotonic()
    outcome = fake_peer(tmp_path, each=hang).run(case_of(3, 2), 1, 5.0)
    assert time.monotonic() - began < 20
    assert outcome.failure == "timed out after 5 s; 1 of 2 requests had completed, 3 tokens"
    deadline = time.monotonic() + 10
    while _runs(int(note.read_text())):
        assert time.monotonic() < deadline, "its child goes on"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_process_that_is_asked_to_stop_has_time_to_tell(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import pathlib, time
        try:
            time.sleep(600)
        except KeyboardInterrupt:
            time.sleep(0.5)
            pathlib.Path("told").touch()
    """)
    ended = watch([sys.executable, "-c", program], {}, 2.0, tmp_path, stop=signal.SIGINT)
    assert ended.failure == "timed out after 2 s" and (tmp_path / "told").exists()


def test_ours_is_bench_in_a_process_of_its_own(model: Path) -> None:
    case = CaseMaker(model)._case("tiny", [{"prompt_token_ids": [5, 6, 7], "output_tokens": n} for n in (4, 3, 1)], 2)
    outcome = Batchscope("float32", model).run(case, 1, 240.0)
    assert outcome.failure == "" and outcome.facts["dtype"] == "float32"
    assert {i: len(times) for i, times in outcome.token_times.items()} == {0: 4, 1: 3, 2: 1}
    assert outcome.token_times[2][0] > outcome.token_times[1][-1], "it had to wait, and that counts"
    assert 0.1 < outcome.start_s < 240 and outcome.peak_memory_mb > 50


def test_ours_that_fails_says_why(tmp_path: Path) -> None:
    assert "exit code 1: batchscope bench: " in Batchscope("float32", tmp_path).run(case_of(1), 1, 240.0).failure


# The command ---------------------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    label: str
    ours: bool
    script: list[Outcome | type[BaseException]]
    runs: list[str] = field(default_factory=list)

    def run(self, case: Case, threads: int, timeout: float) -> Outcome:
        self.runs.append(case.name)
        step = self.script.pop(0)
        if isinstance(step, Outcome):
            return step
        raise step


def one_request(seconds: float) -> Outcome:
    return Outcome({0: [seconds / 2, seconds]}, 1.0, 100.0)


@pytest.fixture
def command(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs the command over ``subjects`` on a workload of one request of two tokens; gives exit code and JSON."""
    path = write(tmp_path / "one.jsonl", {"prompt_tokens": 4, "output_tokens": 2})

    def run(*subjects: Scripted) -> tuple[int, dict]:
        monkeypatch.setattr(beside_peers, "subjects_of", lambda *_: list(subjects))
        target = tmp_path / "beside.json"
        options = ["--workload", path, "--model", str(model), "--rounds", "3", "--json", str(target)]
        return beside_peers.main(options), json.loads(target.read_text())

    return run


def test_engines_take_turns_and_a_failing_peer_is_a_row(command, capsys) -> None:
    ours = Scripted("Batchscope int8", True, [one_request(s) for s in (1.0, 0.5, 2.0)])
    fast = Scripted("Fast Q4", False, [one_request(2.0), Outcome(failure="out of memory"), one_request(4.0)])
    gone = Scripted("Gone Q4", False, [Outcome(failure="No module named 'gone'")])
    code, result = command(ours, fast, gone)
    assert code == 0 and (len(ours.runs), len(fast.runs), len(gone.runs)) == (3, 3, 1)
    (case,) = result["cases"]
    rows = {row["engine"]: row for row in case["engines"]}
    assert [r["output_throughput"] for r in rows["Batchscope int8"]["rounds"]] == [2.0, 4.0, 1.0]
    assert rows["Fast Q4"]["medians"]["output_throughput"] == pytest.approx(0.75)
    assert rows["Gone Q4"]["failures"] == ["No module named 'gone'"] and rows["Gone Q4"]["medians"] == {}
    assert case["ratios"]["Batchscope int8"]["output_throughput"] == {
        "ratio": pytest.approx(2 / 0.75),
        "best_peer": "Fast Q4",
    }
    lines = capsys.readouterr().out.splitlines()
    order = [line.split(", ")[2].partition(":")[0] for line in lines if line.startswith("round")]
    assert order[:4] == ["Batchscope int8", "Fast Q4", "Gone Q4", "Batchscope int8"]
    assert (
        "Fast Q4: 1 of 3 failed: out of memory" in lines and "Gone Q4: 1 of 1 failed: No module named 'gone'" in lines
    )
    assert any("2.67×" in line for line in lines)


def test_what_was_measured_before_an_interruption_is_kept(command, capsys) -> None:
    ours = Scripted("Batchscope int8", True, [one_request(1.0), KeyboardInterrupt])
    code, result = command(ours)
    assert code == 1 and len(result["cases"][0]["engines"][0]["rounds"]) == 1
    captured = capsys.readouterr()
    assert "interrupted" in captured.err and "one: 1 requests" in captured.out


def test_a_failure_of_ours_is_1(command) -> None:
    code, _ = command(Scripted("Batchscope int8", True, [one_request(1.0), Outcome(failure="x"), one_request(1.0)]))
    assert code == 1


@pytest.mark.parametrize(
    "options, words",
    [
        ([], "nothing to run"),
        (["--ttft-prompt", "0"], "--ttft-prompt is 0"),
        (["--ttft-prompt", "8", "--dtypes", "int3"], "'int3' is none of"),
        (["--ttft-prompt", "8", "--gguf", "/nowhere/x.gguf"], "there is no such file"),
        (["--ttft-prompt", "8", "--json", "/nowhere/x"], "no folder"),
    ],
)
def test_wrong_usage_is_2(options: list[str], words: str, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        beside_peers.main(options)
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_each_peer_runs_with_the_files_it_reads(tmp_path: Path) -> None:
    files = [tmp_path / "Model-1B.Q4_1.gguf", tmp_path / "Model-1B-Q8_0.gguf"]
    options = ["--ttft-prompt", "8", "--dtypes", "int8,bfloat16", "--llamacpp", "a", "--vllm", "b"]
    options += [word for file in files for word in ("--gguf", str(file))]
    args = beside_peers.build_parser().parse_args(options)
    subjects = beside_peers.subjects_of(args, tmp_path, None)
    labels = ["Batchscope int8", "Batchscope bfloat16", "llama.cpp Q4_1", "llama.cpp Q8_0", "vLLM bfloat16"]
    assert [subject.label for subject in subjects] == labels
    assert [subject.model for subject in subjects[2:]] == [*files, tmp_path]


def test_requantised_weights_are_the_same_but_for_their_rounding(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.Q4_1.gguf")
    requantise(tmp_path / "tiny.Q4_1.gguf", tmp_path / "tiny.Q8_0.gguf")
    before, after = (GGUFReader(tmp_path / f"tiny.{kind}.gguf") for kind in ("Q4_1", "Q8_0"))
    changed = {"GGUF.kv_count", "general.file_type"}  # the tiny file does not tell its type
    assert set(before.fields) | changed == set(after.fields)
    for name in set(before.fields) - changed:
        assert before.fields[name].contents() == after.fields[name].contents(), name
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, list(old.shape)) == (new.name, list(new.shape))
        assert new.tensor_type.name == ("F32" if old.tensor_type.name == "F32" else "Q8_0")
        weights, rounded = (dequantize(t.data, t.tensor_type).reshape(-1, 32) for t in (old, new))
        step = abs(weights).max(axis=1, keepdims=True) / 127
        # Half a step of rounding, and the scale is a float16: 127 · 2^-11 of a step more at the largest weight.
        assert (abs(weights - rounded) <= (0.5 + 127 * 2**-11) * step + 1e-6).all(), old.name
