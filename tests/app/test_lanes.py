"""The timeline's model: a fold over genuine step records into spans."""

from __future__ import annotations

from itertools import pairwise

import pytest

from app.scope.timeline_plot import lane_sentence
from engine.events import (
    Admitted,
    Arrived,
    Keyframe,
    Preempted,
    RowKind,
    RunTotals,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.lanes import Lanes, SpanKind
from tests.app.runs import Run, record_of

CHUNKS = {SpanKind.PREFILL, SpanKind.RECOMPUTE}


def test_a_lane_is_a_request_from_arrival_to_end_without_a_gap() -> None:
    run = Run()
    run.crunch()
    lanes = run.history.lanes.lanes
    assert set(lanes) == set(range(1, 7)) and not run.history.lanes.open
    events = [event for record in run.records for event in record.events]
    arrivals = {event.request_id: event.arrival_time for event in events if isinstance(event, Arrived)}
    preempted = [event.request_id for event in events if isinstance(event, Preempted)]
    resumed = [event.request_id for event in events if isinstance(event, Admitted) and event.resumed]
    assert preempted and resumed
    for request_id, lane in lanes.items():
        assert lane.spans[0].begin == lane.arrival == pytest.approx(arrivals[request_id])
        for before, after in pairwise(lane.spans):
            assert before.end == after.begin
            assert before.kind != after.kind or before.kind in CHUNKS
        assert all(span.end >= span.begin for span in lane.spans)
        assert lane.finished_at == lane.spans[-1].end and lane.finish_reason == "length"
        assert len(lane.preempted_at) == preempted.count(request_id)
        kinds = [span.kind for span in lane.spans]
        assert (SpanKind.RECOMPUTE in kinds) == (request_id in resumed)
    computed = sum(span.tokens for lane in lanes.values() for span in lane.spans)
    assert computed == sum(sum(record.num_tokens) for record in run.records)


def test_a_static_batch_leaves_its_padding_in_the_lanes() -> None:
    lanes = Lanes()
    lanes.restore(Keyframe(0, 0.0, 40, 16, 8, 64, [], [], None, RunTotals()))
    arrivals = [Arrived(1, 30, 9, 0, "", 0.0), Arrived(2, 10, 9, 0, "", 0.0)]
    admitted = [Admitted(1, 0, 1.0, False), Admitted(2, 0, 1.0, False)]
    lanes.apply(
        record_of(
            1,
            time=1.0,
            seconds=0.3,
            events=arrivals + admitted,
            rows=[(1, RowKind.PREFILL, 30, 1, 0, 0), (2, RowKind.PREFILL, 10, 1, 20, 0)],
        )
    )
    for step in range(3):
        time = 1.3 + step * 0.1
        over = (2, RowKind.DECODE, 1, 1, 0, 0) if step == 0 else (2, RowKind.PADDING, 0, 0, 1, 0)
        lanes.apply(record_of(2 + step, time=time, seconds=0.1, rows=[(1, RowKind.DECODE, 1, 1, 0, 0), over]))
    spans = [(s.kind, round(s.begin, 3), round(s.end, 3), s.tokens) for s in lanes.lanes[2].spans]
    assert spans == [
        (SpanKind.WAITING, 0.0, 1.0, 0),
        (SpanKind.PREFILL, 1.0, 1.1, 10),
        (SpanKind.PADDING, 1.1, 1.3, 20),
        (SpanKind.DECODE, 1.3, 1.4, 1),
        (SpanKind.PADDING, 1.4, 1.6, 2),
    ]
    assert lanes.lanes[2].running and SpanKind.PADDING in lanes.kinds_seen
    assert "padding of its static batch for 0.2 s, 2 tokens" in lane_sentence(lanes.lanes[2], 1.5)


def test_what_is_swapped_has_a_span_of_its_own() -> None:
    lanes = Lanes()
    lanes.restore(Keyframe(0, 0.0, 40, 16, 8, 64, [], [], None, RunTotals()))
    for step, events, scheduled in (
        (1, [Arrived(7, 30, 9, 0, "", 1.0), Admitted(7, 0, 0.0, False)], True),
        (2, [Preempted(7, 1, "", "swap", 30, 2, 2), SwappedOut(7, [1, 2], [1, 2])], False),
        (3, [SwappedIn(7, [3, 4], [1, 2]), Admitted(7, 30, 1.0, True)], True),
        (4, [Preempted(7, 1, "", "swap", 31, 2, 2), SwappedOut(7, [3, 4], [1, 2])], False),
        (5, [SwapDropped(7, [1, 2], "")], False),
    ):
        rows = [(7, RowKind.DECODE, 1, 1, 0, 0)] if scheduled else []
        lanes.apply(record_of(step, time=float(step), seconds=1.0, events=events, rows=rows))
        assert lanes.lanes[7].running == scheduled
    spans = [(s.kind, s.begin, s.end) for s in lanes.lanes[7].spans]
    assert spans == [
        (SpanKind.DECODE, 1.0, 2.0),
        (SpanKind.SWAPPED, 2.0, 3.0),
        (SpanKind.DECODE, 3.0, 4.0),
        (SpanKind.SWAPPED, 4.0, 5.0),
        (SpanKind.WAITING, 5.0, 6.0),
    ]
    assert lanes.lanes[7].preempted_at == [2.0, 4.0]


def test_a_rejected_request_has_a_lane_that_ends() -> None:
    run = Run(num_blocks=4)
    run.add(1, 900, 50)
    run.step()
    lane = run.history.lanes.lanes.get(1)
    assert lane is None or lane.finished_at is not None
    assert not run.history.lanes.open


def test_lanes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.lanes.LANES_KEPT", 5)
    run = Run(num_blocks=60)
    for request_id in range(1, 30):
        run.add(request_id, 10, 2)
        run.step(20)
    assert len(run.history.lanes.lanes) <= 6
    assert 29 in run.history.lanes.lanes


def test_lanes_survive_missing_records() -> None:
    run = Run(num_blocks=60)
    run.add(1, 20, 30)
    run.add(2, 20, 8)
    run.step(4)
    for _ in range(12):
        run.core.step()
    run.restore(run.core.keyframe())
    run.step(10_000)
    lanes = run.history.lanes
    assert not lanes.open and set(lanes.lanes) == {1, 2}
    assert lanes.lanes[1].finish_reason == "length"
