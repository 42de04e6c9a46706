"""A column that scrolls up and down and is never cut off at the side."""

from __future__ import annotations

from PySide6.QtCore import QEvent, QObject, QPoint, QSize, Qt
from PySide6.QtWidgets import QApplication, QScrollArea, QSizePolicy, QStyle, QWidget


class ScrollColumn(QScrollArea):
    """As wide as its content needs at least, and by itself as high as all of it."""

    def __init__(self, content: QWidget, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # a stop of the Tab key that nobody could see
        self.setSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Preferred)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setWidget(content)
        content.setAutoFillBackground(False)
        self.viewport().setAutoFillBackground(False)

    def minimumSizeHint(self) -> QSize:
        bar = self.style().pixelMetric(QStyle.PixelMetric.PM_ScrollBarExtent, None, self.verticalScrollBar())
        return QSize(self.widget().minimumSizeHint().width() + bar, super().minimumSizeHint().height())

    def sizeHint(self) -> QSize:
        return self.widget().sizeHint().expandedTo(self.minimumSizeHint())

    def reveal(self, widget: QWidget) -> None:
        """Scrolls as far as a part of the content needs, also one that has only now been shown."""
        self._lay_out_now()
        self.ensureWidgetVisible(widget, 0, 0)

    def show_from(self, widget: QWidget) -> None:
        """Scrolls to where a part of the content begins, also one that has only now been shown."""
        self._lay_out_now()
        self.verticalScrollBar().setValue(widget.mapTo(self.widget(), QPoint(0, 0)).y())

    def _lay_out_now(self) -> None:
        for each in (self.widget(), self.viewport(), self):
            QApplication.sendPostedEvents(each, QEvent.Type.LayoutRequest)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """What the content needs changes with what it shows; a scroll area alone does not tell its layout."""
        if watched is self.widget() and event.type() == QEvent.Type.LayoutRequest:
            self.updateGeometry()
        return super().eventFilter(watched, event)
