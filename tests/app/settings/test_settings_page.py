"""The settings page, in the real window."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QSettings, Qt
from PySide6.QtGui import QKeySequence
from PySide6.QtWidgets import QApplication, QWidget

from app.settings.preferences import Preferences
from tests.app.conftest import Rig


@pytest.fixture
def page(rig: Rig) -> QWidget:
    rig.window.settings_control.show_page()
    rig.settle(20)
    return rig.window.settings_control.page


def test_its_keys_open_it_over_the_docks_and_esc_closes_it(rig: Rig, qtbot) -> None:
    control = rig.window.settings_control
    qtbot.keyClick(rig.window, Qt.Key.Key_Comma, Qt.KeyboardModifier.ControlModifier)
    rig.wait_for(control.page.isVisible)
    assert control.page.geometry() == rig.window.page_place()
    assert control.page.search.hasFocus()
    qtbot.keyClick(control.page.search, Qt.Key.Key_Escape)
    assert not control.page.isVisible()
    assert rig.window.chat.composer.edit.hasFocus()


def test_the_search_leaves_the_rows_that_have_the_words(rig: Rig, page: QWidget) -> None:
    page.search.setText("memory limit")
    control = rig.window.settings_control
    assert control.engine.memory.isVisible() and not control.engine.device.isVisible()
    assert not control.look.isVisible()
    page.search.setText("privacy")
    assert control.privacy.isVisible() and control.privacy.rows[0].isVisible()
    page.search.setText("f10")
    assert [row.title for row in control.shortcuts.rows if row.isVisible()] == ["Take one step"]
    page.search.setText("nothing has this")
    assert page.nothing.isVisible()
    page.search.clear()
    assert control.look.isVisible() and not page.nothing.isVisible()
    assert not control.engine.reload_row.isVisible()


@pytest.mark.parametrize("font_px", [10, 13, 22])
def test_nothing_is_cut_off_at_the_side(make_rig, font_px: int) -> None:
    rig = make_rig(1100, 700)
    rig.window.preferences.change(font_px=font_px)
    rig.window.settings_control.show_page()
    rig.settle(50)
    page = rig.window.settings_control.page
    content, viewport = page.scroll.widget(), page.scroll.viewport()
    assert content.width() <= viewport.width()
    for section in page.sections:
        for row in section.rows:
            if row.field is not None and row.isVisible():
                right = row.field.mapTo(content, row.field.rect().topRight()).x()
                assert right <= content.width(), row.title
    rig.window.preferences.change(font_px=13)


def test_every_field_has_a_name_and_is_reached_by_tab(rig: Rig, page: QWidget, qtbot) -> None:
    control = rig.window.settings_control
    fields = [row.field for section in page.sections for row in section.rows if row.field is not None]
    assert all(field.accessibleName() for field in fields)
    seen: set[QWidget] = set()
    rig.window.activateWindow()
    qtbot.waitUntil(rig.window.isActiveWindow)
    page.search.setFocus()
    while (focus := QApplication.focusWidget()) is not None and focus not in seen:
        seen.add(focus)
        qtbot.keyClick(focus, Qt.Key.Key_Tab)
    wanted = {control.engine.device.field, control.look.font_size.field, control.shortcuts.rows[0].keys}
    assert wanted <= seen
    assert page.close_button in seen


# Engine --------------------------------------------------------------------------------------------------------------


def test_what_a_loaded_model_does_not_have_is_said_and_a_reload_offered(rig: Rig) -> None:
    rig.load()
    rig.window.settings_control.show_page()
    engine = rig.window.settings_control.engine
    assert not engine.reload_row.isVisible()
    engine.context.field.setValue(512)
    engine.device.field.setCurrentIndex(1)
    engine.device.field.activated.emit(1)
    assert rig.window.preferences.values.max_model_len == 512
    assert rig.window.preferences.values.device == "cpu"
    assert engine.reload_row.isVisible()
    assert "device and context length" in engine.reload_row.hint.text()
    engine.context.field.setValue(0)
    assert "context" not in engine.reload_row.hint.text()
    engine.context.field.setValue(1)
    assert rig.window.preferences.values.max_model_len == 2, "the least that makes sense"
    engine.reload_button.click()
    assert rig.client.loaded[-1].device == "cpu" and rig.client.loaded[-1].max_model_len == 2
    assert not engine.reload_row.isVisible()
    engine.kv_dtype.field.setCurrentIndex(1)
    engine.kv_dtype.field.activated.emit(1)
    assert rig.window.preferences.values.kv_dtype == "fp8"
    assert "type of keys and values" in engine.reload_row.hint.text()


def test_a_reload_does_not_end_answers_unasked(rig: Rig) -> None:
    rig.load()
    rig.add()
    rig.step()
    rig.window.settings_control.show_page()
    engine = rig.window.settings_control.engine
    engine.threads.field.setValue(1)
    engine.reload_button.click()
    assert len(rig.client.loaded) == 1
    rig.window.notice.button.click()
    assert rig.client.loaded[-1].threads == 1


def test_without_an_engine_settings_are_for_the_next_start(rig: Rig) -> None:
    rig.window.settings_control.show_page()
    engine = rig.window.settings_control.engine
    engine.memory.field.setValue(2048)
    assert not engine.reload_row.isVisible()
    rig.window.open_model("/models/mine")
    assert rig.client.loaded[-1].memory_limit == 2048 << 20


def test_more_threads_than_cores_are_warned_of(rig: Rig, page: QWidget) -> None:
    engine = rig.window.settings_control.engine
    assert str(engine.cores) in engine.threads.field.text()
    engine.threads.field.setValue(engine.cores + 1)
    assert f"{engine.cores} physical cores" in engine.threads.problem.text()
    assert engine.threads.problem.isVisible()
    engine.threads.field.setValue(engine.cores)
    assert not engine.threads.problem.isVisible()


# Look ----------------------------------------------------------------------------------------------------------------


def test_the_size_of_text_is_everywhere_at_once(rig: Rig, page: QWidget) -> None:
    plot = rig.window.panels["throughput"]
    before = page.search.fontMetrics().height()
    rig.window.settings_control.look.font_size.field.setValue(20)
    assert rig.window.theme.font_px == 20 == rig.window.preferences.values.font_px
    assert page.search.fontMetrics().height() > before
    areas = [each for each in plot.findChildren(QWidget) if hasattr(each, "axis_font")]
    assert areas and all(area.axis_font.pixelSize() == 17 for area in areas)
    rig.window.theme.set_font_size(13)
    assert rig.window.settings_control.look.font_size.field.value() == 13
    assert all(area.axis_font.pixelSize() == 11 for area in areas)


def test_theme_menu_and_page_are_in_step(rig: Rig, page: QWidget) -> None:
    look = rig.window.settings_control.look
    rig.window.commands["theme.light"].action.trigger()
    assert rig.window.preferences.values.theme == "light" and not rig.window.theme.dark
    assert look.scheme.field.currentData() == "light"
    look.scheme.field.setCurrentIndex(2)
    look.scheme.field.activated.emit(2)
    assert rig.window.theme.dark
    assert rig.window.commands["theme.dark"].action.isChecked()
    rig.window.theme.set_scheme("light")
    assert rig.window.preferences.values.theme == "light"
    rig.window.theme.set_scheme("dark")


def test_runs_are_in_step_with_the_record_menu(rig: Rig, page: QWidget) -> None:
    runs, recording = rig.window.settings_control.runs, rig.window.recording
    runs.limit.field.setValue(1024)
    assert recording.limit == 1 << 30
    assert recording._limit_actions[1 << 30].isChecked()
    recording.texts_action.trigger()
    assert runs.texts.field.isChecked() and rig.window.preferences.values.record_texts
    runs.limit.field.setValue(100)
    assert not any(action.isChecked() for action in recording._limit_actions.values())


def test_enter_sends_or_does_not(rig: Rig, page: QWidget) -> None:
    box = rig.window.settings_control.chat.enter_sends.field
    box.setCurrentIndex(1)
    box.activated.emit(1)
    assert rig.window.preferences.values.enter_sends is False
    assert not rig.window.chat.composer.enter_sends
    assert not rig.window.chat.transcript.memory.enter_sends


def test_reset_all_can_be_undone(rig: Rig, page: QWidget) -> None:
    before = Preferences(font_px=15, threads=1, shortcuts={"tour": "F2"}, last_model="/m")
    rig.window.preferences.put(before)
    page.reset_button.click()
    assert rig.window.preferences.values == Preferences(last_model="/m")
    rig.window.notice.button.click()
    assert rig.window.preferences.values == before
    rig.window.preferences.put(Preferences())


# Folders -------------------------------------------------------------------------------------------------------------


def test_folders_are_added_removed_and_measured(rig: Rig, page: QWidget, tmp_path: Path) -> None:
    folders = rig.window.settings_control.folders
    folders.add_folder(str(tmp_path))
    folders.add_folder(str(tmp_path / "gone"))
    folders.add_folder(str(tmp_path))
    assert rig.window.preferences.values.model_folders == (str(tmp_path), str(tmp_path / "gone"))
    assert "not there" in folders._model_rows[str(tmp_path / "gone")].problem.text()
    folders.remove_folder(str(tmp_path / "gone"))
    assert list(folders._model_rows) == [str(tmp_path)]
    rig.wait_for(lambda: "file" in folders.place_rows["chats"].hint.text())
    rig.window.settings_control.show_page()


# Shortcuts -----------------------------------------------------------------------------------------------------------


def test_keys_are_pressed_into_a_row(rig: Rig, page: QWidget, qtbot) -> None:
    section, commands = rig.window.settings_control.shortcuts, rig.window.commands
    row = section.row_of("tour")
    row.keys.setFocus()
    qtbot.keyClick(row.keys, Qt.Key.Key_N, Qt.KeyboardModifier.ControlModifier)
    rig.wait_for(lambda: commands.keys("tour") == "Ctrl+N")
    other = section.row_of("chat.new")
    assert "“Tour” has these keys" in other.problem.text() and "“New chat” goes without" in other.problem.text()
    assert "“New chat”" in row.problem.text() and "“Tour”" in row.problem.text()
    assert not section.reset_all.isHidden() and section.reset_all.isEnabled()
    row.reset_button.click()
    assert commands.keys("chat.new") == "Ctrl+N" and commands.keys("tour") == ""
    assert other.problem.text() == ""
    assert not section.reset_all.isEnabled()


def test_keys_for_typing_are_refused_in_a_sentence(rig: Rig, page: QWidget, qtbot) -> None:
    row = rig.window.settings_control.shortcuts.row_of("chat.new")
    row.keys.setFocus()
    qtbot.keyClick(row.keys, Qt.Key.Key_B)
    rig.wait_for(lambda: "needed for typing" in row.problem.text())
    assert rig.window.commands.keys("chat.new") == "Ctrl+N"
    assert row.keys.keySequence() == QKeySequence("Ctrl+N")
    qtbot.keyClick(row.keys, Qt.Key.Key_Backspace)
    assert rig.window.commands.keys("chat.new") == ""
    row.reset_button.click()
    qtbot.keyClick(row.keys, Qt.Key.Key_Escape)
    assert not page.isVisible()  # Esc leaves from there too


# Privacy -------------------------------------------------------------------------------------------------------------


def test_wiping_names_what_goes_and_is_asked_for_twice(make_rig) -> None:
    rig = make_rig()
    rig.load()
    rig.window.settings_control.show_page()
    boxes = rig.window.settings_control.privacy.boxes
    rig.wait_for(lambda: "0 chats" in boxes["chats"].text())  # the empty one that is open is none
    assert not boxes["chats"].isEnabled()
    rig.window.settings_control.page.leave()
    rig.window.chat.send("canary-wipe")
    rig.step(3)
    control = rig.window.settings_control
    control.show_page()
    privacy = control.privacy
    rig.wait_for(lambda: "chat" in privacy.boxes["chats"].text())
    run = rig.window.travel.path
    assert not privacy.wipe_button.isEnabled()
    privacy.boxes["chats"].setChecked(True)
    privacy.boxes["runs"].setChecked(True)
    privacy.wipe_button.click()
    assert "1 chat (" in privacy.question.text() and "1 run (" in privacy.question.text()
    assert "cannot be undone" in privacy.question.text()
    privacy.keep.click()
    assert not privacy.question.isVisible() and run.exists()
    privacy.wipe_button.click()
    privacy.really.click()
    assert "Wiped: Chats and Runs" in rig.window.notice.text
    assert not run.exists()
    assert all(not each.num_messages for each in rig.window.chat.session.conversations)
    folder = rig.window.chat.session.store.path.parent
    assert b"canary-wipe" not in b"".join(path.read_bytes() for path in folder.glob("chats*"))


def test_preferences_are_wiped_with_layout_and_models(rig: Rig, page: QWidget, tmp_path: Path) -> None:
    rig.window.settings = QSettings(str(tmp_path / "w.ini"), QSettings.Format.IniFormat)
    rig.window.settings.setValue("geometry", "x")
    rig.window.preferences.change(font_px=14, last_model="/m")
    rig.window.models.kept.used("/m")
    privacy = rig.window.settings_control.privacy
    privacy.boxes["preferences"].setChecked(True)
    privacy.wipe_button.click()
    privacy.really.click()
    assert rig.window.preferences.values == Preferences()
    assert rig.window.settings.allKeys() == [] and rig.window.models.kept.recent == []


def test_chats_are_copied_and_brought_back(make_rig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.load()
    rig.window.chat.send("hello there")
    rig.step(60)
    control = rig.window.settings_control
    control.show_page()
    control.privacy.back_up(tmp_path / "copy.sqlite3")
    assert "copied to" in rig.window.notice.text
    rig.window.chat.session.wipe()
    control.privacy.bring_back(tmp_path / "copy.sqlite3")
    assert "1 chat is back" in rig.window.notice.text
    assert rig.window.chat.current.path[0].text == "hello there"
    control.privacy.bring_back(tmp_path / "none.sqlite3")
    assert "none.sqlite3" in rig.window.notice.text
