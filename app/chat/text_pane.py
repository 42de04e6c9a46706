"""A piece of text that is as high as it must be, can be selected, and can load nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape
from typing import Any

from PySide6.QtCore import QMimeData, QSize, Qt, QUrl, Signal
from PySide6.QtGui import (
    QDesktopServices,
    QGuiApplication,
    QKeyEvent,
    QKeySequence,
    QMouseEvent,
    QTextCursor,
    QTextDocument,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QMessageBox, QSizePolicy, QTextBrowser, QWidget

from app.chat.markup import COPY_SCHEME, LINK_SCHEMES
from app.chat.pane_area import PaneArea
from app.translation import tr

INDENT_PX = 26
"""Of a list; Qt's own 40 is much for a narrow column."""
_SCROLL_KEYS = (Qt.Key.Key_PageUp, Qt.Key.Key_PageDown, Qt.Key.Key_Home, Qt.Key.Key_End, Qt.Key.Key_Up, Qt.Key.Key_Down)


class SealedDocument(QTextDocument):
    """A document that fetches nothing, whatever its text names."""

    def loadResource(self, kind: int, url: QUrl) -> Any:
        return None


class TextPane(QTextBrowser):
    """Read-only text without frame or scroll bars; its height follows its content and its width."""

    copy_clicked = Signal(str)
    """The address of a code block's copy button, without the scheme."""
    link_clicked = Signal(QUrl)

    def __init__(self, parent: QWidget | None = None, *, color: str = "") -> None:
        """``color``: of the text, where it is not the window's."""
        super().__init__(parent)
        document = SealedDocument(self)
        document.setDocumentMargin(0)
        document.setIndentWidth(INDENT_PX)
        option = document.defaultTextOption()
        option.setWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        document.setDefaultTextOption(option)
        document.setDefaultFont(self.font())
        self.setDocument(document)
        self.setUndoRedoEnabled(False)
        self.setOpenLinks(False)
        self.setFrameShape(QFrame.Shape.NoFrame)
        ink = f"color: {color};" if color else ""
        self.setStyleSheet(f"QTextBrowser {{ background: transparent; border: none; padding: 0; {ink} }}")
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        document.documentLayout().documentSizeChanged.connect(self._fit)
        self.anchorClicked.connect(self._clicked)
        self.highlighted.connect(self._hovered)

    def set_html(self, html: str) -> None:
        """Replaces the text and keeps what the user has selected in it."""
        cursor = self.textCursor()
        anchor, position = cursor.anchor(), cursor.position()
        self.setHtml(html)
        last = self.document().characterCount() - 1
        if anchor != position and max(anchor, position) <= last:
            cursor = self.textCursor()
            cursor.setPosition(anchor)
            cursor.setPosition(position, QTextCursor.MoveMode.KeepAnchor)
            self.setTextCursor(cursor)

    def loadResource(self, kind: int, url: QUrl) -> Any:
        return None

    def createMimeDataFromSelection(self) -> QMimeData:
        """Plain text only: nobody wants this window's colours in a letter."""
        area = self._area()
        data = QMimeData()
        data.setText((area and area.selected_text()) or self.textCursor().selection().toPlainText())
        return data

    def mousePressEvent(self, event: QMouseEvent) -> None:
        area = self._area()
        extends = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
        if area is not None and event.button() == Qt.MouseButton.LeftButton and not extends:
            area.begin_selection()
        super().mousePressEvent(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        area = self._area() if event.buttons() & Qt.MouseButton.LeftButton else None
        if area is None or not area.extend_selection(self, event.globalPosition().toPoint()):
            super().mouseMoveEvent(event)

    def _area(self) -> PaneArea | None:
        """What it is shown in together with others."""
        parent = self.parentWidget()
        while parent is not None and not isinstance(parent, PaneArea):
            parent = parent.parentWidget()
        return parent

    def wheelEvent(self, event: QWheelEvent) -> None:
        event.ignore()  # the transcript scrolls

    def keyPressEvent(self, event: QKeyEvent) -> None:
        alt = event.modifiers() == Qt.KeyboardModifier.AltModifier
        if event.key() in _SCROLL_KEYS or (alt and event.key() in (Qt.Key.Key_Left, Qt.Key.Key_Right)):
            event.ignore()  # the transcript's and the message's
        elif event.matches(QKeySequence.StandardKey.Copy):
            data = self.createMimeDataFromSelection()
            if data.text():
                QGuiApplication.clipboard().setMimeData(data)
        else:
            super().keyPressEvent(event)

    def minimumSizeHint(self) -> QSize:
        return QSize(40, 0)

    def _fit(self) -> None:
        self.setFixedHeight(max(1, math.ceil(self.document().size().height())))

    def _clicked(self, url: QUrl) -> None:
        if url.scheme() == COPY_SCHEME:
            self.copy_clicked.emit(url.path())
        elif url.scheme() in LINK_SCHEMES:
            self.link_clicked.emit(url)

    def _hovered(self, url: QUrl) -> None:
        shown = url.toString(QUrl.ComponentFormattingOption.FullyEncoded)
        self.setToolTip(plain_tip(shown) if url.scheme() in LINK_SCHEMES else "")


def plain_tip(text: str) -> str:
    """A tool tip that shows ``text`` as it is; left to itself Qt guesses whether it is markup, and obeys it."""
    return f"<span>{escape(text).replace(chr(10), '<br>')}</span>"


def ask_to_open(parent: QWidget, url: QUrl, opener: Callable[[QUrl], Any] = QDesktopServices.openUrl) -> QMessageBox:
    """Shows where a link leads and opens it only when told to. Returns the dialog, which does not block."""
    address = url.toString(QUrl.ComponentFormattingOption.FullyEncoded)
    box = QMessageBox(parent)
    box.setWindowTitle(tr("Open a link"))
    box.setTextFormat(Qt.TextFormat.PlainText)
    box.setText(tr("This link was written by the model. Open it in your browser?"))
    box.setInformativeText(address)
    box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
    open_button = box.addButton(tr("Open"), QMessageBox.ButtonRole.AcceptRole)
    copy_button = box.addButton(tr("Copy address"), QMessageBox.ButtonRole.ActionRole)
    cancel = box.addButton(QMessageBox.StandardButton.Cancel)
    box.setDefaultButton(cancel)
    open_button.clicked.connect(lambda: opener(url))
    copy_button.clicked.connect(lambda: QGuiApplication.clipboard().setText(address))
    box.open()
    return box
