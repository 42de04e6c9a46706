"""The log, and a bundle for a bug report: what is in it is shown before it is saved."""

from __future__ import annotations

import datetime
from pathlib import Path

from PySide6.QtCore import QSettings, Qt, Signal
from PySide6.QtGui import QFontDatabase
from PySide6.QtWidgets import (
    QDialog,
    QFileDialog,
    QHBoxLayout,
    QListWidget,
    QListWidgetItem,
    QPlainTextEdit,
    QSplitter,
    QVBoxLayout,
    QWidget,
)

from app.diagnostics import Doctor, Part, collect, save
from app.engine_bridge import EngineBridge
from app.log_file import LogFile
from app.settings.folder_section import open_folder
from app.settings.preferences import PreferenceStore
from app.settings.rows import Row, Section, path_field
from app.theme import SPACING
from app.translation import tr
from app.widgets import button, label
from app.words import bytes_label
from engine.output_files import OutputFailure

MOST_SHOWN = 200_000
"""Characters of a part that are shown."""


class BundleDialog(QDialog):
    """The parts, each with what it is and its text; Save asks where the bundle goes."""

    saved = Signal(str)

    def __init__(self, parts: list[Part], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.parts = parts
        self.setWindowTitle(tr("Diagnostics"))
        self.resize(860, 520)
        about = label(
            tr(
                "This is all that the file will hold. No prompt, answer or title of a chat is in it; home folders and "
                "your name are written as ~."
            )
        )
        about.setWordWrap(True)
        self.list = QListWidget()
        self.list.setAccessibleName(tr("Files of the bundle"))
        self.list.setWordWrap(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setStyleSheet("QListWidget::item { padding: 5px 6px; border-radius: 6px; }")
        for part in parts:
            item = QListWidgetItem(f"{part.name}  ·  {bytes_label(part.size)}\n{part.about}")
            item.setToolTip(part.about)
            self.list.addItem(item)
        self.text = QPlainTextEdit()
        self.text.setReadOnly(True)
        self.text.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.text.setAccessibleName(tr("Text of the file"))
        self.problem = label("", "error")
        self.problem.setWordWrap(True)
        self.problem.hide()
        self.save_button = button(tr("Save…"), "primary", tr("Save the bundle"))
        close = button(tr("Close"))
        self.save_button.clicked.connect(self._ask)
        close.clicked.connect(self.reject)
        self.list.currentRowChanged.connect(self._show)
        parts_and_text = QSplitter(Qt.Orientation.Horizontal)
        parts_and_text.addWidget(self.list)
        parts_and_text.addWidget(self.text)
        parts_and_text.setSizes([300, 540])
        line = QHBoxLayout()
        line.addStretch(1)
        line.addWidget(close)
        line.addWidget(self.save_button)
        column = QVBoxLayout(self)
        column.setSpacing(SPACING)
        column.addWidget(about)
        column.addWidget(parts_and_text, 1)
        column.addWidget(self.problem)
        column.addLayout(line)
        self.list.setCurrentRow(0)

    def _show(self, row: int) -> None:
        text = self.parts[row].text
        more = tr("\n… {count:,} more characters", count=len(text) - MOST_SHOWN) if len(text) > MOST_SHOWN else ""
        self.text.setPlainText(text[:MOST_SHOWN] + more)

    def _ask(self) -> None:
        name = f"batchscope-diagnostics-{datetime.datetime.now():%Y-%m-%d-%H%M}.zip"
        path, _ = QFileDialog.getSaveFileName(
            self, tr("Save the bundle"), str(Path.home() / name), tr("Zip files (*.zip)")
        )
        if path:
            self.save(Path(path))

    def save(self, path: Path) -> None:
        try:
            save(path, self.parts)
        except OutputFailure as failure:
            self.problem.setText(str(failure))
            self.problem.show()
            return
        self.saved.emit(str(path))
        self.accept()


class DiagnosticsSection(Section):
    said = Signal(str, bool)

    def __init__(
        self, log: LogFile | None, store: PreferenceStore, settings: QSettings | None, bridge: EngineBridge
    ) -> None:
        super().__init__(tr("Diagnostics"))
        self._log, self._store, self._settings, self._bridge = log, store, settings, bridge
        self.dialog: BundleDialog | None = None
        self.doctor = Doctor(self)
        self.doctor.answered.connect(self._collected)
        if log is not None:
            self.add(self._log_row(log))
        self.bundle_button = button(tr("Collect…"), "", tr("Collect diagnostics"))
        self.bundle_button.clicked.connect(self._collect)
        hint = tr(
            "A file to attach to a bug report: versions, this machine, settings and the log; no chat is in it. All of "
            "it is shown before it is saved."
        )
        self.bundle_row = self.add(Row(tr("Diagnostics bundle"), self.bundle_button, hint))

    def _log_row(self, log: LogFile) -> Row:
        line = QWidget()
        row = QHBoxLayout(line)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING)
        opening = button(tr("Open"), "", tr("Open the folder of the log"))
        opening.clicked.connect(lambda: open_folder(log.path))
        row.addWidget(path_field(log.path), 1)
        row.addWidget(opening)
        line.setAccessibleName(tr("Log file"))
        hint = tr("Starts, loads, faults; nothing that was said in a chat. At most 3 files of 1 MB.")
        return Row(tr("Log file"), line, hint, wide=True)

    def _collect(self) -> None:
        if self.bundle_button.property("asking"):
            self.stop()
            return
        self.bundle_button.setProperty("asking", True)
        self.bundle_button.setText(tr("Stop"))
        self.bundle_row.say(tr("The doctor looks at this machine: some seconds …"), is_error=False)
        self.doctor.ask()

    def stop(self) -> None:
        self.doctor.cancel()
        self._rest()

    def _rest(self) -> None:
        self.bundle_button.setProperty("asking", False)
        self.bundle_button.setText(tr("Collect…"))
        self.bundle_row.say("")

    def _collected(self, report: str) -> None:
        self._rest()
        parts = collect(report, self._log, self._store.values, self._settings, self._bridge)
        self.dialog = BundleDialog(parts, self.window())
        self.dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.dialog.saved.connect(
            lambda path: self.said.emit(tr("The diagnostics are saved as {path}.", path=path), False)
        )
        self.dialog.open()
