"""Flow control of step records: a slow window misses frames, never counts."""

from __future__ import annotations

import queue
from types import SimpleNamespace

from engine.core import StepResult
from engine.events import Keyframe, RunTotals, StepRecord, StepTimings
from engine.frames import FrameStream
from engine.messages import MAX_FRAME_RECORDS, AckFrame, Frame, Shutdown
from engine.serving import EngineLoop


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        time=float(step),
        timings=StepTimings(),
        events=[],
        request_ids=[],
        num_tokens=[],
        num_computed=[],
        kinds=[],
        new_tokens=[],
        num_running=0,
        num_waiting=0,
        free_blocks=0,
        cached_blocks=0,
        token_budget=1,
        totals=RunTotals(steps=step),
    )


class Engine:
    def __init__(self) -> None:
        self.steps = 0
        self.keyframes_made = 0
        self.stream = FrameStream(self.keyframe)

    def keyframe(self) -> Keyframe:
        self.keyframes_made += 1
        return Keyframe(self.steps, 0.0, 4, 16, 8, 64, [], [], None, RunTotals(steps=self.steps))

    def step(self) -> None:
        self.steps += 1
        self.stream.add(record(self.steps))


def test_one_frame_at_a_time_and_what_piles_up_goes_into_the_next() -> None:
    engine = Engine()
    assert engine.stream.next_frame() is None
    engine.step()
    first = engine.stream.next_frame()
    assert first is not None
    assert (first.number, [r.step for r in first.records], first.keyframe) == (1, [1], None)
    for _ in range(5):
        engine.step()
        assert engine.stream.next_frame() is None
    engine.stream.acknowledge(1)
    second = engine.stream.next_frame()
    assert second is not None
    assert (second.number, [r.step for r in second.records]) == (2, [2, 3, 4, 5, 6])
    engine.stream.acknowledge(2)
    assert engine.stream.next_frame() is None, "an empty frame says nothing"


def test_the_limit_itself_still_goes_as_records() -> None:
    engine = Engine()
    engine.step()
    engine.stream.next_frame()
    for _ in range(MAX_FRAME_RECORDS):
        engine.step()
    engine.stream.acknowledge(1)
    frame = engine.stream.next_frame()
    assert frame is not None
    assert len(frame.records) == MAX_FRAME_RECORDS
    assert frame.keyframe is None


def test_past_the_limit_the_state_replaces_the_records_and_costs_nothing_meanwhile() -> None:
    engine = Engine()
    engine.step()
    engine.stream.next_frame()
    for _ in range(MAX_FRAME_RECORDS * 3):
        engine.step()
        assert engine.stream.next_frame() is None
    assert engine.keyframes_made == 0
    engine.stream.acknowledge(1)
    frame = engine.stream.next_frame()
    assert frame is not None
    assert frame.keyframe is not None
    assert frame.keyframe.totals.steps == engine.steps
    assert frame.records == []
    engine.stream.acknowledge(2)
    engine.step()
    after = engine.stream.next_frame()
    assert after is not None
    assert ([r.step for r in after.records], after.keyframe) == ([engine.steps], None)


def test_another_run_begins_at_once_with_its_state() -> None:
    engine, other = Engine(), Engine()
    engine.step()
    assert engine.stream.next_frame() is not None
    engine.step()
    engine.stream.begin(other.keyframe)
    frame = engine.stream.next_frame()
    assert frame is not None and (frame.number, frame.records) == (2, [])
    assert frame.keyframe is not None and frame.keyframe.step == 0
    engine.stream.acknowledge(1)
    engine.stream.add(record(1))
    assert engine.stream.next_frame() is None
    engine.stream.acknowledge(2)
    after = engine.stream.next_frame()
    assert after is not None and ([r.step for r in after.records], after.keyframe) == ([1], None)


def test_an_acknowledgement_from_the_future_or_the_past_opens_nothing() -> None:
    engine = Engine()
    engine.stream.acknowledge(50)
    engine.step()
    assert engine.stream.next_frame() is not None
    engine.step()
    engine.stream.acknowledge(0)
    assert engine.stream.next_frame() is None


def test_every_step_has_its_frame_where_the_window_acknowledges_while_the_next_one_runs() -> None:
    commands: queue.SimpleQueue[object] = queue.SimpleQueue()
    frames: list[Frame] = []

    class Core:
        """Ten steps; the window takes each frame in the middle of the step after it, then asks to end."""

        steps = 0
        keyframe = Engine().keyframe

        @property
        def has_work(self) -> bool:
            return self.steps < 10

        def step(self) -> StepResult:
            self.steps += 1
            if frames:
                commands.put(AckFrame(frames[-1].number))
            if self.steps == 10:
                commands.put(Shutdown())
            return StepResult(record(self.steps), [])

    loaded = SimpleNamespace(core=Core(), codec=SimpleNamespace(special_ids=()), info=None)
    take = lambda *replies: frames.extend(r for r in replies if isinstance(r, Frame))  # noqa: E731
    EngineLoop(loaded, commands, take).run()
    assert [[r.step for r in frame.records] for frame in frames] == [[step] for step in range(1, 11)]
