"""The line above system prompt and sampling: the preset in force, others to choose, own ones to save and delete."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QAction, QKeyEvent
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QMenu, QSizePolicy, QToolButton, QVBoxLayout, QWidget

from app.chat.conversation import ChatError
from app.chat.elided import ElidedLabel
from app.chat.preset import Preset, PresetKind
from app.chat.session import ChatSession
from app.chat.text_pane import plain_tip
from app.theme import SPACING
from app.translation import tr
from app.widgets import button, label, set_role

UNDO_SECONDS = 10.0


class PresetBar(QWidget):
    chosen = Signal(object)
    """A :class:`Preset` is to be put in force."""

    def __init__(
        self,
        kind: PresetKind,
        title: str,
        session: ChatSession,
        current: Callable[[str], Preset],
        matches: Callable[[Preset], bool],
        parent: QWidget | None = None,
    ) -> None:
        """``current``: makes a preset of that name from what is in force; ``matches``: whether a preset is that."""
        super().__init__(parent)
        self._kind: PresetKind = kind
        self._session = session
        self._current = current
        self._matches = matches
        self._undo: Callable[[], None] | None = None
        self.button = QToolButton()
        self.button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        self.button.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        self.button.setAccessibleName(tr("Preset: {title}", title=title))
        self.menu = QMenu(self)
        self.menu.setToolTipsVisible(True)
        self.menu.aboutToShow.connect(self._fill_menu)
        self.button.setMenu(self.menu)
        self._make_name_row()
        self._make_notice()
        head = QHBoxLayout()
        head.setSpacing(SPACING)
        head.addWidget(label(title, "title"))
        head.addStretch(1)
        head.addWidget(self.button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        column.addLayout(head)
        column.addWidget(self._name_row)
        column.addWidget(self._notice)

    def _make_name_row(self) -> None:
        self.name_edit = QLineEdit()
        self.name_edit.setPlaceholderText(tr("Name of the preset"))
        self.name_edit.setAccessibleName(tr("Name of the preset"))
        self.name_edit.setMaxLength(60)
        self.name_edit.returnPressed.connect(self.save)
        self.name_edit.installEventFilter(self)
        self.save_button = button(tr("Save"))
        self.save_button.clicked.connect(self.save)
        cancel = button(tr("Cancel"), "flat")
        cancel.clicked.connect(self._end_naming)
        self._name_row = _row(self.name_edit, self.save_button, cancel)

    def _make_notice(self) -> None:
        self._words = ElidedLabel("muted")
        self.undo_button = button(tr("Undo"), "flat")
        self.undo_button.clicked.connect(self.undo)
        self._notice = _row(self._words, self.undo_button)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self.say)

    # What is in force ------------------------------------------------------------------------------------------------

    @property
    def preset(self) -> Preset | None:
        """The preset that is in force; None: values of one's own."""
        return next((each for each in self._session.presets(self._kind) if self._matches(each)), None)

    def refresh(self) -> None:
        """What is in force may be another."""
        name = self.preset
        words = tr("Own values") if name is None else shown_name(name)
        self.button.setText(f"{self.fontMetrics().elidedText(words, Qt.TextElideMode.ElideRight, 160)} ▾")
        self.button.setToolTip(plain_tip(words))
        self.button.setAccessibleDescription(words)

    @property
    def notice(self) -> str:
        return "" if self._notice.isHidden() else self._words.text()

    def say(self, text: str = "", undo: Callable[[], None] | None = None, *, is_error: bool = False) -> None:
        """A line under the title, for a while; empty: none."""
        self._undo = undo
        set_role(self._words, "error" if is_error else "muted")
        self._words.setText(text)
        self.undo_button.setVisible(undo is not None)
        self._notice.setVisible(bool(text))
        if text:
            self._timer.start(round(UNDO_SECONDS * 1000))
        else:
            self._timer.stop()

    def undo(self) -> None:
        undo = self._undo
        self.say()
        if undo is not None:
            self._attempt(undo)

    # The menu --------------------------------------------------------------------------------------------------------

    def _fill_menu(self) -> None:
        self.menu.clear()
        presets, in_force = self._session.presets(self._kind), self.preset
        for number, each in enumerate(presets):
            if number and not each.built_in and presets[number - 1].built_in:
                self.menu.addSeparator()
            self._add(each, each == in_force)
        self.menu.addSeparator()
        self.menu.addAction(tr("Save as…"), self._begin_naming)
        if in_force is not None and not in_force.built_in:
            self.menu.addAction(
                tr("Delete “{name}”", name=_escaped(in_force.name)), lambda preset=in_force: self.delete(preset)
            )

    def _add(self, preset: Preset, in_force: bool) -> QAction:
        action = self.menu.addAction(_escaped(shown_name(preset)), lambda: self.chosen.emit(preset))
        action.setCheckable(True)
        action.setChecked(in_force)
        action.setToolTip(plain_tip(preset.text[:400] or described(preset)))
        return action

    # Saving and deleting ---------------------------------------------------------------------------------------------

    def _begin_naming(self) -> None:
        in_force = self.preset
        self.name_edit.setText("" if in_force is None or in_force.built_in else in_force.name)
        self._name_row.show()
        self.name_edit.setFocus()
        self.name_edit.selectAll()

    def _end_naming(self) -> None:
        self._name_row.hide()
        self.button.setFocus()

    def save(self) -> None:
        """Keeps what is in force under the name that is typed; a preset of one's own of that name can be had back."""
        preset = self._current(" ".join(self.name_edit.text().split()))
        before = next((each for each in self._own() if each.name == preset.name), None)
        if not self._attempt(lambda: self._session.save_preset(preset)):
            return
        self._end_naming()
        if before is None:
            undo = lambda: self._session.delete_preset(preset)  # noqa: E731
            self.say(tr("Saved “{name}”.", name=preset.name), undo)
        elif before != preset:
            undo = lambda: self._session.save_preset(before)  # noqa: E731
            self.say(tr("“{name}” has other values.", name=preset.name), undo)
        self.refresh()

    def delete(self, preset: Preset) -> None:
        """The chats that use it keep its values."""
        if self._attempt(lambda: self._session.delete_preset(preset)):
            self.say(tr("Deleted “{name}”.", name=preset.name), lambda: self._session.save_preset(preset))

    def _own(self) -> list[Preset]:
        return [each for each in self._session.presets(self._kind) if not each.built_in]

    def _attempt(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except ChatError as error:
            self.say(str(error), is_error=True)
            return False
        self.refresh()
        return True

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Esc ends the naming, not an answer."""
        wanted = (QEvent.Type.ShortcutOverride, QEvent.Type.KeyPress)
        if watched is not self.name_edit or event.type() not in wanted:
            return False
        assert isinstance(event, QKeyEvent)
        if event.key() != Qt.Key.Key_Escape:
            return False
        event.accept()
        if event.type() == QEvent.Type.KeyPress:
            self._end_naming()
        return True


def shown_name(preset: Preset) -> str:
    return tr(preset.name) if preset.built_in else preset.name


def described(preset: Preset) -> str:
    """A sampling preset in a few words: what differs from plain greedy decoding."""
    params = preset.params
    if params is None:
        return tr("No system prompt")
    parts = [tr("temperature {value:g}", value=params.temperature)]
    if params.top_p < 1.0:
        parts.append(tr("top-p {value:g}", value=params.top_p))
    if params.top_k:
        parts.append(tr("top-k {value:,}", value=params.top_k))
    if params.min_p:
        parts.append(tr("min-p {value:g}", value=params.min_p))
    if params.repetition_penalty != 1.0:
        parts.append(tr("repetition penalty {value:g}", value=params.repetition_penalty))
    return ", ".join(parts)


def _escaped(name: str) -> str:
    """For a menu, where a single ampersand is no character."""
    return name.replace("&", "&&")


def _row(*widgets: QWidget) -> QWidget:
    """The first takes the room that is left; hidden until it is needed."""
    holder = QWidget()
    row = QHBoxLayout(holder)
    row.setContentsMargins(0, 0, 0, 0)
    row.setSpacing(SPACING)
    for number, each in enumerate(widgets):
        row.addWidget(each, 0 if number else 1)
    holder.hide()
    return holder
