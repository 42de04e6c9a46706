"""Keys of commands: the user's, at once, everywhere they are shown, and never two commands on the same ones."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QKeySequence

from app.settings.commands import Commands, fault_of
from app.settings.preferences import PreferenceStore


@pytest.fixture
def commands(qapp) -> Commands:
    made = Commands(PreferenceStore())
    for name, title, keys in (("a", "First", "Ctrl+N"), ("b", "Second", "Ctrl+K"), ("c", "Third", "")):
        made.add(name, QAction(title, made), keys)
    return made


def test_they_begin_with_the_keys_that_ship(commands: Commands) -> None:
    assert [commands.keys(name) for name in "abc"] == ["Ctrl+N", "Ctrl+K", ""]
    assert commands.hint("Do it", "a") == "Do it (Ctrl+N)"
    assert commands.hint("Do it", "c") == "Do it"
    with pytest.raises(ValueError, match="already"):
        commands.add("a", QAction(commands))


def test_other_keys_are_in_force_at_once_and_remembered(commands: Commands, qtbot) -> None:
    with qtbot.waitSignal(commands.changed, timeout=100):
        commands.bind("c", "F7")
    assert commands["c"].action.shortcut() == QKeySequence("F7")
    assert commands._preferences.values.shortcuts == {"c": "F7"}
    assert commands.is_changed("c") and not commands.is_changed("a")
    commands.bind("a", "")
    assert commands.keys("a") == ""
    commands.reset("c")
    assert commands._preferences.values.shortcuts == {"a": ""}
    commands.reset_all()
    assert commands._preferences.values.shortcuts == {}
    assert commands.keys("a") == "Ctrl+N"


def test_the_users_keys_win_and_the_other_goes_without(commands: Commands) -> None:
    commands.bind("c", "Ctrl+K")
    assert (commands.keys("b"), commands.keys("c")) == ("", "Ctrl+K")
    assert commands.conflicts == {"b": "c"}
    commands.bind("b", "F2")
    assert commands.conflicts == {} and commands.keys("b") == "F2"
    commands.bind("a", "F2")
    assert commands.conflicts == {"b": "a"}, "among equals the one that was there first"
    commands.reset_all()
    assert commands.conflicts == {}


@pytest.mark.parametrize(
    "keys", ["A", "Shift+A", "Space", "Tab", "Return", "Ctrl+Return", "Esc", "Ctrl+C", "Ctrl+V", "Left"]
)
def test_keys_that_are_needed_for_typing_are_refused(commands: Commands, keys: str) -> None:
    with pytest.raises(ValueError):
        commands.bind("a", keys)
    assert commands.keys("a") == "Ctrl+N"


@pytest.mark.parametrize("keys", ["F5", "Ctrl+Shift+N", "Alt+Left", "Ctrl+,", ""])
def test_others_are_taken(keys: str) -> None:
    assert fault_of(keys) == ""


def test_nonsense_in_the_file_leaves_the_keys_that_ship(commands: Commands) -> None:
    commands._preferences.change(shortcuts={"a": "A", "b": "Ctrl+N, Ctrl+K", "gone": "F3"})
    assert [commands.keys(name) for name in "ab"] == ["Ctrl+N", "Ctrl+K"]
    commands.reset_all()
    assert commands._preferences.values.shortcuts == {"gone": "F3"}, "a command of another window keeps its keys"


def test_the_windows_commands_have_names_and_no_two_the_same_keys(rig) -> None:
    commands = rig.window.commands
    names = [each.name for each in commands.all()]
    assert {"chat.new", "engine.pause", "settings", "show.timeline", "arrange.lab"} <= set(names)
    assert commands.conflicts == {}
    assert all(not fault_of(each.default) for each in commands.all())
    named = {each.action for each in commands.all()}
    assert {action for action in rig.window.actions() if action.text()} <= named


def test_a_rebound_key_works_in_the_window_and_the_old_one_does_not(rig, qtbot) -> None:
    window = rig.window
    window.commands.bind("arrange.lab", "Ctrl+Shift+L")
    qtbot.keyClick(window, Qt.Key.Key_L, Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier)
    rig.wait_for(lambda: window._arranged == "lab")
    window.arrange("chat")
    qtbot.keyClick(window, Qt.Key.Key_3, Qt.KeyboardModifier.ControlModifier)
    rig.settle(30)
    assert window._arranged == "chat"


def test_tooltips_name_the_keys_in_force(rig) -> None:
    window = rig.window
    window.commands.bind("engine.pause", "F4")
    window.commands.bind("record.toggle", "")
    assert "(F4)" in window.time_bar.pause_button.toolTip()
    assert "F9" not in window.recording.button.toolTip()
    window.commands.reset_all()
    assert "(F8)" in window.time_bar.pause_button.toolTip()
    assert "F9" in window.recording.button.toolTip()


def test_everyday_commands_come_first_and_no_two_are_called_the_same(rig) -> None:
    commands = rig.window.commands.all()
    titles = [command.title for command in commands]
    assert titles[0] == "New chat" and len(set(titles)) == len(titles)
    assert {"Show Chats", "Show Chat", "Arrangement: Chat", "Theme: Dark"} <= set(titles)
    assert titles.index("Settings…") < titles.index("Arrangement: Lab") < titles.index("Show Load")
