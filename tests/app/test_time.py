"""Pausing, single steps, looking back, recording: the time bar on the real window."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from PySide6.QtCore import QSettings, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QFileDialog

from app.recording_control import RecordingControl
from app.words import seconds_label
from engine.messages import ComparePlan, StepOnce, Variant
from engine.recording import RunReader
from engine.workload import EngineOptions, Workload
from tests.app.conftest import Rig


@pytest.fixture
def busy(make_rig) -> Rig:
    """A run of forty steps with preemptions, every step of it on disk."""
    rig = make_rig(num_blocks=16)
    rig.load()
    for _ in range(4):
        rig.add(prompt=40, output=60)
    rig.step(40)
    return rig


def key(rig: Rig, name: Qt.Key, modifier: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
    QTest.keyClick(rig.window, name, modifier)
    rig.settle(20)


def test_f8_pauses_and_says_that_everybody_waits(busy: Rig) -> None:
    window = busy.window
    key(busy, Qt.Key.Key_F8)
    busy.wait_for(lambda: busy.bridge.paused)
    assert "Paused after step 40" in window.hold.text
    assert "waits until it runs on" in window.chat.engine_notice.text
    assert window.time_bar.pause_button.isChecked() and window.time_bar.step_button.isEnabled()
    window.hold.button.click()
    busy.wait_for(lambda: not busy.bridge.paused)
    assert window.hold.text == "" and window.chat.engine_notice.text == ""
    assert not window.time_bar.step_button.isEnabled()


def test_single_steps_are_asked_for_only_while_it_pauses(busy: Rig) -> None:
    key(busy, Qt.Key.Key_F10)
    assert "pause it" in busy.window.notice.text
    key(busy, Qt.Key.Key_F8)
    busy.wait_for(lambda: busy.bridge.paused)
    before = sum(isinstance(command, StepOnce) for command in busy.client.sent)
    key(busy, Qt.Key.Key_F10)
    assert sum(isinstance(command, StepOnce) for command in busy.client.sent) == before + 1


def test_every_view_shows_the_step_and_live_goes_on_behind(busy: Rig) -> None:
    window, travel = busy.window, busy.window.travel
    window.arrange("monitor")
    now = {r.request_id: r.num_computed for r in busy.state.requests.values()}
    travel.show_step(10)
    assert window.source.state.step == 10 and busy.state.step == 40
    then = {r.request_id: r.num_computed for r in window.source.state.requests.values()}
    assert then != now
    shown = {row.request_id: row.computed for row in window.panels["queue"].model.rows}
    assert shown == {i: then[i] for i in shown}
    assert window.panels["blocks"].view.counts.referenced == window.source.state.referenced_blocks
    assert window.top_bar.running.text == str(window.source.state.num_running)
    assert "step 10 of 40" in window.time_bar.place.text()
    busy.client.step(5)
    busy.wait_for(lambda: busy.state.step == 45)
    busy.settle()
    assert window.source.state.step == 10
    assert {row.request_id: row.computed for row in window.panels["queue"].model.rows} == shown
    assert "step 10 of 45" in window.time_bar.place.text()
    window.time_bar.live_button.click()
    assert window.source.state is busy.state and window.time_bar.live_button.isHidden()


def test_keys_and_slider_move_through_the_past(busy: Rig) -> None:
    window, alt = busy.window, Qt.KeyboardModifier.AltModifier
    key(busy, Qt.Key.Key_Left, alt)
    assert window.source.state.step == 39
    key(busy, Qt.Key.Key_PageUp, alt)
    assert window.source.state.step == window.travel.first_step
    key(busy, Qt.Key.Key_Right, alt)
    assert window.source.state.step == window.travel.first_step + 1
    window.time_bar.slider.setValue(25)
    busy.wait_for(lambda: window.source.state.step == 25)
    key(busy, Qt.Key.Key_F10)  # in the past a step is the next of it
    assert window.source.state.step == 26
    key(busy, Qt.Key.Key_End, alt)
    assert window.travel.is_live


def test_a_click_in_the_ledger_shows_the_moment(busy: Rig) -> None:
    window = busy.window
    window.arrange("monitor")
    entries = window.history.ledger.until(None)
    assert entries, "the pool is too small for them: somebody was preempted"
    window.panels["ledger"].moment_wanted.emit(entries[0].time)
    busy.settle(20)
    assert not window.travel.is_live
    assert window.source.state.step <= entries[0].step


def test_a_jump_is_quick(busy: Rig) -> None:
    begun = time.perf_counter()
    busy.window.travel.show_step(20)
    assert time.perf_counter() - begun < 1.0  # measured by tests.frame_cost; here only: it is no fold of everything


def test_a_run_file_that_is_gone_is_said(busy: Rig) -> None:
    busy.window.travel.follow(busy.window.travel.path.with_name("gone.batchscope"))
    busy.window.travel.show_step(5)
    assert busy.window.travel.is_live
    assert "cannot be read" in busy.window.notice.text


def test_another_engine_begins_another_run(busy: Rig) -> None:
    first = busy.window.travel.path
    busy.window.travel.show_step(5)
    busy.load()
    assert busy.window.travel.is_live
    assert busy.window.travel.path != first and not first.exists()


def test_a_recording_is_saved_from_where_it_began(busy: Rig, tmp_path) -> None:
    recording = busy.window.recording
    recording.toggle()
    assert recording.marked == 40 and "Recording" in recording.button.text()
    busy.step(5)
    target = tmp_path / "mine.batchscope"
    recording.save_to(target, recording.marked)
    busy.wait_for(lambda: "Saved" in busy.window.notice.text)
    reader = RunReader(target)
    assert reader.last_step == 45 and not reader.truncated
    assert reader.state_at(45).keyframe() == busy.state.keyframe()
    reader.close()


def test_a_copy_that_fails_says_why(busy: Rig, tmp_path) -> None:
    busy.window.recording.save_to(tmp_path / "no" / "folder" / "x.batchscope")
    busy.wait_for(lambda: "could not be saved" in busy.window.notice.text)


def test_a_recording_is_kept_where_the_window_closes_on_it(make_rig, tmp_path: Path) -> None:
    rig = make_rig(num_blocks=16)
    settings = QSettings(str(tmp_path / "w.ini"), QSettings.Format.IniFormat)
    recording = RecordingControl(
        rig.bridge,
        rig.window.travel,
        None,
        settings,
        rig.window.preferences,
        rig.window,
        recordings_folder=tmp_path / "kept",
    )
    rig.load()
    rig.add(prompt=40, output=30)
    rig.step(5)
    recording.marked = 2
    recording._keep_what_is_recorded()
    [kept] = (tmp_path / "kept").iterdir()
    reader = RunReader(kept)
    assert reader.last_step == 5
    reader.close()
    said: list[str] = []
    recording.said.connect(lambda words, _fault: said.append(words))
    recording.tell_kept()
    recording.tell_kept()
    assert len(said) == 1 and str(kept) in said[0]


def test_closing_leaves_no_run_file(busy: Rig) -> None:
    path = busy.window.travel.path
    assert path.exists()
    busy.window.close()
    assert not path.exists()


def test_the_gauges_are_of_the_shown_step(busy: Rig) -> None:
    window, bar = busy.window, busy.window.top_bar
    for _ in range(4):
        busy.add(prompt=40, output=4)
    busy.step(200)
    window.travel.show_step(2)
    then = window.source.now
    rates, latency = window.history.rates, window.history.latency
    assert bar.output.text == f"{rates.rate('output', then):,.0f} tok/s" != f"{rates.rate('output'):,.0f} tok/s"
    assert bar.ttft.text == seconds_label(latency.recent_ttft(then).p50) != seconds_label(latency.recent_ttft().p50)
    busy.client.kill()
    busy.wait_for(lambda: busy.bridge.state == "dead")
    assert bar.running.text == str(window.source.state.num_running), "a moment has figures without an engine too"
    window.travel.show_newest()
    assert bar.running.text == bar.output.text == "–"


def test_the_gauges_come_to_the_last_step_before_a_pause(busy: Rig) -> None:
    window = busy.window
    for _ in range(4):
        busy.step(3)
    newest = f"{window.history.rates.rate('output'):,.0f} tok/s"
    busy.wait_for(lambda: window.top_bar.output.text == newest)


def test_what_cannot_be_paused_or_recorded_says_why(busy: Rig) -> None:
    window = busy.window
    variants = [Variant("vllm", EngineOptions())]
    busy.bridge.compare(ComparePlan("t", "", EngineOptions(), variants, "vllm", [Workload("w", [])], [None]))
    busy.wait_for(lambda: busy.bridge.comparing)
    for name in (Qt.Key.Key_F8, Qt.Key.Key_F10, Qt.Key.Key_F9):
        key(busy, name)
        assert "comparison has the engine" in window.notice.text and "cancel it" in window.notice.text
        window.notice.expire()
    busy.bridge.shutdown()
    for name in (Qt.Key.Key_F8, Qt.Key.Key_F10, Qt.Key.Key_F9):
        key(busy, name)
        assert "load a model" in window.notice.text
        window.notice.expire()


def test_a_recording_that_its_run_ends_can_still_be_saved(busy: Rig, tmp_path, monkeypatch) -> None:
    window, target = busy.window, tmp_path / "late.batchscope"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: (str(target), ""))
    window.recording.toggle()
    busy.step(5)
    busy.load()
    assert "since step 40" in window.notice.text and window.recording.marked is None
    window.notice.button.click()
    busy.wait_for(lambda: "Saved" in window.notice.text)
    reader = RunReader(target)
    assert reader.last_step == 45
    reader.close()


def test_a_recording_goes_on_where_no_file_is_chosen_for_it(busy: Rig, monkeypatch) -> None:
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_: ("", ""))
    for _ in range(2):
        key(busy, Qt.Key.Key_F9)
    assert busy.window.recording.marked == 40
