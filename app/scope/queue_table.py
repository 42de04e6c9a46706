"""The queue: every request that is not finished, what it does or why it waits in a sentence, and a way to hurry it.

A priority is changed by dragging a waiting row to another place, with the keys − and +, or in the field below the
table. It counts from the next step on; until then the column shows it as ``→ 2``.
"""

from __future__ import annotations

from PySide6.QtCore import QModelIndex, QSignalBlocker, Qt, Signal
from PySide6.QtGui import QKeySequence, QShortcut
from PySide6.QtWidgets import QAbstractItemView, QBoxLayout, QHBoxLayout, QSpinBox, QWidget

from app.scope.panel import START_SOMETHING, ScopePanel, ScopeSource
from app.scope.priorities import MOST, Standing, priority_between
from app.scope.queue_model import BLOCKS, PRIORITY, STATE, TOKENS, USER, WAIT, WHY, QueueModel
from app.scope.reasons import MOST_LISTED, WAITING_PHASES, Queue, QueueRow, queue_of
from app.scope.tables import TopDelegate, WrappedRows, make_table, stacked
from app.scope.waits import wait_words
from app.selection import Selection
from app.theme import SPACING, Theme
from app.translation import tr
from app.widgets import label
from engine.config import SchedulerConfig
from engine.request import request_name

_WIDTHS = (58, 100, 84, 48, 40, 64, 62)
SWATCH_PIXELS = 26
"""A state that is shown by its swatch alone."""
WHY_PIXELS = 210
"""The reasons are what the table is for: where they would get less, other columns go."""
_FIRST_TO_GO = (USER, BLOCKS, TOKENS, PRIORITY, WAIT)
FOOT_PIXELS = 420
"""From here on the field for the priority is beside the sentence, else below it."""
PATIENCE = 50
"""Steps after which a priority is no longer expected to come: the engine may be some ahead of what is shown."""


class QueuePanel(ScopePanel):
    """The table, and under it the whole sentence of the selected request, or of the head of the queue."""

    empty_text = tr("No requests. {start_something}, and see here why each one waits.", start_something=START_SOMETHING)
    refresh_seconds = 0.2
    priority_wanted = Signal(int, int)
    """(request, the priority that it is to have)."""

    def __init__(self, source: ScopeSource, theme: Theme, selection: Selection, parent: QWidget | None = None) -> None:
        self.model = QueueModel(theme)
        self.table = make_table(tr("Queue: requests and why they wait"))
        self.table.setAccessibleDescription(tr("Minus and plus change the priority of the selected request"))
        self.sentence = label("", "muted")
        self.sentence.setWordWrap(True)
        self.sentence.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.sentence.setAccessibleName(tr("Why the selected request waits"))
        self.priority = _PriorityField()
        super().__init__(tr("Queue"), source, theme, selection, self._layout(), parent)
        self.model.setParent(self)
        self._build_table()
        self.priority.valueChanged.connect(self._priority_typed)
        self._asked: dict[int, int] = {}
        """For each priority that is pending, the step after which it was asked for."""
        self._summary = self.add_figure()
        self._following = False

    def _layout(self) -> QWidget:
        self._priority_title = label(tr("priority"), "muted")
        field = QHBoxLayout()
        field.setSpacing(SPACING)
        field.addWidget(self._priority_title)
        field.addWidget(self.priority)
        field.addStretch(1)
        foot = QWidget()
        self._foot = QBoxLayout(QBoxLayout.Direction.LeftToRight, foot)
        self._foot.setContentsMargins(0, 0, 0, 0)
        self._foot.setSpacing(SPACING)
        self._foot.addWidget(self.sentence, 1)
        self._foot.addLayout(field)
        return stacked(self.table, foot)

    def _build_table(self) -> None:
        table = self.table
        table.setModel(self.model)
        table.setWordWrap(True)
        table.setItemDelegate(TopDelegate(table))
        self._wrapped = WrappedRows(table, WHY)
        table.setDragDropMode(QAbstractItemView.DragDropMode.InternalMove)
        table.setDragDropOverwriteMode(False)
        table.setDropIndicatorShown(True)
        # Whether the bar is there must not depend on the rows, whose heights depend on the room beside it.
        table.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOn)
        table.selectionModel().currentRowChanged.connect(self._row_chosen)
        table.resized.connect(self._fit)
        table.verticalScrollBar().valueChanged.connect(self._fit_rows)
        self.model.dropped.connect(self._row_dropped)
        for keys, change in ((("+", "="), 1), (("-",), -1)):
            for key in keys:
                shortcut = QShortcut(QKeySequence(key), table)
                shortcut.setContext(Qt.ShortcutContext.WidgetShortcut)
                shortcut.activated.connect(lambda change=change: self._change_priority(change))

    # Showing -----------------------------------------------------------------------------------------------------

    def has_content(self) -> bool:
        return bool(self.source.state.requests)

    def refresh(self) -> None:
        source, history = self.source, self.source.history
        queue = queue_of(
            source.state,
            self._scheduler(),
            history.ledger,
            history.line.rates(source.now),
            last_step=source.last_step,
            chosen=self.selection.request_id,
        )
        self._forget_pending()
        self.model.movable = self.locked() == "" and source.state.order == "priority"
        self._following = True  # a row that goes moves the view's current row: that is no choice of the user's
        self.model.show_rows(queue.rows)
        self._following = False
        self._fit()
        self._follow_selection()
        self._summary.say(self._counts(queue))
        self._say_about(queue.rows)

    def _scheduler(self) -> SchedulerConfig:
        """The knobs at the shown step."""
        return self.source.state.scheduler or self.source.scheduler

    def _counts(self, queue: Queue) -> str:
        shown = self.source.live or self.source.moment is not None
        when = "" if shown else tr("when the engine ended: ")
        swapped = tr(" ({swapped:,} swapped)", swapped=queue.swapped) if queue.swapped else ""
        part = (
            tr(", the first {most_listed:,} listed", most_listed=MOST_LISTED)
            if len(queue.rows) < queue.running + queue.waiting
            else ""
        )
        return tr(
            "{when}{running:,} running · {waiting:,} waiting{swapped}{part}",
            when=when,
            running=queue.running,
            waiting=queue.waiting,
            swapped=swapped,
            part=part,
        )

    def _say_about(self, rows: list[QueueRow]) -> None:
        """The line below the table, for the selected request or else the head of the queue."""
        chosen = next((row for row in rows if row.request_id == self.selection.request_id), None)
        shown = chosen or next((row for row in rows if row.phase in WAITING_PHASES), None)
        self.sentence.setText(self._sentence(shown, chosen is not None) if shown is not None else "")
        self._priority_title.setVisible(chosen is not None)
        self.priority.setVisible(chosen is not None)
        if chosen is not None:
            self.priority.show_value(self.model.pending.get(chosen.request_id, chosen.priority))
            self.priority.setEnabled(not self.locked())
            self.priority.setToolTip(self.locked() or tr("Lower runs first; it counts from the next step on"))

    def _sentence(self, row: QueueRow, chosen: bool) -> str:
        parts = [tr("Request {request_name}: {why}", request_name=request_name(row.request_id), why=row.why)]
        if row.phase in WAITING_PHASES:
            parts.append(tr("Expected wait: {wait_words}.", wait_words=wait_words(row.wait)))
        order = self.source.state.order or "fcfs"
        if chosen and self.locked():
            parts.append(self.locked())
        elif chosen and order != "priority" and (row.priority or row.request_id in self.model.pending):
            parts.append(tr("Its priority counts when the order is priority; it is {order}.", order=order))
        return " ".join(parts)

    # Priorities --------------------------------------------------------------------------------------------------

    def locked(self) -> str:
        """Why priorities cannot be changed; empty: they can."""
        if self.source.moment is not None:
            return tr("Priorities can be changed when the newest step is shown again.")
        return "" if self.source.live else tr("Priorities can be changed while an engine runs.")

    def _forget_pending(self) -> None:
        """What has taken effect, or belongs to a request that is gone."""
        state, pending = self.source.live_state, self.model.pending
        for request_id in list(pending):
            request = state.requests.get(request_id)
            old = not 0 <= state.step - self._asked[request_id] <= PATIENCE
            if request is None or request.priority == pending[request_id] or old:
                del pending[request_id], self._asked[request_id]

    def _want(self, request_id: int, priority: int) -> None:
        request = self.source.state.requests.get(request_id)
        if self.locked() or request is None:
            return
        priority = max(-MOST, min(MOST, priority))
        if priority != self.model.pending.get(request_id, request.priority):
            self.model.pending[request_id] = priority
            self._asked[request_id] = self.source.state.step
            self.priority_wanted.emit(request_id, priority)
        self.refresh()

    def _change_priority(self, change: int) -> None:
        place = self.table.currentIndex()
        if place.isValid():
            row = self.model.rows[place.row()]
            self._want(row.request_id, self.model.pending.get(row.request_id, row.priority) + change)

    def _priority_typed(self, value: int) -> None:
        if self.selection.request_id is not None:
            self._want(self.selection.request_id, value)

    def _row_dropped(self, request_id: int, place: int) -> None:
        rows, start = self.model.rows, self.model.place_of(request_id)
        if start is None or place in (start, start + 1):
            return
        waiting = [row for row in rows if row.phase in WAITING_PHASES and row.request_id != request_id]
        before = {row.request_id for row in rows[:place]}
        above = [row for row in waiting if row.request_id in before]
        below = [row for row in waiting if row.request_id not in before]
        priority = priority_between(
            self._standing(rows[start]),
            self._standing(above[-1]) if above else None,
            self._standing(below[0]) if below else None,
            self._scheduler().ageing,
            upwards=place < start,
        )
        self._want(request_id, priority)

    def _standing(self, row: QueueRow) -> Standing:
        return Standing(self.model.pending.get(row.request_id, row.priority), row.arrival, row.request_id)

    # Fitting -----------------------------------------------------------------------------------------------------

    def _fit(self) -> None:
        direction = QBoxLayout.Direction
        self._foot.setDirection(direction.LeftToRight if self.width() >= FOOT_PIXELS else direction.TopToBottom)
        self._fit_columns()
        self._fit_rows()

    def _fit_columns(self) -> None:
        """Columns that say nothing, or for which there is no room, leave it to the reasons."""
        rows = self.model.rows
        hidden = set()
        if self.source.state.order != "priority" and not any(row.priority for row in rows):
            hidden.add(PRIORITY)
        if not any(row.user for row in rows):
            hidden.add(USER)
        if not any(row.phase in WAITING_PHASES for row in rows):
            hidden.add(WAIT)
        room = self.table.viewport().width() - sum(w for i, w in enumerate(_WIDTHS) if i not in hidden)
        for column in _FIRST_TO_GO:
            if room < WHY_PIXELS and column not in hidden:
                hidden.add(column)
                room += _WIDTHS[column]
        self.model.set_brief(room < WHY_PIXELS)
        for column, width in enumerate(_WIDTHS):
            width = SWATCH_PIXELS if column == STATE and self.model.brief else width
            if self.table.columnWidth(column) != width:
                self.table.setColumnWidth(column, width)
        for column in range(TOKENS, WHY):
            self.table.setColumnHidden(column, column in hidden)

    def _fit_rows(self) -> None:
        """A waiting request's row is as high as its whole reason needs; a running one's is a line."""
        self._wrapped.fit([row.why if row.phase in WAITING_PHASES else "" for row in self.model.rows])

    # Selecting ---------------------------------------------------------------------------------------------------

    def _follow_selection(self) -> None:
        place = self.model.place_of(self.selection.request_id)
        current = self.table.currentIndex()
        if (current.row() if current.isValid() else None) == place:
            return
        self._following = True
        if place is None:
            self.table.setCurrentIndex(QModelIndex())
        else:
            self.table.setCurrentIndex(self.model.index(place, max(0, current.column())))
            self.table.scrollTo(self.model.index(place, 0), QAbstractItemView.ScrollHint.EnsureVisible)
        self._following = False

    def _row_chosen(self, current: QModelIndex, _previous: QModelIndex) -> None:
        if not self._following and current.isValid():
            self.selection.select(self.model.rows[current.row()].request_id)


class _PriorityField(QSpinBox):
    """Takes a number when it is typed to its end, and steps with the arrow keys and the wheel once it has the focus."""

    def __init__(self) -> None:
        super().__init__()
        self.setRange(-MOST, MOST)
        self.setKeyboardTracking(False)
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setFixedWidth(64)
        self.setAccessibleName(tr("Priority of the selected request"))
        self.hide()

    def show_value(self, value: int) -> None:
        """What is being typed is not taken away."""
        if value != self.value() and not self.lineEdit().isModified():
            blocker = QSignalBlocker(self)
            self.setValue(value)
            blocker.unblock()

    def wheelEvent(self, event) -> None:
        if self.hasFocus():
            super().wheelEvent(event)
        else:
            event.ignore()
