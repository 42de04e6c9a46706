"""The Qt-free halves of the scope: folds over genuine step records, and what is worked out from them."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from app.scope.bars import bar_boxes
from app.scope.occupancy_plot import step_sentence
from app.scope.plot import linear_ticks
from app.scope.steps import LAYERS, StepHistory
from app.words import seconds_label
from engine.compare_svg import nice_step
from engine.events import (
    Keyframe,
    RowKind,
    RunTotals,
)
from engine.lanes import Lanes
from tests.app.runs import Run, record_of

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
    assert len(run.history.rates) == 0
    assert run.history.latency.begin is None
    assert Lanes().lanes == run.history.lanes.lanes == {}
