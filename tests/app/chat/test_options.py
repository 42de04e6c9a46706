"""The drawer of a chat: presets, sampling, what a full context means, and priority, on the real widgets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtTest import QSignalSpy, QTest
from PySide6.QtWidgets import QApplication, QWidget

from app.chat.conversation import DEFAULT_CHAT_PARAMS, ContextPolicy, Conversation
from app.chat.options import OptionsDrawer, with_preset
from app.chat.preset import BUILT_IN
from app.chat.preset_bar import PresetBar
from app.chat.session import ChatSession
from app.theme import Theme
from engine.config import EngineConfig, SchedulerConfig
from engine.request import SamplingParams
from tests.app.chat.fake_bridge import INFO, FakeBridge
from tests.app.conftest import active_timers


class Desk:
    """A drawer on a chat of its own."""

    def __init__(self, qtbot, path: Path) -> None:
        self.bridge = FakeBridge()
        self.session = ChatSession(self.bridge, path)
        self.conversation = self.session.new_conversation()
        self.drawer = OptionsDrawer(self.session, self.bridge)
        self.drawer.resize(460, 350)
        self.drawer.show()
        qtbot.waitExposed(self.drawer)
        self.drawer.show_conversation(self.conversation)
        self.changed = QSignalSpy(self.drawer.changed)

    def entries(self, bar: PresetBar) -> dict[str, object]:
        """What the menu of ``bar`` holds when it is opened, by its words."""
        bar.menu.aboutToShow.emit()
        return {action.text(): action for action in bar.menu.actions() if action.text()}

    def choose(self, bar: PresetBar, words: str) -> None:
        self.entries(bar)[words].trigger()

    def save_as(self, bar: PresetBar, name: str) -> None:
        self.choose(bar, "Save as…")
        bar.name_edit.clear()
        QTest.keyClicks(bar.name_edit, name)
        QTest.keyClick(bar.name_edit, Qt.Key.Key_Return)

    def set_field(self, name: str, text: str) -> None:
        edit = self.drawer.edits[name]
        edit.selectAll()
        QTest.keyClicks(edit, text)


@pytest.fixture
def desk(qtbot, theme: Theme, store_path: Path) -> Iterator[Desk]:
    made = Desk(qtbot, store_path)
    yield made
    made.drawer.hide()
    assert active_timers(made.drawer) == []
    made.session.close()
    made.drawer.deleteLater()
    made.session.deleteLater()


def built_in(name: str) -> SamplingParams:
    return next(each.params for each in BUILT_IN if each.name == name)


# Presets -------------------------------------------------------------------------------------------------------------


def test_the_preset_in_force_is_named_and_ticked(desk):
    bar = desk.drawer.sampling_presets
    assert bar.button.text() == "Balanced ▾"
    assert desk.entries(bar)["Balanced"].isChecked()
    desk.choose(bar, "Exact")
    assert desk.conversation.params.temperature == 0.0 and bar.button.text() == "Exact ▾"
    desk.set_field("temperature", "0.55")
    assert bar.button.text() == "Own values ▾" and desk.conversation.params.temperature == 0.55


def test_a_built_in_preset_leaves_seed_stops_and_length(desk):
    desk.set_field("seed", "42")
    desk.set_field("max_tokens", "77")
    desk.drawer.stop.setPlainText("END")
    desk.choose(desk.drawer.sampling_presets, "Inventive")
    params = desk.conversation.params
    assert params == replace(built_in("Inventive"), seed=42, max_tokens=77, stop=("END",))
    assert desk.drawer.sampling_presets.button.text() == "Inventive ▾"


def test_values_of_ones_own_come_back_after_a_preset(desk):
    desk.set_field("temperature", "0.55")
    desk.choose(desk.drawer.sampling_presets, "Exact")
    QTest.mouseClick(desk.drawer.sampling_presets.undo_button, Qt.MouseButton.LeftButton)
    assert desk.conversation.params.temperature == 0.55 and desk.drawer.edits["temperature"].text() == "0.55"
    assert desk.drawer.sampling_presets.notice == ""


def test_a_system_prompt_preset_can_be_undone_in_the_field_too(desk):
    desk.drawer.system_prompt.setFocus()
    QTest.keyClicks(desk.drawer.system_prompt, "My own words.")
    desk.choose(desk.drawer.system_presets, "Brief")
    assert "few words" in desk.conversation.system_prompt
    QTest.keyClick(desk.drawer.system_prompt, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert desk.conversation.system_prompt == "My own words."


def test_own_presets_are_saved_chosen_replaced_and_deleted_with_undo(desk):
    bar = desk.drawer.sampling_presets
    desk.set_field("top_k", "40")
    desk.set_field("seed", "7")
    desk.save_as(bar, "Ten & four")
    assert bar.button.text() == "Ten & four ▾" and "Saved" in bar.notice
    saved = desk.conversation.params
    desk.choose(bar, "Exact")
    desk.choose(bar, "Ten && four")
    assert desk.conversation.params == saved
    desk.set_field("top_k", "50")
    desk.save_as(bar, "Ten & four")
    assert "other values" in bar.notice
    bar.undo()
    own = [each for each in desk.session.presets("sampling") if not each.built_in]
    assert [each.params for each in own] == [saved]
    desk.choose(bar, "Ten && four")
    desk.choose(bar, "Delete “Ten && four”")
    assert [each for each in desk.session.presets("sampling") if not each.built_in] == []
    assert desk.conversation.params == saved and bar.button.text() == "Own values ▾"
    bar.undo()
    assert bar.button.text() == "Ten & four ▾"


def test_what_cannot_be_a_name_is_said_and_nothing_saved(desk):
    bar = desk.drawer.system_presets
    QTest.keyClicks(desk.drawer.system_prompt, "Answer in verse.")
    desk.save_as(bar, "   ")
    assert "name" in bar.notice and bar.name_edit.isVisible()
    desk.save_as(bar, "brief")
    assert "comes with the program" in bar.notice
    assert [each for each in desk.session.presets("system") if not each.built_in] == []
    QTest.keyClick(bar.name_edit, Qt.Key.Key_Escape)
    assert not bar.name_edit.isVisible()


def test_built_in_presets_cannot_be_deleted(desk):
    assert not [words for words in desk.entries(desk.drawer.sampling_presets) if words.startswith("Delete")]


def test_presets_are_there_after_a_start(desk, qtbot, store_path):
    QTest.keyClicks(desk.drawer.system_prompt, "Answer in verse.")
    desk.save_as(desk.drawer.system_presets, "Poet")
    desk.session.close()
    again = ChatSession(desk.bridge, store_path)
    assert [each.text for each in again.presets("system") if each.name == "Poet"] == ["Answer in verse."]
    again.close()
    again.deleteLater()


def test_a_hidden_drawer_reads_no_presets(desk, monkeypatch):
    desk.drawer.hide()
    monkeypatch.setattr(desk.session, "presets", lambda kind: pytest.fail("read while hidden"))
    desk.drawer.show_conversation(Conversation())


# Sampling ------------------------------------------------------------------------------------------------------------


def test_defaults_can_be_undone(desk):
    desk.set_field("temperature", "1.5")
    desk.drawer.reset.click()
    assert desk.conversation.params == DEFAULT_CHAT_PARAMS
    desk.drawer.sampling_presets.undo()
    assert desk.conversation.params.temperature == 1.5


def test_defaults_take_a_mistake_away(desk):
    desk.set_field("top_p", "7")
    assert "top_p is 7.0" in desk.drawer.error.text() and desk.conversation.params == DEFAULT_CHAT_PARAMS
    desk.drawer.reset.click()
    assert not desk.drawer.error.isVisible() and desk.drawer.edits["top_p"].text() == "0.9"


def test_a_whole_preset_takes_everything():
    own = replace(BUILT_IN[-1], built_in=False)
    assert with_preset(SamplingParams(seed=3, stop=("x",)), own) == own.params


# Policy and priority -------------------------------------------------------------------------------------------------


def test_the_policy_is_chosen_with_a_sentence_for_each(desk):
    radios = desk.drawer.policies
    assert radios[ContextPolicy.REFUSE].isChecked()
    for radio in radios.values():
        assert radio.accessibleDescription().endswith(".")
    QTest.mouseClick(radios[ContextPolicy.DROP_OLDEST], Qt.MouseButton.LeftButton, pos=QPoint(8, 8))
    assert desk.conversation.policy is ContextPolicy.DROP_OLDEST and desk.changed.count() == 1
    other = Conversation()
    desk.drawer.show_conversation(other)
    assert radios[ContextPolicy.REFUSE].isChecked() and other.policy is ContextPolicy.REFUSE
    desk.drawer.show_conversation(desk.conversation)
    assert radios[ContextPolicy.DROP_OLDEST].isChecked() and desk.changed.count() == 1


def test_priority_reaches_the_request_that_runs(desk):
    desk.session.send(desk.conversation, "hello")
    spin = desk.drawer.priority
    spin.setFocus()
    spin.selectAll()
    QTest.keyClicks(spin, "-3")
    assert desk.conversation.priority == 0  # not yet
    QTest.keyClick(spin, Qt.Key.Key_Return)
    assert desk.conversation.priority == -3 and desk.bridge.priorities == {1: -3}


def test_priority_set_elsewhere_is_shown(desk):
    desk.session.set_priority(desk.conversation, 9)
    assert desk.drawer.priority.value() == 9 and desk.bridge.priorities == {}


def test_the_wheel_changes_no_priority(desk):
    spin = desk.drawer.priority
    spin.setFocus()
    none = Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase, False
    down = QPoint(0, -120)
    at = QPointF(5, 5)
    QApplication.sendEvent(spin, QWheelEvent(at, at, QPoint(), down, Qt.MouseButton.NoButton, *none))
    assert desk.conversation.priority == 0


def test_an_order_that_ignores_priorities_is_said(desk):
    note = desk.drawer.order_note
    assert "fcfs" in note.text() and "does not look at priorities" in note.text()
    desk.bridge.config = EngineConfig(scheduler=SchedulerConfig(order="priority"))
    desk.bridge.config_changed.emit()
    assert note.text() == "The lower number runs first."


# The model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"has_system_role": False}, "before your first message"),
        ({"has_chat_template": False}, "plain format"),
    ],
)
def test_what_the_model_makes_of_a_system_prompt_is_said(desk, changes, words):
    desk.bridge.set_state("loading")
    desk.bridge.info = msgspec.structs.replace(INFO, **changes)
    desk.bridge.set_state("ready")
    note = desk.drawer.model_note
    assert note.isVisible() is bool(words) and words in note.text()


def test_a_damaged_chat_has_no_options(desk):
    desk.drawer.show_conversation(Conversation(damage="Its row is not readable."))
    assert not desk.drawer.isEnabled()


def test_everything_is_named_for_who_does_not_see_it(desk):
    reached = [
        widget
        for widget in desk.drawer.findChildren(QWidget)
        if widget.isVisible() and widget.focusPolicy() & Qt.FocusPolicy.TabFocus and not widget.focusProxy()
    ]
    assert len(reached) > 15
    nameless = [each for each in reached if not (each.accessibleName() or getattr(each, "text", str)())]
    assert [type(each).__name__ for each in nameless] == []
