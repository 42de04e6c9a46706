"""What is said above the field: long texts that were pasted, and a conversation that does not fit."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QVBoxLayout, QWidget

from app.chat.context_gauge import ContextUse, Level, rounded
from app.chat.elided import ElidedLabel
from app.theme import SPACING
from app.translation import ntr, tr
from app.widgets import button, label, set_role


class PastedTexts(QWidget):
    """Texts that go out behind what is written, a line for each; hidden while there is none."""

    changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._texts: list[str] = []
        self._removed: tuple[int, str] | None = None
        self._rate = 0.0
        self._labels: list[ElidedLabel] = []
        self._column = QVBoxLayout(self)
        self._column.setContentsMargins(0, 0, 0, 0)
        self._column.setSpacing(2)
        self.setAccessibleName(tr("Pasted texts"))
        self.hide()

    @property
    def texts(self) -> list[str]:
        return list(self._texts)

    def add(self, text: str) -> None:
        self.set_texts([*self._texts, text])

    def set_texts(self, texts: list[str]) -> None:
        if texts == self._texts and self._removed is None:
            return
        changed = texts != self._texts
        self._texts, self._removed = list(texts), None
        self._rebuild()
        if changed:
            self.changed.emit()

    def set_rate(self, tokens_per_character: float) -> None:
        """0: not known."""
        if tokens_per_character != self._rate:
            self._rate = tokens_per_character
            for words, text in zip(self._labels, self._texts, strict=True):
                words.setText(self._words(text))

    def remove(self, index: int) -> None:
        """Takes one out; a line that stays until the next change offers it back."""
        text = self._texts.pop(index)
        self._removed = (index, text)
        self._rebuild()
        self.changed.emit()

    def undo_remove(self) -> None:
        if self._removed is not None:
            index, text = self._removed
            self.set_texts([*self._texts[:index], text, *self._texts[index:]])

    def _words(self, text: str) -> str:
        count, start = len(text), " ".join(text[:120].split())
        if not self._rate:
            return tr("Pasted: {count:,} characters: {start}…", count=count, start=start)
        tokens = rounded(self._rate * count)
        return tr(
            "Pasted: {count:,} characters, about {tokens:,} tokens: {start}…", count=count, tokens=tokens, start=start
        )

    def _rebuild(self) -> None:
        while (item := self._column.takeAt(0)) is not None:
            item.widget().hide()
            item.widget().deleteLater()
        self._labels = []
        for index, text in enumerate(self._texts):
            words = self._add_line(self._words(text), tr("Remove"), lambda _=False, index=index: self.remove(index))
            self._labels.append(words)
        if self._removed is not None:
            self._add_line(tr("Removed the pasted text."), tr("Undo"), lambda _=False: self.undo_remove())
        self.setVisible(self._column.count() > 0)

    def _add_line(self, text: str, action: str, slot) -> ElidedLabel:
        line = QWidget()
        row = QHBoxLayout(line)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING)
        words = ElidedLabel()
        words.setText(text)
        act = button(action, "flat", tr("{action}: {text}", action=action, text=text))
        act.clicked.connect(slot)
        row.addWidget(words, 1)
        row.addWidget(act)
        self._column.addWidget(line)
        return words


class LimitNote(QWidget):
    """What happens to a conversation that does not fit, before it is sent; hidden while it fits."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._label = label()
        self._label.setWordWrap(True)
        self.drop_button = button(tr("Leave out the oldest"))
        self.drop_button.setToolTip(
            tr("In this chat the oldest messages are left out from now on, where the context is full; they stay here")
        )
        self.new_button = button(tr("New chat"))
        self.new_button.setToolTip(tr("The message is taken along into a new chat"))
        self._buttons = QWidget()
        row = QHBoxLayout(self._buttons)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING)
        row.addWidget(self.drop_button)
        row.addWidget(self.new_button)
        row.addStretch(1)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, SPACING // 2)
        column.setSpacing(SPACING // 2)
        column.addWidget(self._label)
        column.addWidget(self._buttons)
        self.hide()

    @property
    def text(self) -> str:
        return self._label.text()

    def show_use(self, use: ContextUse | None, error: str = "") -> None:
        """``error``: why the model cannot be told the conversation at all."""
        text = error or ("" if use is None else sentence(use))
        is_over = bool(error) or (use is not None and use.level is Level.OVER)
        set_role(self._label, "error" if is_over else "muted")
        self._label.setText(text)
        asks = is_over and use is not None
        self.drop_button.setVisible(asks and offers_dropping(use))
        self.new_button.setVisible(asks and offers_new_chat(use))
        self._buttons.setVisible(asks and (offers_new_chat(use) or offers_dropping(use)))
        self.setVisible(bool(text))


def offers_dropping(use: ContextUse) -> bool:
    return not use.drops and use.dropping_helps


def offers_new_chat(use: ContextUse) -> bool:
    """Whether the message alone would fit."""
    return use.history > 0 and use.draft <= use.window - use.reserve


def sentence(use: ContextUse) -> str:
    """What is sent or why it is not, with the numbers; empty: it is sent whole."""
    if use.level is not Level.OVER:
        if not use.drops:
            return ""
        return ntr(
            "The oldest message will be left out: with it the chat is {total:,} tokens, without it {kept:,} of "
            "{window:,}.",
            "The {count:,} oldest messages will be left out: with them the chat is {total:,} tokens, without them "
            "{kept:,} of {window:,}.",
            use.dropped,
            total=use.total,
            kept=use.kept,
            window=use.window,
        )
    if offers_dropping(use):
        return tr(
            "With this message the chat is {total:,} tokens; the model's context holds {window:,}, answer included. "
            "Shorten it, let the oldest messages be left out, or take it to a new chat.",
            total=use.total,
            window=use.window,
        )
    if not offers_new_chat(use):
        draft = tr("about {count:,}", count=rounded(use.draft)) if use.is_estimate else f"{use.draft:,}"
        return tr(
            "This message alone is {draft} tokens; the model's context holds {window:,}, of which {reserve:,} are kept "
            "for the answer. Shorten it, or load a model with a longer context.",
            draft=draft,
            window=use.window,
            reserve=use.reserve,
        )
    if use.drops:
        return tr(
            "Even without the older messages this is {kept:,} tokens; the model's context holds {window:,}, of which "
            "{reserve:,} are kept for the answer. Shorten the message or the system prompt, or take it to a new chat.",
            kept=use.kept,
            window=use.window,
            reserve=use.reserve,
        )
    return tr(
        "With this message the chat is {total:,} tokens; the model's context holds {window:,}, answer included, and "
        "leaving out older messages would not be enough. Shorten it, or take it to a new chat.",
        total=use.total,
        window=use.window,
    )
