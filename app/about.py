"""What this program is, what it is made of, and under which licences; the licences themselves can be read."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib import metadata

from PySide6.QtCore import Qt, qVersion
from PySide6.QtGui import QFontDatabase, QGuiApplication
from PySide6.QtWidgets import (
    QAbstractItemView,
    QDialog,
    QHBoxLayout,
    QHeaderView,
    QLabel,
    QPlainTextEdit,
    QSplitter,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from app.icons import window_icon
from app.theme import SPACING
from app.translation import tr
from app.widgets import button, label
from engine.environment import PACKAGE_ROOT, requirements, version

ICON_PX = 64
_LICENCE_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE")


@dataclass(frozen=True, slots=True)
class Component:
    name: str
    version: str
    licence: str
    text: str
    """The licence itself; empty where the package brings none."""


def components() -> list[Component]:
    """Batchscope, the starter model, Python, and every package that is asked for and installed."""
    own = _own_licence()
    found = [
        Component("Batchscope", version(), "Apache-2.0", own),
        Component(tr("Starter model: SmolLM2-135M-Instruct"), "", "Apache-2.0", own),
        Component("Python", platform.python_version(), "PSF-2.0", _python_licence()),
    ]
    packages = [_component(name) for name in _required()]
    return found + sorted((each for each in packages if each is not None), key=lambda each: each.name.casefold())


def _required() -> list[str]:
    names = []
    for requirement in requirements():
        name = requirement.split(";")[0].split("[")[0].strip()
        for mark in "<>=!~ (":
            name = name.split(mark)[0]
        names.append(name)
    return names


def _component(name: str) -> Component | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    facts = found.metadata
    licence = facts.get("License-Expression") or _of_classifiers(facts.get_all("Classifier") or [])
    licence = licence or (facts.get("License") or "").strip().splitlines()[:1]
    texts = []
    for file in found.files or []:
        if file.name.upper().startswith(_LICENCE_NAMES) and ".dist-info" in str(file):
            try:
                texts.append(file.locate().read_text(encoding="utf-8", errors="replace"))
            except OSError:
                continue
    shown = licence if isinstance(licence, str) else "".join(licence)
    return Component(facts["Name"], found.version, shown or tr("see its text"), "\n\n".join(texts))


def _of_classifiers(classifiers: list[str]) -> str:
    licences = [each.rsplit("::", 1)[-1].strip() for each in classifiers if each.startswith("License ::")]
    return ", ".join(each for each in licences if each != "OSI Approved")


def _own_licence() -> str:
    """Beside the packages where they are run from their folder, else among the installed metadata."""
    path = PACKAGE_ROOT / "LICENSE"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    own = _component("batchscope")
    return own.text if own is not None else ""


def _python_licence() -> str:
    import builtins

    printer = getattr(builtins, "license", None)  # site's; it reads the text from beside the standard library
    if printer is None:
        return ""
    printer._Printer__setup()
    return "\n".join(printer._Printer__lines)


class AboutDialog(QDialog):
    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("About Batchscope"))
        self.resize(760, 560)
        self.components = components()
        icon = QLabel()
        icon.setPixmap(window_icon().pixmap(ICON_PX, ICON_PX))
        icon.setAccessibleName(tr("The icon of Batchscope"))
        words = label(
            tr(
                "A language-model engine with continuous batching, and a window on every decision of its scheduler.\n"
                "Version {version} · Python {python} · Qt {qt}",
                version=version(),
                python=platform.python_version(),
                qt=qVersion(),
            ),
            "muted",
        )
        words.setWordWrap(True)
        words.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        heading = QVBoxLayout()
        heading.addWidget(label("Batchscope", "heading"))
        heading.addWidget(words)
        top = QHBoxLayout()
        top.setSpacing(SPACING * 2)
        top.addWidget(icon)
        top.addLayout(heading, 1)
        self.table = self._table()
        self.text = QPlainTextEdit()
        self.text.setReadOnly(True)
        self.text.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self.text.setAccessibleName(tr("Text of the licence"))
        both = QSplitter(Qt.Orientation.Vertical)
        both.addWidget(self.table)
        both.addWidget(self.text)
        both.setSizes([260, 200])
        copy = button(tr("Copy versions"))
        copy.clicked.connect(lambda: QGuiApplication.clipboard().setText(self.versions()))
        close = button(tr("Close"), "primary")
        close.clicked.connect(self.reject)
        line = QHBoxLayout()
        line.addWidget(copy)
        line.addStretch(1)
        line.addWidget(close)
        column = QVBoxLayout(self)
        column.setSpacing(SPACING)
        column.addLayout(top)
        column.addWidget(both, 1)
        column.addLayout(line)
        self.table.currentCellChanged.connect(lambda row, *_: self._show(row))
        self.table.selectRow(0)
        close.setFocus()

    def _table(self) -> QTableWidget:
        table = QTableWidget(len(self.components), 3)
        table.setHorizontalHeaderLabels([tr("Made of"), tr("Version"), tr("Licence")])
        table.setAccessibleName(tr("What Batchscope is made of"))
        table.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        table.setSelectionMode(QAbstractItemView.SelectionMode.SingleSelection)
        table.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        table.setTabKeyNavigation(False)
        table.setShowGrid(False)
        table.verticalHeader().hide()
        table.horizontalHeader().setDefaultAlignment(Qt.AlignmentFlag.AlignLeft)
        for row, each in enumerate(self.components):
            for column, text in enumerate((each.name, each.version, each.licence)):
                item = QTableWidgetItem(text)
                item.setToolTip(text)
                table.setItem(row, column, item)
        header = table.horizontalHeader()
        for column, mode in enumerate(
            (
                QHeaderView.ResizeMode.ResizeToContents,
                QHeaderView.ResizeMode.ResizeToContents,
                QHeaderView.ResizeMode.Stretch,
            )
        ):
            header.setSectionResizeMode(column, mode)
        return table

    def _show(self, row: int) -> None:
        component = self.components[row]
        nothing = tr(
            "{name} brings no text of its licence ({licence}).", name=component.name, licence=component.licence
        )
        self.text.setPlainText(component.text or nothing)

    def versions(self) -> str:
        """One line a part, for a bug report."""
        return "\n".join(f"{each.name} {each.version}".rstrip() for each in self.components)
