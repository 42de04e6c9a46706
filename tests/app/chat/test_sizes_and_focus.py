"""Text of another size in parts made before, and where the keyboard and a search go when their chat is gone."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

from app.chat.answer_view import AnswerView
from app.chat.empty_page import EmptyPage
from app.chat.user_view import UserView


@pytest.fixture
def large_text(theme):
    yield lambda: theme.set_font_size(20)
    theme.set_font_size(13)


def say(workspace, bridge, question: str, answer: str) -> None:
    workspace.send(question)
    bridge.say(len(bridge.requests), answer)
    bridge.finish(len(bridge.requests))


def views(workspace, kind: type) -> list:
    return [view for view in workspace.transcript.views if isinstance(view, kind)]


def test_fields_and_buttons_that_are_there_grow_with_the_text(workspace, bridge, large_text):
    say(workspace, bridge, "hello", "one")
    field, button = workspace.composer.edit, views(workspace, AnswerView)[0].copy_button
    large_text()
    assert field.height() >= field.fontMetrics().lineSpacing() + 8
    assert button.maximumHeight() >= button.fontMetrics().height() >= 20


@pytest.mark.parametrize("width", [190, 300, 420])
def test_a_suggestion_has_the_height_that_its_text_needs(qtbot, theme, large_text, width):
    large_text()
    page = EmptyPage()
    qtbot.addWidget(page)
    page.resize(width, 200)
    page.show()
    page.resize(width, page.heightForWidth(width))
    QApplication.processEvents()
    assert page.minimumSizeHint().width() <= 260
    for each in page.buttons:
        label = each.findChild(type(each._label))
        assert label.height() >= label.heightForWidth(label.width()), each.full_text


def test_the_message_that_is_edited_is_in_sight(workspace, bridge, qtbot):
    say(workspace, bridge, "hello", "a line\n\n" * 200)
    area = workspace.transcript
    qtbot.waitUntil(lambda: area.verticalScrollBar().value() > 1000)
    workspace.composer.setFocus()
    QTest.keyClick(workspace.composer.edit, Qt.Key.Key_Up)
    box = views(workspace, UserView)[0].edit_box

    def is_in_sight() -> bool:
        top = box.mapTo(area.viewport(), box.rect().topLeft()).y()
        return 0 <= top < area.viewport().height() - box.height()

    qtbot.waitUntil(is_in_sight)


@pytest.mark.parametrize("what", ["edit", "regenerate", "continue"])
def test_once_an_answer_begins_one_can_go_on_typing(workspace, bridge, qtbot, what):
    workspace.send("hello")
    bridge.say(1, "one")
    workspace.stop()
    bridge.finish(1, reason="abort")
    answer, question = views(workspace, AnswerView)[0], views(workspace, UserView)[0]
    if what == "edit":
        question.begin_edit()
        qtbot.waitUntil(question.edit_box.edit.hasFocus)
        QTest.keyClicks(question.edit_box.edit, " there")
        QTest.keyClick(question.edit_box.edit, Qt.Key.Key_Return)
    else:
        button = answer.regenerate_button if what == "regenerate" else answer.continue_button
        button.setFocus(Qt.FocusReason.TabFocusReason)
        QTest.keyClick(button, Qt.Key.Key_Space)
    assert len(bridge.requests) == 2
    QApplication.processEvents()
    assert workspace.composer.edit.hasFocus()


def test_what_was_searched_for_goes_with_chats_that_are_wiped(workspace, bridge):
    say(workspace, bridge, "hello", "a secret")
    workspace.list_panel.search.setText("secret")
    workspace.session.wipe()
    assert workspace.list_panel.search.text() == "" and workspace.current.path == []
