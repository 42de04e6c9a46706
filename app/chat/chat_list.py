"""The list of conversations: search, new, rename, delete, and a dot in the request's hue on each that is answering."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QSize, Qt, QTimer, Signal
from PySide6.QtGui import QColor, QIcon, QKeyEvent, QKeySequence, QPainter, QPixmap
from PySide6.QtWidgets import QLineEdit, QListWidget, QListWidgetItem, QMenu, QWidget

from app.chat.conversation import Conversation
from app.chat.message_views import flat_button
from app.chat.session import ChatSession
from app.chat.text_pane import plain_tip
from app.theme import SPACING, Theme, request_color
from app.widgets import Card, button, label
from engine.request import request_name

UNTITLED = "New chat"
SEARCH_MS = 150
DOT_PX = 9
_ID = Qt.ItemDataRole.UserRole


class _List(QListWidget):
    delete_pressed = Signal()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Delete:
            self.delete_pressed.emit()
        else:
            super().keyPressEvent(event)


class ChatList(Card):
    chosen = Signal(str)
    """Id of the conversation to show."""
    new_clicked = Signal()
    delete_clicked = Signal(str)

    def __init__(self, session: ChatSession, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__("Chats", parent=parent)
        self._session = session
        self._theme = theme
        self._filling = False
        self._current = ""
        self.menu_button = flat_button("⋯", "Rename or delete this chat")
        self.menu_button.setMaximumHeight(26)
        self.menu_button.clicked.connect(self._menu_of_current)
        self.add_trailing(self.menu_button)
        self.search = QLineEdit()
        keys = QKeySequence("Ctrl+K").toString(QKeySequence.SequenceFormat.NativeText)
        self.search.setPlaceholderText(f"Search   {keys}")
        self.search.setAccessibleName("Search chats")
        self.search.setClearButtonEnabled(True)
        self.search.textChanged.connect(self._search_soon)
        self.search.returnPressed.connect(self._open_first)
        self.list = _List()
        self.list.setAccessibleName("Chats")
        self.list.setIconSize(QSize(DOT_PX, DOT_PX))
        self.list.setTextElideMode(Qt.TextElideMode.ElideRight)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.list.setEditTriggers(QListWidget.EditTrigger.EditKeyPressed | QListWidget.EditTrigger.DoubleClicked)
        self.list.setStyleSheet("QListWidget::item { padding: 6px 8px; border-radius: 6px; margin: 1px 0; }")
        self.list.customContextMenuRequested.connect(self._menu)
        self.list.currentItemChanged.connect(self._current_changed)
        self.list.itemChanged.connect(self._renamed)
        self.list.delete_pressed.connect(lambda: self._delete(self.list.currentItem()))
        self.nothing = label("", "muted")
        self.nothing.setWordWrap(True)
        self.new_button = button("+   New chat", accessible="New chat")
        self.new_button.clicked.connect(self.new_clicked)
        self.body.setSpacing(SPACING)
        for widget in (self.search, self.nothing):
            self.body.addWidget(widget)
        self.body.addWidget(self.list, 1)
        self.body.addWidget(self.new_button)
        self._search_timer = QTimer(self)
        self._search_timer.setSingleShot(True)
        self._search_timer.timeout.connect(self.refresh)
        self.setMinimumWidth(150)
        session.listed.connect(self.refresh)
        theme.changed.connect(self.refresh)
        self.refresh()

    # Content ---------------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Shows what the session holds, filtered by the search."""
        self._search_timer.stop()
        needle = self.search.text()
        found = [each.conversation for each in self._session.search(needle)]
        self._filling = True
        if [item.data(_ID) for item in self._items()] != [each.id for each in found]:
            self.list.clear()
            for each in found:
                item = QListWidgetItem()
                item.setData(_ID, each.id)
                self.list.addItem(item)
        for item, conversation in zip(self._items(), found, strict=True):
            self._dress(item, conversation)
        self.nothing.setText(f"No chat holds “{needle.strip()}”." if needle.strip() and not found else "")
        self.nothing.setVisible(bool(self.nothing.text()))
        self._mark_current()
        self._filling = False

    def set_current(self, conversation_id: str) -> None:
        self._current = conversation_id
        self._filling = True
        self._mark_current()
        self._filling = False

    def focus_search(self) -> None:
        self.search.setFocus(Qt.FocusReason.ShortcutFocusReason)
        self.search.selectAll()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() == Qt.Key.Key_Escape and self.search.text():
            self.search.clear()
        elif event.key() == Qt.Key.Key_Down and self.search.hasFocus():
            self.list.setFocus(Qt.FocusReason.ShortcutFocusReason)
        else:
            super().keyPressEvent(event)

    def _items(self) -> list[QListWidgetItem]:
        return [self.list.item(row) for row in range(self.list.count())]

    def _dress(self, item: QListWidgetItem, conversation: Conversation) -> None:
        title = conversation.title or UNTITLED
        if item.text() != title:
            item.setText(title)
        answer = conversation.open_answer
        flags = Qt.ItemFlag.ItemIsEnabled | Qt.ItemFlag.ItemIsSelectable
        if conversation.damage:
            item.setIcon(_warning(self._theme.error))
            tip = f"Part of this chat could not be read: {conversation.damage} It is kept as it is."
        elif answer is not None:
            waiting = answer.request_id is None
            item.setIcon(_dot(self._theme.muted if waiting else request_color(answer.request_id, self._theme)))
            doing = "waits for the model" if waiting else f"request {request_name(answer.request_id)} is answering"
            tip = f"{title}\n{doing}"
        else:
            item.setIcon(QIcon())
            tip = title
        item.setToolTip(plain_tip(tip))
        item.setFlags(flags if conversation.damage else flags | Qt.ItemFlag.ItemIsEditable)

    def _mark_current(self) -> None:
        for item in self._items():
            if item.data(_ID) == self._current:
                self.list.setCurrentItem(item)
                return
        self.list.setCurrentItem(None)

    # What the user does ----------------------------------------------------------------------------------------------

    def _search_soon(self) -> None:
        self._search_timer.start(SEARCH_MS)

    def _open_first(self) -> None:
        """Enter in the search opens the first chat that it found."""
        self.refresh()
        if self.search.text().strip() and self.list.count():
            self.list.setCurrentRow(0)

    def _current_changed(self, item: QListWidgetItem | None) -> None:
        if item is not None and not self._filling:
            self._current = item.data(_ID)
            self.chosen.emit(self._current)

    def _renamed(self, item: QListWidgetItem) -> None:
        if self._filling:
            return
        conversation = self._session.conversations.get(item.data(_ID))
        if conversation is not None:
            self._session.rename(conversation, item.text())
            self.refresh()

    def _menu_of_current(self) -> None:
        item = self.list.currentItem()
        if item is not None:
            self._open_menu(item, self.menu_button.mapToGlobal(QPoint(0, self.menu_button.height())))

    def _menu(self, position: QPoint) -> None:
        item = self.list.itemAt(position)
        if item is not None:
            self._open_menu(item, self.list.viewport().mapToGlobal(position))

    def _open_menu(self, item: QListWidgetItem, position: QPoint) -> None:
        menu = QMenu(self)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        # By id: the items are others when the list is filled anew under the open menu.
        conversation_id = item.data(_ID)
        rename = menu.addAction("Rename   F2", lambda: self._rename(conversation_id))
        rename.setEnabled(bool(item.flags() & Qt.ItemFlag.ItemIsEditable))
        menu.addAction("Delete   Del", lambda: self.delete_clicked.emit(conversation_id))
        menu.popup(position)

    def _rename(self, conversation_id: str) -> None:
        for item in self._items():
            if item.data(_ID) == conversation_id:
                self.list.editItem(item)

    def _delete(self, item: QListWidgetItem | None) -> None:
        if item is not None:
            self.delete_clicked.emit(item.data(_ID))


def _dot(color: QColor) -> QIcon:
    return _picture(color, lambda painter: painter.drawEllipse(0, 0, DOT_PX * 4, DOT_PX * 4))


def _warning(color: QColor) -> QIcon:
    size = DOT_PX * 4
    corners = [QPoint(size // 2, 0), QPoint(size, size), QPoint(0, size)]
    return _picture(color, lambda painter: painter.drawPolygon(corners))


def _picture(color: QColor, draw) -> QIcon:
    """Drawn four times as large as shown, so that it is sharp on dense screens too."""
    pixmap = QPixmap(DOT_PX * 4, DOT_PX * 4)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(Qt.PenStyle.NoPen)
    painter.setBrush(color)
    draw(painter)
    painter.end()
    return QIcon(pixmap)
