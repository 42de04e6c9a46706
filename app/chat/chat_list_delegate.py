"""How the rows of the chat list are drawn: headings, chats with what they do, and what a search found in them."""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QPointF, QRect, Qt
from PySide6.QtGui import QFont, QFontMetrics, QPainter, QPen, QPolygonF
from PySide6.QtWidgets import QLineEdit, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from app.chat.chat_list_model import ROW, ChatListModel, priority_words, section_words, title_words
from app.chat.chat_list_rows import Section
from app.chat.conversation import Conversation, MessageStatus
from app.chat.search import HIT_BEGINS, HIT_ENDS, Found
from app.theme import Theme, readable, request_color
from app.translation import ntr, tr

MARGIN = 8
DOT = 9
GAP = 6
BAR = 3
INDENT = 8
"""Of the chats in a folder."""
BEFORE_HIT = 0.4
"""Share of a snippet's line that the words before what was found may take."""
_MIDDLE = Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft


class ChatDelegate(QStyledItemDelegate):
    def __init__(self, model: ChatListModel, theme: Theme, parent: QWidget) -> None:
        super().__init__(parent)
        self._model = model
        self._theme = theme

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: QModelIndex) -> None:
        row = index.data(ROW)
        painter.save()
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setFont(option.font)
        if isinstance(row, Section):
            self._paint_section(painter, option, row)
        else:
            conversation = self._model.conversation(index)
            if conversation is not None:
                self._paint_chat(painter, option, conversation)
        painter.restore()

    # Headings --------------------------------------------------------------------------------------------------------

    def _paint_section(self, painter: QPainter, option: QStyleOptionViewItem, section: Section) -> None:
        theme, rect = self._theme, option.rect
        if option.state & QStyle.StateFlag.State_HasFocus:
            self._surface(painter, rect, option)
        font = QFont(option.font)
        font.setBold(True)
        font.setPixelSize(max(9, option.fontMetrics.height() * 11 // 17))
        painter.setFont(font)
        painter.setPen(theme.muted)
        metrics = QFontMetrics(font)
        left, right = rect.left() + MARGIN, rect.right() - MARGIN
        if section.kind == "folder":
            self._paint_triangle(painter, left + 4, rect.center().y(), section.name in self._model.collapsed)
            left += 14
            count = f"{self._model.listing.counts.get(section, 0):,}"
            width = metrics.horizontalAdvance(count)
            painter.drawText(QRect(right - width, rect.top(), width + 1, rect.height()), _MIDDLE, count)
            right -= width + GAP
        words = metrics.elidedText(section_words(section), Qt.TextElideMode.ElideRight, right - left)
        # Words of days stand nearer to the rows that they head than to those before.
        drop = 0 if section.kind == "folder" else 3
        painter.drawText(QRect(left, rect.top() + drop, right - left, rect.height() - drop), _MIDDLE, words)

    def _paint_triangle(self, painter: QPainter, x: float, y: float, collapsed: bool) -> None:
        corners = [(-2, -4), (3, 0), (-2, 4)] if collapsed else [(-4, -2), (4, -2), (0, 3)]
        painter.save()
        painter.setBrush(self._theme.muted)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.drawPolygon(QPolygonF([QPointF(x + dx, y + dy + 0.5) for dx, dy in corners]))
        painter.restore()

    # Chats -----------------------------------------------------------------------------------------------------------

    def _paint_chat(self, painter: QPainter, option: QStyleOptionViewItem, conversation: Conversation) -> None:
        theme, rect = self._theme, option.rect
        self._surface(painter, rect, option)
        if conversation.id == self._model.open_id:
            painter.setPen(Qt.PenStyle.NoPen)
            painter.setBrush(theme.accent)
            painter.drawRoundedRect(QRect(rect.left(), rect.top() + 6, BAR, rect.height() - 12), 1.5, 1.5)
        hit = (self._model.listing.hits or {}).get(conversation.id)
        line = QRect(rect)
        if hit is not None:
            line.setHeight(rect.height() // 2 + 2)
        right = self._paint_marks(painter, option, line, conversation, hit)
        inside = hit is None and conversation.folder and not conversation.pinned
        room = line.adjusted(MARGIN + (INDENT if inside else 0), 0, right - line.right(), 0)
        named = bool(conversation.title)
        painter.setPen(theme.text if named or conversation.draft.strip() else theme.muted)
        font = QFont(option.font)
        font.setItalic(not named)
        painter.setFont(font)
        words = QFontMetrics(font).elidedText(title_words(conversation), Qt.TextElideMode.ElideRight, room.width())
        painter.drawText(room, _MIDDLE, words)
        painter.setFont(option.font)
        if hit is not None:
            below = QRect(rect.left() + MARGIN, line.bottom() - 4, rect.width() - 2 * MARGIN, rect.height() // 2)
            self._paint_snippet(painter, option, below, hit.snippet)

    def _surface(self, painter: QPainter, rect: QRect, option: QStyleOptionViewItem) -> None:
        state, theme = option.state, self._theme
        painter.fillRect(rect, theme.card)  # the table's own selection would stand out behind the round corners
        painter.setPen(Qt.PenStyle.NoPen)
        if state & QStyle.StateFlag.State_Selected:
            painter.setBrush(theme.selection)
        elif state & QStyle.StateFlag.State_MouseOver:
            painter.setBrush(theme.raised)
        else:
            painter.setBrush(Qt.BrushStyle.NoBrush)
        if state & QStyle.StateFlag.State_HasFocus:
            painter.setPen(QPen(theme.accent, 1))
        painter.drawRoundedRect(rect.toRectF().adjusted(0.5, 1.5, -0.5, -1.5), 6, 6)

    def _paint_marks(
        self,
        painter: QPainter,
        option: QStyleOptionViewItem,
        line: QRect,
        conversation: Conversation,
        hit: Found | None,
    ) -> int:
        """What stands at the right end of a chat's line; returns where it begins."""
        theme, right = self._theme, line.right() - MARGIN
        answer = conversation.open_answer
        if answer is not None or conversation.damage:
            painter.setPen(Qt.PenStyle.NoPen)
            mark = QRect(right - DOT, line.center().y() - DOT // 2, DOT, DOT)
            if conversation.damage:
                painter.setBrush(theme.error)
                top = QPointF(mark.center().x() + 0.5, mark.top())
                painter.drawPolygon(QPolygonF([top, mark.bottomRight().toPointF(), mark.bottomLeft().toPointF()]))
            else:
                waits = answer.request_id is None or answer.status is MessageStatus.QUEUED
                painter.setBrush(theme.muted if waits else request_color(answer.request_id, theme))
                painter.drawEllipse(mark)
            right = mark.left() - GAP
        words = []
        if hit is not None and hit.messages > 1:
            words.append(ntr("{count:,} message", "{count:,} messages", hit.messages))
        if answer is not None or conversation.priority:
            words.append(priority_words(conversation.priority))
        painter.setPen(readable(theme.muted, theme, theme.selection))
        for each in reversed(words):
            width = option.fontMetrics.horizontalAdvance(each)
            if line.width() - (line.right() - right) - width < line.width() // 3:
                break  # the title is worth more; the tool tip has it all
            painter.drawText(QRect(right - width, line.top(), width + 1, line.height()), _MIDDLE, each)
            right -= width + GAP
        return right

    def _paint_snippet(self, painter: QPainter, option: QStyleOptionViewItem, room: QRect, snippet: str) -> None:
        """One line of the text around what was found, which is never cut away."""
        theme, metrics = self._theme, option.fontMetrics
        bold = QFont(option.font)
        bold.setBold(True)
        before, found, rest = _parts(snippet)
        most = int(room.width() * BEFORE_HIT) if found else room.width()
        before = metrics.elidedText(before, Qt.TextElideMode.ElideLeft if found else Qt.TextElideMode.ElideRight, most)
        muted, x = readable(theme.muted, theme, theme.selection), room.left()
        for words, font, color in ((before, option.font, muted), (found, bold, theme.text), (rest, option.font, muted)):
            left = room.right() - x
            if not words or left <= 0:
                continue
            painter.setFont(font)
            painter.setPen(color)
            fitted = QFontMetrics(font)
            words = fitted.elidedText(words, Qt.TextElideMode.ElideRight, left)
            painter.drawText(QRect(x, room.top(), left, room.height()), _MIDDLE, words)
            x += fitted.horizontalAdvance(words)

    # Renaming --------------------------------------------------------------------------------------------------------

    def createEditor(self, parent: QWidget, option: QStyleOptionViewItem, index: QModelIndex) -> QWidget:
        editor = QLineEdit(parent)
        editor.setAccessibleName(tr("Name"))
        editor.setPlaceholderText(index.data())
        editor.setStyleSheet("padding: 0 4px;")
        return editor

    def setEditorData(self, editor: QWidget, index: QModelIndex) -> None:
        """Once: rows are told to be others while answers end, and what is being written stays."""
        if isinstance(editor, QLineEdit) and not editor.isModified():
            super().setEditorData(editor, index)

    def updateEditorGeometry(self, editor: QWidget, option: QStyleOptionViewItem, index: QModelIndex) -> None:
        editor.setGeometry(option.rect.adjusted(2, 2, -2, -2))


def _parts(snippet: str) -> tuple[str, str, str]:
    """The words before the first hit, the hit, and what follows, on one line and without marks."""
    line = " ".join(snippet.split())
    before, begun, rest = line.partition(HIT_BEGINS)
    if not begun:
        return line, "", ""
    found, _, rest = rest.partition(HIT_ENDS)
    return before, found, rest.replace(HIT_BEGINS, "").replace(HIT_ENDS, "")
