"""What is stored, where, and one click to be rid of it; and copies of the chats that the user keeps himself."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QCheckBox, QFileDialog, QHBoxLayout, QVBoxLayout, QWidget

from app.chat.conversation import ChatError
from app.chat.session import ChatSession
from app.settings.rows import Row, Section
from app.settings.storage import Measure, Size
from app.theme import SPACING
from app.translation import ntr, tr
from app.widgets import button, label
from app.words import and_list, bytes_label

BACKUP_SUFFIX = ".sqlite3"


@dataclass(frozen=True, slots=True)
class Wipe:
    """Something that can be wiped."""

    name: str
    """Of the place that is measured."""
    title: str
    about: str
    """A sentence: what it is."""
    amount: Callable[[Size], str]
    """How much there is of it, for the confirmation: ``12 chats (3.4 MiB)``."""
    is_there: Callable[[Size], bool]
    """Whether there is anything to wipe."""
    wipe: Callable[[], None]
    """Raises :class:`ChatError` or OSError where it cannot."""


class PrivacySection(Section):
    said = Signal(str, bool)
    """A sentence, and whether it is of a failure."""
    wiped = Signal()
    """What lies on the disk is another."""

    def __init__(self, session: ChatSession, wipes: list[Wipe], measure: Measure) -> None:
        super().__init__(
            tr("Privacy"),
            about=tr(
                "Everything stays on this machine. Nothing is sent anywhere; the network is used to fetch models, when "
                "you ask for one."
            ),
        )
        self._session = session
        self._wipes = {each.name: each for each in wipes}
        self._sizes: dict[str, Size] = {}
        self.boxes: dict[str, QCheckBox] = {}
        for each in wipes:
            self.boxes[each.name] = box = QCheckBox(tr("Wipe"))
            box.setAccessibleName(tr("Wipe: {title}", title=each.title))
            box.toggled.connect(self._chosen)
            self.add(Row(each.title, box, each.about))
        self.add(Row(tr("Wipe what is marked"), self._confirmation(), wide=True))
        self._add_backups()
        measure.measured.connect(self._measured)
        self._chosen()

    def _confirmation(self) -> QWidget:
        result = QWidget()
        self.wipe_button = button(tr("Wipe…"))
        self.question = label("", "error")
        self.question.setWordWrap(True)
        self.really = button(tr("Wipe now"), "danger")
        self.keep = button(tr("Keep it"))
        self.wipe_button.clicked.connect(self._ask)
        self.really.clicked.connect(self._wipe)
        self.keep.clicked.connect(self._chosen)
        line = QHBoxLayout()
        line.setSpacing(SPACING)
        for each in (self.wipe_button, self.really, self.keep):
            line.addWidget(each)
        line.addStretch(1)
        column = QVBoxLayout(result)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.question)
        column.addLayout(line)
        return result

    def _add_backups(self) -> None:
        self.backup_button = button(tr("Save a copy…"), "", tr("Save a copy of all chats"))
        self.restore_button = button(tr("Bring back…"), "", tr("Bring back chats from a copy"))
        self.backup_button.clicked.connect(self._ask_backup)
        self.restore_button.clicked.connect(self._ask_restore)
        pair = QWidget()
        line = QHBoxLayout(pair)
        line.setContentsMargins(0, 0, 0, 0)
        line.addWidget(self.backup_button)
        line.addWidget(self.restore_button)
        hint = tr("All chats and presets in one file. Bringing them back keeps the chats there are in a file beside.")
        self.add(Row(tr("Copy of the chats"), pair, hint))

    # Wiping --------------------------------------------------------------------------------------------------------

    def marked(self) -> list[Wipe]:
        return [each for name, each in self._wipes.items() if self.boxes[name].isChecked()]

    def _measured(self, name: str, size: Size) -> None:
        self._sizes[name] = size
        if name in self.boxes:
            wipe, box = self._wipes[name], self.boxes[name]
            box.setText(tr("Wipe {amount}", amount=wipe.amount(size)))
            box.setEnabled(wipe.is_there(size))
            if not box.isEnabled():
                box.setChecked(False)

    def _chosen(self, _on: bool = False) -> None:
        """No question is open; it is asked for what is marked then."""
        self.question.hide()
        self.really.hide()
        self.keep.hide()
        self.wipe_button.show()
        self.wipe_button.setEnabled(bool(self.marked()))

    def _ask(self) -> None:
        amounts = [each.amount(self._sizes.get(each.name, Size(0, 0))) for each in self.marked()]
        self.question.setText(tr("Wipe {what}? This cannot be undone.", what=and_list(amounts)))
        for each in (self.question, self.really, self.keep):
            each.show()
        self.wipe_button.hide()
        self.keep.setFocus()

    def _wipe(self) -> None:
        gone, faults = [], []
        for each in self.marked():
            try:
                each.wipe()
            except (ChatError, OSError) as error:
                faults.append(str(error))
            else:
                gone.append(each.title)
            self.boxes[each.name].setChecked(False)
        self._chosen()
        if faults:
            self.said.emit(" ".join(faults), True)
        else:
            self.said.emit(tr("Wiped: {what}.", what=and_list(gone)), False)
        self.wiped.emit()

    # Copies --------------------------------------------------------------------------------------------------------

    def _ask_backup(self) -> None:
        name = f"batchscope-chats-{datetime.date.today():%Y-%m-%d}{BACKUP_SUFFIX}"
        path, _ = QFileDialog.getSaveFileName(self, tr("Save a copy of all chats"), str(Path.home() / name), _filter())
        if path:
            self.back_up(Path(path))

    def back_up(self, path: Path) -> None:
        try:
            self._session.backup(path)
        except ChatError as error:
            self.said.emit(str(error), True)
        else:
            self.said.emit(tr("All chats are copied to {path}.", path=path), False)

    def _ask_restore(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, tr("Bring back chats from a copy"), str(Path.home()), _filter())
        if path:
            self.bring_back(Path(path))

    def bring_back(self, path: Path) -> None:
        try:
            summary = self._session.restore_backup(path)
        except ChatError as error:
            self.said.emit(str(error), True)
            return
        brought = ntr("{count:,} chat is back", "{count:,} chats are back", summary.conversations)
        self.said.emit(
            tr("{brought}. Those that were here are kept as {path}.", brought=brought, path=summary.kept), False
        )
        self.wiped.emit()


def _filter() -> str:
    return tr("Chats (*{suffix});;All files (*)", suffix=BACKUP_SUFFIX)


def files_amount(size: Size, one: str) -> str:
    """How much of something that lies in files: ``3 recordings (12 MiB)``; ``one``: which of the nouns."""
    nouns = {
        "recording": lambda n: ntr("{count:,} recording", "{count:,} recordings", n),
        "run": lambda n: ntr("{count:,} run", "{count:,} runs", n),
        "log": lambda n: ntr("{count:,} file of logs", "{count:,} files of logs", n),
    }
    return tr("{what} ({size})", what=nouns[one](size.files), size=bytes_label(size.bytes))
