"""Where a message is written, with what it would take of the model's context before it is sent.

::

    ┌ Pasted: 1,000,000 characters, about 250,000 tokens   Remove ┐   texts that the field is not to hold
    │ With this message the chat is 9,120 tokens …   Drop · New   │   where it does not fit, with the ways out
    │ Message…                                             [Send] │   Send is Stop while an answer is written
    └ ▓▓▓▓▒▒░░░░  1,234 of 8,192 tokens ──────────────────────────┘   the gauge
"""

from __future__ import annotations

from dataclasses import dataclass, field

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QHideEvent, QShowEvent, QTextDocument
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from app.chat.composer_notes import LimitNote, PastedTexts
from app.chat.context_gauge import ContextGauge
from app.chat.context_meter import ContextMeter
from app.chat.conversation import ContextPolicy, Conversation
from app.chat.message_edit import MessageEdit, is_heavy
from app.chat.session import ChatSession
from app.engine_bridge import EngineBridge
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import set_role

MOST_DRAFTS = 12
"""Drafts whose history of changes is kept; of older ones only the text is."""


@dataclass(slots=True)
class _Draft:
    document: QTextDocument
    pasted: list[str] = field(default_factory=list)


class Composer(QWidget):
    sent = Signal(str)
    stopped = Signal()
    text_changed = Signal()
    """``text`` is another."""
    edit_last_wanted = Signal()
    """Up was pressed in the empty field: the last message is to be edited."""
    new_chat_wanted = Signal()
    """The message shall go into a new chat: it is still in the field."""
    policy_chosen = Signal()
    """The conversation has another policy."""

    def __init__(self, session: ChatSession, bridge: EngineBridge, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._session = session
        self._conversation: Conversation | None = None
        self._drafts: dict[str, _Draft] = {}
        self._generating = False
        self._blocked = ""
        self._sends_when_counted = False
        self.edit = MessageEdit(self)
        self.button = QPushButton(self)
        self.button.setMinimumSize(84, self.edit.height())
        self.pasted = PastedTexts(self)
        self.note = LimitNote(self)
        self.gauge = ContextGauge(theme, self)
        self.meter = ContextMeter(bridge, lambda: self.text, self)
        self._arrange()
        self._connect()
        self.setFocusProxy(self.edit)
        self._update()

    def _arrange(self) -> None:
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        row.addWidget(self.edit, 1)
        row.addWidget(self.button, 0, Qt.AlignmentFlag.AlignBottom)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        column.addWidget(self.pasted)
        column.addWidget(self.note)
        column.addLayout(row)
        column.addWidget(self.gauge)

    def _connect(self) -> None:
        self.edit.submitted.connect(self._submit)
        self.edit.textChanged.connect(self._edited)
        self.edit.edit_last_wanted.connect(self.edit_last_wanted)
        self.edit.pasted_heavy.connect(self.pasted.add)
        self.pasted.changed.connect(self._edited)
        self.button.clicked.connect(self._clicked)
        self.note.drop_button.clicked.connect(self._drop_oldest)
        self.note.new_button.clicked.connect(self.new_chat_wanted)
        self.meter.changed.connect(self._metered)
        self._session.path_changed.connect(self._context_changed)
        self._session.message_changed.connect(self._message_changed)

    # Drafts ----------------------------------------------------------------------------------------------------------

    @property
    def text(self) -> str:
        """What would be sent: what is written, and behind it what was pasted beside the field."""
        written = self.edit.toPlainText()
        return "\n\n".join([*([written] if written.strip() else []), *self.pasted.texts]) or written

    def set_text(self, text: str) -> None:
        """Replaces what is written; undo brings it back."""
        if text != self.text:
            self.pasted.set_texts([text] if is_heavy(text) else [])
            self.edit.replace_text("" if is_heavy(text) else text)

    def show_conversation(self, conversation: Conversation) -> None:
        """Shows the draft of this conversation, with its own history of changes, and counts against it."""
        self._sends_when_counted = False
        if self._conversation is not None and self._conversation.id in self._drafts:
            self._drafts[self._conversation.id].pasted = self.pasted.texts
        self._conversation = conversation
        draft = self._drafts.pop(conversation.id, None)
        if draft is None:
            draft = _Draft(self.edit.new_document())
        self._drafts[conversation.id] = draft
        self.edit.show_document(draft.document)
        self.pasted.set_texts(draft.pasted)
        if self.text != conversation.draft:  # of an earlier session, or changed elsewhere
            self.set_text(conversation.draft)
            draft.document.clearUndoRedoStacks()
        while len(self._drafts) > MOST_DRAFTS:
            self._drafts.pop(next(iter(self._drafts))).document.deleteLater()
        self.meter.watch(conversation)
        self._update()

    # What the chat says ----------------------------------------------------------------------------------------------

    @property
    def enter_sends(self) -> bool:
        """Whether Enter sends and Shift+Enter begins a line; else Enter begins a line. Ctrl+Enter always sends."""
        return self.edit.enter_sends

    @enter_sends.setter
    def enter_sends(self, enter_sends: bool) -> None:
        self.edit.enter_sends = enter_sends
        self._update()

    def set_state(self, *, generating: bool, blocked: str = "") -> None:
        """``blocked`` is why nothing can be sent now; it stands in the field, and what was written there stays."""
        self._generating, self._blocked = generating, blocked
        self._update()

    @property
    def generating(self) -> bool:
        return self._generating

    def context_changed(self) -> None:
        """System prompt, sampling or policy of the conversation are others."""
        self.meter.context_changed()

    def _context_changed(self, conversation_id: str) -> None:
        if self._conversation is not None and conversation_id == self._conversation.id:
            self.meter.context_changed()

    def _message_changed(self, conversation_id: str, _message_id: str) -> None:
        """While an answer is written this comes with every frame."""
        conversation = self._conversation
        if conversation is not None and conversation_id == conversation.id and conversation.open_answer is None:
            self.meter.context_changed()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self.meter.set_active(True)

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self.meter.set_active(False)

    # -----------------------------------------------------------------------------------------------------------------

    def _is_blank(self) -> bool:
        return not self.pasted.texts and self.edit.is_blank()

    def _does_not_fit(self) -> bool:
        use = self.meter.use
        return use is not None and use.excess > 0 and not self._generating and not self._is_blank()

    def _edited(self) -> None:
        self._sends_when_counted = False
        self.meter.draft_changed()
        self._update()
        self.text_changed.emit()

    def _metered(self) -> None:
        use = self.meter.use
        self.gauge.show_use(use)
        if self._generating:
            return  # this comes with every frame
        draft, characters = (use.draft, len(self.text)) if use is not None and self.pasted.texts else (0, 0)
        self.pasted.set_rate(draft / characters if characters else 0.0)
        self._update()
        if self._sends_when_counted and (self.meter.is_current or not self.meter.can_count):
            self._sends_when_counted = False
            self._submit()

    def _update(self) -> None:
        sends, line = (tr("Enter"), tr("Shift+Enter")) if self.enter_sends else (tr("Ctrl+Enter"), tr("Enter"))
        blank = self._is_blank()
        counted = not self._generating and not blank and not self._blocked
        self.note.show_use(self.meter.use if counted else None, self.meter.error if counted else "")
        self.edit.setPlaceholderText(self._blocked or tr("Message…   {key} sends", key=sends))
        self.edit.setToolTip(
            tr("{sends} sends, {line} begins a new line, Esc stops the answer", sends=sends, line=line)
        )
        text = tr("Stop") if self._generating else tr("Send")
        tip = tr("Stop this answer (Esc)") if self._generating else tr("Send ({key})", key=sends)
        # Text instead of a picture: every font has it, and a screen reader reads it.
        self.button.setText(f"■  {text}" if self._generating else text)
        self.button.setToolTip(self._blocked or self.note.text or tip)
        self.button.setAccessibleName(text)
        self.button.setEnabled(self._generating or (not blank and not self._blocked and not self._does_not_fit()))
        set_role(self.button, "primary")

    def _drop_oldest(self) -> None:
        if self._conversation is not None:
            self._session.set_policy(self._conversation, ContextPolicy.DROP_OLDEST)
            self.meter.context_changed()
            self.meter.ask()
            self.edit.setFocus()
            self.policy_chosen.emit()

    def _clicked(self) -> None:
        if self._generating:
            self.stopped.emit()
        else:
            self._submit()

    def _submit(self) -> None:
        """Also while an answer is written: whoever listens says why it cannot be sent now, and the text stays.

        What may be too long is sent when it has been counted."""
        if self._blocked or self._is_blank():
            return
        text = self.text
        meter = self.meter
        if meter.can_count and not meter.is_current and (self._does_not_fit() or meter.may_not_fit(len(text))):
            self._sends_when_counted = True
            meter.ask()
        elif not self._does_not_fit():
            self.sent.emit(text)
