"""The Qt-free halves of the scope: folds over genuine step records, and what is worked out from them."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from app.scope.block_grid import (
    BlockLook,
    GridColors,
    GridPicture,
    block_looks,
    count_blocks,
    fit_grid,
    host_looks,
)
from app.scope.block_map import block_sentence, host_sentence
from app.scope.ledger import cell_text
from app.scope.occupancy import bar_boxes, step_sentence
from app.scope.panel import RunHistory
from app.scope.plot import linear_ticks, nice_step
from app.scope.rates import Latency, Throughput, percentiles
from app.scope.reasons import WAITING_PHASES, deferred_sentence, ledger_sentence, queue_rows
from app.scope.steps import LAYERS, StepHistory
from app.scope.timeline import lane_sentence
from app.words import seconds_label
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import (
    Admitted,
    Arrived,
    BatchStarted,
    Deferred,
    Keyframe,
    Preempted,
    Recovered,
    RequestState,
    RowKind,
    RunTotals,
    StepRecord,
    StepTimings,
    SwapDropped,
    SwappedIn,
    SwappedOut,
)
from engine.lanes import Lanes, SpanKind
from engine.request import RequestStatus, SamplingParams, branch_id
from engine.run_state import RunState
from tests.app.scripted import TimedRunner
from tests.oracles import VOCAB_SIZE


class Run:
    """A genuine run, step by step, folded into the run state and the histories."""

    def __init__(
        self, *, num_blocks: int = 20, token_budget: int = 48, scheduler: SchedulerConfig | None = None
    ) -> None:
        self.runner = TimedRunner(16)
        self.scheduler = scheduler or SchedulerConfig()
        self.core = EngineCore(
            self.runner,
            scheduler=self.scheduler,
            num_blocks=num_blocks,
            block_size=16,
            prefix_cache=True,
            max_model_len=1024,
            vocab_size=VOCAB_SIZE,
            token_budget=token_budget,
            clock=lambda: self.runner.now,
        )
        self.state = RunState()
        self.history = RunHistory()
        self.records: list[StepRecord] = []
        self.restore(self.core.keyframe())

    def restore(self, keyframe: Keyframe) -> None:
        self.state.restore(keyframe)
        self.history.restore(keyframe)

    def add(self, request_id: int, prompt: int, output: int, **given) -> None:
        ids = given.pop("ids", None) or [(request_id * 37 + i) % VOCAB_SIZE for i in range(prompt)]
        self.core.add_request(request_id, ids, SamplingParams(max_tokens=output), **given)

    def step(self, steps: int = 1) -> StepRecord | None:
        record = None
        for _ in range(steps):
            if not self.core.has_work:
                break
            record = self.core.step().record
            if record is not None:
                self.records.append(record)
                self.state.apply(record)
                self.history.apply(record)
        return record

    def crunch(self) -> None:
        """Six requests in a pool too small for them, until all are done."""
        for request_id in range(1, 7):
            self.add(request_id, 40 + request_id, 60)
            self.step(3)
        self.step(10_000)


# Steps ---------------------------------------------------------------------------------------------------------------


def test_a_step_is_counted_by_kind() -> None:
    run = Run()
    run.crunch()
    steps = run.history.steps
    assert len(steps) == len(run.records)
    for age in (0, 5, len(run.records) - 1):
        record = run.records[-1 - age]
        row = steps.row(age)
        assert row is not None and row.step == record.step
        assert row.tokens == sum(record.num_tokens)
        assert row.seconds == pytest.approx(record.timings.total)
    totals = run.state.totals
    # The row that ends a recomputation also computes the newest token, for the first time.
    surplus = int(steps.last("recompute", 10_000).sum()) - totals.recomputed_tokens
    assert totals.recomputed_tokens > 0 and 0 <= surplus <= totals.preemptions
    assert int(steps.last("prefill", 10_000).sum()) == totals.prompt_tokens
    assert steps.row(len(steps)) is None and steps.row(-1) is None


def test_the_ring_keeps_the_newest() -> None:
    history = StepHistory(capacity=8)
    for step in range(1, 30):
        history.apply(record_of(step, time=step * 0.1, seconds=0.1))
    assert history.last("step", 100).tolist() == list(range(22, 30))
    assert history.last("step", 3).tolist() == [27, 28, 29]
    history.restore(Keyframe(0, 0.0, 4, 16, 8, 64, [], [], None, RunTotals()))
    assert len(history) == 0


def test_drafts_and_padding_are_layers_of_their_own() -> None:
    history = StepHistory()
    history.apply(
        record_of(
            1,
            time=0.0,
            seconds=0.1,
            rows=[
                (1, RowKind.DECODE, 5, 3, 0, 4),  # two of four drafts accepted
                (2, RowKind.DECODE, 1, 1, 0, 0),
                (3, RowKind.DECODE, 3, 3, 0, 2),  # both
                (4, RowKind.PREFILL, 20, 1, 12, 0),
                (5, RowKind.PADDING, 0, 0, 1, 0),
            ],
        )
    )
    row = history.row(0)
    assert row is not None
    assert (row.decode, row.prefill, row.recompute) == (3, 20, 0)
    assert (row.accepted, row.rejected, row.padding) == (4, 2, 13)
    assert row.tokens == 5 + 1 + 3 + 20 + 13
    assert step_sentence(row).startswith(
        "Step 1: 3 decode + 20 prefill + 4 accepted drafts + 2 rejected drafts + 13 padding = 42 of 64 tokens"
    )


# Rates ---------------------------------------------------------------------------------------------------------------


def record_of(
    step: int,
    *,
    time: float,
    seconds: float,
    output: int = 0,
    prompt: int = 0,
    running: int = 1,
    events: Sequence[Any] = (),
    rows: Sequence[tuple[int, RowKind, int, int, int, int]] = (),
) -> StepRecord:
    """rows: (request id, kind, tokens, new tokens, padding, drafts)."""
    totals = RunTotals(steps=step, output_tokens=output, prompt_tokens=prompt)
    ids, kinds, tokens, new, padding, drafts = ([row[i] for row in rows] for i in range(6))
    columns = (ids, tokens, tokens, [int(kind) for kind in kinds], new)
    timings = StepTimings(forward=seconds)
    return StepRecord(
        step,
        time,
        timings,
        list(events),
        *columns,
        running,
        0,
        0,
        0,
        64,
        totals,
        padding if any(padding) else [],
        drafts if any(drafts) else [],
    )


def throughput_of(step_seconds: list[float], tokens_per_step: int) -> Throughput:
    throughput = Throughput()
    throughput.restore(Keyframe(0, 0.0, 4, 16, 8, 64, [], [], None, RunTotals()))
    now, total = 50.0, 0
    for number, seconds in enumerate(step_seconds, 1):
        total += tokens_per_step
        throughput.apply(record_of(number, time=now, seconds=seconds, output=total))
        now += seconds
    return throughput


@pytest.mark.parametrize("seconds", [0.003, 0.05, 0.31, 1.7])
def test_the_gauge_is_right_at_every_phase(seconds: float) -> None:
    for steps in range(int(2 / seconds) + 2, int(2 / seconds) + 12):
        rate = throughput_of([seconds] * steps, 12).output_rate()
        assert rate == pytest.approx(12 / seconds, rel=0.05)


def test_the_gauge_is_zero_exactly_when_idle() -> None:
    throughput = throughput_of([0.1] * 30, 3)
    assert throughput.output_rate() > 0
    throughput.apply(record_of(31, time=53.0, seconds=0.1, output=93, running=0))
    assert throughput.output_rate() == 0.0
    assert Throughput().output_rate() == 0.0


def test_the_curve_is_even_for_an_even_run_and_spans_a_minute() -> None:
    series = throughput_of([0.13] * 1000, 6).series()
    assert series is not None
    assert series.ages[0] >= -61 and series.ages[-1] <= 0 and np.all(np.diff(series.ages) > 0)
    assert series.output[1:] == pytest.approx(np.full(len(series.output) - 1, 6 / 0.13), rel=0.06)


def test_steps_that_were_missed_are_counted() -> None:
    throughput = throughput_of([0.1] * 20, 5)
    requests = RunState().keyframe().requests
    throughput.restore(Keyframe(60, 56.0, 4, 16, 8, 64, requests, [], None, RunTotals(steps=60, output_tokens=300)))
    series = throughput.series()
    assert series is not None
    area = float(np.sum(series.output) * 0.5)
    assert area == pytest.approx(300, rel=0.1)


def test_latency_is_from_arrival_and_between_tokens() -> None:
    run = Run(num_blocks=60)
    run.add(1, 100, 5)
    run.step(10_000)
    arrival = run.records[0].events[0].arrival_time
    ends = [r.time + r.timings.total for r in run.records if sum(r.new_tokens)]
    [(_, ttft, request_id)] = run.history.latency.first_tokens
    assert request_id == 1 and ttft == pytest.approx(ends[0] - arrival)
    _, gaps = run.history.latency.gaps()
    assert gaps == pytest.approx(np.diff(ends))


def test_no_gap_is_taken_across_missing_records() -> None:
    run = Run(num_blocks=60)
    run.add(1, 20, 50)
    run.step(10)
    count = len(run.history.latency.gaps()[1])
    for _ in range(10):
        run.core.step()
    run.restore(run.core.keyframe())
    run.step(1)
    assert len(run.history.latency.gaps()[1]) == count
    run.step(1)
    assert len(run.history.latency.gaps()[1]) == count + 1
    assert len(run.history.latency.first_tokens) == 1


def test_percentiles_of_nothing_and_of_nonsense() -> None:
    assert percentiles(np.zeros(0)).p50 is None
    assert percentiles(np.array([np.nan, np.inf])).p99 is None
    assert percentiles(np.array([1.0, np.nan, 3.0])).p50 == 2.0
    assert Latency().ttft().p50 is None


def test_percentiles_are_numpys() -> None:
    rng = np.random.default_rng(5)
    for count in (1, 2, 3, 100, 1001):
        values = rng.exponential(size=count)
        found = percentiles(values)
        assert (found.p50, found.p99) == pytest.approx(tuple(np.percentile(values, (50, 99))))


# Lanes ---------------------------------------------------------------------------------------------------------------


def test_a_lane_is_a_request_from_arrival_to_end_without_a_gap() -> None:
    run = Run()
    run.crunch()
    lanes = run.history.lanes.lanes
    assert set(lanes) == set(range(1, 7)) and run.history.lanes.open == {}
    events = [event for record in run.records for event in record.events]
    arrivals = {event.request_id: event.arrival_time for event in events if isinstance(event, Arrived)}
    preempted = [event.request_id for event in events if isinstance(event, Preempted)]
    resumed = [event.request_id for event in events if isinstance(event, Admitted) and event.resumed]
    assert preempted and resumed
    for request_id, lane in lanes.items():
        assert lane.spans[0].begin == lane.arrival == pytest.approx(arrivals[request_id])
        for before, after in pairwise(lane.spans):
            assert before.end == after.begin and before.kind != after.kind
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
    assert run.history.lanes.open == {}


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
    assert lanes.open == {} and set(lanes.lanes) == {1, 2}
    assert lanes.lanes[1].finish_reason == "length"


# Queue ---------------------------------------------------------------------------------------------------------------


def test_every_request_is_listed_and_every_wait_has_numbers() -> None:
    run = Run(num_blocks=12, scheduler=SchedulerConfig(max_num_seqs=8))
    for request_id in range(1, 6):
        run.add(request_id, 60, 100)
    seen: set[str] = set()
    while run.step() is not None:
        rows = queue_rows(run.state, run.scheduler)
        assert {row.request_id for row in rows} == set(run.state.requests)
        waiting = [row for row in rows if row.phase in WAITING_PHASES]
        assert len(waiting) == run.state.num_waiting
        for row in rows:
            assert row.why.endswith(".")
            seen.add(row.phase)
        if waiting and run.state.deferred is not None and run.state.deferred.reason == "blocks":
            free = run.state.num_blocks - run.state.referenced_blocks
            shown = min(free, run.state.deferred.available)
            assert (f"{shown} block" if shown else "no block") in waiting[0].why
        if waiting and run.state.deferred is not None:
            assert waiting[0].request_id == run.state.deferred.request_id
            assert any(character.isdigit() for character in waiting[0].why)
        for row in waiting[1:]:
            assert f"request {waiting[0].request_id}" in row.why
    assert {"decode", "prefill", "waiting", "preempted", "recompute"} <= seen


def test_a_preempted_request_says_to_whom_it_gave_what() -> None:
    run = Run(num_blocks=12)
    for request_id in range(1, 4):
        run.add(request_id, 60, 100)
    preemption = None
    while preemption is None:
        record = run.step()
        assert record is not None
        preemption = next((e for e in record.events if isinstance(e, Preempted)), None)
    row = next(r for r in queue_rows(run.state, run.scheduler) if r.request_id == preemption.request_id)
    assert row.phase == "preempted"
    assert f"{preemption.blocks} blocks" in row.why and f"{preemption.tokens} tokens" in row.why
    assert preemption.rule in row.why


def test_the_queue_is_in_the_order_of_the_discipline() -> None:
    run = Run(num_blocks=60, scheduler=SchedulerConfig(order="priority", max_num_seqs=1))
    run.add(1, 20, 100)
    run.step()
    for request_id, priority in ((2, 5), (3, 0), (4, 2)):
        run.add(request_id, 20, 10, priority=priority)
    run.step()
    waiting = [row.request_id for row in queue_rows(run.state, run.scheduler) if row.phase == "waiting"]
    assert waiting == [3, 4, 2]


@pytest.mark.parametrize(
    ("deferred", "words"),
    [
        (Deferred(7, "blocks", 12, 3), ("12 blocks", "3 blocks are free")),
        (Deferred(7, "blocks", 1, 0), ("1 block ", "no block is free")),
        (Deferred(7, "slots", 1, 0), ("32 running places", "max_num_seqs")),
        (Deferred(7, "budget", 40, 1), ("40 tokens", "1 token is left", "64")),
        (Deferred(7, "watermark", 9, 4), ("9 blocks", "watermark", "4 blocks are free")),
        (Deferred(7, "resume", 15, 9), ("15 blocks", "more than it lost", "9 blocks are free")),
        (Deferred(7, "promised", 20, 1), ("20 blocks", "1 of 100 blocks is neither in use nor promised")),
        (Deferred(7, "batch", 1, 0), ("static batch 3", "2 answers of 3 in it are not complete")),
        (Deferred(7, "joining", 4, 1), ("3 running requests", "until 4 wait", "1 waits", "waiting_served_ratio")),
        (Deferred(7, "draining", 3, 0), ("changes to static", "3 requests are still in it")),
        (Deferred(7, "something new", 3, 1), ("something new", "3", "1")),
    ],
)
def test_the_binding_reason_as_a_sentence(deferred: Deferred, words: tuple[str, ...]) -> None:
    rows = [state_of(1, RequestStatus.RUNNING), state_of(2, RequestStatus.RUNNING), state_of(3, RequestStatus.ENDED)]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], None, RunTotals(), pending_discipline="static"))
    state.batch = BatchStarted(3, [1, 2, 3], 40)
    sentence = deferred_sentence(deferred, state)
    for word in words:
        assert word in sentence
    assert sentence.endswith(".")


def test_every_reason_of_the_events_has_a_sentence_of_its_own() -> None:
    told = set(re.findall(r"(?m)^    ``(\w+)``  +", inspect.getsource(Deferred)))
    assert {"blocks", "batch", "joining", "draining"} <= told
    state = RunState()
    for reason in told:
        assert not deferred_sentence(Deferred(1, reason, 2, 1), state).startswith("Waits for"), reason


def state_of(request_id: int, status: RequestStatus, **given) -> RequestState:
    """A request of 40 prompt tokens that has given 12."""
    more = {"blocks": [], "num_computed": 51, "output_tokens": 12} | given
    return RequestState(request_id, 0.0, 40, 90, 0, "", status, cached_tokens=0, preemptions=1, **more)


def test_what_is_complete_or_swapped_says_so_in_the_queue() -> None:
    branch = branch_id(1, 1)
    rows = [
        state_of(1, RequestStatus.RUNNING),
        state_of(branch, RequestStatus.ENDED, finish_reason="stop"),
        state_of(3, RequestStatus.WAITING),
        state_of(4, RequestStatus.RUNNING, blocks=[4, 5, 6, 7]),
    ]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, rows, [], None, RunTotals(), 8))
    moved = Preempted(4, branch, "latest arrival", "swap", 51, 4, 3, recompute_seconds=0.4, swap_seconds=0.02)
    state.apply(record_of(2, time=0.1, seconds=0.1, events=[moved, SwappedOut(4, [5, 6, 7], [1, 2, 3])]))
    running, ended, swapped, waiting = queue_rows(state, SchedulerConfig())
    assert running.request_id == 1
    assert (ended.request_id, ended.phase) == (branch, "ended")
    assert "Complete: 12 tokens (stop)" in ended.why and "1 answer in it is not complete" in ended.why
    assert (swapped.request_id, swapped.phase, swapped.blocks) == (4, "swapped", 1)  # before those that never ran
    assert "to request 1.1 (latest arrival); 51 tokens in 3 blocks of host memory." in swapped.why
    [entry] = state.ledger
    assert "Estimated: computing again 0.4 s, swapping 20 ms." in ledger_sentence(entry)
    assert waiting.phase == "waiting" and "Behind request 4" in waiting.why


def test_the_ledger_counts_bytes_and_time() -> None:
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, [state_of(4, RequestStatus.RUNNING)], [], None, RunTotals(), 8))
    fallback = "the host pool has 2 blocks free, 3 are needed"
    for moment, event in enumerate(
        (
            Preempted(4, 9, "", "swap", 51, 3, 3),
            SwappedOut(4, [], [1, 2, 3]),
            SwapDropped(4, [1, 2, 3], "it alone fills the pool"),
            Recovered(4, 1.25, 51),
            Preempted(4, 4, "", "recompute", 60, 4, fallback=fallback),
        ),
        start=2,
    ):
        state.apply(record_of(moment, time=moment * 0.1, seconds=0.1, events=[event]))
    first, second = state.ledger
    assert [cell_text(first, column, 1 << 20) for column in range(6)] == [
        "2", "4", "9", "3.0 MiB swapped", "1.2 s", ""
    ]  # fmt: skip
    assert "51 tokens in 3 blocks (3.0 MiB) of host memory" in ledger_sentence(first, 1 << 20)
    assert "Given up in host memory: it alone fills the pool." in ledger_sentence(first)
    assert "Back where it was after 1.2 s, 51 tokens computed again." in ledger_sentence(first)
    assert cell_text(second, 4) == "…" and cell_text(second, 3) == "60 tokens, 4 blocks"
    assert f"Not swapped: {fallback}." in ledger_sentence(second)


# Blocks --------------------------------------------------------------------------------------------------------------


def test_the_map_counts_what_the_engine_counts() -> None:
    run = Run(num_blocks=24)
    shared = [5] * 32
    for request_id in range(1, 8):
        run.add(request_id, 0, 30, ids=shared + [request_id] * 20)
        record = run.step(2)
    most_shared = 0
    while record is not None:
        counts = count_blocks(block_looks(run.state))
        assert counts.free == record.free_blocks and counts.cached == record.cached_blocks
        assert counts.free + counts.cached + counts.referenced == 24
        most_shared = max(most_shared, counts.shared)
        record = run.step()
    assert most_shared >= 2


def test_blocks_that_are_held_and_not_begun_are_reserved() -> None:
    rows = [
        state_of(1, RequestStatus.RUNNING, blocks=[1, 2, 3, 4, 5, 6], num_computed=33),
        state_of(2, RequestStatus.ENDED, blocks=[1, 7, 8], num_computed=32),
        state_of(3, RequestStatus.SWAPPED, blocks=[1, 0, 0], num_computed=40, host_blocks=[2, 4]),
    ]
    state = RunState()
    state.restore(Keyframe(1, 0.0, 10, 16, 32, 64, rows, [9], None, RunTotals(), 5))
    looks = block_looks(state)
    assert [BlockLook(look).name[0:3] for look in looks] == [
        "SHA", "REF", "REF", "RES", "RES", "RES", "REF", "RES", "CAC", "FRE"
    ]  # fmt: skip
    counts = count_blocks(looks)
    assert (counts.referenced, counts.reserved, counts.cached, counts.shared, counts.free) == (8, 4, 1, 1, 1)
    host, owners = host_looks(state)
    assert host.tolist() == [0, BlockLook.REFERENCED, 0, BlockLook.REFERENCED, 0] and owners.tolist() == [0, 3, 0, 3, 0]
    assert "reserved: not begun" in block_sentence(state, 4)
    assert "number 2 of its 2 blocks here" in host_sentence(state, 4) and host_sentence(state, 1).endswith("free")


@pytest.mark.parametrize("blocks", [1, 20, 72, 999, 16_384, 65_536])
@pytest.mark.parametrize("size", [(1, 1), (100, 60), (371, 255), (1200, 800)])
def test_the_grid_fits_and_finds_its_cells(blocks: int, size: tuple[int, int]) -> None:
    shape = fit_grid(blocks, *size)
    assert shape.width <= size[0] and shape.height <= size[1] + (shape.pitch if size == (1, 1) else 0)
    assert shape.cells * shape.blocks_per_cell >= blocks
    for cell in {0, shape.cells // 2, shape.cells - 1}:
        row, column = divmod(cell, shape.columns)
        assert shape.cell_at(column * shape.pitch, row * shape.pitch) == cell
    assert shape.cell_at(-1, 0) is None and shape.cell_at(0, shape.height) is None
    if blocks <= size[0] * size[1]:
        assert shape.blocks_per_cell == 1


@pytest.mark.parametrize("pitch_area", [(60, 40), (300, 200), (900, 700)])
def test_painting_the_changes_gives_the_whole_picture(pitch_area: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    blocks = 150
    colors = GridColors(*(np.array(c, dtype=np.uint8) for c in ((30, 20, 10), (60, 60, 60), (250, 251, 252))))
    kept = GridPicture(fit_grid(blocks, *pitch_area), colors)
    looks = np.zeros(blocks, dtype=np.uint8)
    rgb = np.zeros((blocks, 3), dtype=np.uint8)
    selected = np.zeros(blocks, dtype=np.bool_)
    for _ in range(20):
        some = rng.integers(0, blocks, 9)
        looks[some] = rng.integers(0, len(BlockLook), 9)
        rgb[some] = rng.integers(0, 256, (9, 3))
        selected[some] = rng.integers(0, 2, 9).astype(bool) & (looks[some] >= BlockLook.REFERENCED)
        kept.paint(looks, rgb, selected)
        fresh = GridPicture(kept.shape, colors)
        fresh.paint(looks, rgb, selected)
        assert np.array_equal(kept.pixels, fresh.pixels)
    assert kept.paint(looks, rgb, selected) == 0


# Axes and bars -------------------------------------------------------------------------------------------------------


def test_bars_are_whole_pixels_beside_each_other() -> None:
    rng = random.Random(1)
    stacks = np.array([[rng.randint(0, 40) for _ in range(50)] for _ in LAYERS])
    boxes = bar_boxes(stacks, top=260.0, height=400, bar=3)
    columns: dict[int, list] = {}
    for kind in boxes:
        for box in kind:
            assert box.width() == 2 and box.height() >= 1
            columns.setdefault(box.x(), []).append(box)
    assert all(x % 3 == 0 for x in columns)
    for x, stacked in columns.items():
        total = int(stacks[:, x // 3 + 50].sum())
        assert sum(box.height() for box in stacked) == pytest.approx(total * 400 / 260, abs=2)
        assert max(box.bottom() for box in stacked) == -1  # stands on the axis
        ordered = sorted(stacked, key=lambda box: -box.bottom())
        for below, above in pairwise(ordered):
            assert above.bottom() + 1 == below.top()
    assert bar_boxes(np.zeros((3, 0), dtype=np.int64), top=1.0, height=10, bar=3) == [[], [], []]


def test_a_single_token_is_seen() -> None:
    [decode, _, _] = bar_boxes(np.array([[1], [0], [0]]), top=8192.0, height=100, bar=3)
    assert decode[0].height() == 1


def test_ticks_are_round_and_within() -> None:
    for high in (0.003, 1.0, 7.3, 64.0, 812.0, 48_000.0):
        ticks = linear_ticks(0.0, high, 5)
        assert 2 <= len(ticks) <= 6
        assert ticks[0].value == 0.0 and ticks[-1].value <= high * 1.000001
    assert nice_step(float("nan"), 4) == 1.0 and nice_step(0.0, 4) == 1.0 and nice_step(float("inf"), 4) == 1.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0042, "4.2 ms"),
        (0.026, "26 ms"),
        (0.21, "0.21 s"),
        (1.7, "1.7 s"),
        (42.0, "42 s"),
        (125.0, "2:05 min"),
        (None, "–"),
    ],
)
def test_durations_for_people(seconds: float | None, text: str) -> None:
    assert seconds_label(seconds) == text


def test_a_new_engine_begins_new_histories() -> None:
    run = Run(num_blocks=60)
    run.add(1, 30, 10)
    run.step(10_000)
    run.restore(Keyframe(0, 0.0, 60, 16, 8, 64, [], [], None, RunTotals()))
    assert len(run.history.steps) == 0
    assert run.history.throughput.series() is None
    assert not run.history.latency.first_tokens
    assert Lanes().lanes == run.history.lanes.lanes == {}
