"""Any jump into a run file gives what a fold from the beginning gives."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from engine import run_writer
from engine.events import Keyframe
from engine.recording import RunReader
from engine.run_state import RunState
from tests.recording.runs import KNOBS, assert_same_state, record_run, timed_core


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_writer, "SEGMENT_STEPS", 7)
    monkeypatch.setattr(run_writer, "SEGMENT_CHANGES", 60)


@pytest.mark.parametrize("knobs", KNOBS)
def test_every_step_is_the_fold_from_the_beginning(knobs: str, tmp_path: Path) -> None:
    core = timed_core(**KNOBS[knobs])
    begun = core.keyframe()
    records = record_run(tmp_path / "run", core)
    reader = RunReader(tmp_path / "run")
    assert not reader.truncated
    assert (reader.first_step, reader.last_step, reader.num_steps) == (1, records[-1].step, len(records))
    assert list(reader.records(1, records[-1].step)) == records
    state = RunState()
    state.restore(begun)
    assert_same_state(reader.state_at(0), state)
    for record in records:
        state.apply(record)
        assert_same_state(reader.state_at(record.step), state)
        assert reader.end_of(record.step) == record.time + record.timings.total


def test_jumps_in_any_order_do_not_disturb_each_other(tmp_path: Path) -> None:
    core = timed_core()
    begun = core.keyframe()
    records = record_run(tmp_path / "run", core, seed=2)
    reader = RunReader(tmp_path / "run")
    kept = {}
    for step in random.Random(0).sample(range(1, records[-1].step + 1), 60):
        kept[step] = reader.state_at(step)
    state = RunState()
    state.restore(begun)
    for record in records:
        state.apply(record)
        if record.step in kept:
            assert_same_state(kept[record.step], state)


def test_a_recording_that_begins_without_a_state_begins_with_the_one_after_its_first_step(tmp_path: Path) -> None:
    records = record_run(tmp_path / "run", timed_core(), keyframe=False)
    reader = RunReader(tmp_path / "run")
    assert reader.first_step == 1 and list(reader.records(0, 3)) == records[:3]
    state = reader.state_at(1)
    assert state.last_record == records[0]
    for record in records[1:]:
        state.apply(record)
        assert_same_state(reader.state_at(record.step), state)
    fold = list(reader.replay())
    assert isinstance(fold[0], Keyframe) and fold[0].step == 1 and fold[1:] == records[1:]


def test_a_replay_is_the_state_and_the_steps_after_it(tmp_path: Path) -> None:
    records = record_run(tmp_path / "run", timed_core())
    reader = RunReader(tmp_path / "run")
    begun, *steps = reader.replay()
    assert isinstance(begun, Keyframe) and begun.step == 0 and steps == records
    later, *steps = reader.replay(after=20)
    assert later == reader.state_at(20).keyframe() and steps == records[20:]
    assert list(reader.replay(after=reader.last_step))[1:] == []


def test_steps_are_found_by_time(tmp_path: Path) -> None:
    records = record_run(tmp_path / "run", timed_core())
    reader = RunReader(tmp_path / "run")
    for record in records[:-1]:
        end = record.time + record.timings.total
        assert reader.step_at(end) == record.step
        assert reader.step_at(end - 1e-6) == max(record.step - 1, 1)
    assert reader.step_at(0.0) == 1 and reader.step_at(1e12) == reader.last_step


def test_no_jump_folds_more_than_a_segment(tmp_path: Path) -> None:
    records = record_run(tmp_path / "run", timed_core())
    reader = RunReader(tmp_path / "run")
    begun = {part.step for step in range(reader.last_step) if isinstance(part := next(reader.replay(step)), Keyframe)}
    assert len(begun) == reader.last_step, "any step can begin a replay"
    index = reader._index
    for segment in range(len(index.segment_steps)):
        first, last = index.segment_range(segment)
        inside = records[first:last]
        cost = sum(len(r.request_ids) + run_writer.ROWS_AN_EVENT * len(r.events) for r in inside[:-1])
        assert len(inside) <= 7 and cost < 60
