"""What the load panel offers: files with their counts, arrivals, lengths, mixes, warm-up, objectives."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
from PySide6.QtCore import QMimeData, QPointF, Qt, QUrl
from PySide6.QtGui import QDragEnterEvent, QDropEvent
from PySide6.QtWidgets import QAbstractButton, QAbstractSpinBox, QComboBox, QFileDialog, QLineEdit

from app.lab.arrivals_form import KINDS as ARRIVAL_KINDS
from app.lab.arrivals_form import ArrivalsForm
from app.lab.lengths_form import KINDS as LENGTH_KINDS
from app.lab.lengths_form import LengthsForm
from app.lab.load_panel import LoadPanel
from app.lab.mix_form import MOST_LINES, PriorityMix, UserMix
from app.theme import Theme
from engine.workload import Exponential, LogNormal, Normal, ShapeError, Uniform, load_scenario
from tests.app.conftest import Rig
from tests.app.test_load_panel import run_to_the_end, sent

BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def panel(rig: Rig) -> LoadPanel:
    rig.window.arrange("lab")
    rig.load()
    rig.window.load_panel.clock = lambda: rig.client.runner.now
    return rig.window.load_panel


def burst(tmp_path: Path, rows: int, name: str = "burst.csv") -> Path:
    path = tmp_path / name
    lines = (f"{i / 10},ChatGPT,{20 + i % 30},{i % 4},0,API log\n" for i in range(rows))
    path.write_text(BURST + "".join(lines))
    return path


def opened(rig: Rig, panel: LoadPanel, path: Path) -> None:
    panel.open_file(path)
    rig.wait_for(lambda: not panel.source.trace.busy)


# Files ---------------------------------------------------------------------------------------------------------------


def test_a_trace_is_loaded_counted_and_replayed(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    opened(rig, panel, burst(tmp_path, 40))
    assert panel.source.choice.currentText() == "burst.csv"
    assert panel.source.trace.counts.text() == (
        "40 rows of BurstGPT csv, 10 rejected (10 × 0 response tokens: the request failed)."
    )
    assert panel.arrivals.summary() == "as recorded" and panel.source.trace.scale.isVisibleTo(panel)
    assert panel.start_button.isEnabled()
    panel.arrivals.choose("at once")
    panel.start()
    assert len(sent(rig)) == 30
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["rows_read"], summary["rows_rejected"]) == (30, 40, 10)
    assert json.loads(panel.result_json())["rejections"] == {"0 response tokens: the request failed": 10}


def test_limit_and_time_scale_read_it_again(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    opened(rig, panel, burst(tmp_path, 3_000))
    assert len(panel.source.workload().requests) == 750, "the first thousand rows, unless said otherwise"
    panel.source.trace.limit.setValue(20)
    assert panel.source.trace.busy and not panel.start_button.isEnabled() and "being read" in panel.notice.text()
    panel.source.trace.scale.setValue(10.0)
    rig.wait_for(lambda: not panel.source.trace.busy)
    workload = panel.source.workload()
    assert workload.rows.read == 20 and len(workload.requests) == 15
    assert workload.requests[-1].arrival_s == pytest.approx((19 - 1) / 100)
    panel.source.trace.limit.setValue(0)
    rig.wait_for(lambda: not panel.source.trace.busy)
    assert panel.source.workload().rows.read == 3_000


def test_what_is_longer_than_the_context_is_clipped_and_said(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(BURST + "1,GPT-4,4000,5,0,x\n1,GPT-4,30,5,0,x\n")
    rig.client.num_blocks = 200
    rig.bridge.restart()
    rig.client.ready()
    rig.wait_for(lambda: rig.bridge.state == "ready")
    opened(rig, panel, path)
    assert "1 of 2 requests will be clipped to the model's context of 2,048 tokens" in panel.notice.text()
    panel.start()
    assert [c.prompt_tokens for c in sent(rig)] == [2_043, 30]
    summary = run_to_the_end(rig, panel)
    assert (summary["completed"], summary["rows_clipped"]) == (2, 1)
    assert panel.figures.result.figures["clipped requests"].text() == "1"


def test_texts_stay_texts_and_the_engine_clips_them(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "Why is the sky blue?"}, {"from": "gpt", "value": "Because of Rayleigh."}]
    path.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    opened(rig, panel, path)
    assert "no two turns" in panel.source.trace.counts.text()
    assert "the engine counts their tokens and clips" in panel.notice.text()
    assert panel.arrivals.summary() == "all at once: the file names no times"
    assert not panel.source.trace.scale.isVisibleTo(panel)
    panel.start()
    (command,) = sent(rig)
    assert (command.prompt, command.ends_after, command.prompt_limit) == ("Why is the sky blue?", 5, 2_043)
    run_to_the_end(rig, panel)


def test_a_file_of_no_use_is_a_sentence_and_nothing_starts(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    opened(rig, panel, path)
    assert "of no known format" in panel.notice.text() and not panel.start_button.isEnabled()
    panel.open_file(tmp_path / "missing.csv")
    assert "missing.csv cannot be read" in panel.notice.text()
    panel.open_file(tmp_path / "missing.toml")
    assert "missing.toml cannot be read" in panel.faults.text()
    path.write_text(BURST + "1,GPT-4,30,5,0,x\n")
    opened(rig, panel, path)
    assert panel.start_button.isEnabled(), "the same file once more, mended"


def test_reading_can_be_cancelled_and_stops_when_it_is_not_seen(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    panel.source.trace.limit.setValue(0)
    panel.open_file(burst(tmp_path, 150_000))
    trace = panel.source.trace
    rig.wait_for(lambda: trace.progress.value() > 0)
    assert trace.busy and not panel.start_button.isEnabled() and "rows so far" in trace.counts.text()
    trace.cancel_button.click()
    assert not trace.busy and "Lower the number of rows" in panel.notice.text()
    trace.limit.setValue(100_000)
    rig.wait_for(lambda: trace.progress.value() > 0 and trace.busy)
    rig.window.arrange("chat")
    assert not trace.busy, "what is not seen costs nothing"
    trace.limit.setValue(10)
    rig.window.arrange("lab")
    rig.wait_for(lambda: trace.workload is not None)
    assert trace.workload.rows.read == 10


def test_the_event_loop_is_never_held_up_by_a_large_file(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    from PySide6.QtCore import QTimer

    # In processor time: a busy machine holds up every loop.
    turns, ticker = [], QTimer()
    ticker.setInterval(0)
    ticker.timeout.connect(lambda: turns.append(time.thread_time()))
    panel.source.trace.limit.setValue(0)
    path = burst(tmp_path, 60_000)
    ticker.start()
    opened(rig, panel, path)
    ticker.stop()
    work = sorted(np.diff(turns))
    assert len(work) > 10 and work[-2] < 0.1, "the last slice makes the workload"


def test_the_dialog_and_a_drop(rig: Rig, panel: LoadPanel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = burst(tmp_path, 8), burst(tmp_path, 12, "other.csv")
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(first), ""))
    panel.source.file_button.click()
    rig.wait_for(lambda: panel.source.trace.workload is not None)
    assert panel.source.trace.workload.rows.read == 8

    def drop(*paths: Path) -> bool:
        data = QMimeData()
        data.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
        actions, keys = Qt.DropAction.CopyAction, Qt.KeyboardModifier.NoModifier
        enter = QDragEnterEvent(panel.rect().center(), actions, data, Qt.MouseButton.LeftButton, keys)
        panel.dragEnterEvent(enter)
        if enter.isAccepted():
            event = QDropEvent(QPointF(5, 5), actions, data, Qt.MouseButton.LeftButton, keys)
            panel.dropEvent(event)
        return bool(enter.isAccepted())

    assert drop(second)
    rig.wait_for(lambda: panel.source.trace.workload is not None and panel.source.trace.workload.rows.read == 12)
    assert not drop(first, second) and not drop(tmp_path / "run.batchscope"), "a run file is the window's"
    names = [panel.source.choice.itemText(i) for i in range(panel.source.choice.count())]
    assert names[-3:] == ["burst.csv", "other.csv", "A load of my own"]


def test_a_scenario_file_is_chosen_and_its_arrivals_can_be_others(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title="Mine"\nwatch="Look."\n[workload]\nrequests=3\nprompt_tokens=9\noutput_tokens=2\n')
    panel.open_file(path)
    assert panel.source.choice.currentText() == "Mine" and panel.source.watch.text() == "Look."
    panel.arrivals.choose("closed loop")
    panel.arrivals.concurrency.setValue(1)
    panel.start()
    assert len(sent(rig)) == 1
    assert run_to_the_end(rig, panel)["max_concurrent_requests"] == 1


def test_its_own_load_can_be_run_elsewhere(rig: Rig, panel: LoadPanel, tmp_path: Path) -> None:
    assert panel.own_load() is None, "a scenario can be chosen there as well"
    panel.select_ranges()
    title, build = panel.own_load()
    panel.form.requests.setValue(5)
    assert title == "A load of my own" and len(build(None).requests) == 16, "as it stood"
    assert build(3).requests != build(4).requests
    opened(rig, panel, burst(tmp_path, 8))
    title, build = panel.own_load()
    assert title == "burst.csv" and len(build(7).requests) == 6
    assert build(7).requests[0].seed != build(None).requests[0].seed
    panel.source.trace.fault, panel.source.trace.workload = "broken", None
    assert panel.own_load() is None


# Arrivals and lengths ------------------------------------------------------------------------------------------------


def test_every_arrival_process(qtbot, theme: Theme) -> None:
    form = ArrivalsForm(theme)
    qtbot.addWidget(form)
    form.concurrency.setValue(3)
    form.rate.setValue(5.0)
    form.burstiness.setValue(0.25)
    made = {}
    for kind in ARRIVAL_KINDS:
        form.choose(kind)
        made[kind] = form.arrivals()
        assert form.summary()
    assert made["at once"].request_rate == math.inf and made["closed loop"].max_concurrency == 3
    assert (made["constant"].request_rate, made["constant"].burstiness) == (5.0, math.inf)
    assert (made["poisson"].request_rate, made["poisson"].burstiness) == (5.0, 1.0)
    assert made["gamma"].burstiness == 0.25
    assert (made["linear"].ramp, made["exponential"].ramp) == ("1:4:linear", "1:4:exponential")
    form.offer_own("as recorded")
    assert form.arrivals() is None and form.summary() == "as recorded"
    form.choose("gamma")
    form.offer_own("as the scenario has them")
    assert form.arrivals() == made["gamma"], "what was chosen stays"
    form.offer_own(None)
    assert form.kind.count() == len(ARRIVAL_KINDS)


def test_every_distribution_of_lengths(qtbot, theme: Theme) -> None:
    form = LengthsForm("prompt", 10, 30, theme)
    qtbot.addWidget(form)
    form.list.setText("3, 5,7")
    made = {}
    for kind in LENGTH_KINDS:
        form.choose(kind)
        made[kind] = form.lengths()
    assert made["uniform"] == Uniform(low=10, high=30) and made["constant"] == 20 and made["list"] == [3, 5, 7]
    assert made["lognormal"] == LogNormal(20, 0.6, 10, 30)
    assert made["normal"] == Normal(20, 5, 10, 30) and made["exponential"] == Exponential(20, 10, 30)
    form.choose("list")
    for bad in ("", " , ", "3, x", "0", "-4", "1000001"):
        form.list.setText(bad)
        with pytest.raises(ShapeError, match="length"):
            form.lengths()


def test_a_form_that_makes_no_load_says_why(panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.prompt.low.setValue(200)
    assert panel.notice.text().startswith("Uniform lengths 200 to 128") and not panel.start_button.isEnabled()
    panel.form.prompt.choose("list")
    assert "the list of lengths is empty" in panel.notice.text().lower()
    panel.form.prompt.list.setText("40")
    assert panel.start_button.isEnabled()
    panel.form.priorities.add()
    panel.form.priorities.lines[0].share.setValue(0)
    panel.start()
    assert "must not all be 0" in panel.faults.text() and panel.run is None


# Mixes ---------------------------------------------------------------------------------------------------------------


def test_mixes_of_priorities_and_users(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.requests.setValue(60)
    panel.form.mixes.open()
    for mix in (panel.form.priorities, panel.form.users):
        mix.add_button.click()
        mix.add_button.click()
    panel.form.priorities.lines[0].share.setValue(3)
    panel.form.users.lines[0].value.setText("ann")
    panel.form.prefix_tokens.setValue(32)
    panel.form.prefix_groups.setValue(2)
    panel.form.prompt.choose("constant")
    panel.form.prompt.value.setValue(8)
    workload = panel.source.workload()
    priorities = [r.priority for r in workload.requests]
    assert set(priorities) == {0, 1} and priorities.count(0) > priorities.count(1)
    assert {r.user for r in workload.requests} == {"ann", "user 2"}
    prompts = [tuple(r.synthetic_ids(1_000)) for r in workload.requests]
    assert len({p[:32] for p in prompts}) == 2 and {len(p) for p in prompts} == {40}
    panel.form.mixes.open(False)
    assert panel.form.mixes.summary.text() == "priority 0 75%, 1 25% · ann 50%, user 2 50% · 32 tokens shared"
    panel.form.output.choose("constant")
    panel.form.output.value.setValue(3)
    panel.start()
    summary = run_to_the_end(rig, panel)
    assert set(summary["by_priority"]) == {"0", "1"} and set(summary["by_user"]) == {"ann", "user 2"}


def test_lines_of_a_mix_come_and_go(qtbot) -> None:
    for mix in (PriorityMix(), UserMix()):
        qtbot.addWidget(mix)
        changes: list[None] = []
        mix.changed.connect(lambda changes=changes: changes.append(None))
        for _ in range(MOST_LINES + 3):
            mix.add()
        assert len(mix.shares()) == MOST_LINES and not mix.add_button.isEnabled()
        assert len({mix_value(share) for share in mix.shares()}) == MOST_LINES, "each line begins with another"
        second = mix.lines[1]
        second.remove.click()
        assert second not in mix.lines and len(mix.shares()) == MOST_LINES - 1 and mix.add_button.isEnabled()
        assert len(changes) == MOST_LINES + 1


def mix_value(share: object) -> object:
    return getattr(share, "user", None) or getattr(share, "priority", None)


# Warm-up and objectives ----------------------------------------------------------------------------------------------


def test_warm_up_and_objectives(rig: Rig, panel: LoadPanel) -> None:
    panel.select_scenario("bus-and-metro")
    panel.measure_fold.open()
    panel.measure.warm_up_field.setValue(2)
    panel.measure.limits["e2el"].setValue(3_000)
    panel.measure_fold.open(False)
    assert panel.measure_fold.summary.text() == "2 requests before · E2EL ≤ 3,000 ms"
    panel.start()
    assert panel._headline.text() == "warming up, 2 left" and len(sent(rig)) == 2
    summary = run_to_the_end(rig, panel)
    assert len(sent(rig)) == 5 and summary["completed"] == 3 and summary["goodput_objectives_ms"] == {"e2el": 3_000.0}
    met = [panel.run.meets_objectives(i) for i in range(3)]
    assert summary["request_goodput"] == pytest.approx(sum(met) / summary["duration"])
    assert panel.figures.result.figures["goodput, requests/s"].text() == f"{summary['request_goodput']:.2f}"
    assert 0 < sum(met) < 3, "the test sees both"
    column = 5
    shown = [panel.table.model().index(row, column).data() for row in range(3)]
    assert shown == ["met" if each else "missed" for each in met] and not panel.table.isColumnHidden(column)


def test_latency_from_the_schedule_and_of_the_service_alone(rig: Rig, panel: LoadPanel) -> None:
    """Pitfall L1: at once, one slot; the last waits for all others, its service does not tell."""
    panel.select_ranges()
    panel.form.requests.setValue(40)
    panel.start()
    summary = run_to_the_end(rig, panel)
    cells = panel.figures.origins.cells
    assert summary["p99_schedule_e2el_ms"] > summary["p99_service_e2el_ms"]
    for key in ("p99_schedule_e2el_ms", "p99_service_e2el_ms", "mean_service_ttft_ms"):
        assert cells[key].text() not in ("n/a", "–", "")
    assert panel.figures.origins_fold.summary.text().startswith("P99 E2EL: due ")


# Waiting -------------------------------------------------------------------------------------------------------------


def test_a_load_waits_while_the_engine_pauses(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.requests.setValue(4)
    panel.arrivals.choose("closed loop")
    panel.arrivals.concurrency.setValue(2)
    rig.bridge.set_paused(True)
    rig.wait_for(lambda: rig.bridge.paused)
    assert "a load will wait" in panel.notice.text() and panel.start_button.isEnabled()
    panel.start()
    rig.settle()
    assert sent(rig) == [] and panel.notice.text() == "The load waits until the engine runs on."
    rig.bridge.set_paused(False)
    rig.wait_for(lambda: len(sent(rig)) == 2)
    assert not panel.notice.isVisibleTo(panel)
    assert run_to_the_end(rig, panel)["completed"] == 4


def test_while_a_comparison_has_the_engine_none_can_start(rig: Rig, panel: LoadPanel) -> None:
    from engine.messages import CompareDone, CompareProgress

    panel.select_scenario("bus-and-metro")
    panel.start()
    rig.client.deliver(CompareProgress(-1, 2, "", None, 0, 3))
    rig.wait_for(lambda: rig.bridge.comparing)
    assert panel.notice.text().startswith("The load waits: a comparison has the engine")
    run_to_the_end(rig, panel)
    assert not panel.start_button.isEnabled() and not panel.rates.search_button.isEnabled()
    assert panel.notice.text().startswith("A comparison has the engine: wait for it")
    count = len(sent(rig))
    panel.start()
    assert len(sent(rig)) == count
    rig.client.deliver(CompareDone(b""))
    rig.wait_for(lambda: not rig.bridge.comparing)
    assert panel.start_button.isEnabled()


# Looks ---------------------------------------------------------------------------------------------------------------


def test_it_is_usable_at_three_hundred_pixels(rig: Rig, panel: LoadPanel) -> None:
    panel.select_ranges()
    for fold in (panel.form.mixes, panel.source.arrivals_fold, panel.measure_fold, panel.search_fold):
        fold.open()
    panel.form.priorities.add()
    panel.form.users.add()
    for kind in LENGTH_KINDS:
        panel.form.prompt.choose(kind)
        for arrivals in ARRIVAL_KINDS:
            panel.arrivals.choose(arrivals)
            assert panel.column.minimumSizeHint().width() <= 300 - 24


def test_every_field_can_be_reached_and_has_a_name(panel: LoadPanel) -> None:
    panel.select_ranges()
    panel.form.priorities.add()
    panel.form.users.add()
    kinds = (QAbstractButton, QAbstractSpinBox, QComboBox, QLineEdit)
    fields = [each for kind in kinds for each in panel.column.widget().findChildren(kind)]
    owned = [each for each in fields if not isinstance(each.parentWidget(), QAbstractSpinBox)]
    assert len(owned) > 30
    for each in owned:
        assert each.accessibleName(), each
        assert each.focusPolicy() & Qt.FocusPolicy.TabFocus, each.accessibleName()


def test_a_fold_says_what_is_in_it(panel: LoadPanel) -> None:
    fold = panel.source.arrivals_fold
    panel.select_ranges()
    panel.arrivals.choose("poisson")
    panel.arrivals.rate.setValue(3.5)
    assert not fold.is_open and fold.summary.text() == "Poisson, 3.5/s"
    fold.heading.click()
    assert fold.is_open and panel.arrivals.rate.isVisibleTo(panel) and "open" in fold.heading.accessibleName()


def test_a_scenario_keeps_its_arrivals_unless_told(panel: LoadPanel) -> None:
    panel.select_scenario("rush-hour")
    assert panel.arrivals.summary() == "as the scenario has them"
    assert panel.source.workload() == load_scenario("rush-hour").build()
    panel.arrivals.choose("constant")
    assert panel.source.workload().arrivals.ramp is None
