"""The fields of a load by its numbers: how many requests, how long, of which priorities and users, what they share."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QVBoxLayout, QWidget

from app.lab.fields import form_layout, pair, whole
from app.lab.fold import Fold
from app.lab.lengths_form import LengthsForm
from app.lab.mix_form import PriorityMix, UserMix
from app.theme import SPACING, Theme
from app.translation import tr
from app.words import count
from engine.workload import SharedPrefix, WorkloadShape

MOST_REQUESTS = 100_000


class RangesForm(QWidget):
    """Makes a :class:`engine.workload.WorkloadShape`, but for its arrivals. ``changed`` whenever a value does."""

    changed = Signal()

    def __init__(self, theme: Theme, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.requests = whole(tr("Requests"), 1, MOST_REQUESTS, 16)
        self.prompt = LengthsForm("prompt", 32, 128, theme)
        self.output = LengthsForm("answer", 16, 64, theme)
        self.priorities = PriorityMix()
        self.users = UserMix()
        self.prefix_tokens = whole(tr("Tokens that prompts begin with alike"), 0, 1_000_000, 0, lowest=tr("none"))
        self.prefix_groups = whole(tr("Groups that begin alike"), 1, 10_000, 1, prefix="groups ")
        self.seed = whole(tr("Seed"), 0, 1_000_000, 0)
        self.mixes = Fold(tr("Mixes"), self._mixes())
        self._lay_out()
        for box in (self.requests, self.prefix_tokens, self.prefix_groups, self.seed):
            box.valueChanged.connect(lambda _value: self._emit())
        for part in (self.prompt, self.output, self.priorities, self.users):
            part.changed.connect(self._emit)
        self._emit()

    def _lay_out(self) -> None:
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(SPACING // 2)
        usual = QWidget()
        form = form_layout(usual)
        form.addRow(tr("requests"), self.requests)
        form.addRow(tr("prompts"), self.prompt)
        form.addRow(tr("answers"), self.output)
        column.addWidget(usual)
        column.addWidget(self.mixes)

    def _mixes(self) -> QWidget:
        content = QWidget()
        form = form_layout(content)
        form.addRow(tr("priorities"), self.priorities)
        form.addRow(tr("users"), self.users)
        shared = pair(self.prefix_tokens, self.prefix_groups, "")
        shared.setToolTip(tr("Tokens before the drawn prompt length that the requests of a group have in common"))
        form.addRow(tr("shared"), shared)
        form.addRow(tr("seed"), self.seed)
        return content

    def shape(self) -> WorkloadShape:
        """Raises :class:`engine.workload.ShapeError` where the fields make none."""
        tokens = self.prefix_tokens.value()
        return WorkloadShape(
            requests=self.requests.value(),
            prompt_tokens=self.prompt.lengths(),
            output_tokens=self.output.lengths(),
            priorities=self.priorities.shares(),
            users=self.users.shares(),
            shared_prefix=SharedPrefix(tokens, self.prefix_groups.value()) if tokens else None,
            seed=self.seed.value(),
        )

    def _emit(self) -> None:
        tokens = self.prefix_tokens.value()
        self.prefix_groups.setEnabled(tokens > 0)
        parts = [
            tr("priority {mix}", mix=mix) if (mix := self.priorities.summary()) else "",
            self.users.summary(),
            tr("{tokens} shared", tokens=count(tokens, "token")) if tokens else "",
            tr("seed {seed:,}", seed=self.seed.value()) if self.seed.value() else "",
        ]
        self.mixes.say(" · ".join(filter(None, parts)) or tr("priorities, users, shared beginnings"))
        self.changed.emit()
