"""What can be done with the messages on the screen: versions, editing, thoughts, places; real widgets, no engine."""

from __future__ import annotations

import msgspec
import pytest
from PySide6.QtCore import QPoint, Qt, QUrl
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu

from app.chat.answer_view import AnswerView
from app.chat.conversation import Conversation, Message, MessageStatus, Role, ScrollPlace
from app.chat.message_parts import first_told
from app.chat.message_window import FIRST_MESSAGES, PAGE_MESSAGES, MessageWindow
from app.chat.text_pane import SealedDocument, TextPane
from app.chat.transcript import FOUND_TOP_PX
from app.chat.tree import MessageTree
from app.chat.user_view import PART_CHARACTERS, UserView
from app.chat.workspace import ChatWorkspace
from tests.app.chat.fake_bridge import FakeBridge
from tests.app.chat.test_markdown import HOSTILE

ALT = Qt.KeyboardModifier.AltModifier
LEFT = Qt.MouseButton.LeftButton
THOUGHT = "<think>\nHere is *one* thing.\n\n- and another\n</think>\n\nThe **answer**."


def say(workspace: ChatWorkspace, bridge: FakeBridge, question: str, answer: str, **how) -> AnswerView:
    workspace.send(question)
    bridge.finish(max(bridge.requests), answer, **how)
    return answers(workspace)[-1]


def answers(workspace: ChatWorkspace) -> list[AnswerView]:
    return [view for view in workspace.transcript.views if isinstance(view, AnswerView)]


def questions(workspace: ChatWorkspace) -> list[UserView]:
    return [view for view in workspace.transcript.views if isinstance(view, UserView)]


def shown(view: AnswerView | UserView) -> str:
    return view.pane.toPlainText() if isinstance(view, UserView) else view.text.plain_text()


def history(messages: int, text: str = "An answer of a few words.") -> list[Message]:
    made: list[Message] = []
    for number in range(messages):
        role, words = (Role.ASSISTANT, text) if number % 2 else (Role.USER, f"Question {number}")
        made.append(Message(role, words, number=number, parent=made[-1].id if made else None))
    return made


def open_history(workspace: ChatWorkspace, messages: list[Message], **fields) -> Conversation:
    conversation = Conversation(title="long", tree=MessageTree(messages), **fields)
    workspace.session.conversations.add(conversation)
    workspace.open_conversation(conversation)
    return conversation


def settle(workspace: ChatWorkspace, qtbot) -> None:
    """Until all messages of the window are built and have their places."""
    transcript = workspace.transcript
    qtbot.waitUntil(lambda: transcript._anchor is None and transcript._window.is_grown, timeout=10_000)


def entries(view: AnswerView | UserView) -> dict[str, object]:
    return dict(view.more_button._entries())


# Versions ------------------------------------------------------------------------------------------------------------


def test_versions_of_an_answer_are_switched_by_click_and_by_key(workspace, bridge, qtbot):
    first = say(workspace, bridge, "hello", "one")
    assert first.switch is None
    QTest.mouseClick(first.regenerate_button, LEFT)
    bridge.finish(2, "two")
    view = answers(workspace)[0]
    assert view.switch.figure.text() == "2/2" and view.switch.accessibleName() == "Version 2 of 2"
    assert not view.switch.forth.isEnabled() and view.switch.back.accessibleName()
    QTest.mouseClick(view.switch.back, LEFT)
    assert [shown(each) for each in answers(workspace)] == ["one"]
    again = answers(workspace)[0]
    assert again.switch.figure.text() == "1/2" and again.switch.forth.hasFocus()
    QTest.keyClick(again.switch.forth, Qt.Key.Key_Space)
    assert shown(answers(workspace)[0]) == "two"
    QTest.keyClick(answers(workspace)[0].text.panes[0], Qt.Key.Key_Left, ALT)
    assert shown(answers(workspace)[0]) == "one"
    QTest.keyClick(answers(workspace)[0].switch.forth, Qt.Key.Key_Right, ALT)
    QTest.keyClick(answers(workspace)[0].switch.back, Qt.Key.Key_Right, ALT)
    assert shown(answers(workspace)[0]) == "two"


def test_an_answer_in_the_middle_has_another_version_below_which_nothing_stands(workspace, bridge):
    say(workspace, bridge, "one", "answer 1")
    say(workspace, bridge, "two", "answer 2")
    first, last = answers(workspace)
    assert first.regenerate_button.isHidden() and not last.regenerate_button.isHidden()
    entries(first)["Write another version from here"]()
    bridge.finish(3, "answer 3")
    assert [shown(each) for each in answers(workspace)] == ["answer 3"]
    answers(workspace)[0].step_version(-1)
    assert [shown(each) for each in answers(workspace)] == ["answer 1", "answer 2"]


def test_a_version_stays_where_it_is_on_the_screen(workspace, bridge, qtbot):
    messages = history(20, "text\n\n" * 6)
    middle = messages[9]
    messages.append(Message(Role.ASSISTANT, "another", number=20, parent=middle.parent))
    conversation = open_history(workspace, messages)
    workspace.session.show_version(conversation, middle.id)
    assert workspace.transcript.show_message(middle.id)
    settle(workspace, qtbot)
    view = workspace.transcript.view(middle.id)
    before = view.mapTo(workspace.transcript.viewport(), QPoint(0, 0)).y()
    QTest.mouseClick(view.switch.forth, LEFT)
    other = answers(workspace)[-1]
    assert shown(other) == "another"
    QTest.mouseClick(other.switch.back, LEFT)
    settle(workspace, qtbot)
    view = workspace.transcript.view(middle.id)
    assert abs(view.mapTo(workspace.transcript.viewport(), QPoint(0, 0)).y() - before) <= 1


# Editing -------------------------------------------------------------------------------------------------------------


def test_an_edited_message_is_sent_as_a_new_version(workspace, bridge, qtbot):
    say(workspace, bridge, "hello", "one")
    question = questions(workspace)[0]
    QTest.mouseClick(question.edit_button, LEFT)
    qtbot.waitUntil(lambda: question.edit_box.edit.hasFocus())
    QTest.keyClicks(question.edit_box.edit, " there")
    QTest.keyClick(question.edit_box.edit, Qt.Key.Key_Return)
    assert [m.content for m in bridge.requests[2][0]] == ["hello there"]
    bridge.finish(2, "two")
    (question,) = questions(workspace)
    assert shown(question) == "hello there" and question.edit_box is None
    assert question.switch.figure.text() == "2/2"
    QTest.mouseClick(question.switch.back, LEFT)
    assert [shown(each) for each in workspace.transcript.views] == ["hello", "one"]
    assert questions(workspace)[0].edit_box is None


def test_esc_leaves_the_message_as_it_was_and_stops_nothing(workspace, bridge, qtbot):
    say(workspace, bridge, "hello", "one")
    workspace.send("more")
    question = questions(workspace)[0]
    question.begin_edit()
    edit = question.edit_box.edit
    qtbot.waitUntil(edit.hasFocus)
    QTest.keyClicks(edit, " there")
    QTest.keyClick(edit, Qt.Key.Key_Escape)
    assert question.edit_box is None and shown(question) == "hello" and not question.pane.isHidden()
    assert workspace.current.open_answer is not None and not bridge.aborted
    question.begin_edit()
    assert question.edit_box.edit.toPlainText() == "hello"


def test_what_is_being_edited_survives_text_that_arrives_and_another_chat(workspace, bridge, qtbot):
    say(workspace, bridge, "hello", "one")
    workspace.send("more")
    questions(workspace)[0].begin_edit()
    QTest.keyClicks(questions(workspace)[0].edit_box.edit, "HALF ")
    draft = questions(workspace)[0].edit_box.edit.toPlainText()
    bridge.say(2, "text")
    workspace.transcript.sync()
    chat = workspace.current
    workspace.new_conversation()
    workspace.open_conversation(chat)
    assert questions(workspace)[0].edit_box.edit.toPlainText() == draft != "hello"


def test_an_edit_that_cannot_be_sent_stays(workspace, bridge, qtbot):
    say(workspace, bridge, "hello", "one")
    workspace.send("more")
    question = questions(workspace)[0]
    question.begin_edit()
    QTest.keyClicks(question.edit_box.edit, " x")
    QTest.keyClick(question.edit_box.edit, Qt.Key.Key_Return)
    assert "still answering" in workspace.notice.text
    assert question.edit_box.edit.toPlainText().strip() != "hello" and len(bridge.requests) == 2


def test_the_last_message_is_edited_by_a_command(workspace, bridge):
    assert not workspace.transcript.edit_last()
    say(workspace, bridge, "hello", "one")
    say(workspace, bridge, "again", "two")
    assert workspace.transcript.edit_last()
    first, last = questions(workspace)
    assert first.edit_box is None and last.edit_box is not None


# Going on, deleting, the line ----------------------------------------------------------------------------------------


def test_a_stopped_answer_goes_on(workspace, bridge):
    workspace.send("hello")
    bridge.say(1, "half an")
    assert answers(workspace)[0].continue_button.isHidden()
    workspace.stop()
    view = answers(workspace)[0]
    QTest.mouseClick(view.continue_button, LEFT)
    assert bridge.asked[2].continues
    bridge.finish(2, " answer")
    assert answers(workspace) == [view] and shown(view) == "half an answer"
    assert view.continue_button.isHidden()


def test_a_cut_answer_goes_on_and_a_whole_one_does_not(workspace, bridge):
    whole = say(workspace, bridge, "hello", "whole")
    assert whole.continue_button.isHidden()
    cut = say(workspace, bridge, "more", "cut", reason="length")
    assert not cut.continue_button.isHidden()


def test_deleting_through_the_menu_can_be_undone(workspace, bridge):
    say(workspace, bridge, "one", "answer 1")
    say(workspace, bridge, "two", "answer 2")
    menu = questions(workspace)[0].more_button.open_menu()
    (delete,) = menu.actions()
    assert "answers" in delete.text()
    delete.trigger()
    menu.close()
    assert [shown(each) for each in workspace.transcript.views] == ["two", "answer 2"]
    workspace.undo.undo()
    assert [shown(each) for each in workspace.transcript.views] == ["one", "answer 1", "two", "answer 2"]


def test_one_of_several_versions_is_deleted_alone(workspace, bridge):
    say(workspace, bridge, "hello", "one")
    workspace.regenerate()
    bridge.finish(2, "two")
    entries(answers(workspace)[0])["Delete this version"]()
    assert [shown(each) for each in workspace.transcript.views] == ["hello", "one"]
    assert answers(workspace)[0].switch is None or answers(workspace)[0].switch.isHidden()


def test_the_line_and_its_tool_tip_say_how_the_answer_was_made(workspace, bridge):
    view = say(workspace, bridge, "hello", "hi", prompt=120, cached=96)
    assert "96 prompt tokens reused" in view.line.text() and "finished" in view.line.text()
    tip = view.line.toolTip()
    assert "starter" in tip and "Finish reason: stop" in tip and "120 tokens" in tip and "temperature" in tip


# Thinking ------------------------------------------------------------------------------------------------------------


def test_a_thought_is_folded_to_one_line_and_unfolds_by_click_and_key(workspace, bridge, qtbot):
    view = say(workspace, bridge, "hello", THOUGHT)
    assert shown(view) == "The answer."
    assert "Thought for 7 words" in view.thought.header.text() and not view.thought.is_unfolded
    assert view.thought.header.accessibleName() == "Thought for 7 words" and view.thought.body.panes == []
    QTest.mouseClick(view.thought.header, LEFT)
    assert view.thought.body.plain_text() == "Here is one thing.\nand another"
    qtbot.waitUntil(view.thought.body.isVisible)
    view.thought.header.setFocus()
    QTest.keyClick(view.thought.header, Qt.Key.Key_Space)
    assert not view.thought.body.isVisible()


def test_a_thought_stays_unfolded_while_text_streams_and_when_the_chat_comes_back(workspace, bridge, qtbot):
    workspace.send("hello")
    bridge.say(1, "<think>\nfirst")
    view = answers(workspace)[0]
    qtbot.waitUntil(lambda: view.thought is not None)
    assert "Thinking…" in view.thought.header.text()
    QTest.mouseClick(view.thought.header, LEFT)
    bridge.say(1, " second")
    qtbot.waitUntil(lambda: "first second" in view.thought.body.plain_text())
    bridge.finish(1, "</think>Hi")
    assert view.thought.is_unfolded and shown(view) == "Hi" and "2 words" in view.thought.header.text()
    chat = workspace.current
    workspace.new_conversation()
    workspace.open_conversation(chat)
    assert answers(workspace)[0].thought.is_unfolded


def test_a_thought_that_only_its_end_gives_away_leaves_the_answer(workspace, bridge, qtbot):
    workspace.send("hello")
    bridge.say(1, "so it **is**\n")
    view = answers(workspace)[0]
    qtbot.waitUntil(lambda: "so it" in shown(view))
    bridge.finish(1, "</think>\n\nThe answer.")
    assert shown(view) == "The answer." and "Thought for 3 words" in view.thought.header.text()


def test_copying_leaves_the_thought_out_unless_asked(workspace, bridge):
    view = say(workspace, bridge, "hello", THOUGHT)
    clipboard = QGuiApplication.clipboard()
    QTest.mouseClick(view.copy_button, LEFT)
    assert clipboard.text() == "The **answer**."
    entries(view)["Copy with its thinking"]()
    assert clipboard.text() == THOUGHT
    entries(view)["Copy as plain text"]()
    assert clipboard.text() == "The answer."


def test_an_answer_that_ended_in_its_thought_says_so(workspace, bridge):
    view = say(workspace, bridge, "hello", "<think>\nstill")
    assert "no answer" in view.sentence.text() and not view.text.isVisible()


# The context ---------------------------------------------------------------------------------------------------------


def test_what_the_model_was_not_told_is_marked(workspace):
    messages = history(8)
    messages[5].dropped = 2
    messages[7].dropped = 4
    open_history(workspace, messages)
    transcript = workspace.transcript
    assert transcript.marker.text == "The model was not told the 4 messages above: they no longer fit its context"
    column = transcript._messages
    widgets = [column.itemAt(number).widget() for number in range(column.count())]
    told = widgets[widgets.index(transcript.marker) + 1]
    assert told is transcript.view(messages[4].id)
    assert "not told the 4 oldest messages" in answers(workspace)[-1].line.text()
    workspace.new_conversation()
    assert transcript.marker.isHidden()


def test_the_first_message_told_is_counted_as_the_model_is_told_them():
    messages = history(6)
    messages[1].text = ""  # its question joins the next
    assert first_told(messages, 2) is messages[4]
    assert first_told(messages[:5], 9) is None


# Places --------------------------------------------------------------------------------------------------------------


def test_a_thousand_messages_are_built_from_what_is_in_sight(workspace, qtbot):
    open_history(workspace, history(1000))
    assert len(workspace.transcript.views) == FIRST_MESSAGES
    qtbot.waitUntil(lambda: len(workspace.transcript.views) == PAGE_MESSAGES)
    bar = workspace.transcript.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 0 and bar.value() == bar.maximum())
    assert workspace.transcript.place() is None and workspace.transcript.follows


def test_a_conversation_opens_where_it_was_left(workspace, qtbot):
    messages = history(200)
    place = ScrollPlace(messages[60].id, 10)
    open_history(workspace, messages, scroll=place)
    transcript = workspace.transcript
    assert transcript.place() == place  # also before everything has its place
    settle(workspace, qtbot)
    assert transcript.place() == place and not transcript.follows
    assert transcript.later_button.isVisible() and transcript.earlier_button.isVisible()
    before = len(transcript.views)
    transcript.later_button.click()
    qtbot.waitUntil(lambda: len(transcript.views) == before + PAGE_MESSAGES, timeout=5_000)
    transcript.follow()
    qtbot.waitUntil(lambda: transcript.view(messages[-1].id) is not None)
    assert transcript.place() is None and transcript.later_button.isHidden()


def test_a_found_message_is_shown_and_framed_for_a_while(workspace, qtbot):
    messages = history(300)
    open_history(workspace, messages)
    transcript = workspace.transcript
    assert transcript.show_message(messages[101].id)
    view = transcript.view(messages[101].id)
    assert view.is_found
    settle(workspace, qtbot)
    assert view.mapTo(transcript.viewport(), QPoint(0, 0)).y() == FOUND_TOP_PX
    qtbot.waitUntil(lambda: not view.is_found, timeout=5_000)
    assert not transcript.show_message("nowhere")


@pytest.mark.parametrize("length", [0, 1, 2, 7, 24, 25, 100])
@pytest.mark.parametrize("index", [None, 0, 1, 50, 99])
def test_a_window_grows_to_its_goal_and_holds_what_was_asked_for(length, index):
    if index is not None and index >= length:
        return
    path = history(length)
    window = MessageWindow()
    window.open_at(index, length)
    turns = 0
    while not window.is_grown:
        window.grow(length)
        turns += 1
        assert turns <= PAGE_MESSAGES
    shown_messages = window.of(path)
    assert len(shown_messages) == min(length, PAGE_MESSAGES)
    if path:
        assert path[-1 if index is None else index] in shown_messages
    while window.goal_first or window.goal_end is not None:
        window.widen_up()
        window.widen_down()
        while not window.is_grown:
            window.grow(length)
    assert window.of(path) == path


# Text ----------------------------------------------------------------------------------------------------------------


def test_a_very_long_message_is_shown_in_parts_and_copied_whole(workspace, bridge):
    text = "word " * (3 * PART_CHARACTERS // 5)
    say(workspace, bridge, text, "ok")
    question = questions(workspace)[0]
    assert len(shown(question)) <= PART_CHARACTERS and "left" in question.rest_button.text()
    QTest.mouseClick(question.copy_button, LEFT)
    assert QGuiApplication.clipboard().text() == text.rstrip()
    for _ in range(3):
        question.rest_button.click()
    assert question.rest_button.isHidden()
    assert "".join(pane.toPlainText() for pane in question.panes) == text.rstrip()


def test_a_selection_spans_messages_and_is_copied_as_plain_text(workspace, bridge, qtbot):
    say(workspace, bridge, "question one", "**bold** words\n\n```python\nx = 1\n```")
    say(workspace, bridge, "question two", "last words")
    transcript = workspace.transcript
    first, last = answers(workspace)[0].text.panes[0], answers(workspace)[1].text.panes[0]
    qtbot.waitUntil(lambda: last.mapTo(transcript.widget(), QPoint(0, 0)).y() > 100)
    begin = first.cursorRect().center()
    end = last.mapToGlobal(QPoint(last.width() - 2, last.height() // 2))
    QTest.mousePress(first.viewport(), LEFT, Qt.KeyboardModifier.NoModifier, begin)
    QTest.mouseMove(first.viewport(), first.viewport().mapFromGlobal(end))
    QTest.mouseRelease(first.viewport(), LEFT, Qt.KeyboardModifier.NoModifier, first.viewport().mapFromGlobal(end))
    QTest.keyClick(first, Qt.Key.Key_C, Qt.KeyboardModifier.ControlModifier)
    copied = QGuiApplication.clipboard()
    assert copied.text().startswith("bold words") and copied.text().endswith("question two\nlast words")
    assert "x = 1" in copied.text() and not copied.mimeData().hasHtml()
    QTest.mouseClick(last.viewport(), LEFT)
    assert transcript.selected_text() == "" and not first.textCursor().hasSelection()


def test_everything_at_a_message_has_a_name_and_can_be_tabbed_to(workspace, bridge):
    say(workspace, bridge, "hello", THOUGHT)
    workspace.regenerate()
    workspace.stop()
    question, answer = workspace.transcript.views
    answer.step_version(-1)
    question, answer = workspace.transcript.views
    widgets = [question.copy_button, question.edit_button, question.more_button, answer.thought.header]
    widgets += [
        answer.copy_button,
        answer.regenerate_button,
        answer.more_button,
        answer.switch.back,
        answer.switch.forth,
    ]
    for widget in widgets:
        assert widget.accessibleName() and widget.focusPolicy() & Qt.FocusPolicy.TabFocus
    assert answer.message.status is MessageStatus.COMPLETE
    menu = answer.more_button.open_menu()
    assert isinstance(menu, QMenu) and all(action.text() for action in menu.actions())
    menu.close()


# Safety --------------------------------------------------------------------------------------------------------------


def test_hostile_text_asks_for_no_resource_wherever_it_stands(workspace, bridge, qtbot, monkeypatch):
    """In a question, a thought, an answer, while it streams and after it: no document even asks for a picture."""
    asked = []

    def record(_self, _kind: int, url) -> None:
        asked.append(url.toString())

    monkeypatch.setattr(SealedDocument, "loadResource", record)
    monkeypatch.setattr(TextPane, "loadResource", record)
    hostile = "\n\n".join(HOSTILE)
    workspace.send(hostile)
    bridge.say(1, f"<think>\n{hostile}\n\nmore")
    view = answers(workspace)[0]
    qtbot.waitUntil(lambda: view.thought is not None)
    QTest.mouseClick(view.thought.header, LEFT)
    bridge.finish(1, f"</think>\n{hostile}")
    qtbot.waitUntil(lambda: not view.is_behind)
    workspace.chat_panel.grab()
    panes = [*view.thought.body.panes, *view.text.panes, *questions(workspace)[0].panes]
    assert asked == [] and len(panes) >= 3
    for pane in panes:
        block = pane.document().begin()
        while block.isValid():
            for span in block.textFormats():
                url = span.format.anchorHref()
                assert not span.format.isImageFormat() and span.format.toolTip() == ""
                assert not url or url.startswith(("http://", "https://", "mailto:", "copy:"))
            block = block.next()


def test_tool_tips_show_hostile_text_as_it_is(workspace, bridge):
    bridge.info = msgspec.structs.replace(bridge.info, name='<img src="file:///etc/passwd">')
    view = say(workspace, bridge, "hello", '[a](https://example.org/"onload=x)')
    assert "&lt;img" in view.line.toolTip() and "<img" not in view.line.toolTip()
    pane = view.text.panes[0]
    pane.highlighted.emit(QUrl('https://example.org/<img src="file:///etc/passwd">'))
    assert "example.org" in pane.toolTip() and "<img" not in pane.toolTip()
    pane.highlighted.emit(QUrl("file:///etc/passwd"))
    assert pane.toolTip() == ""
