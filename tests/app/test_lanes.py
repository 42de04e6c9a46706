"""The timeline's model: a fold over genuine step records into spans."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from app.scope.timeline_plot import lane_sentence
from engine.columns import Columns
from engine.events import (
    Admitted,
    Arrived,
    Finished,
    Keyframe,
    Preempted,
    Reprioritised,
    RequestState,
    RowKind,
    RunTotals,
    StepRecord,
    StepTimings,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.lanes import LANES_KEPT, SPANS_KEPT, Lanes, SpanKind
from engine.request import RequestStatus
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


def opened(requests: int) -> Lanes:
    """Lanes with so many requests that have been admitted at 0 s."""
    made = Lanes()
    made.restore(Keyframe(0, 0.0, 40, 16, 8, 64, [], [], None, RunTotals()))
    arrivals = [Arrived(i, 30, 9, i % 3, f"user {i % 2}", 0.0) for i in range(1, requests + 1)]
    made.apply(record_of(1, time=0.0, seconds=0.0, events=arrivals))
    made.apply(record_of(2, time=0.0, seconds=0.0, events=[Admitted(a.request_id, 0, 0.0, False) for a in arrivals]))
    return made


def test_each_chunk_of_a_prompt_is_a_span() -> None:
    run = Run(num_blocks=60, token_budget=32)
    run.add(1, 100, 3)
    run.step(10_000)
    spans = run.history.lanes.lane(1).spans
    assert [s.tokens for s in spans if s.kind == SpanKind.PREFILL] == [32, 32, 32, 4]
    assert [s.tokens for s in spans if s.kind == SpanKind.DECODE] == [2]
    assert "prefill, chunk 2 for" in lane_sentence(run.history.lanes.lane(1), spans[1].begin + 1e-4)


def test_accepted_and_rejected_drafts_are_kept_over_time() -> None:
    lanes = opened(1)
    plain, drafted = (1, RowKind.DECODE, 1, 1, 0, 0), (1, RowKind.DECODE, 5, 3, 0, 4)  # two of four accepted
    rows = [plain] * 30 + [drafted] * 20 + [plain] * 30
    for step, row in enumerate(rows):
        lanes.apply(record_of(3 + step, time=0.1 * step, seconds=0.1, rows=[row]))
    spans = lanes.lane(1).spans
    assert lanes.drafted and {s.kind for s in spans} == {SpanKind.DECODE}
    assert [(s.tokens, s.drafts, s.accepted) for s in spans] == [
        (30, 0, 0),
        (40, 32, 16),
        (40, 32, 16),
        (24, 16, 8),  # four rows with drafts, four without
        (26, 0, 0),
    ]
    assert "16 of 32 drafted tokens accepted" in lane_sentence(lanes.lane(1), 3.1)


def test_a_lane_knows_whose_it_is_and_how_urgent() -> None:
    lanes = opened(2)
    lanes.apply(record_of(3, time=0.1, seconds=0.1, events=[Reprioritised(2, 9)]))
    first, second = lanes.lanes.values()
    assert (first.user, first.priority) == ("user 1", 1)
    assert (second.user, second.priority) == ("user 0", 9)
    rows = lanes.between()
    assert [lanes.users[code] for code in rows.user] == ["user 1", "user 0"]
    assert lane_sentence(second, 0.05).startswith("Request 2 of user 0, priority 9\n")


def test_columns_say_what_the_lanes_say() -> None:
    run = Run()
    run.crunch()
    lanes = run.history.lanes
    rows = lanes.between()
    middle, last = (lanes.begin + lanes.end) / 2, lanes.end
    for begin, end in ((lanes.begin, last), (middle, middle + 0.2), (middle, middle), (last + 1, last + 2)):
        spans = lanes.spans(rows.number, begin, end)
        found = sorted(zip(spans.row.tolist(), spans.begin.tolist(), spans.kind.tolist(), strict=True))
        wanted = [
            (row, span.begin, span.kind)
            for row, request_id in enumerate(rows.request_id.tolist())
            for span in lanes.lanes[request_id].spans
            if span.begin <= end and span.end >= begin
        ]
        assert found == sorted(wanted)
        if begin <= lanes.end:
            assert len(found) > 0
    some = lanes.spans(rows.number[[4, 1]], lanes.begin, lanes.end)
    assert set(some.row.tolist()) == {0, 1}
    chosen = {0: rows.request_id[4], 1: rows.request_id[1]}
    assert len(some.row) == sum(len(lanes.lanes[int(i)].spans) for i in chosen.values())
    marked, times = lanes.marks(rows.number, lanes.begin, lanes.end)
    assert sorted(times.tolist()) == sorted(t for lane in lanes.lanes.values() for t in lane.preempted_at)
    assert len(marked) > 0


def long_run(lanes: Lanes, steps: int, batch: int, length: int, changes: int) -> int:
    """``batch`` requests at a time, each for ``length`` steps, stalled in every ``changes``-th; returns how many."""
    decode = [0] * batch
    ones = [1] * batch
    requests = 0
    ids: list[int] = []
    for step in range(1, steps + 1):
        events: list = []
        if (step - 1) % length == 0:
            events = [Finished(i, "length", length) for i in ids]
            if ids:
                lanes.apply(record_of(step, time=step * 0.02, seconds=0.0, events=events))
            ids = list(range(requests + 1, requests + batch + 1))
            requests += batch
            events = [Arrived(i, 1, length, 0, "", step * 0.02) for i in ids]
            events += [Admitted(i, 0, 0.0, False) for i in ids]
        rows = (ids, ones, ones, decode, ones) if step % changes else ([], [], [], [], [])
        lanes.apply(
            StepRecord(
                step, step * 0.02, StepTimings(forward=0.02), events, *rows, batch, 0, 0, 0, 64, RunTotals(steps=step)
            )
        )
    return requests


def check_nothing_is_lost(lanes: Lanes, steps: int, batch: int, length: int, changes: int) -> None:
    requests = long_run(lanes, steps, batch, length, changes)
    rows = lanes.between()
    assert len(rows) == requests and lanes.oldest == lanes.begin
    spans = lanes.spans(rows.number)
    assert int(spans.tokens.sum()) == batch * (steps - steps // changes)
    assert float((spans.end - spans.begin).sum()) == pytest.approx(batch * steps * 0.02, rel=1e-6)


def test_what_is_promised_of_a_long_run_is_kept_at_a_hundredth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.lanes.SPANS_KEPT", SPANS_KEPT // 100)
    monkeypatch.setattr("engine.lanes.LANES_KEPT", LANES_KEPT // 100)
    check_nothing_is_lost(Lanes(), steps=2000, batch=10, length=31, changes=14)


@pytest.mark.slow
def test_twenty_thousand_steps_of_a_hundred_requests_are_looked_back_at_without_loss() -> None:
    lanes = Lanes()
    check_nothing_is_lost(lanes, steps=20_000, batch=100, length=31, changes=14)
    assert lanes.nbytes < 20e6


def test_what_is_too_old_goes_with_its_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.lanes.SPANS_KEPT", 200)
    lanes = Lanes()
    long_run(lanes, steps=600, batch=5, length=20, changes=4)
    assert lanes.begin < lanes.oldest < lanes.end
    rows = lanes.between()
    spans = lanes.spans(rows.number)
    assert 200 <= len(spans.row) <= 205
    assert set(range(len(rows))) == set(spans.row.tolist())  # no lane without a span
    assert lanes.lane(1) is None and lanes.lane(int(rows.request_id[-1])).spans


def test_another_run_begins_anew_whatever_its_steps_are_called() -> None:
    lanes = opened(3)
    lanes.apply(record_of(3, time=0.0, seconds=1.0, rows=[(1, RowKind.DECODE, 1, 1, 0, 0)]))
    later = Keyframe(90, 50.0, 40, 16, 8, 64, [], [], None, RunTotals(steps=1))
    lanes.restore(later)
    assert len(lanes) == 0 and lanes.begin == lanes.end == 0.0


def test_a_request_of_another_run_with_the_same_number_has_a_lane_of_its_own() -> None:
    lanes = opened(1)
    lanes.apply(record_of(3, time=0.0, seconds=1.0, rows=[(1, RowKind.DECODE, 1, 1, 0, 0)]))
    other = RequestState(1, 5.0, 30, 9, 0, "", RequestStatus.RUNNING, 30, 2, 0, 0, [], admitted_time=5.5)
    lanes.restore(Keyframe(90, 7.0, 40, 16, 8, 64, [other], [], None, RunTotals(steps=90)))
    rows = lanes.between()
    assert rows.request_id.tolist() == [1, 1] and rows.arrival.tolist() == [0.0, 5.0]
    assert [(s.kind, s.begin, s.end) for s in lanes.lane(1).spans] == [
        (SpanKind.WAITING, 5.0, 5.5),
        (SpanKind.DECODE, 5.5, 7.0),
    ]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0])
def test_a_step_that_took_no_number_of_seconds_spoils_nothing(bad: float) -> None:
    lanes = opened(1)
    row = (1, RowKind.DECODE, 1, 1, 0, 0)
    lanes.apply(record_of(3, time=0.0, seconds=1.0, rows=[row]))
    lanes.apply(record_of(4, time=1.0, seconds=bad, rows=[row]))
    lanes.apply(record_of(5, time=bad if bad != -1.0 else 1.0, seconds=1.0, rows=[row]))
    assert lanes.end == 2.0
    assert [(s.begin, s.end, s.tokens) for s in lanes.lane(1).spans] == [(0.0, 2.0, 3)]


def test_columns_grow_and_forget_the_oldest() -> None:
    columns = Columns(3000, value=np.int64, half=np.float32)
    taken = columns.nbytes
    for number in range(10_000):
        columns.append(1, value=number, half=number / 2)
        assert columns["value"][-1] == number and len(columns) == min(number + 1, 3000)
    assert columns["value"].tolist() == list(range(7000, 10_000)) and columns.dropped == 7000
    assert taken < columns.nbytes <= columns.most_bytes == 3750 * 12
    columns.append(5000, value=np.arange(5000), half=0.5)
    assert columns["value"].tolist() == list(range(2000, 5000)) and columns.dropped == 12_000
    assert columns["half"].tolist() == [0.5] * 3000
    columns.clear()
    assert len(columns) == 0 and columns.dropped == 0


def test_a_priority_beyond_what_is_kept_is_the_last_that_is() -> None:
    """A workload file may say any; a lane's column has 32 bits."""
    run = Run()
    for request_id, priority in ((1, 2**40), (2, -(2**40)), (3, 0)):
        run.add(request_id, 20, 8, priority=priority)
    run.step(2)
    run.core.set_priority(3, 2**50)
    run.step(2)
    run.restore(run.core.keyframe())
    assert [lane.priority for lane in run.history.lanes.lanes.values()] == [2**31 - 1, -(2**31), 2**31 - 1]
