"""The chat list as keys and the pointer work in it."""

from __future__ import annotations

from PySide6.QtCore import (
    QEvent,
    QItemSelection,
    QItemSelectionModel,
    QItemSelectionRange,
    QModelIndex,
    QPoint,
    QRect,
    QSize,
    Qt,
    Signal,
)
from PySide6.QtGui import QContextMenuEvent, QDrag, QKeyEvent, QMouseEvent, QPainter, QPixmap
from PySide6.QtWidgets import QAbstractItemView, QFrame, QHeaderView, QTableView, QWidget

from app.chat.chat_list_delegate import MARGIN, ChatDelegate
from app.chat.chat_list_model import ChatListModel, chat_words
from app.chat.chat_list_rows import Section, runs
from app.theme import Theme

ROW_PADDING = 13
DRAG_PIXELS = 200
"""Most of a title that hangs at the pointer."""


class ChatView(QTableView):
    """Selecting more than one row opens none; a click, Enter, or rest on a row opens it."""

    opened = Signal(QModelIndex, bool)
    """A chat to show; True: and to go on in it."""
    toggled = Signal(Section, bool)
    """A folder, and whether it shall be folded away."""
    walked = Signal()
    """Keys have gone to another row."""
    key_pressed = Signal(QKeyEvent)
    """A key that means nothing to a list of rows; whoever takes it accepts it."""
    menu_wanted = Signal(QModelIndex, QPoint)
    """The row, if any, and the place on the screen."""

    def __init__(self, model: ChatListModel, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._model = model
        self.setModel(model)
        self.setItemDelegate(ChatDelegate(model, theme, self))
        self.setFrameShape(QFrame.Shape.NoFrame)
        self.setShowGrid(False)
        self.setStyleSheet("QTableView { background: transparent; }")
        self.setTabKeyNavigation(False)
        self.setMouseTracking(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QAbstractItemView.ScrollMode.ScrollPerPixel)
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.EditKeyPressed)
        self.setDragDropMode(QAbstractItemView.DragDropMode.DragDrop)
        self.setDefaultDropAction(Qt.DropAction.MoveAction)
        self.setDragDropOverwriteMode(True)
        self.horizontalHeader().hide()
        self.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Stretch)
        self.horizontalHeader().setMinimumSectionSize(20)
        self.verticalHeader().hide()
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.fit_rows()

    def fit_rows(self) -> None:
        """One line a row, two while the list shows what a search found."""
        lines = 1 if self._model.listing.hits is None else 2
        height = lines * self.fontMetrics().height() + ROW_PADDING
        header = self.verticalHeader()
        if header.defaultSectionSize() != height:
            header.setMinimumSectionSize(height)
            header.setDefaultSectionSize(height)

    def chosen_ids(self) -> list[str]:
        """The selected chats, from top to bottom."""
        spans = sorted((span.top(), span.bottom() + 1) for span in self.selectionModel().selection())
        rows = (row for first, end in spans for row in self._model.rows[first:end])
        return [row for row in rows if isinstance(row, str)]

    def select(self, ids: list[str], current: QModelIndex) -> None:
        """Selects chats by what they are, after their rows have moved."""
        flag, selection, model = QItemSelectionModel.SelectionFlag, self.selectionModel(), self._model
        if self.chosen_ids() != ids:
            wanted, chosen = set(ids), QItemSelection()
            places = [place for place, row in enumerate(model.rows) if row in wanted]
            for first, count in runs(places):
                chosen.append(QItemSelectionRange(model.index(first, 0), model.index(first + count - 1, 0)))
            selection.select(chosen, flag.ClearAndSelect)
        if current.isValid() and current != self.currentIndex():
            selection.setCurrentIndex(current, flag.NoUpdate)

    # Keys and the pointer --------------------------------------------------------------------------------------------

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() in (QEvent.Type.FontChange, QEvent.Type.StyleChange):
            self.fit_rows()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        index, key = self.currentIndex(), event.key()
        row = self._model.row(index)
        enter = key in (Qt.Key.Key_Return, Qt.Key.Key_Enter)
        if self.state() == QAbstractItemView.State.EditingState:
            super().keyPressEvent(event)
        elif isinstance(row, Section) and (enter or key in (Qt.Key.Key_Space, Qt.Key.Key_Left, Qt.Key.Key_Right)):
            folded = row.name in self._model.collapsed
            want = {Qt.Key.Key_Left: True, Qt.Key.Key_Right: False}.get(Qt.Key(key), not folded)
            if want != folded:
                self.toggled.emit(row, want)
        elif isinstance(row, str) and enter:
            self.opened.emit(index, True)
        elif isinstance(row, str) and key == Qt.Key.Key_Left:
            self._go_to_folder(index)
        else:
            event.ignore()
            self.key_pressed.emit(event)
            if not event.isAccepted():
                super().keyPressEvent(event)
                if self.currentIndex() != index:
                    self.walked.emit()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        by_key = event.reason() == QContextMenuEvent.Reason.Keyboard
        index = self.currentIndex() if by_key else self.indexAt(event.pos())
        place = self.visualRect(index).bottomLeft() if by_key else event.pos()
        self.menu_wanted.emit(index, self.viewport().mapToGlobal(place))

    def startDrag(self, actions: Qt.DropAction) -> None:
        """Qt's own would empty the rows that were moved: here the model moves them."""
        dragged = [self._model.index(row, 0) for row in self._rows_of(self.chosen_ids())]
        dragged = [each for each in dragged if self._model.flags(each) & Qt.ItemFlag.ItemIsDragEnabled]
        if dragged:
            drag = QDrag(self)
            drag.setMimeData(self._model.mimeData(dragged))
            words = dragged[0].data() if len(dragged) == 1 else chat_words(len(dragged))
            drag.setPixmap(self._pixmap_of(words))
            drag.exec(Qt.DropAction.MoveAction)

    def _rows_of(self, ids: list[str]) -> list[int]:
        return [self._model.place_of(each).row() for each in ids]

    def _pixmap_of(self, words: str) -> QPixmap:
        """What hangs at the pointer."""
        words = self.fontMetrics().elidedText(words, Qt.TextElideMode.ElideRight, DRAG_PIXELS)
        size = QSize(self.fontMetrics().horizontalAdvance(words) + 2 * MARGIN, self.fontMetrics().height() + MARGIN)
        pixmap = QPixmap(size * self.devicePixelRatioF())
        pixmap.setDevicePixelRatio(self.devicePixelRatioF())
        pixmap.fill(self.palette().highlight().color())
        painter = QPainter(pixmap)
        painter.setFont(self.font())
        painter.setPen(self.palette().text().color())
        painter.drawText(QRect(QPoint(0, 0), size), Qt.AlignmentFlag.AlignCenter, words)
        painter.end()
        return pixmap

    def _go_to_folder(self, index: QModelIndex) -> None:
        section = self._model.section_at(index)
        if section is not None and section.kind == "folder":
            self.setCurrentIndex(self._model.place_of(section))

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        pressed = self.currentIndex()
        plain = event.modifiers() == Qt.KeyboardModifier.NoModifier and event.button() == Qt.MouseButton.LeftButton
        dragging = self.state() in (
            QAbstractItemView.State.DraggingState,
            QAbstractItemView.State.DragSelectingState,
        )
        super().mouseReleaseEvent(event)
        index = self.indexAt(event.position().toPoint())
        if not plain or dragging or not index.isValid() or index != pressed:
            return
        row = self._model.row(index)
        if isinstance(row, Section):
            self.toggled.emit(row, row.name not in self._model.collapsed)
        elif row is not None:
            self.opened.emit(index, False)

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        index = self.indexAt(event.position().toPoint())
        if isinstance(self._model.row(index), str) and self._model.flags(index) & Qt.ItemFlag.ItemIsEditable:
            self.edit(index)
        else:
            super().mouseDoubleClickEvent(event)
