"""Knobs turned while it runs: what is in force, asked, refused and taken back, and the table of what a turn did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication

from app.lab.before_after import FEWEST_FOR_P99, LONGEST, TOO_FEW, before_after
from app.lab.knobs import KNOBS, Knobs, nudged, parse
from app.lab.knobs_panel import KnobsPanel
from app.scope.panel import Moment, ScopeSource
from engine.config import ConfigError, SchedulerConfig
from engine.messages import ConfigRefused, Reconfigure
from engine.run_state import RunState
from tests.app.conftest import Rig
from tests.app.runs import Run

MakeRig = Callable[..., Rig]
BY_FIELD = {knob.field: knob for knob in KNOBS}


# Model ---------------------------------------------------------------------------------------------------------------


def test_texts_become_values_or_sentences() -> None:
    assert parse(BY_FIELD["max_num_batched_tokens"], " 1,024 ") == 1024
    assert parse(BY_FIELD["max_num_batched_tokens"], "") is None
    assert parse(BY_FIELD["watermark"], "0.05") == 0.05
    for field, text, sentence in (
        ("max_num_seqs", "", "max sequences is empty; it needs a number"),
        ("max_num_seqs", "many", "max sequences is 'many'; it must be a whole number"),
        ("max_num_seqs", "3.5", "max sequences is '3.5'; it must be a whole number"),
        ("chunk_size", "9" * 400, "chunk size is .9+.; it must be a whole number"),
        ("watermark", "nan", "watermark is 'nan'; it must be a number"),
        ("ageing", "inf", "ageing is 'inf'; it must be a number"),
    ):
        with pytest.raises(ConfigError, match="^" + sentence.replace("'", ".")):
            parse(BY_FIELD[field], text)


def test_the_arrow_keys_go_to_sensible_values() -> None:
    assert [nudged(BY_FIELD["max_num_batched_tokens"], 64, up) for up in (True, False)] == [128, 32]
    assert nudged(BY_FIELD["max_num_seqs"], 1, False) == 1
    assert nudged(BY_FIELD["watermark"], 0.0, True) == 0.01 and nudged(BY_FIELD["watermark"], 0.0, False) == 0.0
    assert nudged(BY_FIELD["ageing"], None, True) == 1.0 and nudged(BY_FIELD["ageing"], 1.0, False) == 1.0
    for knob in KNOBS:
        if knob.kind in ("whole", "decimal"):
            value = getattr(SchedulerConfig(), knob.field)
            for up in (True, False):
                SchedulerConfig(**{knob.field: nudged(knob, value, up)})  # never an impossible one


@pytest.mark.parametrize("field", [knob.field for knob in KNOBS if knob.kind == "whole"])
def test_what_no_message_can_carry_is_refused_before_it_is_sent(field: str) -> None:
    """Else it would be asked for ever, and never be in force."""
    for value in (2**31, 2**63, 10**20):
        with pytest.raises(ConfigError, match=f"is {value:,}; it must be at most|is {value}; it must be 1 to"):
            SchedulerConfig(**{field: value})


def test_every_field_of_the_scheduler_that_can_change_has_a_knob() -> None:
    assert set(SchedulerConfig.__dataclass_fields__) - set(BY_FIELD) == {"user_weights"}


class Turned:
    """A genuine run with a source, whose knobs are turned the way the window turns them."""

    def __init__(self, **given: object) -> None:
        self.run = Run(num_blocks=200, **given)
        self.source = ScopeSource(self.run.state, self.run.history, scheduler=self.run.scheduler)
        self.knobs = Knobs(self.source)

    def turn(self, config: SchedulerConfig) -> None:
        self.source.scheduler = config
        self.run.core.reconfigure(config)

    def work(self, steps: int, first_id: int, output: int = 30) -> None:
        for i in range(steps):
            if i % 4 == 0:
                self.run.add(first_id + i, 24, output)
            self.run.step(1)


def test_a_change_is_pending_until_its_step_and_then_has_a_way_back() -> None:
    turned = Turned()
    turned.work(4, 1)
    assert turned.knobs.pending == [] and turned.knobs.undo() is None
    turned.turn(replace(turned.knobs.asked, max_num_batched_tokens=32, watermark=0.1))
    assert turned.knobs.pending == ["max_num_batched_tokens", "watermark"]
    assert turned.knobs.pending_text(BY_FIELD["watermark"]) == "0 until the next step"
    undo = turned.knobs.undo()
    assert undo is not None and undo.config == SchedulerConfig()
    turned.run.step(1)
    assert turned.knobs.pending == [] and turned.knobs.in_force.watermark == 0.1
    undo = turned.knobs.undo()
    assert undo is not None and undo.text == "Back to budget auto and 1 more" and undo.config == SchedulerConfig()
    turned.turn(undo.config)
    turned.run.step(1)
    again = turned.knobs.undo()
    assert again is not None and again.text == "Back to budget 32 and 1 more"


def test_a_discipline_is_pending_until_the_batch_has_drained() -> None:
    turned = Turned()
    turned.work(4, 1)
    turned.turn(replace(turned.knobs.asked, discipline="static"))
    turned.run.step(1)
    assert turned.knobs.pending == ["discipline"] and turned.knobs.in_force.discipline == "vllm"
    assert turned.knobs.pending_text(BY_FIELD["discipline"]) == "vllm until the batch has drained"
    undo = turned.knobs.undo()
    assert undo is not None and undo.text == "Back to discipline vllm"
    turned.run.step(10_000)
    assert turned.knobs.pending == [] and turned.knobs.in_force.discipline == "static"


def test_who_drafts_is_what_was_loaded() -> None:
    turned = Turned()
    assert turned.knobs.drafters() == ("off",)
    turned = Turned(scheduler=SchedulerConfig(speculative="ngram"))
    turned.source.scheduler = SchedulerConfig()
    assert turned.knobs.drafters() == ("off", "ngram")


# Before and after ----------------------------------------------------------------------------------------------------


def line(found, name: str):
    return next(line for line in found.lines if line.name == name)


def test_both_sides_of_a_change_are_equally_long_and_the_ratio_is_of_them() -> None:
    turned = Turned()
    turned.work(200, 1)
    history = turned.run.history
    assert before_after(history, history.rates.end) is None
    turned.turn(replace(turned.knobs.asked, max_num_seqs=2))
    lengths = []
    for part in range(3):
        turned.work(40, 1000 * (part + 1))
        found = before_after(history, history.rates.end)
        assert found is not None and found.change.label == "max sequences 32 → 2"
        lengths.append(found.length)
    assert lengths[0] < lengths[1] < lengths[2] <= LONGEST
    at, length = found.change.time, found.length
    assert found.length == pytest.approx(history.rates.end - at)
    records = turned.run.records
    assert records[-1].num_running <= 2 < max(r.num_running for r in records if at - length < r.time < at)
    running = line(found, "running")
    assert float(running.after) < float(running.before) and running.ratio == pytest.approx(
        float(running.after) / float(running.before), rel=0.1
    )
    rate = history.rates.over("output", at, at + length) / length
    assert line(found, "output tok/s").after in (f"{rate:,.0f}", f"{rate:.1f}")
    assert line(found, "TTFT p99").before in (TOO_FEW, "n/a") and line(found, "TTFT p99").ratio is None
    assert line(found, "TTFT p99").ratio_text == "n/a"
    itl = history.latency.itl.between(at - length, at).percentiles()
    assert itl.count >= FEWEST_FOR_P99 and line(found, "ITL p50").before != TOO_FEW
    assert "gaps; of" in line(found, "ITL p50").tip and f"{itl.count:,} before" in line(found, "ITL p50").tip


def test_the_stretch_before_does_not_reach_behind_another_change() -> None:
    turned = Turned()
    turned.work(60, 1)
    turned.turn(replace(turned.knobs.asked, max_num_seqs=8))
    turned.work(20, 1000)
    first = turned.run.history.changes.between(-math.inf, math.inf)[0]
    turned.turn(replace(turned.knobs.asked, max_num_seqs=4))
    turned.work(60, 2000)
    history = turned.run.history
    found = before_after(history, history.rates.end)
    assert found is not None and found.length == pytest.approx(found.change.time - first.time)
    then = before_after(history, found.change.time - 0.001)
    assert then is not None and then.change == first  # as it was then


def test_with_nothing_before_there_is_nothing_to_compare() -> None:
    turned = Turned()
    turned.turn(replace(turned.knobs.asked, max_num_seqs=8))
    turned.work(20, 1)
    history = turned.run.history
    found = before_after(history, history.rates.end)
    assert found is not None and found.length == 0.0
    assert all(each.ratio is None for each in found.lines)


# Panel ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def knobs(rig: Rig, qtbot) -> Iterator[KnobsPanel]:
    """On a scripted engine, wired as the window wires it."""
    panel = KnobsPanel(rig.window.source, rig.theme)
    qtbot.addWidget(panel)
    panel.wanted.connect(rig.bridge.reconfigure)
    rig.bridge.stepped.connect(panel.run_moved)
    rig.bridge.config_changed.connect(panel.show_anew)
    rig.bridge.config_refused.connect(panel.refused)
    panel.resize(260, 700)
    panel.show()
    qtbot.waitExposed(panel)
    yield panel
    panel.hide()


def sent(rig: Rig) -> list[SchedulerConfig]:
    return [command.scheduler for command in rig.client.sent if isinstance(command, Reconfigure)]


def type_into(rig: Rig, panel: KnobsPanel, field: str, text: str) -> None:
    row = panel.rows[field]
    row.field.setFocus()
    row.field.selectAll()
    rig.qtbot.keyClicks(row.field, text)
    rig.qtbot.keyClick(row.field, Qt.Key.Key_Return)


def pick(panel: KnobsPanel, field: str, text: str) -> None:
    choice = panel.rows[field].field
    choice.setCurrentText(text)
    choice.activated.emit(choice.currentIndex())


def test_without_an_engine_nothing_can_be_turned(rig: Rig, knobs: KnobsPanel) -> None:
    assert "No engine runs" in knobs.note.text() and not knobs.rows["order"].field.isEnabled()
    rig.load()
    knobs.show_anew()
    assert not knobs.note.isVisible() and knobs.rows["order"].field.isEnabled()


def test_a_number_typed_is_in_force_with_the_next_step(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    rig.add(40, 200)
    rig.step(30)
    knobs.show_anew()
    budget = knobs.rows["max_num_batched_tokens"]
    assert budget.field.text() == "" and budget.field.placeholderText() == "auto: 64"
    type_into(rig, knobs, "max_num_batched_tokens", "32")
    assert sent(rig)[-1].max_num_batched_tokens == 32
    assert budget.hint.text() == "auto until the next step" and budget.hint.isVisible()
    assert knobs.back.text() == "Back to budget auto"
    rig.step(1)
    rig.wait_for(lambda: not budget.hint.isVisible())
    assert budget.field.text() == "32" and rig.state.token_budget == 32
    assert knobs.heading.text() == "budget auto → 32" and knobs.heading.isVisible()
    rig.step(20)
    knobs.show_anew()
    assert knobs.table.isVisible() and [row.name for row in knobs.table.rows][:2] == ["output tok/s", "prompt tok/s"]
    assert "before and after it" in knobs.lengths.text()
    rig.qtbot.mouseClick(knobs.back, Qt.MouseButton.LeftButton)
    assert sent(rig)[-1].max_num_batched_tokens is None
    rig.step(1)
    rig.wait_for(lambda: budget.field.text() == "")
    assert knobs.back.text() == "Back to budget 32"


def test_an_impossible_value_is_refused_in_its_place(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    knobs.show_anew()
    count = len(sent(rig))
    seqs = knobs.rows["max_num_seqs"]
    for text, sentence in (
        ("0", "max_num_seqs is 0; it must be 1 to 65,536."),
        ("lots", "max sequences is 'lots'; it must be a whole number."),
    ):
        type_into(rig, knobs, "max_num_seqs", text)
        assert seqs.hint.text() == sentence and seqs.hint.property("role") == "error"
        assert len(sent(rig)) == count
    rig.qtbot.keyClick(seqs.field, Qt.Key.Key_Escape)
    assert seqs.field.text() == "32"
    rig.qtbot.keyClick(seqs.field, Qt.Key.Key_Return)
    assert not seqs.hint.isVisible()
    rig.qtbot.keyClick(seqs.field, Qt.Key.Key_Up)
    assert sent(rig)[-1].max_num_seqs == 64


def test_a_refusal_of_the_engine_stands_where_it_was_asked(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    knobs.show_anew()
    pick(knobs, "order", "fair")
    rig.client.deliver(ConfigRefused("order is 'fair', but not today"))
    rig.wait_for(lambda: knobs.rows["order"].hint.text() == "order is 'fair', but not today.")
    assert knobs.rows["order"].hint.property("role") == "error"
    assert knobs.rows["order"].field.currentText() == "fcfs"


def test_knobs_that_do_nothing_are_not_shown(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    rig.add(40, 50)
    rig.step(2)
    knobs.show_anew()
    rows = knobs.rows
    assert not rows["ageing"].isVisible() and not rows["waiting_served_ratio"].isVisible()
    pick(knobs, "order", "priority")
    assert rows["ageing"].isVisible()
    pick(knobs, "chunked_prefill", "off")
    assert not rows["chunk_size"].isVisible() and sent(rig)[-1].chunked_prefill is False
    pick(knobs, "discipline", "tgi")
    assert rows["waiting_served_ratio"].isVisible()
    assert sent(rig)[-1].order == "priority"  # one turn does not undo another
    rig.step(1)
    assert rows["discipline"].hint.text() == "vllm until the batch has drained"
    rig.step(10_000)
    rig.wait_for(lambda: rows["discipline"].hint.text() == "")
    assert knobs.heading.text() == "discipline vllm → tgi"


def test_what_is_being_typed_is_left_alone(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    rig.add(40, 50)
    rig.step(2)
    knobs.activateWindow()
    field = knobs.rows["max_num_seqs"].field
    field.setFocus()
    rig.wait_for(field.hasFocus)
    field.selectAll()
    rig.qtbot.keyClicks(field, "7")
    rig.step(5)
    knobs.show_anew()
    assert field.text() == "7" and sent(rig) == []


def test_in_the_past_the_knobs_of_then_are_shown(rig: Rig, knobs: KnobsPanel) -> None:
    rig.load()
    rig.add(40, 100)
    rig.step(10)
    then = RunState()
    then.restore(rig.state.keyframe())
    knobs.show_anew()
    type_into(rig, knobs, "max_num_seqs", "5")
    rig.step(5)
    source = rig.window.source
    source.moment = Moment(then, source.history.rates.begin + 0.1)
    knobs.run_moved()
    assert knobs.rows["max_num_seqs"].field.text() == "32" and not knobs.rows["max_num_seqs"].field.isEnabled()
    assert "As it was at step 10." in knobs.note.text() and not knobs.back.isVisible()
    assert not knobs.heading.isVisible()
    source.moment = None
    knobs.run_moved()
    assert knobs.rows["max_num_seqs"].field.text() == "5" and knobs.back.isVisible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_narrow_dock(rig: Rig, knobs: KnobsPanel, scheme: str) -> None:
    rig.theme.set_scheme(scheme)
    rig.load()
    rig.add(40, 100)
    rig.step(10)
    type_into(rig, knobs, "max_num_seqs", "0")
    QApplication.processEvents()
    assert knobs.minimumSizeHint().width() <= 250
    assert knobs.rows["max_num_seqs"].hint.height() >= knobs.rows["max_num_seqs"].hint.fontMetrics().height()
    for row in knobs.rows.values():
        if row.isVisible():
            assert row.field.accessibleName() and row.width() <= knobs.width()
