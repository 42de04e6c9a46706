"""What is kept across restarts, what is said of the chat file, and chats to files and back."""

from __future__ import annotations

import json
import sqlite3
from types import SimpleNamespace

import pytest
from PySide6.QtCore import QPoint, QSettings, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QFileDialog

from app.chat import chat_files, schema
from app.chat.conversation import Conversation
from app.chat.exchange import json_parts
from app.chat.places import KEEP_MS
from app.chat.store import StoreError
from app.chat.workspace import ChatWorkspace
from tests.app.chat.fake_bridge import FakeBridge
from tests.app.chat.test_chat_list import ask, press, texts, titles


@pytest.fixture
def settings(tmp_path) -> QSettings:
    return QSettings(str(tmp_path / "window.ini"), QSettings.Format.IniFormat)


# Drafts and places ---------------------------------------------------------------------------------------------------


def drafts_on_disk(path) -> set[str]:
    with sqlite3.connect(path) as connection:
        found = {row[0] for row in connection.execute("SELECT draft FROM conversations")}
    connection.close()
    return found


def test_what_is_being_written_reaches_the_disk_by_itself(workspace, bridge, store_path, qtbot):
    ask(workspace, bridge, "about cats")
    QTest.keyClicks(workspace.composer.edit, "half a thou")
    qtbot.waitUntil(lambda: "half a thou" in drafts_on_disk(store_path), timeout=KEEP_MS + 1500)


def test_drafts_come_back_after_a_restart_also_of_a_chat_never_sent(make_workspace, bridge, settings):
    workspace = make_workspace(bridge, settings=settings)
    ask(workspace, bridge, "about cats")
    workspace.composer.set_text("more of cats?")
    workspace.new_conversation()
    workspace.composer.set_text("Dear diary,\ntoday")
    workspace.shutdown()
    again = make_workspace(FakeBridge(), settings=settings)
    assert titles(again) == ["Dear diary,", "about cats"]
    assert again.composer.text == "Dear diary,\ntoday" and again.current.num_messages == 0
    press(again, Qt.Key.Key_Down)
    press(again, Qt.Key.Key_Return)
    assert again.composer.text == "more of cats?"
    again.new_conversation()
    assert again.composer.text == "" and len(titles(again)) == 3


def test_an_unsent_chat_is_called_after_what_is_written_in_it(workspace, bridge, qtbot):
    QTest.keyClicks(workspace.composer.edit, "Dear diary")
    qtbot.waitUntil(lambda: workspace.title.text() == "Dear diary" and titles(workspace) == ["Dear diary"])


def test_when_all_chats_are_wiped_an_empty_one_is_open(workspace, bridge):
    ask(workspace, bridge, "about cats")
    press(workspace, Qt.Key.Key_Delete)
    ask(workspace, bridge, "about dogs")
    workspace.composer.set_text("a draft")
    workspace.session.wipe()
    assert workspace.current.is_empty and workspace.composer.text == "" and titles(workspace) == ["New chat"]
    assert not workspace.undo_notice.text and workspace.transcript.views == []
    ask(workspace, bridge, "and on")
    assert texts(workspace.current)[0] == "and on"


def test_a_sent_message_leaves_no_draft(make_workspace, bridge):
    workspace = make_workspace(bridge)
    workspace.composer.set_text("hello")
    QTest.keyClick(workspace.composer.edit, Qt.Key.Key_Return)
    assert workspace.current.draft == ""
    workspace.shutdown()
    assert make_workspace(FakeBridge()).composer.text == ""


def long_chat(workspace: ChatWorkspace, bridge: FakeBridge, title: str) -> Conversation:
    chat = ask(workspace, bridge, title, "line\n\n" * 40)
    for number in range(4):
        workspace.send(f"{title} {number}")
        bridge.finish(max(bridge.requests), "line\n\n" * 40)
    return chat


def test_each_chat_stays_where_one_was_reading_also_after_a_restart(make_workspace, bridge, settings, qtbot):
    workspace = make_workspace(bridge, settings=settings)
    cats = long_chat(workspace, bridge, "cats")
    bar = workspace.transcript.verticalScrollBar()
    qtbot.waitUntil(lambda: bar.maximum() > 500)
    qtbot.wait(200)
    bar.setValue(bar.maximum() // 2)
    view = next(each for each in workspace.transcript.views if _top(workspace, each) > 0)
    message_id, top = view.message.id, _top(workspace, view)
    dogs = long_chat(workspace, bridge, "dogs")
    assert dogs.scroll is None and cats.scroll is not None
    workspace.open_conversation(cats)
    qtbot.waitUntil(lambda: abs(_top(workspace, workspace.transcript.view(message_id)) - top) <= 2)
    workspace.shutdown()
    again = make_workspace(FakeBridge(), settings=settings)
    assert again.current.id == cats.id
    qtbot.waitUntil(lambda: abs(_top(again, again.transcript.view(message_id)) - top) <= 2)


def _top(workspace: ChatWorkspace, view) -> int:
    return view.mapTo(workspace.transcript.viewport(), QPoint(0, 0)).y()


def test_the_chat_that_was_open_is_open_again(make_workspace, bridge, settings):
    workspace = make_workspace(bridge, settings=settings)
    first = ask(workspace, bridge, "first")
    ask(workspace, bridge, "second")
    workspace.open_conversation(first)
    workspace.shutdown()
    again = make_workspace(FakeBridge(), settings=settings)
    assert again.current.title == "first"
    again.new_conversation()
    again.shutdown()
    assert make_workspace(FakeBridge(), settings=settings).current.is_empty


# The chat file -------------------------------------------------------------------------------------------------------


def test_a_second_window_offers_to_export_what_it_does_not_keep(make_workspace, bridge, tmp_path, monkeypatch, qtbot):
    ask(make_workspace(bridge), bridge, "kept")
    bridge = FakeBridge()
    second = make_workspace(bridge)
    ask(second, bridge, "not kept")
    assert "Another Batchscope" in second.store_notice.text
    target = tmp_path / "all.json"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_args: (str(target), ""))
    second.store_notice.button.click()
    qtbot.waitUntil(target.exists)
    assert "2 chats" in second.files.notice.text and "Another Batchscope" in second.store_notice.text
    exported = json.loads(target.read_bytes())["conversations"]
    assert sorted(each["title"] for each in exported) == ["kept", "not kept"]


def test_a_full_disk_is_said_and_can_be_tried_again(workspace, bridge, monkeypatch):
    def full(*_args):
        raise StoreError("Chats cannot be saved: the disk is full (0.0 MB free).")

    with monkeypatch.context() as patch:
        patch.setattr(workspace.session.store, "save", full)
        ask(workspace, bridge, "hello")
        assert "disk is full" in workspace.store_notice.text
        workspace.store_notice.button.click()
        assert "disk is full" in workspace.store_notice.text
    assert workspace.store_notice.button.text() == "Try again"
    workspace.store_notice.button.click()
    assert workspace.store_notice.text == ""


def test_a_newer_file_is_said_and_left_as_it_is(make_workspace, bridge, store_path):
    with sqlite3.connect(store_path) as connection:
        connection.execute(f"PRAGMA user_version = {schema.SCHEMA_VERSION + 1}")
    connection.close()
    before = store_path.read_bytes()
    workspace = make_workspace(bridge)
    assert "newer Batchscope" in workspace.store_notice.text
    ask(workspace, bridge, "hello")
    workspace.shutdown()
    assert store_path.read_bytes() == before


def test_a_damaged_chat_is_explained_and_the_way_out_is_a_new_one(make_workspace, bridge, store_path):
    workspace = make_workspace(bridge)
    ask(workspace, bridge, "hello", "hi")
    workspace.shutdown()
    with sqlite3.connect(store_path) as raw:
        raw.execute("UPDATE conversations SET params = 'x'")
    raw.close()
    again = make_workspace(FakeBridge())
    damaged = next(each for each in again.session.conversations if each.damage)
    again.open_conversation(damaged)
    assert "What can be read is shown" in again.store_notice.text and texts(damaged) == ["hello", "hi"]
    index = again.list_panel.model.place_of(damaged.id)
    assert "could not be read" in again.list_panel.model.data(index, Qt.ItemDataRole.AccessibleTextRole)
    again.store_notice.button.click()
    assert again.current.is_empty and again.store_notice.text == ""


def test_a_file_that_was_set_aside_is_said_until_it_is_read(make_workspace, bridge, store_path):
    store_path.write_bytes(b"no database at all" * 100)
    workspace = make_workspace(bridge)
    assert "could not be read at all" in workspace.store_notice.text
    workspace.store_notice.button.click()
    ask(workspace, bridge, "hello")
    assert workspace.store_notice.text == ""


# To files and back ---------------------------------------------------------------------------------------------------


@pytest.fixture
def dialogs(monkeypatch, tmp_path):
    """File dialogs that answer with what the test says; what they were asked for is noted."""

    answers = SimpleNamespace(target=tmp_path / "out", sources=(), asked=[])

    def save(_parent, title, suggested, filters):
        answers.asked.append((title, suggested, filters))
        return (str(answers.target) if answers.target else "", "")

    monkeypatch.setattr(QFileDialog, "getSaveFileName", save)
    monkeypatch.setattr(QFileDialog, "getOpenFileNames", lambda *_args: ([str(each) for each in answers.sources], ""))
    return answers


def test_chats_go_to_a_file_and_come_back_equal(make_workspace, bridge, tmp_path, dialogs, qtbot):
    workspace = make_workspace(bridge)
    for name in ("cats", "dogs"):
        ask(workspace, bridge, f"about {name}", f"Of **{name}**.")
    workspace.regenerate()
    bridge.finish(max(bridge.requests), "Of others.")
    workspace.shutdown()
    workspace = make_workspace(FakeBridge())
    closed = next(each for each in workspace.session.conversations if not each.is_loaded)
    workspace.files.export(None, "json")
    target = dialogs.target.with_suffix(".json")
    qtbot.waitUntil(target.exists)
    assert dialogs.asked[0][0] == "Export 2 chats" and dialogs.asked[0][1].endswith("chats.json")
    assert f"Exported 2 chats to {target}" in workspace.files.notice.text and not closed.is_loaded
    other = make_workspace(FakeBridge(), path=tmp_path / "other.sqlite3")
    dialogs.sources = (target,)
    other.files.choose_to_read()
    qtbot.waitUntil(lambda: "Imported 2 chats from out.json." in other.undo_notice.text)
    assert titles(other)[-2:] == ["about dogs", "about cats"]
    for each in workspace.session.conversations:
        workspace.session.open(each)
        same = other.session.conversations.get(each.id)
        assert [m.text for m in same.messages] == [m.text for m in each.messages] and same.tree == each.tree
    other.undo_notice.button.click()
    assert "about cats" not in titles(other)
    other.undo_notice.button.click()
    assert "about cats" in titles(other)


def test_a_chat_as_markdown_is_named_after_it(workspace, bridge, dialogs, qtbot):
    ask(workspace, bridge, "Why: is/the <sky> blue?", "Because *of* air.")
    dialogs.target = dialogs.target.with_name("sky.md")
    workspace.files.export([workspace.current.id], "markdown")
    qtbot.waitUntil(dialogs.target.exists)
    assert dialogs.asked[0][0] == "Export 1 chat" and dialogs.asked[0][1].endswith("Why is the sky blue.md")
    written = dialogs.target.read_text()
    assert written.startswith("# Why: is/the <sky> blue?") and "Because *of* air." in written


def test_an_export_that_is_cancelled_leaves_no_file(workspace, bridge, dialogs, qtbot, monkeypatch):
    monkeypatch.setattr(chat_files, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(chat_files, "TELL_SECONDS", 0.0)
    for number in range(3):
        ask(workspace, bridge, f"chat {number}")
    workspace.files.export(None, "json")
    workspace.files._work()
    workspace.files._job and next(workspace.files._job)
    workspace.files._say("Exporting")
    workspace.files.notice.button.click()
    assert list(dialogs.target.parent.glob("*out*")) == [] and not workspace.files.notice.text
    dialogs.target = None
    workspace.files.export(None, "json")
    assert not workspace.files.notice.text


def test_what_cannot_be_written_or_read_is_said_by_name(workspace, bridge, dialogs, tmp_path, qtbot):
    workspace.files.export()
    assert "nothing to export" in workspace.files.notice.text.lower()
    ask(workspace, bridge, "hello")
    dialogs.target = tmp_path / "no such folder" / "x.json"
    workspace.files.export()
    qtbot.waitUntil(lambda: "Nothing was exported" in workspace.files.notice.text)
    broken, newer, empty = (tmp_path / name for name in ("broken.json", "newer.json", "empty.json"))
    broken.write_text("{")
    newer.write_text('{"format": "batchscope-chats", "version": 99}')
    empty.write_text('{"format": "batchscope-chats", "version": 1, "exported": "", "conversations": []}')
    before = titles(workspace)
    for path, words in (
        (broken, "broken.json: This file is no JSON"),
        (newer, "newer Batchscope"),
        (empty, "empty.json holds no chats"),
        (tmp_path / "gone.json", "gone.json cannot be read"),
    ):
        workspace.files.read([str(path)])
        qtbot.waitUntil(lambda words=words: words in workspace.files.notice.text)
    assert titles(workspace) == before


def test_an_import_that_the_file_of_the_chats_refuses_says_so(workspace, tmp_path, qtbot, monkeypatch):
    path = tmp_path / "one.json"
    path.write_text("".join(part.decode() for part in json_parts([Conversation(title="one")])))

    def refuse(_chats):
        raise StoreError("The disk is full.")

    monkeypatch.setattr(workspace.session, "add_imported", refuse)
    workspace.files.read([str(path)])
    qtbot.waitUntil(lambda: "The disk is full." in workspace.files.notice.text)
    workspace.files.read([str(path)])  # the job has ended: the next one begins
    qtbot.waitUntil(lambda: "One thing after the other" not in workspace.files.notice.text)
