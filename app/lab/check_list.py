"""Names to tick, side by side as far as there is room."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QSize, Signal
from PySide6.QtGui import QPalette, QResizeEvent
from PySide6.QtWidgets import QCheckBox, QGridLayout, QSizePolicy, QWidget

from app.theme import SPACING, Theme


class CheckList(QWidget):
    """``changed`` whenever one is ticked or not."""

    changed = Signal()

    def __init__(self, name: str, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._theme = theme
        theme.changed.connect(self._show_outlines)
        self.setAccessibleName(name)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Preferred)
        self.boxes: dict[str, QCheckBox] = {}
        self._columns = 0
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(SPACING)
        self._grid.setVerticalSpacing(SPACING // 2)

    def set_names(self, names: Sequence[str], ticked: Sequence[str], tips: Sequence[str] = ()) -> None:
        for box in self.boxes.values():
            self._grid.removeWidget(box)
            box.deleteLater()
        self.boxes = {}
        for index, name in enumerate(names):
            box = QCheckBox(name)
            box.setChecked(name in ticked)
            box.setAccessibleName(f"{self.accessibleName()}: {name}")
            box.setToolTip(tips[index] if tips else "")
            box.toggled.connect(self._toggled)
            self.boxes[name] = box
        self._columns = 0
        self._show_outlines()
        self._lay_out()

    def ticked(self) -> tuple[str, ...]:
        """In the order of the list."""
        return tuple(name for name, box in self.boxes.items() if box.isChecked())

    def tick(self, names: Sequence[str]) -> None:
        for name, box in self.boxes.items():
            box.setChecked(name in names)

    def minimumSizeHint(self) -> QSize:
        """That of one column: more must not force the panel wide."""
        return QSize(self._widest(), super().minimumSizeHint().height())

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._lay_out()

    def _show_outlines(self) -> None:
        """Fusion makes the outline of a box from the window's colour: on a dark card it could not be seen."""
        palette = self.palette()
        palette.setColor(QPalette.ColorRole.Window, self._theme.muted)
        for box in self.boxes.values():
            box.setPalette(palette)

    def _toggled(self, _ticked: bool) -> None:
        self.changed.emit()

    def _widest(self) -> int:
        return max((box.sizeHint().width() for box in self.boxes.values()), default=0)

    def _lay_out(self) -> None:
        columns = max(1, (self.width() + SPACING) // (self._widest() + SPACING))
        columns = min(columns, max(1, len(self.boxes)))
        if columns == self._columns:
            return
        for column in range(self._columns):
            self._grid.setColumnStretch(column, 0)
        self._columns = columns
        for index, box in enumerate(self.boxes.values()):
            self._grid.addWidget(box, index // columns, index % columns)
        for column in range(columns):
            self._grid.setColumnStretch(column, 1)
