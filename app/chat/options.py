"""The drawer of a conversation: its system prompt, its sampling, what a full context means, and its priority.

What is changed here is the conversation's at once.
"""

from __future__ import annotations

from dataclasses import replace

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QHideEvent, QPainter, QPaintEvent, QShowEvent, QTextCursor, QWheelEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QRadioButton,
    QScrollArea,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from app.chat.conversation import DEFAULT_CHAT_PARAMS, ContextPolicy, Conversation
from app.chat.preset import Preset
from app.chat.preset_bar import PresetBar, shown_name
from app.chat.sampling_fields import SamplingFields
from app.chat.session import ChatSession
from app.engine_bridge import EngineBridge
from app.scope.priorities import MOST
from app.theme import SPACING
from app.translation import mark, tr
from app.widgets import button, label
from engine.request import SamplingParams

HEIGHT_PX = 350
POLICIES = {
    ContextPolicy.REFUSE: (
        mark("Do not send"),
        mark("A message that does not fit is not sent, and the numbers are said."),
    ),
    ContextPolicy.DROP_OLDEST: (
        mark("Leave out the oldest"),
        mark("The oldest messages are not told to the model, and the answer says how many. They stay in the chat."),
    ),
}
"""What it is called, and what it does."""


class OptionsDrawer(QWidget):
    changed = Signal()
    """What the model is told, or how, is another in the conversation that is shown."""

    def __init__(self, session: ChatSession, bridge: EngineBridge, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._bridge = bridge
        self._conversation: Conversation | None = None
        self._filling = False
        self._make_system()
        self._make_sampling()
        self._make_policy()
        self._make_priority()
        self._lay_out()
        self.setMaximumHeight(HEIGHT_PX)
        bridge.state_changed.connect(self._show_model)
        bridge.config_changed.connect(self._show_order)
        session.listed.connect(self._show_priority)
        self._show_model()
        self._show_order()

    # Its parts -------------------------------------------------------------------------------------------------------

    def _make_system(self) -> None:
        self.system_presets = PresetBar(
            "system",
            tr("System prompt"),
            self._session,
            lambda name: Preset(name, "system", text=self.system_prompt.toPlainText()),
            lambda preset: preset.text.strip() == self.system_prompt.toPlainText().strip(),
        )
        self.system_presets.chosen.connect(self._choose_system)
        self.system_prompt = QPlainTextEdit()
        self.system_prompt.setPlaceholderText(tr("System prompt: how the model shall behave in this chat"))
        self.system_prompt.setAccessibleName(tr("System prompt"))
        self.system_prompt.setTabChangesFocus(True)
        self.system_prompt.setFixedHeight(64)
        self.system_prompt.textChanged.connect(self._edited)
        self.model_note = _sentence()

    def _make_sampling(self) -> None:
        self.sampling = SamplingFields()
        self.edits, self.stop, self.error = self.sampling.edits, self.sampling.stop, self.sampling.error
        self.sampling.changed.connect(self._edited)
        self.sampling_presets = PresetBar(
            "sampling",
            tr("Sampling"),
            self._session,
            lambda name: Preset(name, "sampling", params=self.sampling.params),
            lambda preset: with_preset(self.sampling.params, preset) == self.sampling.params,
        )
        self.sampling_presets.chosen.connect(self._choose_sampling)
        self.reset = button(tr("Defaults"), "flat", tr("Back to the default sampling"))
        self.reset.clicked.connect(self._reset)

    def _make_policy(self) -> None:
        self.policies: dict[ContextPolicy, QRadioButton] = {}
        self._policy_group = QButtonGroup(self)
        for policy, (title, sentence) in POLICIES.items():
            radio = QRadioButton(tr(title))
            radio.setToolTip(tr(sentence))
            radio.setAccessibleDescription(tr(sentence))
            radio.clicked.connect(lambda _=False, policy=policy: self._choose_policy(policy))
            self._policy_group.addButton(radio)
            self.policies[policy] = radio

    def _make_priority(self) -> None:
        self.priority = _PrioritySpin()
        self.priority.setRange(-MOST, MOST)
        self.priority.setKeyboardTracking(False)
        self.priority.setFixedWidth(100)
        self.priority.lineEdit().setTextMargins(SPACING, 0, SPACING, 0)  # without buttons Qt forgets the padding
        self.priority.setAccessibleName(tr("Priority of this chat"))
        self.priority.setToolTip(tr("The lower number runs first; also of the answer that is being written"))
        self.priority.valueChanged.connect(self._choose_priority)
        self.order_note = _sentence()

    def _lay_out(self) -> None:
        page = QWidget()
        column = QVBoxLayout(page)
        column.setContentsMargins(0, 0, SPACING, 0)
        column.setSpacing(SPACING)
        for widget in (self.system_presets, self.system_prompt, self.model_note, self.sampling_presets, self.sampling):
            column.addWidget(widget)
        column.addWidget(self.reset, 0, Qt.AlignmentFlag.AlignRight)
        column.addWidget(label(tr("When the context is full"), "title"))
        for policy, (_, sentence) in POLICIES.items():
            words = _sentence(tr(sentence))
            words.setContentsMargins(20, 0, 0, 0)
            column.addWidget(self.policies[policy])
            column.addWidget(words)
        line = QHBoxLayout()
        title = label(tr("Priority"), "title")
        title.setBuddy(self.priority)
        line.addWidget(title)
        line.addStretch(1)
        line.addWidget(self.priority)
        column.addLayout(line)
        column.addWidget(self.order_note)
        area = QScrollArea(self)
        area.setWidgetResizable(True)
        area.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        area.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        area.setWidget(page)
        area.viewport().setAutoFillBackground(False)
        page.setAutoFillBackground(False)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, SPACING)
        outer.addWidget(area)

    # What is shown ---------------------------------------------------------------------------------------------------

    def show_conversation(self, conversation: Conversation) -> None:
        self.setEnabled(not conversation.damage)
        self._filling = True
        self._conversation = conversation
        if self.system_prompt.toPlainText() != conversation.system_prompt:
            self.system_prompt.setPlainText(conversation.system_prompt)
        self.sampling.fill(conversation.params)
        self.policies[conversation.policy].setChecked(True)
        self._filling = False
        for bar in (self.system_presets, self.sampling_presets):
            bar.say()
        self._show_priority()
        self._refresh_presets()

    def _refresh_presets(self) -> None:
        if self.isVisible():  # they are read from the chat file
            self.system_presets.refresh()
            self.sampling_presets.refresh()

    def _show_priority(self) -> None:
        """It can be set in the list of chats, too."""
        if self._conversation is not None and self.priority.value() != self._conversation.priority:
            self._filling = True
            self.priority.setValue(self._conversation.priority)
            self._filling = False

    def _show_order(self) -> None:
        order = self._bridge.config.scheduler.order
        if order == "priority":
            text = tr("The lower number runs first.")
        else:
            text = tr(
                "The lower number runs first, but only in the order “priority”. The queue's order is “{order}”, which "
                "does not look at priorities; it can be changed in the bar at the top.",
                order=order,
            )
        self.order_note.setText(text)

    def _show_model(self, _state: str = "") -> None:
        info = self._bridge.info
        text = ""
        if info is not None and not info.has_chat_template:
            text = tr(
                "{model} has no chat template: it is told the chat in a plain format, “User: …” and “Assistant: …”, "
                "with the system prompt in front.",
                model=info.name,
            )
        elif info is not None and not info.has_system_role:
            text = tr("{model} takes no system prompt: it is put before your first message.", model=info.name)
        self.model_note.setText(text)
        self.model_note.setVisible(bool(text))
        self._show_order()

    def paintEvent(self, event: QPaintEvent) -> None:
        """A line at the end: both the drawer and what lies below it are scrolled."""
        QPainter(self).fillRect(0, self.height() - 1, self.width(), 1, self.palette().mid())

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._refresh_presets()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        for bar in (self.system_presets, self.sampling_presets):
            bar.say()

    # What is changed -------------------------------------------------------------------------------------------------

    def _edited(self) -> None:
        if self._filling or self._conversation is None:
            return
        # A bad number must not cost the system prompt that is written beside it.
        self._session.set_options(self._conversation, self.system_prompt.toPlainText(), self.sampling.params)
        self._refresh_presets()
        self.changed.emit()

    def _choose_system(self, preset: Preset) -> None:
        before = self.system_prompt.toPlainText()
        _replace_text(self.system_prompt, preset.text)
        if before.strip() and before != preset.text:
            undo = lambda: _replace_text(self.system_prompt, before)  # noqa: E731
            self.system_presets.say(tr("“{name}” is in force.", name=shown_name(preset)), undo)

    def _choose_sampling(self, preset: Preset) -> None:
        self._change_params(
            with_preset(self.sampling.params, preset), tr("“{name}” is in force.", name=shown_name(preset))
        )

    def _reset(self) -> None:
        self._change_params(DEFAULT_CHAT_PARAMS, tr("Back to the defaults."))

    def _change_params(self, params: SamplingParams, sentence: str) -> None:
        before = self.sampling.params
        self._set_params(params)
        if params != before:
            self.sampling_presets.say(sentence, lambda: self._set_params(before))

    def _set_params(self, params: SamplingParams) -> None:
        self.sampling.fill(params)
        self._edited()

    def _choose_policy(self, policy: ContextPolicy) -> None:
        if self._conversation is not None and policy is not self._conversation.policy:
            self._session.set_policy(self._conversation, policy)
            self.changed.emit()

    def _choose_priority(self, priority: int) -> None:
        if not self._filling and self._conversation is not None:
            self._session.set_priority(self._conversation, priority)


def with_preset(params: SamplingParams, preset: Preset) -> SamplingParams:
    """``params`` with a preset in force. A built-in one is about how tokens are chosen: the chat's seed, stop strings
    and longest answer stay."""
    assert preset.params is not None
    if not preset.built_in:
        return preset.params
    return replace(preset.params, seed=params.seed, stop=params.stop, max_tokens=params.max_tokens)


class _PrioritySpin(QSpinBox):
    def wheelEvent(self, event: QWheelEvent) -> None:
        """The wheel scrolls the drawer."""
        event.ignore()


def _sentence(text: str = "") -> QLabel:
    words = label(text, "muted")
    words.setWordWrap(True)
    return words


def _replace_text(edit: QPlainTextEdit, text: str) -> None:
    """As if it had been typed: the field's own undo brings back what was there."""
    cursor = QTextCursor(edit.document())
    cursor.select(QTextCursor.SelectionType.Document)
    cursor.insertText(text)
