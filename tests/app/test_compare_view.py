"""What the window makes of a comparison's result: figures, ratios to any variant, timelines on one axis, bars."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QApplication

from app.lab.compare_bars import CAPTION, LEAST_WIDTH, ROW, Bar, BarChart, BarGrid
from app.lab.compare_result import RECORDED, Cell, ComparedResult
from app.lab.compare_timelines import CompareTimelines
from app.lab.compare_view import CompareView
from app.theme import Theme
from engine.comparison import NOT_AVAILABLE, ratios_to, read_comparison
from engine.messages import Variant
from engine.workload import EngineOptions, Workload, WorkloadRequest
from tests.app.compared import compare_now, plan_of


def compared(**given) -> dict:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return compare_now(monkeypatch, plan_of(**given))


@pytest.fixture(scope="module")
def bus() -> dict:
    return compared()


@pytest.fixture(scope="module")
def crunch() -> dict:
    return compared(scenario="kv-crunch", seeds=(1, 2, 3), objectives={"ttft": 1000.0})


def row(result: ComparedResult, label: str) -> dict[str, Cell]:
    rows = [*result.rows(), *result.waste_rows()]
    return {cell.variant: cell for each in rows if each.label == label for cell in each.cells}


# Figures -------------------------------------------------------------------------------------------------------------


def test_medians_ratios_and_which_is_better(crunch: dict) -> None:
    result = ComparedResult(read_comparison(msgspec.json.encode(crunch)))
    assert (result.variants, result.seeds, result.baseline) == (["static", "orca", "vllm"], [1, 2, 3], "static")
    cells = row(result, "requests per second")
    runs = [run["request_throughput"] for run in crunch["runs"] if run["variant"] == "vllm"]
    assert cells["vllm"].value == sorted(runs)[1]
    assert (cells["vllm"].low, cells["vllm"].high) == (min(runs), max(runs))
    assert "over 3 seeds" in cells["vllm"].spread
    assert cells["vllm"].ratio == f"{crunch['ratios']['vllm']['request_throughput']:.2f}×" and cells["vllm"].better == 1
    assert cells["static"].ratio == "" and cells["static"].better == 0
    assert row(result, "mean TTFT")["vllm"].better == 1, "shorter is better"
    assert row(result, "steps")["vllm"].better == 0, "neither is"
    assert result.charted()[0].key == "request_throughput"


def test_another_baseline_turns_the_ratios_round(crunch: dict) -> None:
    result = ComparedResult(crunch).against("vllm")
    cells = row(result, "requests per second")
    assert cells["static"].ratio == f"{ratios_to(crunch['runs'], 'vllm')['static']['request_throughput']:.2f}×"
    assert cells["static"].better == -1 and cells["vllm"].ratio == ""
    assert "vllm" in result.footnote and result.reported["baseline"] == "vllm"
    assert result.plain["baseline"] == "static", "what is saved is what was made"
    assert row(result, "same ids")["orca"].text == "36 same"


def test_no_sample_is_not_a_number(bus: dict) -> None:
    short = compared(
        disciplines=("orca", "vllm"),
        workloads=[Workload("one token", tuple(WorkloadRequest(1, prompt_tokens=20, seed=i) for i in range(3)))],
    )
    result = ComparedResult(short)
    labels = [each.label for each in result.rows()]
    assert "mean TPOT" not in labels and "mean TTFT" in labels
    one = copy.deepcopy(bus)
    for run in one["runs"]:
        if run["variant"] == "vllm":
            run["mean_tpot_ms"] = None
    cell = row(ComparedResult(one), "mean TPOT")["vllm"]
    assert cell.text == NOT_AVAILABLE and cell.missing and cell.ratio == ""


def test_waste_and_the_worth_of_static_batches(bus: dict) -> None:
    result = ComparedResult(bus)
    padding = row(result, "padding, tokens computed")
    static = next(run for run in bus["runs"] if run["variant"] == "static")
    assert padding["static"].text.startswith(f"{static['waste']['padding']['tokens']:,.0f} · ")
    assert padding["vllm"].text == "0"
    totals = static["static_totals"]
    (sentence,) = [each for each in result.sentences() if "η" in each]
    for name in ("eta", "predicted_useful", "measured_useful"):
        assert f"{totals[name]:.1%}" in sentence


def test_the_copied_table_is_apart_by_tabs(bus: dict) -> None:
    lines = [line.split("\t") for line in ComparedResult(bus).table_text().splitlines()]
    assert lines[0] == ["", "static", "orca", "vllm"]
    assert {len(line) for line in lines} == {4}
    throughput = next(line for line in lines if line[0] == "requests per second")
    assert throughput[1].endswith("/s") and throughput[2].endswith("×)")


def test_a_recorded_run_stands_beside_the_others_as_their_baseline(bus: dict) -> None:
    recorded = {**next(run for run in bus["runs"] if run["variant"] == "static"), "seed": 9}
    result = ComparedResult(bus).with_recorded(recorded)
    assert result.variants == [RECORDED, "static", "orca", "vllm"] and result.baseline == RECORDED
    assert row(result, "requests per second")["static"].ratio == "1.00×"
    assert row(result, "requests per second")["vllm"].better == 1
    assert [run["variant"] for run in result.runs_of_seed(result.seeds[0])] == result.variants
    assert len(result.own_runs) == 3
    assert ComparedResult(read_comparison(msgspec.json.encode(result.plain))).variants == result.variants


def test_failures_are_told() -> None:
    variants = [Variant("16", EngineOptions(block_size=16)), Variant("draft", EngineOptions(dtype="float32"))]
    made = compared(variants=variants, disciplines=("16",), baseline="16")
    faults = ComparedResult(made).faults()
    assert len(faults) == 1 and faults[0].startswith("draft could not run: ") and "dtype" in faults[0]
    long = Workload("long", (WorkloadRequest(5, prompt_tokens=5_000), WorkloadRequest(5, prompt_tokens=20)))
    refused = ComparedResult(compared(workloads=[long])).faults()
    assert len(refused) == 3 and "1 of 2 requests failed" in refused[0] and "5,000" in refused[0]


# Timelines -----------------------------------------------------------------------------------------------------------


def test_all_timelines_are_on_one_axis(bus: dict) -> None:
    model = CompareTimelines()
    model.show(ComparedResult(bus).runs_of_seed(0))
    assert [band.variant for band in model.bands] == ["static", "orca", "vllm"]
    assert model.requests == [1, 2, 3]
    assert model.longest == max(band.end for band in model.bands) == model.bands[0].end
    assert model.fitted and model.end >= model.longest


def test_zoom_and_pan_stay_within_the_runs(bus: dict) -> None:
    model = CompareTimelines()
    model.show(ComparedResult(bus).runs_of_seed(0))
    model.zoom(0.5, 1.0)
    assert not model.fitted and model.begin <= 1.0 <= model.end
    length = model.end - model.begin
    model.pan(-1e6)
    assert (model.begin, model.end) == pytest.approx((0.0, length))
    model.pan(1e6)
    assert model.end == pytest.approx(model.longest * 1.02)
    for _ in range(60):
        model.zoom(0.5, 2.0)
    assert model.end - model.begin == pytest.approx(0.02)
    model.zoom(1e9, 2.0)
    assert model.fitted


def test_many_requests_scroll_in_all_bands_together(bus: dict) -> None:
    runs = copy.deepcopy(ComparedResult(bus).runs_of_seed(0))
    for run in runs:
        run["timeline"] = [{**run["timeline"][0], "request": i} for i in range(1, 301)]
    model = CompareTimelines()
    model.show(runs)
    layout = model.layout()
    assert layout.rows < 300 and layout.band_height <= 190
    model.first = 10**6
    assert model.layout().first == 300 - layout.rows
    band, lane = model.lane_at(model.layout().top(1) + 25)
    assert band.variant == "orca" and lane.request_id > 300 - layout.rows


def test_a_result_without_timelines_is_shown_all_the_same(bus: dict, qtbot, theme: Theme) -> None:
    bare = copy.deepcopy(bus)
    for run in bare["runs"]:
        run["timeline"] = []
    view = shown(qtbot, theme, bare)
    assert view.timelines.plot.model.requests == []
    view.grab()


# The view ------------------------------------------------------------------------------------------------------------


def shown(qtbot, theme: Theme, result: dict, width: int = 700) -> CompareView:
    view = CompareView(theme)
    qtbot.addWidget(view)
    view.resize(width, 3000)
    view.show()
    view.show_result(ComparedResult(result))
    qtbot.wait(30)
    return view


def test_the_worth_of_static_batches_is_told_with_its_formula(bus: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, bus)
    assert "η" in view.told.text() and "max(prompt + output)" in view.told.toolTip()


def test_the_baseline_is_chosen_in_the_view(crunch: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, crunch)
    table = view.table.figures
    first = [table.index(0, column).data() for column in range(3)]
    assert first[0].endswith("/s") and first[2].endswith("×")
    view.baseline.setCurrentIndex(view.baseline.findData("vllm"))
    assert table.index(0, 0).data().endswith("×") and table.index(0, 2).data().endswith("/s")
    assert view.bars.charts[0].bars[2].baseline


def test_the_seed_of_the_timelines_is_chosen(qtbot, theme: Theme) -> None:
    result = compared(scenario="rush-hour", disciplines=("orca", "vllm"), seeds=(1, 2))
    view = shown(qtbot, theme, result)
    before = view.timelines.plot.model.longest
    view.seed.setCurrentIndex(1)
    durations = [run["duration"] for run in result["runs"] if run["seed"] == 2]
    assert view.timelines.plot.model.longest == pytest.approx(max(durations), rel=0.01)
    assert view.timelines.plot.model.longest != before


def test_keys_choose_a_request_in_every_variant(bus: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, bus)
    plot = view.timelines.plot
    plot.setFocus()
    qtbot.keyClick(plot, Qt.Key.Key_Down)
    qtbot.keyClick(plot, Qt.Key.Key_Down)
    assert plot.request == 2
    assert view.request_note.text().startswith("Request 2: static ") and ", vllm " in view.request_note.text()
    assert plot.accessibleDescription() == view.request_note.text()
    qtbot.keyClick(plot, Qt.Key.Key_Plus)
    assert not plot.model.fitted
    qtbot.keyClick(plot, Qt.Key.Key_Home)
    assert plot.model.fitted


def test_the_wheel_zooms_with_ctrl_and_is_the_panels_without(bus: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, bus)
    plot = view.timelines.plot

    def wheel(modifiers: Qt.KeyboardModifier) -> bool:
        at = QPointF(plot.rect().center())
        event = QWheelEvent(
            at,
            plot.mapToGlobal(at),
            QPoint(),
            QPoint(0, 120),
            Qt.MouseButton.NoButton,
            modifiers,
            Qt.ScrollPhase.NoScrollPhase,
            False,
        )
        plot.wheelEvent(event)
        return event.isAccepted()

    assert not wheel(Qt.KeyboardModifier.NoModifier) and plot.model.fitted
    assert wheel(Qt.KeyboardModifier.ControlModifier) and not plot.model.fitted


def test_what_is_painted_is_what_the_runs_did(bus: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, bus)
    plot = view.timelines.plot
    layout, model = plot.model.layout(), plot.model
    picture = plot.grab().toImage()
    scale = picture.devicePixelRatio()
    for index, band in enumerate(model.bands):
        for row_number, lane in enumerate(band.lanes.values()):
            decode = max((s for s in lane.spans if s.kind == 0), key=lambda s: s.end - s.begin)
            x = plot.x_pixel((decode.begin + decode.end) / 2)
            y = layout.top(index) + 20 + (row_number + 0.5) * layout.pitch
            assert picture.pixelColor(round(x * scale), round(y * scale)) == theme.decode, (band.variant, lane)


def test_ctrl_c_copies_the_table(bus: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, bus)
    view.table.setFocus()
    qtbot.keyClick(view.table, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    assert QApplication.clipboard().text() == ComparedResult(bus).table_text()


@pytest.mark.parametrize("width", [380, 1100])
def test_ratios_go_below_where_there_is_no_room(crunch: dict, qtbot, theme: Theme, width: int) -> None:
    view = shown(qtbot, theme, crunch, width)
    assert view.table.stacked == (width == 380)
    assert view.table.height() >= view.table.sizeHint().height()
    assert view.bars.columns == max(1, (width + 24) // (LEAST_WIDTH + 24))


def test_odd_numbers_never_blank_a_chart(qtbot, theme: Theme) -> None:
    values = [math.nan, math.inf, -math.inf, None, 1e300, 5.0, 0.0]
    bars = [Bar(Cell(f"v{i}", f"{value}", value, value, value)) for i, value in enumerate(values)]
    grid = BarGrid(theme)
    qtbot.addWidget(grid)
    grid.show_charts([BarChart("figure", "higher is better", "What it means.", bars)])
    grid.resize(400, grid.heightForWidth(400))
    picture = grid.grab().toImage()
    middle = CAPTION + 4 * ROW + ROW // 2
    assert any(picture.pixelColor(x, middle) == theme.accent for x in range(400)), "the largest finite one has a bar"


def test_bars_say_what_they_show(crunch: dict, qtbot, theme: Theme) -> None:
    view = shown(qtbot, theme, crunch)
    place = view.bars.place(1)
    assert view.bars.tip_at(place.topLeft() + QPoint(5, 5)) == view.bars.charts[1].meaning
    words = view.bars.tip_at(place.topLeft() + QPoint(5, CAPTION + 5))
    assert words.startswith("static, the baseline: ") and "over 3 seeds" in words
    assert words in view.bars.accessibleDescription()
