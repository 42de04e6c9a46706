"""Run files that break off, are damaged, are of another program, grow, are shortened, or meet a full disk."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from engine import run_file, run_writer
from engine.config import EngineConfig, SchedulerConfig
from engine.events import Keyframe, StepRecord
from engine.recording import MIN_LIMIT_BYTES, RecordingError, RunHeader, RunReader, RunWriter
from engine.run_file import PREFIX, FrameKind, FrameScan
from engine.run_state import RunState
from tests.oracles import EngineProbe, make_core
from tests.recording.runs import assert_same_state, drive, record_run, timed_core


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "SEGMENT_STEPS", 10)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.batchscope"


def frames(path: Path) -> list[tuple[int, run_file.Head]]:
    with path.open("rb", buffering=0) as file:
        scan = FrameScan(file, PREFIX.size)
        return list(iter(lambda: scan.next(path.stat().st_size), None))


def damage(path: Path, offset: int, count: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for place in range(offset, offset + count):
        data[place] ^= 0xFF
    path.write_bytes(data)


def assert_folds(reader: RunReader, records: list[StepRecord], steps: list[int]) -> None:
    state = RunState()
    state.restore(reader.state_at(0).keyframe())
    for record in records:
        state.apply(record)
        if record.step in steps:
            assert_same_state(reader.state_at(record.step), state)


# Headers -------------------------------------------------------------------------------------------------------------


def test_a_header_tells_what_was_run(path: Path) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(discipline="orca", chunk_size=7))
    RunWriter(path, RunHeader(config=config, workload="rush-hour", texts=True)).close()
    reader = RunReader(path)
    assert reader.header.config == config and reader.header.workload == "rush-hour" and reader.header.texts
    assert reader.header.info is None and reader.header.created.endswith("+00:00") and reader.header.program
    assert (reader.num_steps, reader.first_step, reader.last_step, reader.truncated) == (0, 0, 0, False)
    assert list(reader.replay()) == [] == list(reader.records(0, 100))


def test_a_newer_version_is_refused_with_its_number(path: Path) -> None:
    record_run(path, timed_core(), requests=2)
    data = path.read_bytes()
    path.write_bytes(PREFIX.pack(run_file.MAGIC, 7) + data[PREFIX.size :])
    with pytest.raises(RecordingError, match=r"run\.batchscope .*version 7 .*this program reads version 1"):
        RunReader(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"BATS", "is no run file"),
        (b"PK\x03\x04" + b"\0" * 100, "is no run file"),
        (PREFIX.pack(run_file.MAGIC, 1), "breaks off in its header"),
        (PREFIX.pack(run_file.MAGIC, 0) + b"x" * 50, "version 0"),
        (PREFIX.pack(run_file.MAGIC, 1) + b"x" * 500, "damaged"),
    ],
)
def test_what_is_no_run_file_is_refused_in_words(path: Path, content: bytes, words: str) -> None:
    path.write_bytes(content)
    with pytest.raises(RecordingError, match=words):
        RunReader(path)


def test_a_file_that_is_not_there_is_refused_in_words(path: Path) -> None:
    with pytest.raises(RecordingError, match=r"cannot be read: No such file"):
        RunReader(path)
    with pytest.raises(RecordingError, match=r"cannot be read: Is a directory"):
        RunReader(path.parent)


def test_a_configuration_with_unknown_knobs_does_not_close_the_file(path: Path, monkeypatch) -> None:
    record_run(path, timed_core(), requests=3)
    offset, head = frames(path)[0]
    data = path.read_bytes()
    raw = msgspec.msgpack.decode(data[offset + run_file.HEAD_BYTES :][: head.length])
    raw["config"] = {"scheduler": {"discipline": "of-another-time"}}
    header = run_file.pack_frame(FrameKind.HEADER, 0, 0.0, msgspec.msgpack.encode(raw))
    path.write_bytes(data[:offset] + header + data[offset + run_file.HEAD_BYTES + head.length :])
    reader = RunReader(path)
    assert reader.header.config is None and reader.num_steps > 0


# Torn and damaged ----------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_opens_up_to_its_last_whole_step(path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core(), requests=8)
    data, found = path.read_bytes(), frames(path)
    header_end = found[1][0]
    cut = tmp_path / "cut"
    for size in random.Random(1).sample(range(header_end, len(data)), 60):
        cut.write_bytes(data[:size])
        reader = RunReader(cut)
        whole = [
            head.step
            for offset, head in found
            if head.kind == FrameKind.RECORD and offset + run_file.HEAD_BYTES + head.length <= size
        ]
        assert reader.truncated and reader.num_steps == len(whole)
        assert list(reader.records(0, 10**9)) == records[: len(whole)]
        if whole:
            assert reader.last_step == whole[-1]
            assert_folds(reader, records, [whole[-1]])
        reader.close()


@pytest.mark.parametrize("where", ["payload", "head", "length"])
def test_a_damaged_step_costs_the_steps_up_to_the_next_keyframe(path: Path, where: str) -> None:
    records = record_run(path, timed_core(), requests=12)
    offset, head = next(f for f in frames(path) if f[1].kind == FrameKind.RECORD and f[1].step == 14)
    damage(path, offset + {"payload": run_file.HEAD_BYTES + head.length // 2, "head": 1, "length": 9}[where])
    reader = RunReader(path)
    assert not reader.truncated and reader.last_step == records[-1].step
    lost = range(14, 21)  # 20 as a step; as a state the next keyframe has it
    for step in range(14, 20):
        with pytest.raises(RecordingError, match=f"step {step} is damaged"):
            reader.state_at(step)
    assert_folds(reader, records, [r.step for r in records if r.step not in lost])
    assert [r.step for r in reader.records(0, 10**9)] == [r.step for r in records if r.step not in lost]
    state = RunState()
    for part in reader.replay():
        state.restore(part) if isinstance(part, Keyframe) else state.apply(part)
    assert state.keyframe() == reader.state_at(reader.last_step).keyframe()
    assert reader.state_at(20).step == 20


def test_a_step_with_columns_of_different_lengths_is_refused_in_words(path: Path) -> None:
    core = timed_core()
    probe = EngineProbe(core)
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    for record in drive(probe, seed=1, requests=4):
        writer.add(msgspec.structs.replace(record, kinds=[*record.kinds, 0]), core.keyframe)
    writer.close()
    reader = RunReader(path)
    with pytest.raises(RecordingError, match=r"step \d has \d requests and \d values of kinds"):
        list(reader.replay())
    with pytest.raises(RecordingError, match="does not understand"):
        reader.state_at(reader.last_step)


def test_a_damaged_keyframe_costs_its_segment_in_jumps_and_nothing_in_order(path: Path) -> None:
    records = record_run(path, timed_core(), requests=12)
    offset, head = next(f for f in frames(path) if f[1].kind == FrameKind.KEYFRAME and f[1].step == 20)
    damage(path, offset + run_file.HEAD_BYTES + head.length // 2)
    reader = RunReader(path)
    assert list(reader.records(0, 10**9)) == records and list(reader.replay())[1:] == records
    with pytest.raises(RecordingError, match="step 25 is damaged"):
        reader.state_at(25)
    assert_folds(reader, records, [20, 31])


def test_a_kilobyte_of_rubbish_in_the_middle_is_passed_over(path: Path) -> None:
    records = record_run(path, timed_core(), requests=20)
    offset = next(offset for offset, head in frames(path) if head.kind == FrameKind.RECORD and head.step == 13)
    damage(path, offset, 1000)
    reader = RunReader(path)
    assert reader.last_step == records[-1].step and not reader.truncated
    assert 12 < reader.last_step - reader.num_steps + 12 < 50
    assert_folds(reader, records, [12, records[-1].step])


def test_steps_that_are_not_there_are_named(path: Path) -> None:
    records = record_run(path, timed_core(), requests=5)
    reader = RunReader(path)
    with pytest.raises(RecordingError, match=rf"has no step 99,999; it has the steps 1 to {records[-1].step}"):
        reader.state_at(99_999)
    with pytest.raises(RecordingError, match="has no step -1"):
        reader.end_of(-1)


# Bounds --------------------------------------------------------------------------------------------------------------


def long_run(path: Path, megabytes: float, check) -> list[StepRecord]:
    """A run whose records take so many MB altogether."""
    core = make_core(num_blocks=64, max_num_seqs=8)
    written = 0
    writer = RunWriter(path, RunHeader(), limit_bytes=MIN_LIMIT_BYTES, keyframe=core.keyframe())
    records: list[StepRecord] = []
    while written < megabytes * 2**20:
        probe = EngineProbe(core)
        for record in drive(probe, len(records), 10):
            # Longer than they are, so that fewer are needed.
            record = msgspec.structs.replace(record, padding=[2**40] * 300)
            writer.add(record, core.keyframe)
            written += len(msgspec.msgpack.encode(record))
            records.append(record)
            check(path, records)
    writer.close()
    return records


def test_the_oldest_steps_go_where_the_file_would_grow_beyond_its_limit(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "FLUSH_BYTES", 20_000)
    sizes: list[int] = []
    readers: list[RunReader] = []

    def check(path: Path, records: list[StepRecord]) -> None:
        sizes.append(path.stat().st_size)
        if not readers:
            readers.append(RunReader(path))
        elif len(records) % 97 == 0:
            [reader] = readers
            reader.refresh()
            assert reader.last_step <= records[-1].step
            assert reader.state_at(reader.last_step).step == reader.last_step

    records = long_run(path, 5.0, check)
    assert max(sizes) <= MIN_LIMIT_BYTES and sum(b < a for a, b in itertools.pairwise(sizes)) >= 3
    assert path.stat().st_size > MIN_LIMIT_BYTES // 3
    [reader] = readers
    assert reader.refresh() and not reader.truncated
    kept = list(reader.records(0, 10**9))
    assert reader.first_step > 100 and kept == records[-len(kept) :] and reader.last_step == records[-1].step
    with pytest.raises(RecordingError, match=f"has the steps {reader.first_step:,} to"):
        reader.state_at(1)
    fresh = RunReader(path)
    assert (fresh.first_step, fresh.last_step, fresh.header) == (reader.first_step, reader.last_step, reader.header)
    assert list(path.parent.iterdir()) == [path], "nothing is left beside it"


def test_a_limit_that_holds_no_run_is_refused(path: Path) -> None:
    with pytest.raises(RecordingError, match="1,048,576"):
        RunWriter(path, RunHeader(), limit_bytes=1000)
    assert not path.exists()


# Disks ---------------------------------------------------------------------------------------------------------------


class FullDisk:
    """Stands for a file on a disk with room for so many bytes."""

    def __init__(self, file, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data) -> int:
        taken = bytes(data[: self._room])
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= len(taken)
        return self._file.write(taken)

    def __getattr__(self, name):
        return getattr(self._file, name)


def test_a_full_disk_is_told_once_and_what_is_there_stays_whole(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "FLUSH_BYTES", 1_000)
    opened = run_file.temporary_beside
    monkeypatch.setattr(run_writer, "temporary_beside", lambda path: FullDisk(opened(path), 20_000))
    core = timed_core()
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    failures = []
    records = []
    for record in drive(EngineProbe(core), 3, 40):
        records.append(record)
        try:
            writer.add(record, core.keyframe)
        except RecordingError as error:
            failures.append(str(error))
    writer.close()
    [failure] = failures
    assert "run.batchscope cannot be written: No space left on device" in failure
    reader = RunReader(path)
    assert reader.truncated and 3 < reader.last_step < records[-1].step
    assert list(reader.records(0, 10**9)) == records[: reader.num_steps]
    assert path.stat().st_size == frames(path)[-1][0] + run_file.HEAD_BYTES + frames(path)[-1][1].length


def test_a_disk_without_room_for_shortening_keeps_the_old_file(path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run_writer, "FLUSH_BYTES", 20_000)
    opened = run_file.temporary_beside
    rooms = [10 * 2**20, 100_000]
    monkeypatch.setattr(run_writer, "temporary_beside", lambda path: FullDisk(opened(path), rooms.pop(0)))
    with pytest.raises(RecordingError, match="No space left"):
        long_run(path, 3.0, lambda path, records: None)
    reader = RunReader(path)
    assert reader.first_step == 1 and reader.last_step > 100
    assert reader.state_at(reader.last_step).step == reader.last_step
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match=r"nowhere/run cannot be written: No such file"):
        RunWriter(tmp_path / "nowhere" / "run", RunHeader())
    with pytest.raises(RecordingError, match="this is not a file"):
        RunWriter(tmp_path, RunHeader())


def test_another_run_in_the_same_file_is_refused(path: Path) -> None:
    core, other = timed_core(), timed_core()
    writer = RunWriter(path, RunHeader(), keyframe=core.keyframe())
    records = list(drive(EngineProbe(core), 1, 3))
    for record in records:
        writer.add(record, core.keyframe)
    with pytest.raises(RecordingError, match="another run"):
        writer.add(next(drive(EngineProbe(other), 1, 3)), other.keyframe)
    writer.add(records[-1], core.keyframe)  # ignored
    writer.close()


# Reading meanwhile ---------------------------------------------------------------------------------------------------

WRITER = """
import sys, time
from pathlib import Path
from engine import run_writer
from tests.recording.runs import record_run, timed_core
run_writer.SEGMENT_STEPS = 10
print("go", flush=True)
record_run(Path(sys.argv[1]), timed_core(), seed=5, after=lambda *_: time.sleep(0.004), close=False, requests=200)
time.sleep(60)
"""


def test_a_process_that_is_killed_leaves_all_but_the_last_second(path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], cwd=Path(__file__).parents[2], stdout=-1
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        deadline = time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        reader = RunReader(path)
        seen, grown = [reader.last_step], 0
        while seen[-1] < 60:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            grown += reader.refresh()
            seen.append(reader.last_step)
            state = reader.state_at(reader.last_step)
            assert state.step == reader.last_step
        assert seen == sorted(seen) and grown >= 1 and reader.truncated
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    reader = RunReader(path)
    assert reader.truncated and reader.last_step >= seen[-1]
    expected = record_run(path.with_name("again"), timed_core(), seed=5, requests=200)[: reader.num_steps]
    found = list(reader.records(0, 10**9))
    assert [r.events for r in found] == [r.events for r in expected]


def test_what_is_flushed_can_be_read_and_half_a_frame_waits_for_its_rest(path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core(), requests=6)
    data = path.read_bytes()
    growing = tmp_path / "growing"
    header_end = frames(path)[1][0]
    growing.write_bytes(data[:header_end])
    reader = RunReader(growing)
    assert reader.num_steps == 0 and reader.truncated
    with growing.open("ab", buffering=0) as file:
        for begin in range(header_end, len(data), 777):
            file.write(data[begin : begin + 777])
            reader.refresh()
            if reader.num_steps:
                assert list(reader.records(0, 10**9)) == records[: reader.num_steps]
    assert reader.num_steps == len(records) and not reader.truncated
    assert not reader.refresh()


def test_a_file_that_was_removed_can_be_read_on(path: Path) -> None:
    record_run(path, timed_core(), requests=4)
    reader = RunReader(path)
    path.unlink()
    assert not reader.refresh() and reader.state_at(reader.last_step).step == reader.last_step
    reader.close()


# Copies and texts ----------------------------------------------------------------------------------------------------


def test_a_copy_is_a_whole_run_file(path: Path, tmp_path: Path) -> None:
    records = record_run(path, timed_core(), requests=10, close=False)
    reader = RunReader(path)
    assert reader.truncated
    reader.copy(tmp_path / "all")
    whole = RunReader(tmp_path / "all")
    assert not whole.truncated and list(whole.records(0, 10**9)) == records and whole.header == reader.header
    reader.copy(tmp_path / "part", first_step=25)
    part = RunReader(tmp_path / "part")
    assert part.first_step == 21 and part.last_step == records[-1].step and not part.truncated
    assert_same_state(part.state_at(25), whole.state_at(25))
    part.copy(tmp_path / "again", first_step=0)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "part").read_bytes()
    with pytest.raises(RecordingError, match="run file itself"):
        reader.copy(path)
    with pytest.raises(RecordingError, match="nowhere"):
        reader.copy(tmp_path / "nowhere" / "copy")


def test_texts_are_kept_where_they_are_asked_for(path: Path) -> None:
    def speak(record: StepRecord, probe: EngineProbe, writer: RunWriter) -> None:
        writer.text(record.step, "assistant", f"ein Stück {record.step}")

    records = record_run(path, timed_core(), requests=6, after=speak, texts=True)
    reader = RunReader(path)
    texts = list(reader.texts())
    assert [(step, t.request_id, t.role, t.text) for step, t in texts] == [
        (r.step, r.step, "assistant", f"ein Stück {r.step}") for r in records
    ]
    assert [step for step, _ in reader.texts(5, 8)] == [5, 6, 7, 8]
    assert list(reader.records(0, 10**9)) == records
    offset = next(offset for offset, head in frames(path) if head.kind == FrameKind.TEXT and head.step == 6)
    damage(path, offset + run_file.HEAD_BYTES + 3)
    damaged = RunReader(path)
    assert [step for step, _ in damaged.texts(5, 8)] == [5, 7, 8] and list(damaged.records(0, 10**9)) == records
    record_run(path, timed_core(), requests=6, after=speak)
    assert list(RunReader(path).texts()) == []
