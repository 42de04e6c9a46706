"""The panels of figures over time: throughput, latency, step time, as widgets on a genuine run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import numpy as np
import pytest
from PySide6.QtCore import QCoreApplication, QEvent, QPoint, Qt
from PySide6.QtGui import QColor, QHelpEvent, QImage
from PySide6.QtWidgets import QToolTip

from app.scope.age_plot import LARGEST, age_ticks
from app.scope.choices import WINDOWS, MenuChoice
from app.scope.curves import MOST_DOTS, LatencyPanel, ThroughputPanel, apart
from app.scope.figure_table import ROW, FigureRow, FigureTable
from app.scope.panel import Moment, ScopePanel, ScopeSource
from app.scope.process_load import GpuLoad, GpuReader, ProcessLoads
from app.scope.step_time import BETWEEN, StepTimePanel, load_rows
from app.selection import Selection
from app.theme import Theme
from engine.config import SchedulerConfig
from engine.run_state import RunState
from tests.app.runs import Run

Show = Callable[..., ScopePanel]


def busy_run(steps: int = 300) -> Run:
    """Several priorities, and a knob that is turned half way."""
    run = Run(num_blocks=120, token_budget=96)
    for step in range(steps):
        if step % 12 == 0:
            run.add(step + 1, 30 + step % 50, 40, priority=step // 12 % 3)
        if step == steps // 2:
            run.core.reconfigure(SchedulerConfig(max_num_batched_tokens=48))
        run.step(1)
    return run


@pytest.fixture
def show(qtbot, theme: Theme) -> Show:
    def make(panel: type[ScopePanel], source: ScopeSource, width: int = 600, height: int = 300) -> ScopePanel:
        made = panel(source, theme, Selection())
        qtbot.addWidget(made)
        made.resize(width, height)
        made.show()
        qtbot.waitExposed(made)
        made.run_moved()
        return made

    return make


def source_of(run: Run) -> ScopeSource:
    return ScopeSource(run.state, run.history)


def moment_of(run: Run, step: int) -> Moment:
    """As the run was right after a step."""
    then = RunState()
    fresh = Run(num_blocks=120, token_budget=96)
    then.restore(fresh.core.keyframe())
    for record in run.records:
        if record.step <= step:
            then.apply(record)
    [at] = [record for record in run.records if record.step == step]
    return Moment(then, at.time + at.timings.total)


def colors(panel: ScopePanel) -> set[str]:
    image: QImage = panel.plot.grab().toImage()
    return {image.pixelColor(x, y).name() for x in range(image.width()) for y in range(0, image.height(), 2)}


# Throughput ----------------------------------------------------------------------------------------------------------


def test_throughput_says_its_figures_and_marks_the_change(show: Show) -> None:
    run = busy_run()
    panel = show(ThroughputPanel, source_of(run))
    rates = run.history.rates
    assert panel._rate.text() == f"{rates.rate('output'):,.0f} tok/s"
    assert f"prompt {rates.rate('prompt'):,.0f} tok/s" in [entry.text for entry in panel._legend._entries]
    [mark] = panel.plot.marks
    assert mark.label == "budget auto → 48" and panel.plot.x_range[0] < mark.x < 0
    assert panel.plot.mark_at(panel.plot.x_pixel(mark.x) + 3) == mark and panel.plot.mark_at(0.0) is None
    assert panel.theme.accent.name() in colors(panel)


def test_the_window_of_time_is_chosen_in_the_title_line_and_by_keys(show: Show, qtbot) -> None:
    run = busy_run(800)
    panel = show(ThroughputPanel, source_of(run))
    choice: MenuChoice = panel.window_choice
    assert choice.value == 60.0 and choice.text() == "1 min ▾"
    wide = panel.plot.x_range[0]
    assert choice.focusPolicy() & Qt.FocusPolicy.TabFocus and choice.accessibleName() == "Window of time"
    qtbot.keyClick(choice, Qt.Key.Key_Up)
    assert choice.value == 10.0 and choice.accessibleDescription() == "10 s"
    assert panel.plot.x_range[0] == pytest.approx(-10.0) and wide < -10.0
    choice.menu().actions()[-1].trigger()
    assert choice.value == math.inf and panel.plot.x_range[0] <= wide
    assert [action.text() for action in choice.menu().actions()] == [text for text, _ in WINDOWS]


def test_in_the_past_the_curve_ends_there(show: Show) -> None:
    run = busy_run()
    source = source_of(run)
    panel = show(ThroughputPanel, source)
    source.moment = moment_of(run, run.records[len(run.records) // 3].step)
    panel.show_anew()
    end = source.moment.time
    assert panel.plot._ages[0] == pytest.approx(run.history.rates.begin - end, abs=0.5)
    assert panel.plot.marks == [] and panel.plot.x_ticks[0].label == "then"
    assert panel._rate.text() == f"{run.history.rates.rate('output', end):,.0f} tok/s"
    source.moment = Moment(source.moment.state, run.history.rates.begin - 5.0)  # older than what is kept
    panel.show_anew()
    assert panel.pages.is_empty


def test_nonsense_never_blanks_a_plot(show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    run = busy_run(150)
    panel = show(ThroughputPanel, source_of(run))
    series = run.history.rates.series(60.0)
    for bad in (math.nan, math.inf, -math.inf, 1e300):
        output = series.output.copy()
        output[3] = bad
        broken = type(series)(series.ages, series.prompt, output)
        monkeypatch.setattr(run.history.rates, "series", lambda *_, broken=broken: broken)
        panel.show_anew()
        low, high = panel.plot.y_range
        assert low == 0.0 and 1.0 <= high <= 1.2 * LARGEST
        assert panel.theme.decode.name() in colors(panel)


# Latency -------------------------------------------------------------------------------------------------------------


def cells(panel: ScopePanel) -> dict[str, tuple[str, ...]]:
    return {row.name: row.cells for row in panel.figures.table.rows}


def test_latency_has_three_latencies_with_three_percentiles(show: Show) -> None:
    run = busy_run()
    panel = show(LatencyPanel, source_of(run))
    assert set(cells(panel)) == {"TTFT", "ITL", "E2EL"}
    assert all(text != "n/a" for row in cells(panel).values() for text in row)
    assert "TTFT p50" in panel.figures.table.accessibleDescription().replace(": ", " ")
    assert panel.figures.table.isVisible()
    panel.resize(300, 160)
    panel.show_anew()
    assert not panel.figures.table.isVisible()  # the plot needs the room


def test_latency_is_shown_per_priority(show: Show, qtbot) -> None:
    run = busy_run()
    panel = show(LatencyPanel, source_of(run))
    choice = panel.priority_choice
    assert choice.isVisible()
    assert [action.text() for action in choice.menu().actions()] == ["all", "prio 0", "prio 1", "prio 2"]
    everyone = cells(panel)
    qtbot.keyClick(choice, Qt.Key.Key_Down)
    priority = choice.value
    now = panel.source.now
    found = run.history.latency.e2el.between(now - 60.0, now, priority).percentiles()
    [row] = [row for row in panel.figures.table.rows if row.name == "E2EL"]
    assert f"{found.count:,} in the window" in row.tip and cells(panel) != everyone
    panel.source.moment = Moment(run.state, now - 1000.0)
    panel._offer_priorities([])
    assert choice.value == priority and choice.isVisible()  # a choice is not taken back


def test_latency_of_one_priority_asks_for_no_choice(show: Show) -> None:
    run = Run(num_blocks=60)
    run.add(1, 30, 20)
    run.step(10)
    panel = show(LatencyPanel, source_of(run))
    assert not panel.priority_choice.isVisible()
    assert cells(panel)["E2EL"] == ("n/a", "n/a", "n/a") and cells(panel)["TTFT"][0] != "n/a"


def test_dots_on_each_other_are_drawn_once() -> None:
    rng = np.random.default_rng(2)
    xs, ys = rng.uniform(0, 400, 8000), rng.uniform(0, 150, 8000)
    kept = apart(xs, ys)
    assert MOST_DOTS / 3 < len(kept) <= MOST_DOTS and kept == sorted(kept)
    corners = {(x > 200, y > 75) for x, y in zip(xs[kept], ys[kept], strict=True)}
    assert len(corners) == 4
    assert apart(np.array([5.0, 5.1, 90.0]), np.array([5.0, 5.1, 5.0])) == [1, 2]
    assert apart(np.zeros(0), np.zeros(0)) == []


def test_the_selected_request_stands_out(show: Show) -> None:
    panel = show(LatencyPanel, source_of(busy_run()))
    before = panel.plot.grab().toImage()
    dots = panel.plot._ttft
    panel.plot._selection.select(int(dots.request_ids[0]))
    after = panel.plot.grab().toImage()
    x, y = panel.plot.x_pixel(float(dots.ages[0])), panel.plot.y_pixel(float(dots.seconds[0]))
    changed = [
        (i, j) for i in range(before.width()) for j in range(before.height()) if before.pixel(i, j) != after.pixel(i, j)
    ]
    assert changed and any(abs(i - x) < 6 and abs(j - y) < 6 for i, j in changed)


# Step time -----------------------------------------------------------------------------------------------------------


def test_step_time_is_split_into_its_parts(show: Show) -> None:
    run = busy_run()
    panel = show(StepTimePanel, source_of(run))
    rates = run.history.rates
    rows = {row.name: row.cells for row in panel.figures.table.rows}
    assert list(rows)[:5] == ["schedule", "prepare", "forward", "sample", "detokenise"]
    shares = [int(rows[part][1].removesuffix(" %")) for part in list(rows)[:5]]
    assert sum(shares) == 100
    queries = rates.over("prefix_queries", rates.end - 60, rates.end)
    assert rows["prefix hits"][1] == f"of {queries:,.0f}" and "drafts accepted" not in rows
    assert panel._mean.text().endswith("ms")
    assert [mark.label for mark in panel.plot.marks] in ([], ["budget auto → 48"])
    assert panel.plot.step_at(panel.plot.area.right()).step == run.records[-1].step


def test_the_load_of_processes_is_read_while_it_is_seen(show: Show, qtbot) -> None:
    panel = show(StepTimePanel, source_of(busy_run(40)))
    asked: list[int] = []
    panel.processes = lambda: (asked.append(1), {"engine": os.getppid(), "window": os.getpid(), "gone": None})[1]
    panel._reading.setInterval(20)
    qtbot.waitUntil(lambda: len(asked) >= 2)
    rows = {row.name: row.cells for row in panel.figures.table.rows}
    assert {"engine", "window"} <= set(rows) and "gone" not in rows and "GPU" not in rows
    assert rows["window"][0].endswith("%") and rows["window"][1].endswith("iB")
    panel.hide()
    assert not panel._reading.isActive()
    count = len(asked)
    qtbot.wait(60)
    assert len(asked) == count
    panel.show()
    panel.source.moment = Moment(panel.source.state, panel.source.now)
    panel.show_anew()
    assert "window" not in {row.name for row in panel.figures.table.rows}  # of then nothing is known
    panel.hide()


def test_processes_that_are_not_there_are_left_out() -> None:
    loads = ProcessLoads()
    mine = {"window": os.getpid(), "engine": 2**22 + 1234, "none": None}
    first = loads.read(mine)
    assert set(first) == {"window"} and first["window"].cores is None and first["window"].memory > 1 << 20
    sum(i * i for i in range(300_000))
    assert loads.read(mine)["window"].cores is not None
    assert GpuReader().read(os.getpid()) is None or isinstance(GpuReader().read(os.getpid()), GpuLoad)


def test_a_gpu_has_a_row_of_its_own() -> None:
    [row] = load_rows({}, GpuLoad(0.63, 12 << 30, 80 << 30))
    assert row.name == "GPU" and row.cells == ("63 %", "12 GiB") and "80 GiB" in row.tip


class Nvml:
    """What the binding has, of one device on which process 7 computes."""

    def __init__(self) -> None:
        self.begun = 0

    def nvmlInit(self) -> None:
        self.begun += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[object]:
        return [type("Process", (), {"pid": 7})] if handle == 1 else []

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return type("Memory", (), {"used": 1000 + handle, "total": 9000})

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        return type("Rates", (), {"gpu": 40 + handle})


def test_the_gpu_is_the_one_on_which_the_engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setitem(__import__("sys").modules, "pynvml", nvml)
    reader = GpuReader()
    assert reader.read(7) == GpuLoad(0.41, 1001, 9000) and reader.read(7) is not None
    assert reader.read(8) is None and nvml.begun == 1
    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", lambda handle: 1 / 0)
    assert reader.read(7) is None and reader.read(7) is None  # and never asks again
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    assert GpuReader().read(7) is None


def test_a_table_tells_rows_without_a_layout_for_each_figure(theme: Theme, qtbot) -> None:
    table = FigureTable("Figures", theme, ("mean", "share"))
    qtbot.addWidget(table)
    table.show_rows([FigureRow("forward", ("24 ms", "91 %")), BETWEEN, FigureRow("rest", ("2 ms", "9 %"))])
    height = table.sizeHint().height()
    table.show_rows([FigureRow("forward", ("25 ms", "92 %")), BETWEEN, FigureRow("rest", ("2 ms", "8 %"))])
    assert table.sizeHint().height() == height
    assert table.accessibleDescription() == "forward: mean 25 ms, share 92 %; rest: mean 2 ms, share 8 %"
    table.resize(120, height)
    assert table._rights()[-1] <= 120
    table.resize(300, height)
    image = table.grab().toImage()
    bold = {image.pixelColor(x, y).rgb() for x in range(image.width()) for y in range(image.height())}
    assert QColor(theme.text).rgb() in bold, "the figures are written"


def test_pointing_tells_what_lies_there_and_nothing_where_there_is_nothing(theme: Theme, qtbot) -> None:
    table = FigureTable("Figures", theme, ("mean",))
    qtbot.addWidget(table)
    table.show_rows([FigureRow("forward", ("24 ms",), tip="the model")])
    table.resize(200, 300)
    table.show()
    for y, told in ((ROW + 5, "the model"), (ROW * 3, "")):
        place = QPoint(10, y)
        QCoreApplication.sendEvent(table, QHelpEvent(QEvent.Type.ToolTip, place, table.mapToGlobal(place)))
        qtbot.waitUntil(lambda told=told: QToolTip.text() == told)


@pytest.mark.parametrize("panel", [ThroughputPanel, LatencyPanel, StepTimePanel])
def test_a_narrow_dock_holds_it_and_a_refresh_is_quick(panel: type[ScopePanel], show: Show) -> None:
    import time

    run = busy_run()
    made = show(panel, source_of(run), 250, 220)
    assert made.minimumSizeHint().width() <= 260
    begun = time.thread_time()
    for _ in range(5):
        made.refresh()
    assert (time.thread_time() - begun) / 5 < 0.05


def test_age_ticks_are_seconds_then_minutes() -> None:
    assert [tick.label for tick in age_ticks(60.0, 4, "now")] == ["now", "−15 s", "−30 s", "−45 s", "−60 s"]
    assert [tick.label for tick in age_ticks(300.0, 5, "then")][:2] == ["then", "−1 min"]
    assert len(age_ticks(1e6, 5, "now")) < 20
    assert np.isfinite([tick.value for tick in age_ticks(5.0, 1, "now")]).all()
