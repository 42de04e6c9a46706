"""Run files as Perfetto traces and as tables."""

from __future__ import annotations

import csv
import json
import math
import os
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine import export, export_tables, export_trace, run_writer
from engine.config import EngineConfig, SchedulerConfig
from engine.events import Finished, Keyframe, Preempted, Rejected, RowKind, StepTimings
from engine.export import main
from engine.lanes import Lanes
from engine.recorded_run import recorded_result
from engine.recording import RunHeader, RunReader, RunWriter
from engine.request import SamplingParams, request_name
from tests.oracles import EngineProbe
from tests.recording.runs import KNOBS, drive, record_run, timed_core
from tests.recording.trace_format import HALF_A_NANOSECOND, load_trace, named


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run"


def exported(path: Path, tmp_path: Path) -> SimpleNamespace:
    """The trace and the tables of a run file, by the command."""
    trace, folder = tmp_path / "trace.json", tmp_path / "tables"
    assert main([str(path), "--perfetto", str(trace), "--csv", str(folder)]) == 0
    tables = {}
    for name in ("steps", "requests"):
        with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            tables[name] = list(csv.DictReader(file))
    return SimpleNamespace(events=load_trace(trace), **tables)


# Traces --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", KNOBS)
def test_a_trace_holds_to_the_format_and_tells_of_every_step_and_span(knobs: str, path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core(**KNOBS[knobs]), seed=4)
    events = exported(path, tmp_path).events
    slices = [event for event in events if event["ph"] == "X"]
    threads = named(events)
    steps = [event for event in slices if event["name"] == "step"]
    assert [event["args"]["step"] for event in steps] == [record.step for record in records]
    zero = min(records[0].time, *(lane.arrival for lane in lanes_of(path).values()))
    for event, record in zip(steps, records, strict=True):
        assert event["ts"] == pytest.approx((record.time - zero) * 1e6, abs=2e-3)
        assert event["dur"] == pytest.approx(record.timings.total * 1e6, abs=2e-3)
    assert {event["name"] for event in slices if threads[event["tid"]] == "steps"} == {"step", *parts_of(records)}
    assert spans_of_trace(slices, threads, zero) == spans_of_lanes(path)


def parts_of(records: list) -> set[str]:
    return {part for part in export_trace.PARTS if any(getattr(record.timings, part) > 0 for record in records)}


def lanes_of(path: Path) -> dict:
    lanes = Lanes()
    for part in RunReader(path).replay():
        lanes.restore(part) if isinstance(part, Keyframe) else lanes.apply(part)
    return lanes.lanes


def spans_of_lanes(path: Path) -> dict[str, list]:
    return {
        f"request {request_name(i)}": [
            (
                span.kind.name.lower(),
                pytest.approx(span.begin, abs=1e-8),
                pytest.approx(span.end, abs=1e-8),
                span.tokens,
            )
            for span in lane.spans
        ]
        for i, lane in lanes_of(path).items()
        if lane.spans
    }


def spans_of_trace(slices: list, threads: dict, zero: float) -> dict[str, list]:
    found = defaultdict(list)
    for event in slices:
        if threads[event["tid"]] != "steps":
            begin = zero + event["ts"] / 1e6
            tokens = event.get("args", {}).get("tokens", 0)
            found[threads[event["tid"]]].append((event["name"], begin, begin + event["dur"] / 1e6, tokens))
    return found


def test_the_parts_of_a_step_lie_in_it_one_after_the_other(path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core())
    slices = [e for e in exported(path, tmp_path).events if e["ph"] == "X" and e["tid"] == 1]
    parts: list[dict] = []
    for event in [*slices, {"name": "step", "ts": math.inf, "dur": 0}]:
        if event["name"] != "step":
            parts.append(event)
            continue
        if parts:
            step = slices[slices.index(parts[0]) - 1]
            assert parts[0]["ts"] == step["ts"]
            assert parts[-1]["ts"] + parts[-1]["dur"] == pytest.approx(step["ts"] + step["dur"], abs=HALF_A_NANOSECOND)
        parts = []
    total = sum(e["dur"] for e in slices if e["name"] == "forward")
    assert total == pytest.approx(sum(r.timings.forward for r in records) * 1e6, abs=1)


def test_marks_and_counters(path: Path, tmp_path: Path) -> None:
    core = timed_core()
    records = record_run(path, core, seed=4)
    events = exported(path, tmp_path).events
    told = [event for record in records for event in record.events]
    marks = Counter(event["name"] for event in events if event["ph"] == "i")
    assert marks["preempted"] == sum(isinstance(event, Preempted) for event in told) > 0
    refused = [event["name"] for event in events if event["ph"] == "i" and event["name"].endswith("refused")]
    assert len(refused) == sum(isinstance(event, Rejected) for event in told)
    ends = Counter(f"left: {event.reason}" for event in told if isinstance(event, Finished))
    assert {name: count for name, count in marks.items() if name.startswith("left")} == ends
    counters = {name: [e for e in events if e["ph"] == "C" and e["name"] == name] for name in ("requests", "KV blocks")}
    assert [c["args"]["running"] for c in counters["requests"]] == [r.num_running for r in records]
    assert [sum(c["args"].values()) for c in counters["KV blocks"]] == [24 - r.free_blocks for r in records]
    tokens = [
        e["args"] for e in events if e["ph"] == "C" and e["name"] == "tokens per step" and any(e["args"].values())
    ]
    assert [sum(t.values()) for t in tokens] == [sum(r.num_tokens) for r in records if r.num_tokens]


def test_users_are_processes_and_requests_threads(path: Path, tmp_path: Path) -> None:
    record_run(path, timed_core(), seed=4)
    events = exported(path, tmp_path).events
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {"engine", "requests", "requests of ann", "requests of ben"}
    lanes, threads = lanes_of(path), named(events)
    found = {threads[e["tid"]]: names[e["pid"]] for e in events if e["ph"] == "X" and e["pid"] != 1}
    for request_id, lane in lanes.items():
        if lane.spans:
            expected = f"requests of {lane.user}" if lane.user else "requests"
            assert found[f"request {request_name(request_id)}"] == expected


def test_changed_knobs_and_priorities_are_marked(path: Path, tmp_path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    request_id = probe.add(range(20), SamplingParams(max_tokens=8), user='o"hara\n')
    for step in range(6):
        if step == 2:
            core.set_priority(request_id, 5)
            core.reconfigure(SchedulerConfig(max_num_seqs=3, order="priority"))
        record = probe.step().record
        assert record is not None
        writer.add(record, core.keyframe)
    writer.close()
    events = exported(path, tmp_path).events
    [knobs] = [event for event in events if event["name"] == "knobs changed"]
    assert knobs["s"] == "g" and knobs["args"]["order"] == "priority" and knobs["args"]["max_num_seqs"] == 3
    [priority] = [event for event in events if event["name"] == "priority changed"]
    assert priority["args"] == {"priority": 5}
    assert any(e["args"].get("name") == 'requests of o"hara\n' for e in events if e["name"] == "process_name")


def test_times_that_are_none_do_not_spoil_the_trace(path: Path, tmp_path: Path) -> None:
    core = timed_core()
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    for number, record in enumerate(drive(EngineProbe(core), 2, 8)):
        if number % 5 == 3:
            record = msgspec.structs.replace(record, timings=StepTimings(forward=math.nan, sample=-1.0))
        if number % 7 == 4:
            record = msgspec.structs.replace(record, time=math.inf)
        if number % 11 == 6:
            record = msgspec.structs.replace(record, time=record.time - 50.0)
        writer.add(record, core.keyframe)
    writer.close()
    found = exported(path, tmp_path)
    assert len([e for e in found.events if e["name"] == "step"]) == len(found.steps) > 10
    assert not any("nan" in value or "inf" in value for row in found.steps for value in row.values())


def test_a_trace_keeps_nothing_of_what_it_has_written(path: Path, tmp_path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    with (tmp_path / "trace.json").open("w") as file:
        trace = export_trace.TraceExport(file, RunHeader())
        trace.restore(core.keyframe())
        kept = []
        for _ in range(3):
            for record in drive(probe, 5, 30):
                trace.apply(record)
            kept.append((len(trace._threads), len(trace._lanes.ended), trace._lanes.nbytes))
        trace.finish()
    assert kept[0][:2] == kept[-1][:2] == (0, 0)
    assert kept[-1][2] < kept[0][2] + 65_536
    assert len(load_trace(tmp_path / "trace.json")) > 1_000


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", ["vllm", "static", "drafts", "swap"])
def test_the_tables_are_the_run_in_rows(knobs: str, path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core(**KNOBS[knobs]), seed=4)
    found = exported(path, tmp_path)
    for row, record in zip(found.steps, records, strict=True):
        assert int(row["step"]) == record.step and int(row["requests"]) == len(record.request_ids)
        decodes = sum(n for n, kind in zip(record.num_tokens, record.kinds, strict=True) if kind == RowKind.DECODE)
        assert int(row["decode_tokens"]) + int(row["draft_tokens"]) == decodes
        assert int(row["used_blocks"]) == 24 - record.free_blocks - record.cached_blocks
        assert float(row["forward_ms"]) == pytest.approx(1e3 * record.timings.forward, abs=1e-5)
        assert float(row["end_s"]) - float(row["begin_s"]) == pytest.approx(record.timings.total, abs=1e-8)
    last = records[-1].totals
    for column, total in (("preemptions", last.preemptions), ("arrived", last.arrived), ("rejected", last.rejected)):
        assert sum(int(row[column]) for row in found.steps) == total
    assert sum(int(row["new_tokens"]) for row in found.steps) == last.output_tokens
    told = recorded_result(RunReader(path))
    assert len(found.requests) == told["num_prompts"]
    reasons = Counter(row["finish_reason"] for row in found.requests)
    assert reasons == Counter(told["finish_reasons"])
    answers = [row for row in found.requests if row["finish_reason"] in ("stop", "length")]
    ttfts = sorted(float(row["ttft_ms"]) for row in answers)
    assert ttfts == pytest.approx(
        sorted(t * 1e3 for t, r in zip(told["ttfts"], told["finish_reasons"], strict=True) if r in ("stop", "length")),
        abs=1e-3,
    )
    assert sum(int(row["output_tokens"]) for row in answers) == told["total_output_tokens"]
    refused = [row for row in found.requests if row["finish_reason"] == "error"]
    assert all(row["error"] and row["prompt_tokens"] == "" for row in refused)


def test_every_column_is_explained() -> None:
    from engine import export_tables

    words = export_tables.__doc__ or ""
    parts = [f"{part}_ms" for part in export_trace.PARTS]
    for column in (*export_tables.STEP_COLUMNS, *export_tables.REQUEST_COLUMNS):
        assert column in words or column in parts


def test_requests_that_had_not_left_are_told_too(path: Path, tmp_path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    for i in range(3):
        probe.add(range(20 + i), SamplingParams(max_tokens=20), user="ann")
    probe.step()
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())  # in the middle of a run
    for _ in range(5):
        record = probe.step().record
        assert record is not None
        writer.add(record, core.keyframe)
    writer.flush()
    found = exported(path, tmp_path)
    assert [(row["request"], row["finish_reason"], row["end_s"]) for row in found.requests] == [
        ("1", "", ""),
        ("2", "", ""),
        ("3", "", ""),
    ]
    state = RunReader(path).state_at(6)
    assert [int(row["output_tokens"]) for row in found.requests] == [r.output_tokens for r in state.requests.values()]
    assert all(float(row["ttft_ms"]) > 0 for row in found.requests)
    assert {e["args"]["name"] for e in found.events if e["name"] == "thread_name"} >= {"request 1", "request 3"}


# The command ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "RUN"),
        (["RUN"], "nothing to write: give --perfetto FILE or --csv FOLDER"),
        (["RUN", "--perfetto", "/nowhere/trace.json"], "there is no folder /nowhere"),
        (["RUN", "--perfetto", "/"], "this is a folder"),
        (["RUN", "--perfetto", "RUN"], "is the run file itself"),
        (["RUN", "--csv", "RUN"], "this is a file; give the path of a folder"),
        (["RUN", "--csv", "/nowhere/at/all"], "there is no folder /nowhere/at"),
        (["RUN", "--csv", "/proc"], "cannot be written"),
        (["RUN", "--svg", "x"], "--svg"),
    ],
)
def test_wrong_usage_is_2_with_a_sentence(arguments: list[str], words: str, path: Path, capsys) -> None:
    record_run(path, timed_core(), requests=1)
    before = path.read_bytes()
    with pytest.raises(SystemExit) as caught:
        main([str(path) if argument == "RUN" else argument for argument in arguments])
    assert caught.value.code == 2 and words in capsys.readouterr().err
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_read_is_1_with_a_sentence(tmp_path: Path, capsys) -> None:
    trace = str(tmp_path / "trace.json")
    assert main([str(tmp_path / "gone"), "--perfetto", trace]) == 1
    assert "gone cannot be read: No such file or directory" in capsys.readouterr().err
    (tmp_path / "picture").write_bytes(b"\x89PNG" * 30)
    assert main([str(tmp_path / "picture"), "--csv", str(tmp_path / "tables")]) == 1
    assert "picture is no run file of Batchscope" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["picture"]


def test_a_file_that_breaks_off_is_exported_and_told(path: Path, tmp_path: Path, capsys) -> None:
    records = record_run(path, timed_core(), requests=6)
    path.write_bytes(path.read_bytes()[:-200])
    found = exported(path, tmp_path)
    assert 0 < len(found.steps) < len(records)
    assert f"breaks off, or is still being written: exported up to step {len(found.steps)}" in capsys.readouterr().err
    assert main([str(path), "--perfetto", "-"]) == 0
    out = capsys.readouterr().out
    assert json.loads(out)["traceEvents"] == found.events


def test_damaged_steps_are_left_out_and_told(path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "SEGMENT_STEPS", 10)
    records = record_run(path, timed_core(), requests=12)
    data = bytearray(path.read_bytes())
    data[RunReader(path)._index.offsets[13] + 60] ^= 0xFF
    path.write_bytes(data)
    found = exported(path, tmp_path)
    assert [int(row["step"]) for row in found.steps] == [r.step for r in records if not 14 <= r.step <= 20]
    assert "is damaged: 7 steps in the middle are left out" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_1_with_a_sentence_and_the_old_file_stays(
    path: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    record_run(path, timed_core(), requests=6)
    assert main([str(path), "--perfetto", "/dev/full"]) == 1
    assert "--perfetto /dev/full cannot be written: No space left on device" in capsys.readouterr().err
    old = tmp_path / "trace.json"
    old.write_text("old")
    monkeypatch.setattr(
        export_trace.TraceExport, "finish", lambda self: os.write(os.open("/dev/full", os.O_WRONLY), b"x")
    )
    assert main([str(path), "--perfetto", str(old)]) == 1
    assert old.read_text() == "old" and sorted(p.name for p in tmp_path.iterdir()) == ["run", "trace.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("failing", ["--perfetto", "--csv"])
def test_of_several_outputs_the_one_that_cannot_be_written_is_named(
    failing: str, path: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    record_run(path, timed_core(), requests=6)
    fails = {"--perfetto": export_trace.TraceExport, "--csv": export_tables.TableExport}[failing]
    monkeypatch.setattr(fails, "finish", lambda self: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
    targets = {"--perfetto": tmp_path / "trace.json", "--csv": tmp_path / "tables"}
    assert main([str(path), *(str(word) for pair in targets.items() for word in pair)]) == 1
    assert f"{failing} {targets[failing]} cannot be written: No space left" in capsys.readouterr().err
    assert not targets["--perfetto"].exists() and list(targets["--csv"].iterdir()) == []


def test_an_interrupted_export_leaves_what_was_there(path: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    def interrupt(self: object) -> None:
        raise KeyboardInterrupt

    record_run(path, timed_core(), requests=3)
    trace, folder = tmp_path / "trace.json", tmp_path / "tables"
    trace.write_text("old")
    monkeypatch.setattr(export_tables.TableExport, "finish", interrupt)
    assert main([str(path), "--perfetto", str(trace), "--csv", str(folder)]) == 1
    assert capsys.readouterr().err == "batchscope export: interrupted: nothing is written\n"
    assert trace.read_text() == "old" and list(folder.iterdir()) == []


def test_a_run_without_a_step_is_an_empty_trace(path: Path, tmp_path: Path) -> None:
    RunWriter(path, RunHeader(config=EngineConfig(), workload="nothing")).close()
    found = exported(path, tmp_path)
    assert found.steps == found.requests == [] and all(event["ph"] == "M" for event in found.events)
    assert export.export(RunReader(path), None, tmp_path / "again") == 0
