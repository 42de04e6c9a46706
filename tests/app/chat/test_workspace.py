"""The chat as it is used: real widgets, a bridge that the test answers for."""

from __future__ import annotations

import socket
import threading

import pytest
from PySide6.QtCore import QPoint, Qt, QTimer, QUrl
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QMenu, QMessageBox, QPushButton

from app.chat.answer_view import AnswerView
from app.chat.chat_list_rows import Section
from app.chat.conversation import DEFAULT_CHAT_PARAMS, MessageStatus, Role
from app.chat.empty_page import SUGGESTIONS
from app.chat.following_area import SETTLE_MS
from app.chat.message_window import PAGE_MESSAGES
from app.chat.store import StoreError
from app.chat.text_pane import ask_to_open
from app.chat.user_view import UserView
from app.chat.workspace import ChatWorkspace
from app.selection import Selection
from tests.app.chat.fake_bridge import FakeBridge


def type_and_send(workspace: ChatWorkspace, text: str) -> None:
    workspace.composer.edit.setFocus()
    QTest.keyClicks(workspace.composer.edit, text)
    QTest.keyClick(workspace.composer.edit, Qt.Key.Key_Return)


def answers(workspace: ChatWorkspace) -> list[AnswerView]:
    return [view for view in workspace.transcript.views if isinstance(view, AnswerView)]


def shown_text(view: AnswerView | UserView) -> str:
    if isinstance(view, UserView):
        return view.pane.toPlainText()
    return "\n".join(pane.toPlainText() for pane in view.text.panes if pane.isVisibleTo(view))


def titles(workspace: ChatWorkspace) -> list[str]:
    model = workspace.list_panel.model
    return [model.index(row, 0).data() for row, what in enumerate(model.rows) if not isinstance(what, Section)]


# Sending and stopping ------------------------------------------------------------------------------------------------


def test_enter_sends_and_the_answer_streams(workspace, bridge, qtbot):
    type_and_send(workspace, "hello")
    assert workspace.composer.text == ""
    messages, params = bridge.requests[1]
    assert [(m.role, m.content) for m in messages] == [("user", "hello")]
    assert params == DEFAULT_CHAT_PARAMS and params.max_tokens == 1024
    bridge.say(1, "Good **morn", tokens=3)
    qtbot.waitUntil(lambda: "Good **morn" in shown_text(answers(workspace)[0]))
    assert workspace.composer.button.accessibleName() == "Stop"
    bridge.finish(1, "ing**", prompt=20, cached=16)
    view = answers(workspace)[0]
    assert shown_text(view) == "Good morning"
    assert workspace.composer.button.accessibleName() == "Send"
    line = view.line.text()
    assert line.startswith("request 1 · finished · ") and "4 tokens" in line and "16 prompt tokens reused" in line
    assert "tok/s" in line and "TTFT" in line


def test_shift_enter_makes_a_line(workspace, bridge):
    edit = workspace.composer.edit
    QTest.keyClicks(edit, "one")
    before = edit.height()
    QTest.keyClick(edit, Qt.Key.Key_Return, Qt.KeyboardModifier.ShiftModifier)
    QTest.keyClicks(edit, "two")
    assert edit.toPlainText() == "one\ntwo" and not bridge.requests
    assert edit.height() > before


def test_blank_text_is_not_sent(workspace, bridge):
    type_and_send(workspace, "   ")
    assert not bridge.requests and not workspace.composer.button.isEnabled()


@pytest.mark.parametrize("way", ["esc", "button"])
def test_stop_keeps_what_there_is(workspace, bridge, way):
    type_and_send(workspace, "hello")
    bridge.say(1, "half an")
    if way == "esc":
        QTest.keyClick(workspace.composer.edit, Qt.Key.Key_Escape)
    else:
        QTest.mouseClick(workspace.composer.button, Qt.MouseButton.LeftButton)
    assert bridge.aborted == [1]
    bridge.say(1, " answer nobody saw")
    bridge.finish(1, reason="abort")
    view = answers(workspace)[0]
    assert shown_text(view) == "half an" and "stopped" in view.line.text()
    type_and_send(workspace, "go on")
    assert [m.content for m in bridge.requests[2][0]] == ["hello", "half an", "go on"]


def test_the_prompt_is_exactly_what_the_transcript_shows(workspace, bridge):
    for number, question in enumerate(["a <b>question</b>", "one *more*", "third"], 1):
        type_and_send(workspace, question)
        bridge.say(number, f"plain answer {number}")
        bridge.finish(number)
    type_and_send(workspace, "and now?")
    shown = [shown_text(view) for view in workspace.transcript.views][:-1]
    assert [m.content for m in bridge.requests[4][0]] == shown


def test_several_conversations_answer_at_once(workspace, bridge):
    type_and_send(workspace, "first")
    first = workspace.current
    workspace.new_conversation()
    type_and_send(workspace, "second")
    bridge.say(1, "one")
    bridge.say(2, "two")
    assert shown_text(answers(workspace)[0]) in ("", "two")
    bridge.finish(1, " done")
    bridge.finish(2, " done")
    assert shown_text(answers(workspace)[0]) == "two done"
    workspace.open_conversation(first)
    assert shown_text(answers(workspace)[0]) == "one done"


def test_regenerate_replaces_the_last_answer_only(workspace, bridge):
    for number in (1, 2):
        type_and_send(workspace, f"question {number}")
        bridge.finish(number, f"answer {number}")
    first, last = answers(workspace)
    assert first.regenerate_button.isHidden() and not last.regenerate_button.isHidden()
    QTest.mouseClick(last.regenerate_button, Qt.MouseButton.LeftButton)
    assert [m.content for m in bridge.requests[3][0]] == ["question 1", "answer 1", "question 2"]
    bridge.finish(3, "better")
    assert [shown_text(view) for view in answers(workspace)] == ["answer 1", "better"]


def test_a_refused_request_is_a_sentence_and_the_chat_goes_on(workspace, bridge):
    type_and_send(workspace, "too long")
    bridge.finish(1, reason="error", error="The prompt has 9,000 tokens; this model takes 8,192. Shorten it.")
    view = answers(workspace)[0]
    assert "9,000" in view.sentence.text() and view.sentence.isVisibleTo(view)
    type_and_send(workspace, "short")
    bridge.finish(2, "fine")
    assert shown_text(answers(workspace)[1]) == "fine"


def test_an_answer_cut_by_max_tokens_says_so(workspace, bridge):
    workspace.options_button.setChecked(True)
    edit = workspace.options.edits["max_tokens"]
    edit.selectAll()
    QTest.keyClicks(edit, "3")
    type_and_send(workspace, "hello")
    bridge.say(1, "a b", tokens=2)
    bridge.finish(1, " c", reason="length")
    assert "max tokens (3)" in answers(workspace)[0].sentence.text()


# The engine ----------------------------------------------------------------------------------------------------------


def test_what_is_sent_while_the_model_loads_waits_in_sight(make_workspace, qapp):
    bridge = FakeBridge("starting")
    workspace = make_workspace(bridge)
    assert "waits" in workspace.engine_notice.text
    type_and_send(workspace, "early")
    bridge.say_loading("Fetching the starter model", 1, 2)
    assert not bridge.requests and "waits for the model" in answers(workspace)[0].line.text()
    bridge.become_ready()
    assert [m.content for m in bridge.requests[1][0]] == ["early"]
    assert workspace.engine_notice.text == ""
    bridge.finish(1, "hello")
    assert shown_text(answers(workspace)[0]) == "hello"


def test_a_queued_message_can_be_stopped(make_workspace, qapp):
    bridge = FakeBridge("loading")
    workspace = make_workspace(bridge)
    type_and_send(workspace, "early")
    workspace.stop()
    bridge.become_ready()
    assert not bridge.requests and not bridge.aborted


def test_a_model_that_cannot_be_loaded_ends_what_waits_for_it(make_workspace, qapp):
    bridge = FakeBridge("loading")
    workspace = make_workspace(bridge)
    type_and_send(workspace, "early")
    bridge.fail_load("The model needs 80.0 GB; 7.9 GB are free. Choose a smaller one.")
    assert "80.0 GB" in answers(workspace)[0].sentence.text()
    assert "No model" in workspace.engine_notice.text


def test_death_marks_answers_and_a_restart_goes_on(workspace, bridge):
    type_and_send(workspace, "hello")
    bridge.say(1, "half")
    bridge.die()
    view = answers(workspace)[0]
    assert shown_text(view) == "half" and view.message.status is MessageStatus.INCOMPLETE
    assert "SIGKILL" in view.sentence.text() and "incomplete" in view.line.text()
    type_and_send(workspace, "kept in the field")
    assert workspace.composer.text == "kept in the field"
    QTest.mouseClick(workspace.engine_notice.button, Qt.MouseButton.LeftButton)
    assert bridge.restarts == 1
    bridge.become_ready()
    QTest.keyClick(workspace.composer.edit, Qt.Key.Key_Return)
    assert [m.content for m in bridge.requests[2][0]] == ["hello", "half", "kept in the field"]


def test_an_engine_that_ends_after_the_chat_was_closed_disturbs_nobody(workspace, bridge):
    type_and_send(workspace, "hello")
    bridge.say(1, "half")
    workspace.shutdown()
    workspace.shutdown()
    bridge.set_state("stopped")
    bridge.say(1, "late")
    assert [timer for timer in workspace.session.findChildren(QTimer) if timer.isActive()] == []


def test_loading_another_model_marks_open_answers(workspace, bridge):
    type_and_send(workspace, "hello")
    bridge.say(1, "half")
    bridge.set_state("stopped")
    bridge.set_state("starting")
    assert answers(workspace)[0].message.status is MessageStatus.INCOMPLETE


# On disk -------------------------------------------------------------------------------------------------------------


def test_history_options_and_state_come_back(make_workspace, bridge, qtbot):
    workspace = make_workspace(bridge)
    type_and_send(workspace, "hello")
    workspace.options.system_prompt.setPlainText("Be brief.")
    workspace.options.stop.setPlainText("END\n\\n\\n")
    bridge.finish(1, "**Hi**", prompt=20, cached=16)
    type_and_send(workspace, "more")
    bridge.say(2, "half an an")
    qtbot.wait(10)
    workspace.shutdown()
    again = make_workspace(FakeBridge())
    assert again.current.title == "hello"
    assert [shown_text(view) for view in again.transcript.views] == ["hello", "Hi", "more", "half an an"]
    first, last = answers(again)
    assert "16 prompt tokens reused" in first.line.text() and "request" not in first.line.text()
    assert "incomplete" in last.line.text() and "ended before" in last.sentence.text()
    assert again.options.system_prompt.toPlainText() == "Be brief."
    assert again.current.params.stop == ("END", "\n\n")


def test_a_save_that_fails_is_said_tried_again_and_then_forgotten(workspace, bridge, monkeypatch):
    def full(*_args):
        raise StoreError("Chats cannot be saved: the disk is full (0.0 MB free).")

    with monkeypatch.context() as patch:
        patch.setattr(workspace.session.store, "save", full)
        type_and_send(workspace, "hello")
        bridge.finish(1, "an answer")
        assert "disk is full" in workspace.store_notice.text
    workspace.session.flush()
    assert workspace.store_notice.text == ""
    assert [each.conversation for each in workspace.session.search("an answer")] == [workspace.current]


def test_a_second_window_says_that_it_does_not_keep_chats(make_workspace, bridge):
    first = make_workspace(bridge)
    type_and_send(first, "hello")
    bridge.finish(1, "hi")
    second = make_workspace(FakeBridge())
    assert "Another Batchscope" in second.store_notice.text
    assert shown_text(answers(second)[0]) == "hi"
    type_and_send(second, "not kept")
    assert len(answers(second)) == 2


def test_a_damaged_chat_can_be_looked_at_but_not_continued(make_workspace, bridge, store_path):
    import sqlite3

    workspace = make_workspace(bridge)
    type_and_send(workspace, "hello")
    bridge.finish(1, "hi")
    workspace.shutdown()
    with sqlite3.connect(store_path) as raw:
        raw.execute("UPDATE conversations SET params = 'x'")
    raw.close()
    again = make_workspace(FakeBridge())
    again.open_conversation(next(each for each in again.session.conversations if each.damage))
    assert shown_text(answers(again)[0]) == "hi"
    assert "params" in again.store_notice.text and "could not be read" in again.store_notice.text
    type_and_send(again, "more")
    assert len(answers(again)) == 1


def test_enter_while_an_answer_is_written_says_why_and_keeps_the_text(workspace, bridge):
    type_and_send(workspace, "one")
    type_and_send(workspace, "two")
    assert "still answering" in workspace.notice.text
    assert workspace.composer.text == "two" and len(bridge.requests) == 1


# The list ------------------------------------------------------------------------------------------------------------


def two_chats(workspace: ChatWorkspace, bridge: FakeBridge) -> None:
    type_and_send(workspace, "about cats")
    bridge.finish(1, "They purr.")
    workspace.new_conversation()
    type_and_send(workspace, "about dogs")
    bridge.finish(2, "They bark.")


def test_a_new_chat_can_be_written_in_and_there_is_only_one_empty(workspace, bridge):
    two_chats(workspace, bridge)
    for _ in range(3):
        workspace.list_panel.new_button.click()
    assert titles(workspace) == ["New chat", "about dogs", "about cats"]
    assert workspace.composer.edit.hasFocus()
    assert workspace.transcript.empty_page.isVisible()


def test_search_by_keyboard_looks_into_the_texts(workspace, bridge, qtbot):
    two_chats(workspace, bridge)
    workspace.list_panel.focus_search()
    assert workspace.list_panel.search.hasFocus()
    QTest.keyClicks(workspace.list_panel.search, "PURR")
    qtbot.waitUntil(lambda: titles(workspace) == ["about cats"])
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Return)
    assert workspace.current.title == "about cats"
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Escape)
    qtbot.waitUntil(lambda: len(titles(workspace)) == 2)
    workspace.list_panel.search.setText("unicorns")
    qtbot.waitUntil(lambda: "unicorns" in workspace.list_panel.nothing.text())


def test_enter_opens_the_first_chat_found_and_down_goes_to_the_list(workspace, bridge, qtbot):
    two_chats(workspace, bridge)
    workspace.list_panel.focus_search()
    QTest.keyClicks(workspace.list_panel.search, "purr")
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Return)
    assert workspace.current.title == "about cats"
    QTest.keyClick(workspace.list_panel.search, Qt.Key.Key_Down)
    assert workspace.list_panel.view.hasFocus()


def test_the_menu_of_a_chat_outlives_the_list_being_filled_anew(workspace, bridge):
    two_chats(workspace, bridge)
    chats = workspace.list_panel
    chats._open_menu(chats.model.index(chats.model.rowCount() - 1, 0), chats.mapToGlobal(QPoint(5, 5)))
    menu = chats.findChild(QMenu)
    for needle in ("purr", ""):
        chats.search.setText(needle)
        chats.refresh()
    menu.actions()[-1].trigger()
    assert titles(workspace) == ["about dogs"]
    menu.close()


def test_an_emptied_chat_is_not_taken_for_a_new_one(workspace, bridge):
    type_and_send(workspace, "about cats")
    bridge.finish(1, "They purr.")
    emptied = workspace.current
    workspace.delete_message(emptied.path[0].id)
    workspace.new_conversation()
    assert workspace.current is not emptied and workspace.title.text() == "New chat"


def test_a_deleted_message_comes_back_with_its_chat(make_workspace, bridge):
    workspace = make_workspace(bridge)
    type_and_send(workspace, "about cats")
    bridge.finish(1, "They purr.")
    chat = workspace.current
    workspace.delete_message(chat.path[0].id)
    workspace.delete_conversations([chat.id])
    workspace.undo_notice.button.click()
    workspace.undo_notice.button.click()
    assert workspace.current is chat and [message.text for message in chat.messages] == ["about cats", "They purr."]
    workspace.shutdown()
    again = make_workspace(bridge)
    assert [message.text for message in again.current.messages] == ["about cats", "They purr."]


def test_renaming_is_kept(make_workspace, bridge):
    workspace = make_workspace(bridge)
    two_chats(workspace, bridge)
    model = workspace.list_panel.model
    model.setData(model.index(1, 0), "  Dogs \n of war ")
    assert titles(workspace)[0] == "Dogs of war" == workspace.title.text()
    model.setData(model.index(1, 0), "   ")
    assert titles(workspace)[0] == "Dogs of war"
    workspace.shutdown()
    assert "Dogs of war" in titles(make_workspace(FakeBridge()))


def test_deleting_a_chat_can_be_undone(make_workspace, bridge):
    workspace = make_workspace(bridge)
    two_chats(workspace, bridge)
    QTest.keyClick(workspace.list_panel.view, Qt.Key.Key_Delete)
    assert titles(workspace) == ["about cats"] and workspace.current.title == "about cats"
    QTest.mouseClick(workspace.undo_notice.button, Qt.MouseButton.LeftButton)
    assert titles(workspace) == ["about dogs", "about cats"] and workspace.current.title == "about dogs"
    assert shown_text(answers(workspace)[0]) == "They bark."
    QTest.keyClick(workspace.list_panel.view, Qt.Key.Key_Delete)
    workspace.shutdown()
    assert titles(make_workspace(FakeBridge())) == ["about cats"]


def test_deleting_a_chat_that_answers_stops_it(workspace, bridge):
    type_and_send(workspace, "hello")
    bridge.say(1, "half")
    workspace.list_panel.delete_wanted.emit([workspace.current.id])
    assert bridge.aborted == [1]
    bridge.say(1, "late")
    QTest.mouseClick(workspace.undo_notice.button, Qt.MouseButton.LeftButton)
    assert shown_text(answers(workspace)[0]) == "half"


def test_deleting_a_turn_can_be_undone_and_leaves_the_prompt_right(workspace, bridge):
    for number in (1, 2, 3):
        type_and_send(workspace, f"question {number}")
        bridge.finish(number, f"answer {number}")
    workspace.transcript.delete_clicked.emit(workspace.current.path[2].id)
    assert [shown_text(v) for v in workspace.transcript.views] == ["question 1", "answer 1", "question 3", "answer 3"]
    type_and_send(workspace, "four")
    assert [m.content for m in bridge.requests[4][0]] == ["question 1", "answer 1", "question 3", "answer 3", "four"]
    bridge.finish(4, "answer 4")
    QTest.mouseClick(workspace.undo_notice.button, Qt.MouseButton.LeftButton)
    assert [shown_text(v) for v in workspace.transcript.views][2:4] == ["question 2", "answer 2"]


def test_drafts_stay_with_their_chats(workspace, bridge):
    two_chats(workspace, bridge)
    dogs = workspace.current
    workspace.composer.set_text("a draft about dogs")
    workspace.open_conversation(next(each for each in workspace.session.conversations if each is not dogs))
    assert workspace.composer.text == ""
    workspace.open_conversation(dogs)
    assert workspace.composer.text == "a draft about dogs"


# The transcript ------------------------------------------------------------------------------------------------------


def test_a_suggestion_is_sent_by_a_click(workspace, bridge):
    QTest.mouseClick(workspace.transcript.empty_page.buttons[1], Qt.MouseButton.LeftButton)
    assert bridge.requests[1][0][0].content == SUGGESTIONS[1]
    assert not workspace.transcript.empty_page.isVisible()


def test_the_end_stays_in_sight_until_the_user_scrolls_away(workspace, bridge, qtbot):
    type_and_send(workspace, "hello")
    bar = workspace.transcript.verticalScrollBar()
    bridge.say(1, "paragraph\n\n" * 80)
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum())
    bar.setValue(bar.maximum() // 2)
    held = bar.value()
    before = bar.maximum()
    bridge.say(1, "paragraph\n\n" * 40)
    qtbot.waitUntil(lambda: bar.maximum() > before)
    assert bar.value() == held
    bar.setValue(bar.maximum())
    bridge.say(1, "paragraph\n\n" * 40)
    qtbot.waitUntil(lambda: bar.value() == bar.maximum() > before + 100)


def test_selection_goes_both_ways(make_workspace, bridge):
    selection = Selection()
    workspace = make_workspace(bridge, selection=selection)
    for number in (1, 2):
        type_and_send(workspace, f"question {number}")
        bridge.finish(number, f"answer {number}")
    first, second = answers(workspace)
    QTest.mouseClick(first.dot, Qt.MouseButton.LeftButton)
    assert selection.request_id == 1 and first.is_marked and not second.is_marked
    plain = first.grab().toImage()
    selection.select(2)
    assert second.is_marked and not first.is_marked
    assert first.grab().toImage() != plain
    QTest.mouseClick(second.dot, Qt.MouseButton.LeftButton)
    assert selection.request_id is None


def test_copy_gives_the_markdown(workspace, bridge):
    type_and_send(workspace, "hello")
    bridge.finish(1, "**bold** and\n\n```python\nx = 1\n```\n")
    view = answers(workspace)[0]
    QTest.mouseClick(view.copy_button, Qt.MouseButton.LeftButton)
    clipboard = QGuiApplication.clipboard()
    assert clipboard.text() == "**bold** and\n\n```python\nx = 1\n```\n"
    view.text.panes[0].anchorClicked.emit(QUrl("copy:1.0"))
    assert clipboard.text() == "x = 1\n"
    view.text.panes[0].selectAll()
    view.text.panes[0].copy()
    assert "bold and" in clipboard.text() and not clipboard.mimeData().hasHtml()


def test_a_selection_survives_more_text(workspace, bridge, qtbot):
    type_and_send(workspace, "hello")
    bridge.say(1, "these words are selected")
    qtbot.waitUntil(lambda: answers(workspace)[0].text.panes != [])
    pane = answers(workspace)[0].text.panes[0]
    cursor = pane.textCursor()
    cursor.setPosition(6)
    cursor.setPosition(11, cursor.MoveMode.KeepAnchor)
    pane.setTextCursor(cursor)
    bridge.say(1, " while more arrive")
    qtbot.waitUntil(lambda: "arrive" in pane.toPlainText())
    assert pane.textCursor().selectedText() == "words"


def test_a_long_history_is_built_in_pages(workspace, bridge, qtbot):
    conversation = workspace.session.new_conversation()
    for number in range(1, PAGE_MESSAGES + 4):
        workspace.session.send(conversation, f"question {number}")
        bridge.finish(number, f"answer {number}")
    workspace.open_conversation(conversation)
    qtbot.waitUntil(lambda: len(workspace.transcript.views) == PAGE_MESSAGES)
    assert shown_text(workspace.transcript.views[-1]) == f"answer {PAGE_MESSAGES + 3}"
    bar = workspace.transcript.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum())
    bar.setValue(0)
    top = workspace.transcript.views[0]
    workspace.transcript.earlier_button.click()
    qtbot.waitUntil(lambda: len(workspace.transcript.views) == 2 * PAGE_MESSAGES)
    qtbot.wait(2 * SETTLE_MS)
    place = top.mapTo(workspace.transcript.viewport(), QPoint(0, 0)).y()
    assert 0 <= place < workspace.transcript.viewport().height()
    workspace.transcript.earlier_button.click()
    qtbot.waitUntil(lambda: shown_text(workspace.transcript.views[0]) == "question 1")
    assert workspace.transcript.earlier_button.isHidden()


def test_changing_the_theme_recolours_answers(workspace, bridge, theme):
    type_and_send(workspace, "hello")
    bridge.finish(1, "```\ncode\n```")
    view = answers(workspace)[0]
    dark = view.text.html
    theme.set_scheme("light")
    assert view.text.html != dark and theme.raised.name() in view.text.html
    theme.set_scheme("dark")
    assert view.text.html == dark


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("temperature", "-1", "temperature is -1.0; it must be 0 to 100"),
        ("top_p", "0", "top_p is 0.0; it must be above 0 and at most 1"),
        ("top_k", "1.5", "top_k is '1.5'; it must be a whole number"),
        ("max_tokens", "0", "max_tokens is 0; it must be at least 1"),
        ("seed", "-4", "seed is -4"),
        ("repetition_penalty", "nan", "repetition_penalty is nan"),
        ("min_p", "a lot", "min_p is 'a lot'; it must be a number"),
    ],
)
def test_bad_options_are_said_by_name_and_not_taken(workspace, bridge, name, text, sentence):
    workspace.options_button.setChecked(True)
    edit = workspace.options.edits[name]
    good = edit.text()
    edit.selectAll()
    QTest.keyClicks(edit, text)
    assert sentence in workspace.options.error.text() and workspace.options.error.isVisible()
    type_and_send(workspace, "hello")
    assert str(getattr(bridge.requests[1][1], name)) not in (text, sentence.split()[2].rstrip(";"))
    edit.selectAll()
    QTest.keyClicks(edit, good or " ")
    assert not workspace.options.error.isVisible()


def test_a_bad_number_does_not_cost_the_system_prompt(workspace, bridge):
    workspace.options.edits["top_p"].setText("7")
    workspace.options.edits["top_p"].textEdited.emit("7")
    workspace.options.system_prompt.setPlainText("Answer in verse.")
    assert "top_p" in workspace.options.error.text()
    type_and_send(workspace, "hello")
    messages, params = bridge.requests[1]
    assert (messages[0].role, messages[0].content) == ("system", "Answer in verse.")
    assert params == DEFAULT_CHAT_PARAMS


def test_options_belong_to_their_chat(workspace, bridge):
    type_and_send(workspace, "one")
    bridge.finish(1, "a")
    for name, text in (("temperature", "0,25"), ("seed", "42"), ("max_tokens", "2,048")):
        edit = workspace.options.edits[name]
        edit.setText(text)
        edit.textEdited.emit(text)
    first = workspace.current
    workspace.new_conversation()
    assert workspace.options.edits["seed"].text() == ""
    type_and_send(workspace, "two")
    assert bridge.requests[2][1] == DEFAULT_CHAT_PARAMS
    workspace.open_conversation(first)
    type_and_send(workspace, "three")
    params = bridge.requests[3][1]
    assert (params.temperature, params.seed, params.max_tokens) == (0.25, 42, 2048)


# Safety --------------------------------------------------------------------------------------------------------------


def test_a_hostile_answer_opens_no_connection_and_no_file(workspace, bridge, tmp_path, qtbot):
    """A server that counts connections, a picture on disk, and an answer that names both in every way there is."""
    connections = []
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(2)

    def listen() -> None:
        try:
            while True:
                connections.append(server.accept()[1])
        except OSError:
            pass

    thread = threading.Thread(target=listen)
    thread.start()
    web = f"http://127.0.0.1:{server.getsockname()[1]}/x.png"
    picture = tmp_path / "x.png"
    workspace.chat_panel.grab().save(str(picture))
    sources = [web, picture.as_uri(), str(picture)]
    hostile = "\n\n".join(
        f'![i]({source})\n<img src="{source}">\n<iframe src="{source}"></iframe>\n'
        f'<body background="{source}">\n[l](javascript:alert(1)) [f]({source} "<img src={source}>")\n'
        f'`<img src="{source}">`\n\n```<img src="{source}">\n<img src="{source}">\n```'
        for source in sources
    )
    type_and_send(workspace, f'<img src="{web}">')
    bridge.finish(1, hostile)
    workspace.session.rename(workspace.current, f'<img src="{picture.as_uri()}">')
    bridge.finish(1, "")
    view = answers(workspace)[0]
    qtbot.wait(50)
    workspace.chat_panel.grab()
    for pane in [*view.text.panes, workspace.transcript.views[0].pane]:
        block = pane.document().begin()
        while block.isValid():
            for layout in block.textFormats():
                assert not layout.format.isImageFormat() and layout.format.toolTip() == ""
            block = block.next()
        assert picture.name in pane.toPlainText()
    for shown in workspace.chat_panel.findChildren(QLabel):
        assert shown.textFormat() == Qt.TextFormat.PlainText
    server.close()
    thread.join()
    assert connections == []


def test_a_link_shows_its_address_and_opens_only_when_told(workspace, bridge, qtbot):
    type_and_send(workspace, "hello")
    bridge.finish(1, "[a bank](https://evil.example/%70ath?q=<b>)")
    pane = answers(workspace)[0].text.panes[0]
    url = QUrl("https://evil.example/%70ath?q=1")
    pane.anchorClicked.emit(url)
    boxes = workspace.transcript.findChildren(QMessageBox)
    assert len(boxes) == 1 and "evil.example" in boxes[0].informativeText()
    assert boxes[0].textFormat() == Qt.TextFormat.PlainText
    boxes[0].reject()
    opened = []
    box = ask_to_open(workspace.transcript, url, opened.append)
    assert opened == []
    next(b for b in box.findChildren(QPushButton) if b.text() == "Open").click()
    assert opened == [url]
    for bad in ("javascript:alert(1)", "file:///etc/passwd"):
        pane.anchorClicked.emit(QUrl(bad))
    qtbot.wait(10)
    assert not [b for b in workspace.transcript.findChildren(QMessageBox) if b.isVisible()]


def test_roles_alternate_through_the_buttons(workspace, bridge):
    """Stop at once, regenerate, delete and send, fifty times: every prompt alternates and ends with the user."""
    number = 0
    for step in range(50):
        workspace.send(f"question {step}")
        number += 1
        if step % 3:
            bridge.say(number, f"text {step}")
        if step % 4 == 3:
            bridge.finish(number)
        else:
            workspace.stop()
        if step % 5 == 4:
            workspace.regenerate()
            number += 1
            bridge.finish(number, "again")
        if step % 7 == 6:
            workspace.transcript.delete_clicked.emit(workspace.current.path[2 * (step % 3)].id)
    assert len(bridge.requests) == number
    for messages, _ in bridge.requests.values():
        roles = [message.role for message in messages]
        assert roles == (["user", "assistant"] * len(roles))[: len(roles)] and roles[-1] == Role.USER


def test_everything_can_be_reached_and_has_a_name(workspace, bridge):
    two_chats(workspace, bridge)
    for widget in workspace.chat_panel.findChildren(QPushButton) + workspace.list_panel.findChildren(QPushButton):
        if widget.isVisible():
            assert widget.accessibleName() or widget.text()
    view = answers(workspace)[0]
    for widget in (view.dot, view.copy_button, view.regenerate_button, workspace.composer.edit):
        assert widget.accessibleName() and widget.focusPolicy() & Qt.FocusPolicy.TabFocus
    view = workspace.list_panel.view
    assert view.accessibleName() and view.focusPolicy() & Qt.FocusPolicy.TabFocus


def test_closed_at_once_nothing_goes_on_by_itself(workspace, bridge, qtbot):
    """Not even the imports that a window makes ready for its first message, nor what the engine says late."""
    assert workspace.transcript._warm_up_timer.isActive()
    workspace.send("hello")
    request_id = workspace.current.open_answer.request_id
    bridge.say(request_id, "word " * 200)
    workspace.shutdown()
    bridge.say(request_id, "late " * 50)
    bridge.finish(request_id, "end")
    qtbot.wait(20)
    parts = (workspace, workspace.transcript, workspace.list_panel, workspace.chat_panel, workspace.session)
    assert not [timer for part in parts for timer in part.findChildren(QTimer) if timer.isActive()]
