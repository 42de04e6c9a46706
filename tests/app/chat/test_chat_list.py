"""The list of chats as it is used: real widgets, keys and clicks."""

from __future__ import annotations

import time

import pytest
from PySide6.QtCore import QEvent, QMimeData, QModelIndex, QPoint, QPointF, QSettings, Qt, QUrl
from PySide6.QtGui import QColor, QDragEnterEvent, QDragMoveEvent, QDropEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QInputDialog, QLineEdit, QMenu

from app.chat import chat_list_view
from app.chat.chat_list_model import CHATS_MIME, ROW, section_words
from app.chat.chat_list_rows import Section
from app.chat.conversation import Conversation
from app.chat.exchange import export_json
from app.chat.workspace import ChatWorkspace
from app.theme import request_color
from tests.app.chat.fake_bridge import FakeBridge

MANY = 5000
REFRESH_SECONDS = 0.02


def shown(workspace: ChatWorkspace) -> list[str]:
    """Headings in brackets, chats by their titles."""
    model = workspace.list_panel.model
    indexes = [model.index(row, 0) for row in range(model.rowCount())]
    return [f"[{each.data()}]" if isinstance(each.data(ROW), Section) else each.data() for each in indexes]


def titles(workspace: ChatWorkspace) -> list[str]:
    return [each for each in shown(workspace) if not each.startswith("[")]


def index_of(workspace: ChatWorkspace, title: str) -> QModelIndex:
    model = workspace.list_panel.model
    rows = (model.index(row, 0) for row in range(model.rowCount()))
    return next(each for each in rows if each.data() == title)


def click(workspace: ChatWorkspace, title: str, modifier=Qt.KeyboardModifier.NoModifier) -> None:
    view = workspace.list_panel.view
    view.scrollTo(index_of(workspace, title))
    place = view.visualRect(index_of(workspace, title)).center()
    QTest.mouseClick(view.viewport(), Qt.MouseButton.LeftButton, modifier, place)


def press(workspace: ChatWorkspace, key, modifier=Qt.KeyboardModifier.NoModifier) -> None:
    workspace.list_panel.view.setFocus()
    QTest.keyClick(workspace.list_panel.view, key, modifier)


def ask(workspace: ChatWorkspace, bridge: FakeBridge, question: str, answer: str = "An answer.") -> Conversation:
    """A chat of its own with a question that is answered."""
    workspace.new_conversation()
    workspace.send(question)
    bridge.finish(max(bridge.requests), answer)
    return workspace.current


def texts(conversation: Conversation) -> list[str]:
    return [message.text for message in conversation.path]


def menu_of(workspace: ChatWorkspace, title: str) -> QMenu:
    panel = workspace.list_panel
    panel._open_menu(index_of(workspace, title), panel.mapToGlobal(QPoint(5, 5)))
    return panel.findChildren(QMenu, options=Qt.FindChildOption.FindDirectChildrenOnly)[-1]


def choose(menu: QMenu, *words: str) -> None:
    """The entry that begins with these words, down through the menus."""
    for word in words[:-1]:
        menu = next(each.menu() for each in menu.actions() if each.text().startswith(word))
    action = next(each for each in menu.actions() if each.text().startswith(words[-1]))
    assert action.isEnabled()
    action.trigger()


@pytest.fixture
def settings(tmp_path) -> QSettings:
    return QSettings(str(tmp_path / "window.ini"), QSettings.Format.IniFormat)


@pytest.fixture
def pets(workspace, bridge) -> dict[str, Conversation]:
    return {name: ask(workspace, bridge, f"about {name}", f"Of {name}.") for name in ("cats", "dogs", "mice")}


# Showing -------------------------------------------------------------------------------------------------------------


def test_sections_and_the_chats_in_them(workspace, bridge, pets):
    workspace.session.set_pinned(pets["cats"], True)
    workspace.session.set_folder(pets["dogs"], "Barking")
    assert shown(workspace) == ["[Pinned]", "about cats", "[Barking]", "about dogs", "[Today]", "about mice"]


def dot_color(workspace: ChatWorkspace, title: str) -> str:
    view = workspace.list_panel.view
    rect = view.visualRect(index_of(workspace, title))
    picture = view.viewport().grab().toImage()
    return picture.pixelColor(rect.right() - 8 - 4, rect.center().y()).name()


def test_chats_that_answer_at_once_show_each_its_hue_and_its_priority(workspace, bridge, theme):
    for question in ("first", "second"):
        workspace.new_conversation()
        workspace.send(question)
    second = workspace.current
    assert dot_color(workspace, "first") == request_color(1, theme).name()
    assert dot_color(workspace, "second") == request_color(2, theme).name()
    press(workspace, Qt.Key.Key_Plus)
    press(workspace, Qt.Key.Key_Plus)
    press(workspace, Qt.Key.Key_Minus)
    assert second.priority == 1 and bridge.priorities[2] == 1
    accessible = index_of(workspace, "second").data(Qt.ItemDataRole.AccessibleTextRole)
    assert "request 2 is answering" in accessible and "priority 1" in accessible
    before = workspace.list_panel.view.grab().toImage()
    workspace.session.set_priority(second, 0)
    assert workspace.list_panel.view.grab().toImage() != before
    bridge.finish(1, "done")
    bridge.finish(2, "done")
    assert dot_color(workspace, "first") != request_color(1, theme).name()


def test_thousands_of_chats_are_shown_at_once_and_change_at_once(workspace, bridge, qtbot):
    now = time.time()
    chats = [
        Conversation(id=f"c{n}", title=f"chat {n}", created=now - 1000 * n, updated=now - 1000 * n) for n in range(MANY)
    ]
    for n, each in enumerate(chats):
        each.folder = f"folder {n % 3}" if n % 5 == 0 else ""
        workspace.session.conversations.add(each)
    panel = workspace.list_panel
    panel.refresh()
    panel.view.grab()

    def use(number: int) -> None:
        chats[number].updated = now + 10 * number

    def seconds_of(number: int) -> float:
        use(number)
        begun = time.thread_time()  # of a busy machine only this is the list's
        panel.refresh()
        return time.thread_time() - begun

    best = min(seconds_of(number) for number in (4001, 3002, 2003, 4004, 4006))
    assert best < REFRESH_SECONDS and "chat 4006" in titles(workspace)[:1100]
    moved = []
    panel.model.rowsInserted.connect(lambda _parent, first, last: moved.append((first, last)))
    use(4999)
    panel.refresh()
    assert len(moved) == 1 and moved[0][0] == moved[0][1]


def test_a_narrow_list_shows_titles_cut_and_never_scrolls_sideways(workspace, bridge, theme, qtbot):
    workspace.session.rename(ask(workspace, bridge, "x"), "A title that is much longer than the list is wide")
    for scheme in ("light", "dark"):
        theme.set_scheme(scheme)
        workspace.list_panel.parentWidget().setSizes([150, 750])
        qtbot.wait(1)
        assert workspace.list_panel.width() <= 170
        view = workspace.list_panel.view
        assert view.horizontalScrollBar().maximum() == 0
        picture = view.viewport().grab().toImage()
        y = view.visualRect(index_of(workspace, workspace.current.title)).center().y()
        colors = {picture.pixelColor(x, y).name() for x in range(picture.width())}
        assert theme.selection.name() in colors and len(colors) > 3


def test_every_row_has_words_for_who_cannot_see_it(workspace, bridge, pets):
    workspace.session.set_folder(pets["dogs"], "Barking")
    model = workspace.list_panel.model
    said = [model.index(row, 0).data(Qt.ItemDataRole.AccessibleTextRole) for row in range(model.rowCount())]
    assert said[0] == "Folder Barking, 1 chat, shown" and all(said)


# New, rename, pin ----------------------------------------------------------------------------------------------------


def write_over(workspace: ChatWorkspace, words: str, end: Qt.Key = Qt.Key.Key_Return) -> None:
    """In the field that is open in the list."""
    (editor,) = workspace.list_panel.view.findChildren(QLineEdit)
    assert editor.hasFocus()
    editor.selectAll()
    QTest.keyClicks(editor, words)
    QTest.keyClick(editor, end)
    QApplication.processEvents()


def test_a_chat_is_renamed_with_f2(workspace, bridge, pets):
    press(workspace, Qt.Key.Key_F2)
    write_over(workspace, "  Mice  and men ")
    assert pets["mice"].title == "Mice and men" == workspace.title.text()
    QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)
    press(workspace, Qt.Key.Key_F2)
    write_over(workspace, "no", Qt.Key.Key_Escape)
    assert pets["mice"].title == "Mice and men"


def test_a_name_that_is_being_written_stays_when_answers_end(workspace, bridge, pets):
    workspace.session.send(pets["cats"], "more")
    press(workspace, Qt.Key.Key_F2)
    (editor,) = workspace.list_panel.view.findChildren(QLineEdit)
    QTest.keyClicks(editor, "Of mi")
    bridge.finish(max(bridge.requests), "done")
    assert editor.isVisible() and editor.text() == "Of mi"
    QTest.keyClicks(editor, "ce")
    QTest.keyClick(editor, Qt.Key.Key_Return)
    QApplication.processEvents()
    assert pets["mice"].title == "Of mice"


def test_pinning_by_key_and_by_menu(workspace, bridge, pets):
    press(workspace, Qt.Key.Key_P, Qt.KeyboardModifier.ControlModifier)
    assert shown(workspace)[:2] == ["[Pinned]", "about mice"]
    choose(menu_of(workspace, "about mice"), "Unpin")
    assert shown(workspace)[0] == "[Today]"


def test_arrow_keys_rest_on_a_chat_and_open_it(workspace, bridge, pets, qtbot):
    workspace.new_conversation()
    press(workspace, Qt.Key.Key_Down)
    assert not workspace.current.title
    qtbot.waitUntil(lambda: workspace.current is pets["mice"])
    assert workspace.list_panel.view.hasFocus()
    press(workspace, Qt.Key.Key_Down)
    press(workspace, Qt.Key.Key_Return)
    assert workspace.current is pets["dogs"] and workspace.composer.edit.hasFocus()


# Folders -------------------------------------------------------------------------------------------------------------


def test_chats_are_moved_to_a_folder_by_menu_and_back_by_undo(workspace, bridge, pets, monkeypatch):
    workspace.session.set_folder(pets["cats"], "Fur & feathers")
    click(workspace, "about dogs", Qt.KeyboardModifier.ControlModifier)
    assert len(workspace.list_panel.view.chosen_ids()) == 2 and workspace.current is pets["mice"]
    choose(menu_of(workspace, "about dogs"), "Move to folder", "Fur && feathers")
    assert {each.folder for each in pets.values()} == {"Fur & feathers"}
    assert "2 chats" in workspace.undo_notice.text
    workspace.undo_notice.button.click()
    assert pets["dogs"].folder == "" and pets["cats"].folder == "Fur & feathers"


def test_a_new_folder_is_asked_for_by_name(workspace, bridge, pets):
    choose(menu_of(workspace, "about dogs"), "Move to folder", "New folder")
    dialog = workspace.list_panel.findChild(QInputDialog)
    dialog.setTextValue("  Barking   loudly ")
    dialog.accept()
    assert pets["dogs"].folder == "Barking loudly"
    assert shown(workspace)[:2] == ["[Barking loudly]", "about dogs"]


def drop(workspace: ChatWorkspace, dragged: list[str], onto: QModelIndex) -> None:
    model = workspace.list_panel.model
    data = model.mimeData([index_of(workspace, title) for title in dragged])
    assert data.hasFormat(CHATS_MIME) and model.flags(onto) & Qt.ItemFlag.ItemIsDropEnabled
    model.dropMimeData(data, Qt.DropAction.MoveAction, -1, -1, onto)


def test_dragging_moves_into_folders_out_of_them_and_to_the_pinned(workspace, bridge, pets):
    workspace.session.set_folder(pets["cats"], "Fur")
    workspace.session.set_pinned(pets["dogs"], True)
    drop(workspace, ["about mice"], index_of(workspace, "Fur"))
    assert pets["mice"].folder == "Fur"
    drop(workspace, ["about cats"], index_of(workspace, "about dogs"))
    assert pets["cats"].pinned and pets["cats"].folder == "Fur"
    drop(workspace, ["about dogs", "about cats"], index_of(workspace, "about mice"))
    assert pets["dogs"].folder == "Fur" and not pets["dogs"].pinned
    other = ask(workspace, bridge, "about fish")
    drop(workspace, ["about cats"], index_of(workspace, "Today"))
    assert pets["cats"].folder == "" and other.folder == ""
    workspace.undo_notice.button.click()
    assert pets["cats"].folder == "Fur"


def test_a_real_drop_lands_on_the_row_under_the_pointer(workspace, bridge, pets, monkeypatch):
    workspace.session.set_folder(pets["cats"], "Fur")
    view, model = workspace.list_panel.view, workspace.list_panel.model
    click(workspace, "about dogs")
    dragged = []

    def exec_(drag, _actions):
        dragged.append(drag.mimeData())
        data = model.mimeData([index_of(workspace, "about dogs")])
        place = QPointF(view.visualRect(index_of(workspace, "Fur")).center())
        keys = (Qt.DropAction.MoveAction, data, Qt.MouseButton.LeftButton, Qt.KeyboardModifier.NoModifier)
        enter = QDragEnterEvent(place.toPoint(), *keys)
        move = QDragMoveEvent(place.toPoint(), *keys)
        drop = QDropEvent(place, *keys)
        for event in (enter, move, drop):
            QApplication.sendEvent(view.viewport(), event)
            assert event.isAccepted()
        return Qt.DropAction.MoveAction

    monkeypatch.setattr(chat_list_view.QDrag, "exec", exec_)
    view.startDrag(Qt.DropAction.MoveAction)
    assert dragged[0].hasFormat(CHATS_MIME)
    assert pets["dogs"].folder == "Fur" and pets["dogs"].title == "about dogs"


def test_dropped_files_are_imported(workspace, bridge, tmp_path, qtbot):
    source = ask(workspace, bridge, "about cats")
    path = tmp_path / "cats.json"
    path.write_bytes(export_json([source]))
    data = QMimeData()
    data.setUrls([QUrl.fromLocalFile(str(path))])
    workspace.list_panel.model.dropMimeData(data, Qt.DropAction.CopyAction, -1, -1, QModelIndex())
    qtbot.waitUntil(lambda: "Imported 1 chat from cats.json" in workspace.undo_notice.text)
    assert titles(workspace).count("about cats") == 2 and workspace.current is not source


def test_a_folder_folds_by_click_and_keys_and_stays_so_across_a_restart(make_workspace, bridge, settings):
    workspace = make_workspace(bridge, settings=settings)
    inside = ask(workspace, bridge, "about cats")
    ask(workspace, bridge, "about dogs")
    workspace.session.set_folder(inside, "Fur")
    click(workspace, "Fur")
    assert shown(workspace) == ["[Fur]", "[Today]", "about dogs"]
    view = workspace.list_panel.view
    view.setCurrentIndex(index_of(workspace, "Fur"))
    press(workspace, Qt.Key.Key_Right)
    assert "about cats" in shown(workspace)
    view.setCurrentIndex(index_of(workspace, "about cats"))
    press(workspace, Qt.Key.Key_Left)
    press(workspace, Qt.Key.Key_Return)
    assert "about cats" not in shown(workspace)
    workspace.shutdown()
    again = make_workspace(FakeBridge(), settings=settings)
    assert shown(again) == ["[Fur]", "[Today]", "about dogs"]


def test_a_folder_is_renamed_in_place_joined_and_dissolved(workspace, bridge, pets):
    for name, folder in (("cats", "Fur"), ("dogs", "Fur"), ("mice", "Small")):
        workspace.session.set_folder(pets[name], folder)
    workspace.list_panel.rename(Section("folder", "Fur"))
    write_over(workspace, "Pets")
    assert workspace.session.folders() == ["Pets", "Small"]
    workspace.commands.rename_folder("Pets", "Small")
    assert workspace.session.folders() == ["Small"]
    workspace.undo_notice.button.click()
    assert sorted(workspace.commands.in_folder("Pets")) == sorted([pets["cats"].id, pets["dogs"].id])
    choose(menu_of(workspace, "Pets"), "Dissolve")
    assert workspace.session.folders() == ["Small"] and "2 chats" in workspace.undo_notice.text
    workspace.undo_notice.button.click()
    assert workspace.session.folders() == ["Pets", "Small"]


# Deleting ------------------------------------------------------------------------------------------------------------


def test_several_chats_are_deleted_and_come_back_with_one_undo(make_workspace, bridge):
    workspace = make_workspace(bridge)
    for name in ("cats", "dogs", "mice", "fish"):
        ask(workspace, bridge, name)
    click(workspace, "dogs")
    click(workspace, "mice", Qt.KeyboardModifier.ShiftModifier)
    press(workspace, Qt.Key.Key_Delete)
    assert titles(workspace) == ["fish", "cats"] and workspace.current.title == "cats"
    assert "2 chats" in workspace.undo_notice.text
    press(workspace, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert titles(workspace) == ["fish", "mice", "dogs", "cats"] and workspace.current.title == "dogs"
    press(workspace, Qt.Key.Key_Delete)
    workspace.shutdown()
    assert titles(make_workspace(FakeBridge())) == ["fish", "mice", "cats"]


def test_deletions_one_after_the_other_are_undone_one_after_the_other(workspace, bridge, pets):
    press(workspace, Qt.Key.Key_Delete)
    press(workspace, Qt.Key.Key_Delete)
    assert titles(workspace) == ["about cats"] and workspace.undo_notice.button.text() == "Undo (2)"
    workspace.undo_notice.button.click()
    assert titles(workspace) == ["about dogs", "about cats"] and workspace.undo_notice.button.text() == "Undo"
    workspace.undo_notice.button.click()
    assert titles(workspace) == ["about mice", "about dogs", "about cats"] and not workspace.undo_notice.text


def test_when_the_last_chat_is_deleted_an_empty_one_is_there_to_write_in(workspace, bridge):
    ask(workspace, bridge, "only one")
    press(workspace, Qt.Key.Key_Delete)
    while workspace.current.title:
        press(workspace, Qt.Key.Key_Delete)
    assert workspace.current.is_empty and titles(workspace) == ["New chat"]
    workspace.undo_notice.expire()
    press(workspace, Qt.Key.Key_Delete)
    assert workspace.current.is_empty and not workspace.undo_notice.text
    workspace.send("and on")
    assert titles(workspace) == ["and on"]


def test_all_chats_can_be_deleted_at_once(workspace, bridge, pets):
    press(workspace, Qt.Key.Key_A, Qt.KeyboardModifier.ControlModifier)
    press(workspace, Qt.Key.Key_Delete)
    assert workspace.current.is_empty and "3 chats" in workspace.undo_notice.text
    workspace.undo_notice.button.click()
    assert {"about cats", "about dogs", "about mice"} <= set(titles(workspace))


# Searching -----------------------------------------------------------------------------------------------------------


def search(workspace: ChatWorkspace, words: str) -> None:
    workspace.list_panel.focus_search()
    QTest.keyClicks(workspace.list_panel.search, words)
    workspace.list_panel.refresh()


def test_a_search_shows_the_words_around_and_enter_opens_the_message(workspace, bridge, qtbot):
    chat = ask(workspace, bridge, "about cats", "They **purr** loudly.")
    for number in range(30):
        workspace.send(f"more {number}")
        bridge.finish(max(bridge.requests), "Yes.\n\n" * 10)
    ask(workspace, bridge, "about dogs", "They bark.")
    search(workspace, "PURR")
    assert titles(workspace) == ["about cats"]
    hit = workspace.list_panel.model.listing.hits[chat.id]
    assert "\u2068purr\u2069" in hit.snippet and hit.message_id == chat.path[1].id
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Return)
    assert workspace.current is chat
    view = workspace.transcript.view(chat.path[1].id)
    viewport = workspace.transcript.viewport()
    qtbot.waitUntil(lambda: 0 <= view.mapTo(viewport, QPoint(0, 0)).y() < viewport.height())
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Escape)
    assert titles(workspace) == ["about dogs", "about cats"]


@pytest.mark.parametrize("needle", ["cat", "cats are", "ca", "Ä"])
def test_a_search_counts_the_messages_that_hold_it(workspace, bridge, needle):
    chat = ask(workspace, bridge, "What are cats? Ä", "cats are cats ä, cats are cats")
    workspace.send("and dogs?")
    bridge.finish(max(bridge.requests), "No cats are dogs Ä; c a t s are none")
    search(workspace, needle)
    held = sum(needle.casefold() in message.text.casefold() for message in chat.messages)
    hit = workspace.list_panel.model.listing.hits[chat.id]
    assert hit.messages == held >= 2
    said = index_of(workspace, chat.title).data(Qt.ItemDataRole.AccessibleTextRole)
    assert f"found in {held} messages" in said


def test_what_is_found_in_another_version_is_brought_to_the_screen(workspace, bridge):
    chat = ask(workspace, bridge, "about cats", "They purr.")
    workspace.regenerate()
    bridge.finish(max(bridge.requests), "They meow.")
    assert "purr" not in " ".join(texts(chat))
    search(workspace, "purr")
    click(workspace, "about cats")
    assert texts(chat) == ["about cats", "They purr."]
    assert workspace.transcript.view(chat.path[1].id) is not None


def test_a_search_that_finds_nothing_says_so(workspace, bridge, pets):
    search(workspace, "unicorns")
    assert workspace.list_panel.nothing.text() == "No chat holds “unicorns”." and shown(workspace) == []
    assert workspace.list_panel.nothing.isVisible()


def test_what_was_found_is_drawn_bold_and_is_not_cut_away(workspace, bridge, theme):
    long = "word " * 60 + "needle " + "word " * 60
    ask(workspace, bridge, "about hay", long)
    search(workspace, "needle")
    view = workspace.list_panel.view
    two_lines = view.rowHeight(0)
    rect = view.visualRect(index_of(workspace, "about hay"))
    assert rect.height() == two_lines > view.fontMetrics().height() * 2
    picture = view.viewport().grab(rect.adjusted(0, two_lines // 2 + 2, 0, 0)).toImage()
    strong = QColor(theme.text)
    near = [
        x
        for x in range(picture.width())
        for y in range(picture.height())
        if abs(picture.pixelColor(x, y).lightness() - strong.lightness()) < 12
    ]
    assert near  # the hit's colour is on the line


# Duplicating, exporting, importing -----------------------------------------------------------------------------------


def test_a_duplicate_has_all_branches_and_a_life_of_its_own(workspace, bridge):
    chat = ask(workspace, bridge, "about cats", "They purr.")
    workspace.regenerate()
    bridge.finish(max(bridge.requests), "They meow.")
    press(workspace, Qt.Key.Key_D, Qt.KeyboardModifier.ControlModifier)
    copy = workspace.current
    assert copy is not chat and copy.title == "about cats (copy)" and texts(copy) == ["about cats", "They meow."]
    assert [each.text for each in copy.versions(copy.path[1].id)] == ["They purr.", "They meow."]
    workspace.send("more")
    assert len(copy.path) == 4 and len(chat.path) == 2
    assert not {each.id for each in copy.messages} & {each.id for each in chat.messages}


def test_section_words_name_months_and_years():
    assert section_words(Section("date", "2024")) == "2024"
    assert section_words(Section("date", "2026-05")) == "May"
