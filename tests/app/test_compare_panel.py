"""The compare panel: the plan it sends, its words while the engine is busy, and what it makes of the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDropEvent
from PySide6.QtWidgets import QApplication, QWidget

from app.engine_bridge import EngineBridge
from app.frame_pacer import FramePacer
from app.lab.compare_panel import ComparePanel
from app.lab.compare_results import KEPT
from app.theme import Theme
from engine.config import EngineConfig
from engine.messages import CancelCompare, Compare, ComparePlan, CompareProgress
from engine.request import SamplingParams
from engine.workload import Workload, WorkloadRequest, list_scenarios
from tests.app.compared import compare_now, plan_of
from tests.app.conftest import active_timers
from tests.app.scripted import ScriptedClient


class Bench:
    """A panel on a scripted engine."""

    def __init__(self, qtbot, theme: Theme, width: int = 420) -> None:
        self.qtbot = qtbot
        self.client = ScriptedClient()
        self.bridge = EngineBridge(client=self.client, pacer=FramePacer(cores=64))
        self.panel = ComparePanel(self.bridge, theme)
        self.panel.resize(width, 900)
        self.panel.show()
        qtbot.waitExposed(self.panel)

    def load(self) -> None:
        self.bridge.start(EngineConfig(scheduler=self.client.scheduler))
        self.client.ready()
        self.wait_for(lambda: self.bridge.state == "ready")

    def wait_for(self, condition) -> None:
        self.qtbot.waitUntil(condition, timeout=5000)

    def start(self) -> ComparePlan:
        self.qtbot.mouseClick(self.panel.start_button, Qt.MouseButton.LeftButton)
        return [c for c in self.client.sent if isinstance(c, Compare)][-1].plan

    def progress(self, *replies: CompareProgress) -> None:
        heard: list[CompareProgress] = []
        self.bridge.compare_progress.connect(heard.append)
        self.client.run_comparison(*replies)
        self.wait_for(lambda: replies[-1] in heard)
        self.bridge.compare_progress.disconnect(heard.append)

    def end(self, result: dict | None, error: str = "") -> None:
        self.client.end_comparison(b"" if result is None else msgspec.json.encode(result), error)
        self.wait_for(lambda: self.panel.source.isEnabled())


@pytest.fixture
def bench(qtbot, theme: Theme) -> Iterator[Bench]:
    made = Bench(qtbot, theme)
    made.load()
    yield made
    made.bridge.shutdown()
    assert active_timers(made.panel) == [] and active_timers(made.bridge) == []
    made.panel.deleteLater()
    made.bridge.deleteLater()
    QApplication.sendPostedEvents(None, 52)  # QEvent.DeferredDelete


# The form ------------------------------------------------------------------------------------------------------------


def test_every_scenario_is_offered_and_says_what_to_watch(bench: Bench) -> None:
    panel = bench.panel
    assert [panel.source.itemData(i) for i in range(panel.source.count())] == list_scenarios()
    panel.select_scenario("bus-and-metro")
    assert "static batch is a bus" in panel.watch.text()
    assert panel.notice.text() == "3 runs: 3 variants, 3 requests each."


def test_the_form_becomes_the_plan(bench: Bench) -> None:
    panel = bench.panel
    panel.select_scenario("kv-crunch")
    panel.form.disciplines.tick(("vllm", "trtllm-max-util"))
    panel.form.baseline.setCurrentIndex(panel.form.baseline.findData("vllm"))
    panel.form.seeds.setText("1-2")
    panel.form.measure.warm_up_field.setValue(0)
    panel.form.measure.limits["ttft"].setValue(800)
    plan = bench.start()
    assert [v.name for v in plan.variants] == ["vllm", "trtllm-max-util"], "the baseline first"
    assert (plan.title, plan.baseline, plan.seeds, plan.warm_up) == ("KV crunch", "vllm", [1, 2], 0)
    assert plan.options.said()["kv_blocks"] == 32 and plan.objectives == {"ttft": 800.0}
    assert [len(w.requests) for w in plan.workloads] == [12, 12]


def test_a_knob_brings_its_values(bench: Bench) -> None:
    form = bench.panel.form
    form.select_knob("preemption")
    assert form.options.isVisibleTo(form) and not form.values.isVisibleTo(form)
    assert form.options.ticked() == ("recompute", "swap", "auto") and form.disciplines.ticked() == ()
    form.select_knob("token_budget")
    assert form.values.isVisibleTo(form) and not form.options.isVisibleTo(form)
    form.values.setText("32, 64")
    plan = bench.start()
    assert [v.options.said() for v in plan.variants] == [{"token_budget": 32}, {"token_budget": 64}]


@pytest.mark.parametrize(
    ("seeds", "values", "words"),
    [("", "3,many", "many"), ("1-60", "32,64", "120 runs"), ("", "1,64", "1 blocks of 16, 16 tokens")],
)
def test_faults_are_said_in_place_and_nothing_starts(bench: Bench, seeds: str, values: str, words: str) -> None:
    panel = bench.panel
    panel.select_scenario("bus-and-metro")
    panel.form.select_knob("kv_blocks")
    panel.form.seeds.setText(seeds)
    panel.form.values.setText(values)
    assert words in panel.notice.text() and not panel.start_button.isEnabled()
    panel.start()
    assert not any(isinstance(c, Compare) for c in bench.client.sent)
    panel.form.seeds.setText("")
    panel.form.values.setText("32,64")
    assert panel.start_button.isEnabled()


def test_without_an_engine_it_says_what_to_do(qtbot, theme: Theme) -> None:
    idle = Bench(qtbot, theme)
    assert not idle.panel.start_button.isEnabled() and "load one" in idle.panel.notice.text()
    assert idle.panel.results.empty.isVisibleTo(idle.panel)
    assert idle.panel.results.empty.text.startswith("Compare disciplines on one workload")
    idle.panel.deleteLater()


def test_the_load_panels_own_load_can_be_compared(bench: Bench) -> None:
    offered: list = [None]
    panel = bench.panel
    panel.workload_source = lambda: offered[0]
    before = panel.source.count()
    panel.refresh_source()
    assert panel.source.count() == before
    requests = (WorkloadRequest(20, prompt_tokens=30), WorkloadRequest(10, prompt_tokens=50))
    offered[0] = ("Ranges of my own", lambda seed: Workload(f"ranges {seed}", requests))
    panel.refresh_source()
    panel.source.setCurrentIndex(panel.source.count() - 1)
    assert panel.source.currentText() == "Ranges of my own" and "2 requests each" in panel.notice.text()
    panel.form.seeds.setText("7")
    assert bench.start().workloads[0].name == "ranges 7"
    bench.end(None, "Cancelled.")
    offered[0] = None
    panel.refresh_source()
    assert panel.source.count() == before


# While it runs -------------------------------------------------------------------------------------------------------


def test_it_waits_for_open_answers_then_tells_every_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = bench.panel
    bench.bridge.add_request(params=SamplingParams(max_tokens=30), prompt_tokens=40)
    panel.select_scenario("bus-and-metro")
    plan = bench.start()
    bench.wait_for(lambda: "waits for 1 answer to end" in panel.status.text())
    assert "Chats that are sent meanwhile wait" in panel.status.text()
    for widget in (panel.source, panel.form, panel.start_button):
        assert not widget.isEnabled()
    assert panel.cancel_button.isVisibleTo(panel) and panel.progress.isVisibleTo(panel)
    bench.progress(CompareProgress(1, 3, "orca", None, 1, 3))
    assert panel.status.text().startswith("Run 2 of 3: orca · 1 of 3 requests")
    assert panel.progress.value() == pytest.approx(1000 * (1 + 1 / 3) / 3, abs=1)
    ended: list[dict] = []
    panel.finished.connect(ended.append)
    result = compare_now(monkeypatch, plan)
    bench.end(result)
    assert ended == [result]
    assert panel.status.text() == "The comparison is complete." and not panel.faults.isVisibleTo(panel)
    assert not panel.cancel_button.isVisibleTo(panel) and panel.start_button.isEnabled()
    assert panel.results.view.isVisibleTo(panel) and not panel.results.empty.isVisibleTo(panel)
    assert "about" in panel.notice.text(), "the next is guessed by this one's rate"


def test_cancelled_it_shows_what_is_complete(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = bench.panel
    panel.select_scenario("bus-and-metro")
    plan = bench.start()
    bench.progress(CompareProgress(2, 3, "vllm", None, 0, 3))
    bench.qtbot.mouseClick(panel.cancel_button, Qt.MouseButton.LeftButton)
    assert isinstance(bench.client.sent[-1], CancelCompare) and not panel.cancel_button.isEnabled()
    assert "runs that are complete are kept" in panel.status.text()
    bench.end(compare_now(monkeypatch, plan, stops_before=2), "Cancelled; 2 of 3 runs are complete.")
    assert panel.results.result.variants == ["static", "orca"]
    assert panel.faults.text() == "Cancelled; 2 of 3 runs are complete."
    assert "2 of 3 runs are complete and shown" in panel.status.text()
    assert "Interrupted" in panel.results.view.faults.text()
    assert panel.cancel_button.isEnabled() and panel.start_button.isEnabled()


def test_a_death_in_the_middle_is_said_and_nothing_hangs(bench: Bench) -> None:
    panel = bench.panel
    panel.select_scenario("bus-and-metro")
    bench.start()
    bench.progress(CompareProgress(0, 3, "static", None, 1, 3))
    bench.client.kill()
    bench.wait_for(lambda: panel.source.isEnabled())
    assert panel.faults.isVisibleTo(panel) and panel.faults.text()
    assert not panel.cancel_button.isVisibleTo(panel)
    assert not panel.start_button.isEnabled() and "restart it" in panel.notice.text()
    bench.load()
    assert panel.start_button.isEnabled()


def test_a_restart_in_the_middle_ends_it(bench: Bench) -> None:
    bench.panel.select_scenario("bus-and-metro")
    bench.start()
    bench.bridge.restart()
    bench.client.ready()
    bench.wait_for(lambda: bench.bridge.state == "ready" and bench.panel.source.isEnabled())
    assert "before the comparison was complete" in bench.panel.faults.text()
    assert bench.panel.start_button.isEnabled()


def test_a_result_that_cannot_be_read_is_a_sentence(bench: Bench) -> None:
    bench.panel.select_scenario("bus-and-metro")
    bench.start()
    bench.client.end_comparison(b'{"runs": 3}')
    bench.wait_for(lambda: bench.panel.source.isEnabled())
    assert "no comparison" in bench.panel.faults.text()
    assert bench.panel.results.empty.isVisibleTo(bench.panel)


# Results and files ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result() -> dict:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return compare_now(monkeypatch, plan_of(seeds=(1, 2)))


def test_a_result_is_saved_and_opened_again(bench: Bench, result: dict, tmp_path: Path) -> None:
    results, path = bench.panel.results, tmp_path / "kept.json"
    results.add_bytes(msgspec.json.encode(result))
    results.save(str(path))
    assert "kept.json is written" in bench.panel.status.text()
    assert json.loads(path.read_text()) == result
    assert results.open(str(path))
    assert results.result.plain == result and results.recent.isVisibleTo(bench.panel)
    results.save_report(str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert "Bus and metro" in page and "<svg" in page


def test_files_that_cannot_be_read_or_written_are_said(bench: Bench, result: dict, tmp_path: Path) -> None:
    panel = bench.panel
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for path in (broken, tmp_path / "none.json"):
        assert not panel.results.open(str(path))
        assert path.name in panel.faults.text()
    panel.results.add_bytes(msgspec.json.encode(result))
    panel.results.save(str(tmp_path / "no folder" / "x.json"))
    assert "cannot be written" in panel.faults.text() or "no folder" in panel.faults.text()


def test_a_saved_result_can_be_dropped(bench: Bench, result: dict, tmp_path: Path) -> None:
    path = tmp_path / "dropped.json"
    path.write_text(json.dumps(result))
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path))])
    drop = QDropEvent(
        QPointF(50, 50), Qt.DropAction.CopyAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier
    )
    bench.panel.dropEvent(drop)
    assert bench.panel.results.result.title == "Bus and metro"


def test_what_is_opened_is_seen(bench: Bench, result: dict, tmp_path: Path) -> None:
    """The form alone is as high as a low dock."""
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(result))
    panel = bench.panel
    panel.resize(420, 400)
    bench.qtbot.wait(50)
    assert panel.results.open(str(path))
    bench.qtbot.wait(50)
    title = panel.results.view.title
    assert 0 <= title.mapTo(panel.column.viewport(), title.rect().topLeft()).y() < panel.column.viewport().height() / 2


def test_headings_stand_over_and_beside_their_figures(bench: Bench, result: dict) -> None:
    panel = bench.panel
    panel.results.add_bytes(msgspec.json.encode(result))
    bench.qtbot.wait(50)
    table = panel.results.view.table
    for header in (table.horizontalHeader(), table.verticalHeader()):
        assert header.viewport().geometry() == header.rect(), "what pads a header moves its sections"


def test_recent_results_can_be_shown_again_up_to_a_bound(bench: Bench, result: dict) -> None:
    results = bench.panel.results
    for number in range(KEPT + 3):
        results.add_bytes(msgspec.json.encode({**result, "title": f"Number {number}"}))
    assert (len(results.kept), results.recent.count()) == (KEPT, KEPT)
    results.recent.setCurrentIndex(2)
    assert results.view.title.text() == f"Number {KEPT}"


# How it stands -------------------------------------------------------------------------------------------------------


def test_wide_the_result_stands_beside_the_form(bench: Bench, result: dict) -> None:
    panel = bench.panel
    panel.results.add_bytes(msgspec.json.encode(result))

    def places() -> tuple[int, int]:
        bench.qtbot.wait(30)
        form, view = (w.mapTo(panel, w.rect().topLeft()) for w in (panel.form, panel.results.view))
        return form.x(), view.x()

    form, view = places()
    assert view == form
    panel.resize(1400, 900)
    form, view = places()
    assert view > form + 300
    panel.resize(400, 900)
    form, view = places()
    assert view == form and panel.width() == 400


@pytest.mark.parametrize("width", [380, 560, 700])
def test_nothing_is_cut_off_at_the_side(bench: Bench, result: dict, width: int) -> None:
    panel = bench.panel
    panel.resize(width, 900)
    panel.results.add_bytes(msgspec.json.encode(result))
    bench.qtbot.wait(50)
    assert panel.width() == width
    room = panel.column.viewport().width()
    view = panel.results.view
    for widget in (panel.form.seeds, panel.start_button, view.copy_button, view.table, view.timelines, view.bars):
        corner = widget.mapTo(panel.column.viewport(), widget.rect().topRight())
        assert corner.x() < room, widget.accessibleName()


def test_everything_has_a_name_for_a_screen_reader(bench: Bench) -> None:
    panel = bench.panel
    form, view = panel.form, panel.results.view
    widgets: list[QWidget] = [panel.source, panel.start_button, panel.cancel_button, panel.progress, form.what]
    widgets += [form.values, form.seeds, form.measure_fold.heading, form.baseline, *form.disciplines.boxes.values()]
    widgets += [panel.results.recent, panel.results.open_button, view.baseline, view.seed, view.table, view.waste]
    widgets += [view.timelines.plot, view.save_button, view.report_button, view.copy_button]
    for widget in widgets:
        assert widget.accessibleName()


# Run again -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recording(bench: Bench, tmp_path: Path) -> Path:
    """A run of five requests, two of them urgent, as the window records it."""
    path = tmp_path / "evening.batchscope"
    bench.bridge.record(str(path), 2**26)
    for number in range(5):
        bench.bridge.add_request(
            params=SamplingParams(max_tokens=20 + 5 * number), prompt_tokens=30, priority=number % 2, user="ann"
        )
        bench.client.step(7)
    bench.client.step(1000)
    bench.bridge.record("", 0)
    return path


def test_a_recorded_run_runs_again_beside_the_original(
    bench: Bench, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = bench.panel
    panel.compare_recording(str(recording))
    bench.wait_for(lambda: panel.load is not None and not panel.load.seeded)
    assert "recorded run" in panel.watch.text() and "5 requests each" in panel.notice.text()
    assert not panel.form.seeds.isVisibleTo(panel)
    panel.form.disciplines.tick(("static",))
    assert panel.start_button.isEnabled(), "one variant will do beside the recorded one"
    plan = bench.start()
    requests = plan.workloads[0].requests
    assert [r.output_tokens for r in requests] == [20, 25, 30, 35, 40]
    assert [r.priority for r in requests] == [0, 1, 0, 1, 0] and {r.user for r in requests} == {"ann"}
    assert plan.options.said()["token_budget"] == 64, "under the knobs it was recorded with"
    bench.end(compare_now(monkeypatch, plan))
    shown = panel.results.result
    assert shown.variants == ["recorded", "static"] and shown.baseline == "recorded"
    bands = panel.results.view.timelines.plot.model.bands
    assert [(band.variant, len(band.lanes)) for band in bands] == [("recorded", 5), ("static", 5)]
    rows = {row.label: [cell.text for cell in row.cells] for row in shown.rows()}
    recorded = shown.runs_of_seed(shown.seeds[0])[0]
    assert rows["duration"][0] == f"{recorded['duration']:,.1f} s"
    assert (recorded["completed"], recorded["total_output_tokens"]) == (5, 150)


def test_a_result_beside_a_recorded_run_can_be_saved_and_opened(
    bench: Bench, recording: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    panel = bench.panel
    panel.compare_recording(str(recording))
    bench.wait_for(lambda: panel.load is not None and not panel.load.seeded)
    plan = bench.start()
    bench.end(compare_now(monkeypatch, plan))
    panel.results.save(str(tmp_path / "again.json"))
    assert panel.results.open(str(tmp_path / "again.json"))
    assert panel.results.result.variants[0] == panel.results.result.baseline == "recorded"
    panel.results.save_report(str(tmp_path / "again.html"))
    assert "recorded" in (tmp_path / "again.html").read_text()


def test_only_what_came_from_a_step_on_runs_again(bench: Bench, recording: Path) -> None:
    panel = bench.panel
    panel.compare_recording(str(recording), from_step=25)
    bench.wait_for(lambda: panel.load is not None and not panel.load.seeded)
    assert "from step 25 on" in panel.source.currentText()
    assert 1 <= len(bench.start().workloads[0].requests) < 5
    panel.compare_recording(str(recording))
    assert "goes on" in panel.faults.text()


def test_a_run_file_that_cannot_be_read_is_said(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "odd.batchscope"
    path.write_bytes(b"nothing of a run")
    bench.panel.compare_recording(str(path))
    bench.wait_for(lambda: bench.panel.faults.isVisibleTo(bench.panel))
    assert "odd.batchscope" in bench.panel.faults.text()
