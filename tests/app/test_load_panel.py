"""The load panel in the real window, on a scripted engine."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QLabel, QWidget

from app.lab.load_panel import LoadPanel
from engine.config import ConfigError
from engine.messages import Abort, AddRequest, ComparePlan, Variant
from engine.workload import EngineOptions, Workload, list_scenarios
from tests.app.conftest import Rig


@pytest.fixture
def panel(rig: Rig) -> LoadPanel:
    rig.window.arrange("lab")
    rig.load()
    rig.window.load_panel.clock = lambda: rig.client.runner.now
    return rig.window.load_panel


def run_to_the_end(rig: Rig, panel: LoadPanel, most: int = 2_000) -> dict:
    ended: list[dict] = []
    panel.finished.connect(ended.append)
    for _ in range(most):
        rig.step(8)
        if ended:
            break
    rig.wait_for(lambda: bool(ended))
    return ended[0]


def sent(rig: Rig) -> list[AddRequest]:
    return [c for c in rig.client.sent if isinstance(c, AddRequest)]


def test_every_scenario_and_ranges_are_offered(panel: LoadPanel) -> None:
    names = [panel.source.choice.itemData(i) for i in range(panel.source.choice.count())]
    assert names == [*list_scenarios(), None]
    panel.select_scenario("bus-and-metro")
    assert "Three requests at once" in panel.source.watch.text() and not panel.form.isVisibleTo(panel)
    panel.select_ranges()
    assert panel.form.isVisibleTo(panel) and not panel.source.watch.isVisibleTo(panel)


def test_a_scenario_runs_to_its_result(rig: Rig, panel: LoadPanel, qtbot) -> None:
    panel.select_scenario("bus-and-metro")
    qtbot.mouseClick(panel.start_button, Qt.MouseButton.LeftButton)
    assert not panel.start_button.isEnabled() and panel.stop_button.isEnabled() and not panel.source.isEnabled()
    assert [(c.prompt_tokens, c.ends_after) for c in sent(rig)] == [(100, 50), (200, 150), (150, 80)]
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["total_output_tokens"]) == (3, 280)
    assert panel.figures.result.figures["completed"].text() == "3 of 3"
    assert panel.figures.result.figures["output tokens"].text() == "280"
    assert panel.figures.percentiles.cells["p50_ttft_ms"].text() not in ("–", "n/a", "")
    assert panel.progress.value() == panel.progress.maximum() == 3
    assert panel.start_button.isEnabled() and not panel.stop_button.isEnabled()
    assert json.loads(panel.result_json())["completed"] == 3
    qtbot.mouseClick(panel.copy_button, Qt.MouseButton.LeftButton)
    assert json.loads(QApplication.clipboard().text())["completed"] == 3


def test_its_requests_are_in_the_scope_and_share_the_selection(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(3)
    first = panel.run.request_ids[0]
    assert first in rig.state.requests
    rig.window.selection.select(first)
    assert panel.table.currentIndex().row() == 0
    panel.table.selectRow(2)
    assert rig.window.selection.request_id == panel.run.request_ids[2]
    run_to_the_end(rig, panel)


def test_stop_aborts_and_keeps_what_completed(rig: Rig, panel: LoadPanel, qtbot) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(70)  # the shortest is done
    rig.wait_for(lambda: panel.run.recorder.ended == 1)
    qtbot.mouseClick(panel.stop_button, Qt.MouseButton.LeftButton)
    assert len([c for c in rig.client.sent if isinstance(c, Abort)]) == 2
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["unfinished"]) == (1, 2)
    assert panel.figures.result.figures["not finished"].text() == "2"
    assert panel.start_button.isEnabled()
    assert rig.client.core.keyframe().requests == []


def test_one_token_answers_show_no_sample(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.output.low.setValue(1)
    panel.form.output.high.setValue(1)
    panel.form.requests.setValue(3)
    panel.start()
    run_to_the_end(rig, panel)
    assert panel.figures.percentiles.cells["p99_tpot_ms"].text() == "n/a"
    assert panel.figures.percentiles.cells["mean_itl_ms"].text() == "n/a"
    assert panel.figures.percentiles.cells["mean_ttft_ms"].text() != "n/a"


def test_ranges_that_the_model_cannot_hold_are_refused_with_the_numbers(panel: LoadPanel) -> None:
    panel.select_ranges()
    assert panel.start_button.isEnabled()
    panel.form.output.high.setValue(5_000)
    assert not panel.start_button.isEnabled()
    assert "5,128" in panel.notice.text() and "2,048" in panel.notice.text()
    panel.form.output.high.setValue(64)
    assert panel.start_button.isEnabled() and not panel.notice.isVisibleTo(panel)


def test_options_the_engine_lacks_are_said_and_one_click_away(rig: Rig, panel: LoadPanel, qtbot) -> None:
    panel.select_scenario("kv-crunch")
    assert "kv blocks 32 (now automatic)" in panel.notice.text()
    assert panel.restart_button.isVisibleTo(panel) and panel.start_button.isEnabled()
    qtbot.mouseClick(panel.restart_button, Qt.MouseButton.LeftButton)
    assert rig.client.loaded[-1].cache.num_blocks == 32
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert not panel.restart_button.isVisibleTo(panel)
    panel.select_scenario("bus-and-metro")
    assert "kv blocks automatic (now 32)" in panel.notice.text()


def test_refusals_are_shown(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.prompt.low.setValue(1_100)
    panel.form.prompt.high.setValue(1_100)
    panel.form.requests.setValue(2)
    assert "64 blocks of 16" in panel.notice.text(), "said before"
    panel.start()
    summary = run_to_the_end(rig, panel)
    assert summary["failed"] == 2
    assert "2 ×" in panel.faults.text() and panel.faults.isVisibleTo(panel)
    assert panel.figures.result.figures["output tokens/s"].text() in ("n/a", "0.0")


def test_a_death_in_the_middle_is_said_and_the_partial_result_kept(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(70)
    rig.wait_for(lambda: panel.run.recorder.ended == 1)
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert "SIGKILL" in panel.faults.text()
    assert panel.figures.result.figures["completed"].text() == "1 of 3"
    assert not panel.start_button.isEnabled() and "restart it" in panel.notice.text()
    rig.bridge.restart()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert panel.start_button.isEnabled()


def test_a_restart_in_the_middle_ends_the_run_and_the_next_counts_anew(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(20)
    rig.bridge.restart()
    assert panel.run.phase == "broken" and "stopped" in panel.faults.text()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    panel.start()
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["preemptions"]) == (3, 0)
    assert not panel.faults.isVisibleTo(panel)


def test_timers_honour_the_arrivals(rig: Rig, panel: LoadPanel) -> None:
    panel.clock = time.perf_counter
    panel.select_ranges()
    panel.form.requests.setValue(6)
    panel.source.arrivals_fold.open()
    panel.arrivals.choose("constant")
    panel.arrivals.rate.setValue(25.0)
    assert panel.arrivals.rate.isVisibleTo(panel) and not panel.arrivals.concurrency.isVisibleTo(panel)
    panel.start()
    begun = panel.run.recorder.start
    assert len(sent(rig)) == 1
    rig.wait_for(lambda: len(sent(rig)) == 6)
    arrivals = [command.arrival_time - begun for command in sent(rig)]
    assert arrivals == pytest.approx([0.04 * i for i in range(6)], abs=0.02)
    late = [timeline.sent - timeline.scheduled for timeline in panel.run.recorder.timelines]
    assert min(late) >= 0, "never before its time"
    panel.stop()
    run_to_the_end(rig, panel)


def test_a_closed_loop_keeps_so_many_in_flight(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.requests.setValue(7)
    panel.arrivals.choose("closed loop")
    panel.arrivals.concurrency.setValue(2)
    panel.start()
    assert len(sent(rig)) == 2
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["max_concurrent_requests"]) == (7, 2)


def test_without_an_engine_it_says_what_to_do(rig: Rig) -> None:
    panel = rig.window.load_panel
    assert not panel.start_button.isEnabled()
    assert "load one" in panel.notice.text()
    panel.start()
    assert panel.run is None


def test_everything_has_a_name_for_a_screen_reader(panel: LoadPanel) -> None:
    for widget in (
        panel.source.choice,
        panel.source.file_button,
        panel.start_button,
        panel.stop_button,
        panel.progress,
        panel.table,
        panel.form.requests,
    ):
        assert widget.accessibleName()


def test_a_row_can_be_chosen_again_after_another_request_was(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(3)
    panel.table.selectRow(1)
    rig.window.selection.select(None)
    panel.table.selectRow(1)
    assert rig.window.selection.request_id == panel.run.request_ids[1]
    run_to_the_end(rig, panel)


def test_nothing_is_in_flight_in_an_engine_that_died(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    assert "3 in flight" in panel._headline.text()
    rig.step(3)
    rig.client.kill()
    rig.wait_for(lambda: rig.bridge.state == "dead")
    assert panel._headline.text().startswith("0 of 3 · ") and "in flight" not in panel._headline.text()


def test_options_that_do_not_go_with_the_engines_are_said(rig: Rig, panel: LoadPanel, monkeypatch) -> None:
    def clash(*_: object) -> None:
        raise ConfigError("max_num_seqs is 9, above max_num_batched_tokens, which is 8")

    monkeypatch.setattr(panel._configs, "wanted", clash)
    panel.select_scenario("kv-crunch")
    assert "do not go with the engine's: max_num_seqs is 9" in panel.notice.text()


def test_a_later_restart_does_not_change_the_result(make_rig) -> None:
    rig = make_rig(num_blocks=24, token_budget=48)
    rig.load()
    panel = rig.window.load_panel
    panel.clock = lambda: rig.client.runner.now
    panel.select_ranges()
    for box, value in ((panel.form.requests, 6), (panel.form.prompt.low, 60), (panel.form.prompt.high, 60)):
        box.setValue(value)
    for box in (panel.form.output.high, panel.form.output.low):
        box.setValue(120)
    panel.start()
    run_to_the_end(rig, panel)
    result = json.loads(panel.result_json())
    assert result["preemptions"] > 0
    rig.bridge.restart()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    assert json.loads(panel.result_json()) == result


@pytest.mark.parametrize("width", [900, 1100, 1440])
def test_nothing_is_cut_off_at_the_side(make_rig, width: int) -> None:
    rig = make_rig(width, 700)
    rig.window.arrange("lab")
    rig.load()
    panel = rig.window.load_panel
    panel.clock = lambda: rig.client.runner.now
    panel.select_ranges()
    panel.start()
    run_to_the_end(rig, panel)
    rig.settle()
    assert rig.window.width() == width
    room = panel.column.viewport().width()
    for widget in (
        panel.source.file_button,
        panel.form.requests,
        panel.form.prompt.high,
        panel.progress,
        *labels(panel),
    ):
        corner = widget.mapTo(panel.column.viewport(), widget.rect().topRight())
        assert corner.x() < room, widget.accessibleName()
    for each in labels(panel):
        assert each.width() >= each.minimumSizeHint().width(), each.text()


def labels(panel: LoadPanel) -> list[QLabel]:
    return [*panel.figures.percentiles.findChildren(QLabel), *panel.figures.result.findChildren(QLabel)]


def test_the_result_is_in_two_columns_where_there_is_room(make_rig) -> None:
    rig = make_rig(1440, 900)
    rig.window.arrange("lab")
    rig.load()
    panel = rig.window.load_panel
    panel.clock = lambda: rig.client.runner.now
    panel.select_scenario("bus-and-metro")
    panel.start()
    run_to_the_end(rig, panel)
    rig.settle()
    assert panel.figures.result.columns == 2
    rig.window.resize(1100, 900)
    rig.wait_for(lambda: panel.figures.result.columns == 1)
    rig.wait_for(lambda: len({f.geometry().right() for f in panel.figures.result.figures.values()}) == 1)
    rig.window.resize(1440, 900)
    rig.wait_for(lambda: panel.figures.result.columns == 2)


def test_the_requests_scroll_below_the_rest_not_within_it(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.requests.setValue(40)
    panel.start()
    rig.step(10)
    rig.settle()
    assert not panel.column.isAncestorOf(panel.table)
    assert panel.table.verticalScrollBar().maximum() > 0
    assert panel.column.verticalScrollBar().maximum() == 0, "one bar is enough at this size"
    panel.stop()
    run_to_the_end(rig, panel)


def test_the_table_is_as_high_as_its_rows_and_as_wide_as_the_panel(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.step(3)
    rig.settle()
    table = panel.table
    assert table.verticalScrollBar().maximum() == 0
    assert table.viewport().height() == 3 * table.rowHeight(0)
    shown = [c for c in range(7) if not table.isColumnHidden(c)]
    assert shown == [0, 2, 3, 4, 6], "all have the same priority, and there are no objectives"
    room = table.viewport().width()
    assert room - 6 < sum(table.columnWidth(c) for c in shown) <= room
    run_to_the_end(rig, panel)
    panel.select_ranges()
    panel.form.priorities.add()
    panel.form.priorities.add()
    panel.start()
    assert not table.isColumnHidden(1)
    panel.stop()
    run_to_the_end(rig, panel)


def test_the_result_is_seen_when_it_comes(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.requests.setValue(40)
    panel.start()
    run_to_the_end(rig, panel)
    rig.settle()
    for widget in (panel.start_button, panel.figures.result, panel.copy_button):
        seen = widget.visibleRegion().boundingRect().height()
        assert seen == widget.height(), widget.accessibleName()


def test_a_load_that_never_ran_waits_for_a_comparison_too(rig: Rig, panel: LoadPanel) -> None:
    variants = [Variant("vllm", EngineOptions())]
    rig.bridge.compare(ComparePlan("t", "", EngineOptions(), variants, "vllm", [Workload("w", [])], [None]))
    rig.wait_for(lambda: rig.bridge.comparing)
    assert "comparison has the engine" in panel.notice.text()
    assert not panel.start_button.isEnabled() and not panel.rates.search_button.isEnabled()
    rig.client.end_comparison(b"{}")
    rig.wait_for(lambda: not rig.bridge.comparing)
    assert panel.start_button.isEnabled() and "comparison" not in panel.notice.text()


def test_what_became_of_a_dropped_file_is_seen_wherever_the_panel_was(rig: Rig, panel: LoadPanel, tmp_path) -> None:
    rig.window.resize(1100, 700)
    panel.select_scenario("bus-and-metro")
    panel.start()
    path = tmp_path / "broken.toml"
    path.write_text("title = 3")

    def open_from_below(path: Path) -> None:
        bar = panel.column.verticalScrollBar()
        bar.setValue(bar.maximum())
        panel.open_file(path)
        rig.settle(50)

    def is_seen(widget: QWidget) -> bool:
        top = widget.mapTo(panel.column.viewport(), widget.rect().topLeft()).y()
        return widget.isVisible() and 0 <= top < panel.column.viewport().height()

    open_from_below(path)
    assert "stop it first" in panel.faults.text() and is_seen(panel.faults)
    panel.stop()
    run_to_the_end(rig, panel)
    open_from_below(path)
    assert "title" in panel.faults.text() and is_seen(panel.faults)
    good = tmp_path / "good.jsonl"
    good.write_text('{"prompt_tokens": 20, "output_tokens": 4}\n')
    open_from_below(good)
    assert is_seen(panel.source.choice)
