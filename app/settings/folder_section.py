"""Where models are looked for, and where everything else lies."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QUrl, Signal
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QFileDialog, QHBoxLayout, QWidget

from app.settings.rows import Fields, Row, Section, path_field
from app.settings.storage import Measure, Places, Size
from app.theme import SPACING
from app.translation import mark, ntr, tr
from app.widgets import button
from app.words import bytes_label

_TITLES = {
    "chats": mark("Chats"),
    "recordings": mark("Recordings"),
    "runs": mark("Runs that are kept for looking back"),
    "logs": mark("Logs"),
    "preferences": mark("Preferences"),
    "starter": mark("Starter model"),
    "hub": mark("Hugging Face cache"),
}


def open_folder(path: Path) -> bool:
    """Shows a folder, or the folder that a file lies in, in the desktop's file manager; whether it could be."""
    folder = path if path.is_dir() else path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return QDesktopServices.openUrl(QUrl.fromLocalFile(str(folder)))


class FolderSection(Section):
    problem = Signal(str)

    def __init__(self, fields: Fields, places: Places, measure: Measure) -> None:
        super().__init__(tr("Folders"))
        self._fields = fields
        self._places = places
        self._model_rows: dict[str, Row] = {}
        self.add_button = button(tr("Add a folder with models…"))
        self.add_button.clicked.connect(self._ask)
        self.add(
            Row(
                tr("Model folders"),
                _left(self.add_button),
                tr("Models are looked for in these folders and in the Hugging Face cache."),
                wide=True,
            )
        )
        self._first_model_row = self.body.count()
        self.place_rows: dict[str, Row] = {}
        for name, path in places.paths().items():
            row = Row(tr(_TITLES[name]), self._line(path), wide=True)
            self.place_rows[name] = self.add(row)
        measure.measured.connect(self._measured)
        fields.follow(self._show_model_folders)

    def _line(self, path: Path, *more: QWidget) -> QWidget:
        result = QWidget()
        row = QHBoxLayout(result)
        row.setContentsMargins(0, 0, 0, 0)
        row.setSpacing(SPACING)
        row.addWidget(path_field(path), 1)
        opening = button(tr("Open"), "", tr("Open {path}", path=path))
        opening.clicked.connect(lambda: self._open(path))
        for each in (opening, *more):
            row.addWidget(each)
        result.setAccessibleName(str(path))
        return result

    def _open(self, path: Path) -> None:
        if not open_folder(path):
            self.problem.emit(tr("This desktop has no program that shows folders; the folder is {path}.", path=path))

    def _measured(self, name: str, size: Size) -> None:
        if name in self.place_rows:
            words = ntr("{count:,} file, {size}", "{count:,} files, {size}", size.files, size=bytes_label(size.bytes))
            self.place_rows[name].explain(words if size.files else tr("nothing yet"))

    # Model folders -------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        folder = QFileDialog.getExistingDirectory(self, tr("Choose a folder with models"))
        if folder:
            self.add_folder(folder)

    def add_folder(self, folder: str) -> None:
        folders = self._fields.store.values.model_folders
        if folder not in folders:
            self._fields.store.change(model_folders=(*folders, folder))

    def remove_folder(self, folder: str) -> None:
        """Out of the list; on the disk it stays."""
        left = tuple(each for each in self._fields.store.values.model_folders if each != folder)
        self._fields.store.change(model_folders=left)

    def _show_model_folders(self) -> None:
        folders = self._fields.store.values.model_folders
        for folder in [each for each in self._model_rows if each not in folders]:
            row = self._model_rows.pop(folder)
            self.rows.remove(row)
            row.hide()
            row.deleteLater()
        for folder in folders:
            if folder not in self._model_rows:
                self._model_rows[folder] = self._model_row(folder)
        for folder, row in self._model_rows.items():
            row.say("" if Path(folder).is_dir() else tr("This folder is not there."))

    def _model_row(self, folder: str) -> Row:
        remove = button(tr("Remove"), "", tr("Remove {path} from the list", path=folder))
        remove.setToolTip(tr("Takes the folder out of the list; on the disk it stays"))
        remove.clicked.connect(lambda: self.remove_folder(folder))
        row = Row(tr("Model folder"), self._line(Path(folder), remove), wide=True)
        row.name.hide()
        self.rows.append(row)
        self.body.insertWidget(self._first_model_row + len(self._model_rows), row)
        return row

    def entered(self) -> None:
        self._show_model_folders()


def _left(widget: QWidget) -> QWidget:
    result = QWidget()
    row = QHBoxLayout(result)
    row.setContentsMargins(0, 0, 0, 0)
    row.addWidget(widget)
    row.addStretch(1)
    return result
