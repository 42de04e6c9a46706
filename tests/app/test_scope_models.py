"""The Qt-free halves of the scope: folds over genuine step records, and what is worked out from them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from app.scope.block_grid import (
    BlockLook,
    GridColors,
    GridPicture,
    block_looks,
    count_blocks,
    fit_grid,
)
from app.scope.lanes import Lanes, SpanKind
from app.scope.occupancy import bar_boxes
from app.scope.panel import RunHistory
from app.scope.plot import linear_ticks, nice_step, seconds_label
from app.scope.rates import Latency, Throughput, percentiles
from app.scope.reasons import deferred_sentence, queue_rows
from app.scope.steps import StepHistory
from engine.config import SchedulerConfig
from engine.core import EngineCore
from engine.events import Admitted, Arrived, Deferred, Keyframe, Preempted, RunTotals, StepRecord, StepTimings
from engine.request import SamplingParams
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


# Rates ---------------------------------------------------------------------------------------------------------------


def record_of(
    step: int, *, time: float, seconds: float, output: int = 0, prompt: int = 0, running: int = 1
) -> StepRecord:
    totals = RunTotals(steps=step, output_tokens=output, prompt_tokens=prompt)
    return StepRecord(step, time, StepTimings(forward=seconds), [], [], [], [], [], [], running, 0, 0, 0, 64, totals)


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


def test_a_rejected_request_has_a_lane_that_ends() -> None:
    run = Run(num_blocks=4)
    run.add(1, 900, 50)
    run.step()
    lane = run.history.lanes.lanes.get(1)
    assert lane is None or lane.finished_at is not None
    assert run.history.lanes.open == {}


def test_lanes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.scope.lanes.LANES_KEPT", 5)
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
        waiting = [row for row in rows if row.phase in ("waiting", "preempted")]
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
        (Deferred(7, "watermark", 9, 4), ("9 blocks", "4 blocks are free above the watermark")),
    ],
)
def test_the_binding_reason_as_a_sentence(deferred: Deferred, words: tuple[str, ...]) -> None:
    state = RunState()
    state.restore(Keyframe(1, 0.0, 100, 16, 32, 64, [], [], None, RunTotals()))
    sentence = deferred_sentence(deferred, state)
    for word in words:
        assert word in sentence


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
        looks[some] = rng.integers(0, 4, 9)
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
    stacks = np.array([[rng.randint(0, 40) for _ in range(50)] for _ in range(3)])
    boxes = bar_boxes(stacks, top=130.0, height=200, bar=3)
    columns: dict[int, list] = {}
    for kind in boxes:
        for box in kind:
            assert box.width() == 2 and box.height() >= 1
            columns.setdefault(box.x(), []).append(box)
    assert all(x % 3 == 0 for x in columns)
    for x, stacked in columns.items():
        total = int(stacks[:, x // 3 + 50].sum())
        assert sum(box.height() for box in stacked) == pytest.approx(total * 200 / 130, abs=2)
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
