"""The field, its gauge, and what is said where a chat does not fit: real widgets, counted by the test's bridge."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QMimeData, Qt
from PySide6.QtGui import QGuiApplication, QImage
from PySide6.QtTest import QSignalSpy, QTest

from app.chat.composer import MOST_DRAFTS, Composer
from app.chat.context_gauge import ContextGauge, ContextUse, Level
from app.chat.context_meter import DELAY_MS, SAMPLED_CHARACTERS
from app.chat.conversation import ContextPolicy, Conversation
from app.chat.message_edit import LONGEST_LINE, is_heavy
from app.chat.session import ChatSession
from app.theme import Theme
from engine.messages import ChatMessage, TokenCount
from tests.app.chat.fake_bridge import INFO, FakeBridge
from tests.app.conftest import active_timers

ENTER, CTRL, SHIFT = Qt.Key.Key_Return, Qt.KeyboardModifier.ControlModifier, Qt.KeyboardModifier.ShiftModifier
WINDOW = 1_000


class Desk:
    """A composer on a chat of its own, with a model of a small context."""

    def __init__(self, qtbot, theme: Theme, path: Path) -> None:
        self.qtbot = qtbot
        self.bridge = FakeBridge()
        self.bridge.info = msgspec.structs.replace(INFO, max_model_len=WINDOW)
        self.asked: list[list[ChatMessage]] = []
        self._count_tokens = self.bridge.count_tokens
        self.bridge.count_tokens = self._count
        self.session = ChatSession(self.bridge, path)
        self.conversation = self.session.new_conversation()
        self.conversation.params = replace(self.conversation.params, max_tokens=100)
        self.composer = Composer(self.session, self.bridge, theme)
        self.composer.resize(460, 200)
        self.composer.show()
        qtbot.waitExposed(self.composer)
        self.composer.show_conversation(self.conversation)
        self.sent = QSignalSpy(self.composer.sent)

    def _count(self, messages: list[ChatMessage], **given: object) -> int:
        self.asked.append(list(messages))
        return self._count_tokens(messages, **given)

    def say(self, question: str, answer: str) -> None:
        """One exchange more in the chat; the test's bridge counts a token for four characters."""
        self.session.send(self.conversation, question)
        number = max(self.bridge.requests)
        self.bridge.say(number, answer)
        self.bridge.finish(number)

    def settle(self) -> None:
        self.qtbot.waitUntil(lambda: self.composer.meter.is_current, timeout=3000)

    def press(self, key: Qt.Key, modifier: Qt.KeyboardModifier = Qt.KeyboardModifier.NoModifier) -> None:
        QTest.keyClick(self.composer.edit, key, modifier)

    def type(self, text: str) -> None:
        QTest.keyClicks(self.composer.edit, text)

    def paste(self, text: str) -> None:
        data = QMimeData()
        data.setText(text)
        self.composer.edit.insertFromMimeData(data)


@pytest.fixture
def desk(qtbot, theme: Theme, store_path: Path) -> Iterator[Desk]:
    made = Desk(qtbot, theme, store_path)
    yield made
    made.composer.hide()
    assert active_timers(made.composer) == []
    made.session.close()
    made.composer.deleteLater()
    made.session.deleteLater()


# Keys ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("enter_sends", "key", "sends"),
    [
        (True, (ENTER,), True),
        (True, (ENTER, CTRL), True),
        (True, (ENTER, SHIFT), False),
        (True, (Qt.Key.Key_Enter, Qt.KeyboardModifier.KeypadModifier), True),
        (False, (ENTER,), False),
        (False, (ENTER, CTRL), True),
        (False, (ENTER, SHIFT), False),
    ],
)
def test_what_sends_and_what_begins_a_line(desk, enter_sends, key, sends):
    desk.composer.enter_sends = enter_sends
    desk.type("one")
    desk.press(*key)
    desk.type("two")
    assert desk.sent.count() == (1 if sends else 0)
    assert desk.composer.text == ("onetwo" if sends else "one\ntwo")
    assert ("Ctrl+Enter sends" in desk.composer.edit.placeholderText()) is not enter_sends


def test_up_edits_the_last_message_only_from_an_empty_field(desk):
    wanted = QSignalSpy(desk.composer.edit_last_wanted)
    desk.press(Qt.Key.Key_Up)
    assert wanted.count() == 1
    desk.type("a")
    desk.press(Qt.Key.Key_Up)
    assert wanted.count() == 1


def test_every_chat_keeps_its_draft_and_what_was_done_to_it(desk):
    other = desk.session.new_conversation()
    desk.type("first")
    desk.conversation.draft = desk.composer.text
    desk.composer.show_conversation(other)
    assert desk.composer.text == ""
    desk.press(Qt.Key.Key_Z, CTRL)
    assert desk.composer.text == ""  # the history of this one, not of the other
    desk.type("second")
    other.draft = desk.composer.text
    desk.composer.show_conversation(desk.conversation)
    assert desk.composer.text == "first"
    desk.press(Qt.Key.Key_Z, CTRL)
    assert desk.composer.text == ""


def test_what_was_sent_can_be_had_back(desk):
    desk.type("a good sentence")
    desk.composer.set_text("")
    desk.press(Qt.Key.Key_Z, CTRL)
    assert desk.composer.text == "a good sentence"


def test_drafts_of_many_chats_do_not_pile_up(desk):
    documents = len(desk.composer.edit.findChildren(type(desk.composer.edit.document())))
    for _ in range(MOST_DRAFTS + 5):
        desk.composer.show_conversation(Conversation(draft="words"))
    desk.qtbot.wait(1)
    kept = len(desk.composer.edit.findChildren(type(desk.composer.edit.document())))
    assert desk.composer.text == "words" and kept <= documents + MOST_DRAFTS


def test_a_larger_font_makes_the_field_higher(desk, theme):
    desk.type("one")
    desk.press(ENTER, SHIFT)
    before = desk.composer.edit.height()
    theme.set_font_size(22)
    QGuiApplication.processEvents()
    edit = desk.composer.edit
    try:
        assert edit.height() > before and edit.height() >= 2 * edit.fontMetrics().lineSpacing()
        assert edit.document().defaultFont().pixelSize() == 22
    finally:
        theme.set_font_size(13)


# Counting ------------------------------------------------------------------------------------------------------------


def test_the_gauge_tells_history_draft_and_context(desk):
    desk.say("q" * 400, "a" * 400)
    desk.settle()
    history = desk.composer.gauge.use.history
    desk.type("d" * 40)
    desk.settle()
    use = desk.composer.gauge.use
    assert use.history == history >= 200 and use.draft >= 10 and use.window == WINDOW
    assert desk.composer.gauge.text == f"{use.history + use.draft:,} of 1,000 tokens"
    assert desk.composer.gauge.accessibleDescription() == desk.composer.gauge.text
    for number in (use.history, use.draft, 100, 1_000):
        assert f"{number:,}" in desk.composer.gauge.toolTip()


def test_a_pause_in_typing_makes_one_query(desk):
    desk.say("a question", "an answer")
    desk.settle()
    desk.asked.clear()
    desk.type("several words typed quickly")
    assert desk.asked == []
    desk.settle()
    assert len(desk.asked) == 1 and desk.asked[0][-1].content == "several words typed quickly"
    desk.qtbot.wait(2 * DELAY_MS)
    assert len(desk.asked) == 1 and active_timers(desk.composer) == []


def test_one_query_is_under_way_at_a_time(desk, qtbot):
    asked = []
    desk.bridge.count_tokens = lambda messages, **given: asked.append(messages) or len(asked)
    desk.type("one")
    desk.composer.meter.ask()
    desk.type(" two")
    qtbot.wait(2 * DELAY_MS)
    assert len(asked) == 1  # the engine has not answered
    desk.bridge.token_counted.emit(TokenCount(1, 5))
    assert len(asked) == 2 and asked[1][-1].content == "one two"
    desk.bridge.token_counted.emit(TokenCount(2, 7))
    assert desk.composer.meter.is_current and desk.composer.gauge.use.total == 7


@pytest.mark.parametrize("state", ["loading", "stopped", "dead", "failed"])
def test_without_a_model_nothing_is_said_and_nothing_asked(desk, qtbot, state):
    desk.type("words")
    desk.settle()
    assert desk.composer.gauge.text
    desk.asked.clear()
    desk.bridge.set_state(state)
    desk.type(" and more")
    qtbot.wait(2 * DELAY_MS)
    assert desk.asked == [] and desk.composer.gauge.text == "" and active_timers(desk.composer) == []
    desk.press(ENTER)
    assert desk.sent.count() == 1  # whether it can be sent is the session's to say


def test_while_a_comparison_has_the_engine_nothing_waits_for_a_count(desk, qtbot):
    fill(desk)
    desk.bridge.comparing = True
    desk.asked.clear()
    desk.paste("d" * 1_200)
    desk.press(ENTER)
    assert desk.sent.count() == 1 and desk.asked == []
    desk.bridge.comparing = False
    desk.bridge.compare_done.emit(None)
    desk.settle()
    assert desk.asked and desk.composer.note.isVisible()


def test_a_hidden_composer_asks_nothing(desk, qtbot):
    desk.settle()
    desk.composer.hide()
    desk.asked.clear()
    desk.type("words")
    qtbot.wait(2 * DELAY_MS)
    assert desk.asked == [] and active_timers(desk.composer) == []
    desk.composer.show()
    desk.settle()
    assert desk.asked and desk.composer.gauge.use.draft > 0


def test_a_count_that_comes_late_is_not_of_the_next_chat(desk):
    desk.type("a" * 2_000)
    desk.composer.meter.ask()
    other = Conversation()
    desk.composer.show_conversation(other)
    desk.settle()
    assert desk.composer.gauge.use.total == 0


def test_while_an_answer_is_written_the_gauge_follows_the_run(desk):
    desk.session.send(desk.conversation, "a question")
    number = max(desk.bridge.requests)
    desk.composer.set_state(generating=True)
    desk.asked.clear()
    desk.bridge.say(number, "word", tokens=30)
    assert desk.composer.gauge.use.total == 20 + 30 and desk.asked == []
    desk.bridge.finish(number)
    desk.composer.set_state(generating=False)
    desk.settle()
    assert desk.asked


# A full context ------------------------------------------------------------------------------------------------------


def fill(desk: Desk, exchanges: int = 3) -> None:
    for number in range(exchanges):
        desk.say(f"{number}" + "q" * 500, "a" * 500)
    desk.settle()


def test_a_message_that_does_not_fit_is_not_sent_and_the_numbers_said(desk):
    fill(desk)
    desk.type("d" * 1_200)
    desk.settle()
    use = desk.composer.gauge.use
    assert use.level is Level.OVER and use.total > WINDOW
    note = desk.composer.note
    assert note.isVisible() and f"{use.total:,}" in note.text and "1,000" in note.text
    assert not desk.composer.button.isEnabled() and note.text in desk.composer.button.toolTip()
    desk.press(ENTER)
    assert desk.sent.count() == 0 and desk.composer.text == "d" * 1_200
    assert f"{use.total - use.window:,} too many" in desk.composer.gauge.text  # the numbers beside it add up
    assert note.drop_button.isVisible() and note.new_button.isVisible()


def test_shortened_it_is_sent_as_soon_as_it_is_counted(desk, qtbot):
    fill(desk)
    desk.type("d" * 1_200)
    desk.settle()
    desk.composer.edit.selectAll()
    desk.type("short")
    desk.press(ENTER)
    assert desk.sent.count() == 0
    qtbot.waitUntil(lambda: desk.sent.count() == 1, timeout=1000)
    assert desk.sent.at(0) == ["short"]


def test_enter_right_after_a_long_paste_waits_for_the_count(desk, qtbot):
    fill(desk)
    desk.paste("d" * 1_200)
    desk.press(ENTER)
    desk.settle()
    assert desk.sent.count() == 0 and desk.composer.note.isVisible()


def test_dropping_the_oldest_is_offered_chosen_and_said(desk, qtbot):
    fill(desk)
    desk.type("d" * 1_200)
    desk.settle()
    chosen = QSignalSpy(desk.composer.policy_chosen)
    QTest.mouseClick(desk.composer.note.drop_button, Qt.MouseButton.LeftButton)
    assert desk.conversation.policy is ContextPolicy.DROP_OLDEST and chosen.count() == 1
    desk.settle()
    use = desk.composer.gauge.use
    assert use.level is Level.TIGHT and use.dropped > 0 and use.kept <= WINDOW - use.reserve
    assert f"The {use.dropped} oldest messages will be left out" in desk.composer.note.text
    assert f"{use.dropped} oldest messages left out" in desk.composer.gauge.text
    assert desk.composer.button.isEnabled() and not desk.composer.note.drop_button.isVisible()
    desk.press(ENTER)
    assert desk.sent.count() == 1


def test_the_engine_leaves_out_as_many_as_were_announced(desk, qtbot):
    fill(desk)
    desk.session.set_policy(desk.conversation, ContextPolicy.DROP_OLDEST)
    desk.composer.context_changed()
    desk.type("d" * 1_200)
    desk.settle()
    announced = desk.composer.gauge.use.dropped
    cut = QSignalSpy(desk.bridge.context_cut)
    desk.session.send(desk.conversation, desk.composer.text)
    qtbot.waitUntil(lambda: cut.count() == 1)
    assert cut.at(0)[0].dropped_messages == announced > 0


def test_a_message_longer_than_the_context_has_no_remedy_but_to_shorten_it(desk):
    desk.session.set_policy(desk.conversation, ContextPolicy.DROP_OLDEST)
    fill(desk, 1)
    desk.paste("d" * 6_000)
    desk.settle()
    assert not desk.composer.button.isEnabled() and not desk.composer.note.drop_button.isVisible()
    assert "1,000" in desk.composer.note.text and "Shorten" in desk.composer.note.text


def test_an_answer_with_little_room_is_told_before(desk):
    fill(desk)
    desk.type("d" * 600)
    desk.settle()
    use = desk.composer.gauge.use
    assert use.level is Level.TIGHT and use.room < use.reserve
    assert f"{use.room} left for the answer" in desk.composer.gauge.text
    assert desk.composer.button.isEnabled() and not desk.composer.note.isVisible()


def test_what_the_model_cannot_be_told_is_said(desk):
    desk.type("words")
    desk.settle()
    sentence = "The template refuses this conversation."
    desk.bridge.count_tokens = lambda messages, **given: 99
    desk.type(" and more")
    desk.composer.meter.ask()
    desk.bridge.token_counted.emit(TokenCount(99, 0, sentence))
    assert desk.composer.note.text == sentence and desk.composer.note.isVisible()
    desk.press(ENTER)
    assert desk.sent.count() == 1  # the answer will say the same


# Long pastes ---------------------------------------------------------------------------------------------------------

LINES = ("lorem ipsum dolor sit amet " * 3)[:79] + "\n"


@pytest.mark.parametrize(
    "text",
    [LINES * 12_500, "x" * 1_000_000, "lorem ipsum " * 90_000, "a\n" * 500_000],
    ids=["lines", "no space", "one line", "short lines"],
)
def test_a_megabyte_is_pasted_typed_behind_and_sent_without_a_stutter(desk, text):
    def timed(action) -> float:
        begun = time.thread_time()
        action()
        QGuiApplication.processEvents()
        return time.thread_time() - begun

    assert timed(lambda: desk.paste(text)) < 0.5
    assert timed(lambda: desk.type("x")) < 0.2
    desk.settle()
    assert desk.composer.gauge.text.startswith("about ") and not desk.composer.button.isEnabled()
    assert sum(len(m.content) for asked in desk.asked for m in asked) < 50_000  # a sample, not the whole
    assert len(desk.composer.text) >= len(text)
    assert text in desk.composer.text


def test_a_pasted_line_that_is_too_long_for_the_field_is_kept_beside_it(desk):
    desk.type("Sum this up:")
    desk.paste("y" * (LONGEST_LINE + 1))
    assert desk.composer.edit.toPlainText() == "Sum this up:"
    assert desk.composer.text == "Sum this up:\n\n" + "y" * (LONGEST_LINE + 1)
    assert desk.composer.pasted.isVisible()
    draft = desk.composer.text
    desk.composer.pasted.remove(0)
    assert desk.composer.text == "Sum this up:"
    desk.composer.pasted.undo_remove()
    assert desk.composer.text == draft
    desk.composer.set_text("")
    assert desk.composer.text == "" and not desk.composer.pasted.isVisible()


def test_pasted_texts_are_part_of_the_draft(desk):
    heavy = "z" * (LONGEST_LINE + 1)
    desk.paste(heavy)
    desk.conversation.draft = desk.composer.text
    desk.composer.show_conversation(Conversation())
    assert desk.composer.text == ""
    desk.composer.show_conversation(desk.conversation)
    assert desk.composer.text == heavy
    restored = Conversation(draft=heavy)  # as after a start
    desk.composer.show_conversation(restored)
    assert desk.composer.text == heavy and desk.composer.edit.toPlainText() == ""


def test_which_texts_a_field_can_hold():
    assert not is_heavy("x" * LONGEST_LINE) and is_heavy("x" * (LONGEST_LINE + 1))
    assert not is_heavy(LINES * 2_000)
    assert is_heavy("short\n" + "x" * (LONGEST_LINE + 1)) and is_heavy("x" * (LONGEST_LINE + 1) + "\nshort")
    assert is_heavy("\n" * SAMPLED_CHARACTERS)


def test_the_levels_differ_by_more_than_colour(qtbot, theme):
    gauge = ContextGauge(theme)
    qtbot.addWidget(gauge)
    gauge.resize(400, 20)
    pictures = []
    for history in (100, 950, 1_200):
        gauge.show_use(ContextUse(1_000, history, max_tokens=100))
        grey = gauge.grab().toImage().convertToFormat(QImage.Format.Format_Grayscale8)
        beside = range(gauge.BAR_WIDTH + 8, gauge.BAR_WIDTH + 8 + gauge.MARK)  # where the mark stands
        pictures.append(tuple(grey.pixelColor(x, y).value() > 90 for y in range(grey.height()) for x in beside))
    assert len(set(pictures)) == 3


def test_a_full_chat_that_may_leave_out_messages_is_not_called_too_long_before_one_writes():
    use = ContextUse(512, 1_011, policy=ContextPolicy.DROP_OLDEST, max_tokens=100, dropped=6, kept=600)
    assert not use.excess and use.level is Level.TIGHT and "left out" in use.consequence
    assert replace(use, draft=20).excess
    full = replace(use, draft=0, history=512, policy=ContextPolicy.REFUSE, dropped=0, kept=0)
    assert full.level is Level.OVER and full.consequence == "no room for an answer"
    assert replace(full, history=547).consequence == "35 too many"


# In the chat ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_taken_to_a_new_chat(workspace, bridge, qtbot):
    bridge.info = msgspec.structs.replace(INFO, max_model_len=WINDOW)
    for number in range(1, 4):
        workspace.send("q" * 500)
        bridge.say(number, "a" * 500)
        bridge.finish(number)
    full = workspace.current
    composer = workspace.composer
    QTest.keyClicks(composer.edit, "d" * 1_000)
    qtbot.waitUntil(lambda: composer.note.new_button.isVisible())
    QTest.mouseClick(composer.note.new_button, Qt.MouseButton.LeftButton)
    assert workspace.current is not full and composer.text == "d" * 1_000
    qtbot.waitUntil(lambda: composer.meter.is_current)
    assert composer.gauge.use.history == 0 and composer.button.isEnabled()
    workspace.open_conversation(full)
    assert composer.text == ""


def test_the_drawer_and_the_composer_agree_on_the_policy(workspace, bridge, qtbot):
    bridge.info = msgspec.structs.replace(INFO, max_model_len=WINDOW)
    for number in range(1, 4):
        workspace.send("q" * 500)
        bridge.say(number, "a" * 500)
        bridge.finish(number)
    workspace.options_button.setChecked(True)
    composer, radios = workspace.composer, workspace.options.policies
    QTest.keyClicks(composer.edit, "d" * 1_000)
    qtbot.waitUntil(lambda: composer.note.drop_button.isVisible())
    QTest.mouseClick(composer.note.drop_button, Qt.MouseButton.LeftButton)
    assert radios[ContextPolicy.DROP_OLDEST].isChecked()
    radios[ContextPolicy.REFUSE].click()
    qtbot.waitUntil(lambda: composer.meter.is_current)
    assert composer.note.drop_button.isVisible() and not composer.button.isEnabled()
    workspace.options.edits["max_tokens"].setText("5")
    workspace.options.edits["max_tokens"].textEdited.emit("5")
    qtbot.waitUntil(lambda: composer.meter.is_current)
    assert composer.gauge.use.reserve == 5


def test_the_engine_that_runs_counts(make_rig, qtbot):
    rig = make_rig()
    rig.load()
    composer = rig.window.chat.composer
    QTest.keyClicks(composer.edit, "four characters make a token")
    qtbot.waitUntil(lambda: composer.gauge.use is not None and composer.gauge.use.draft > 0)
    assert composer.gauge.text.endswith(f"of {composer.meter.window:,} tokens")
    qtbot.waitUntil(lambda: active_timers(rig.window.chat.chat_panel) == [])
