"""What the window says about its engine: loading, could not load, died. In the window, never in a box over it."""

from __future__ import annotations

from PySide6.QtCore import QRectF, Qt, Signal
from PySide6.QtGui import QFontDatabase, QPainter, QPaintEvent
from PySide6.QtWidgets import QHBoxLayout, QPlainTextEdit, QProgressBar, QPushButton, QVBoxLayout, QWidget

from app.theme import PADDING, SPACING, Theme, mix
from app.translation import mark, tr
from app.widgets import button, label, paint_surface, set_role
from engine.client import EngineDied
from engine.messages import LoadFailed, Loading

_HEADINGS = {
    "offline": mark("No model is here yet, and none could be fetched"),
    "memory": mark("The model does not fit into memory"),
    "unsupported": mark("This model is of a kind that Batchscope does not know"),
    "damaged": mark("The model's files are damaged or incomplete"),
    "other": mark("The model could not be loaded"),
}
_HINTS = {
    "offline": mark(
        "Connect to the network and try again, or open a folder with a model (safetensors and its config.json)."
    ),
    "memory": mark("Choose a smaller model, or close other programs and try again."),
    "unsupported": mark("Choose another model, or go on with the starter model."),
    "damaged": mark("Fetch the files again, or choose another model."),
    "other": mark("Try again, or choose another model."),
}


def sized(done: int, total: int) -> str:
    """How far a stage is: bytes where the numbers are large, else a count."""
    if total <= 0:
        return ""
    if total >= 1 << 20:
        return tr("{done:,.0f} of {total:,.0f} MiB", done=done / 2**20, total=total / 2**20)
    return tr("{done:,} of {total:,}", done=done, total=total)


class LoadingNotice(QWidget):
    """The stage as a sentence, a bar, a way out: in the place of the gauges, which have nothing to tell meanwhile."""

    cancelled = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.stage = label("")
        self.amount = label("", "muted")
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.bar.setMinimumWidth(60)
        self.bar.setMaximumWidth(320)
        self.bar.setAccessibleName(tr("Loading progress"))
        self.cancel = button(tr("Stop loading"), "flat")
        self.cancel.clicked.connect(self.cancelled)
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING + 4)
        row.addStretch(1)
        row.addWidget(self.stage)
        row.addWidget(self.bar, 4)
        row.addWidget(self.amount)
        row.addWidget(self.cancel)
        self.hide()

    def begin(self) -> None:
        self.show_stage(Loading(tr("Starting the engine")))
        self.show()

    def show_stage(self, loading: Loading) -> None:
        self.stage.setText(loading.stage)
        amount = sized(loading.done, loading.total)
        self.amount.setText(amount)
        self.amount.setVisible(bool(amount))
        # Permille: Qt counts in 32 bits, files do not.
        self.bar.setRange(0, 1000 if loading.total > 0 else 0)
        if loading.total > 0:
            self.bar.setValue(round(1000 * min(1.0, loading.done / loading.total)))


class DeathBanner(QWidget):
    """The engine is gone: why, its last lines, and one click to go on."""

    restart = Signal()
    TALLEST = 150

    def __init__(self, theme: Theme) -> None:
        super().__init__()
        self.theme = theme
        self.reason = label("", "error")
        self.reason.setWordWrap(True)
        self.reason.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.details = button(tr("Last lines"), "flat", tr("Show the engine's last lines"))
        self.details.setCheckable(True)
        self.again = button(tr("Restart engine"), "primary")
        self.dismiss = button(tr("Close"), "flat", tr("Close this notice"))
        self.lines = QPlainTextEdit()
        self.lines.setReadOnly(True)
        self.lines.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.lines.setAccessibleName(tr("Last lines of the engine"))
        self.lines.hide()
        line = QHBoxLayout()
        line.setSpacing(SPACING + 4)
        line.addWidget(self.reason, 1)
        for each in (self.details, self.again, self.dismiss):
            line.addWidget(each)
        column = QVBoxLayout(self)
        column.setContentsMargins(*PADDING)
        column.addLayout(line)
        column.addWidget(self.lines)
        self.details.toggled.connect(self.lines.setVisible)
        self.again.clicked.connect(self.restart)
        self.dismiss.clicked.connect(self.hide)
        theme.changed.connect(self.update)
        self.hide()

    def report(self, death: EngineDied) -> None:
        code = "" if death.exit_code is None else " " + tr("Exit code {code}.", code=death.exit_code)
        reason = death.reason.rstrip(". ")
        self.reason.setText(
            tr("The engine stopped. {reason}.{code} Answers keep the text they have.", reason=reason, code=code)
        )
        self.lines.setPlainText("\n".join(death.last_lines))
        wanted = self.lines.fontMetrics().lineSpacing() * len(death.last_lines) + 20
        self.lines.setFixedHeight(min(self.TALLEST, wanted))
        self.details.setVisible(bool(death.last_lines))
        self.details.setChecked(False)
        self.show()

    def paintEvent(self, event: QPaintEvent) -> None:
        surface = mix(self.theme.card, self.theme.error, 0.10)
        paint_surface(QPainter(self), QRectF(self.rect()), surface, mix(self.theme.line, self.theme.error, 0.5))


class ModelPage(QWidget):
    """Lies over the docks while there is no model: what is the matter, and the ways on."""

    open_folder = Signal()
    retry = Signal()
    starter = Signal()
    models = Signal()
    """The Models page is wanted."""
    back = Signal()
    """The model that ran before is wanted again."""

    def __init__(self, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self.theme = theme
        self.heading = label("", "heading")
        self.message = label("")
        self.hint = label("", "muted")
        for each in (self.heading, self.message, self.hint):
            each.setWordWrap(True)
        self.message.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.back_button = button("", "primary")
        self.models_button = button(tr("Choose a model…"), "primary")
        self.folder_button = button(tr("Open a local folder…"))
        self.retry_button = button(tr("Try again"))
        self.starter_button = button(tr("Use the starter model"))
        self.dismiss_button = button(tr("Look at the chats without a model"), "flat")
        self.back_button.clicked.connect(self.back)
        self.models_button.clicked.connect(self.models)
        self.folder_button.clicked.connect(self.open_folder)
        self.retry_button.clicked.connect(self.retry)
        self.starter_button.clicked.connect(self.starter)
        self.dismiss_button.clicked.connect(self.hide)
        self._card = QWidget()
        self._card.setMaximumWidth(620)
        column = QVBoxLayout(self._card)
        column.setContentsMargins(28, 24, 28, 24)
        column.setSpacing(SPACING + 4)
        for each in (self.heading, self.message, self.hint):
            column.addWidget(each)
        column.addLayout(_row(self.back_button, self.models_button, self.retry_button))
        column.addLayout(_row(self.folder_button, self.starter_button, self.dismiss_button))
        middle = QHBoxLayout()
        middle.addStretch(1)
        middle.addWidget(self._card, 8)
        middle.addStretch(1)
        outer = QVBoxLayout(self)
        outer.addStretch(2)
        outer.addLayout(middle)
        outer.addStretch(3)
        theme.changed.connect(self.update)
        self.hide()

    def show_failure(self, failure: LoadFailed, *, starter: bool, before: str = "") -> None:
        """``starter``: whether it was the starter model that could not be loaded. ``before``: the model that ran before
        and can be had again; empty: none."""
        kind = failure.kind if failure.kind in _HEADINGS else "other"
        self.tell(tr(_HEADINGS[kind]), failure.message, tr(_HINTS[kind]), starter=starter, before=before)

    def show_interrupted(self, model: str, *, starter: bool) -> None:
        self.tell(
            tr("The last start ended while a model was loading"),
            tr("It was {model}. It is not loaded by itself this time, in case it was the cause.", model=model),
            tr("Try it again, or choose another model."),
            starter=starter,
        )

    def tell(self, heading: str, message: str, hint: str, *, starter: bool, before: str = "") -> None:
        self.heading.setText(heading)
        self.message.setText(message)
        self.hint.setText(hint)
        self.starter_button.setVisible(not starter)
        self.back_button.setText(tr("Go back to {model}", model=before))
        self.back_button.setVisible(bool(before))
        set_role(self.models_button, "" if before else "primary")
        self.raise_()
        self.show()
        (self.back_button if before else self.models_button).setFocus()

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.fillRect(self.rect(), self.theme.window)
        paint_surface(painter, QRectF(self._card.geometry()), self.theme.card, self.theme.line)


def _row(*buttons: QPushButton) -> QHBoxLayout:
    row = QHBoxLayout()
    row.setSpacing(SPACING)
    for each in buttons:
        row.addWidget(each)
    row.addStretch(1)
    return row
