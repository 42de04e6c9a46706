"""A recorded run told as a benchmark and run again as a workload."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import bench, run_writer
from engine.bench_record import RunRecording
from engine.bench_run import WorkloadRun, prepare
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.events import Arrived, Keyframe
from engine.metrics import RunRecorder, summarise
from engine.recorded_run import recorded_result, recorded_workload, shared_prefixes
from engine.recording import RecordingError, RunHeader, RunReader, RunWriter
from engine.request import SamplingParams
from engine.step_counters import StepCounters
from engine.workload import Workload, WorkloadRequest
from tests.load.fake_engine import FakeCodec
from tests.oracles import EngineProbe
from tests.process.tiny_model import make_tiny_model
from tests.recording.runs import KNOBS, TimedRunner, record_run, timed_core


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "SEGMENT_STEPS", 12)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


WORKLOAD = Workload(
    "twelve",
    tuple(
        WorkloadRequest(
            output_tokens=8 + 5 * (i % 4),
            prompt_tokens=40 + 11 * (i % 5),
            max_tokens=40,
            arrival_s=0.07 * i,
            priority=i % 2,
            user=("ann", "ben")[i % 3 == 0],
            seed=i,
            prefix=((32, 900 + i % 2),),
        )
        for i in range(12)
    ),
)


def run_workload(
    core: EngineCore, workload: Workload, recording: RunRecording | None = None
) -> tuple[dict, RunRecorder]:
    """The workload on a core of make-believe time; the figures as ``bench`` gives them."""
    runner = core._runner
    assert isinstance(runner, TimedRunner)

    def sleep(seconds: float) -> None:
        runner.now += max(seconds, 1e-9)

    begun = core.keyframe()
    counters = StepCounters(
        begun.totals, num_blocks=begun.num_blocks, block_size=begun.block_size, max_num_seqs=begun.max_num_seqs
    )
    used = core
    if recording is not None:
        given = {"config": EngineConfig(), "info": None, "workload": workload.name}
        used = recording.of(core, lambda ids: " ".join(map(str, ids)), **given)
    prepared = prepare(workload, FakeCodec(), 1000, 4096)
    run = WorkloadRun(
        used,
        prepared,
        lambda: runner.now,
        sleep,
        workload.arrivals.max_concurrency,
        workload.open_loop,
        counters=counters,
    )
    recorder = run.run()
    if recording is not None:
        recording.close()
    return summarise(recorder.timelines, workload, elapsed=run.elapsed) | counters.summary(), recorder


def approximately(value):
    """The same up to rounding: the engine's clock is not the run's."""
    if isinstance(value, dict):
        return {key: approximately(item) for key, item in value.items()}
    if isinstance(value, list):
        return [approximately(item) for item in value]
    return pytest.approx(value, abs=1e-6) if isinstance(value, float) else value


UNKNOWN = {"rows_read", "rows_clipped", "rows_rejected", "rejections", "start_times", "max_concurrent_requests"}
"""What is of the file that the workload came from, or of when the client got round to sending."""


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_recording_tells_what_the_benchmark_told(knobs: str, path: Path) -> None:
    core = timed_core(**KNOBS[knobs])
    told, _ = run_workload(core, WORKLOAD, RunRecording(path))
    found = recorded_result(RunReader(path))
    assert told["completed"] == 12
    for key in told.keys() - UNKNOWN:
        assert found[key] == approximately(told[key]), key
    assert found["variant"] == "recorded" and found["workload"] == "twelve" and not found["interrupted"]
    assert found["discipline"] == core.keyframe().discipline == found["knobs"]["discipline"]
    json.dumps(found, allow_nan=False)


def test_the_timeline_of_a_recording_is_that_of_a_comparison(path: Path) -> None:
    run_workload(timed_core(), WORKLOAD, RunRecording(path))
    timeline = recorded_result(RunReader(path))["timeline"]
    assert [lane["request"] for lane in timeline] == list(range(1, 13))
    for lane, asked in zip(timeline, WORKLOAD.requests, strict=True):
        assert (lane["priority"], lane["user"], lane["reason"]) == (asked.priority, asked.user, "length")
        assert lane["arrival"] == pytest.approx(asked.arrival_s, abs=1e-4)
        spans = lane["spans"]
        assert spans[0][1] == pytest.approx(lane["arrival"]) and spans[-1][2] == pytest.approx(lane["end"], abs=1e-4)
        assert all(a[2] == pytest.approx(b[1], abs=1e-4) for a, b in itertools.pairwise(spans))


def test_run_again_a_recording_gives_the_same_run(path: Path) -> None:
    told, first = run_workload(timed_core(num_blocks=17), WORKLOAD, RunRecording(path))
    assert told["prefix_hit_tokens"] > 0 and told["preemptions"] > 0
    again = recorded_workload(RunReader(path))
    assert again.name == "twelve"
    for request, asked in zip(again.requests, WORKLOAD.requests, strict=True):
        for name in ("output_tokens", "prompt_tokens", "max_tokens", "priority", "user"):
            assert getattr(request, name) == getattr(asked, name)
        assert request.arrival_s == pytest.approx(asked.arrival_s)
    retold, second = run_workload(timed_core(num_blocks=17), again)
    for key in ("steps", "prefix_hit_tokens", "preemptions", "computed_tokens", "mean_ttft_ms", "p99_e2el_ms"):
        assert retold[key] == pytest.approx(told[key]), key
    for one, other in zip(first.timelines, second.timelines, strict=True):
        assert one.token_times == pytest.approx(other.token_times)


def test_from_a_step_on_the_living_come_at_once_and_the_later_ones_at_their_time(path: Path) -> None:
    _, recorder = run_workload(timed_core(), WORKLOAD, RunRecording(path))
    reader = RunReader(path)
    step = reader.step_at(recorder.start + 0.42)
    state, cut = reader.state_at(step), reader.end_of(step)
    alive = sorted(state.requests)
    assert 1 <= len(alive) < 9 and 1 not in alive
    later = [a.request_id for r in reader.records(step + 1, 10**6) for a in r.events if isinstance(a, Arrived)]
    forked = recorded_workload(reader, step)
    assert len(forked.requests) == len(alive) + len(later)
    for request_id, request in zip(alive + later, forked.requests, strict=True):
        asked = WORKLOAD.requests[request_id - 1]
        assert (request.prompt_tokens, request.output_tokens) == (asked.prompt_tokens, asked.output_tokens)
        expected = max(recorder.start + asked.arrival_s - cut, 0.0)
        assert request.arrival_s == (0.0 if request_id in alive else pytest.approx(expected))
    result = recorded_result(reader, step)
    assert result["num_prompts"] == len(forked.requests) == result["completed"]
    assert [lane["user"] for lane in result["timeline"]] == [request.user for request in forked.requests]
    assert all(lane["arrival"] == 0 for lane in result["timeline"][: len(alive)])
    assert min(span[1] for lane in result["timeline"] for span in lane["spans"]) == 0
    given = sum(sum(r.new_tokens) for r in reader.records(step + 1, 10**6))
    assert result["total_output_tokens"] == given and result["steps"] == reader.last_step - step
    assert result["duration"] == pytest.approx(reader.end_of(reader.last_step) - cut)
    assert max(t for t in result["ttfts"] if t is not None) == pytest.approx(
        max(t.ttft(t.scheduled) for t in recorder.timelines if t.finished > cut - recorder.start)
    ), "latencies count from the real arrival"
    assert result["kv_blocks_peak"] <= 24 and result["kv_blocks_peak"] >= state.referenced_blocks
    for timeline, fork in zip(result["timeline"], recorded_result(reader, step)["timeline"], strict=True):
        assert timeline == fork


def test_random_runs_of_every_kind_can_be_told_and_run_again(path: Path) -> None:
    """Refused and aborted requests, several answers to a prompt, and a recording that began in the middle."""
    for seed in range(3):
        records = record_run(path, timed_core(), seed=seed, keyframe=seed != 1)
        reader = RunReader(path)
        result = recorded_result(reader)
        assert result["num_prompts"] >= 20 and result["failed"] >= 0
        assert result["completed"] + result["failed"] + result["unfinished"] == result["num_prompts"]
        workload = recorded_workload(reader)
        assert len(workload.requests) == result["num_prompts"] - sum(not n for n in result["input_lens"])
        assert [r.prompt_tokens for r in workload.requests] == [n for n in result["input_lens"] if n]
        told, _ = run_workload(timed_core(), workload)
        assert told["completed"] == len(workload.requests)
        for step in (records[9].step, records[-2].step):
            cut = recorded_workload(reader, step)
            assert recorded_result(reader, step)["input_lens"][: len(cut.requests)] == [
                r.prompt_tokens for r in cut.requests
            ]


def test_a_recording_that_ends_in_the_middle_has_unfinished_requests(path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    for i in range(4):
        probe.add(range(20 + i), SamplingParams(max_tokens=30))
    for _ in range(9):
        record = probe.step().record
        assert record is not None
        writer.add(record, core.keyframe)
    writer.flush()
    reader = RunReader(path)
    result = recorded_result(reader)
    assert (result["unfinished"], result["completed"], result["interrupted"]) == (4, 0, True)
    assert result["mean_ttft_ms"] is None and result["output_throughput"] == 0
    outputs = [row.output_tokens for row in reader.state_at(reader.last_step).requests.values()]
    assert [r.output_tokens for r in recorded_workload(reader).requests] == outputs
    assert all(lane["end"] is None for lane in result["timeline"])


def test_damaged_steps_leave_a_gap_and_no_nonsense(path: Path) -> None:
    run_workload(timed_core(), WORKLOAD, RunRecording(path))
    whole = recorded_result(RunReader(path))
    data = bytearray(path.read_bytes())
    index = RunReader(path)._index
    data[index.offsets[15] + 60] ^= 0xFF
    path.write_bytes(data)
    reader = RunReader(path)
    parts = list(reader.replay())
    assert sum(isinstance(part, Keyframe) for part in parts) == 2
    result = recorded_result(reader)
    assert result["num_prompts"] <= whole["num_prompts"] and result["steps"] < whole["steps"]
    assert result["completed"] > 6
    assert all(n >= 0 for n in result["output_lens"])
    assert len(recorded_workload(reader).requests) == result["num_prompts"]


def test_a_changed_priority_counts_from_where_the_run_is_cut(path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    request_id = probe.add(range(20), SamplingParams(max_tokens=12))
    for step in range(1, 12):
        if step in (4, 9):
            core.set_priority(request_id, step)
        record = probe.step().record
        assert record is not None
        writer.add(record, core.keyframe)
    writer.close()
    reader = RunReader(path)
    assert [recorded_workload(reader, step).requests[0].priority for step in (3, 6, 10)] == [0, 4, 9]


def test_nothing_to_run_again_is_said(path: Path) -> None:
    RunWriter(path, RunHeader()).close()
    with pytest.raises(RecordingError, match="no whole step"):
        recorded_workload(RunReader(path))
    core = timed_core()
    RunWriter(path, RunHeader(), keyframe=core.keyframe()).close()
    with pytest.raises(RecordingError, match="no request: there is nothing to run again"):
        recorded_workload(RunReader(path))
    assert recorded_result(RunReader(path))["num_prompts"] == 0
    run_workload(timed_core(), WORKLOAD, RunRecording(path))
    reader = RunReader(path)
    with pytest.raises(RecordingError, match=r"no request alive at step \d+ or after it"):
        recorded_workload(reader, reader.last_step)
    with pytest.raises(RecordingError, match="has no step 9,999"):
        recorded_result(reader, 9_999)


def test_prompts_share_what_their_digests_share() -> None:
    chains = [[1, 2, 3, 4], [1, 2, 3, 9], [1, 2], [7], [], [1, 2, 5, 8]]
    pieces = shared_prefixes(chains, 16)
    base = 1 << 40
    assert pieces[0] == ((32, base + 2), (16, base + 3)) == pieces[1]
    assert pieces[2] == ((32, base + 2),) == pieces[5]
    assert pieces[3] == () == pieces[4]
    lengths = [len(chain) * 16 + 5 for chain in chains]
    prompts = [
        WorkloadRequest(1, prompt_tokens=length, seed=i, prefix=prefix).synthetic_ids(50_000)
        for i, (length, prefix) in enumerate(zip(lengths, pieces, strict=True))
    ]
    for i, one in enumerate(chains):
        for j, other in enumerate(chains[:i]):
            common = next(
                (k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            same = next(k for k, (a, b) in enumerate(zip(prompts[i], prompts[j], strict=False)) if a != b)
            assert same == 16 * common, (one, other)


def test_a_static_batch_hands_its_answers_out_at_its_end(path: Path) -> None:
    for delivery in ("batch", "row"):
        core = timed_core(discipline="static", static_delivery=delivery, max_num_seqs=3)
        told, _ = run_workload(core, WORKLOAD, RunRecording(path))
        found = recorded_result(RunReader(path))
        assert found["ttfts"] == approximately(told["ttfts"]) and found["itls"] == approximately(told["itls"])
        assert (max(gap for gaps in found["itls"] for gap in gaps) == 0) == (delivery == "batch")


# bench --record ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def run_bench(model: str, tmp_path: Path) -> Callable[..., tuple[int, dict]]:
    def run(*arguments: str) -> tuple[int, dict]:
        target = tmp_path / "result.json"
        engine = ("--model", model, "--dtype", "float32", "--threads", "1", "--token-budget", "64", "--kv-blocks", "60")
        what = () if "--workload" in arguments else ("--scenario", "kv-crunch")
        code = bench.main([*engine, *what, *arguments, "--json", str(target)])
        return code, json.loads(target.read_text()) if target.exists() else {}

    return run


def test_bench_records_its_run_from_the_first_step(run_bench: Callable, path: Path) -> None:
    code, told = run_bench("--record", str(path), "--warmup", "2")
    assert code == 0
    reader = RunReader(path)
    assert not reader.truncated and reader.header.workload == "kv-crunch" and not reader.header.texts
    assert reader.header.info is not None and reader.header.info.name == told["model_id"]
    assert reader.header.config is not None and reader.header.config.cache.num_blocks == 60
    assert reader.num_steps >= told["steps"] and list(reader.texts()) == []
    assert reader.state_at(reader.first_step - 1).requests == {}
    found = recorded_result(reader)
    for key in ("completed", "steps", "preemptions", "total_output_tokens", "kv_blocks_peak", "output_lens", "backend"):
        assert found[key] == told[key], key
    assert found["duration"] == pytest.approx(told["duration"], rel=0.05, abs=0.05)
    assert len(recorded_workload(reader).requests) == told["num_prompts"]


def test_bench_keeps_texts_where_it_is_asked(run_bench: Callable, path: Path) -> None:
    code, told = run_bench("--record", str(path), "--record-texts", "--save-outputs")
    assert code == 0
    reader = RunReader(path)
    assert reader.header.texts
    texts: dict[tuple[int, str], str] = {}
    for _, text in reader.texts():
        texts[text.request_id, text.role] = texts.get((text.request_id, text.role), "") + text.text
    assert {role for _, role in texts} == {"prompt", "assistant"}
    assert all(texts[number, "prompt"] for number in range(1, told["num_prompts"] + 1))
    assert all(texts[number, "assistant"] for number in range(1, told["num_prompts"] + 1))
    code, plain = run_bench("--save-outputs")
    assert plain["output_token_ids"] == told["output_token_ids"]


def test_ids_without_a_text_cost_their_request_alone(run_bench: Callable, path: Path, tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": ids, "output_tokens": 2} for ids in ([2**63], [5, 10**6], [5, 6])]
    load = tmp_path / "load.jsonl"
    load.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, told = run_bench("--record", str(path), "--record-texts", "--workload", str(load))
    assert (told["completed"], told["failed"], told["failure"]) == (1, 2, "")
    assert {text.request_id for _, text in RunReader(path).texts()} == {3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--record", "/nowhere/run"), "there is no folder /nowhere"),
        (("--record", "/"), "this is a folder"),
        (("--record", "-"), "give the path of a file"),
        (("--record-texts",), "--record-texts goes with --record"),
    ],
)
def test_a_file_that_cannot_be_is_wrong_usage(arguments: tuple[str, ...], words: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr(bench, "load", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as caught:
        bench.main(["--scenario", "kv-crunch", *arguments])
    assert caught.value.code == 2 and words in capsys.readouterr().err


def test_a_full_disk_costs_the_recording_and_not_the_run(run_bench: Callable, path: Path, monkeypatch, capsys) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_writer, "FLUSH_BYTES", 10_000)
    written = run_writer.write_all
    calls = iter(range(100))
    monkeypatch.setattr(run_writer, "write_all", lambda *a: written(*a) if next(calls) < 3 else fail())
    code, told = run_bench("--record", str(path))
    assert code == 1 and told["completed"] == told["num_prompts"]
    assert "the run was not recorded to its end" in (said := capsys.readouterr().err) and "No space left" in said
    assert RunReader(path).truncated
