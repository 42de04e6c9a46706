"""Batch occupancy: steps that share a bar, the counts under them, the shown step; plots with faults in their series."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QImage, QPainter, QPen, QWheelEvent
from PySide6.QtWidgets import QApplication

from app.scope.bars import BAR, make_bars, step_points
from app.scope.occupancy import OccupancyPanel
from app.scope.occupancy_plot import bars_sentence
from app.scope.panel import RunHistory, ScopeSource
from app.scope.plot import Plot, linear_ticks, tick_label
from app.scope.steps import LAYERS, PARTS, StepHistory
from app.selection import Selection
from app.theme import Theme
from engine.config import SchedulerConfig
from engine.events import RowKind, RunTotals, StepRecord, StepTimings
from engine.run_state import RunState
from tests.app.conftest import Rig
from tests.app.runs import Run, record_of
from tests.app.test_window import has_color, pixels

# Steps and bars ------------------------------------------------------------------------------------------------------


def decoding(steps: int, capacity: int = 64) -> StepHistory:
    """Step n decodes n tokens, leaves n running and 2n waiting."""
    history = StepHistory(capacity)
    for step in range(1, steps + 1):
        rows = [(i, RowKind.DECODE, 1, 1, 0, 0) for i in range(step)]
        history.apply(record_of(step, time=float(step), seconds=0.5, running=step, rows=rows))
    return history


def test_a_bar_of_several_steps_is_their_mean_and_their_most() -> None:
    history = decoding(10)
    bars = make_bars(history, 20, 4)
    assert bars.first_step.tolist() == [1, 5, 9] and bars.last_step.tolist() == [4, 8, 10]
    assert bars.stacks[0].tolist() == [2.5, 6.5, 9.5] and bars.most.tolist() == [4, 8, 10]
    assert bars.lines["running"].tolist() == [4, 8, 10]
    assert make_bars(history, 2, 4).first_step.tolist() == [5, 9]
    assert "Steps 5 to 8, 4 steps: 6.5 decode = 6.5 tokens on average, 8 in the fullest" in bars_sentence(bars, 1)


def test_which_steps_share_a_bar_does_not_change_as_the_run_goes_on() -> None:
    firsts: set[int] = set()
    for steps in range(1, 200):
        bars = make_bars(decoding(steps, capacity=40), 5, 8)
        assert len(bars) <= 5
        assert bars.last_step[-1] == steps
        assert int(bars.steps.sum()) == bars.last_step[-1] - bars.first_step[0] + 1
        firsts |= {int(first) for first in bars.first_step[1:]}
        if steps > 100:
            break
    assert all(first % 8 == 1 for first in firsts)
    assert len(make_bars(StepHistory(), 5, 8)) == 0


def test_the_history_is_read_as_it_was_after_a_step() -> None:
    history = decoding(100, capacity=40)
    assert len(history) == 40 and history.count(80) == 20 and history.number(80) == 80
    assert history.last("decode", 3, 80).tolist() == [78, 79, 80]
    assert history.row(2, 80).step == 78 and history.row(20, 80) is None
    assert make_bars(history, 3, 1, 80).last_step.tolist() == [78, 79, 80]
    assert history.count(60) == 0 and len(make_bars(history, 3, 1, 60)) == 0
    assert history.at(80.3).step == 80 and history.at(80.7) is None and history.at(10.0) is None


def test_a_step_keeps_its_parts_and_its_blocks() -> None:
    history = StepHistory()
    timings = StepTimings(0.001, 0.002, 0.03, 0.004, 0.005)
    totals = RunTotals(steps=1)
    history.apply(StepRecord(1, 7.0, timings, [], [], [], [], [], [], 3, 5, 11, 13, 64, totals, num_swapped=2))
    row = history.row(0)
    assert [getattr(row, part) for part in PARTS] == [0.001, 0.002, 0.03, 0.004, 0.005]
    assert (row.time, row.running, row.waiting, row.swapped) == (7.0, 3, 5, 2)
    assert (row.free_blocks, row.cached_blocks) == (11, 13)


def test_the_steps_of_a_long_run_fit_into_what_is_stated() -> None:
    history = StepHistory()
    record = record_of(1, time=0.0, seconds=0.1)
    for _ in range(34_000):
        history.apply(record)
    assert len(history) == 32_768 and history.nbytes < 6.7e6


def test_a_line_is_level_over_a_step() -> None:
    points = step_points(np.array([2, 2, 5, 1]), 10.0, 3.0)
    assert points.tolist() == [[10, 2], [16, 2], [16, 5], [19, 5], [19, 1], [22, 1]]
    assert len(step_points(np.full(1000, 4), 0.0, 3.0)) == 2


# The widget ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def busy(make_rig) -> Rig:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.window.arrange("monitor")
    rig.load()
    for _ in range(6):
        rig.add(40, 60)
        rig.step(3)
    rig.window.reveal("occupancy")
    rig.step(40)
    plot = rig.window.panels["occupancy"].plot
    rig.wait_for(lambda: len(plot.bars) > 0 and plot.bars.last_step[-1] == rig.state.step)
    return rig


def test_running_waiting_and_swapped_are_seen_under_the_bars(qtbot, theme: Theme) -> None:
    source = ScopeSource(RunState(), RunHistory())
    for step in range(1, 50):
        record = record_of(step, time=0.1 * step, seconds=0.1, running=5, rows=[(1, RowKind.DECODE, 1, 1, 0, 0)])
        source.history.steps.apply(msgspec.structs.replace(record, num_waiting=step // 4, num_swapped=step // 9))
    panel = OccupancyPanel(source, theme, Selection())
    qtbot.addWidget(panel)
    panel.resize(280, 220)
    panel.show()
    plot = panel.plot
    assert plot.foot > 0
    assert [int(plot.bars.lines[name][-1]) for name in ("running", "waiting", "swapped")] == [5, 12, 5]
    strip = pixels(plot)[plot.area.bottom() + 4 : plot.area.bottom() + plot.foot]
    for color in (theme.text, theme.muted, theme.swapped):
        assert has_color(strip, color)
    panel.resize(280, 120)
    assert plot.foot == 0 and plot.area.height() > 20  # the bars have what room there is


def test_the_wheel_and_keys_put_steps_together(busy: Rig) -> None:
    plot = busy.window.panels["occupancy"].plot
    steps = len(plot.bars)
    pos = QPointF(plot.area.center())
    args = (Qt.MouseButton.NoButton, Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase, False)
    down = QWheelEvent(pos, QPointF(plot.mapToGlobal(pos.toPoint())), QPoint(), QPoint(0, -120), *args)
    QApplication.sendEvent(plot, down)
    QApplication.sendEvent(plot, down)
    assert plot.steps_per_bar == 4 and len(plot.bars) <= steps // 4 + 1
    assert plot.x_ticks[1].label.endswith(f"{4 * int(-plot.x_ticks[1].value):,}")
    assert "steps on average" not in plot._sentence(0) and "4 steps" in plot._sentence(0)
    busy.qtbot.keyClick(plot, Qt.Key.Key_Plus)
    busy.qtbot.keyClick(plot, Qt.Key.Key_Plus)
    busy.qtbot.keyClick(plot, Qt.Key.Key_Plus)
    assert plot.steps_per_bar == 1 and len(plot.bars) == steps


def test_a_click_on_a_bar_goes_to_its_step(busy: Rig) -> None:
    window = busy.window
    panel = window.panels["occupancy"]
    plot = panel.plot
    newest = window.source.live_state.step
    pos = QPoint(plot.area.right() + 1 - 10 * BAR - 1, plot.area.center().y())
    wanted = int(plot.bars.last_step[plot.bar_at(pos.x())])
    assert wanted == newest - 10
    with busy.qtbot.waitSignal(panel.step_wanted) as asked:
        busy.qtbot.mouseClick(plot, Qt.MouseButton.LeftButton, pos=pos)
    assert asked.args == [wanted]
    assert window.source.last_step == wanted
    busy.wait_for(lambda: plot.bars.last_step[-1] == wanted)
    assert plot.x_ticks[0].label == f"step {wanted:,}"
    busy.qtbot.keyClick(plot, Qt.Key.Key_Left)
    busy.wait_for(lambda: plot.bars.last_step[-1] == wanted - 1)
    busy.step(3)
    busy.settle(50)
    assert plot.bars.last_step[-1] == wanted - 1  # live goes on behind
    window.travel.show_newest()
    busy.wait_for(lambda: plot.bars.last_step[-1] == newest + 3)


def test_a_change_of_knobs_is_marked_at_its_step(busy: Rig) -> None:
    busy.bridge.reconfigure(SchedulerConfig(max_num_seqs=3))
    busy.step(5)
    plot = busy.window.panels["occupancy"].plot
    plot.refresh()
    changes = busy.window.history.changes.between(-math.inf, math.inf)
    assert len(plot.marks) == len(changes) == 1
    place, label = plot.marks[0]
    assert label.startswith("max sequences") and plot.bars.last_step[len(plot.bars) + int(place)] == changes[0].step
    assert has_color(pixels(plot), busy.theme.accent)


# Whatever is in a series ---------------------------------------------------------------------------------------------


class Curve(Plot):
    """A curve as panels draw theirs: the range from what is finite."""

    def __init__(self, theme: Theme, values: list[float]) -> None:
        super().__init__(theme)
        self.values = np.array(values)
        finite = self.values[np.isfinite(self.values)]
        self.y_range = (float(finite.min(initial=0.0)), float(finite.max(initial=1.0)))
        self.x_range = (0.0, float(len(values) - 1))
        self.y_ticks = linear_ticks(*self.y_range, 4)
        self.resize(200, 120)
        self.layout_axes()

    def paint_data(self, painter: QPainter) -> None:
        self.paint_curve(painter, np.arange(float(len(self.values))), self.values, QPen(self.theme.decode, 2))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, -1e300])
@pytest.mark.parametrize("log", [False, True])
def test_one_bad_value_never_blanks_a_plot(theme: Theme, bad: float, log: bool) -> None:
    plot = Curve(theme, [1.0, 2.0, 3.0, bad, 2.0, 3.0, 1.0])
    plot.log_y = log
    if log:
        plot.y_range = (0.1, max(10.0, plot.y_range[1]))
    assert all(math.isfinite(edge) for edge in plot.y_range)
    assert has_color(pixels(plot), theme.decode)
    assert 1 <= len(plot.y_ticks) <= 10 and all(len(tick.label) < 12 for tick in plot.y_ticks)


@pytest.mark.parametrize("low", [math.nan, math.inf, -math.inf, 0.0, 1e300, -1e300])
@pytest.mark.parametrize("high", [math.nan, math.inf, -math.inf, 0.0, 1e300, -1e300])
def test_a_range_that_is_none_is_drawn_all_the_same(theme: Theme, low: float, high: float) -> None:
    plot = Curve(theme, [1.0, 2.0])
    plot.x_range = plot.y_range = (low, high)
    plot.y_ticks = linear_ticks(low, high, 4)
    for value in (math.nan, math.inf, -math.inf, 0.0, 1.0, 1e308):
        assert abs(plot.x_pixel(value)) < 2e5 and abs(plot.y_pixel(value)) < 2e5
    image = QImage(200, 120, QImage.Format.Format_RGB32)
    plot.render(image)
    assert tick_label(1e300) == "1e+300"


def test_a_step_that_took_no_number_of_seconds_leaves_the_bars(theme: Theme) -> None:
    run = Run()
    for bad in (math.nan, math.inf, 1e300):
        run.history.steps.apply(record_of(1, time=bad, seconds=bad, rows=[(1, RowKind.DECODE, 1, 1, 0, 0)]))
    bars = make_bars(run.history.steps, 10, 1)
    assert bars.stacks[LAYERS.index("decode")].tolist() == [1, 1, 1]
